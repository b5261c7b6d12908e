"""What a comparison with stock onnxruntime comes to: PASSED or FAILED, where, and how sure its ratios are."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memonger.cli import first_difference, noise
from memonger.cli.differences import Difference, Tolerance, difference
from memonger.cli.settings import CommandResult, Settings
from memonger.devices import Device
from memonger.lowering.device_form import LEVELS
from memonger.plan import Plan
from memonger.runtime.feeds import Feeds
from memonger.runtime.measure import Measured


class Ran(NamedTuple):
    """A session that was measured, and what it gave."""

    measured: Measured
    arrays: Mapping[str, Any]  # arrays, and lists of them for sequences


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared.

    Attributes:
        plan: The plan.
        stock: The model that stock onnxruntime ran.
        feeds: The inputs of both.
        device: Where both ran.
        settings: As the command was told.
        level: The level of the stock session that has to agree.
        before: The load of the machine before anything was timed.
        what: What is compared, in words.
        is_source: Whether stock onnxruntime ran the user's own model. Where the plan's level is its default, what
            counts is that model as it comes, its sizes open.
    """

    plan: Plan
    stock: Path
    feeds: Feeds
    device: Device
    settings: Settings
    level: str
    before: noise.Load
    what: str = "outputs"
    is_source: bool = False


def judge(case: Case, sessions: Mapping[str, Ran], report_progress: Callable[[str], None]) -> CommandResult:
    """Compare the session ``planned`` with ``stock``, or ``default``, which has to agree; see `Case.is_source`.

    Where they don't agree the first node that differs is looked for. The outputs are left to the caller.
    """
    ours, tolerance = sessions["planned"], case.settings.tolerance
    gaps = {name: difference(ours.arrays, sessions[name].arrays, tolerance) for name in ("stock", "default")}
    sections = {name: _section(ours.measured, sessions[name].measured, gap) for name, gap in gaps.items()}
    gap, where, explanation = gaps["stock"], None, ""
    stock = f"stock onnxruntime's at the plan's own level ({case.level})"
    if case.is_source and case.level == LEVELS["all"] and gap.passed != gaps["default"].passed:
        gap, stock = gaps["default"], "stock onnxruntime's as it comes, which isn't told the sizes"
        explanation = (
            "Told the sizes that are planned for, its outputs are the plan's: its optimizer computes otherwise where "
            "they are fixed."
        )
    if not gap.passed and not explanation:
        report_progress("finding the first node that differs")
        plan, threads = case.plan, case.settings.threads
        where = first_difference.find(plan, case.stock, case.feeds, case.device, threads, tolerance)
        explanation = first_difference.explain(plan, where)
    titles = {"stock": "stock, same level", "default": "stock, default"}
    ranges = {name: one["latency_ratio_range"] for name, one in sections.items()}
    most = max(ranges, key=lambda name: ranges[name][1] - ranges[name][0])
    noisy = noise.warning(sections[most]["latency_ratio"], ranges[most], case.before, titles[most])
    record = {
        **sections["stock"], "level": case.level, "peak_bytes": ours.measured.peak_bytes,
        "latency_seconds": ours.measured.latency_seconds, "latency_p95_seconds": ours.measured.p95_seconds,
        "stock_session": sections["stock"], "default_session": sections["default"], "passed": gap.passed,
        "atol": tolerance.atol, "rtol": tolerance.rtol,
        "first_difference": None if where is None else asdict(where),
        "noise": {**asdict(case.before), "warning": noisy or None}, "warm_up": case.settings.warm_up,
    }  # fmt: skip
    low, high = sections["stock"]["latency_ratio_range"]
    turns = f"From turn to turn the ratio of times at the same level was {low:.3f} to {high:.3f}."
    lines = (turns, sentence(gap, tolerance, stock, explanation, case.what))
    own = {key: record[key] for key in ("latency_seconds", "latency_p95_seconds", "peak_bytes")}
    of_stock = ({"session": titles[name], **section} for name, section in sections.items())
    rows = ({"session": "planned", **own}, *of_stock)
    return CommandResult({}, record, rows, lines, gap.passed, notes=(noisy,) if noisy else ())


def _section(ours: Measured, theirs: Measured, gap: Difference) -> dict[str, Any]:
    """What a comparison with one stock session found, for JSON."""
    ratio = ours.peak_bytes / theirs.peak_bytes if ours.peak_bytes is not None and theirs.peak_bytes else None
    return {
        "bitwise_equal": gap.bitwise_equal,
        "max_abs_diff": gap.max_abs_diff,
        "max_rel_diff": gap.max_rel_diff,
        "latency_seconds": theirs.latency_seconds,
        "latency_p95_seconds": theirs.p95_seconds,
        "latency_ratio": ours.latency_seconds / theirs.latency_seconds,
        "latency_ratio_range": noise.ratio_range(ours.turns, theirs.turns),
        "peak_bytes": theirs.peak_bytes,
        "peak_ratio": ratio,
    }


def sentence(gap: Difference, tolerance: Tolerance, stock: str, where: str, what: str = "outputs") -> str:
    """PASSED or FAILED, by what measure, and ``where``; ``what`` was compared with ``stock``."""
    if gap.bitwise_equal:
        return f"PASSED: {what} are identical, bit for bit, to {stock}."
    apart = gap.why or f"the largest difference is {gap.max_abs_diff:.2g}, {gap.max_rel_diff:.2g} of stock's number"
    if gap.passed:
        return f"PASSED: {what} are within {tolerance} of {stock}; {apart}."
    names = ", ".join(f"'{name}'" for name in gap.names[:3]) + (" and others" if len(gap.names) > 3 else "")
    verb = "is" if len(gap.names) == 1 else "are"
    beyond = f"{verb} not identical, bit for bit, to" if tolerance.is_exact else f"{verb} further than {tolerance} from"
    return f"FAILED: {names} {beyond} {stock}; {apart}. {where}"
