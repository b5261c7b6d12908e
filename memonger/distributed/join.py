"""Where a rank runs, and what carries its bytes to the others."""

import os
from pathlib import Path
from typing import Any

from memonger.devices import Device, parse_device
from memonger.distributed.engines import CollectiveEngine, SingleRank, TorchEngine
from memonger.distributed.mpi import MpiEngine
from memonger.distributed.nccl import NcclEngine
from memonger.errors import RuntimeUnavailableError, SessionError
from memonger.plan import Plan
from memonger.plan_file import device_in
from memonger.runtime.backend import backend
from memonger.runtime.ort import check_device
from memonger.words import option


def device_of_rank(plan: Plan | str | Path, device: str | Device | None) -> Device | None:
    """Where this rank runs; None where nobody has said, and the plan's file can't be read.

    Raises:
        PlanError: ``device`` is none.
        RuntimeUnavailableError: there are more ranks than devices on this machine, or none at all.
    """
    wanted = device if device is not None else plan.device if isinstance(plan, Plan) else device_in(Path(plan))
    if wanted is None:
        return None
    chosen, local = parse_device(wanted), os.environ.get("LOCAL_RANK", "")
    if chosen.facts.is_portable or not chosen.facts.is_numbered:
        return chosen
    if not local.isdecimal() or (device is not None and device != chosen.kind):
        return chosen
    check_device(Device(chosen.kind))
    count = backend(chosen).count()
    if int(local) >= count:
        raise RuntimeUnavailableError(
            f"this rank is number {local} of its machine (LOCAL_RANK, from 0 on), which shows {count} "
            f"device{'' if count == 1 else 's'} of {chosen.kind}: start no more ranks than that (torchrun "
            f"--nproc-per-node {count}). Where each rank is shown a device of its own, say "
            f"{option('device', f'{chosen.kind}:0')}."
        )
    return Device(chosen.kind, int(local))


def engine_of(group: Any, timeout: float, device: Device) -> CollectiveEngine:
    """The engine for a group as a caller gives it.

    Args:
        group: A process group of torch.distributed, a communicator of mpi4py, or an engine. None: what ``torchrun``
            says; without it one rank alone.
        timeout: See `TorchEngine`.
        device: Where the rank runs.

    Raises:
        RuntimeUnavailableError: see `TorchEngine` and `memonger.distributed.nccl.NcclEngine`.
        SessionError: it is none of these, or carries no bytes of the device.
    """
    if group is None and "WORLD_SIZE" not in os.environ:
        return SingleRank()
    if hasattr(group, "Get_rank") and hasattr(group, "Iallreduce"):
        return MpiEngine(group, device)
    if hasattr(group, "rank") and hasattr(group, "all_gather"):
        return group  # type: ignore[no-any-return]
    if group is None or type(group).__module__.partition(".")[0] == "torch":
        return TorchEngine(group, timeout) if device.is_host else NcclEngine(group, timeout, device)
    raise SessionError(
        f"group must be a process group of torch.distributed or a communicator of mpi4py, not {group!r}."
    )
