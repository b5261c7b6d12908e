"""What the memory of a plan is made of, and which lever would help most: what a first run is told."""

from dataclasses import dataclass

from memonger.devices import Device, parse_device
from memonger.graph.weight_window import choose_window, device_reads, least_bytes, weight_reads
from memonger.plan import LIMIT_MARGIN, Plan, is_sized_at_run_time
from memonger.report.view import WEIGHT, WORKSPACE, View
from memonger.units import MiB, format_size
from memonger.words import N, option

OF_KIND = {WEIGHT: "weights of ", WORKSPACE: "workspace of "}
"""What is said before where a tensor is that is no value of the arena."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is alive at the peak.

    Attributes:
        name: Of the tensor; of a workspace the node.
        where: The modules around the node that writes it, of a weight of inference around the first one that reads it;
            empty where its name says it.
        kind: One of `memonger.report.view.KINDS`.
        bytes: Its size.
    """

    name: str
    where: str
    kind: str
    bytes: int

    @property
    def words(self) -> str:
        """As in ``weights of classifier 3.91 MiB``."""
        of_kind = OF_KIND.get(self.kind, "") if self.where else ""
        return f"{of_kind}{self.where or self.name} {format_size(self.bytes)}"


@dataclass(frozen=True, slots=True)
class Makeup:
    """What a plan's total is made of.

    Attributes:
        largest: The largest tensors at the step with most bytes alive, the largest first.
        lever: What would help most, in a sentence; a figure in it is one that the plan has, or a budget that it can be
            made for. Nothing is said of what a lever would save that wasn't tried.
    """

    largest: tuple[Tensor, ...]
    lever: str

    @property
    def lines(self) -> tuple[str, ...]:
        """Both in sentences."""
        listed = ", ".join(each.words for each in self.largest)
        return (f"Largest at its peak: {listed}.", self.lever) if self.largest else (self.lever,)


def makeup(plan: Plan, count: int = 5) -> Makeup:
    """The ``count`` largest tensors of a plan at its peak, and the lever for the largest part of its total."""
    view, graph = View("", plan), plan.graph
    if not graph.nodes:
        return Makeup((), _lever(plan))
    worst = view.peak_step
    alive = [one for one in view.rectangles if one.start <= worst < one.stop]
    tensors = []
    for one in sorted(alive, key=lambda one: (-one.size, one.offset))[:count]:
        step: int | None = one.start if one.in_arena or one.kind == WORKSPACE else None
        if one.kind == WEIGHT and plan.mode == "inference":  # onnxruntime's optimizer gives some names of its own
            step = view.readers.get(one.name)
        where = "" if step is None else view.around(step)
        tensors.append(Tensor(one.name, where, one.kind, one.size))
    return Makeup(tuple(tensors), _lever(plan))


def _lever(plan: Plan) -> str:
    parts = {
        "weights": plan.resident_parameter_bytes, "values": plan.arena_bytes, "workspace": plan.workspace_bytes or 0,
        "values sized at run time": plan.run_time_bytes, "inputs": plan.input_bytes, "state": plan.state_bytes,
    }  # fmt: skip
    most = max(parts, key=lambda name: parts[name])
    share = parts[most] / (plan.total_bytes or 1)
    said = f"{'Most' if share >= 0.5 else 'The largest part'} of it is {most} ({100 * share:.0f} %):"
    device = parse_device(plan.device)
    if most == "weights":
        return f"{said} {_of_weights(plan, device)}."
    if most == "workspace" and not device.is_host:
        return f"{said} {option('small_workspace')} has kernels choose what takes less."
    if most == "values":
        return f"{said} {_of_values(plan, device)}."
    return f"{said} a smaller batch or input takes less of them."


def _of_weights(plan: Plan, device: Device) -> str:
    if plan.mode == "training":
        return f"adapters ({option('lora')}), or an optimizer with less state, leave less to keep"
    if plan.window is not None:
        least = _least(plan)
        more = f"down to {option('budget', f'{least // MiB}MiB')} more of" if least < plan.total_bytes else "no more of"
        return f"some stay in the plan's file already, and {more} them can"
    if plan.host_weights:
        return "some lie in the host's memory already, and a smaller budget leaves more there where it can"
    budget = None if device.facts.is_portable else _budget_below(plan, device)
    if budget is None:
        return "no order and no slices make them smaller"
    where = "plan's file" if device.is_host else "host's memory"
    return f"a budget below them ({option('budget', f'{budget // MiB}MiB')}) leaves some in the {where}"


def _least(plan: Plan) -> int:
    """The smallest budget, in whole MiB, that the plan's steps hold as they are: all weights pass that may."""
    reads = weight_reads(plan.model)
    kept = plan.parameter_bytes - sum(read.nbytes for read in reads)
    spare = LIMIT_MARGIN if is_sized_at_run_time(plan.model) else 0
    least = plan.total_bytes - plan.resident_parameter_bytes + kept + least_bytes(reads) + spare
    return -(-least // MiB) * MiB


def _budget_below(plan: Plan, device: Device) -> int | None:
    """A budget, in whole MiB, for which about half of the weights stay in the file; None where none can be held so."""
    reads = weight_reads(plan.model) if device.is_host else device_reads(plan.model, plan.host)
    whole = plan.parameter_bytes
    beside = plan.total_bytes - plan.resident_parameter_bytes  # the weights
    fixed = beside + whole - sum(read.nbytes for read in reads)
    for share in (0.5, 0.75):  # that is kept
        budget = -int(-(beside + whole * share) // MiB) * MiB
        try:
            # Of copies to a device the window is more than they take: they are values
            if budget < plan.total_bytes and choose_window(reads, budget - fixed) is not None:
                return budget
        except ValueError:
            continue
    return None


def _of_values(plan: Plan, device: Device) -> str:
    if plan.mode == "training":
        return "a budget below it has more of them computed again, at a cost that pareto shows"
    if plan.device == "none" and not plan.chunks:
        return f"{option('chunks', N)} has them run in so many slices"
    if plan.device == "none":
        return "more slices leave fewer of them at a time"
    if not device.is_host:
        return "a smaller batch takes less"
    more = f"{option('max_overhead', 0.1)} lets slices cost more time"
    if not plan.chunks:
        return f"nothing runs in slices at next to no cost; {more}"
    before, after = (max(getattr(band, f"bytes_{when}") for band in plan.chunks) for when in ("before", "after"))
    return f"slices took them from {format_size(before)} to {format_size(after)}; {more}"
