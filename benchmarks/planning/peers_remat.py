"""Recomputation under a budget: the search beside other planners' own code, on the graphs of their papers.

``python -m benchmarks.planning.peers_remat --moccasin PATH --checkmate PATH --python PATH`` prints the table and writes
peers_remat.txt. The paths are checkouts of

- Moccasin (Bartan et al. 2023): github.com/haoming-codes/moccasin,
- Checkmate (Jain et al. 2020): github.com/parasj/checkmate,

and an interpreter that has what they import: ``ortools==9.8.3296`` (with newer ones Moccasin stops in
``AddCumulative``), ``networkx``, ``cvxpy``, ``highspy``, ``toposort``, ``numpy<2``.

Every schedule is checked and its memory and cost counted by `memonger.schedule.problem`. All planners run on one core,
one after the other.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import keep, stamp
from benchmarks.planning.peer_planners import GRACE
from benchmarks.planning.remat import KNOWN, PERCENT, ROOT, problem_of
from memonger.schedule.portfolio import search
from memonger.schedule.problem import Problem, ScheduleFigures, check, cost, peak

_PLANNERS = ("moccasin", "checkmate")
_LATE = "no answer in time"
_NOTES = """
overheads: percent of the cost of one pass
s: processor seconds on one core, building the model included; limits are such too
>B: the schedule takes more than the budget, as counted here; its overhead stands in brackets
not run: no answer within the limit at a larger budget of the same graph
ours: the search with its default effort; it proves nothing
moccasin: as its main.py sets it: two runs a node, first runs in the given order, lengths of intervals from a grid, 16
  workers of CP-SAT 9.8 (all on the one core), half of the limit for each phase; `optimal`, `infeasible` and `≥` (bound)
  hold for that model only; `not found in time`: no schedule within the budget
checkmate: its linear relaxation at 0.9 of the budget, rounded at nine thresholds (solve_checkmate_cvxpy), with HiGHS; a
  heuristic without proof, whose own count leaves out a value while it is written. Its integer program is written for
  Gurobi, whose free licence ends at 2,000 variables; the smallest graph here needs 9,990
best known: benchmarks/planning/remat.json
""".strip()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a planner gave for one case.

    Attributes:
        result: None where it gave no schedule.
        seconds: Of the processor.
        status: What is proven, or why there is no schedule.
    """

    result: ScheduleFigures | None
    seconds: float
    status: str

    def text(self, budget: int) -> str:
        """Three columns of the table."""
        if self.result is None:
            return f"{'none':>8} {self.seconds:6.1f} {self.status:20}"
        overhead = f"{100 * self.result.overhead:.3f}"
        if self.result.peak > budget:
            return f"{f'({overhead})':>8} {self.seconds:6.1f} {'>B':20}"
        return f"{overhead:>8} {self.seconds:6.1f} {self.status:20}"


def ours(problem: Problem, budget: int) -> Answer:
    """The search of this project."""
    begin = time.process_time()
    found = search(problem, budget)
    result, status = (found, "") if found.peak <= budget else (None, "not found")
    return Answer(result, time.process_time() - begin, status)


def other(planner: str, options: argparse.Namespace, problem: Problem, budget: int) -> Answer:
    """Another planner, in a process of its own that the system ends `GRACE` seconds after the limit."""
    request = {
        "costs": [int(each) for each in problem.costs],
        "sizes": problem.sizes,
        "reads": problem.reads,
        "budget": budget,
        "seconds": options.seconds,
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "case.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        program = Path(__file__).with_name("peer_planners.py")
        command = [options.python, str(program), planner, str(getattr(options, planner)), str(asked), str(answer)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if run.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return Answer(None, options.seconds + GRACE, _LATE)
        if not answer.exists():
            reason = run.stderr.strip().rpartition("\n")[2]
            print(f"{planner}: {reason}", file=sys.stderr)
            return Answer(None, 0.0, "failed")
        found = json.loads(answer.read_text(encoding="utf-8"))
    if found["schedule"] is None:
        return Answer(None, found["seconds"], _status(found["status"], "", problem))
    schedule = tuple(found["schedule"])
    check(problem, schedule)
    return Answer(
        ScheduleFigures.of(problem, schedule), found["seconds"], _status(found["status"], run.stdout, problem)
    )


def others_text(planner: str, options: argparse.Namespace, problem: Problem, budget: int, late: set[str]) -> str:
    """Three columns; planners in ``late`` gave no answer for this graph's larger budgets, and aren't asked again."""
    if planner in late:
        return f"{'':>8} {'':6} {'not run':20}"
    answer = other(planner, options, problem, budget)
    if answer.status == _LATE:
        late.add(planner)
    return answer.text(budget)


def _status(status: str, log: str, problem: Problem) -> str:
    """In the table's words. CP-SAT's bound stands in its log only, in units of the costs' greatest common divisor."""
    if status == "FEASIBLE":
        bounds = re.findall(r"^best_bound: (\S+)", log, re.MULTILINE)
        once = cost(problem, problem.schedule)
        return f"≥ {100 * max(0.0, float(bounds[-1]) * _divisor(problem) / once - 1):.3f}" if bounds else "feasible"
    return {"OPTIMAL": "optimal", "INFEASIBLE": "infeasible", "UNKNOWN": "not found in time"}.get(status, status)


def _divisor(problem: Problem) -> int:
    return math.gcd(*(int(each) for each in problem.costs))


def table(options: argparse.Namespace) -> Iterator[str]:
    """Lines of the table, as they are measured."""
    planners = [name for name in _PLANNERS if getattr(options, name)]
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    paths = " ".join(f"--{planner} PATH" for planner in planners)
    yield from stamp(f"planning.peers_remat {paths} --python PATH --seconds {options.seconds:g}", ["numpy"])
    yield f"all on one core\n{_NOTES}"
    heads = "".join(f" {name:>8} {'s':>6} {'':20}" for name in planners)
    yield f"{'graph':12} {'nodes':>5} {'budget %':>8} {'ours':>8} {'s':>6} {heads} best known"
    for path in sorted((ROOT / "tests" / "data" / "remat").glob("*.json")):
        problem = problem_of(path)
        full = peak(problem, problem.schedule)
        late: set[str] = set()
        for percent in PERCENT:
            budget = full * percent // 100
            if (options.graphs and path.stem not in options.graphs) or budget < problem.lower_bound:
                continue
            best = known.get(f"{path.stem} {budget}")
            mine = ours(problem, budget).text(budget)[:15]
            others = "".join(" " + others_text(name, options, problem, budget, late) for name in planners)
            tail = f"{100 * best['overhead']:8.3f} {best['proof']}" if best else "    none"
            yield f"{path.stem:12} {problem.nodes:5} {percent:8} {mine}  {others} {tail}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in _PLANNERS:
        parser.add_argument(f"--{name}", type=Path, metavar="CHECKOUT", help=f"a checkout of {name}; left out without")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="the interpreter they run in")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the processor, for each case and planner")
    parser.add_argument("--graphs", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".txt"))
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    keep(table(options), options.output)


if __name__ == "__main__":
    main()
