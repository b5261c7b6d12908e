"""Plans a network as it is asked: ``python -m ...side_by_side.planning FOLDER DEVICE THREADS TF32 EFFORT``.

For each line with a wish it says a line with the plan's figures. FOLDER holds what `export` wrote; plans go there, too,
and one that is there already isn't made again. EFFORT is that of a search for a budget, ``-`` the planner's own.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.training.side_by_side.job import MOMENTUM, RATE, load_cuda_libraries
from memonger.runtime.worker import reason, serve

if TYPE_CHECKING:
    from memonger import Plan


@dataclass(frozen=True, slots=True)
class Wish:
    """A plan to make.

    Attributes:
        name: ``none``: training with nothing recomputed; ``share S``: with that part of the arena and
            scratch of ``none`` as its budget; ``budget``: with ``budget``; ``smallest``: only the least bytes for
            which one is found.
        batch: Samples.
        budget: Bytes, of parameters and inputs too.
        keep: Whether to write the plan and check its order in a run; else only its figures are wanted.
    """

    name: str
    batch: int
    budget: int = 0
    keep: bool = True


@dataclass(frozen=True, slots=True)
class Figures:
    """What a plan says of itself, in bytes.

    ``copied``: inputs of which a session keeps a copy, on a GPU; ``session``: beside the tensors,
    about; ``note``: where it isn't quite the plan wished for.
    """

    path: str
    arena: int
    workspace: int
    parameters: int
    inputs: int
    required: int
    overhead: float
    seconds: float
    note: str = ""
    copied: int = 0
    session: int | None = None

    @property
    def predicted(self) -> int:
        """What a run takes: arena, scratch, parameters with optimizer state. The caller's inputs aside."""
        return self.arena + self.workspace + self.copied + self.parameters


class Planner:
    """Makes plans of one network."""

    def __init__(self, folder: Path, device: str, threads: int, tf32: bool = False, effort: int | None = None) -> None:
        self.folder, self.device, self.threads, self.tf32, self.effort = folder, device, threads, tf32, effort

    def plan(self, wish: Wish) -> Figures:
        """The plan wished for.

        Raises:
            memonger.errors.MemongerError: there is none.
        """
        stem = "-".join([*wish.name.split(), str(wish.batch), *([str(wish.budget)] if wish.budget else [])])
        record, path = self.folder / f"{stem}.json", self.folder / f"{stem}.onnx"
        if record.exists() and (path.exists() or not wish.keep):
            return Figures(**json.loads(record.read_text()))
        if wish.name == "smallest":
            found = self._smallest(wish)
        else:
            plan, note = self._made(wish)
            if wish.keep:
                plan.save(path)
                self._check(path, plan)
            found = _figures(plan, str(path), note)
        record.write_text(json.dumps(asdict(found)))
        return found

    def _made(self, wish: Wish) -> "tuple[Plan, str]":
        if wish.name == "none":
            return self._search(wish, strategy="none"), ""
        if wish.name == "budget":
            return self._search(wish, budget=wish.budget), ""
        none = self.plan(Wish("none", wish.batch))
        beside = none.parameters + none.inputs
        share = float(wish.name.split()[1])
        plan, smallest = self._within(wish, beside + int(share * (none.required - beside)))
        reached = (plan.total_bytes - beside) / (none.required - beside)
        return plan, f"smallest found: {reached:.0%}" if smallest else ""

    def _within(self, wish: Wish, budget: int) -> "tuple[Plan, bool]":
        """The plan of a budget, or of the smallest one found where that is more; whether it is."""
        from memonger.errors import BudgetError

        try:
            return self._search(wish, budget=budget), False
        except BudgetError as error:
            smallest = error.smallest
        return self._search(wish, budget=smallest + smallest // 50), True  # costs are measured anew, and differ

    def _smallest(self, wish: Wish) -> Figures:
        """The least bytes a plan was found for, inputs included; there is no such plan yet."""
        from memonger.errors import BudgetError

        try:
            return _figures(self._search(wish, budget=1), "", "")
        except BudgetError as error:
            return Figures("", error.smallest, 0, 0, 0, error.smallest, 0.0, 0.0)

    def _search(self, wish: Wish, **choices: Any) -> "Plan":
        import memonger

        model = memonger.to_training_mode(self.folder / "forward.onnx", batch=wish.batch)
        choices |= {"loss": "softmax_cross_entropy", "optimizer": memonger.SGD(lr=RATE, momentum=MOMENTUM)}
        if "budget" in choices and self.effort is not None:
            choices["effort"] = self.effort
        if self.device != "cpu":
            from memonger.devices import Cuda

            choices["cuda"] = Cuda(tf32=self.tf32)
        return memonger.search_plan(model, device=self.device, threads=self.threads, **choices)

    def _check(self, path: Path, plan: "Plan") -> None:
        """One run whose order is checked: the measured ones run without, which takes memory."""
        import memonger
        from memonger.runtime import feeds
        from memonger.runtime.program import inputs_of

        given = [value for value in inputs_of(plan.model.graph) if value.name in ("x", "labels")]
        memonger.TrainingSession(path, device=self.device).step(feeds.random_feeds(given))


def _figures(plan: "Plan", path: str, note: str) -> Figures:
    return Figures(
        path=path,
        arena=plan.arena_bytes,
        workspace=plan.workspace_bytes or 0,
        parameters=plan.parameter_bytes,
        inputs=plan.input_bytes,
        required=plan.total_bytes,
        overhead=plan.overhead,
        seconds=plan.planning_seconds or 0.0,
        note=note,
        copied=plan.input_bytes if plan.device.startswith("cuda") else 0,
        session=plan.session_bytes,
    )


def main() -> None:
    """Plan for each line read."""
    folder, device, threads, tf32, effort = sys.argv[1:]
    if device != "cpu":
        load_cuda_libraries()
    planner = Planner(Path(folder), device, int(threads), bool(int(tf32)), None if effort == "-" else int(effort))

    def answer(wish: Any) -> dict[str, Any]:
        try:
            return asdict(planner.plan(Wish(**wish)))
        except Exception as error:  # no plan: the contestant's row says why
            return {"failed": reason(error)}

    serve(answer)


if __name__ == "__main__":
    main()
