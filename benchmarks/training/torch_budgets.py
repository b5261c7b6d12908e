"""Training steps of PyTorch in a budget, beside what PyTorch has: ``python -m benchmarks.training.torch_budgets``.

Every contestant runs PyTorch's own kernels one by one (no compiler), so that what is compared is which values are kept:
the step as it is; its own checkpoints (a package's, of a DenseNet ``efficient=True``, else `checkpoint_sequential` or a
block each); AOTAutograd's ``activation_memory_budget``; `memonger.torch.backend` and `memonger.torch.checkpoint` at 70,
50 and 30 % of the step as it is, and with the peak that each of the others was measured to have as their budget; and
`checkpoint` where each gradient is freed as soon as it is there (``in_backward``), as an optimizer does that steps in
the backward pass. Peaks count every storage, parameters and gradients included; steps take turns. Where a budget can't
be held, ``none below`` is a bound: no order of the step's operators, and no repetition of them, takes less.

``activation_memory_budget`` is given batch normalizations as what they compute and what they write apart: else its
partition saves running statistics to compute them again, which the forward pass has changed by then, and the backward
pass refuses ("modified by an inplace operation"). In PyTorch's compiler decompositions do that; here kernels stay.

A network is measured in a process of its own, in a minute or two. Written to torch_budgets.txt where no network is left
out; measured networks are kept in torch_budgets.json: ``--resume`` goes on, ``--minutes`` ends a run.
"""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch._functorch.config as functorch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import memonger.torch
from benchmarks.machine import Record, Table, geometric_mean, keep, machine, progress, stamp
from benchmarks.training.step_networks import NETWORKS, WithLoss, apart, inputs_of
from memonger.errors import BudgetError, PlanError
from memonger.torch import budget
from memonger.units import MiB
from tests.support.live_storages import LiveStorages, counted

SHARES = (0.7, 0.5, 0.3)
ACTIVATION_BUDGETS = (0.5, 0.1)
TURNS, SECONDS, SEED = 3, 60.0, 3
HELD = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Has glibc keep what is freed. Else it gives large tensors back to the system and takes them anew, or doesn't, as the
heap happens to lie: of a BERT's step 64 to 144 MiB, a page fault for every 4 KiB: 92 ms of system time in
642 once."""
OWN, BACKEND, EAGER = "its own checkpoints", "memonger", "memonger, eager"
FREED = "memonger, eager, gradients freed"
TABLE = Table(
    "network<15", "step<40", "budget>9.1f", "planned>9.1f", "measured>9.1f", "time>6.2f", "error>9.1e", "seconds>8.1f"
)

aten = torch.ops.aten


def _normalized(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """A batch normalization by its own batch, and the new statistics computed from what that returns."""
    if not training:
        return NotImplemented
    y, own, inverse = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    count = x.numel() / x.shape[1]
    own_var = (1 / inverse.square() - eps) * (count / (count - 1))
    return y, own, inverse, own.lerp(mean, 1 - momentum), own_var.lerp(var, 1 - momentum)


def _normalized_backward(grad: Any, x: Any, weight: Any, mean: Any, var: Any, *others: Any) -> Any:
    """Its backward pass reads no running statistics."""
    if mean is None or not others[2]:
        return NotImplemented
    return aten.native_batch_norm_backward(grad, x, weight, None, None, *others)


APART = {
    aten._native_batch_norm_legit_functional.default: _normalized,
    aten.native_batch_norm_backward.default: _normalized_backward,
}


class Loss(nn.Module):
    """A network and its loss."""

    def __init__(self, network: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.network, self._run = network, run

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self._run(x), labels)


class Contest:
    """One network, and its steps."""

    def __init__(self, name: str) -> None:
        row = NETWORKS[name]
        torch.manual_seed(SEED)
        self.network = row.build().train()
        self._keeps: dict[torch.Tensor, torch.Tensor] | None = None
        self.inputs = inputs_of(row)
        self.first = {key: value.clone() for key, value in self.network.state_dict().items()}
        self.expected = self.gradients(Loss(self.network, self.network))

    def free_in_backward(self) -> None:
        """Gradients go as soon as they are there, as where an optimizer applies them in the backward pass."""
        for parameter in self.network.parameters():
            parameter.register_post_accumulate_grad_hook(self._free)  # type: ignore[no-untyped-call]

    def _free(self, parameter: torch.Tensor) -> None:
        if self._keeps is not None:
            self._keeps[parameter] = cast(torch.Tensor, parameter.grad)
        parameter.grad = None

    def once(self, run: Callable[..., torch.Tensor]) -> float:
        """Seconds of a step from the same weights and random numbers."""
        self.network.zero_grad()
        gc.collect()
        torch.manual_seed(SEED)
        begin = time.perf_counter()
        run(*self.inputs).backward()
        return time.perf_counter() - begin

    def gradients(self, run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        self.network.load_state_dict(self.first)
        self._keeps = {}
        self.once(run)
        kept, self._keeps = self._keeps, None
        found = [kept.get(one, one.grad) for one in self.network.parameters()]
        return [one.clone() for one in found if one is not None]

    def error(self, run: Callable[..., torch.Tensor]) -> float:
        """The largest difference of gradients from those of the step as it is, over the largest of these."""
        return apart(self.gradients(run), self.expected)

    def there(self) -> list[torch.Tensor]:
        self.network.zero_grad()
        gc.collect()
        return [*self.network.parameters(), *self.network.buffers(), *self.inputs]

    def peak(self, run: Callable[..., torch.Tensor], modes: list[LiveStorages] | None) -> int:
        """Bytes; ``modes``: of what is compiled, whose passes run under the last one."""
        mode = LiveStorages(self.there())
        if modes is None:
            with mode:
                self.once(run)
        else:
            modes.append(mode)
            self.once(run)
            modes.clear()
        return mode.peak


class Rows:
    """Measures contestants, and keeps what is measured."""

    def __init__(self, name: str) -> None:
        self.name, self.rows = name, list[dict[str, Any]]()
        self._runs = dict[str, Callable[[], float]]()

    def add(
        self, label: str, contest: Contest, run: Callable[..., torch.Tensor], modes: list[LiveStorages] | None = None,
        asked: int | None = None, plan: Callable[[], memonger.torch.StepPlan] | None = None,
    ) -> int:  # fmt: skip
        """Bytes at the peak; 0 where it fails."""
        row: dict[str, Any] = {"step": label, "budget": asked}
        self.rows.append(row)
        try:
            row["error"] = contest.error(run)  # the first run of what is compiled compiles it
            row["measured"] = contest.peak(run, modes)
        except BudgetError as error:
            row |= {"smallest": error.smallest, "bound": error.lower_bound}
            return 0
        except (RuntimeError, ValueError) as error:
            inner = getattr(error, "inner_exception", error)
            row["fails"] = f"{type(inner).__name__}: {' '.join(str(inner).split())[:90]}"
            return 0
        self._runs[label] = partial(contest.once, run)
        if plan is not None:
            row |= {"planned": plan().peak_bytes, "planning": plan().seconds}
        print(f"  {label}: {row['measured'] / MiB:.1f} MiB, error {row['error']:.1e}", file=sys.stderr, flush=True)
        return int(row["measured"])

    def add_eager(self, label: str, asked: int, in_backward: bool = False) -> None:
        """`memonger.torch.checkpoint`."""
        contest = Contest(self.name)
        module = WithLoss(contest.network)
        if in_backward:
            contest.free_in_backward()
        try:
            memonger.torch.checkpoint(module, contest.inputs, asked, in_backward=in_backward)
        except BudgetError as error:
            self.rows.append({"step": label, "budget": asked, "smallest": error.smallest})
        except PlanError as error:
            self.rows.append({"step": label, "budget": asked, "fails": " ".join(str(error).split())[:90]})
        else:
            self.add(label, contest, module, None, asked, lambda: memonger.torch.plan_of(module))

    def take_turns(self) -> None:
        """Every step is timed, one after the other, `TURNS` times and until `SECONDS` are over.

        What was reset since compiles in its first turn, which isn't in these seconds.
        """
        times: dict[str, list[float]] = {label: [] for label in self._runs}
        turns, end = 0, math.inf
        while turns < TURNS or time.perf_counter() < end:
            for label, run in self._runs.items():
                times[label].append(run())
            turns += 1
            end = min(end, time.perf_counter() + SECONDS)
        for row in self.rows:
            if row["step"] in times:
                row["seconds"] = min(times[row["step"]])


def measured(name: str) -> list[dict[str, Any]]:
    """The rows of a network."""
    rows, contest = Rows(name), Contest(name)
    module = Loss(contest.network, contest.network)
    whole = rows.add("as it is", contest, module)
    peaks = {}
    if hasattr(contest.network, "checkpointed"):
        other = Contest(name)  # it may stay so
        peaks[OWN] = rows.add(OWN, other, Loss(other.network, other.network.checkpointed))
    with counted() as modes:
        for share in ACTIVATION_BUDGETS:
            made = aot_autograd(
                fw_compiler=lambda *given: budget.as_it_is(*given),
                partition_fn=functorch.patch(activation_memory_budget=share)(min_cut_rematerialization_partition),
                decompositions=APART,
            )
            label = f"activation budget {share}"
            peaks[label] = rows.add(label, contest, torch.compile(module, backend=made, fullgraph=True), modes)
        asked = {f"{share:.0%}": int(whole * share) for share in SHARES}
        asked |= {f"as {label}": peak for label, peak in peaks.items() if peak}
        for label, most in {"no budget": None, **asked}.items():
            backend = memonger.torch.backend(most)
            compiled = torch.compile(module, backend=backend, fullgraph=True)
            rows.add(f"{BACKEND}, {label}", contest, compiled, modes, most, lambda made=backend: made.plans[-1])
    for label, most in asked.items():
        rows.add_eager(f"{EAGER}, {label}", most)
    for share in SHARES:
        rows.add_eager(f"{FREED}, {share:.0%}", int(whole * share), in_backward=True)
    rows.take_turns()
    return rows.rows


def shown(name: str, row: dict[str, Any], once: float | None) -> str:
    """A line of the table."""
    asked = row.get("budget")
    begin = f"{name:15}{row['step']:40}" + (" " * 9 if asked is None else f"{asked / MiB:9.1f}")
    if "fails" in row:
        return f"{begin}  fails: {row['fails']}"
    if "smallest" in row:
        bound = f", none below {row['bound'] / MiB:.1f}" if "bound" in row else ""
        return f"{begin}  can't be held: {row['smallest'] / MiB:.1f} can{bound}"
    planned = row["planned"] / MiB if "planned" in row else None
    times = row["seconds"] / once if "seconds" in row and once else None  # else it wasn't timed
    return TABLE.row(
        name, row["step"], None if asked is None else asked / MiB, planned, row["measured"] / MiB,
        times, "none" if row["error"] == 0 else row["error"], row.get("planning"),
    )  # fmt: skip


def held(who: str, networks: Sequence[Sequence[dict[str, Any]]]) -> Iterator[str]:
    """How many networks hold each share of the step, and of how many others no schedule can."""
    for share in SHARES:
        rows = [row for of_one in networks for row in of_one if row["step"] == f"{who}, {share:.0%}"]
        if not rows:
            continue
        holds = sum("seconds" in row for row in rows)
        beyond = sum(row.get("bound", 0) > row["budget"] for row in rows)
        limit = f"; of {beyond} the bound is above it" if beyond else ""
        yield f"{who}: {share:.0%} is held by {holds} of {len(rows)} networks{limit}"


PACKAGES = "torch", "transformers", "numpy"


def heading(record: Record, names: Sequence[str]) -> Iterator[str]:
    """The columns, below what isn't measured yet, and what was measured on another machine."""
    missing = ", ".join(name for name in names if name not in record.rows)
    yield from ([f"not measured yet (--resume): {missing}"] if missing else [])
    here, others = machine(PACKAGES), dict[str, list[str]]()
    for name in filter(record.rows.__contains__, names):
        others.setdefault(record.rows[name]["machine"], []).append(name)
    yield from (f"{', '.join(of_it)}: {other}" for other, of_it in others.items() if other != here)
    yield from ("", TABLE.heading)


def lines(record: Record, names: Sequence[str]) -> Iterator[str]:
    """The table."""
    yield "Training steps of PyTorch in a budget; MiB; time: of a step ÷ the step as it is, the fastest of turns"
    yield from stamp("training.torch_budgets", PACKAGES)
    yield "error: largest difference of gradients from those of the step as it is, over the largest of these"
    yield "seconds: to plan. PyTorch's own compiler isn't there: it takes minutes to compile a network"
    yield from heading(record, names)
    ratios: dict[str, list[float]] = {}
    for name in names:
        rows = record.rows.get(name, {}).get("rows", [])
        of_label = {row["step"]: row for row in rows}
        for row in rows:
            yield shown(name, row, rows[0]["seconds"])
            who, _, other = row["step"].partition(", as ")
            if "seconds" in of_label.get(other, ()) and "seconds" in row:
                ratios.setdefault(f"{who}'s time ÷ that of {other}", []).append(
                    row["seconds"] / of_label[other]["seconds"]
                )
    yield ""
    for who in (BACKEND, EAGER, FREED):
        yield from held(who, [record.rows[name]["rows"] for name in names if name in record.rows])
    yield ""
    for words, found in ratios.items():
        yield f"{words} within its peak: {geometric_mean(found):.2f} over {len(found)} networks"


def program(
    path: str, doc: str | None, chosen: Sequence[str], measure: Callable[[str], list[dict[str, Any]]],
    table: Callable[[Record, Sequence[str]], Iterator[str]],
) -> None:  # fmt: skip
    """Measure networks, each in a process of its own, and print and keep what is measured.

    Args:
        path: The program, beside which its rows and its table are kept.
        doc: What it does.
        chosen: Networks that are measured where none is named.
        measure: The rows of a network.
        table: The lines of the table.
    """
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64  # one module for all contestants
    torch._dynamo.config.allow_rnn = True
    if sys.argv[1:2] == ["--apart"]:
        with torch.backends.mkldnn.flags(enabled=NETWORKS[sys.argv[2]].mkldnn):
            sys.stdout.write(json.dumps(measure(sys.argv[2])) + "\n")
        return
    kept = Path(path).with_suffix(".json")
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=(*NETWORKS, []), metavar="NAME", help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--resume", action="store_true", help=f"keep what {kept.name} has")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no network is begun after so many")
    asked = parser.parse_args()
    names, is_kept = asked.names or chosen, asked.resume or not asked.names
    record = Record(kept if is_kept else None, asked.resume, asked.minutes)
    for name in progress(list(names), record, record.rows.__contains__):
        print(name, flush=True)
        command = [sys.executable, "-m", f"benchmarks.training.{kept.stem}", "--apart", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | HELD)
        if done.returncode:
            print(f"{name} failed", flush=True)
        else:
            record.add(name, {"machine": machine(PACKAGES), "rows": json.loads(done.stdout.splitlines()[-1])})
    keep(table(record, chosen if is_kept else names), kept.with_suffix(".txt") if is_kept else None)


def main() -> None:
    """Measure what is asked for, and print what is measured."""
    program(__file__, __doc__, tuple(NETWORKS), measured, lines)


if __name__ == "__main__":
    main()
