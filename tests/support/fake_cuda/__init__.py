"""A stand-in for CUDA: onnxruntime's CUDA provider, and what calls the driver itself, run on a machine without a GPU.

Device memory is host memory that is counted, limited and told apart from the host's own; copies, fills and graphs of
them are real, and refused in the wrong direction. Kernels, products and convolutions do nothing. So everything the host
does (placement, Memcpy nodes, order, binding, allocation, graph capture, errors) is onnxruntime's own behaviour, while
computed values are whatever the memory held: a test on it may look at addresses, sizes and errors, never at numbers.

    python -m tests.support.fake_cuda [--site DIR] COMMAND ...

runs a command on it, with ``MEMONGER_FAKE_CUDA=1`` in its environment. See `build` and the C sources beside it.
"""
