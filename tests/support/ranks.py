"""What a rank does in tests of distributed training: a program, of which the first of two ranks calls `main`.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m tests.support.ranks FOLDER
    mpirun -n 2 python -m tests.support.ranks FOLDER mpi

It reads plans from the folder and writes there what `tests/distributed/test_ranks.py` looks at.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import memonger
from memonger.devices import CPU
from memonger.distributed.trace import Trace
from memonger.ir import onnx_process
from tests.support import near_memory, networks, training_models

STEPS = 3


def batch(step: int, rank: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The batch of a rank."""
    made = training_models.batch(100 * step + rank)
    return made | {"x": made["x"].astype(dtype)}


def counted(step: int, part: int, rank: int) -> dict[str, np.ndarray]:
    """A micro-batch of a rank, of which some labels count for nothing: on rank 1 all of the second one's."""
    made = batch(2 * step + part, rank, "float64")
    ignored = training_models.BATCH if rank and part else 3 * rank + 5 * part + step
    made["labels"][:ignored] = -1
    return made


def main(folder: Path) -> None:
    """Run all checks, one after the other, on both ranks."""
    import torch.distributed

    onnx_process.parse_text(b'<ir_version: 10, opset_import: ["": 20]> g () => () {}')  # stays, or each plan starts one
    gc.collect()
    gc.freeze()  # each session collects what its plan left, and torch alone is a million objects
    found: dict[str, Any] = {}
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    open_session = _opening(folder)
    _averages(folder, rank, open_session, found)
    _skips(rank, open_session, found)
    _shards(folder, rank, open_session, found)
    _refuses(rank, open_session, found)
    _on_device(folder, rank, open_session, found)
    torch.distributed.destroy_process_group()
    _ends(rank, folder, found)
    (folder / f"{rank}.json").write_text(json.dumps(found))


def main_with_mpi(folder: Path) -> None:
    """Train on ranks that MPI started."""
    from mpi4py import MPI

    session = memonger.DistributedTrainingSession(folder / "plain.onnx", group=MPI.COMM_WORLD)
    losses = [session.step(batch(step, session.rank, "float64")) for step in range(STEPS)]
    session.save(folder / "mpi.state")
    (folder / f"mpi.{session.rank}.json").write_text(json.dumps(losses))
    session.close()


def _opening(folder: Path) -> Callable[..., memonger.DistributedTrainingSession]:
    def made(name: str, **options: Any) -> memonger.DistributedTrainingSession:
        accumulation = folder / f"{name.replace('apply', 'add')}.onnx" if name.startswith("apply") else None
        return memonger.DistributedTrainingSession(folder / f"{name}.onnx", accumulation=accumulation, **options)

    return made


def _averages(folder: Path, rank: int, made: Callable[..., Any], found: dict[str, Any]) -> None:
    """Train in several ways, and save each state."""
    ways = (
        ("plain", "float64"),
        ("clipped", "float64"),
        ("remat", "float64"),
        ("single", "float32"),
        ("sync", "float64"),
    )
    for name, dtype in ways:
        session = made(name)
        session.trace = Trace(rank) if name == "plain" else None
        found[name] = [session.step(batch(step, rank, dtype)) for step in range(STEPS)]
        session.save(folder / f"{name}.state")
        if session.trace is not None:
            session.trace.save(folder / f"{rank}.trace.json")
    session = made("apply")
    found["apply"] = [
        session.step([batch(2 * step + part, rank, "float64") for part in (0, 1)]) for step in range(STEPS)
    ]
    session.save(folder / "apply.state")
    session = made("apply counted")
    found["apply counted"] = [
        session.step([counted(step, part, rank) for part in (0, 1)][: 1 + (step < 2)]) for step in range(STEPS)
    ]
    session.save(folder / "apply counted.state")


def _skips(rank: int, made: Callable[..., Any], found: dict[str, Any], name: str = "skipped") -> None:
    """A loss that isn't finite on one rank leaves the step out on both."""
    session = made("plain")
    before = session.state_dict()
    bad = batch(0, rank, "float64")
    if rank == 1:
        bad["x"][0, 0] = np.nan
    session.step(bad)
    same = all(np.array_equal(array, before[name]) for name, array in session.state_dict().items())
    found[name] = [session.skipped_steps, session.steps, same]


def _shards(folder: Path, rank: int, made: Callable[..., Any], found: dict[str, Any]) -> None:
    """Each rank keeps a part of the optimizer's state, and writes it as a whole or by itself."""
    session = made("plain", shard_optimizer=True)
    losses = [session.step(batch(step, rank, "float64")) for step in range(STEPS)]
    found["shares"] = [losses, sorted(session.state_dict())]
    session.save(folder / "shares.state")
    session.save(folder / "shares", by_rank=True)
    again = made("plain", shard_optimizer=True)
    again.load(folder / "shares")
    mine, theirs = session.state_dict(), again.state_dict()
    found["read again"] = again.steps == STEPS and all(np.array_equal(mine[name], theirs[name]) for name in mine)
    clipped = made("clipped", shard_optimizer=True)
    found["shares, clipped"] = [clipped.step(batch(step, rank, "float64")) for step in range(STEPS)]


def _on_device(folder: Path, rank: int, made: Callable[..., Any], found: dict[str, Any]) -> None:
    """The same on a device: clipped, synchronized, with a part of the state, in micro-batches, not finite on one."""
    import torch.distributed

    def there(name: str, **options: Any) -> memonger.DistributedTrainingSession:
        return made(name, group=near_memory.NearEngine(torch.distributed.group.WORLD, 60, CPU), **options)

    with near_memory.apart():
        for name, options in (("clipped", {}), ("sync", {}), ("shares", {"shard_optimizer": True})):
            session = there(name.replace("shares", "plain"), **options)
            found[f"{name} there"] = [session.step(batch(step, rank, "float64")) for step in range(STEPS)]
            found["sent there"] = session._engine.bytes_sent
            session.save(folder / f"{name} there.state")
        session = there("apply")
        given = [[batch(2 * step + part, rank, "float64") for part in (0, 1)] for step in range(STEPS)]
        found["apply there"] = [session.step(batches) for batches in given]
        session.save(folder / "apply there.state")
        _skips(rank, there, found, "skipped there")


def _refuses(rank: int, made: Callable[..., Any], found: dict[str, Any]) -> None:
    """Another plan on one rank, other weights, other options, and fewer rows."""
    found["plans"] = _said(lambda: made("plain" if rank else "clipped"))
    session = made("plain")
    state = session.state_dict()
    state["last.weight"] += rank
    found["weights"] = _said(lambda: session.load_state_dict(state))
    found["sharing"] = _said(lambda: made("plain", shard_optimizer=bool(rank)))
    found["key"] = _said(lambda: made("plain", random_key=rank))
    found["rate"] = _said(lambda: made("plain").step(batch(0, rank, "float64"), learning_rate=0.25 * (1 + rank)))
    session = made("plain")
    session.learning_rate = 0.25 * (1 + rank)
    found["rate of its own"] = _said(lambda: session.step(batch(0, rank, "float64")))
    found["one rank"] = _said(lambda: made("alone"))
    fewer = {key: array[:-1] for key, array in batch(0, rank, "float64").items()}
    found["uneven"] = _said(lambda: made("plain").step(fewer))


def _ends(rank: int, folder: Path, found: dict[str, Any]) -> None:
    """A rank takes no more steps, then one hangs, and then one ends; each time the other is told which."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    for port, name in enumerate(("closed", "hangs", "gone"), 1):
        os.environ["MASTER_PORT"] = os.environ["PORTS"].split()[port]
        session = memonger.DistributedTrainingSession(folder / "plain.onnx", timeout=6)
        session.step(batch(0, rank, "float64"))
        if name == "hangs":  # no sooner: a busy machine may take its time until here
            _set_pg_timeout(timedelta(seconds=1))
        if rank == 0:
            found[name] = _said(lambda session=session: session.step(batch(1, rank, "float64")))
            found[f"after {name}"] = _said(lambda session=session: session.step(batch(1, rank, "float64")))
            (folder / name).touch()
            continue
        if name == "gone":
            (folder / "1.json").write_text(json.dumps(found))
            os._exit(9)
        if name == "closed":
            session.close()
        while not (folder / name).exists() and os.getppid() != 1:
            time.sleep(0.01)
        session.close()


def _said(call: Callable[[], object]) -> str:
    """The message of the error that a call raises."""
    try:
        call()
    except memonger.MemongerError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    networks.sleep_while_waiting()
    (main_with_mpi if sys.argv[2:] else main)(Path(sys.argv[1]))
