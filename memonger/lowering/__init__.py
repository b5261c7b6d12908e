"""From a model to what will really run on a device, with every node named, every size known, and measured workspace."""
