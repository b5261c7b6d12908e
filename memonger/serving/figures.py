"""Figures of what serves requests, for monitoring: Prometheus' text format, or a server's own metrics."""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from memonger.errors import BusyError


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, or one of each kind of something.

    Attributes:
        name: As in Prometheus; that of a counter ends in ``_total``.
        about: What it counts, in one line.
        label: Of what there are several, such as ``model``; empty: there is one value.
        values: By the label's value; by the empty text where there is one.
    """

    name: str
    about: str
    label: str
    values: Mapping[str, float]

    @property
    def is_counter(self) -> bool:
        """Whether it only grows."""
        return self.name.endswith("_total")


def text_of(figures: Iterable[Figure]) -> str:
    """Figures in Prometheus' text format."""
    lines = list[str]()
    for figure in figures:
        lines += [f"# HELP {figure.name} {figure.about}"]
        lines += [f"# TYPE {figure.name} {'counter' if figure.is_counter else 'gauge'}"]
        for key, value in figure.values.items():
            labels = f'{{{figure.label}="{_escaped(key)}"}}' if figure.label else ""
            lines.append(f"{figure.name}{labels} {value if isinstance(value, int) else f'{value:.6f}'}")
    return "\n".join([*lines, ""])


def _escaped(name: str) -> str:
    """A name within quotes of Prometheus' text format."""
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class WaitingTimes:
    """Counts who waits: how many now, for how many seconds in all, and how many were turned away."""

    def __init__(self) -> None:
        self._lock, self.now, self.seconds, self.turned_away = threading.Lock(), 0, 0.0, 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """One who waits, for the time of the block; a `BusyError` that ends it is counted."""
        begin, gave_up = time.perf_counter(), 0
        with self._lock:
            self.now += 1
        try:
            yield
        except BusyError:
            gave_up = 1
            raise
        finally:
            with self._lock:
                self.now -= 1
                self.seconds += time.perf_counter() - begin
                self.turned_away += gave_up

    def figures(self) -> list[Figure]:
        """What was counted."""
        return [
            Figure("memonger_waiting", "Requests that wait for an arena.", "", {"": self.now}),
            Figure("memonger_waiting_seconds_total", "How long requests have waited.", "", {"": self.seconds}),
            Figure("memonger_turned_away_total", "Requests that waited for too long.", "", {"": self.turned_away}),
        ]
