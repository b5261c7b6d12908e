"""The shapes of a model's values: rules, their evaluation at any sizes, ranges of sizes, ONNX's own inference."""
