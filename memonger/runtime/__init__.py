"""From a plan to results: sessions and training on onnxruntime."""
