"""Plans beside what a user would pick instead, on the CPU: ``python -m benchmarks.peers [--rows NAME,...] [--resume]``.

Writes peers.txt, .json and _<kind>.png. Inference: stock onnxruntime, planned, PyTorch eager and compiled. Training:
PyTorch eager, with its memory kept (MALLOC_MMAP_MAX_=0: fresh pages are slow on virtual machines), with checkpoints,
compiled; memonger with nothing recomputed and in three budgets. ``--largest``: the largest batch that 2 GB train.
`benchmarks.side_by_side.networks` has the sizes, and how they differ from a GPU's.
"""

import sys
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.side_by_side import program, results
from benchmarks.side_by_side.devices import Device

HERE = Path(__file__).parent
DEFAULTS = program.Defaults(("inference", "training"), "2GB", 150.0, ("densenet_bc100", "mobilenet_v2", "resnet50"))


def main() -> int:
    """Measure, or print what was measured."""
    asked = program.parser(__doc__ or "", DEFAULTS).parse_args()
    output: Path = asked.output or HERE / "peers.json"
    if asked.print:
        program.show(results.load(output), False, output)
        return 0
    title = "On the CPU, beside what a user would pick instead: memory and time of inference and of training steps"
    device = Device("cpu", (title, machine(("onnxruntime", "torch", "onnx", "onnx-ir", "numpy"))))
    return program.run(asked, DEFAULTS, device, output)


if __name__ == "__main__":
    sys.exit(main())
