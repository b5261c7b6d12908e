"""memonger plans the memory of a neural network before it runs."""
