"""The tuned constants of the search under a budget."""

from dataclasses import dataclass, field

from memonger.schedule.greedy import GreedyOptions


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of `memonger.schedule.portfolio`.

    They were chosen on the published problems in tests/data/remat (``python -m benchmarks.planning.remat``), and those
    for large problems on deep ResNets (``python -m benchmarks.planning.recompute``). Fractions of effort are of the
    effort of one search.

    Attributes:
        large: Number of nodes. Larger problems skip other evaluation orders and all greedy variants but the first, and
            change several things at once.
        huge: Number of nodes. Larger problems start from the best few of the initial schedules only.
        huge_initial: How many initial schedules a huge problem starts from.
        few: Number of nodes. What is counted per node is counted for so many at least.
        greedy: Variants of the greedy algorithm for the given order, before the plain one. The first one always runs,
            however small the effort is.
        first_work: Changes per node that the first variant may try. Networks need some twenty at most. It gives up as
            soon as its pace is too slow for that, as it is where nothing but the order is bad.
        plain_work: Changes that the plain algorithm may try, fewer in large problems. It has them for itself, whatever
            the effort is, so that no result is worse than its own.
        plain_faster: It gives up where it would have to be so many times as fast as until then.
        greedy_charge: Fraction of effort that is charged for the variants at most, so that the rest is left for others.
        greedy_reordered: The variant for another order.
        greedy_until: Fraction of effort after which no further greedy variant runs.
        greedy_patience: A further variant gives up when recomputation costs this many times what it does in the best.
        reordered_share: Fraction of effort that the greedy algorithm may take on another order.
        initial_share: Fraction of effort that the greedy algorithm may take on an initial schedule. It is not charged.
        repeats_share: Fraction of effort for few of the blocks that repeat in a large problem. It is not charged.
        probe: Fraction of effort for a first, short search for a better order.
        probe_left: The search for an order ends after the probe if more than this fraction of the excess is left: the
            order of most networks is good already.
        reorder: Fraction of effort for the full search for an order.
        shifts: How often the annealing moves nodes only, where another order was found to matter.
        explore: Fractions of effort at which the annealing runs from the starting schedules end. A last one, from the
            best schedule, takes the rest.
        explore_again: As ``explore``, from a schedule that only the search for the smallest budget found. Results of
            such starts vary more, so these are more runs.
        again: Fraction of the effort that this second exploration has.
        smallest_targets: Budgets for which the search for the smallest budget looks for another order, as fractions
            of the way from the lower bound to the peak without recomputation.
        first_step: Fraction of the bytes above the lower bound by which the smallest peak is lowered at first.
        first_step_large: The same for large problems.
        widest_step: Largest such fraction.
        last_step: The search for the smallest budget ends when the fraction falls below this.
        widening: Factor on the fraction after a success. It is halved after a failure.
        step_share: Fraction of effort that each lowering may take.
    """

    large: int = 2_000
    huge: int = 10_000
    huge_initial: int = 2
    few: int = 1_000
    greedy: tuple[GreedyOptions, ...] = (GreedyOptions(bulk=True), GreedyOptions())
    first_work: int = 500
    plain_work: int = 300_000
    plain_faster: float = 4.0
    greedy_charge: float = 0.5
    greedy_reordered: GreedyOptions = field(default_factory=GreedyOptions)
    greedy_until: float = 0.2
    greedy_patience: float = 2.0
    reordered_share: float = 0.3
    initial_share: float = 0.04
    repeats_share: float = 0.125
    probe: float = 0.02
    probe_left: float = 0.8
    reorder: float = 0.12
    shifts: float = 0.25
    explore: tuple[float, ...] = (0.15, 0.3, 0.45)
    explore_again: tuple[float, ...] = (0.3, 0.55, 0.8)
    again: float = 0.4
    smallest_targets: tuple[float, ...] = (0.4, 0.25)
    first_step: float = 0.03
    first_step_large: float = 0.5
    widest_step: float = 0.5
    last_step: float = 1e-4
    widening: float = 1.3
    step_share: float = 0.2
