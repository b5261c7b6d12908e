"""The options of the command line that several commands have. Importing them loads click and names only."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import click

from memonger.devices import SEARCHES
from memonger.planning.names import Level, Mode, Order, Strategy
from memonger.units import MOST_BATCH, MOST_THREADS, MOST_TRIALS, parse_size

Command = Callable[..., None]

_SIZE = re.compile(r"[0-9]{1,10}")


def _dims(ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, int]:
    sizes = {}
    for value in values:
        name, _, size = value.rpartition("=")
        if not name or not _SIZE.fullmatch(size) or int(size) > MOST_BATCH:
            raise click.BadParameter(f"{value!r} is not NAME=N, such as seq=128, with N at most {MOST_BATCH}.")
        sizes[name] = int(size)
    return sizes


def _budget(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def parse_sizes(ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> tuple[int, ...]:
    """Sizes such as 4GiB in bytes."""
    return tuple(size for value in values if (size := _budget(ctx, parameter, value)) is not None)


class Target(click.Path):
    """A file to write; see `memonger.cli.command`."""


SOURCE = click.Path(path_type=Path)
OUTPUT = Target(path_type=Path)
FORCED = "memonger.force"
"""In a context's ``meta``: whether files that are there may be replaced."""
FORCE = click.option(
    "--force", is_flag=True, expose_value=False, help="Replace files that are there; never one that is read.",
    callback=lambda ctx, _, given: ctx.meta.update({FORCED: given}),
)  # fmt: skip

MODEL = click.argument("model", type=SOURCE)
MODE = click.option(
    "--mode",
    type=click.Choice(get_args(Mode)),
    help="What the model is planned for; left out: training if it has marks, gradients or a loss, else inference.",
)
DIMS = (
    click.option("--batch", type=click.IntRange(1, MOST_BATCH), metavar="N",
                 help="Size of the inputs' open first dimension; left out: 1."),
    click.option("--dim", "dims", multiple=True, callback=_dims, metavar="NAME=N",
                 help="Size of an open dimension, by name or by place: seq=128, x[1]=128. May be repeated."),
)  # fmt: skip
DEVICE = click.option(
    "--device", metavar="DEVICE", help="none, cpu or cuda[:N]; the CPU where onnxruntime is installed."
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
QUIET = click.option("--quiet", is_flag=True, help="No progress.")
LOWERING = (
    *DIMS,
    DEVICE,
    click.option("--level", type=click.Choice(get_args(Level)),
                 help="onnxruntime's optimization level, for device plans.", show_default=True),
    click.option("--threads", type=click.IntRange(0, MOST_THREADS), default=0, metavar="N",
                 help="Threads within a node; 0: onnxruntime's default."),
    click.option("--order", default="best", type=click.Choice(get_args(Order)), show_default=True,
                 help="Order of the nodes; best tries all."),
    click.option("--keep", multiple=True, metavar="PATTERN",
                 help="Don't recompute these nodes (name, operator or output). May be repeated."),
    click.option("--time-limit", type=click.FloatRange(0), metavar="SECONDS",
                 help="Improve nothing after that; the plan then depends on the machine's speed."),
    click.option("--inputs", type=click.Path(path_type=Path, exists=True, dir_okay=False),
                 help="An .npz with inputs for the calibrating run."),
    click.option("--cuda-search", type=click.Choice(SEARCHES), default="heuristic", show_default=True,
                 help="How cuDNN's algorithms are chosen on CUDA; exhaustive: by timing them in the first run."),
    click.option("--small-workspace", is_flag=True, help="At most 32 MiB of workspace for a convolution on CUDA."),
    click.option("--no-tf32", is_flag=True, help="Compute float32 products on CUDA in float32, not in TF32."),
    click.option("--no-deterministic", is_flag=True, help="Let CUDA kernels sum in an order that changes."),
    click.option("--no-inplace", is_flag=True, help="No output overwrites an input that dies."),
    click.option("--no-views", is_flag=True, help="No reshaped value shares its input's bytes."),
    click.option("--no-reuse", is_flag=True, help="Every value has bytes of its own."),
)  # fmt: skip

PLANNING = (
    *LOWERING,
    click.option("--budget", metavar="SIZE", callback=_budget,
                 help="The fastest plan that takes no more, parameters and inputs included: 4GiB."),
    click.option("--strategy", type=click.Choice(get_args(Strategy)),
                 help="What decides what is recomputed; left out: the budget if there is one, else sweep for training, "
                 "none for inference."),
    click.option("--mirror", multiple=True, metavar="PATTERN",
                 help="Recompute these nodes (name, operator or output). May be repeated."),
    click.option("--trials", type=click.IntRange(0, MOST_TRIALS), default=6, metavar="N", show_default=True,
                 help="Thresholds in the sweep's grid."),
)  # fmt: skip

TRAINING = (
    click.option("--loss", metavar="NAME",
                 help="Train: softmax_cross_entropy, binary_cross_entropy, mean_squared_error, or an output's name."),
    click.option("--optimizer", type=click.Choice(["sgd", "adam", "adamw"]),
                 help="Write the updates into the model; without it the gradients are outputs."),
    click.option("--lr", type=click.FloatRange(0, min_open=True), help="The optimizer's learning rate."),
    click.option("--momentum", type=click.FloatRange(0, 1), help="Momentum, for sgd."),
    click.option("--weight-decay", type=click.FloatRange(0), help="Weight decay."),
    click.option("--train-mode", is_flag=True,
                 help="Turn BatchNormalization and Dropout into their training form first."),
)  # fmt: skip

TARGETS = ("onnxruntime", "triton", "triton-python", "kserve", "ray", "bentoml", "openvino")
"""The names in `memonger.export.TARGETS`."""

ONLY_PLANNING = (
    "mode", "batch", "dims", "level", "order", "strategy", "budget", "mirror", "keep", "trials", "time_limit",
    "no_inplace", "no_views", "no_reuse", "cuda_search", "small_workspace", "no_tf32", "no_deterministic",
)  # fmt: skip
"""Parameters that have no effect on a model that has a plan already."""


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several decorators as one, the first outermost."""

    def apply(function: Command) -> Command:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply
