"""From a plan to what people and programs read."""
