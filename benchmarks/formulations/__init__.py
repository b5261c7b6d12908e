"""The fastest way to write each gradient in standard ONNX operators, against PyTorch eager's own kernels."""
