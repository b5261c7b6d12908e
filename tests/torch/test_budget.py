"""Training steps of PyTorch in a budget: measured peak and gradients against the step as it was."""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed

import memonger.torch
from memonger.errors import BudgetError, PlanError
from memonger.torch import budget as own
from memonger.units import KiB
from tests.support.live_storages import LiveStorages, counted
from tests.support.small_modules import Scores, case, step


@pytest.mark.parametrize("name", ["images", "words", "scores"])
def test_the_peak_is_the_planned_one_and_gradients_have_the_same_bits(
    name: str,
) -> None:
    module, inputs = case(name)
    loss, gradients = step(module, module, inputs)
    buffers = [one.clone() for one in module.buffers()]
    plan = None
    for share in (1.0, 0.7):
        torch.compiler.reset()
        module, inputs = case(name)
        with counted() as modes:
            made = memonger.torch.backend(None if plan is None else int(share * plan.peak_before_bytes))
            run = torch.compile(module, backend=made)
            found, own_gradients = step(run, module, inputs)
            assert torch.equal(found, loss)
            assert all(map(torch.equal, own_gradients, gradients))
            assert all(map(torch.equal, module.buffers(), buffers))
            (plan,) = made.plans
            del own_gradients
            module.zero_grad()
            modes.append(LiveStorages([*module.parameters(), *module.buffers(), *inputs]))
            step(run, module, inputs)
        most = plan.peak_bytes + 4  # autograd holds the gradient of the loss
        assert most >= modes[0].peak >= plan.peak_bytes - 64 * plan.nodes  # sizes are rounded up to 64
        assert (plan.recomputed > 0) == (share < 1)
        assert plan.peak_bytes <= share * plan.peak_before_bytes


@pytest.mark.parametrize("way", ["autocast", "open sizes", "accumulated"])
def test_a_budget_goes_with(way: str) -> None:
    module, inputs = case("images")
    runs = [inputs, tuple(one[:3] for one in inputs)] if way == "open sizes" else [inputs] * 2

    def run(*given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            return module(*given)

    def gradients(budget: int | None) -> tuple[list[torch.Tensor], list[memonger.torch.StepPlan]]:
        torch.compiler.reset()
        made = memonger.torch.backend(budget)
        compiled = torch.compile(run, backend=made, dynamic=way == "open sizes")
        module.zero_grad()
        for given in runs:
            torch.manual_seed(1)
            compiled(*given).backward()
        return [one.grad.clone() for one in module.parameters()], made.plans

    expected, (plan, *_) = gradients(None)
    found, plans = gradients(plan.peak_bytes * 3 // 4)
    assert all(map(torch.equal, found, expected))
    assert plans[0].recomputed
    with torch.no_grad():
        assert torch.compile(run, backend=memonger.torch.backend("1KiB"))(*inputs).isfinite()


def test_a_batch_normalization_runs_again_without_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = case("images")
    _, gradients = step(module, module, inputs)
    buffers = [one.clone() for one in module.buffers()]
    planned, again = own.planned, list[str]()

    def repeated(given: Any, *limits: Any) -> Any:
        names = ["" if node is None else node.name for node in given.nodes]
        plan, schedule = planned(given, *limits)
        found = []
        for number in schedule:
            if names[number].startswith("threshold_backward"):
                own_layer = [n for n, name in enumerate(names) if "batch_norm_legit" in name or name.startswith("relu")]
                again.extend(names[n] for n in own_layer)
                found += own_layer
            found.append(number)
        return plan, tuple(found)

    monkeypatch.setattr(own, "planned", repeated)
    module, inputs = case("images")
    torch.compiler.reset()
    _, found = step(torch.compile(module, backend=memonger.torch.backend(None)), module, inputs)
    assert sum("batch_norm" in name for name in again) == 36
    assert all(map(torch.equal, found, gradients))
    assert all(map(torch.equal, module.buffers(), buffers))


def test_what_a_plan_counts_is_what_is_there() -> None:
    module, inputs = case("scores")
    optimizer = torch.optim.AdamW(module.parameters())
    made = memonger.torch.backend(None, optimizer)
    torch.compiler.reset()
    step(torch.compile(module, backend=made), module, inputs)
    optimizer.step()
    (plan,) = made.plans
    weights = sum(one.nbytes for one in module.parameters())
    assert plan.gradient_bytes == weights
    assert plan.given_bytes == weights + inputs[0].nbytes
    states = [one for each in optimizer.state.values() for one in each.values()]
    assert plan.state_bytes == sum(one.nbytes for one in states)
    assert str(plan).endswith("at its peak: nothing runs again")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's own imports
def test_inductor_takes_it_as_its_partition_function() -> None:
    from torch._inductor import compile_fx

    whole, partition = memonger.torch.partitioner(None), memonger.torch.partitioner("840KiB")
    assert partition.uuid() == memonger.torch.partitioner(840 << 10).uuid() != whole.uuid()
    module, inputs = case("scores")

    def uncompiled(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        return own.as_it_is(graph, inputs)

    def gradients(of: memonger.torch.Partitioner) -> list[torch.Tensor]:
        """By PyTorch's compiler but for its last stage, which needs one of C++."""
        torch.compiler.reset()
        compiler = partial(compile_fx.compile_fx, inner_compile=uncompiled, config_patches=of.options)
        return step(torch.compile(module, backend=compiler), module, inputs)[1]

    assert all(map(torch.equal, gradients(partition), gradients(whole)))
    (plan,) = partition.plans
    assert plan.recomputed
    assert plan.budget is not None
    assert plan.peak_bytes <= plan.budget < plan.peak_before_bytes == whole.plans[0].peak_bytes


def test_a_budget_that_cannot_be_held_names_one_that_can() -> None:
    module, inputs = case("scores")
    torch.compiler.reset()
    with pytest.raises(BackendCompilerFailed, match="The smallest budget that was found to work is") as caught:
        step(torch.compile(module, backend=memonger.torch.backend("100KiB")), module, inputs)
    error = caught.value.inner_exception
    assert isinstance(error, BudgetError)
    plan, _ = own.planned(own.traced(module, inputs), error.smallest)
    weights = sum(one.nbytes for one in module.parameters())
    assert error.lower_bound >= 2 * weights + inputs[0].nbytes
    assert str(error).endswith(
        "324 KiB are there whatever runs again: parameters, buffers and inputs 194 KiB, gradients 130 KiB."
    )
    assert error.lower_bound <= plan.peak_bytes <= error.smallest < plan.peak_before_bytes


def test_the_largest_batch_is_found_on_shapes_alone() -> None:
    module, x = Scores(depth=3), torch.ones(2, 64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = memonger.torch.fit(module, x, 108 * KiB, optimizer)
    assert found.plan.peak_bytes <= 108 * KiB
    rows = [torch.empty(batch, 64) for batch in (found.batch, found.batch + 1)]
    assert own.planned(own.traced(module, rows[:1]), 108 * KiB)[0].peak_bytes == found.plan.peak_bytes
    with pytest.raises(BudgetError):
        own.planned(own.traced(module, rows[1:]), 108 * KiB)
    with pytest.raises(BudgetError, match=r"That is what one row takes\.$"):
        memonger.torch.fit(module, x, "10KiB")


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("only on Mondays")


def test_what_cannot_be_traced_or_counted_is_said() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(PlanError, match=r"can't be traced as one graph: .*[Dd]ata-dependent"):
        own.traced(Branches(), [x])
    with pytest.raises(PlanError, match="nothing in the module needs a gradient"):
        own.traced(nn.ReLU(), [x])
    with pytest.raises(
        PlanError, match=r"state of Odd can't be found out \(ValueError: only on Mondays\): give its bytes"
    ):
        memonger.torch.partitioner("1GiB", Odd(nn.Linear(2, 2).parameters()))
    with pytest.raises(PlanError, match="budget: 'much' is no size"):
        memonger.torch.backend("much")
    assert memonger.torch.partitioner("1GiB", 4096).state_bytes == 4096


def test_importing_memonger_does_not_import_torch() -> None:
    code = "import sys, memonger.torch; memonger.torch.__all__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


class Broken(nn.Module):
    """Dynamo ends a graph in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x).tanh().sum()


def test_several_graphs_are_warned_of() -> None:
    made = memonger.torch.backend("1GiB")
    torch.compiler.reset()
    with pytest.warns(UserWarning, match="traced as several graphs, of which each holds the budget alone"):
        torch.compile(Broken(), backend=made)(torch.ones(3, 4)).backward()
    assert len(made.plans) == 2
