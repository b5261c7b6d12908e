"""Updates of one parameter of two million elements, against PyTorch's foreach and fused optimizers.

PyTorch's optimizers work in place: one is timed on parameters of its own, another checks one step.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.formulations.harness import Case, Emitter

SIZE = 2_000_000
RATE, MOMENTUM, DECAY, EPSILON = 0.1, 0.9, 1e-4, 1e-8
BETAS = 0.9, 0.999


def sgd(op: Emitter, p: str, g: str, m: str) -> tuple[str, str]:
    """m = momentum m + g + decay p; p = p - rate m."""
    g = op("Add", g, op.scale(p, DECAY))
    m = op("Add", op.scale(m, MOMENTUM), g)
    return op("Sub", p, op.scale(m, RATE)), m


def sgd_where(op: Emitter, p: str, g: str, m: str, ok: str) -> tuple[str, str]:
    """The gradient replaced by zero where a flag is off."""
    return sgd(op, p, op("Where", ok, g, op.floats(0)), m)


def sgd_times(op: Emitter, p: str, g: str, m: str, ok: str) -> tuple[str, str]:
    """The gradient times a flag: cheaper, but not finite times zero is not a number."""
    return sgd(op, p, op("Mul", g, op("Cast", ok, to=1)), m)


def adam(op: Emitter, p: str, g: str, m: str, v: str) -> tuple[str, str, str]:
    """The moments as interpolations; bias corrections are scalars folded into rate and epsilon."""
    m = op("Add", m, op.scale(op("Sub", g, m), 1 - BETAS[0]))
    v = op("Add", v, op.scale(op("Sub", op("Mul", g, g), v), 1 - BETAS[1]))
    step = op("Div", op.scale(m, RATE), op("Add", op("Sqrt", v), op.floats(EPSILON)))
    return op("Sub", p, step), m, v


Make = Callable[..., torch.optim.Optimizer]


def stepping(make: Make) -> Callable[..., None]:
    """One step of an optimizer."""
    parameter = torch.nn.Parameter(torch.randn(SIZE))
    parameter.grad = torch.randn(SIZE)
    optimizer = make([parameter])
    return lambda *_: optimizer.step()


def stepped(make: Make, *names: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The parameter and the state named after one step, far from the start: Adam's corrections are one."""

    def run(p: torch.Tensor, g: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parameter = torch.nn.Parameter(p.clone())
        parameter.grad = g
        optimizer = make([parameter])
        optimizer.state[parameter] = {name: each.clone() for name, each in zip(names, state, strict=False)}
        optimizer.state[parameter]["step"] = torch.tensor(1e7)
        optimizer.step()
        return (parameter, *(optimizer.state[parameter][name] for name in names))

    return run


def cases(batch: int) -> Iterator[Case]:
    """SGD with momentum and decay, gated or not, and Adam."""
    rng = np.random.default_rng(0)
    p, g, m = (rng.standard_normal(SIZE, np.float32) for _ in range(3))
    v, ok = rng.random(SIZE, np.float32), np.ones((), np.bool_)
    gates = {"Where": sgd_where, "Mul": sgd_times}
    for kind in ("foreach", "fused"):
        descent = partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, **{kind: True})
        moments = partial(torch.optim.Adam, lr=RATE, betas=BETAS, eps=EPSILON, **{kind: True})
        inputs = {"p": p, "g": g, "m": m}
        run, one = stepping(descent), stepped(descent, "momentum_buffer")
        yield Case("optimizer", f"sgd, {kind}", inputs, run, {"sgd": sgd}, "sgd", expected=one)
        yield Case("optimizer", f"gated sgd, {kind}", {**inputs, "ok": ok}, run, gates, "Where", expected=one)
        run, one = stepping(moments), stepped(moments, "exp_avg", "exp_avg_sq")
        yield Case("optimizer", f"adam, {kind}", {**inputs, "v": v}, run, {"adam": adam}, "adam", expected=one)
