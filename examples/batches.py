"""Serve one network at several batch sizes from one arena and one copy of the weights.

    python examples/batches.py [MODEL.onnx]

Without a model it builds a small MobileNet-v2. The model's first dimension has to be symbolic.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import memonger
from memonger.units import format_size

BATCHES = (1, 4, 16)


def demo_model(folder: Path) -> Path:
    """A MobileNet-v2 at 96 × 96 with a symbolic batch, from this repository's models/."""
    import onnx

    import models

    path = folder / "mobilenet_v2.onnx"
    onnx.save(models.build("mobilenet_v2", batch=None, image=96), path)
    return path


def main(model: Path) -> None:
    """Plan each batch, run them all in one session, print what each takes."""
    plans = [memonger.search_plan(model, batch=batch, mode="inference") for batch in BATCHES]
    for plan in plans:
        print(f"batch {plan.batch:2}: arena {format_size(plan.arena_bytes)}, scratch {plan.workspace_bytes} bytes")
    session = memonger.Session(plans)
    print(f"one session: arena {format_size(session.arena.size)}, weights {format_size(plans[0].parameter_bytes)}")
    rng = np.random.default_rng(0)
    for plan in plans:
        feeds = {
            str(value.name): rng.standard_normal([int(dim) for dim in value.shape or ()], np.float32)
            for value in plan.model.graph.inputs
        }
        for name, value in session.run(feeds).items():
            print(f"batch {plan.batch:2}: {name} {list(value.shape)}, mean {value.mean():+.4f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        with tempfile.TemporaryDirectory() as scratch:
            main(demo_model(Path(scratch)))
