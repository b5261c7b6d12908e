"""What the rows turn into: a table, plots, the table of facts, sentences of docs/CUDA.md. What isn't there is said."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_day import record
from benchmarks.gpu_day.record import Row
from benchmarks.gpu_day.stages import STAGES, Stage
from benchmarks.gpu_day.windows import AHEAD, SHARES
from benchmarks.machine import MIB, Table, geometric_mean, pyplot
from benchmarks.training.side_by_side import plots, results
from benchmarks.training.side_by_side.table import ratios
from benchmarks.training.side_by_side.table import table as training_table
from tests.facts.checks import CHECKS
from tests.facts.fact import FAILS, HOLDS, LOST, Fact, written

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "CUDA.md"
BEGIN, END = "<!-- gpu_day: written by `python -m benchmarks.gpu_day --print` -->", "<!-- /gpu_day -->"
TITLES = {
    "planned": "memonger",
    "graph": "memonger, CUDA graph",
    "requested": "stock, as requested",
    "default": "stock",
}
CLOSE = 0.05  # predicted over measured, less 1


def write(rows: Sequence[Row], out: Path) -> None:
    """Write everything beside the rows, and print the table and the sentences; the page's where it is its place."""
    out.mkdir(parents=True, exist_ok=True)
    text = table(rows)
    (out / "table.txt").write_text(text, encoding="utf-8")
    facts = facts_table(rows)
    if facts:
        (out / "cuda_facts.txt").write_text(facts, encoding="utf-8")
    _plot(rows, out)
    click.echo(text)
    click.echo("\n".join(sentences(rows)))
    if out.resolve() == (Path(__file__).parent / "measured").resolve() and PAGE.is_file():
        PAGE.write_text(with_sentences(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


def with_sentences(text: str, rows: Sequence[Row]) -> str:
    """A page with the sentences of the rows between its two marks."""
    begin, end = text.index(BEGIN), text.index(END)
    return text[:begin] + "\n".join([BEGIN, *sentences(rows), ""]) + text[end:]


def is_real(rows: Sequence[Row]) -> bool:
    """Whether the rows are of a device, not of a rehearsal on the stand-in."""
    about = record.head(rows)
    return about is not None and bool(about["is_real"])


def sentences(rows: Sequence[Row]) -> list[str]:
    """What was measured, a line each; what wasn't is said to be so."""
    about = record.head(rows)
    if about is None or not about["is_real"]:
        return ["Nothing was measured on a GPU yet: `python -m benchmarks.gpu_day` does it in ten minutes."]
    lines = [f"Measured on {about['device']}:"]
    for key, say in _SAY.items():
        lines.append(f"- {say(record.of(rows, key)) if record.of(rows, key) else f'{_title(key)}: not measured yet.'}")
    return lines


def _title(key: str) -> str:
    return next(stage.title for stage in STAGES if stage.key == key)


def _say_sessions(rows: Sequence[Row]) -> str:
    passed, failures = sum(row["passed"] for row in rows), [name for row in rows for name in row["failures"]]
    names = f": {', '.join(failures)}" if failures else ""
    return f"{passed} tests of sessions and plans pass on it, {len(failures)} fail{names}."


def _say_inference(rows: Sequence[Row]) -> str:
    memory = _over(rows, "planned", "default", lambda one: one["taken"])
    asked = _over(rows, "planned", "requested", lambda one: one["taken"])
    plain, graph = (_over(rows, key, "default", lambda one: one["milliseconds"]) for key in ("planned", "graph"))
    errors = [row["predicted"] / row["contestants"]["planned"]["taken"] - 1 for row in rows if _ran(row, "planned")]
    alike = [row["contestants"]["planned"]["same_bits"] for row in rows if _ran(row, "planned")]
    close = sum(abs(error) <= CLOSE for error in errors)
    return (
        f"Over {len(rows)} cases of inference a session takes {_mean(memory)} of stock onnxruntime's device memory "
        f"({_mean(asked)} of what it takes as requested), weights included, at {_mean(plain)} of its time, "
        f"{_mean(graph)} as a CUDA graph; {close} of {len(errors)} took what was predicted to {CLOSE:.0%}; "
        f"{sum(alike)} of {len(alike)} have its bits at the same level."
    )


def _say_training(rows: Sequence[Row]) -> str:
    found = _record(rows, 0).rows
    words = []
    for key, title in (("none", "with nothing recomputed"), ("share50", "in half"), ("share30", "in 30 %")):
        time, peak = ratios(found, key, lambda r: r.seconds), ratios(found, key, lambda r: r.tensors)
        words.append(f"{title} {_mean(time)} of PyTorch eager's time in {_mean(peak)} of its memory")
    return f"Training steps of {len(found)} networks take {'; '.join(words)}."


def _say_largest(rows: Sequence[Row]) -> str:
    found = _record(rows, 0).rows
    more = _mean(ratios(found, "budget", lambda r: r.batch))
    return f"In 12 GB {more} times PyTorch eager's batch trains, of {len(found)} networks."


def _say_slices(rows: Sequence[Row]) -> str:
    words = []
    for key in ("planned, slices", "stock, Loop"):
        found = [row for row in rows if _ran(row, key) and _ran(row, "stock, whole")]
        memory = [row["contestants"][key]["taken"] / row["contestants"]["stock, whole"]["taken"] for row in found]
        time = [
            row["contestants"][key]["milliseconds"] / row["contestants"]["stock, whole"]["milliseconds"]
            for row in found
        ]
        words.append(f"{key}: {_mean(memory)} of the memory at {_mean(time)} of the time")
    return f"A batch in slices, over stock's whole one: {'; '.join(words)}."


def _say_windows(rows: Sequence[Row]) -> str:
    words = []
    for share in SHARES:
        held = [row["contestants"] for row in rows if _ran(row, f"budget {share}%") and _ran(row, "budget 100%")]
        of = [(one[f"budget {share}%"], one["budget 100%"]) for one in held]
        if not of:
            words.append(f"{share} %: not measured")
            continue
        memory = _mean([mine["taken"] / whole["taken"] for mine, whole in of])
        time = _mean([mine["milliseconds"] / whole["milliseconds"] for mine, whole in of])
        alike = sum(mine.get("same_bits", False) for mine, _ in of)
        said = f"{share} %: {memory} of the memory at {time} of the time, stock's bits in {alike} of {len(of)}"
        title = f"budget {share}%"
        both = [one for one in held if one.get(title + AHEAD, {}).get("milliseconds")]
        if both:
            ratio = _mean([one[title + AHEAD]["milliseconds"] / one[title]["milliseconds"] for one in both])
            said += f" (copied ahead in {ratio} of the time of copies in order, {len(both)} of {len(of)})"
        words.append(said)
    return f"Budgets below the weights, over plans that hold all of them: {'; '.join(words)}."


def _say_nccl(rows: Sequence[Row]) -> str:
    one = rows[0]["contestants"]
    if not _ran(rows[0], "one rank") or not _ran(rows[0], "alone"):
        return "One rank over NCCL failed."
    alike = "the same losses" if one["one rank"]["losses"] == one["alone"]["losses"] else "other losses"
    time = one["one rank"]["milliseconds"] / one["alone"]["milliseconds"]
    return f"One rank over NCCL has {alike} as without, at {time:.2f} of the time."


def _say_facts(rows: Sequence[Row]) -> str:
    verdicts = [fact["verdict"] for row in rows for fact in row["facts"]]
    holds, fails, lost = (verdicts.count(verdict) for verdict in (HOLDS, FAILS, LOST))
    asked = f"{holds + fails} statements on onnxruntime were tried: {holds} hold, {fails} don't"
    return f"{asked}{f', {lost} checks broke off' if lost else ''} (docs/CUDA.md says what follows)."


def _say_steps(rows: Sequence[Row]) -> str:
    planned = [one for row in rows for one in row["steps"] if one.get("planned") and one.get("measured")]
    if not planned:
        return "PyTorch's own steps within budgets failed."
    over = max(one["measured"] / one["planned"] - 1 for one in planned)
    return f"{len(planned)} steps of PyTorch within budgets took what was planned, or up to {over:.1%} more."


_SAY: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "sessions": _say_sessions, "facts": _say_facts, "inference": _say_inference, "training": _say_training,
    "steps": _say_steps, "slices": _say_slices, "windows": _say_windows, "nccl": _say_nccl, "largest": _say_largest,
}  # fmt: skip


def _ran(row: Row, key: str) -> bool:
    found = row["contestants"].get(key, {"failed": "left out"})
    return not found.get("failed") and found.get("taken", 0) > 0


def _over(rows: Sequence[Row], key: str, other: str, of: Callable[[Any], float]) -> list[float]:
    both = [row["contestants"] for row in rows if _ran(row, key) and _ran(row, other)]
    return [of(one[key]) / of(one[other]) for one in both]


def _mean(found: Sequence[float]) -> str:
    positive = [one for one in found if one > 0]
    return f"{geometric_mean(positive):.2f}" if positive else "an unknown part"


def table(rows: Sequence[Row]) -> str:
    """All rows as text, stage by stage."""
    about = record.head(rows)
    if about is None:
        return "Nothing was measured.\n"
    lines = [about["device"], about["versions"], about["machine"], f"TF32 {'on' if about['tf32'] else 'off'}"]
    lines.append(f"A bare CUDA context takes {about['context'] / MIB:.1f} MiB; it isn't counted below.")
    if not about["is_real"]:
        lines.append("A STAND-IN (tests/support/fake_cuda): kernels do nothing; no figure below means anything.")
    for stage in STAGES:
        done, lost = record.of(rows, stage.key), record.failed(rows, stage.key)
        lines += ["", f"{stage.title} ({stage.key})", "-" * len(f"{stage.title} ({stage.key})")]
        lines += _TABLES[stage.key](done, about) if done else ["not measured"]
        lines += [f"failed: {row['item']}: {row['failed']}" for row in lost]
        lines += _missing(stage, done, lost)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _missing(stage: Stage, done: Sequence[Row], lost: Sequence[Row]) -> list[str]:
    there = {row["item"] for row in (*done, *lost)}
    left = [item for item in stage.items if item not in there]
    return [f"not measured: {', '.join(left)}"] if left and there else []


def _sessions_table(rows: Sequence[Row], about: Row) -> list[str]:
    lines = []
    for row in rows:
        lines.append(
            f"{row['item']}: {row['passed']} passed, {row['skipped']} skipped, {len(row['failures'])} failed, "
            f"{row['seconds']} s"
        )
        lines += [f"  {name}: {words}" for name, words in row["failures"].items()]
    return lines


def _facts_rows(rows: Sequence[Row], about: Row) -> list[str]:
    facts = [(row["item"], fact) for row in rows for fact in row["facts"]]
    count = {verdict: sum(fact["verdict"] == verdict for _, fact in facts) for verdict in (HOLDS, FAILS, LOST)}
    lines = [", ".join(f"{verdict}: {number}" for verdict, number in count.items()) + "; all of them: cuda_facts.txt"]
    return lines + [
        f"  {item}: {fact['claim']}: {fact['seen']}"[:240] for item, fact in facts if fact["verdict"] in (FAILS, LOST)
    ]


def _inference_table(rows: Sequence[Row], about: Row) -> list[str]:
    columns = Table(
        "network:batch<18", "session<22", "MiB>9.1f", "÷>7.3f", "peak>9.1f",
        "predicted>10.1f", "error>+8.1%", "ms>9.3f",
        "÷>7.3f", "bits<6", "apart>9.1e", missing="-",
    )  # fmt: skip
    lines = [
        "MiB: of the device, by its driver, weights included, over what was in use before; ÷: over stock's;",
        "bits: as stock's at the same level; apart: from the CPU's outputs at most, over the largest, up to 16 samples",
        columns.heading,
    ]
    for row in rows:
        found = row["contestants"]
        first = found["default"] if _ran(row, "default") else None
        for number, (key, title) in enumerate(TITLES.items()):
            one, name = found[key], row["item"] if not number else ""
            if one.get("failed"):
                lines.append(f"{columns.row(name, title)}  failed: {one['failed']}")
                continue
            planned = key in ("planned", "graph")
            error = row["predicted"] / one["taken"] - 1 if key == "planned" and one["taken"] else None
            lines.append(columns.row(
                name, title, one["taken"] / MIB, one["taken"] / first["taken"] if first else None, one["peak"] / MIB,
                row["predicted"] / MIB if planned else None, error, one["milliseconds"],
                one["milliseconds"] / first["milliseconds"] if first else None,
                ("same" if one["same_bits"] else "other") if about["is_real"] else "-",
                one["apart"] if about["is_real"] else None,
            ))  # fmt: skip
    return lines


def _contest_table(rows: Sequence[Row], about: Row) -> list[str]:
    columns = Table("item<22", "session<18", "MiB>9.1f", "peak>9.1f", "ms>9.3f", "bits<6", missing="-")
    lines = [columns.heading]
    for row in rows:
        for number, (title, one) in enumerate(row["contestants"].items()):
            name = row["item"] if not number else ""
            if one.get("failed"):
                lines.append(f"{columns.row(name, title)}  failed: {one['failed']}")
                continue
            bits = ("same" if one["same_bits"] else "other") if about["is_real"] and "same_bits" in one else ""
            lines.append(columns.row(name, title, one["taken"] / MIB, one["peak"] / MIB, one["milliseconds"], bits))
    return lines


def _windows_table(rows: Sequence[Row], about: Row) -> list[str]:
    lines = _contest_table(rows, about)
    for row in rows:
        for title, one in row["contestants"].items():
            if "copied" in one:
                planned, apart, copied = (one[key] / MIB for key in ("total", "on_the_host", "copied"))
                said = f"{planned:.1f} MiB planned, {apart:.1f} of weights on the host, {copied:.1f} copied a run"
                ahead = f", {one['ahead'] / MIB:.1f} of them ahead" if one.get("ahead") else ""
                lines.append(f"{row['item']}, {title}: {said}{ahead}")
    return lines


def _steps_table(rows: Sequence[Row], about: Row) -> list[str]:
    columns = Table(
        "network<14", "step<12", "budget>9.1f", "planned>9.1f", "measured>9.1f", "ms>8.2f", "apart>8.1e", "own>8.1e",
        missing="-",
    )  # fmt: skip
    lines = [
        "MiB; gradients apart from the eager step's, and from those of its kind without a budget, over the largest",
        columns.heading,
    ]
    for row in rows:
        for number, one in enumerate(row["steps"]):
            name = row["item"] if not number else ""
            if one.get("failed"):
                lines.append(f"{columns.row(name, one['step'])}  failed: {one['failed']}")
                continue
            sizes = (one[key] / MIB if one.get(key) else None for key in ("budget", "planned", "measured"))
            lines.append(
                columns.row(name, one["step"], *sizes, one["milliseconds"], one["apart"], one.get("apart_from_own"))
            )
    return lines


def _record(rows: Sequence[Row], memory: int) -> results.Record:
    """Rows of `benchmarks.training.side_by_side` as it keeps them."""
    found = []
    for row in (row["row"] for row in rows):
        each = tuple(results.Result(**result) for result in row["results"])
        found.append(results.Row(row["kind"], row["network"], row["batch"], tuple(row["shape"]), each, row["load"]))
    return results.Record((), memory, tuple(found))


def _side_by_side(rows: Sequence[Row], about: Row) -> list[str]:
    lines = training_table(_record(rows, 12_000_000_000), cuda=True).splitlines()
    return lines if rows[0]["stage"] == "training" else lines[lines.index("", 1) :]  # what columns mean is said once


_TABLES: Mapping[str, Callable[[Sequence[Row], Row], list[str]]] = {
    "sessions": _sessions_table, "facts": _facts_rows, "inference": _inference_table, "training": _side_by_side,
    "steps": _steps_table, "slices": _contest_table, "windows": _windows_table, "nccl": _contest_table,
    "largest": _side_by_side,
}  # fmt: skip


def facts_table(rows: Sequence[Row]) -> str:
    """The table of `tests.facts`, of the checks there are; what tests/facts/cuda_facts.txt is to say, where all are."""
    about, checks = record.head(rows), {row["item"]: row["facts"] for row in record.of(rows, "facts")}
    if about is None or not checks:
        return ""
    kind = (
        "a real device"
        if about["is_real"]
        else "A STAND-IN (tests/support/fake_cuda): kernels do nothing, values mean nothing"
    )
    text = f"What onnxruntime does with CUDA. {about['device']}, {kind}.\n{about['machine']}\n"
    for name, check in CHECKS.items():
        body = written(Fact(**fact) for fact in checks[name]) if name in checks else "not checked\n"
        text += f"\n{check.title}\n{'-' * len(check.title)}\n{body}"
    return text


def _plot(rows: Sequence[Row], out: Path) -> None:
    """Bars of inference over stock onnxruntime's; of training as `benchmarks.training.side_by_side` draws them."""
    inference = [row for row in record.of(rows, "inference") if _ran(row, "default")]
    if inference and is_real(rows):
        plt = pyplot()
        figure, axes = plt.subplots(2, 1, figsize=(max(6, 0.5 * len(inference)), 7), layout="constrained")
        for axis, key, name in zip(axes, ("taken", "milliseconds"), ("device memory", "time of a run"), strict=True):
            for number, (contestant, title) in enumerate(TITLES.items()):
                both = [row["contestants"] if _ran(row, contestant) else None for row in inference]
                heights = [one[contestant][key] / one["default"][key] if one else 0.0 for one in both]
                axis.bar([place + 0.2 * number - 0.3 for place in range(len(inference))], heights, 0.2, label=title)
            axis.set_xticks(range(len(inference)), [row["item"].replace(":", "\n") for row in inference], fontsize=7)
            axis.set_ylabel(f"{name} ÷ stock's")
            axis.axhline(1.0, color="black", linewidth=0.6)
        axes[0].legend()
        figure.savefig(out / "inference.png", dpi=120)
        plt.close(figure)
    trained = [*record.of(rows, "training"), *record.of(rows, "largest")]
    if trained and is_real(rows):
        plots.plot(_record(trained, 12_000_000_000), out / "side_by_side")


def sentences_in(text: str) -> list[str]:
    """The lines between a page's two marks."""
    found = re.search(f"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", text, re.DOTALL)
    return found[1].strip().splitlines() if found else []
