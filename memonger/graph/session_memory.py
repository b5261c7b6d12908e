"""About what a session takes of the process's memory beside the tensors: onnxruntime's nodes and kernels, and Python's.

No part of a plan decides on it, and it isn't known to the byte: the C library and Python keep pieces of what loading
took. So it is no part of a plan's total, which is exact; it stands beside it.

Fitted to the growth of processes with one session each (onnxruntime 1.31.1, Python 3.11, Linux), of the eight networks
of ``benchmarks.peers``: training 766 to 12,918 nodes, 16 to 114 MiB; inference 13 to 353 nodes, 2 to 9 MiB. In
inference a node is a whole fused layer, whose kernel keeps more. Total and this together were within 5 % of each.
Left out is the check of the first run's order (``check_order``), whose profile keeps 2.5 KB a node more.
"""

from memonger.units import KiB, MiB

_TRAINING = (10 * MiB, 8.3 * KiB)
_INFERENCE = (1.5 * MiB, 20 * KiB)


def session_bytes(nodes: int, is_training: bool) -> int:
    """About what a process grows by with a loaded session on the CPU, less the bytes of tensors.

    Args:
        nodes: Of the plan, recomputations included.
        is_training: Whether it is a training session, which has two onnxruntime sessions.
    """
    base, each = _TRAINING if is_training else _INFERENCE
    return round(base + each * nodes)
