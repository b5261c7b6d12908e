"""Plans beside what a user would pick instead, on the CPU: ``python -m benchmarks.peers [--rows NAME,...] [--resume]``.

Writes peers.txt, .json and _<kind>.png. Inference: stock onnxruntime, planned, PyTorch eager and compiled. Training:
PyTorch eager, with its memory kept (MALLOC_MMAP_MAX_=0: fresh pages are slow on virtual machines), with checkpoints,
compiled, and in three budgets; memonger with nothing recomputed and in three budgets. ``--kinds largest``: the largest
batch that 2 GB train. `benchmarks.side_by_side.networks` has the sizes, and how they differ from a GPU's.
"""

import sys
from pathlib import Path

from benchmarks.side_by_side import program

OUTPUT = Path(__file__).with_suffix(".json")
LARGEST = ("densenet_bc100", "mobilenet_v2", "resnet50")
DEFAULTS = program.Defaults(("inference", "training"), "2GB", 150.0, times=(1, 4), largest=LARGEST)


def main() -> int:
    """Measure, or print what was measured."""
    title = "On the CPU, beside what a user would pick instead: memory and time of inference and of training steps"
    return program.on_the_cpu(__doc__ or "", DEFAULTS, OUTPUT, title)


if __name__ == "__main__":
    sys.exit(main())
