"""Eager modules in a budget by checkpoints: measured peak, gradients and buffers against the module as it was."""

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memonger.torch
from memonger.errors import BudgetError, LoadError, PlanError
from memonger.torch import eager, operators
from memonger.torch.budget import StepPlan
from memonger.torch.recorded import recorded, without_memory
from tests.support.live_storages import LiveStorages
from tests.support.small_modules import Images, Scores, case, step


class Turns(nn.Module):
    """One block that is called three times, of which each writes over what it is given; dropout; a buffer is read."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.BatchNorm1d(32), nn.ReLU(inplace=True))
        self.last = nn.Linear(32, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.block(x)
            self.calls += 1
        return self.last(x).square().mean()


def peak_of(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Measured: bytes of all storages of a step, whose backward pass begins with ones."""
    module.zero_grad()
    mode = LiveStorages([*module.parameters(), *module.buffers(), *inputs])
    with mode:
        result = module(*inputs)
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        torch.autograd.backward(results, [torch.ones_like(one) for one in results])
    return mode.peak


def whole(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Planned: bytes of the step as it is."""
    copied, given, mode = without_memory(module, inputs)
    return recorded(copied, given, mode).peak


@pytest.mark.parametrize(("name", "share"), [("images", 0.7), ("words", 0.7), ("scores", 0.9), ("turns", 0.9)])
def test_the_peak_is_the_planned_one_and_all_bits_are_as_before(name: str, share: float) -> None:
    module, inputs = (Turns(), (torch.randn(64, 32),)) if name == "turns" else case(name)
    other = copy.deepcopy(module)
    names = list(other.state_dict())
    budget = int(share * whole(module, inputs))
    memonger.torch.checkpoint(module, inputs, budget)
    plan = memonger.torch.plan_of(module)
    for _ in range(2):  # statistics of the second step are of the first's
        loss, gradients = step(other, other, inputs)
        found, own = step(module, module, inputs)
        assert torch.equal(found, loss)
        assert all(map(torch.equal, own, gradients))
        assert all(map(torch.equal, module.buffers(), other.buffers()))
    del loss, found, gradients, own
    assert peak_of(module, inputs) == plan.peak_bytes <= budget
    assert peak_of(other, inputs) == plan.peak_before_bytes
    assert plan.recomputed
    assert list(module.state_dict()) == names


def test_results_of_operators_are_kept_inside_what_runs_again() -> None:
    module, inputs = case("words")
    copied, given, mode = without_memory(module, inputs)
    step_before = recorded(copied, given, mode)
    plan, checkpoints = eager.chosen(copied, given, mode, step_before.peak * 7 // 10, 0)
    after = eager.checkpointed(copied, given, mode, checkpoints)
    again = Counter(call.target for call in after.calls[sum(not call.is_backward for call in step_before.calls) :])
    behind = Counter(call.target for call in step_before.calls if call.is_backward)
    run, kept = Counter[Any](), Counter[Any]()
    for one in checkpoints:
        run.update(call.target for call in step_before.calls[slice(*one.region.calls)])
        kept.update({target: len(turns) for target, turns in one.kept.items()})
    assert kept
    for target, times in kept.items():
        assert 0 < times <= run[target]
        assert again[target] <= behind[target] + run[target] - times
    repeated = [(call, after.calls[call.again]) for call in after.calls if call.again >= 0]
    assert sum(bool(call.makes or call.changes) for call, _ in repeated) == plan.recomputed > 0
    for call, first in repeated:
        assert call.is_backward
        assert not first.is_backward
        assert call.target == first.target or first.target in operators.BITS


def test_zeros_and_ones_that_a_part_draws_are_kept_all_or_none() -> None:
    torch.manual_seed(0)
    blocks = columns(6, nn.Dropout(0.3), nn.Linear(64, 64), nn.Dropout(0.1))
    module, inputs = nn.Sequential(blocks, nn.Linear(32, 1), nn.Flatten(0), nn.Linear(512, 1)), (torch.randn(512, 32),)
    other = copy.deepcopy(module)
    plan = tight(module, inputs, 0.4)
    forwards = [one.forward for one in module.modules() if isinstance(one.forward, eager.Checkpointed)]
    chosen = [one for each in forwards for ones in each._checkpoints.values() for one in ones]
    assert chosen
    for one in chosen:
        assert [len(turns) % 2 for target, turns in one.kept.items() if target in operators.BITS] == [0]
        assert not one.draws
    (loss, gradients), (found, own) = (step(one, one, inputs) for one in (other, module))
    assert torch.equal(found, loss)
    assert all(map(torch.equal, own, gradients))
    del loss, found, gradients, own
    assert peak_of(module, inputs) == plan.peak_bytes
    result, state = module(*inputs), torch.get_rng_state()
    result.backward()
    assert torch.equal(torch.get_rng_state(), state)


def columns(depth: int, *more: nn.Module) -> nn.Sequential:
    """Blocks of which each may be checkpointed, of 32 numbers a row."""
    blocks = [nn.Sequential(nn.Linear(32, 64), *more, nn.Tanh(), nn.Linear(64, 32), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*[copy.deepcopy(block) for block in blocks])


def tight(module: nn.Module, inputs: tuple[torch.Tensor, ...], share: float = 0.3) -> StepPlan:
    """Checkpoints of the fewest bytes and a share of what the step takes beyond them: that they are there, and hold."""
    copied, given, mode = without_memory(module, inputs)
    before = recorded(copied, given, mode)
    least = min(one.bytes for one in eager.Checkpoints(before, copied, 0).within(0))
    memonger.torch.checkpoint(module, inputs, int(least + share * (before.peak - least)))
    return memonger.torch.plan_of(module)


def assert_same(module: nn.Module, other: nn.Module, *inputs: torch.Tensor, times: int = 2) -> None:
    """Steps of two modules have the same results, gradients and buffers, bit for bit."""
    for seed in range(times):
        found = []
        for one in (module, other):
            torch.manual_seed(seed)
            one.zero_grad()
            result = one(*[each.clone() for each in inputs])
            result.backward(torch.ones_like(result))
            found.append([result.detach(), *[each.grad for each in one.parameters()], *one.buffers()])
        assert all(map(torch.equal, *found))


def test_a_part_that_stands_twice_in_a_sequence_runs_twice() -> None:
    shared = nn.ReLU()
    module = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(32, 32), shared)])
    other, inputs = copy.deepcopy(module), (torch.randn(256, 32),)
    assert tight(module, inputs).recomputed
    assert_same(module, other, *inputs)


@torch.library.custom_op("memonger_tests::follow", mutates_args={"mean"})
def follow(x: torch.Tensor, mean: torch.Tensor) -> None:
    """Writes into an argument that isn't its first."""
    mean.mul_(0.9).add_(x.mean(0), alpha=0.1)


class Follows(nn.Module):
    """Keeps a mean of its inputs, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.count = way, 0
        if way == "attribute":
            self.mean = torch.zeros(32)
        else:
            self.register_buffer("mean", torch.zeros(32))
        self.net = columns(1)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "input":
            x.mul_(1.5)
        elif self.way == "operator":
            follow(x.detach(), self.mean)
        elif self.way == "number":
            self.count += 1
            x = x * self.count
        elif self.way == "generator":
            x = x * torch.rand(x.shape, generator=GENERATOR)
        y = self.net(torch.tanh(x - self.mean))
        if self.way == "set":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        elif self.way == "attribute":
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return y


GENERATOR = torch.Generator()


@pytest.mark.parametrize("way", ["set", "operator", "generator", "attribute", "input", "number"])
def test_what_is_written_or_drawn_elsewhere_happens_once(way: str) -> None:
    ways = [way, *(["set"] * 2 if way == "input" else [way] * 2)]  # Tanh's result must stay as it is
    module, inputs = nn.Sequential(*map(Follows, ways)), (torch.randn(512, 32),)
    other, found = copy.deepcopy(module), []
    plan = tight(module, inputs)
    assert plan.recomputed
    for one in (module, other):
        GENERATOR.manual_seed(1)
        own = []
        for _ in range(2):
            one.zero_grad()
            given = inputs[0].clone()
            one(given).sum().backward()
            own += [given, *[each.grad for each in one.parameters()], *[part.mean.clone() for part in one]]
            own += [torch.tensor(part.count) for part in one]
        found.append(own)
    assert all(map(torch.equal, *found))
    assert peak_of(module, inputs) <= plan.peak_bytes


class Peeks(nn.Module):
    """Reads the weight of the one behind it, without a gradient."""

    def __init__(self, behind: "Peeks | None") -> None:
        super().__init__()
        self.layer, self.behind = nn.Linear(32, 32), (behind,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).tanh()
        return x if self.behind[0] is None else (x * (1 + self.behind[0].layer.weight.detach().sum())).tanh()


def assert_same_when_applied(module: nn.Module, other: nn.Module, *inputs: torch.Tensor) -> None:
    """Parameters of two modules are the same after steps, of which the first's are in the backward pass."""
    for seed in range(2):
        results = []
        for one in (module, other):
            torch.manual_seed(seed)
            results.append(one(*inputs))
            results[-1].backward(torch.ones_like(results[-1]))
        for parameter in other.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.1)
        other.zero_grad()
        assert torch.equal(*results)
        assert all(map(torch.equal, module.parameters(), other.parameters()))


def apply(parameter: torch.Tensor) -> None:
    """A step of plain descent, which takes nothing."""
    parameter.data.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


@pytest.mark.parametrize("name", ["words", "blocks"])
def test_gradients_that_are_applied_in_the_backward_pass_are_not_there_together(name: str) -> None:
    module, inputs = case("words", 1) if name == "words" else (columns(5), (torch.randn(96, 32),))
    other, smallest = copy.deepcopy(module), []
    for in_backward in (False, True):
        with pytest.raises(BudgetError) as caught:
            eager.chosen(*without_memory(module, inputs), 0, 0, in_backward)
        smallest.append(caught.value.smallest)
    assert smallest[1] < smallest[0]
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    memonger.torch.checkpoint(module, inputs, smallest[1], in_backward=True)
    plan = memonger.torch.plan_of(module)
    assert plan.recomputed
    assert_same_when_applied(module, other, *inputs)
    assert peak_of(module, inputs) <= plan.peak_bytes == smallest[1]


def test_what_reads_a_parameter_after_its_gradient_is_applied_does_not_run_again() -> None:
    parts = [Peeks(None)]
    while len(parts) < 6:
        parts.insert(0, Peeks(parts[0]))
    module, x = nn.Sequential(*parts), torch.randn(96, 32)
    other = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    copied, given, mode = without_memory(module, [x])
    before = recorded(copied, given, mode, in_backward=True)
    late = eager.Checkpoints(before, copied, 0).within(0)[0]
    put_on = eager.PutOn(module, late.checkpoints)
    with pytest.raises(AssertionError):
        assert_same_when_applied(module, other, x)
    put_on.take_off()
    with pytest.raises(BudgetError):
        eager.chosen(copied, given, mode, late.bytes, 0, in_backward=True)
    module.load_state_dict(other.state_dict())
    memonger.torch.checkpoint(module, x, before.peak * 3 // 4, in_backward=True)
    assert memonger.torch.plan_of(module).recomputed
    assert_same_when_applied(module, other, x)


def test_a_parameter_without_a_hook_is_named() -> None:
    module = columns(2)
    for parameter in module[0].parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    with pytest.raises(PlanError, match=r"the parameter '1\.0\.weight' has no hook that applies"):
        memonger.torch.checkpoint(module, torch.ones(2, 32), "1GiB", in_backward=True)


def test_operators_of_hooks_are_in_what_runs_again() -> None:
    module, inputs = columns(4), (torch.randn(256, 32),)
    for block in module:
        nn.utils.spectral_norm(block[0])  # writes into buffers, and sets the weight
        block[2].register_forward_pre_hook(lambda _, given: (given[0].tanh(),))
        block[2].register_forward_hook(lambda _, __, result: result.tanh())
    other = copy.deepcopy(module)
    plan = tight(module, inputs)
    assert plan.recomputed
    assert_same(module, other, *inputs)
    assert peak_of(module, inputs) <= plan.peak_bytes


def test_a_devices_random_numbers_are_drawn_again_of_parts_that_are_called_by_keyword(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch looks for devices among arguments by position; that of no data stands for one with a generator."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.RReLU(), nn.Linear(64, 64)) for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(input=x)
            return x.square().mean()

    module = Named()
    tight(module, (torch.randn(256, 64),))
    states, found = torch.utils.checkpoint.get_device_states, list[set[str]]()

    def asked(*args: Any) -> Any:
        found.append({one.device.type for one in args if isinstance(one, torch.Tensor)})
        return states()

    monkeypatch.setattr(torch.utils.checkpoint, "get_device_states", asked)
    monkeypatch.setattr(torch.utils.checkpoint, "_get_device_module", lambda _: SimpleNamespace(_initialized=True))
    module.to("meta")(torch.randn(256, 64, device="meta"))
    assert found
    assert all(devices == {"meta"} for devices in found)


def test_modes_are_those_of_the_plan() -> None:
    module, inputs = columns(4, nn.BatchNorm1d(64), nn.Dropout(0.3)).eval(), (torch.randn(256, 32),)
    other = copy.deepcopy(module)
    tight(module, inputs)
    assert_same(module, other, *inputs)
    text = r"in training mode, and was in evaluation mode when .* or call checkpoint again"
    with pytest.raises(PlanError, match=text):
        module.train()(*inputs)
    module = copy.deepcopy(other.train())
    tight(module, inputs)
    module[3][1].eval()
    with pytest.raises(PlanError, match=r"the part '3\.1' is in evaluation mode, and was in training mode"):
        module(*inputs)
    assert_same(module.eval(), other.eval(), *inputs)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_autocast_gives_the_same_bits_wherever_the_backward_pass_is(share: float) -> None:
    """Which casts of weights it keeps would tell which operators run again."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.once, self.twice = columns(3, nn.GELU()), columns(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.twice(self.once(self.twice(x)))

    module, inputs, bits = Twice(), (torch.randn(256, 32),), torch.bfloat16
    other = copy.deepcopy(module)
    with torch.autocast("cpu", bits):
        plan = tight(module, inputs, share)
        assert_same(module, other, *inputs)
    assert plan.recomputed
    steps = []
    for one in (module, other):
        one.zero_grad()
        mode = LiveStorages([*one.parameters(), *inputs])
        with mode:
            with torch.autocast("cpu", bits):
                result = one(*inputs)
            result.backward(torch.ones_like(result))
        steps.append((mode.peak, [each.grad for each in one.parameters()]))
    assert [peak for peak, _ in steps] == [plan.peak_bytes, plan.peak_before_bytes]
    assert all(map(torch.equal, steps[0][1], steps[1][1]))


def test_a_checkpointed_module_is_pickled() -> None:
    module, inputs = columns(4), (torch.randn(256, 32),)
    kept = tight(module, inputs)
    loaded = pickle.loads(pickle.dumps(module))
    assert memonger.torch.plan_of(loaded) == kept
    assert_same(loaded, module, *inputs)
    assert peak_of(loaded, inputs) == kept.peak_bytes


def test_a_refused_budget_leaves_the_plan_before_and_the_smallest_that_it_names_holds() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = columns(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                y = part(x).view(-1, 4, 8).transpose(0, 1)
                x = y.transpose(0, 1).reshape(-1, 32) + y[:2].sum()
            return x

    module, inputs = Heads(), (torch.randn(256, 32),)
    kept = tight(module, inputs)
    with pytest.raises(BudgetError) as caught:
        memonger.torch.checkpoint(module, inputs, 0)
    assert memonger.torch.plan_of(module) is kept
    assert peak_of(module, inputs) == kept.peak_bytes
    memonger.torch.checkpoint(module, inputs, caught.value.smallest)
    assert peak_of(module, inputs) == caught.value.smallest


def test_plans_are_the_same_each_time() -> None:
    module, inputs = case("images")
    copied, given, mode = without_memory(module, inputs)
    budget = recorded(copied, given, mode).peak * 3 // 4
    first, second = (eager.chosen(copied, given, mode, budget, 0)[1] for _ in range(2))
    assert first == second


def test_autocast_evaluation_and_another_budget_go_with_it() -> None:
    module, inputs = case("words")
    other, limit = copy.deepcopy(module), whole(module, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        memonger.torch.checkpoint(module, inputs, limit * 9 // 10)
        loss, gradients = step(module, module, inputs)
        expected, own = step(other, other, inputs)
    assert torch.equal(loss, expected)
    assert all(map(torch.equal, gradients, own))
    copied = copy.deepcopy(module)
    assert all(map(torch.equal, step(copied, copied, inputs)[1], step(other, other, inputs)[1]))
    with torch.no_grad():
        torch.manual_seed(1)
        assert module(*inputs).isfinite()
    memonger.torch.checkpoint(module, inputs, 2 * limit)
    assert memonger.torch.plan_of(module).recomputed == 0
    assert not any("forward" in vars(part) for part in module.modules())


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("way", ["DistributedDataParallel", "fully_shard"])
def test_it_goes_inside_what_spreads_a_module_over_ranks(way: str, one_rank: None) -> None:
    module, inputs = case("words")
    _, gradients = step(module, module, inputs)
    memonger.torch.checkpoint(module, inputs, whole(module, inputs) * 7 // 10)
    run: Any = module
    if way == "fully_shard":
        mesh = init_device_mesh("cpu", (1,))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        run = nn.parallel.DistributedDataParallel(module)
    torch.manual_seed(1)
    module.zero_grad()
    run(*inputs).backward()
    found = [one.grad for one in module.parameters()]
    found = [one.full_tensor() if way == "fully_shard" else one for one in found]
    assert all(map(torch.equal, found, gradients))


def test_a_budget_that_checkpoints_cannot_hold_names_what_would() -> None:
    module, inputs = Scores(depth=4), (torch.randn(256, 64),)
    limit = whole(module, inputs)
    text = r"budget that was found .* whatever runs again: .*backend\(\.\.\.\)\) holds it, with .*in_backward=True"
    with pytest.raises(BudgetError, match=text) as caught:
        memonger.torch.checkpoint(module, inputs, limit * 3 // 4)
    memonger.torch.checkpoint(module, inputs, caught.value.smallest)
    assert peak_of(module, inputs) == caught.value.smallest > caught.value.lower_bound
    with pytest.raises(BudgetError, match=r"backend\(\.\.\.\)\) can hold "):
        memonger.torch.checkpoint(module, inputs, "1KiB", 4096)


class Branches(nn.Module):
    """Which way it takes depends on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x if x.sum() > 0 else -x


class Recurrent(nn.Module):
    """Its library keeps a workspace that has no size on tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0].sum()


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the library isn't in this PyTorch")
def test_a_workspace_that_no_shape_tells_is_refused() -> None:
    module, x = Recurrent(), torch.randn(4, 6, 8)
    text = r"'mkldnn_rnn_layer' keeps a workspace .* inside torch.backends.mkldnn.flags\(enabled=False\)\."
    with pytest.raises(PlanError, match=text):
        memonger.torch.checkpoint(module, x, "1GiB")
    with torch.backends.mkldnn.flags(enabled=False):
        memonger.torch.checkpoint(module, x, "1GiB")
        assert peak_of(module, (x,)) == memonger.torch.plan_of(module).peak_bytes


def test_what_cannot_be_planned_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2, 2)
    text = (
        r"the part '0' \(Branches\) can't run on tensors without memory, .*DataDependent.* torch\.where does in place"
    )
    with pytest.raises(PlanError, match=text):
        memonger.torch.checkpoint(nn.Sequential(Branches()), x, "1GiB")
    with pytest.raises(
        PlanError, match=r"the part '0\.0' \(Linear\) .* must have same reduction dim.* must run on such"
    ):
        memonger.torch.checkpoint(columns(1), x, "1GiB")
    assert not capfd.readouterr().err
    with pytest.raises(PlanError, match="gradients are off here"), torch.no_grad():
        memonger.torch.checkpoint(columns(1), torch.ones(2, 32), "1GiB")
    for state in (-1, True, 0.5):
        with pytest.raises(PlanError, match=r"the bytes of its state.* must be a whole number from 0 to"):
            memonger.torch.checkpoint(Scores(), x, "1GiB", state)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="most must be a whole number from 1 to"):
        memonger.torch.fit(Scores(), x, "1GiB", most=0)
    with pytest.raises(PlanError, match=r"page\.html can't be written: there is no folder .*none"):
        memonger.torch.report(Scores(), x, tmp_path / "none" / "page.html")
    with pytest.raises(PlanError, match="nothing in the module needs a gradient"):
        memonger.torch.checkpoint(nn.ReLU(), x, "1GiB")
    with pytest.raises(PlanError, match="budget: 'much' is no size"):
        memonger.torch.checkpoint(Scores(), x, "much")
    with pytest.raises(LoadError, match=r"Images needs example inputs: .* not a dict"):
        memonger.torch.checkpoint(Images(), {"x": x}, "1GiB")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"isn't what memonger\.torch\.checkpoint returned"):
        memonger.torch.plan_of(Scores())


class Cached(nn.Module):
    """Keeps what it computed in an object that it is given, and reads it there when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.after = nn.Linear(32, 32), columns(1)

    def forward(self, x: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
        if "keys" not in cache:
            cache["keys"] = self.keys(x).tanh()
        return self.after(x + cache["keys"])


def test_a_part_that_changes_an_object_that_it_is_given_does_not_run_again_but_its_parts_do() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Cached() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x, {})
            return x.square().mean()

    torch.manual_seed(0)
    module, x = Whole(), torch.randn(256, 32)
    other = copy.deepcopy(module)
    plan = tight(module, (x,), 0.8)
    assert plan.recomputed
    (loss, gradients), (found, own) = (step(one, one, (x,)) for one in (other, module))
    assert torch.equal(found, loss)
    assert all(map(torch.equal, own, gradients))
