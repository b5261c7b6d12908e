"""A plan as people hold it: a record for each buffer, a table for notebooks, and what was run to make it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from memonger.graph.graph import Graph
from memonger.graph.liveness import last_reads
from memonger.units import shown

Shape = tuple[int, ...] | None


@dataclass(slots=True)
class Spent:
    """What of a model was run to plan it.

    Attributes:
        runs: How often the whole model ran.
        seconds: How long all of these runs took.
        alone: How long its nodes took that ran alone, whole and on slices, sessions and inputs included.
        ratio: The time of a run in chunks over that of one without them, measured; None where it wasn't.
    """

    runs: int = 0
    seconds: float = 0.0
    alone: float = 0.0
    ratio: float | None = None

    def count(self, seconds: float) -> None:
        """One more run, which took so long."""
        self.runs, self.seconds = self.runs + 1, self.seconds + seconds


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """One value of a plan and where it lies. Values that share bytes (views, in place) have a record each.

    Attributes:
        name: The value; one that is computed again has ``.recompute<k>`` behind its name.
        node: The node that computes it, as the plan names it.
        operator: That node's operator.
        shape: Its shape; None in a plan for a graph without a model.
        offset: Its first byte in the arena.
        bytes: Its size.
        first_step: The step that computes it, counted from 0.
        last_step: The last step that needs it; of an output the plan's last step.
        kept: Whether it is computed once only, and kept for as long as anything needs it.
        recomputed: Whether this buffer holds what was computed before, dropped, and computed again.
    """

    name: str
    node: str
    operator: str
    shape: Shape
    offset: int
    bytes: int
    first_step: int
    last_step: int
    kept: bool
    recomputed: bool


def planned_buffers(graph: Graph, offsets: Mapping[int, int], shapes: Mapping[str, Shape]) -> Iterator[PlannedBuffer]:
    """A record for each planned value, in the order in which they are computed.

    Args:
        graph: The scheduled graph.
        offsets: Byte offset of each planned value, by value number.
        shapes: Of values, by name.
    """
    last, end = last_reads(graph), len(graph.nodes) - 1
    again = {graph.firsts[value] for value in graph.copies}
    for step, writes in enumerate(graph.writes):
        for value in (each for each in writes if each in offsets):
            name = graph.values[value]
            yield PlannedBuffer(
                name=name, node=graph.nodes[step], operator=graph.ops[step], shape=shapes.get(name),
                offset=offsets[value], bytes=graph.sizes[value], first_step=step,
                last_step=min(max(last[value], step), end),
                kept=graph.firsts[value] not in again, recomputed=value in graph.copies,
            )  # fmt: skip


def html_table(title: str, rows: Iterable[tuple[str, str]], notes: Iterable[str]) -> str:
    """A small table for a notebook. What comes from a model is escaped, for people and for HTML."""
    body = "".join(
        f'<tr><th style="text-align:left">{_safe(name)}</th><td style="text-align:right">{_safe(content)}</td></tr>'
        for name, content in rows
    )
    below = "".join(f"<p>{_safe(note)}</p>" for note in notes)
    return f"<div><strong>{_safe(title)}</strong><table>{body}</table>{below}</div>"


def _safe(text: str) -> str:
    from html import escape

    return escape(shown(text))
