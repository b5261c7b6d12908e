"""Gradients of every node test of onnx's backend suite against finite differences.

``python -m benchmarks.training.coverage [OPERATOR ...]`` prints the table, and writes coverage.txt unless operators are
named. Each test of an operator with floating inputs and outputs is judged by `tests.support.verdicts`. What is refused
is listed with its message.
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.machine import Table, keep, stamp
from tests.support.fused_cases import fused_cases
from tests.support.node_cases import cases
from tests.support.verdicts import AGREED, Verdict, in_own_type, judge

KINDS = (*AGREED, "refused", "wrong")
COLUMNS = Table("operator<40", "tests>5", *(f"{kind}>{len(kind) + 2}" for kind in KINDS), "crashed>9")


def table(verdicts: Mapping[str, tuple[str, Verdict]], halves: Counter[str]) -> Iterator[str]:
    """Lines: a row an operator, then what is refused or wrong, by message."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for operator, verdict in verdicts.values():
        if verdict.kind != "none":
            counts[operator][verdict.kind] += 1
    total = sum(counts.values(), Counter[str]())
    agreed = sum(total[kind] for kind in AGREED)
    yield f"{agreed} of {total.total()} tests agree, {total['refused']} are refused, {total['wrong']} are wrong,"
    yield f"{total['crashed']} end in a traceback; {len(verdicts) - total.total()} others have no gradient."
    yield f"Of those written in 16 bits, {halves['agrees']} have in these the gradients that they have in more bits,"
    yield f"within 5 % of the largest, {halves['differs']} have others, and neither runtime runs {halves['not run']}."
    yield ""
    yield COLUMNS.heading
    for name, count in (*sorted(counts.items()), ("all", total)):
        yield COLUMNS.row(name, count.total(), *(count[kind] or None for kind in KINDS), count["crashed"] or None)
    messages: dict[str, list[str]] = defaultdict(list)
    for name, (_, verdict) in verdicts.items():
        if verdict.kind not in (*AGREED, "none"):
            node = re.sub(r"node '[^']*'", "node '...'", verdict.message)
            messages[f"{verdict.kind}: {node}"].append(name)
    for message, names in messages.items():
        yield ""
        yield ", ".join(names)
        yield f"    {message}"


def main() -> None:
    """Print the table, and keep it if it is whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", help="only these: Gather, com.microsoft::Attention ...")
    wanted = parser.parse_args().operators
    tests = [case for case in (*cases(), *fused_cases()) if not wanted or case.operator in wanted]
    verdicts = {case.name: (case.operator, judge(case)) for case in tests}
    halves = Counter(in_own_type(case) for case in tests if verdicts[case.name][1].kind in ("float64", "float32"))
    heading = stamp("training.coverage", ("onnx", "onnxruntime", "numpy"))
    keep([*heading, "", *table(verdicts, halves)], None if wanted else Path(__file__).with_suffix(".txt"))


if __name__ == "__main__":
    main()
