"""Plans beside what a user would pick instead, on a GPU: ``python -m benchmarks.gpu [--minutes N] [--resume]``.

Writes gpu.txt, .json and _<kind>.png. Inference: stock onnxruntime with its defaults and with memory as requested,
planned, planned with CUDA graphs, PyTorch eager and compiled. Training: PyTorch eager, with checkpoints, compiled, and
in three budgets; memonger with nothing recomputed and in three budgets. Largest: the largest batch that ``--memory``
(12 GB, the context included) trains. Exports and plans stay in ``--folder``, so that another call with ``--resume``
goes on where this one stopped.
"""

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.machine import accelerator, machine
from benchmarks.side_by_side import program, results
from benchmarks.side_by_side.devices import Device, used_bytes
from memonger.cli.worker import Worker, WorkerError

HERE = Path(__file__).parent
DEFAULTS = program.Defaults(("inference", "training", "largest"), "12GB", 240.0)
PACKAGES = ("onnxruntime-gpu", "torch", "onnx", "onnx-ir", "numpy")


class Missing(Exception):  # noqa: N818  (what the machine lacks)
    """The GPU can't be measured here; the text says why, a line for each thing missing."""


def examined(name: str) -> Device:
    """The GPU with all that is needed there, and what a bare context takes.

    Raises:
        Missing: something isn't.
    """
    device = Device(name, ())
    with ExitStack() as stack:
        errors = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "probe.err"
        process = stack.enter_context(Worker("benchmarks.side_by_side.probe", [name], errors))
        try:
            said = process.read(120)
            if said["missing"]:
                raise Missing("\n".join(said["missing"]))
            before = used_bytes(device.index)
            process.ask("", 60)
        except WorkerError as error:
            raise Missing(f"{name} can't be used: {error}") from error
        context = used_bytes(device.index) - before
    head = (
        "On a GPU, beside what a user would pick instead: memory by the driver, and time",
        f"{accelerator(device.index)}, {said['versions']}; a bare CUDA context takes {context / (1 << 20):.1f} MiB",
        machine(PACKAGES),
    )
    return replace(device, head=head, context=context)


def main() -> int:
    """Check, measure, or print what was measured."""
    parser = program.parser(__doc__ or "", DEFAULTS)
    parser.add_argument("--device", default="cuda:0")
    asked = parser.parse_args()
    output: Path = asked.output or HERE / "gpu.json"
    if asked.print:
        program.show(results.load(output), True, output)
        return 0
    try:
        device = examined(asked.device)
    except Missing as error:
        print(error, file=sys.stderr)
        return 1
    return program.run(asked, DEFAULTS, device, output)


if __name__ == "__main__":
    sys.exit(main())
