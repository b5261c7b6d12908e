"""Training steps of PyTorch in a budget, beside what PyTorch has: ``python -m benchmarks.training.torch_budgets``.

Every contestant runs PyTorch's own kernels one by one (no compiler), so that what is compared is which values are kept:
the step as it is; its own checkpoints (of a package's network: one a block; else the square root of its stages);
AOTAutograd's ``activation_memory_budget``; and `memonger.torch.backend` with the peak that each of these was measured
to have as its budget, and with 70, 50 and 30 % of the step as it is. Peaks count every storage, parameters and
gradients included; steps take turns. A network is measured in a process of its own. Written to torch_budgets.txt where
no network is left out.
"""

import gc
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import memonger.torch
from benchmarks.machine import Table, chosen, geometric_mean, keep, stamp
from benchmarks.training.side_by_side import networks
from memonger.torch import budget
from memonger.units import MiB
from tests.support.live_storages import LiveStorages, counted

OPTIONS: Mapping[str, Mapping[str, Any]] = {"gpt": {"dropout": 0.1}, "mobilenet_v2": {"dropout": 0.2}}
NETWORKS = ("resnet50", "densenet121", "mobilenet_v2", "bert", "gpt", "llama", "convnext_tiny", "swin_tiny", "unet")
SHARES = (0.7, 0.5, 0.3)
ACTIVATION_BUDGETS = (0.5, 0.1)
TURNS, SEED = 3, 3
TABLE = Table(
    "network<14", "step<24", "budget>9.1f", "planned>9.1f", "measured>9.1f", "time>6.2f", "bits<6", "seconds>8.1f"
)


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
        own = networks.size_of(name, "cpu")
        torch.manual_seed(SEED)
        self.network = networks.build(name, {**own.options, **OPTIONS.get(name, {})}).train()
        arrays = networks.data(networks.NETWORKS[name], own, own.batch)
        self.inputs = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["labels"])
        self.first = {key: value.clone() for key, value in self.network.state_dict().items()}
        self.expected = self.gradients(Loss(self.network, self.network))

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
        self.once(run)
        return [one.grad.clone() for one in self.network.parameters() if one.grad is not None]

    def has_bits(self, run: Callable[..., torch.Tensor]) -> bool:
        found = self.gradients(run)
        return len(found) == len(self.expected) and all(map(torch.equal, found, self.expected))

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


def measured(name: str) -> list[dict[str, Any]]:
    """The rows of a network."""
    contest, rows, runs = Contest(name), list[dict[str, Any]](), dict[str, Callable[[], float]]()

    def add(
        label: str,
        run: Callable[..., torch.Tensor],
        modes: list[LiveStorages] | None,
        own: Contest = contest,
        **more: Any,
    ) -> int:
        try:
            bits = own.has_bits(run)  # the first run of what is compiled compiles it
        except (RuntimeError, ValueError) as error:
            if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
                raise
            rows.append({"step": label, "fails": f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"})
            return 0
        peak = own.peak(run, modes)
        runs[label] = partial(own.once, run)
        rows.append({"step": label, "bits": bits, "measured": peak, **more})
        print(f"  {label}: {peak / MiB:.1f} MiB, {'same bits' if bits else 'other bits'}", file=sys.stderr, flush=True)
        return peak

    whole = add("as it is", Loss(contest.network, contest.network), None)
    peaks = {}
    if hasattr(contest.network, "checkpointed"):
        other = Contest(name)  # it may stay so
        checkpointed = Loss(other.network, other.network.checkpointed)
        peaks["its own checkpoints"] = add("its own checkpoints", checkpointed, None, other)
    with counted() as modes:
        for share in ACTIVATION_BUDGETS:
            with functorch.patch(activation_memory_budget=share):
                made = aot_autograd(
                    fw_compiler=lambda *given: budget.as_it_is(*given),
                    partition_fn=min_cut_rematerialization_partition,
                )
                run = torch.compile(Loss(contest.network, contest.network), backend=made)
                label = f"activation budget {share}"
                peaks[label] = add(label, run, modes)
        asked = {f"memonger {share:.0%}": int(whole * share) for share in SHARES}
        asked |= {
            f"memonger, {label.replace('activation budget', 'as')}": peak for label, peak in peaks.items() if peak
        }
        for label, most in {"memonger, no budget": None, **asked}.items():
            backend = memonger.torch.backend(most)
            run = torch.compile(Loss(contest.network, contest.network), backend=backend)
            try:
                add(label, run, modes, budget=most or 0, plans=backend.plans)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                smallest = getattr(error.inner_exception, "smallest", None)
                rows.append({"step": label, "budget": most, "smallest": smallest})
    times: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(TURNS):
        for label, run in runs.items():
            times[label].append(run())
    for row in rows:
        row["seconds"] = min(times[row["step"]]) if row["step"] in times else None
        plans = row.pop("plans", None)
        if plans:
            row |= {"planned": plans[-1].peak_bytes, "planning": plans[-1].seconds}
    return rows


def lines(names: tuple[str, ...]) -> Iterator[str]:
    """The table as it grows."""
    yield "Training steps of PyTorch in a budget; MiB; time: of a step ÷ the step as it is, the fastest of turns"
    yield from stamp("training.torch_budgets", ("torch", "transformers", "numpy"))
    yield "bits: whether all gradients are those of the step as it is: what AOTAutograd traces may round otherwise"
    yield "seconds: to plan"
    yield from ("", TABLE.heading)
    ratios: dict[str, list[float]] = {}
    for name in names:
        command = [sys.executable, "-m", "benchmarks.training.torch_budgets", "--apart", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            yield f"{name:14} failed"
            continue
        rows = json.loads(done.stdout.splitlines()[-1])
        once = rows[0]["seconds"]
        of_label = {row["step"]: row for row in rows}
        for row in rows:
            if "fails" in row:
                yield f"{name:14} {row['step']:24} fails: {row['fails']}"
                continue
            if "measured" not in row:
                least = "?" if row["smallest"] is None else f"{row['smallest'] / MiB:.1f}"
                yield f"{name:14} {row['step']:24} {row['budget'] / MiB:9.1f} can't be held: {least} can"
                continue
            planned, most = row.get("planned", 0) / MiB, row.get("budget", 0) / MiB
            bits = "same" if row["bits"] else "other"
            time_ratio = row["seconds"] / once
            yield TABLE.row(
                name, row["step"], most, planned, row["measured"] / MiB, time_ratio, bits, row.get("planning", 0.0)
            )
            other = row["step"].removeprefix("memonger, ").replace("as ", "activation budget ", 1)
            if row["step"].startswith("memonger, ") and other in of_label:
                ratios.setdefault(other, []).append(row["seconds"] / of_label[other]["seconds"])
    yield ""
    for other, found in ratios.items():
        mean = geometric_mean(found)
        yield f"memonger's time ÷ that of {other} within its peak: {mean:.2f} over {len(found)} networks"


def main() -> None:
    """Measure what is asked for, and print what is measured."""
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64  # one module for all contestants
    if sys.argv[1:2] == ["--apart"]:
        sys.stdout.write(json.dumps(measured(sys.argv[2])) + "\n")
        return
    names, is_whole = chosen(__doc__, NETWORKS)
    keep(lines(names), Path(__file__).with_suffix(".txt") if is_whole else None)


if __name__ == "__main__":
    main()
