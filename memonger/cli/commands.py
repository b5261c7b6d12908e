"""Every command with its options. What one does is imported when it runs, so that ``--help`` is there at once.

The command line is the one place that prints: results to standard output, progress and errors to standard error.
"""

from typing import get_args

import click

from memonger import __version__
from memonger.cli.command import Command, CommandGroup, Comparison
from memonger.cli.options import (
    AS_JSON,
    BUCKETS,
    DIMS,
    ENVIRONMENT,
    EXTRA_TIME_OF_LOOPS,
    FORMATS,
    HELD_WEIGHTS,
    HELP,
    INPUTS,
    LORA,
    MODE,
    MODEL,
    OUTPUT,
    PLANNING,
    QUIET,
    RECOMPUTATION,
    REPORT,
    SEARCH,
    SEVERAL_PLANS,
    SOURCE,
    TARGETS,
    TRAINING,
    WEIGHTS,
    Choice,
    Number,
    Whole,
    check_budgets,
    completes,
    memory_size,
    options,
    parse_batches,
    parse_sizes,
)
from memonger.devices import GRAPHS
from memonger.option_names import Engine, HeldWeights, LoopTarget, Strategy
from memonger.units import MOST_ARENAS, MOST_BUDGET, MOST_INSTANCES, MOST_POINTS, MOST_THREADS


@click.group(
    cls=CommandGroup,
    name="memonger",
    context_settings=HELP,
    first=(
        ("memonger run model.onnx --compare", "what a plan saves, beside stock"),
        ("memonger plan model.onnx -o planned.onnx", "its bytes, and a file to run"),
        ("memonger shrink model.onnx -o small.onnx", "a file for any onnxruntime"),
        ("memonger fit model.onnx --memory 8GiB", "the largest batch that fits"),
        ("memonger report planned.onnx -o plan.html", "every tensor in memory, as a page"),
    ),
    examples=(
        "memonger plan model.onnx -o planned.onnx           # plan it, write the planned file",
        "memonger run model.onnx --compare                  # beside stock onnxruntime",
        "memonger pareto model.onnx --loss NAME             # in how little memory it trains",
        "memonger COMMAND --help                            # more examples",
    ),
    epilog=ENVIRONMENT,
)
@click.version_option(__version__)
def main() -> None:
    """Plans the memory of a neural network before it runs."""


PLAN_EXAMPLES = (
    "memonger plan model.onnx -o planned.onnx",
    "memonger plan model.onnx --batch 8 --dim seq=128 --budget 500MiB -o planned.onnx",
    "memonger plan model.onnx --train-mode --loss softmax_cross_entropy --optimizer sgd --budget 4GiB -o step.onnx",
    "memonger plan model.onnx --loss softmax_cross_entropy --optimizer adam --buckets -o ranks.onnx",
    "memonger plan model.onnx --device none -o portable.onnx",
)


@main.command(runs="planning.plan", name="plan", examples=PLAN_EXAMPLES)
@options(
    MODEL,
    MODE,
    click.option("-o", "--output", type=OUTPUT, help="Write the planned model here."),
    click.option(
        "--weights",
        type=Choice((*get_args(HeldWeights), "source")),
        default="auto",
        show_default=True,
        help=f"{HELD_WEIGHTS} source: OUTPUT refers to large ones beside MODEL, in the same folder.",
    ),
    click.option(
        "--annotated", type=OUTPUT, help="Write MODEL here with force_mirroring on every node: what is recomputed."
    ),
    click.option("--details", is_flag=True, help="Print every figure, and what a sweep tried."),
    *PLANNING,
    *TRAINING,
    BUCKETS,
    LORA,
    REPORT,
    AS_JSON,
    QUIET,
)
def plan_command() -> None:
    """Plan the memory of MODEL.

    The plan is the order its nodes run in, and the byte of one arena at which every value lies.
    """


plan = click.version_option(__version__)(
    Command(
        "memonger-plan",
        params=list(plan_command.params),
        callback=plan_command.callback,
        help=plan_command.help,
        examples=[line.replace("memonger plan", "memonger-plan") for line in PLAN_EXAMPLES],
    )
)
"""The program ``memonger-plan``, which does the same."""


@main.command(
    runs="planning.pareto",
    name="pareto",
    examples=(
        "memonger pareto model.onnx --loss softmax_cross_entropy --batch 32",
        "memonger pareto model.onnx --mode inference --points 4",
    ),
)
@options(
    MODEL,
    MODE,
    click.option("--points", type=Whole(1, MOST_POINTS), default=8, metavar="N", show_default=True,
                 help="Number of budgets to try; plans that are made anyway are rows, too."),
    click.option("--budget", "budgets", multiple=True, metavar="SIZE", callback=parse_sizes,
                 help="Try this budget instead: 4GiB. May be repeated."),
    click.option("--strategy", type=Choice(get_args(Strategy)),
                 help="What decides what is recomputed: budget, which it is if left out, or exact."),
    *SEVERAL_PLANS,
)  # fmt: skip
def pareto_command() -> None:
    """Show in how little memory MODEL runs, and what it costs.

    One plan a line, none better than another in both.
    """


@main.command(
    runs="fit.fit",
    name="fit",
    examples=(
        "memonger fit model.onnx --memory 8GiB",
        "memonger fit model.onnx --memory 8GiB --train-mode --loss softmax_cross_entropy --optimizer sgd",
        "memonger fit gpt.onnx --memory 2GiB --batch 1 --vary seq -o planned.onnx",
    ),
)
@options(
    MODEL,
    MODE,
    click.option("--memory", metavar="SIZE", callback=memory_size, default="8GiB", show_default=True,
                 help="Bytes for everything: arena, workspace, weights, optimizer state and inputs."),
    click.option("--vary", default="batch", metavar="NAME", show_default=True,
                 help="The dimension to make as large as possible: batch, or by name or place: seq, x[1]."),
    click.option("--frontier", type=Whole(0, MOST_POINTS), default=0, metavar="N", show_default=True,
                 help="Also plan N sizes up to the largest, with their extra cost and samples a second."),
    click.option("-o", "--output", type=OUTPUT, help="Write the planned model of the largest size here."),
    click.option("--strategy", type=Choice(get_args(Strategy)),
                 help="What decides what is recomputed; left out: what the memory needs."),
    *SEVERAL_PLANS,
)  # fmt: skip
def fit_command() -> None:
    """Find the largest batch of MODEL that fits a memory.

    Or the largest size of another dimension. One size more is proven not to fit, or it is said by how far that is open.
    """


@main.command(
    runs="plan_all.plan_all",
    name="plan-all",
    examples=(
        "memonger plan-all models/*.onnx --jobs 4 -o planned",
        "memonger plan-all *.onnx --batches 1,8,32 --budget 100% --budget 70% --budget 50% --jobs 8 --json",
        "memonger plan-all *.onnx --device cpu --device none --engine ray -o /shared/planned",
    ),
)
@options(
    click.argument("models", type=SOURCE, nargs=-1, required=True, metavar="MODEL..."),
    MODE,
    click.option("-o", "--output", type=SOURCE, help="The folder to make, of a planned file for each plan."),
    click.option("--force", is_flag=True, help="Replace a folder that memonger wrote."),
    click.option("--jobs", type=Whole(1, MOST_THREADS), metavar="N",
                 help="Plans that are made at a time; left out: 1, with Ray as many as it has processors for."),
    click.option("--engine", type=Choice(get_args(Engine)), default="joblib", show_default=True,
                 help="What makes several at a time: joblib, processes of this machine; ray, a cluster."),
    click.option("--batches", callback=parse_batches, metavar="N,N,...",
                 help="Batches to plan each MODEL for: 1,4,16."),
    DIMS[1],
    click.option("--budget", "budgets", multiple=True, metavar="SIZE", callback=check_budgets,
                 help="Plan each for this budget: 4GiB; or 70%, of what it takes as it is. May be repeated."),
    click.option("--device", "devices", multiple=True, metavar="DEVICE",
                 shell_complete=completes("none", "cpu", "cuda", "cuda:0", "cuda:1"),
                 help="Plan each for this device: none, cpu or cuda[:N]. May be repeated."),
    *SEARCH,
    *RECOMPUTATION,
    *TRAINING,
    AS_JSON,
    QUIET,
)  # fmt: skip
def plan_all_command() -> None:
    """Plan many MODELs, each for every batch, budget and device.

    A model that can't be planned stops no other; the exit status is then 1. With MEMONGER_CACHE what was planned before
    is not planned again.
    """


@main.command(
    runs="loops.shrink",
    examples=(
        "memonger shrink model.onnx --batch 16 -o smaller.onnx",
        "memonger shrink model.onnx --dim batch=1:16 --max-overhead 0.1 -o smaller.onnx",
        "memonger shrink model.onnx --batch 4 --for web -o smaller.onnx",
    ),
)
@options(
    MODEL,
    click.option("-o", "--output", type=OUTPUT, required=True, help="Write the smaller model here."),
    *DIMS,
    INPUTS,
    click.option("--for", "target", type=Choice(get_args(LoopTarget)),
                 help="What will run it, where that isn't onnxruntime on a processor: written in a form that it takes, "
                 "or refused with the reason. triton: -o NAME/1/model.onnx, and config.pbtxt above."),
    click.option("--weights", type=Choice(("beside", "inside")),
                 help="Where weights lie: in a file beside it (default), or inside, for what reads no other file; "
                 "onnxruntime then holds those of loops twice."),
    *EXTRA_TIME_OF_LOOPS,
    click.option("--no-check", is_flag=True, help="Run nothing: estimates decide alone, and nothing is compared."),
    AS_JSON,
    QUIET,
)  # fmt: skip
def shrink() -> None:
    """Write MODEL as a plain file that takes less memory.

    Any onnxruntime runs it, in any language. Nodes run in loops on one slice of the batch, or of a transformer's
    tokens, after the other. The file is compared with MODEL in stock onnxruntime with its default options: outputs bit
    for bit, memory and time. One that gains nothing isn't written. A dimension with a range of sizes stays open.
    """


@main.command(
    runs="planning.write_differentiated",
    name="differentiate",
    examples=(
        "memonger differentiate model.onnx --loss softmax_cross_entropy --optimizer adam --lr 1e-3 -o training.onnx",
        "memonger differentiate model.onnx --wrt x -o forces.onnx",
    ),
)
@options(
    MODEL,
    click.option("-o", "--output", type=OUTPUT, required=True, help="Write the training model here."),
    *DIMS,
    *TRAINING,
    LORA,
    click.option("--wrt", multiple=True, metavar="PATTERN", help="Differentiate by these; default: the parameters."),
    click.option("--frozen", multiple=True, metavar="PATTERN", help="Leave these parameters as they are."),
)
def differentiate_command() -> None:
    """Write MODEL and its backward pass as one model."""


@main.command(
    runs="files.inspect",
    examples=(
        "memonger inspect model.onnx",
        "memonger inspect model.onnx --layers --batch 8",
        "memonger inspect planned.onnx --json",
    ),
)
@options(
    MODEL,
    click.option("--layers", is_flag=True,
                 help="Show every node: output, size, FLOPs, whether it runs again, PyTorch module."),
    click.option("--time", "timed", is_flag=True, help="Time each of the layers in one run on the CPU."),
    *DIMS,
    AS_JSON,
)  # fmt: skip
def inspect() -> None:
    """Show what a MODEL holds, and its plan if it has one.

    Open sizes are shown by name; for --layers, --batch and --dim give them one.
    """


@main.command(runs="files.diff", cls=Comparison, examples=("memonger diff before.planned.onnx after.planned.onnx",))
@options(
    click.argument("first", type=SOURCE),
    click.argument("second", type=SOURCE),
    AS_JSON,
)
def diff() -> None:
    """Show in what two models, or two plans, differ.

    The exit status is 0 if they are the same, 1 if they differ, 2 if one can't be read.
    """


@main.command(runs="files.verify", examples=("memonger verify planned.onnx",))
@options(MODEL, AS_JSON)
def verify() -> None:
    """Check the plan in MODEL with an independent checker.

    The exit status is 0 if the plan is correct.
    """


@main.command(
    runs="report.report",
    name="report",
    examples=(
        "memonger report planned.onnx -o plan.html",
        "memonger report planned.onnx --frontier pareto.json --measured run.json -o plan.html",
        "memonger report planned.onnx --format memory_viz -o snapshot.pickle",
    ),
)
@options(
    click.argument("planned", type=SOURCE),
    click.option("-o", "--output", type=OUTPUT, required=True, help="The file to write."),
    click.option("--format", type=Choice(FORMATS), default="html", show_default=True,
                 help="A page, or what another viewer opens."),
    click.option("--frontier", type=SOURCE, metavar="FILE",
                 help="What memonger pareto --json printed: shown beside the plan."),
    click.option("--measured", type=SOURCE, metavar="FILE",
                 help="What memonger run --compare --json printed: shown beside what the plan says."),
    AS_JSON,
)  # fmt: skip
def report_command() -> None:
    """Show the plan in PLANNED as a page to look at.

    The page opens without a network. Other formats are for PyTorch's memory viewer, Perfetto, speedscope and Netron.
    """


@main.command(runs="files.unplan", examples=("memonger unplan planned.onnx -o model.onnx",))
@options(
    click.argument("planned", type=SOURCE),
    click.option("-o", "--output", type=OUTPUT, required=True, help="Write the model here."),
    click.option("--as-planned", is_flag=True,
                 help="Write the model that was planned: the whole training step, or what onnxruntime made of it."),
    AS_JSON,
)  # fmt: skip
def unplan() -> None:
    """Write the model that PLANNED was made from.

    The plan is taken out, marks stay. Of a training plan that is the forward model. A file that shrink wrote gives the
    model that was shrunk.
    """


@main.command(
    runs="drawing.draw",
    examples=("memonger draw planned.onnx -o planned.svg", "memonger draw model.onnx --around conv1 -o near.svg"),
)
@options(
    MODEL,
    click.option("-o", "--output", type=OUTPUT, help="Write .svg, .png or .pdf (drawn by graphviz), .dot or .gv; left "
                 "out: DOT on standard output."),
    click.option("--dot", is_flag=True, help="Write DOT whatever the file is called."),
    click.option("--around", multiple=True, metavar="PATTERN",
                 help="Draw what is near these nodes (name, operator or output). May be repeated."),
    click.option("--depth", type=click.IntRange(0), default=3, metavar="N", show_default=True,
                 help="How many edges from those."),
    click.option("--max-nodes", type=click.IntRange(1), default=200, metavar="N", show_default=True,
                 help="The most steps to draw; of a larger graph those around its worst step."),
    click.option("--color-by", type=Choice(["address", "storage"]), default="address", show_default=True,
                 help="What has one colour: the values that begin at one byte of the arena, or those of one storage."),
    *DIMS,
    AS_JSON,
)  # fmt: skip
def draw() -> None:
    """Draw MODEL with a colour for each place in memory.

    A planned one is drawn before and after, side by side. Boxes name operator, node, byte of the arena, size and
    shape; dashed ones run again. Pictures are made by graphviz' program dot.
    """


@main.command(
    runs="run.run",
    name="run",
    examples=(
        "memonger run model.onnx --compare",
        "memonger run planned.onnx --inputs inputs.npz --outputs outputs.npz",
        "memonger run planned.onnx --compare --against model.onnx --rtol 1e-4",
    ),
)
@options(
    MODEL,
    MODE,
    *PLANNING,
    WEIGHTS,
    click.option("--outputs", type=OUTPUT, help="Write the outputs to this .npz."),
    click.option("--pad", is_flag=True,
                 help="Fill up --inputs of fewer rows than the plan's batch, or between a range's; cut the outputs."),
    click.option("--compare", is_flag=True, help="Compare outputs, latency and memory with stock onnxruntime."),
    click.option("--against", type=SOURCE, help="Model for the stock sessions; MODEL if left out."),
    click.option("--cuda-graph", type=Choice(GRAPHS), default="auto", show_default=True,
                 help="Capture runs on a CUDA device once and replay them; auto: where that is possible."),
    click.option("--atol", type=Number(0), metavar="X",
                 help="Outputs pass if |planned - stock| <= X + rtol * |stock|; without both, bit for bit."),
    click.option("--rtol", type=Number(0), metavar="X", help="See --atol."),
    click.option("--runs", type=Whole(1, MOST_INSTANCES), default=30, show_default=True,
                 help="Timed runs of each session."),
    click.option("--steps", type=Whole(3, MOST_INSTANCES), default=10, show_default=True, metavar="N",
                 help="Steps of a model that trains, those to warm up among them."),
    click.option("--warm-up", type=Whole(0, MOST_INSTANCES), default=3, show_default=True, metavar="N",
                 help="Runs of each session before the timed ones."),
    click.option("--seed", type=Whole(0, 2**64 - 1), default=0, show_default=True,
                 help="Seed of random inputs."),
    AS_JSON,
    QUIET,
)  # fmt: skip
def run_command() -> None:
    """Run MODEL as planned; one without a plan is planned first.

    A model with a loss is trained for some steps, on one batch. Inputs are random numbers unless --inputs names an
    .npz. With --compare each session runs in a process of its own,
    and the exit status is 1 if the outputs aren't those of stock onnxruntime at the plan's own level.
    """


@main.command(runs="files.pack", examples=("memonger pack problem.csv --capacity 1048576 -o solution.csv",))
@options(
    click.argument("problem", type=SOURCE),
    click.option("--capacity", type=Whole(1, MOST_BUDGET), metavar="BYTES", help="Fail if more is needed."),
    click.option("-o", "--output", type=OUTPUT, help="Write the offsets here."),
    AS_JSON,
)
def pack() -> None:
    """Lay out the buffers of a CSV file.

    PROBLEM is in MiniMalloc's format, a header and one row a buffer: id,lower,upper,size.
    """


@main.command(
    runs="export.export",
    name="export",
    examples=(
        "memonger export planned.onnx --target triton -o models/resnet",
        "memonger export batch1.onnx batch8.onnx --target kserve --name resnet -o served",
        "memonger export planned-models --target ray --arenas 2 --limit 512MiB -o served",
    ),
)
@options(
    click.argument("models", type=SOURCE, nargs=-1, required=True, metavar="MODEL..."),
    click.option("--target", required=True, metavar="NAME", shell_complete=completes(*TARGETS),
                 help=f"One of {', '.join(TARGETS)}."),
    click.option("--output", "-o", type=SOURCE, required=True, help="The folder to make."),
    click.option("--name", help="The model's name for the server; left out: the file's."),
    click.option("--instances", type=Whole(1, MOST_INSTANCES), default=1, show_default=True, metavar="N",
                 help="Processes that serve, each with memory of its own."),
    click.option("--arenas", type=Whole(1, MOST_ARENAS), metavar="N",
                 help="Requests that run at a time in one process; left out: 1."),
    click.option("--limit", callback=memory_size, metavar="SIZE",
                 help="Most that the models of one process may take: 512MiB. Those not used for longest go."),
    click.option("--wait", type=Number(0, 86400), metavar="SECONDS",
                 help="How long a request waits for an arena at most; left out: 30."),
    click.option("--force", is_flag=True, help="Replace an earlier export."),
    click.option("--batches", callback=parse_batches, metavar="N,N,...",
                 help="Batches to plan a MODEL without a plan for, as 1,4,16; left out: what suits the target."),
    *PLANNING,
    WEIGHTS,
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    QUIET,
)  # fmt: skip
def export_command() -> None:
    """Write what a serving stack loads from MODEL.

    One without a plan is planned for inference, in the form the target needs; an open batch stays open, or gets a plan
    for each of --batches. Several planned files are plans of one model for different batches. A folder of planned
    models is served by one fleet, which takes the arena of the largest: each file is a model by its name, and so is
    each folder with plans for several batches.
    """


if __name__ == "__main__":
    main()
