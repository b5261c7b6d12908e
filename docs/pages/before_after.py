"""The pictures of the front page: ``python docs/pages/before_after.py`` (extra ``[plot]``) writes docs/before-after.png
and docs/social-card.png, which is shown with links to the project.

Bytes of values in use over a run of MobileNet-v2 at batch 16: of the model's own nodes, and of the plan, whose nodes
run on slices of the batch; beside them what stock onnxruntime is expected to take for them.
"""

import itertools
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import memonger
import models

DOCS = Path(__file__).parent.parent
MIB = 2**20


def in_use(plan: memonger.Plan) -> list[float]:
    """MiB of the arena that are in use at each step."""
    buffers = [buffer for buffer in plan.buffers() if buffer.offset is not None]
    changes = [0] * (max(buffer.last_step for buffer in buffers) + 2)
    for buffer in buffers:
        changes[buffer.first_step] += buffer.bytes
        changes[buffer.last_step + 1] -= buffer.bytes
    return [total / MIB for total in itertools.accumulate(changes[:-1])]


def draw(axes: Axes, whole: memonger.Plan, planned: memonger.Plan) -> None:
    """What is in use under both plans, and stock onnxruntime's arena."""
    stock = ((planned.stock_bytes or 0) - planned.parameter_bytes - planned.input_bytes) / MIB
    axes.axhline(stock, color="#c0392b", linestyle="--", label=f"stock onnxruntime's arena: {stock:.0f} MiB")
    for plan, colour, label in ((whole, "#b0b7c3", "values of the model as it is"), (planned, "#0072b2", "planned")):
        values = in_use(plan)
        places = [100 * step / (len(values) - 1) for step in range(len(values))]
        peak = plan.arena_bytes / MIB
        axes.fill_between(places, values, step="post", color=colour, label=f"{label}: {peak:.3g} MiB at most")
    axes.set(
        xlim=(0, 100),
        ylim=(0, stock * 1.08),
        xlabel="% of the run's steps",
        ylabel="MiB",
        title="MobileNet-v2, 16 images",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def main() -> None:
    """Plan twice, and draw."""
    model = models.build("mobilenet_v2", batch=16)
    whole, planned = (
        memonger.search_plan(model, mode="inference", device="cpu", chunks=one) for one in ("off", "auto")
    )
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    draw(axes, whole, planned)
    figure.savefig(DOCS / "before-after.png", dpi=160)
    with plt.rc_context({"font.size": 15}):
        figure, axes = plt.subplots(figsize=(12, 6.3))
        figure.subplots_adjust(left=0.09, right=0.95, bottom=0.13, top=0.66)
        draw(axes, whole, planned)
    figure.text(0.05, 0.86, "memonger", fontsize=48, weight="bold", color="#0072b2")
    figure.text(0.05, 0.78, "Plans the memory of a neural network before it runs. The same bits.", fontsize=22)
    figure.savefig(DOCS / "social-card.png", dpi=100)


if __name__ == "__main__":
    main()
