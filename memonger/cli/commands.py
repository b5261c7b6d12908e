"""Every command with its options. What a command does is imported when it runs, so that ``--help`` is there at once.

The command line is the one place that prints: results to standard output, progress and errors to standard error.
"""

from typing import Any

import click

from memonger import __version__
from memonger.cli.command import Command, Group
from memonger.cli.options import (
    AS_JSON,
    DIMS,
    LOWERING,
    MODE,
    MODEL,
    OUTPUT,
    PLANNING,
    QUIET,
    SOURCE,
    TARGETS,
    TRAINING,
    options,
    parse_sizes,
)
from memonger.devices import GRAPHS
from memonger.units import MOST_BUDGET, MOST_INSTANCES, MOST_POINTS


@click.group(cls=Group, name="memonger")
@click.version_option(__version__)
def main() -> None:
    """Plans the memory of a neural network before it runs."""


@main.command(name="plan")
@options(
    MODEL,
    MODE,
    click.option("-o", "--output", type=OUTPUT, help="Write the planned model here."),
    click.option(
        "--annotated", type=OUTPUT, help="Write MODEL here with force_mirroring on every node: what is recomputed."
    ),
    *PLANNING,
    *TRAINING,
    AS_JSON,
    QUIET,
)
def plan_command(**arguments: Any) -> None:
    """Plan the memory of MODEL.

    The plan is the order its nodes run in, and the byte of one arena at which every value lies.
    """
    from memonger.cli import planning

    planning.plan(**arguments)


plan = click.version_option(__version__)(
    Command(
        "memonger-plan",
        params=list(plan_command.params),
        callback=plan_command.callback,
        help=plan_command.help,
    )
)
"""The program ``memonger-plan``, which does the same."""


@main.command(name="pareto")
@options(
    MODEL,
    MODE,
    click.option("--points", type=click.IntRange(1, MOST_POINTS), default=8, metavar="N", show_default=True,
                 help="Number of budgets to try."),
    click.option("--budget", "budgets", multiple=True, metavar="SIZE", callback=parse_sizes,
                 help="Try this budget instead: 4GiB. May be repeated."),
    *LOWERING,
    *TRAINING,
    AS_JSON,
    QUIET,
)  # fmt: skip
def pareto_command(**arguments: Any) -> None:
    """Show in how little memory MODEL runs, and what it costs.

    One plan a line, none better than another in both.
    """
    from memonger.cli import planning

    planning.pareto(**arguments)


@main.command(name="differentiate")
@options(
    MODEL,
    click.option("-o", "--output", type=OUTPUT, required=True, help="Write the training model here."),
    *DIMS,
    *TRAINING,
    click.option("--wrt", multiple=True, metavar="PATTERN", help="Differentiate by these; default: the parameters."),
    click.option("--frozen", multiple=True, metavar="PATTERN", help="Leave these parameters as they are."),
)
def differentiate_command(**arguments: Any) -> None:
    """Write MODEL and its backward pass as one model."""
    from memonger.cli import planning

    planning.write_differentiated(**arguments)


@main.command()
@options(MODEL, AS_JSON)
def inspect(**arguments: Any) -> None:
    """Show what a MODEL holds, and its plan if it has one."""
    from memonger.cli import files

    files.inspect(**arguments)


@main.command()
@options(MODEL, AS_JSON)
def verify(**arguments: Any) -> None:
    """Check the plan in MODEL with an independent checker.

    The exit status is 0 if the plan is correct.
    """
    from memonger.cli import files

    files.verify(**arguments)


@main.command()
@options(
    click.argument("planned", type=SOURCE),
    click.option("-o", "--output", type=OUTPUT, required=True, help="Write the model here."),
    click.option("--as-planned", is_flag=True,
                 help="Write the model that was planned: the whole training step, or what onnxruntime made of it."),
    AS_JSON,
)  # fmt: skip
def unplan(**arguments: Any) -> None:
    """Write the model that PLANNED was made from, without the plan.

    Of a training plan that is the forward model.
    """
    from memonger.cli import files

    files.unplan(**arguments)


@main.command()
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
    click.option("--color-by", type=click.Choice(["address", "storage"]), default="address", show_default=True,
                 help="What has one colour: the values that begin at one byte of the arena, or those of one storage."),
    *DIMS,
    AS_JSON,
)  # fmt: skip
def draw(**arguments: Any) -> None:
    """Draw MODEL, nodes coloured by where in memory their outputs lie.

    A planned one is drawn before and after, side by side.
    """
    from memonger.cli import drawing

    drawing.draw(**arguments)


@main.command(name="run")
@options(
    MODEL,
    MODE,
    *PLANNING,
    click.option("--outputs", type=OUTPUT, help="Write the outputs to this .npz."),
    click.option("--compare", is_flag=True, help="Compare outputs, latency and memory with stock onnxruntime."),
    click.option("--against", type=SOURCE, help="Model for the stock sessions; MODEL if left out."),
    click.option("--cuda-graph", type=click.Choice(GRAPHS), default="auto", show_default=True,
                 help="Capture runs on a CUDA device once and replay them; auto: where that is possible."),
    click.option("--atol", type=click.FloatRange(0), metavar="X",
                 help="Outputs pass if |planned - stock| <= X + rtol * |stock|; without both, bit for bit."),
    click.option("--rtol", type=click.FloatRange(0), metavar="X", help="See --atol."),
    click.option("--runs", type=click.IntRange(1, MOST_INSTANCES), default=30, show_default=True,
                 help="Timed runs of each session."),
    click.option("--warm-up", type=click.IntRange(0, MOST_INSTANCES), default=3, show_default=True, metavar="N",
                 help="Runs of each session before the timed ones."),
    click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True,
                 help="Seed of random inputs."),
    AS_JSON,
    QUIET,
)  # fmt: skip
def run_command(**arguments: Any) -> None:
    """Run MODEL as planned; one without a plan is planned first.

    Inputs are random numbers unless --inputs names an .npz. With --compare each session runs in a process of its own,
    and the exit status is 1 if the outputs aren't those of stock onnxruntime at the plan's own level.
    """
    from memonger.cli import run

    run.run(**arguments)


@main.command()
@options(
    click.argument("problem", type=SOURCE),
    click.option("--capacity", type=click.IntRange(1, MOST_BUDGET), metavar="BYTES", help="Fail if more is needed."),
    click.option("-o", "--output", type=OUTPUT, help="Write the offsets here."),
    AS_JSON,
)
def pack(**arguments: Any) -> None:
    """Lay out the buffers of a CSV file.

    PROBLEM is in MiniMalloc's format, a header and one row a buffer: id,lower,upper,size.
    """
    from memonger.cli import files

    files.pack(**arguments)


@main.command(name="export")
@options(
    click.argument("planned", type=SOURCE, nargs=-1, required=True),
    click.option("--target", required=True, metavar="NAME", help=f"One of {', '.join(TARGETS)}."),
    click.option("--output", "-o", type=SOURCE, required=True, help="The folder to make."),
    click.option("--name", help="The model's name for the server; left out: the file's."),
    click.option("--instances", type=click.IntRange(1, MOST_INSTANCES), default=1, show_default=True, metavar="N",
                 help="Requests served at a time, each in memory of its own."),
    click.option("--force", is_flag=True, help="Replace an earlier export."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)  # fmt: skip
def export_command(**arguments: Any) -> None:
    """Write what a serving stack loads from PLANNED files.

    Several are plans of one model for different batches.
    """
    from memonger.cli import export

    export.export(**arguments)


if __name__ == "__main__":
    main()
