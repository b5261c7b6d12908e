"""Gradients in a budget of memory, with dropout: ``python -m benchmarks.training.compile_budgets [--resume]``.

torch.compile with ``activation_memory_budget`` below 1.0, and memonger with plans that recompute, each against its own
gradients with nothing recomputed: of the same weights, batch and seed. What is computed again has to drop what was
dropped before. The networks of `training.peers` that were published with dropout or stochastic depth, at the ratios
they were published with. Written to compile_budgets.txt where no network is left out; measured rows are kept in
compile_budgets.json: ``--resume`` goes on, ``--minutes`` ends a run.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._functorch.config
from torch import nn

import memonger
from benchmarks.machine import Record, Table, keep, progress, stamp
from benchmarks.training.side_by_side import networks
from benchmarks.training.side_by_side.contestants import SHARES
from benchmarks.training.side_by_side.export import export
from benchmarks.training.side_by_side.planning import Planner, Wish

# transformers' attention without a kernel of its own: what it drops has to reach the export.
_BERT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "attn_implementation": "eager"}
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "bert": _BERT,  # embeddings, attention, what blocks add: Devlin et al. 2018
    "gpt": {"dropout": 0.1},  # the same: Radford et al. 2019
    "mobilenet_v2": {"dropout": 0.2},  # before the classifier alone: as torchvision has it
    "efficientnet_b0": {"dropout_rate": 0.2, "drop_connect_rate": 0.2},  # and what blocks add: Tan and Le 2019
    "convnext_tiny": {"drop_path_rate": 0.1},  # stochastic depth: Liu et al. 2022
    "swin_tiny": {"drop_path_rate": 0.2},  # likewise: Liu et al. 2021
}
LIBRARIES = ("torch.compile", "memonger")
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


def measured(name: str, library: str) -> dict[str, tuple[float, float]]:
    """What `apart` finds in each budget, and, at 1.0, between two steps with nothing recomputed."""
    own = networks.size_of(name, "cpu")
    size = networks.Size(own.batch, own.shape, {**own.options, **NETWORKS[name]})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        export(name, size, folder, training=True)
        step: Callable[[float], Step] = partial(compiled, name, size, folder / "weights.pt")
        if library == "memonger":
            planner = Planner(folder, "cpu", torch.get_num_threads())
            step = lambda share: planned(name, size, planner, "none" if share == 1.0 else f"share {share}")  # noqa: E731
        kept = step(1.0)
        return {str(share): apart(step(share), kept) for share in (1.0, *SHARES)}


def lines(record: Record, names: Sequence[str]) -> Iterator[str]:
    """The table as it grows."""
    yield "Gradients of a step with dropout in a budget of memory, against those of the same step without a budget"
    yield from stamp("training.compile_budgets", ("torch", "transformers", "onnxruntime", "numpy"))
    yield "loss: difference over the loss; gradients (memonger: updates): largest difference over the largest gradient"
    yield "at 100%: two steps with nothing recomputed"
    rows = [f"{name} {library}" for name in names for library in LIBRARIES]
    missing = ", ".join(row for row in rows if row not in record.rows)
    yield from ([f"not measured yet (--resume): {missing}"] if missing else [])
    yield from ("", TABLE.heading)
    for row in rows:
        name, library = row.split()
        batch = networks.size_of(name, "cpu").batch
        for share, found in record.rows.get(row, {}).items():
            yield TABLE.row(name, batch, library, float(share), *found)


def main() -> None:
    """Measure what is asked for, and print what is measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = tuple(NETWORKS)
    parser.add_argument("--rows", nargs="*", choices=every, default=every, metavar="NAME")
    parser.add_argument("--resume", action="store_true", help="keep what compile_budgets.json has")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no row is begun after so many")
    asked = parser.parse_args()
    is_whole = tuple(asked.rows) == every
    record = Record(
        Path(__file__).with_suffix(".json") if is_whole or asked.resume else None, asked.resume, asked.minutes
    )
    rows = [f"{name} {library}" for name in asked.rows for library in LIBRARIES]
    for row in progress(rows, record, record.rows.__contains__):
        print(row, flush=True)
        record.add(row, measured(*row.split()))
    keep(lines(record, every if record.rows else asked.rows), Path(__file__).with_suffix(".txt") if is_whole else None)


if __name__ == "__main__":
    main()
