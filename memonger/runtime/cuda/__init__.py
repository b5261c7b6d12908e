"""CUDA devices: what is missing where there is none, their memory, and what onnxruntime allocates there."""
