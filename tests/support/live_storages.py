"""Bytes of all tensors that are there while PyTorch runs, counted operator by operator."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memonger.torch import budget


class LiveStorages(TorchDispatchMode):
    """Counts storages that operators make, from when they are made until they are freed.

    Attributes:
        live: Bytes that are there now.
        peak: The most that were.
    """

    supports_higher_order_operators = True

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = dict[int, int]()
        self.add(there)

    def __torch_dispatch__(self, function: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        results = function(*arguments, **(named or {}))
        self.add(tree_leaves(results))
        return results

    def add(self, tensors: Iterable[Any]) -> None:
        """Storages of tensors are there from now on."""
        for storage in (one.untyped_storage() for one in tensors if isinstance(one, torch.Tensor)):
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.live -= self._seen.pop(key)


@contextmanager
def counted() -> Iterator[list[LiveStorages]]:
    """Both passes of what memonger's backend compiles meanwhile run under the last of these modes.

    A mode around a compiled module would have Dynamo leave it alone.
    """
    modes: list[LiveStorages] = []
    compiled = budget.as_it_is

    def counting(module: Any, inputs: Any) -> Callable[[list[Any]], Any]:
        run = compiled(module, inputs)

        def boxed(arguments: list[Any]) -> Any:
            if not modes:
                return run(arguments)
            modes[-1].add(arguments)  # gradients of outputs come from outside
            with modes[-1]:
                return run(arguments)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    with mock.patch.object(budget, "as_it_is", counting):
        yield modes


@contextmanager
def allocated(kernels: bool = False) -> Iterator[list[LiveStorages]]:
    """What PyTorch's compiler makes meanwhile allocates under the last of these modes, if there is one.

    Args:
        kernels: Whether its own kernels are compiled, which takes long, and kept in its cache for the next time; else
            they do nothing.
    """
    from torch._inductor import async_compile, compile_fx, config

    modes: list[LiveStorages] = []
    inner, empty = compile_fx.compile_fx_inner, torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]

    def counting(graph: Any, inputs: Any, **settings: Any) -> Any:
        with config.patch(custom_partitioner_fn=None):  # it is done: of another version the same graph is the same
            run = inner(graph, inputs, **settings)

        def boxed(arguments: list[Any]) -> Any:
            if not modes:
                return run(arguments)
            modes[-1].add(arguments)
            with modes[-1]:
                return run(arguments)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def counted(*settings: Any) -> torch.Tensor:
        made = empty(*settings)
        if modes:
            modes[-1].add([made])
        return made

    with (
        nullcontext()
        if kernels
        else mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", return_value=lambda *_: None),
        mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cpu", counted),  # type: ignore[attr-defined]
        mock.patch.object(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=counting)),
        config.patch(fx_graph_cache=kernels),  # kernels that do nothing aren't for others
        functorch.patch(enable_autograd_cache=False),  # what is found there was planned before
    ):
        yield modes
