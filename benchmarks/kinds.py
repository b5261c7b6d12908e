"""Networks of many kinds beside PyTorch."""

import argparse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import memonger
from benchmarks.kind_networks import NETWORKS, build, data
from benchmarks.machine import HERE, MIB, Table, keep, stamp
from benchmarks.record import Record, progress

STEPS, RATE = 3, 1e-3
SCALE, EPSILON = 1e-3, 2.0**-24
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)


class _Double(TorchFunctionMode):
    """Computes in float64 what a module asks to be computed in float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return function(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


@contextmanager
def _computing(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        if dtype is torch.float64:
            with _Double():
                yield
        else:
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def reference(name: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of some steps of PyTorch, and the first one's gradients."""
    module = build(name).to(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), RATE, weight_decay=0.01)
    losses, gradients = [], dict[str, np.ndarray]()
    with _computing(dtype):
        for step in range(STEPS):
            x, labels = data(name, step, *shape)
            optimizer.zero_grad()
            loss = functional.cross_entropy(module(x.to(dtype) if x.is_floating_point() else x), labels)
            loss.backward()
            if not step:
                gradients = {k: p.grad.numpy().copy() for k, p in module.named_parameters() if p.grad is not None}
            optimizer.step()
            losses.append(loss.item())
    return losses, gradients


def train(plan: memonger.Plan, name: str, shape: Sequence[int], steps: int):
    session = memonger.TrainingSession(plan)
    losses = []
    for step in range(steps):
        x, labels = data(name, step, *shape)
        losses.append(session.step({"x": x.numpy(), "labels": labels.numpy()}))
    return losses, session


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


def measure(name: str) -> dict[str, Any]:
    module = build(name)
    x, _ = data(name, 0, 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shape = tuple(module(x).shape)
        model = memonger.from_torch(module, x, input_names=["x"], output_names=["scores"])
    model = memonger.to_training_mode(model, dropout=False)
    loss = memonger.SoftmaxCrossEntropy()
    options = {"threads": 1, "chunks": "off"}
    whole = memonger.search_plan(memonger.differentiate(model, loss=loss), strategy="none", **options)
    _, session = train(whole, name, shape, 1)
    found = session.outputs()
    truths, truth = reference(name, shape, torch.float64)
    singles, single = reference(name, shape, torch.float32)
    largest = max(map(_norm, truth.values()))
    ours, theirs = {}, {}
    for key, array in truth.items():
        scale = max(_norm(array), SCALE * largest)
        gradient = found.get(f"{key}.grad")
        ours[key] = _norm((np.zeros_like(array) if gradient is None else gradient) - array) / scale
        theirs[key] = _norm(single[key] - array) / scale
    better = [ours[k] <= max(theirs[k], EPSILON) for k in ours]
    ratios = {k: max(ours[k], EPSILON) / max(theirs[k], EPSILON) for k in ours}
    worst = max(ratios, key=ratios.get)
    row = dict(parameters=len(ours), missing=[k for k in truth if f"{k}.grad" not in found], nearer=sum(better) / len(better), median=float(np.median(list(ratios.values()))), worst=ratios[worst], worst_name=worst, ours=max(ours.values()), theirs=max(theirs.values()))
    training = memonger.differentiate(model, loss=loss, optimizer=memonger.AdamW(lr=RATE, weight_decay=0.01))
    plans = [memonger.search_plan(training, strategy="none", **options)]
    beside = plans[0].total_bytes - plans[0].arena_bytes
    for share in SHARES:
        try:
            plans.append(memonger.search_plan(training, budget=beside + int(share * plans[0].peak_bytes), **options))
            break
        except memonger.PlanError as error:
            print(share, str(error)[:300])
    results = [train(plan, name, shape, STEPS) for plan in plans]
    losses = results[0][0]
    row |= dict(apart=max(abs(a - b) / abs(b) for a, b in zip(losses, truths)), torch_apart=max(abs(a - b) / abs(b) for a, b in zip(singles, truths)))
    if len(plans) > 1:
        states = [r[1].state_dict() for r in results]
        same = results[0][0] == results[1][0] and all(np.array_equal(a, states[1][k], equal_nan=True) for k, a in states[0].items())
        row |= dict(peak=plans[0].peak_bytes, half=plans[1].peak_bytes, share=share, again=len(plans[1].recomputed), same=same)
    return row


if __name__ == "__main__":
    import sys, time, traceback, json
    torch.set_num_threads(1)
    for name in sys.argv[1:] or NETWORKS:
        t = time.time()
        try:
            print(name, json.dumps(measure(name)), f"{time.time()-t:.1f}", flush=True)
        except Exception as e:
            print(name, "FAILED", type(e).__name__, str(e)[:500], f"{time.time()-t:.1f}", flush=True)
            if "-v" in sys.argv: traceback.print_exc()
