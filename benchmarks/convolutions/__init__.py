"""Convolutions and their gradients in standard ONNX operators, measured against PyTorch's own kernels."""
