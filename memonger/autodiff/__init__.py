"""From a forward model to a training model: forward and backward pass, loss and updates in one graph."""
