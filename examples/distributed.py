"""Train on several ranks: handwritten digits by a small network, or by the memory-efficient DenseNet.

    pip install 'memonger[distributed,examples]'
    torchrun --nproc-per-node 2 examples/distributed.py --network densenet --shard-optimizer
    torchrun --nproc-per-node 2 examples/distributed.py --device cuda     # a GPU for each rank, NCCL between them

Without torchrun it is one rank alone. Rank 0 plans, and all ranks run that plan. With --state FOLDER the training saves
its state there after each epoch, and goes on from what is there.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch.distributed
from densenet import densenet
from digits import network
from sklearn.datasets import load_digits

import memonger
from memonger.units import format_size


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where each rank runs")
    parser.add_argument("--network", choices=["digits", "densenet"], default="digits")
    parser.add_argument("--batch", type=int, default=32, help="rows of each rank")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--shard-optimizer", action="store_true")
    parser.add_argument("--state", type=Path, help="a folder for the state after each epoch")
    options = parser.parse_args()
    is_one_of_several = "WORLD_SIZE" in os.environ
    if is_one_of_several:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    with tempfile.TemporaryDirectory() as scratch:
        train(options, plan_once(options, Path(scratch), is_one_of_several))
    if is_one_of_several:
        torch.distributed.destroy_process_group()


def plan_once(options: argparse.Namespace, folder: Path, is_one_of_several: bool) -> Path:
    """The plan's file: rank 0 writes it. On several machines it has to be a folder that all see."""
    places: list[object] = [str(folder / "plan.onnx")]
    if is_one_of_several:
        torch.distributed.broadcast_object_list(places, src=0)
    path = Path(str(places[0]))
    if path.parent == folder:
        plan = make_plan(options.network, options.batch, options.device)
        plan.save(path)
        print(f"{options.network}: arena {format_size(plan.arena_bytes)}, {len(plan.recomputed)} steps recomputed")
    if is_one_of_several:
        torch.distributed.barrier()
    return path


def make_plan(name: str, batch: int, device: str) -> memonger.Plan:
    """The training plan of a network, its gradients in buckets."""
    optimizer = memonger.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)
    if name == "digits":
        forward, loss = memonger.to_training_mode(network(), batch=batch), "softmax_cross_entropy"
    else:
        forward, loss = densenet(22, 12, 0.0, batch), "loss"
    training = memonger.differentiate(forward, loss=loss, optimizer=optimizer)
    buckets = memonger.Buckets(first="64KiB", rest="256KiB")
    return memonger.search_plan(training, strategy="cheap", buckets=buckets, device=device)


def train(options: argparse.Namespace, plan: Path) -> None:
    """Train, each rank on its own rows."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images.reshape(-1, 1, 8, 8) / 16).astype(np.float32), labels.astype(np.int64)
    session = memonger.DistributedTrainingSession(plan, shard_optimizer=options.shard_optimizer)
    if options.state is not None and options.state.is_dir():
        session.load(options.state)
    rows = options.batch * session.size
    steps = len(images) // rows
    for epoch in range(session.steps // steps, options.epochs):
        order, losses = np.random.default_rng(epoch).permutation(len(images)), []
        for step in range(steps):
            begin = step * rows + session.rank * options.batch
            part = order[begin : begin + options.batch]
            losses.append(session.step({"image": images[part], "labels": labels[part]}))
        if options.state is not None:
            session.save(options.state, by_rank=True)
        if session.rank == 0:
            print(f"epoch {epoch + 1}: mean loss {np.mean(losses):.4f} on {session.size} ranks of {options.batch} rows")
    session.close()


if __name__ == "__main__":
    main()
