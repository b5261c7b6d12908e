"""A graph as a picture for graphviz, nodes coloured by where their outputs lie: OptNet's ``graphgen``.

Before and after the plan stand side by side. What is drawn for a node, and how, can be the caller's own.
"""

import colorsys
import shutil
import subprocess
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import onnx_ir as ir

from memonger.errors import MemongerError, PlanError
from memonger.graph.graph import Graph
from memonger.graph.liveness import assign_storage, worst_step
from memonger.ir.model import Model
from memonger.ir.names import matches
from memonger.ir.values import required_inputs, static_shape
from memonger.model.load import Source, load
from memonger.options import Options
from memonger.plan import BasePlan, GraphPlan, Plan
from memonger.planner.search_plan import prepare
from memonger.report.memory_count import planned_file
from memonger.units import format_size, shown
from memonger.words import check_choice, did_you_mean

ColorBy = Literal["address", "storage"]
Attributes = Mapping[str, object]

MOST_NODES = 200
"""Drawn where nothing else is said: graphviz takes seconds for more, and eyes longer."""

LONGEST = 48  # letters of a name in a node; its tooltip has all

DEPTH = 3  # edges from a node that is asked for


@dataclass(frozen=True, slots=True)
class DrawnValue:
    """What a node writes.

    Attributes:
        name: The value's name.
        bytes: Its size.
        shape: Its dimensions; None where they are unknown.
        offset: Its byte in the arena; None before the plan, and for what the runtime keeps.
        shares: Whether it lies where something lies that the node reads: in place, or a view.
    """

    name: str
    bytes: int
    shape: tuple[int, ...] | None = None
    offset: int | None = None
    shares: bool = False


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """One step of the graph, as the hooks of `draw` get it.

    Attributes:
        name: The node's name.
        op: Its operator.
        step: When it runs, from 0, in the order of the plan.
        outputs: What it writes.
        planned: Whether it is drawn as planned; else as it was before.
        again: Of a node that computes something again the name of the one that it is a copy of; else empty.
    """

    name: str
    op: str
    step: int
    outputs: tuple[DrawnValue, ...]
    planned: bool
    again: str = ""


NodeText = Callable[[str, DrawnNode], str]
NodeAttributes = Attributes | Callable[[DrawnNode], Attributes]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingSettings:
    """What is drawn, and how; see `draw`."""

    node_text: NodeText | None = None
    node_attributes: NodeAttributes | None = None
    around: Sequence[str] = ()
    depth: int = DEPTH
    max_nodes: int = MOST_NODES
    color_by: ColorBy = "address"

    def __post_init__(self) -> None:
        """Check them.

        Raises:
            PlanError: a number is below what makes sense, or ``color_by`` is unknown.
        """
        if type(self.max_nodes) is not int or self.max_nodes < 1:
            raise PlanError(f"max_nodes must be a whole number from 1, not {self.max_nodes!r}.")
        if type(self.depth) is not int or self.depth < 0:
            raise PlanError(f"depth must be a whole number from 0, not {self.depth!r}.")
        check_choice("color_by", self.color_by, get_args(ColorBy), PlanError)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture in graphviz' language.

    Attributes:
        text: The DOT.
        steps: How many steps there are.
        drawn: How many are drawn, as planned where there is a plan.
    """

    text: str
    steps: int
    drawn: int


def draw(
    source: Source | Model | Plan | GraphPlan,
    *,
    node_text: NodeText | None = None,
    node_attributes: NodeAttributes | None = None,
    around: str | Sequence[str] = (),
    depth: int = DEPTH,
    max_nodes: int = MOST_NODES,
    color_by: ColorBy = "address",
) -> str:
    """Draw a graph, as text in graphviz' language DOT: ``dot -Tsvg`` makes a picture of it.

    A plan is drawn twice, side by side: before, every value in memory of its own, and as planned. A box is a step; its
    colour says where in memory its output lies (stripes: several outputs), and it names operator, node, byte of the
    arena, size and shape. Equal colours are equal places. Dashed boxes run again, outputs of the graph have two
    frames, and the step with most live bytes a heavy one. Weights aren't drawn.

    Args:
        source: A plan, a planned file, or a model, as `memonger.load` takes or gives it.
        node_text: ``(text, node) -> text``: what stands in a box instead of ``text``; ``node`` is a
            `memonger.report.drawing.DrawnNode`. OptNet's ``nodeData``.
        node_attributes: Attributes of graphviz for every box, or ``node -> attributes``. OptNet's ``displayProps``.
        around: Names or glob patterns of nodes, operators or values: only what is near them is drawn.
        depth: How many edges from those.
        max_nodes: The most steps to draw. Of a larger graph those around the worst step are drawn, or those nearest to
            ``around``.
        color_by: ``address``: one colour for each byte of the arena at which values begin, so that memory used again
            shows. ``storage``: one for each storage, so that only views and what is in place share it.

    Raises:
        LoadError, PlanError, PlanFileError: the model can't be read, or ``around`` names nothing in it.
    """
    names = (around,) if isinstance(around, str) else tuple(around)
    return drawing(
        source,
        DrawingSettings(
            node_text=node_text, node_attributes=node_attributes, around=names, depth=depth, max_nodes=max_nodes,
            color_by=color_by,
        ),
    ).text  # fmt: skip


def drawing(source: Source | Model | Plan | GraphPlan, settings: DrawingSettings) -> Drawing:
    """As `draw`, with what was left out."""
    loaded = planned_file(source) if isinstance(source, str | Path) else source
    subject = _of_plan(loaded) if isinstance(loaded, BasePlan) else _of_model(load(loaded))
    chosen = _chosen(subject, settings)
    return Drawing("\n".join(_lines(subject, chosen, settings)) + "\n", len(subject.graph.nodes), len(chosen))


@dataclass(frozen=True)  # without slots, as it keeps what it derives
class _Subject:
    """What is drawn.

    Attributes:
        graph: One node a step.
        offsets: Of its values; None without a plan.
        of_value: The storage of each value, -1 without one.
        worst: The step with most live bytes.
        title: What heads the picture.
        shapes: Of values by name.
        inputs: Names of the values that a caller gives.
        summaries: Of both sides: what their memory comes to.
    """

    graph: Graph
    offsets: Mapping[int, int] | None
    of_value: Sequence[int]
    worst: int
    title: str
    summaries: tuple[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: frozenset[str] = frozenset()


def _of_plan(plan: BasePlan) -> _Subject:
    summaries = f"{format_size(plan.activation_bytes)}", f"an arena of {format_size(plan.arena_bytes)}"
    model = plan.model if isinstance(plan, Plan) else None
    title = str(model.graph.name or "") if model is not None else "graph"
    return _Subject(
        plan.graph, plan.offsets, plan.storage.of_value, worst_step(plan.storage.buffers, len(plan.graph.nodes)),
        title, summaries, *_described(model),
    )  # fmt: skip


def _of_model(model: Model) -> _Subject:
    mode: Literal["training", "inference"] = "training" if model.is_differentiated else "inference"
    job = prepare(model, Options(mode=mode, device="none"))
    lowered, graph = job.lowered.model, job.request.graph
    storage = assign_storage(graph)
    size = format_size(sum(size for size, planned in zip(graph.sizes, graph.planned, strict=True) if planned))
    worst = worst_step(storage.buffers, len(graph.nodes))
    return _Subject(graph, None, storage.of_value, worst, model.name, (size, ""), *_described(lowered))


def _described(model: ir.Model | None) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """The shapes of values, and the inputs a caller gives."""
    if model is None:
        return {}, frozenset()
    values = (v for node in model.graph for v in node.outputs)
    shapes = {str(v.name): dims for v in values if (dims := static_shape(v)) is not None}
    return shapes, frozenset(str(v.name) for v in required_inputs(model.graph))


def _chosen(subject: _Subject, settings: DrawingSettings) -> list[int]:
    """The steps to draw, ascending."""
    steps, most = len(subject.graph.nodes), settings.max_nodes
    if settings.around:
        return sorted(_near(subject.graph, _named(subject, settings.around), settings.depth)[:most])
    first = max(0, min(subject.worst - most // 2, steps - most))
    return list(range(first, min(first + most, steps)))


def _named(subject: _Subject, patterns: Sequence[str]) -> list[int]:
    graph, found = subject.graph, list[int]()
    written = ([graph.values[value] for value in values] for values in graph.writes)
    names = [(node, op, *values) for node, op, values in zip(graph.nodes, graph.ops, written, strict=True)]
    for pattern in patterns:
        here = [step for step, own in enumerate(names) if matches(own, pattern)]
        if not here:
            known = ", ".join(dict.fromkeys(graph.nodes[:4]))
            near = did_you_mean(pattern, [*graph.nodes, *graph.values])
            raise PlanError(
                f"{subject.title}: '{pattern}' names no node to draw around: give a node's name ({known} ...), its "
                f"operator or its output; * and ? stand for any letters.{near}"
            )
        found.extend(here)
    return list(dict.fromkeys(found))


def _near(graph: Graph, begin: Sequence[int], depth: int) -> list[int]:
    """Steps within some edges of others, nearest first."""
    depth_of = dict.fromkeys(begin, 0)
    pending = list(begin)
    for step in pending:
        if depth_of[step] == depth:
            continue
        beside = [*graph.sources[step], *(reader for value in graph.writes[step] for reader in graph.readers[value])]
        for other in beside:
            if other not in depth_of:
                depth_of[other] = depth_of[step] + 1
                pending.append(other)
    return pending


def _lines(subject: _Subject, chosen: Sequence[int], settings: DrawingSettings) -> Iterator[str]:
    steps, colors = len(subject.graph.nodes), _Colors()
    left_out = f": {len(chosen)} of {steps} steps" if len(chosen) < steps else ""
    yield f"digraph {_quoted(subject.title)} {{"
    yield f"  graph [{_listed({'label': subject.title + left_out, 'labelloc': 't', 'fontname': 'Helvetica'})}];"
    yield "  node [shape=box, style=filled, fillcolor=white, fontname=Helvetica, fontsize=10];"
    yield '  edge [color="#808080", arrowsize=0.6];'
    once = [step for step in chosen if not subject.graph.again[step]]
    title = f"{subject.summaries[0]}, every value in memory of its own"
    sides = []
    if subject.offsets is not None:  # first, so that it gets the clearest colours
        sides.append(list(_side(subject, chosen, settings, colors, f"after: {subject.summaries[1]}")))
    sides.append(list(_side(subject, once, settings, colors, f"before: {title}")))
    for side in reversed(sides):
        yield from side
    yield "}"


def _side(
    subject: _Subject, steps: Sequence[int], settings: DrawingSettings, colors: "_Colors", title: str
) -> Iterator[str]:
    """One cluster: its boxes, the inputs they read, and the edges."""
    planned = title.startswith("after")
    graph, prefix = subject.graph, "after" if planned else "before"
    yield f"  subgraph cluster_{prefix} {{"
    yield f"    graph [{_listed({'label': title, 'style': 'rounded', 'color': '#b0b0b0'})}];"
    writer, given = dict[int, str](), dict[int, str]()
    edges: dict[str, None] = {}
    for step in steps:
        here = f"{prefix}{step}"
        for read in graph.reads[step]:
            value = read if planned else subject.graph.firsts[read]
            if graph.values[value] in subject.inputs:
                given.setdefault(value, f"{prefix}_input{value}")
            origin = writer.get(value) or given.get(value)
            if origin:
                edges[f"{origin} -> {here}"] = None
        yield f"    {here} [{_listed(_box(subject, step, planned, settings, colors))}];"
        writer.update(dict.fromkeys(graph.writes[step], here))
    for value, name in given.items():
        yield f"    {name} [{_listed({'label': _short(graph.values[value]), 'shape': 'ellipse'})}];"
    yield from (f"    {edge};" for edge in edges)
    yield "  }"


def _box(
    subject: _Subject, step: int, planned: bool, settings: DrawingSettings, colors: "_Colors"
) -> dict[str, object]:
    """The attributes of a box."""
    graph = subject.graph
    node = _drawn_node(subject, step, planned)
    fills = [
        colors.of(_place(subject, value, planned, settings.color_by))
        for value in graph.writes[step]
        if subject.of_value[value] >= 0
    ]
    fills = list(dict.fromkeys(fills))
    styles = ["striped" if len(fills) > 1 else "filled", *(["dashed"] if node.again and planned else [])]
    text = _text(node)
    box: dict[str, object] = {
        "label": text if settings.node_text is None else settings.node_text(text, node),
        "fillcolor": ":".join(fills) or "white",
        "style": ",".join(styles),
        "tooltip": "\n".join((node.name, *(value.name for value in node.outputs))),
    }
    if not set(graph.outputs).isdisjoint(graph.writes[step]):
        box["peripheries"] = 2
    if planned and step == subject.worst:
        box["penwidth"] = 3
    own = settings.node_attributes
    return {**box, **(own(node) if callable(own) else own or {})}


def _place(subject: _Subject, value: int, planned: bool, color_by: ColorBy) -> Hashable:
    """What two values have in common that have one colour."""
    if not planned or subject.offsets is None:
        return ("own", value)
    return ("address", subject.offsets[value]) if color_by == "address" else ("storage", subject.of_value[value])


def _drawn_node(subject: _Subject, step: int, planned: bool) -> DrawnNode:
    graph, of_value = subject.graph, subject.of_value
    read = {of_value[value] for value in graph.reads[step]} - {-1}
    outputs = tuple(
        DrawnValue(
            graph.values[value], graph.sizes[value],
            subject.shapes.get(graph.values[value]),
            subject.offsets.get(value) if planned and subject.offsets is not None else None,
            planned and of_value[value] in read,
        )
        for value in graph.writes[step]
    )  # fmt: skip
    name = graph.nodes[step]
    return DrawnNode(name, graph.ops[step], step, outputs, planned, graph.again[step])


def _text(node: DrawnNode) -> str:
    lines = [f"{node.op}, again" if node.again else node.op, _short(node.again or node.name)]
    for value in node.outputs:
        name = f"{_short(value.name)}: " if len(node.outputs) > 1 else ""
        at = "" if value.offset is None else f"@{value.offset:,} · "
        dims = "" if value.shape is None else f" [{', '.join(map(str, value.shape))}]"
        lines.append(f"{name}{at}{format_size(value.bytes)}{dims}{', in place' if value.shares else ''}")
    return "\n".join(lines)


def _short(name: str) -> str:
    half = LONGEST // 2
    return name if len(name) <= LONGEST else f"{name[: half - 1]}…{name[-half:]}"


class _Colors:
    """A colour for each place, in the order places are met: far apart, and light enough for black letters."""

    def __init__(self) -> None:
        self._of: dict[Hashable, int] = {}
        self._taken = set[int]()

    def of(self, place: Hashable) -> str:
        """The colour of a place, as ``#rrggbb``: no other place has it."""
        if place not in self._of:
            color = _color(len(self._of))
            while color in self._taken:
                color = (color + 1) % (1 << 24)
            self._taken.add(color)
            self._of[place] = color
        return f"#{self._of[place]:06x}"


def _color(number: int) -> int:
    """Hues by the golden ratio, saturation and value by other irrational steps: a sequence that fills the space."""
    hue, saturation, value = (0.58 + number * 0.6180340) % 1, number * 0.7548777 % 1, number * 0.5698403 % 1
    channels = colorsys.hsv_to_rgb(hue, 0.25 + 0.4 * saturation, 0.82 + 0.16 * value)
    red, green, blue = (round(channel * 255) for channel in channels)
    return red << 16 | green << 8 | blue


def _listed(attributes: Mapping[str, object]) -> str:
    return ", ".join(f"{_quoted(key)}={_quoted(value)}" for key, value in attributes.items())


def _quoted(text: object) -> str:
    """A string of DOT: quotes and backslashes are letters, line breaks are line breaks, the rest is printable."""
    lines = (shown(line).replace("\\", "\\\\").replace('"', '\\"') for line in str(text).split("\n"))
    return '"' + "\\n".join(lines) + '"'


def rendered(text: str, form: str) -> bytes:
    """A picture of a text in DOT, by graphviz' program ``dot``.

    Args:
        text: The DOT.
        form: ``svg``, ``png`` or ``pdf``.

    Raises:
        MemongerError: the program isn't there, or refuses the text.
    """
    program = shutil.which("dot")
    if program is None:
        raise MemongerError(
            f"an {form.upper()} is drawn by graphviz' program dot, which isn't installed (apt install graphviz, brew "
            "install graphviz). Without it, write DOT (-o graph.dot), which other programs draw, too."
        )
    done = subprocess.run([program, f"-T{form}"], input=text.encode(), capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
        raise MemongerError(f"graphviz' program dot refuses the graph: {said[0]}")
    return done.stdout
