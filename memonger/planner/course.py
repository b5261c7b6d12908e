"""What a long search does, and about how long the rest takes, told to who asks for progress."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from memonger.schedule.effort import Progress


class Course:
    """Steps of a few kinds, each done about so often.

    Args:
        progress: Called with a few words; None: nobody asks.
        usual: How often each kind of step is done as a rule.
    """

    def __init__(self, progress: Callable[[str], None] | None, usual: Mapping[str, int]) -> None:
        self.progress, self.usual = progress, usual
        self.taken: dict[str, list[float]] = {kind: [] for kind in usual}

    @contextmanager
    def doing(self, kind: str, what: str) -> Iterator[Callable[[Progress], None]]:
        """Tell what begins now, and learn from how long it takes. Gives what a search tells its progress."""
        begin = since = time.perf_counter()
        done = 0.0
        self._tell(what, self._left())

        def tell(progress: Progress) -> None:
            nonlocal since, done
            if progress.done < done:  # another search began
                since = time.perf_counter()
            spent, done = time.perf_counter() - since, progress.done
            whole = spent / progress.done if progress.done > 0.05 else 0.0
            self._tell(f"{what}, {progress.done:.0%}", max(0.0, whole - spent) + self._left(1))

        try:
            yield tell
        finally:
            self.taken[kind].append(time.perf_counter() - begin)

    def _tell(self, what: str, left: float) -> None:
        if self.progress is not None:
            self.progress(f"fit: {what}" + (f", about {left:.0f} s left" if left >= 1 else ""))

    def _left(self, begun: int = 0) -> float:
        """Seconds for the rest, if each kind is done as often as usual and takes as long as the last time."""
        done = {kind: len(taken) + begun for kind, taken in self.taken.items()}
        return sum(max(0, self.usual[kind] - done[kind]) * taken[-1] for kind, taken in self.taken.items() if taken)
