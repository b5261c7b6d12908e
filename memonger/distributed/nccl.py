"""NCCL between GPUs: collectives on a device's memory, in order with what onnxruntime runs there."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from memonger.devices import Device
from memonger.distributed.engines import Array, Handle, TorchEngine, torch_errors
from memonger.errors import RuntimeUnavailableError, SessionError
from memonger.runtime.arena import DeviceArray
from memonger.words import option


class NcclEngine(TorchEngine):
    """torch.distributed: NCCL for what lies on a GPU, gloo for what lies on the host (losses, texts, states).

    A collective runs in a stream of NCCL's own, behind what PyTorch's default stream has been given, and that stream
    goes on behind a collective that was waited for. It is CUDA's legacy stream, in which onnxruntime runs partitions,
    as their workspace comes from outside (`memonger.runtime.cuda.pool`). The host waits as well: a run ends when its
    work is done, and so does `Handle.wait`. Between the two a collective and partitions run side by side.

    Args:
        group: See `TorchEngine`. To one without gloo a group of gloo is made.
        timeout: Seconds after which a collective on the device that isn't done has failed, in every group.
        device: The GPU of this rank.

    Raises:
        RuntimeUnavailableError: this PyTorch has no NCCL, or can't use the GPU; see also `TorchEngine`.
        SessionError: the group carries no bytes of GPUs by NCCL.
    """

    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, group: Any, timeout: float, device: Device) -> None:
        self._device = device
        super().__init__(group, timeout)

    def _check(self) -> None:
        if not self._dist.is_nccl_available():
            raise RuntimeUnavailableError(
                f"ranks on {self._device} need a PyTorch with NCCL, and this one ({self._torch.__version__}) has none: "
                "install one for CUDA (https://pytorch.org/get-started/locally), or plan for the CPU "
                f"({option('device', 'cpu')})."
            )

    def _join(self) -> None:
        # A collective that fails is an error of the rank that waits for it; else PyTorch ends the process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        try:
            self._torch.cuda.set_device(self._device.index)
        except RuntimeError as error:
            raise RuntimeUnavailableError(f"PyTorch can't use {self._device}: {error}") from error
        super()._join()

    def _place(self) -> dict[str, Any]:
        # NCCL's connections are made at once, so that two ranks on one GPU are told before anything runs.
        return {"device_id": self._torch.device(self._device.kind, self._device.index)}

    def _adopt(self, carriers: dict[str, str]) -> None:
        if carriers.get(self._device.kind) != "nccl":
            config = ",".join(f"{kind}:{name}" for kind, name in carriers.items())
            raise SessionError(
                f"the ranks' group has no NCCL ({config}), and this plan runs on {self._device}: make the group with "
                f"init_process_group('{self.backend}'), or leave it to memonger (torchrun, without group)."
            )
        if "cpu" not in carriers:
            members = self._dist.get_process_group_ranks(self._group)
            self._on_host = self._dist.new_group(
                members, timeout=self._timeout, backend="gloo", use_local_synchronization=True
            )

    def _begun(self, array: Array, begin: Callable[[Any, Any], list[Any]]) -> Handle:
        if isinstance(array, np.ndarray):
            return super()._begun(array, begin)
        with torch_errors(), self._stream():
            works = begin(self._on_device(array), self._group)
        return Handle([lambda: self._finish(works)])

    def _finish(self, works: list[Any]) -> None:
        """Wait for collectives, here and in the stream that onnxruntime goes on in."""
        with torch_errors(), self._stream() as stream:
            for work in works:
                work.wait(self._timeout)
            stream.synchronize()

    @contextmanager
    def _stream(self) -> Iterator[Any]:
        """PyTorch's default stream as the one it works in, whichever the caller has chosen."""
        cuda = self._torch.cuda
        with cuda.device(self._device.index), cuda.stream(cuda.default_stream(self._device.index)):
            yield cuda.current_stream(self._device.index)

    def _on_device(self, array: DeviceArray) -> Any:
        """A tensor over an array's own bytes."""
        where = f"{self._device.kind}:{self._device.index}"
        if array.dtype.name == "bfloat16":  # which the interface has no name for
            whole = self._torch.as_tensor(replace(array, dtype=np.dtype(np.int16)), device=where)
            return whole.view(self._torch.bfloat16)
        return self._torch.as_tensor(array, device=where)

    def _break(self) -> None:
        """End collectives that hang on the device, which leaving waits for."""
        if self._on_host is not self._group:
            self._dist.destroy_process_group(self._on_host)
        abort = getattr(self._dist.distributed_c10d, "_abort_process_group", None)
        if abort is None or not self._dist.is_initialized():
            self._leave()
        else:
            abort(None if self._owns else self._group)
