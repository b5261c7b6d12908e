"""Every error memonger raises on purpose. Each message says what is wrong, where, and what would work."""

from collections.abc import Iterator
from contextlib import contextmanager

from memonger.units import in_full, shown


class MemongerError(Exception):
    """Base of all errors a user can meet. The command line prints its text and exits with status 1.

    Names in the text may come from strangers: what isn't printable in it is escaped, see `memonger.units.shown`.
    """

    def __str__(self) -> str:
        return shown(super().__str__())


@contextmanager
def memory_checked(kind: type[MemongerError], task: str, advice: str) -> Iterator[None]:
    """Where memory runs out meanwhile, an error of ours that says for what, and what to do."""
    try:
        yield
    except MemoryError as error:
        raise kind(f"{task}: memory ran out. {advice}") from error


@contextmanager
def system_checked(kind: type[MemongerError], task: str) -> Iterator[None]:
    """Where the system refuses something meanwhile, an error of ours that says what, and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"{task}: {error.strerror or error}.") from error


class LoadError(MemongerError):
    """A model can't be read, or its shapes can't be made static."""


class PlanError(MemongerError):
    """A model can be read but not planned."""


class BudgetError(PlanError):
    """No plan was found that holds the budget.

    Attributes:
        budget: Bytes asked for.
        smallest: The smallest budget for which a plan was found: planning succeeds with it.
        lower_bound: No plan takes less.
        hint: What the message ends with.
    """

    def __init__(self, budget: int, smallest: int, lower_bound: int, hint: str = "") -> None:
        super().__init__(
            f"no plan within {in_full(budget)} was found. The smallest budget that was found to work is "
            f"{in_full(smallest)}; none below {in_full(lower_bound)} can work.{hint}"
        )
        self.budget, self.smallest, self.lower_bound, self.hint = budget, smallest, lower_bound, hint


class LayoutError(MemongerError):
    """Buffers can't be laid out: bad problem, or no room."""


class VerificationError(MemongerError):
    """A plan is wrong: it would read a dead value, overlap two live ones, or leave its arena."""


class PlanFileError(MemongerError):
    """A plan file is malformed, of a newer format, or not the plan of this model, machine or runtime."""


class RuntimeUnavailableError(MemongerError):
    """onnxruntime, or the device asked for, isn't there. The message names the extra to install."""


class SessionError(MemongerError):
    """A session can't run: wrong inputs, an order the runtime didn't follow, a shape no plan was made for."""


class ShapeError(SessionError):
    """An input has another shape than the one planned for.

    Attributes:
        problem: The message without what to do.
    """

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(f"{problem} {advice}".rstrip())
        self.problem = problem


class BusyError(SessionError):
    """A run waited for as long as it may, and others still had the memory it needs: the same run may succeed later."""


class FeedError(MemongerError):
    """Samples can't be read or fed, or no configuration holds its limits.

    Attributes:
        identity: The sample's, where one is at fault; else None. What the reader raised is the error's ``__cause__``.
    """

    def __init__(self, message: str, identity: object = None) -> None:
        super().__init__(message)
        self.identity = identity
