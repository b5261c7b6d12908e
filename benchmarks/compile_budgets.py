"""Gradients under a budget of memory, with dropout: ``python -m benchmarks.compile_budgets [--rows NAME ...]``.

torch.compile with ``activation_memory_budget`` below 1.0, and memonger with plans that recompute, each against its own
gradients with nothing recomputed: of the same weights, batch and seed. What is computed again has to drop what was
dropped before. Written to compile_budgets.txt where no network is left out.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._functorch.config
from torch import nn

import memonger
from benchmarks.machine import HERE, Table, keep, stamp
from benchmarks.side_by_side import networks
from benchmarks.side_by_side.contestants import SHARES
from benchmarks.side_by_side.export import export
from benchmarks.side_by_side.planning import Planner, Wish

NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},  # in every block
    "mobilenet_v2": {"dropout": 0.2},  # before the classifier alone
}
SEED = 5
TABLE = Table("network<16", "batch>6", "what<16", "budget>6.0%", "loss>10.1e", "gradients>11.1e")
Step = tuple[float, list[np.ndarray]]


def compiled(name: str, size: networks.Size, weights: Path, share: float) -> Step:
    """Loss and gradients of torch.compile in a budget."""
    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = share
    module = networks.build(name, size.options).train()
    module.load_state_dict(torch.load(weights, weights_only=True))
    arrays = networks.data(networks.NETWORKS[name], size, size.batch)
    x, labels = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["labels"])
    torch.manual_seed(SEED)
    loss = nn.functional.cross_entropy(torch.compile(module)(x), labels)
    loss.backward()
    return float(loss.detach()), [p.grad.numpy() for p in module.parameters() if p.grad is not None]


def planned(name: str, size: networks.Size, planner: Planner, wish: str) -> Step:
    """Loss and updates, which are gradients times the rate, of memonger's first step in a plan."""
    session = memonger.TrainingSession(planner.plan(Wish(wish, size.batch)).path, random_key=SEED)
    before = session.state_dict()
    loss = session.step(networks.data(networks.NETWORKS[name], size, size.batch))
    return loss, [after - before[key] for key, after in session.state_dict().items()]


def apart(step: Step, kept: Step) -> tuple[float, float]:
    """How far losses are from each other, and gradients: the largest difference over the largest gradient."""
    largest = max(float(np.abs(gradient).max()) for gradient in kept[1])
    differences = (float(np.abs(one - other).max()) for one, other in zip(step[1], kept[1], strict=True))
    return abs(step[0] - kept[0]) / abs(kept[0]), max(differences) / largest


def rows(name: str) -> Iterator[str]:
    """The lines of a network."""
    own = networks.size_of(name, "cpu")
    size = networks.Size(own.batch, own.shape, {**own.options, **NETWORKS[name]})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        export(name, size, folder)
        kept = compiled(name, size, folder / "weights.pt", 1.0)
        for share in SHARES:
            found = compiled(name, size, folder / "weights.pt", share)
            yield TABLE.row(name, size.batch, "torch.compile", share, *apart(found, kept))
        planner = Planner(folder, "cpu", torch.get_num_threads())
        kept = planned(name, size, planner, "none")
        for share in SHARES:
            found = planned(name, size, planner, f"share {share}")
            yield TABLE.row(name, size.batch, "memonger", share, *apart(found, kept))


def lines(names: Sequence[str]) -> Iterator[str]:
    """The table as it grows."""
    yield "Gradients of a step with dropout in a budget of memory, against those of the same step without a budget"
    yield from stamp("compile_budgets", ("torch", "transformers", "onnxruntime", "numpy"))
    yield "loss: difference over the loss; gradients (memonger: updates): largest difference over the largest gradient"
    yield from ("", TABLE.heading)
    for name in names:
        yield from rows(name)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = tuple(NETWORKS)
    parser.add_argument("--rows", nargs="*", choices=every, default=every, metavar="NAME")
    asked = parser.parse_args()
    keep(lines(asked.rows), HERE / "compile_budgets.txt" if tuple(asked.rows) == every else None)


if __name__ == "__main__":
    main()
