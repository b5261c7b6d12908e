"""Models as onnx-ir has them: values, names, tensors; operator facts, the emitter, rewriting, files of models."""
