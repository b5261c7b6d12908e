"""What onnxruntime's kernels on the CPU pack of a constant input when a session is made, and into how many bytes.

A rule for each kernel, from the input's shape, as of onnxruntime 1.32 (``PrePack`` of the kernels,
``MlasGemmPackBSize`` of ``mlas/lib/qgemm.h`` and ``sgemm.cpp``, ``QNBitGemmPackQuantBDataSize`` of
``sqnbitgemm_kernel_avx_common.h``). Sizes are those of x86. Elsewhere some
kernels pack otherwise, or into fewer bytes: what has another size than is said here is packed by each session.
"""

from collections.abc import Callable, Mapping

import onnx_ir as ir

from memonger.ir.operators import operator_name

_PANEL = 16  # columns of a panel of MLAS: mlasi.h, MLAS_SGEMM_STRIDEN_THREAD_ALIGN
_DEPTH = 4  # what the rows of an integer product are rounded to
_SUMS = 4  # bytes beside each column of an integer product: its sum
_BLOCKS = {2: (32, 64, 128), 4: (16, 32, 64, 128, 256), 8: (16, 32, 64, 128, 256)}
"""Of integers of so many bits which lengths of blocks kernels know."""
_SLACK = 2 * 63  # bytes by which the parts of a packed product of blocks are aligned
_INT8 = 4  # the accuracy level at which blocks are multiplied as integers
_MS = "com.microsoft::"

_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8)


def packing(node: ir.Node, index: int) -> tuple[int, ...]:
    """Bytes of the buffers that a node's kernel packs a constant input into; none where it isn't known to pack it."""
    rule, value = _RULES.get((operator_name(node), index)), node.inputs[index]
    tensor = None if value is None else value.const_value
    if rule is None or value is None or tensor is None or value.is_graph_input():
        return ()
    shape = tuple(int(dim) for dim in tensor.shape.numpy())
    return rule(node, tensor.dtype, shape) if all(shape) else ()


def is_read_once(node: ir.Node, index: int) -> bool:
    """Whether a node's kernel reads an input when a session is made, and never again: it has it elsewhere by then."""
    if operator_name(node) != f"{_MS}MatMulNBits" or index not in (2, 3, 5):
        return False
    return is_widened(node, index) or (index != 5 and bool(packing(node, 1)) and _is_int8(node))


def is_widened(node: ir.Node, index: int) -> bool:
    """Whether a node's kernel makes a float32 copy of a float16 input for itself when a session is made."""
    value = node.inputs[index] if operator_name(node) == f"{_MS}MatMulNBits" and index in (2, 5) else None
    return value is not None and value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT16


def number(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute of a node, which may be a stranger's."""
    attribute = node.attributes.get(name)
    if attribute is None or attribute.is_ref() or attribute.type != ir.AttributeType.INT:
        return default
    return attribute.as_int()


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _float_panels(depth: int, width: int) -> int:
    return _up(width, _PANEL) * depth * 4


def _integer_panels(depth: int, width: int) -> int:
    return _up(width, _PANEL) * (_up(depth, _DEPTH) + _SUMS)


def _product(node: ir.Node, dtype: ir.DataType, shape: tuple[int, ...]) -> tuple[int, ...]:
    if dtype != ir.DataType.FLOAT or len(shape) != 2:
        return ()
    depth, width = reversed(shape) if number(node, "transB", 0) else shape
    return (_float_panels(depth, width),)


def _integer_product(node: ir.Node, dtype: ir.DataType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """None for two signed operands: x86 has no kernel that packs for these."""
    left = node.inputs[0]
    if dtype not in _INTEGERS or len(shape) != 2 or left is None or left.dtype == ir.DataType.INT8:
        return ()
    depth, width = reversed(shape) if number(node, "transB", 0) else shape
    return (_integer_panels(depth, width),)


def _is_int8(node: ir.Node) -> bool:
    return number(node, "accuracy_level", 0) == _INT8


def _product_of_blocks(node: ir.Node, dtype: ir.DataType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks of integers; where they are multiplied as such, a scale and a sum of each beside them."""
    bits, width = number(node, "bits", 4), number(node, "block_size", 0)
    zeros = node.inputs[3] if len(node.inputs) > 3 else None
    is_ordered = len(node.inputs) > 4 and node.inputs[4] is not None
    if dtype != ir.DataType.UINT8 or len(shape) != 3 or width not in _BLOCKS.get(bits, ()) or is_ordered:
        return ()
    if shape[2] != width * bits // 8 or not (_is_int8(node) or bits == 4):
        return ()
    if zeros is not None and zeros.dtype != ir.DataType.UINT8:
        return ()
    columns, blocks, nbytes = shape
    if not _is_int8(node):
        return (columns * blocks * nbytes,)
    blocks = _up(blocks, 4) if bits == 2 else blocks
    return (columns * blocks * (nbytes + 4) + _up(columns, _PANEL) * blocks * 4 + _SLACK,)


def _heads(node: ir.Node, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Of queries, keys and values how many heads there are, and how wide each is; nothing where that isn't known."""
    heads, given = number(node, "num_heads", 0), node.attributes.get("qkv_hidden_sizes")
    if len(shape) != 2 or heads <= 0:
        return []
    widths = [shape[1] // 3] * 3
    if given is not None:
        if given.is_ref() or given.type != ir.AttributeType.INTS:
            return []
        widths = [int(width) for width in given.as_ints()]
    if len(widths) != 3 or sum(widths) != shape[1] or any(width <= 0 or width % heads for width in widths):
        return []
    return [(heads, width // heads) for width in widths]


def _attention(node: ir.Node, dtype: ir.DataType, shape: tuple[int, ...]) -> tuple[int, ...]:
    if dtype != ir.DataType.FLOAT:
        return ()
    return tuple(heads * _float_panels(shape[0], width) for heads, width in _heads(node, shape))


def _integer_attention(node: ir.Node, dtype: ir.DataType, shape: tuple[int, ...]) -> tuple[int, ...]:
    parts = _heads(node, shape) if dtype in _INTEGERS else []
    size = sum(heads * _integer_panels(shape[0], width) for heads, width in parts)
    return (size,) if size else ()


def _transposed_convolution(node: ir.Node, dtype: ir.DataType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Each group's filters transposed, where they are a matrix and no vector."""
    if dtype != ir.DataType.FLOAT or len(shape) < 3:
        return ()
    size, rows = 4, shape[0] // max(1, number(node, "group", 1))
    for dim in shape:
        size *= dim
    return (size,) if rows > 1 and size // 4 // shape[0] > 1 else ()


def _recurrent(gates: tuple[int, ...], dtype: ir.DataType, shape: tuple[int, ...], all_gates: int) -> tuple[int, ...]:
    """A buffer for each group of gates, with all directions in it."""
    if dtype != ir.DataType.FLOAT or len(shape) != 3 or shape[1] % all_gates:
        return ()
    return tuple(shape[0] * _float_panels(shape[2], shape[1] // all_gates * count) for count in gates)


_RULES: Mapping[tuple[str, int], Callable[[ir.Node, ir.DataType, tuple[int, ...]], tuple[int, ...]]] = {
    **{(name, 1): _product for name in ("Gemm", "MatMul", f"{_MS}FusedGemm", f"{_MS}FusedMatMul")},
    **{(f"{name}", 1): _integer_product for name in ("MatMulInteger", f"{_MS}DynamicQuantizeMatMul")},
    (f"{_MS}MatMulIntegerToFloat", 1): _integer_product,
    ("QLinearMatMul", 3): _integer_product,
    (f"{_MS}QGemm", 3): _integer_product,
    (f"{_MS}MatMulNBits", 1): _product_of_blocks,
    (f"{_MS}Attention", 1): _attention,
    (f"{_MS}QAttention", 1): _integer_attention,
    ("ConvTranspose", 1): _transposed_convolution,
    ("LSTM", 1): lambda _, dtype, shape: _recurrent((4,), dtype, shape, 4),
    ("LSTM", 2): lambda _, dtype, shape: _recurrent((4,), dtype, shape, 4),
    ("GRU", 1): lambda _, dtype, shape: _recurrent((3,), dtype, shape, 3),
    ("GRU", 2): lambda _, dtype, shape: _recurrent((2, 1), dtype, shape, 3),
}
