"""Who keeps and updates what, where several ranks share the optimizer's state (ZeRO, stage 1: Rajbhandari et al. 2020).

The gradients of a bucket are dealt out in the order in which they lie, so that each rank's are one stretch, as near to
equal bytes as whole tensors allow. A parameter and its optimizer state belong to the rank that has its gradient. ZeRO
itself cuts tensors; here an update runs as it was planned, on whole ones.
"""

from dataclasses import dataclass

from memonger.graph.collectives import collectives_of
from memonger.ir.training_roles import Training
from memonger.plan import Plan
from memonger.runtime.partition import Bucket


@dataclass(frozen=True, slots=True)
class Shares:
    """What can be dealt out.

    Attributes:
        buckets: Of each bucket its gradients in order: what they are for, parameters and their state, and their bytes.
    """

    buckets: tuple[tuple[tuple[tuple[str, ...], int], ...], ...]

    @staticmethod
    def of(plan: Plan, roles: Training) -> "Shares":
        """The shares of a plan; there are none in one without collectives."""
        graph, of_gradient = plan.graph, dict[str, list[str]]()
        for parameter, gradient in roles.whole_gradients.items():
            of_gradient.setdefault(gradient, []).append(parameter)
        found = []
        for each in (one for one in collectives_of(graph) if not one.is_mean):
            names = [(graph.values[graph.firsts[value]], graph.sizes[value]) for value in each.members]
            own = [
                (n if n in of_gradient else n.rpartition(".sent")[0], size) for n, size in names
            ]  # or copies of them
            found.append(tuple((_with_state(of_gradient[name], roles), size) for name, size in own))
        return Shares(tuple(found))

    def owners(self, size: int) -> dict[str, int]:
        """The rank that keeps each tensor, of so many ranks."""
        found = {}
        for members in self.buckets:
            for (names, _), owner in zip(members, _dealt([nbytes for _, nbytes in members], size), strict=True):
                found.update(dict.fromkeys(names, owner))
        return found

    def of_members(self, bucket: Bucket, size: int) -> list[int]:
        """The rank that gets each gradient of a bucket."""
        return _dealt([tensor.nbytes for tensor in bucket.members], size)

    def of_others(self, rank: int, size: int) -> frozenset[str]:
        """What another rank keeps."""
        return frozenset(name for name, owner in self.owners(size).items() if owner != rank)


def _dealt(sizes: list[int], ranks: int) -> list[int]:
    """The rank of each of some sizes: that whose equal part of the whole has its middle."""
    total, begin, found = max(1, sum(sizes)), 0, []
    for size in sizes:
        found.append(min(ranks - 1, (2 * begin + size) * ranks // (2 * total)))
        begin += size
    return found


def _with_state(parameters: list[str], roles: Training) -> tuple[str, ...]:
    """Parameters, and the optimizer's tensors for them."""
    longest = sorted(roles.parameters, key=len, reverse=True)
    owner = {name: next((p for p in longest if name.startswith(f"{p}.")), None) for name in roles.state}
    return (*parameters, *(name for name, parameter in owner.items() if parameter in parameters))
