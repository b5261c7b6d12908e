"""scratch: what kernels take beside their outputs, measured in one run of a portable plan."""

from collections.abc import Mapping

import onnx_ir as ir

from memonger.device import CPU
from memonger.runtime import feeds, module, ort, profile
from memonger.scratch import ScratchFolder


def measured(model: ir.Model, threads: int) -> Mapping[str, int] | None:
    """Bytes of scratch by node, where above zero.

    Returns: None where there is no onnxruntime, or it can't run the model on random inputs.
    """
    if not module.is_available():
        return None
    folder = ScratchFolder()
    try:
        return _run(model, threads, folder)
    finally:
        folder.remove()


def _run(model: ir.Model, threads: int, folder: ScratchFolder) -> Mapping[str, int] | None:
    statistics = folder.path / "memory.csv"
    options = ort.Options(
        in_order=True,
        threads=threads,
        pattern=False,  # the statistics are exact only without
        lend_weights=True,
        entries={"session.collect_node_memory_stats_to_file": str(statistics)},
    )
    try:
        session = ort.make_session(model, CPU, options)
        session.run(None, feeds.random_feeds(feeds.inputs_of(model.graph)))
    except Exception:  # pybind exceptions share no base class; what can't be measured is said to be unknown
        return None
    return profile.read_workspace(statistics) if statistics.is_file() else {}
