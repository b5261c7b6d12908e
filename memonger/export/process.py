"""process: what a server's process takes beside the model, for schedulers that ask how much memory to set aside."""

from memonger.export.package import Estimate
from memonger.units import MiB

PROCESS_BYTES = 512 * MiB  # Python, numpy, onnxruntime and a server: measured below that (benchmarks/export.txt)


def request_bytes(estimate: Estimate) -> int:
    """What a process with one instance takes once it runs, in whole MiB."""
    return _whole(estimate.instance_bytes + PROCESS_BYTES)


def limit_bytes(estimate: Estimate) -> int:
    """What it takes at most: while it loads, the file and copies of the weights are there as well."""
    return _whole(request_bytes(estimate) + 2 * estimate.parameters)


def _whole(size: int) -> int:
    return -(-size // MiB) * MiB
