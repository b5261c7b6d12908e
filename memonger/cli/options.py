"""The options of the command line that several commands have. Importing them loads click and names only."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from memonger.devices import SEARCHES
from memonger.option_names import HeldWeights, Level, Mode, Order, Strategy
from memonger.shapes.ranges import terms_of
from memonger.units import MOST_BATCH, MOST_THREADS, MOST_TRIALS, parse_size
from memonger.words import did_you_mean

Command = Callable[..., None]

_SIZE = re.compile(r"[0-9]{1,10}")


def _dims(ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for value in values:
        name, _, size = value.rpartition("=")
        parts = size.split(":")
        if name and terms_of(size).keys() - {""}:
            sizes[name] = size
            continue
        if not name or len(parts) > 3 or not all(_SIZE.fullmatch(part) and int(part) <= MOST_BATCH for part in parts):
            raise click.BadParameter(
                f"{value!r} is not NAME=N, such as seq=128, nor a range of sizes, such as seq=1:512 or side=64:512:32, "
                f"with each at most {MOST_BATCH}, nor a sum of other dimensions, such as total=past+seq."
            )
        sizes[name] = tuple(map(int, parts)) if len(parts) > 1 else int(size)
    return sizes


def _state(ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    becomes = {}
    for value in values:
        old, _, new = value.rpartition("=")
        if not old or not new:
            raise click.BadParameter(f"{value!r} is not INPUT=OUTPUT, such as h=h_next.")
        becomes[old] = new
    return becomes


def _lora(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, str] | None:
    rank, _, pattern = (value or "").partition(":")
    if value is None:
        return None
    if not _SIZE.fullmatch(rank) or int(rank) < 1:
        raise click.BadParameter(f"{value!r} is not RANK or RANK:PATTERN, such as 8 or 8:*.query.weight.")
    return int(rank), pattern or "*"


def _buckets(ctx: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, Any] | None:
    """What `memonger.Buckets` takes, from a text such as 1MiB,25MiB,last."""
    if value is None:
        return None
    parts = value.split(",") if value else []
    wait = {"wait": parts.pop()} if parts and parts[-1] in ("next", "last") else {}
    try:
        sizes = [parse_size(part) for part in parts]
    except ValueError as error:
        raise click.BadParameter(f"{error} Behind it come sizes, as 1MiB,25MiB: write MODEL before it.") from error
    if len(sizes) > 2:
        raise click.BadParameter(f"{value!r} has more than two sizes, the first bucket's and all others': 1MiB,25MiB.")
    return wait | dict(zip(("first", "rest"), sizes if len(sizes) != 1 else sizes * 2, strict=False))


def memory_size(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Bytes from a text such as 4GiB."""
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def parse_sizes(ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> tuple[int, ...]:
    """Sizes such as 4GiB in bytes."""
    return tuple(size for value in values if (size := memory_size(ctx, parameter, value)) is not None)


def check_budgets(ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> Sequence[str]:
    """Budgets as they are, each a size such as 4GiB or a percentage such as 70%."""
    parse_sizes(ctx, parameter, [value for value in values if not value.endswith("%")])
    return values


def parse_batches(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Batches such as 1,4,16."""
    parts = [] if value is None else value.split(",")
    if not all(_SIZE.fullmatch(part.strip()) and 1 <= int(part) <= MOST_BATCH for part in parts):
        raise click.BadParameter(f"{value!r} is no list of batches, such as 1,4,16, with each at most {MOST_BATCH}.")
    return tuple(map(int, parts))


LOSSES = (
    "softmax_cross_entropy", "binary_cross_entropy", "mean_squared_error", "mean_absolute_error", "huber",
    "triplet_margin",
)  # fmt: skip
"""The names in `memonger.autodiff.losses.NAMES`."""


def completes(*names: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """What TAB offers for an option that takes other values, too."""
    return lambda ctx, parameter, begun: [name for name in names if name.startswith(begun)]


class Choice(click.Choice[str]):
    """One of several names; another is told which one is near."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return super().get_invalid_choice_message(value, ctx) + did_you_mean(str(value), self.choices)


class Whole(click.IntRange):
    """A whole number within bounds."""

    name = "whole number"


class Number(click.FloatRange):
    """A number within bounds."""

    name = "number"


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
    type=Choice(get_args(Mode)),
    help="What the model is planned for; left out: training if it has marks, gradients or a loss, else inference.",
)
DIMS = (
    click.option("--batch", type=Whole(1, MOST_BATCH), metavar="N",
                 help="Size of the inputs' open first dimension; left out: 1."),
    click.option("--dim", "dims", multiple=True, callback=_dims, metavar="NAME=N",
                 help="Size of an open dimension, by name or by place: seq=128, x[1]=128; or for memonger plan a range "
                 "of sizes: seq=1:512, side=64:512:32 with a step, total=past+seq for a sum. May be repeated."),
)  # fmt: skip
DEVICE = click.option(
    "--device", metavar="DEVICE", shell_complete=completes("none", "cpu", "cuda", "cuda:0", "cuda:1"),
    help="none, cpu or cuda[:N]; the CPU where onnxruntime is installed.",
)  # fmt: skip
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
QUIET = click.option("--quiet", is_flag=True, help="No progress.")
INPUTS = click.option(
    "--inputs", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="An .npz with inputs for runs that are measured; left out: random numbers.",
)  # fmt: skip
SEARCH = (
    click.option("--level", type=Choice(get_args(Level)),
                 help="onnxruntime's optimization level, for device plans; 'rewrite', for training on the CPU, takes "
                      "faster kernels than stock, with other last bits.", show_default=True),
    click.option("--threads", type=Whole(0, MOST_THREADS), default=0, metavar="N",
                 help="Threads within a node; 0: onnxruntime's default."),
    click.option("--order", default="best", type=Choice(get_args(Order)), show_default=True,
                 help="Order of the nodes; best tries all."),
    click.option("--keep", multiple=True, metavar="PATTERN",
                 help="Don't recompute these nodes (name, operator or output). May be repeated."),
    click.option("--time-limit", type=Number(0), metavar="SECONDS",
                 help="Improve nothing after that; the plan then depends on the machine's speed."),
    INPUTS,
    click.option("--cuda-search", type=Choice(SEARCHES), default="heuristic", show_default=True,
                 help="How cuDNN's algorithms are chosen on CUDA; exhaustive: by timing them in the first run."),
    click.option("--small-workspace", is_flag=True, help="At most 32 MiB of workspace for a convolution on CUDA."),
    click.option("--no-tf32", is_flag=True, help="Compute float32 products on CUDA in float32, not in TF32."),
    click.option("--no-deterministic", is_flag=True, help="Let CUDA kernels sum in an order that changes."),
    click.option("--no-inplace", is_flag=True, help="No output overwrites an input that dies."),
    click.option("--no-views", is_flag=True, help="No reshaped value shares its input's bytes."),
    click.option("--no-reuse", is_flag=True, help="Every value has bytes of its own."),
)  # fmt: skip
LOWERING = (*DIMS, DEVICE, *SEARCH)

STATE = click.option("--state", multiple=True, callback=_state, metavar="INPUT=OUTPUT",
                     help="An input that a session keeps, and the output that it becomes for the next run: h=h_next, "
                          "or of many past.*=present.*. May be repeated.")  # fmt: skip
MOST_EXTRA_TIME = (
    click.option("--max-overhead", type=Number(0), default=0.02, metavar="X", show_default=True,
                 help="Most extra time that --chunks auto may take without a budget, as a fraction."),
    click.option("--allow-rounding", is_flag=True, help="Chunks whose results differ in their last bits, too."),
)  # fmt: skip
EXTRA_TIME_OF_LOOPS = (
    click.option("--max-overhead", type=Number(0), default=0.05, metavar="X", show_default=True,
                 help="Most extra time that a run may take, as a fraction."),
    click.option("--allow-rounding", is_flag=True, help="Outputs may differ in their last bits."),
)  # fmt: skip
CHUNKS = (
    click.option("--chunks", default="auto", metavar="N", show_default=True, shell_complete=completes("auto", "off"),
                 help="Inference on the CPU: run on slices, one after the other. auto, off, a number of slices of the "
                      "batch, or of the axis behind it: 1:8; strips:8 by rows of images."),
    *MOST_EXTRA_TIME,
)  # fmt: skip

WHOLE = click.option(
    "--chunks", default="auto", metavar="auto", show_default=True, shell_complete=completes("auto", "off"),
    help="auto: as memonger plan; off: only plans whose nodes run whole, which takes less time.",
)  # fmt: skip

MIRROR = click.option("--mirror", multiple=True, metavar="PATTERN",
                      help="Recompute these nodes (name, operator or output). May be repeated.")  # fmt: skip

HELD_WEIGHTS = (
    "How many weights are in memory: auto: as many as a budget has room for; packed: all; mapped: as few as there can "
    "be, the others in the plan's file; ahead: as auto, and copied to a CUDA device while earlier steps run."
)
WEIGHTS = click.option(
    "--weights", type=Choice(get_args(HeldWeights)), default="auto", show_default=True, help=HELD_WEIGHTS
)

RECOMPUTATION = (
    click.option("--strategy", type=Choice(get_args(Strategy)),
                 help="What decides what is recomputed; left out: the budget if there is one, else sweep for training, "
                 "none for inference."),
    MIRROR,
    *CHUNKS,
    STATE,
    click.option("--trials", type=Whole(0, MOST_TRIALS), default=6, metavar="N", show_default=True,
                 help="Thresholds in the sweep's grid."),
)  # fmt: skip

PLANNING = (
    *LOWERING,
    click.option(
        "--budget",
        metavar="SIZE",
        callback=memory_size,
        help="The fastest plan that takes no more, parameters and inputs included: 4GiB.",
    ),
    *RECOMPUTATION,
)

TRAINING = (
    click.option("--loss", metavar="NAME", shell_complete=completes(*LOSSES),
                 help=f"Train: {', '.join(LOSSES)}, or an output's name."),
    click.option("--optimizer", type=Choice(["sgd", "adam", "adamw", "lion"]),
                 help="Write the updates into the model; without it the gradients are outputs."),
    click.option("--lr", type=Number(0, min_open=True), metavar="X", help="The optimizer's learning rate."),
    click.option("--momentum", type=Number(0, 1), metavar="X", help="Momentum, for sgd."),
    click.option("--weight-decay", type=Number(0), metavar="X", help="Weight decay."),
    click.option("--optimizer-bits", type=Choice(["32", "8"]), callback=lambda ctx, _, given: given and int(given),
                 help="Bits of each number that adam and adamw keep; of large weights 8 by blocks."),
    click.option("--precision", type=Choice(["float16", "bfloat16"]),
                 help="Train in mixed precision: products in 16 bits, parameters in float32."),
    click.option("--train-mode", is_flag=True,
                 help="Turn BatchNormalization and Dropout into their training form first."),
)  # fmt: skip
BUCKETS = click.option(
    "--buckets",
    is_flag=False,
    flag_value="",
    metavar="[FIRST,REST[,last]]",
    callback=_buckets,
    help="Plan for several ranks: gradients in buckets of these sizes, 1MiB,25MiB if none are given, which ranks "
    "average; last: and hold all until the last one is whole. Needs a loss and an optimizer.",
)
LORA = click.option(
    "--lora",
    metavar="RANK[:PATTERN]",
    callback=_lora,
    help="Train only low-rank adapters beside the weights of products: 8, or 8:*.query.weight.",
)

SEVERAL_PLANS = (MIRROR, STATE, WHOLE, *MOST_EXTRA_TIME, WEIGHTS, *LOWERING, *TRAINING, LORA, AS_JSON, QUIET)
"""Of commands that plan one model for several budgets or sizes."""

FORMATS = ("html", "memory_viz", "perfetto", "speedscope", "netron")
"""What `memonger.report.write.report` writes."""

REPORT = click.option("--report", type=OUTPUT, help="Write a page here that shows the plan: see memonger report.")

TARGETS = ("onnxruntime", "triton", "triton-python", "kserve", "ray", "bentoml", "openvino")
"""The names in `memonger.serving.TARGETS`."""

COMMANDS = {
    "Plan": ("plan", "shrink", "pareto", "fit", "plan-all", "differentiate"),
    "Look": ("inspect", "report", "draw", "diff", "verify", "unplan"),
    "Run and serve": ("run", "export"),
}
"""The commands by what they are for, as ``memonger --help`` lists them."""

_OPTIONS = {
    "Model": ("batch", "dims", "vary", "batches", "mode", "inputs", "name", "instances"),
    "Memory": (
        "budget", "memory", "budgets", "weights", "points", "frontier", "strategy", "mirror", "keep", "chunks",
        "max_overhead", "allow_rounding", "state", "limit", "order", "trials", "time_limit", "no_inplace", "no_views",
        "no_reuse", "capacity",
    ),
    "Training": ("train", "loss", "train_mode", "lora", "precision", "optimizer", "lr", "momentum", "weight_decay",
                 "optimizer_bits", "buckets", "wrt", "frozen"),
    "Device": ("device", "devices", "level", "threads", "cuda_search", "cuda_graph", "small_workspace", "no_tf32",
               "no_deterministic"),
    "Run": (
        "jobs", "engine", "compare", "against", "atol", "rtol", "runs", "steps", "warm_up", "pad", "seed", "arenas",
        "wait",
    ),
    "Output": (
        "output", "target", "annotated", "outputs", "report", "force", "details", "layers",
        "timed", "format", "measured", "around", "depth", "max_nodes", "color_by", "dot", "as_planned", "no_check",
        "as_json", "quiet",
    ),
}  # fmt: skip
SECTIONS = (*_OPTIONS, "Options")
"""The headings under which ``--help`` lists options; the last is for those that no other lists."""


def place_of(name: str) -> tuple[int, int]:
    """The number of an option's section and its place there, by its parameter's name."""
    places = ((number, names.index(name)) for number, names in enumerate(_OPTIONS.values()) if name in names)
    return next(places, (len(_OPTIONS), 0))


ENVIRONMENT = """
Defaults come from the environment: MEMONGER_DEVICE=none stands for --device none, and so for every option but those
that name what is written. TAB completes commands, options and their values:

\b
  eval "$(_MEMONGER_COMPLETE=bash_source memonger)"     # in ~/.bashrc; zsh_source in ~/.zshrc
  _MEMONGER_COMPLETE=fish_source memonger | source      # in fish

In scripts, --json prints one object, --quiet shows no progress, and the exit status is 0, 1 (the message says what
would work) or 2 (wrong usage).
"""
"""What ``memonger --help`` ends with."""

HELP = {"help_option_names": ["-h", "--help"]}

NOT_FROM_ENVIRONMENT = ("output", "annotated", "outputs", "force", "help", "version", "name")
"""Options whose defaults the environment doesn't set: what is written, and where."""

ONLY_PLANNING = (
    "mode", "batch", "dims", "level", "order", "strategy", "budget", "mirror", "keep", "trials", "time_limit",
    "no_inplace", "no_views", "no_reuse", "cuda_search", "small_workspace", "no_tf32", "no_deterministic", "chunks",
    "max_overhead", "allow_rounding", "state", "buckets", "weights",
)  # fmt: skip
"""Parameters that have no effect on a model that has a plan already."""


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several decorators as one, the first outermost."""

    def apply(function: Command) -> Command:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply
