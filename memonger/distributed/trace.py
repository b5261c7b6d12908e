"""What a rank did when: its segments and its collectives, as Perfetto and Chrome's tracing show them."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from memonger.files import write_whole


class Trace:
    """Stretches of time on two tracks, ``segments`` and ``collectives``.

    Args:
        rank: Whose.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.stretches: list[tuple[str, str, int, int]] = []  # track, name, begin and end in ns

    def begin(self, track: str, name: str) -> Callable[[], None]:
        """Something begins; what is returned is to be called when it is over."""
        begin = time.perf_counter_ns()
        return lambda: self.stretches.append((track, name, begin, time.perf_counter_ns()))

    def overlap(self) -> float:
        """Seconds in which a collective was under way while a segment ran."""
        segments = [(a, b) for track, _, a, b in self.stretches if track == "segments"]
        others = [(a, b) for track, _, a, b in self.stretches if track == "collectives"]
        joined: list[tuple[int, int]] = []  # where those overlap
        for begin, end in sorted(others):
            if joined and begin <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((begin, end))
        return sum(max(0, min(b, d) - max(a, c)) for a, b in segments for c, d in joined) / 1e9

    def save(self, path: str | Path) -> None:
        """Write them in the Trace Event Format.

        Raises:
            OSError: the file can't be written.
        """
        tracks = {"segments": 0, "collectives": 1}
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": self.rank, "tid": tid, "args": {"name": name}}
            for name, tid in tracks.items()
        ]
        events.append({"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}})
        events += [
            {
                "name": name, "ph": "X", "pid": self.rank, "tid": tracks[track], "ts": begin / 1e3,
                "dur": (end - begin) / 1e3,
            }
            for track, name, begin, end in sorted(self.stretches, key=lambda each: each[2])
        ]  # fmt: skip
        text = json.dumps({"traceEvents": events}).encode()
        write_whole(Path(path), lambda target: target.write(text))
