"""What onnxruntime does with CUDA: the checks of ``python -m benchmarks.cuda_facts``."""
