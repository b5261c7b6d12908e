"""Runs plans on onnxruntime."""
