"""Who is compared with whom."""

from dataclasses import dataclass

SHARES = (0.7, 0.5, 0.3)  # budgets, of a plan's own peak without recomputation; of what torch.compile would keep
MORE = 1.6  # times PyTorch eager's largest batch


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to run a network.

    Attributes:
        key: Its name in the record.
        title: Its name in the table.
        library: ``torch`` or ``memonger``.
        mode: Of torch: ``eager``, ``checkpoint`` or ``compile``; of memonger ``plain``.
        plan: Of memonger, the plan's name, see `planning.Wish`.
        keeps: PyTorch never gives memory back to the system: fresh pages are slow on virtual machines.
        share: Of ``compile``, its ``activation_memory_budget``.
    """

    key: str
    title: str
    library: str
    mode: str
    plan: str = ""
    keeps: bool = False
    share: float = 1.0


EAGER = Contestant("eager", "PyTorch eager", "torch", "eager")
CHECKPOINT = Contestant("checkpoint", "PyTorch checkpoint", "torch", "checkpoint")
COMPILED = Contestant("compile", "torch.compile", "torch", "compile")
NONE = Contestant("none", "memonger", "memonger", "plain", "none")


def training(device: str) -> tuple[Contestant, ...]:
    """Those that train; the first is what the others are compared with."""
    kept = [Contestant("kept", "PyTorch, memory kept", "torch", "eager", keeps=True)] if device == "cpu" else []
    compiled = [
        Contestant(f"compile{100 * share:.0f}", f"torch.compile, {share:.0%}", "torch", "compile", share=share)
        for share in SHARES
    ]
    shares = [
        Contestant(f"share{100 * share:.0f}", f"memonger, {share:.0%}", "memonger", "plain", f"share {share}")
        for share in SHARES
    ]
    return (EAGER, *kept, CHECKPOINT, COMPILED, *compiled, NONE, *shares)


def largest(device: str) -> tuple[Contestant, ...]:
    """Those whose largest batch is sought."""
    more = Contestant("more", f"memonger, {MORE} x eager's", "memonger", "plain", "budget")
    return (EAGER, CHECKPOINT, NONE, more, Contestant("budget", "memonger, recomputing", "memonger", "plain", "budget"))


KINDS = {"training": training, "largest": largest}
