"""What a long search does, and about how long the rest takes, told to who asks for progress."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Course:
    """Steps of a few kinds, each done about so often.

    Args:
        progress: Called with a few words as each step begins; None: nobody asks.
        usual: How often each kind of step is done as a rule.
    """

    def __init__(self, progress: Callable[[str], None] | None, usual: Mapping[str, int]) -> None:
        self.progress, self.usual = progress, usual
        self.taken: dict[str, list[float]] = {kind: [] for kind in usual}

    @contextmanager
    def doing(self, kind: str, what: str) -> Iterator[None]:
        """Tell what begins now, and learn from how long it takes."""
        begin = time.perf_counter()
        if self.progress is not None:
            left = self._left()
            self.progress(f"fit: {what}" + (f", about {left:.0f} s left" if left >= 1 else ""))
        try:
            yield
        finally:
            self.taken[kind].append(time.perf_counter() - begin)

    def _left(self) -> float:
        """Seconds for the rest, if each kind is done as often as usual and takes as long as the last time."""
        rest = 0.0
        for kind, taken in self.taken.items():
            if taken:
                rest += max(0, self.usual[kind] - len(taken)) * taken[-1]
        return rest
