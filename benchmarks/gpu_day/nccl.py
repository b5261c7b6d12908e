"""One rank over NCCL beside a training session without: losses, seconds of a step, device memory beside."""

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np

import memonger
import models
from benchmarks.gpu_day.contest import contest
from benchmarks.gpu_day.stages import Settings
from memonger.devices import Cuda, parse_device

STEPS = 3


class _Trainer:
    def __init__(self, session: memonger.TrainingSession) -> None:
        self.session, self.batch = session, _batch(session)
        self.losses = [session.step(self.batch) for _ in range(STEPS)]

    def run(self) -> None:
        self.session.step(self.batch)


def measure(item: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """The row of a network of models/."""
    import torch.distributed as dist

    options: dict[str, Any] = {"image": 32, "width": 0.125, "batch": 4} if settings.rehearse else {"batch": 32}
    path = Path(settings.folder) / "ranks.onnx"
    plan = memonger.search_plan(
        models.build_ir(item, training=True, **options), loss="loss", optimizer=memonger.SGD(lr=0.01, momentum=0.9),
        device=settings.device, cuda=Cuda(tf32=settings.tf32), buckets=memonger.Buckets(),
    )  # fmt: skip
    plan.save(path)
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = str(one.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    makers = {
        "alone": lambda: _Trainer(memonger.TrainingSession(path)),
        "one rank": lambda: _Trainer(memonger.DistributedTrainingSession(path, group=_group(settings), timeout=60)),
    }
    sessions, rows = contest(makers, settings.device)
    for key, session in sessions.items():
        rows[key]["losses"] = [float(loss) for loss in session.losses]
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"contestants": rows}


def _group(settings: Settings) -> Any:
    """None: memonger makes a group of NCCL's; in a rehearsal what the tests put in its place."""
    if not settings.rehearse:
        return None
    import torch.distributed as dist

    from tests.support.near_memory import NearEngine

    dist.init_process_group("gloo")
    return NearEngine(dist.group.WORLD, 60, parse_device(settings.device))


def _batch(session: memonger.TrainingSession) -> dict[str, np.ndarray]:
    """Seeded data and labels of a step."""
    rng, found = np.random.default_rng(1), {}
    for value in session.inputs:
        assert value.shape is not None
        assert value.numpy is not None
        drawn = rng.integers(0, 10, value.shape) if value.numpy.kind == "i" else rng.standard_normal(value.shape)
        found[value.name] = drawn.astype(value.numpy)
    return found
