"""Training steps beside PyTorch eager on the CPU: ``python -m benchmarks.training_step [--rows NAME,...] [--resume]``.

Writes training_step.txt, .json and _training.png: rows of `benchmarks.side_by_side` with nothing recomputed, at batches
a CPU trains in seconds. Beside PyTorch eager as it comes stands PyTorch with its memory kept (MALLOC_MMAP_MAX_=0: fresh
pages are slow on virtual machines).
"""

import sys
from pathlib import Path

from benchmarks.side_by_side import program
from benchmarks.side_by_side.networks import Size

OUTPUT = Path(__file__).with_suffix(".json")
IMAGE = (3, 224, 224)
SIZES = {
    "resnet18": Size(16, IMAGE),
    "resnet50": Size(8, IMAGE),
    "mobilenet_v2": Size(16, IMAGE),
    "densenet121": Size(8, IMAGE),
    "gpt": Size(8, (256,)),
}
DEFAULTS = program.Defaults(
    ("training",), "2GB", 150.0, networks=tuple(SIZES), sizes=SIZES, only=("eager", "kept", "none")
)


def main() -> int:
    """Measure, or print what was measured."""
    title = "Training steps on the CPU beside PyTorch eager, nothing recomputed: memory and time"
    return program.on_the_cpu(__doc__ or "", DEFAULTS, OUTPUT, title)


if __name__ == "__main__":
    sys.exit(main())
