"""What was measured, as it is kept: a JSON file that grows by a row at a time, and that a later call continues."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from memonger.files import write_whole


@dataclass(frozen=True, slots=True)
class Result:
    """One contestant on one network; bytes and seconds.

    Attributes:
        contestant: Its key.
        title: Its name.
        failed: Why there is nothing measured; empty where there is.
        batch: Samples of a step.
        peak: Most memory over what was in use before the network was made (CPU), before the process began (GPU).
        beside: Of these what is no tensor: on a GPU its context, on the CPU what libraries have left resident.
        held: Weights and momentum.
        predicted: What the plan says of the peak less ``beside``; None for those without a plan.
        session: What the plan says of ``beside``, about; None where it doesn't say.
        seconds: Of a step, the median of the turns in which the cores shared a cache; of all turns where they never
            did, or there is no telling.
        near: How many turns those are; 0 where the cores never did.
        far_seconds: The median of the turns in which the cores shared none; None where there were none.
        far: How many turns those are.
        apart: Difference of the first step's loss, before any weight has changed, from the first contestant's, over it.
        drift: The largest of all steps' losses: after updates, differences of rounding have grown.
        note: How it differs from what was asked for.
    """

    contestant: str
    title: str
    failed: str = ""
    batch: int = 0
    peak: int | None = None
    beside: int | None = None
    held: int = 0
    predicted: int | None = None
    session: int | None = None
    seconds: float | None = None
    near: int = 0
    far_seconds: float | None = None
    far: int = 0
    apart: float | None = None
    drift: float | None = None
    note: str = ""

    @property
    def tensors(self) -> int | None:
        """The peak less what is no tensor."""
        return None if self.peak is None else self.peak - (self.beside or 0)

    @property
    def net(self) -> int | None:
        """The peak less what is no tensor, weights and momentum."""
        return None if self.tensors is None else self.tensors - self.held

    @property
    def error(self) -> float | None:
        """Measured over predicted, less 1; what is no tensor aside."""
        tensors = self.tensors
        return None if tensors is None or not self.predicted else tensors / self.predicted - 1

    @property
    def whole_error(self) -> float | None:
        """The whole peak over all that the plan says, less 1."""
        known = self.peak is not None and self.predicted and self.session is not None
        return self.peak / (self.predicted + self.session) - 1 if known else None  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Row:
    """One network in one kind of comparison: ``training`` or ``largest``, where ``batch`` is 0.

    ``load`` is the machine's load average over the last minute when the row was done: above the number of threads
    others were at work, too.
    """

    kind: str
    network: str
    batch: int
    shape: tuple[int, ...]
    results: tuple[Result, ...]
    load: float = 0.0

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from other rows: kind, network and batch."""
        return self.kind, self.network, self.batch


@dataclass(frozen=True, slots=True)
class Record:
    """A whole table: where and how it was measured, and the rows there are until now."""

    head: tuple[str, ...]
    memory: int
    rows: tuple[Row, ...] = field(default=())

    def has(self, kind: str, network: str, batch: int) -> bool:
        """Whether there is such a row."""
        return any(row.key == (kind, network, batch) for row in self.rows)


def save(record: Record, path: Path) -> None:
    """Write it, whole or not at all."""
    text = json.dumps(asdict(record), indent=1) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


def load(path: Path) -> Record:
    """Read what `save` wrote."""
    data = json.loads(path.read_text())
    rows = tuple(
        Row(
            kind=row["kind"],
            network=row["network"],
            batch=row["batch"],
            shape=tuple(row["shape"]),
            results=tuple(Result(**result) for result in row["results"]),
            load=row["load"],
        )
        for row in data["rows"]
    )
    return Record(tuple(data["head"]), data["memory"], rows)


def merged(record: Record, row: Row, order: Sequence[tuple[str, str]]) -> Record:
    """The record with one more row, in the order of the table."""
    rows = [*(other for other in record.rows if other.key != row.key), row]
    rows.sort(key=lambda one: (order.index((one.kind, one.network)), one.batch))
    return Record(record.head, record.memory, tuple(rows))
