"""A rank on the stand-in for CUDA, whose kernels do nothing: what it finds in the arena, it sends.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m tests.support.cuda_ranks FOLDER

It runs the folder's plan.onnx, and writes there what `tests/runtime/test_cuda_sessions.py` looks at.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import memonger
from memonger.devices import Device
from memonger.distributed import session as sessions
from tests.support import training_models
from tests.support.near_memory import NearEngine


def _opened(folder: Path, rank: int, **options: Any) -> memonger.DistributedTrainingSession:
    engine = NearEngine(dist.group.WORLD, 60, Device("cuda", rank))
    return memonger.DistributedTrainingSession(folder / "plan.onnx", group=engine, check_order=False, **options)


def _fill(session: memonger.DistributedTrainingSession, number: float) -> None:
    session._arena.write(0, np.full(session._arena.size // 4, number, np.float32))


def main(folder: Path) -> None:
    """Steps whole, not finite on one rank, and with the optimizer's state shared."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    session, batch = _opened(folder, rank), training_models.batch(0)
    found: dict[str, Any] = {"device": str(session.device)}
    _fill(session, rank + 1)
    session.own_loss = lambda: (rank + 1.0, 1.0)  # type: ignore[method-assign]
    found["loss"] = session.step(batch)
    arrays = (sessions._elements_of(bucket, session._arena) for bucket in session._buckets)
    begin = session._arena.address
    found["gradients"] = sorted({
        float(number)
        for array in arrays
        for number in session._arena.read(array.address - begin, array.dtype, (array.count,))
    })  # fmt: skip
    session.own_loss = lambda: (float("nan") if rank else 1.0, 1.0)  # type: ignore[method-assign]
    session.step(batch)
    found["skipped"] = [session.skipped_steps, session.steps]
    session = _opened(folder, rank, shard_optimizer=True)
    for name in session._roles[0].parameters:
        session._weights.fill(name, 10 + rank)
    _fill(session, rank + 1)
    session.step(batch)
    found["parameters"] = [float(session._weights.array(name).mean()) for name in session._roles[0].parameters]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    del session, arrays
    gc.collect()  # whoever holds the group while the interpreter ends may end the process with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
