"""Models in loops: plain ONNX files whose nodes run on slices of an axis, one after the other, on any onnxruntime."""
