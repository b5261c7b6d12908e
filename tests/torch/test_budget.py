"""Training steps of PyTorch in a budget: measured peak and gradients against the step as it was."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import memonger.torch
from memonger.errors import BudgetError, LoadError, PlanError
from memonger.torch import budget as own
from memonger.units import KiB
from tests.support.live_storages import LiveStorages, counted
from tests.support.small_modules import Scores, case, step


@pytest.mark.parametrize("name", ["images", "words", "scores"])
def test_the_peak_is_the_planned_one_and_gradients_have_the_same_bits(
    name: str,
) -> None:
    depth = (1,) if name == "words" else ()
    module, inputs = case(name, *depth)
    loss, gradients = step(module, module, inputs)
    buffers = [one.clone() for one in module.buffers()]
    plan = None
    for share in (1.0, 0.7):
        torch.compiler.reset()
        module, inputs = case(name, *depth)
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
    module, inputs = case("scores", 3) if way == "open sizes" else case("images", 2)
    runs = [inputs, tuple(one[:200] for one in inputs)] if way == "open sizes" else [inputs] * 2

    def run(*given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            result = module(*given)
        return result if isinstance(result, torch.Tensor) else result[0].square().mean() + result[1].sum()

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
    assert sum("batch_norm" in name for name in again) == 25
    assert all(map(torch.equal, found, gradients))
    assert all(map(torch.equal, module.buffers(), buffers))


class Draws(nn.Module):
    """In each layer all kinds of random numbers, which depend on one another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = functional.dropout(layer(x).tanh(), 0.3)
            h = functional.rrelu(h * torch.rand_like(h) + torch.randn(h.shape), training=True)
            q = h.view(-1, 4, 16, 8).transpose(1, 2)
            h = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2).transpose(1, 2).reshape(-1, 32)
            x = x + torch.bernoulli(h.sigmoid()) * h
        return x.square().mean()


def test_what_draws_random_numbers_runs_again_with_the_same() -> None:
    torch.manual_seed(0)
    module, x = Draws(), torch.randn(64, 32)
    given = own.traced(module, [x])
    with pytest.raises(BudgetError) as caught:
        own.planned(given, 0)
    made = memonger.torch.backend(caught.value.smallest)
    torch.compiler.reset()
    found = []
    for run in (module, torch.compile(module, backend=made)):
        found += [step(run, module, (x,)), step(run, module, (x,))]
        found[-1][1].extend([torch.rand(3), *found[-2][1]])  # what is drawn behind it is the same, too
    assert torch.equal(found[1][0], found[3][0])
    assert all(map(torch.equal, found[1][1], found[3][1]))
    repeated = own.planned(given, made.plans[0].budget)[1]
    draws = given.states.values()
    assert max(repeated.count(number) for number in draws) > 2
    assert len(draws) == 18


def test_what_reads_a_buffer_through_a_view_does_so_before_it_changes() -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.register_buffer("scale", torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).tanh() * self.scale.view(16).exp()
            self.scale.add_(1)
            return y.square().sum()

    gradients, x = [], torch.ones(8, 16)
    with pytest.raises(BudgetError) as caught:
        own.planned(own.traced(Counts(), [x]), 0)
    for made in (None, memonger.torch.backend(caught.value.smallest)):
        torch.manual_seed(0)
        torch.compiler.reset()
        module = Counts()
        run = module if made is None else torch.compile(module, backend=made)
        gradients.append(step(run, module, (x,))[1])
    assert all(map(torch.equal, *gradients))


def test_attention_without_dropout_draws_nothing() -> None:
    class Attends(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = super().forward(x).view(2, 2, 16, 8)
            return functional.scaled_dot_product_attention(q, q, q)

    given = own.traced(Attends(8, 8), [torch.ones(64, 8)])
    (number,) = (n for n, target in enumerate(given.graph.ops) if "flash_attention_for_cpu.default" in target)
    assert not given.states
    assert number not in given.once


def test_the_example_of_the_page_holds_its_budget() -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "PYTORCH.md"
    found = re.search(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    assert found[1].count("\n") <= 12
    torch.compiler.reset()
    names = dict[str, Any]()
    exec(found[1], names)
    (plan,) = names["backend"].plans
    assert plan.recomputed
    assert plan.peak_bytes <= plan.budget < plan.peak_before_bytes


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
    run = torch.compile(module, backend=memonger.torch.backend("100KiB"))
    for _ in range(2):  # nor is it compiled without a budget the second time
        with pytest.raises(BudgetError, match="The smallest budget that was found to work is") as caught:
            step(run, module, inputs)
    error = caught.value
    assert error.budget == 100 * KiB
    plan, _ = own.planned(own.traced(module, inputs), error.smallest)
    weights = sum(one.nbytes for one in module.parameters())
    assert error.lower_bound >= 2 * weights + inputs[0].nbytes
    assert str(error).endswith(
        "324 KiB are there whatever runs again: parameters, buffers and inputs 194 KiB, gradients 130 KiB."
    )
    assert error.lower_bound <= plan.peak_bytes <= error.smallest < plan.peak_before_bytes


def test_the_largest_batch_is_found_on_shapes_alone() -> None:
    module, x = Scores(depth=2), torch.ones(2, 64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = memonger.torch.fit(module, x, 80 * KiB, optimizer)
    assert found.plan.peak_bytes <= 80 * KiB
    rows = [torch.empty(batch, 64) for batch in (found.batch, found.batch + 1)]
    assert own.planned(own.traced(module, rows[:1]), 80 * KiB)[0].peak_bytes == found.plan.peak_bytes
    with pytest.raises(BudgetError):
        own.planned(own.traced(module, rows[1:]), 80 * KiB)
    with pytest.raises(BudgetError, match=r"That is what one row takes\.$"):
        memonger.torch.fit(module, x, "10KiB")


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("only on Mondays")


def test_a_module_that_needs_two_rows_has_a_largest_batch() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh())
    found = memonger.torch.fit(module, torch.randn(4, 32), "16KiB", most=8)
    assert found.batch > 2
    with pytest.raises(BudgetError, match="two rows"):
        memonger.torch.fit(module, torch.randn(4, 32), "4KiB")


@pytest.mark.parametrize(
    "loss",
    [functional.mse_loss, functional.smooth_l1_loss, functional.soft_margin_loss, functional.binary_cross_entropy],
)
def test_a_loss_that_is_reduced_where_it_was_computed_counts_as_it_is(loss: Any) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.Sigmoid())

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss(self.layers(x), y)

    module, inputs = Head(), (torch.randn(512, 16), torch.rand(512, 64))
    torch.compiler.reset()
    with counted() as modes:
        backend = memonger.torch.backend(None)
        run = torch.compile(module, backend=backend, fullgraph=True)
        run(*inputs).backward()
        module.zero_grad()
        modes.append(LiveStorages([*module.parameters(), *inputs]))
        run(*inputs).backward()
    assert abs(backend.plans[0].peak_bytes - modes[0].peak) <= 64  # the gradient of the loss itself
    module.zero_grad()
    mode = LiveStorages([*module.parameters(), *inputs])
    with mode:
        module(*inputs).backward()
    assert memonger.torch.plan_of(memonger.torch.checkpoint(module, inputs, "1GiB")).peak_bytes == mode.peak


def test_what_cannot_be_traced_or_counted_is_said() -> None:
    x = torch.ones(2, 2)
    text = r"can't be traced as one graph: Data-dep.* In File .*, in forward return x"
    with pytest.raises(PlanError, match=text) as caught:
        own.traced(Branches(), [x])
    assert "TORCH" not in str(caught.value)
    for wrong in ("SGD", torch.optim.SGD, nn.Linear(2, 2).parameters()):
        with pytest.raises(PlanError, match=r"optimizer \(itself, or the bytes of its state\) must be a whole number"):
            memonger.torch.backend("1GiB", wrong)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match=r"is what torch\.compile returned of another: give that"):
        memonger.torch.fit(torch.compile(nn.ReLU(), backend="eager"), x, "1GiB")
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
    """Dynamo ends a graph in it."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.first, self.second, self.place = nn.Linear(4, 4), nn.Linear(4, 4), place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.place == 0:
            torch._dynamo.graph_break()
        x = self.first(x).tanh()
        if self.place == 1:
            torch._dynamo.graph_break()
        return self.second(x).tanh().sum()


@pytest.mark.parametrize("place", [0, 1])
def test_graphs_that_end_in_a_module_are_warned_of(place: int) -> None:
    made = memonger.torch.backend("1GiB")
    torch.compiler.reset()
    with pytest.warns(UserWarning, match="traced as several graphs, of which each holds the budget alone"):
        torch.compile(Broken(place), backend=made)(torch.ones(3, 4)).backward()
    assert len(made.plans) == place + 1


def test_another_shape_is_no_other_graph(recwarn: pytest.WarningsRecorder) -> None:
    made = memonger.torch.backend("1GiB")
    torch.compiler.reset()
    run = torch.compile(Broken(9), backend=made, dynamic=False)
    for rows in (3, 5):
        run(torch.ones(rows, 4)).backward()
    assert len(made.plans) == 2
    assert not [one for one in recwarn if "memonger" in str(one.message)]
