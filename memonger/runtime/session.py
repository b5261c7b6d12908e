"""Runs planned models on onnxruntime with every planned value at its address in one arena."""

import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from memonger.devices import GRAPHS, Device
from memonger.errors import SessionError
from memonger.runtime import feeds as feeding
from memonger.runtime import ort, process_memory
from memonger.runtime.arena import Arena
from memonger.runtime.engine import Engine
from memonger.runtime.execution_context import ExecutionContext, IdleRelease
from memonger.runtime.loaded_model import LoadedModel, check_room
from memonger.runtime.prepare_apart import prepared_for
from memonger.runtime.prepared import SessionRequest
from memonger.runtime.weight_reader import WeightReader
from memonger.units import format_size, shown
from memonger.words import check_choice, option

if TYPE_CHECKING:
    from memonger.plan import Plan

Threads = Literal["lock", "arena"]


class Session:
    """A planned model, ready to run; or one model planned for several input shapes, of which each run picks its own.

    Planned files are read and checked in a process of their own, so that this one doesn't keep the modules which that
    takes. Where ``import onnx`` came before, on a GPU, and for plans for ranges of sizes, this process does it.

    Several plans share one arena, as large as the largest needs. Plans that differ in shapes only share one
    onnxruntime session as well, and so one copy of the weights. Plans with chunks, and for ranges of sizes, don't: each
    has sessions of its own. What a plan for its sizes alone takes, one for ranges doesn't run; of several such plans
    whose ranges meet the first given runs.

    The first run is profiled: if onnxruntime didn't execute the planned order, its results are not returned and the
    session refuses to run.

    Args:
        plan: A plan, the path of a planned file, or several. Each is verified before any address is used.
        device: Where to run; the plan's own device if None (the CPU for portable plans).
        threads: What threads that call `run` at once share. ``lock``: one arena, one run at a time. ``arena``: an
            arena a thread, freed when its thread ends.
        intra_op_threads: Threads within a node; 0 is the plan's own setting.
        check_order: False leaves out the check of the first run, which costs a profile of it (about 2 KB a node stay
            with the process): for a plan whose order was checked on this machine and runtime before. A model with a
            loop is checked before it runs, by what onnxruntime would run, and isn't profiled.
        cuda_graph: Whether runs on a CUDA device are captured once and replayed, which spares the launches: ``auto``
            where that can be (`cuda_graph` says whether it is), ``on`` or an error, ``off``.
        check_weights: False doesn't compare the weights of a planned file with the digests in it, which takes about a
            second for each gigabyte. A `Plan` was compared when it was read.
        pad: Take smaller batches as well, such as the last one of a data set: inputs are filled up with their last row
            to the next larger batch that there is a plan for, and outputs cut to the rows given. With ranges of sizes
            so is what lies between their steps, or below them, along every axis. For models that compute each row
            alone. One with an output that doesn't begin with the batch is refused, and one whose
            rows meet (batch statistics, a mean over the batch) at its first smaller batch, which runs three times to
            find out: with zeros in place of the last row outputs have to be the same, bit for bit. What that doesn't
            show are rows that meet only for other inputs than those of this run, and rows of a model that draws random
            numbers, where no two runs agree.
        idle_release: Seconds after the last run at which `release` is called; None: never.
        state: Inputs that the session keeps, and which output each becomes for the next run: ``{"h": "h_next"}``. They
            are zero at first, needn't be given (one that is given replaces what was kept), and their outputs aren't
            returned: see `state_dict`. None: what the plan was made for (``search_plan(state=...)``), whose kernels
            write it in place where they may; else two buffers swap. With ranges of sizes it has the shape that its
            output had: a cache begins with the smallest length, and grows by what each run appends.

    Raises:
        PlanFileError: a plan is bound to another machine, runtime or provider.
        VerificationError: a plan is wrong.
        RuntimeUnavailableError: no onnxruntime, or no such device.
        SessionError: onnxruntime refuses the model; the plans are of different models; ``pad`` can't be.
    """

    def __init__(
        self,
        plan: "Plan | str | Path | Sequence[Plan | str | Path]",
        *,
        device: str | Device | None = None,
        threads: Threads = "lock",
        intra_op_threads: int = 0,
        check_order: bool = True,
        cuda_graph: str = "auto",
        check_weights: bool = True,
        pad: bool = False,
        idle_release: float | None = None,
        state: Mapping[str, str] | None = None,
    ) -> None:
        if threads not in ("lock", "arena"):
            raise SessionError(
                f"threads={threads!r} must be 'lock' or 'arena', which say how threads share a session; "
                "intra_op_threads is the number of threads within a node."
            )
        check_choice("cuda_graph", cuda_graph, GRAPHS, SessionError)
        kept = dict(state) if isinstance(state, Mapping) else state
        prepared, groups = prepared_for(
            plan, SessionRequest(device, check_weights, check_order, kept, has_arenas=threads == "arena", pads=pad)
        )
        self.device, self._name = prepared.device, prepared.name
        self._sizes, self._maps = prepared.sizes, prepared.maps
        if threads == "arena" and not self.device.is_host:
            raise SessionError("threads='arena' is for the CPU: on a CUDA device make a session for each thread.")
        if threads == "arena" and any(one.reads is not None for one in prepared.plans):
            raise SessionError(
                "weights of this plan stay in its file, and are dropped behind the steps of one run at a time: leave "
                "out threads='arena', or make a session for each thread."
            )
        check_room(prepared.room, self.device)
        self._model = LoadedModel(
            prepared, groups, threads=intra_op_threads, check_order=check_order, cuda_graph=cuda_graph, pad=pad
        )
        del prepared, groups, plan
        process_memory.settle()  # what reading the plan took, and onnxruntime to make its sessions
        self._of_thread, self._contexts = threading.local(), weakref.WeakSet[ExecutionContext]()
        self._making = threading.Lock()  # held while a context is made, which `close` has to know of
        self._shared = self._new_context() if threads == "lock" else None
        self._idle = IdleRelease(self, idle_release)

    def __repr__(self) -> str:
        """As ``<Session densenet121 on cpu: batch 1, arena 6.89 MiB>``."""
        figures = ", ".join([*self._sizes, f"arena {format_size(self._model.arena_bytes)}"])
        return shown(f"<Session {self._name} on {self.device}: {figures}>")

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the model's inputs."""
        return tuple(value.name for value in self._model.programs[0].inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the model's outputs, each once."""
        return self._model.programs[0].outputs

    @property
    def state(self) -> Mapping[str, str]:
        """Inputs that the session keeps, and the output that each becomes for the next run."""
        return {} if self._model.kept is None else dict(self._model.kept.state)

    @property
    def arena(self) -> Arena:
        """The arena this thread runs in."""
        return self._context().arena

    @property
    def cuda_graph(self) -> bool:
        """Whether runs are captured as a CUDA graph and replayed."""
        return all(engine.captures for engine in self.engines)

    @property
    def why_no_cuda_graph(self) -> str:
        """What stands against it; empty where nothing does."""
        return next((engine.why_not for engine in self.engines if engine.why_not), "")

    @property
    def weight_readers(self) -> tuple[WeightReader, ...]:
        """What holds weights that stay in the plan's file to their window, and what that took (`WeightReader.last`)."""
        return self._model.readers

    @property
    def engines(self) -> tuple[Engine, ...]:
        """What runs the plans, each once."""
        return self._model.engines

    def run(
        self, inputs: feeding.Feeds, outputs: Mapping[str, Any] | None = None, *, copy: bool = True
    ) -> dict[str, Any]:
        """Run the model once.

        Args:
            inputs: For each input a numpy array, an OrtValue, or whatever has ``__dlpack__`` (a tensor of PyTorch or
                CuPy): read where it lies if that is the session's device and it is contiguous. What stock onnxruntime
                takes as a dictionary (``DictVectorizer``) is one here, or its table: a column for each key.
            outputs: Arrays or tensors of yours that outputs are written to, by name. An input may be one of them. Where
                a run fails midway they may have been written to.
            copy: False returns what lies in the arena itself, valid until the next run begins: arrays, and on a CUDA
                device OrtValues, which ``torch.from_dlpack`` takes without a copy.

        Returns: the outputs by name, in the model's order. What stock onnxruntime gives as a list of dictionaries
            (``ZipMap``) is that here, and in ``outputs`` and with ``copy=False`` the table that it is made of.

        Raises:
            SessionError: a wrong name or type; a shape no plan was made for; the runtime failed; or it didn't follow
                the planned order.
        """
        if self._maps:
            inputs = feeding.with_tables(inputs, self._maps, self._model.programs[0].inputs)
        with self._idle:
            results = self._context().run(self._model, inputs, outputs, copy)
        if self._maps and copy:
            made = {n: keys for n, keys in self._maps.items() if n in results and n not in (outputs or {})}
            results |= {name: feeding.as_maps(results[name], keys) for name, keys in made.items()}
        return results

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of what is kept between runs, by the inputs' names; empty without a state.

        Raises:
            SessionError: it was lost in a run that failed.
        """
        return {} if self._model.kept is None else self._model.kept.arrays()

    def load_state_dict(self, tensors: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, or some of it; all of it is taken or nothing.

        Raises:
            SessionError: it names what is no state, or of another type or shape.
        """
        if self._model.kept is None:
            raise SessionError(f"this session keeps no state: make one with {option('state', {'h': 'h_next'})}.")
        self._model.kept.take(tensors)

    def reset_state(self) -> None:
        """Begin anew: all that is kept is zero, and what grows has its smallest length."""
        if self._model.kept is not None:
            self._model.kept.reset()

    def release(self) -> None:
        """Give the arena and the workspace back to the system; the next run takes them again.

        Waits for a run that is under way. What ``copy=False`` returned isn't valid any more. Weights stay; see `close`.
        On a CUDA device the workspace stays as well.
        """
        for context in self._all_contexts():
            context.release()
        if self.device.is_host:
            ort.shrink_host_memory()

    def close(self) -> None:
        """Give everything back, weights as well, once the runs that are under way are over. No other begins."""
        with self._making:
            self._model.is_closed = True
        self._idle.end()
        self.release()  # waits for runs
        for context in self._all_contexts():
            context.forget(self._model)
        self._model.close()
        process_memory.settle()

    def __enter__(self) -> Self:
        """The session itself; the end of the ``with`` block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _context(self) -> ExecutionContext:
        """Where this thread runs."""
        if self._shared is not None:
            return self._shared
        context: ExecutionContext | None = getattr(self._of_thread, "context", None)
        if context is None:
            context = self._of_thread.context = self._new_context()
        return context

    def _new_context(self) -> ExecutionContext:
        with self._making:
            self._model.check_open()
            context = ExecutionContext(self.device, self._model.arena_bytes)
            context.bind(self._model)
            self._contexts.add(context)
            return context

    def _all_contexts(self) -> list[ExecutionContext]:
        with self._making:
            return list(self._contexts)
