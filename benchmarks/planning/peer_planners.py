"""One case of another planner, in an interpreter that has what that planner needs; started by `peers_remat`.

``python peer_planners.py NAME CHECKOUT REQUEST ANSWER``: reads the case from one JSON file, writes the answer to
another. The checkout is used as it is; what it needs and isn't there or has changed its name since is put in its place
here. What it prints stays on standard output. Limits are processor seconds: they mean the same on a busy machine.
"""

import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def moccasin(case: dict[str, Any]) -> dict[str, Any]:
    """Moccasin with the settings of its own main.py: two runs a node, the given order, half the time for each phase."""
    rockmate = ModuleType("rockmate.def_op")  # imported at the top, used only to hand schedules to Rockmate
    rockmate.RunOp = rockmate.DelOp = rockmate.OpSchedule = None  # type: ignore[attr-defined]
    sys.modules.update({"rockmate": ModuleType("rockmate"), "rockmate.def_op": rockmate})
    sys.path.insert(0, str(Path(case["checkout"]) / "src"))
    import networkx as nx
    from moccasin import cp  # type: ignore[import-not-found]

    graph = nx.DiGraph(name="case")
    for node, (cost, size) in enumerate(zip(case["costs"], case["sizes"], strict=True)):
        graph.add_node(node, cost_cpu=cost, cost_ram=size)
    graph.add_edges_from((source, node) for node, reads in enumerate(case["reads"]) for source in reads)
    order = list(range(len(case["costs"])))
    cp.cp_model.CpSolver = _stopped_after(cp.cp_model.CpSolver, case["seconds"] / 2)
    found = cp.remat(graph, B=case["budget"], C=2, topo_order=order, log_dir="log")
    return {"status": found["status"], "schedule": found.get("schedule")}


def _stopped_after(solver: Any, seconds: float) -> Any:
    """CP-SAT's solver that ends a search after these processor seconds; its own limit is wall time."""

    class Stopped(solver):  # type: ignore[misc]
        def Solve(self, *arguments: Any) -> Any:  # noqa: N802
            done = threading.Event()
            end = time.process_time() + seconds

            def watch() -> None:
                while not done.wait(0.1):
                    if time.process_time() > end:
                        self.StopSearch()

            watcher = threading.Thread(target=watch, daemon=True)
            watcher.start()
            status = super().Solve(*arguments)
            done.set()
            watcher.join()
            return status

    return Stopped


def checkmate(case: dict[str, Any]) -> dict[str, Any]:
    """Checkmate's relaxation with its rounding, solved by HiGHS; its integer program needs a licence of Gurobi.

    Sizes and costs are scaled to what a solver's tolerances are made for.
    """
    import numpy as np

    np.int = int  # type: ignore[attr-defined]
    os.environ["DEBUG_SCHEDULER_RAM"] = "true"  # else its schedules free nothing, and none fits
    sys.path.insert(0, case["checkout"])
    from checkmate.core.dfgraph import DFGraph  # type: ignore[import-not-found]
    from checkmate.core.schedule import OperatorEvaluation  # type: ignore[import-not-found]
    from checkmate.core.solvers.cvxpy_solver import solve_checkmate_cvxpy  # type: ignore[import-not-found]

    unit, cost_unit = case["budget"] / 10_000, max(case["costs"]) / 100
    graph = DFGraph(
        args=dict(enumerate(case["reads"])),
        v=range(len(case["costs"])),
        cost_cpu={node: cost / cost_unit for node, cost in enumerate(case["costs"])},
        cost_ram={node: size / unit for node, size in enumerate(case["sizes"])},
    )
    found = solve_checkmate_cvxpy(graph, 10_000, solver_override="HIGHS", verbose=False)
    if not found.feasible:
        return {"status": "no rounding fits" if found.ilp_aux_data.U is not None else "INFEASIBLE", "schedule": None}
    return {
        "status": "rounded",
        "schedule": [step.id for step in found.schedule if isinstance(step, OperatorEvaluation)],
    }


GRACE = 15
"""Seconds beyond the limit for what isn't solving: building the model, presolve."""
PLANNERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"moccasin": moccasin, "checkmate": checkmate}


def main() -> None:
    """Run one case on one core, in a folder of its own: Moccasin leaves logs where it runs."""
    name, checkout, request, answer = sys.argv[1:]
    case = json.loads(Path(request).read_text(encoding="utf-8")) | {"checkout": checkout}
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    limit = int(case["seconds"] + GRACE)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        begin = time.process_time()
        found = PLANNERS[name](case)
        found["seconds"] = time.process_time() - begin
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
