"""One onnxruntime session that runs plans: how it is made, where inputs and outputs lie, whether it keeps the order."""

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from memonger.devices import Cuda, Device
from memonger.errors import SessionError
from memonger.files import ScratchFolder
from memonger.runtime import ort, profile
from memonger.runtime.backend import backend
from memonger.runtime.interrupts import interrupts_later
from memonger.runtime.prepared import SessionGroup
from memonger.runtime.profile import workspace_of
from memonger.units import in_full
from memonger.words import FILE, option

_FAILED_NODE = re.compile(r"running \w+ node\. Name:'(.*?)' Status", re.DOTALL)


class EngineRefusedError(SessionError):
    """The engine doesn't run any more: what onnxruntime ran wasn't the plan, or couldn't be compared with it."""


class Engine:
    """An onnxruntime session, and whether it was seen to follow the planned order.

    Args:
        group: Plans of one structure. Between the sessions of partitions threads sleep as soon as a run is over.
        device: Where to run.
        threads: Threads within a node; 0 leaves it to onnxruntime.
        check_order: Compare the order of the first run with the plan. Of a model with a loop on the CPU it isn't: the
            profile would keep 2.8 KB of each node of each turn as long as the session lives, and `as_written` has shown
            that onnxruntime runs the plan's nodes and no others, which it then runs in file order.
        cuda: How the CUDA provider is set up.
        graphs: Whether runs are captured as CUDA graphs: ``auto`` where it can be, ``on``, ``off``.
        pool: Of a partition's session that was made before, on a CUDA device: workspace comes from there; None for one
            of its own.
        limit: What onnxruntime may take of the host's memory by itself; None: as much as it asks for.

    Attributes:
        session: The ``onnxruntime.InferenceSession``.
        pool: What it takes of a CUDA device beside the arena; None on the CPU, and where runs are captured: with
            allocations from outside onnxruntime works on CUDA's legacy stream, which can't be captured.
        captures: Whether its runs are captured as CUDA graphs.
        why_not: Why they aren't; empty if they are.
        workspace: Bytes each node took on a CUDA device in the first run, if its pool was recording then.
        refused: Why it doesn't run any more; None as long as it does.
        failed_at: The step at which the last run failed; None where it didn't, or nobody knows.

    Raises:
        SessionError: onnxruntime refuses the model; a planned value lies on the host; ``on`` is impossible, and why.
        RuntimeUnavailableError: the device isn't there.
    """

    def __init__(
        self,
        group: SessionGroup,
        device: Device,
        threads: int,
        check_order: bool,
        cuda: Cuda | None = None,
        graphs: str = "off",
        pool: Any = None,
        limit: ort.Limit | None = None,
    ) -> None:
        self.programs, self.device = group.programs, device
        self.refused: str | None = None
        self.failed_at: int | None = None
        self._owner = os.getpid()
        self.is_new, self._graphs = True, 0
        self.pool: Any = None
        self._joined = pool
        self.workspace: dict[str, int] = {}
        self._folder = ScratchFolder() if check_order and not (device.is_host and self.programs[0].has_loop) else None
        self._notes = 0  # nodes of which the calling thread keeps notes in each run
        profile_path = self._folder.path / "first_run" if self._folder is not None else None
        self._options = ort.SessionSettings(
            in_order=True, threads=threads, profile=profile_path, cuda=cuda or Cuda(),
            is_partition=group.is_partition, shares_workspace=device.is_host, limit=limit,
            pattern=not group.takes_any_shape and limit is None and not self.programs[0].has_loop,
        )  # fmt: skip
        self.captures, self.why_not = False, self._unfit(graphs)
        if not self.why_not:
            try:
                self._make(group, captures=True)
            except SessionError as error:
                if graphs == "on":
                    raise SessionError(f"CUDA graphs can't be used: {error}") from error
                self.why_not = str(error)
        if not self.captures:
            self._make(group, captures=False)
        self.hosted: frozenset[str] = frozenset()
        if not device.is_host:
            inputs = zip(self.session.get_inputs(), self.session.get_input_memory_infos(), strict=True)
            self.hosted = frozenset(value.name for value, where in inputs if not device.owns(where.name))
            planned = {tensor.name for program in self.programs for tensor in program.planned}
            outputs = zip(self.session.get_outputs(), self.session.get_output_memory_infos(), strict=True)
            for value, where in outputs:  # a copy to the arena at the run's end would write over others
                if value.name in planned and not device.owns(where.name):
                    raise SessionError(
                        f"'{value.name}' is computed on the host, and the plan has it in the arena of {device}. Plan "
                        f"the model for this device ({option('device', str(device))})."
                    )
        if self.captures and self.hosted:
            self.why_not = f"input '{min(self.hosted)}' lies in the host's memory"
            self._make(group, captures=False)
        if graphs == "on" and not self.captures:
            raise SessionError(f"CUDA graphs can't be used: {self.why_not}. Leave it to 'auto', or turn them 'off'.")
        if not group.is_partition:
            self.reserve()

    session: Any

    def _make(self, group: SessionGroup, captures: bool) -> None:
        """Make the session."""
        self.close()
        self.captures = False
        if not captures:
            self.pool = backend(self.device).pool() if self._joined is None else self._joined.join()
        self.session = ort.make_session(group.model, self.device, self._options, pool=self.pool, captures=captures)
        self.captures = captures
        if self.pool is not None:
            self.pool.loaded()

    def _unfit(self, graphs: str) -> str:
        """What is known to stand against a captured run before the session is made."""
        if graphs == "off":
            return "they were turned off"
        if not self.device.facts.has_graphs:
            return "CUDA graphs are for CUDA devices"
        for program in self.programs:
            if not program.is_accounted:
                here = option("device", str(self.device))
                return f"its workspace wasn't measured: plan the model for this device ({here})"
            if program.copies_from_host:
                return f"{program.copies_from_host} copies from the host's memory, which a run that is replayed can't"
            planned = {tensor.name for tensor in program.planned} | program.replacing
            unplanned = next((name for name in program.outputs if name not in planned), None)
            if unplanned is not None:
                return f"output '{unplanned}' has no planned address"
        return ""

    @property
    def workspace_bytes(self) -> int:
        """Most workspace that a node takes."""
        return max(program.workspace_bytes for program in self.programs)

    def reserve(self, at_once: int = 1) -> None:
        """Take memory for workspace of as many runs; of partitions the last does it, when all weights are loaded."""
        need = at_once * self.workspace_bytes
        if self._options.limit is not None:
            backend(self.device).reserve(self.session, self._options.limit.nbytes or 0, exactly=True)
        elif self.pool is not None:
            self.pool.reserve(need)
        else:
            backend(self.device).reserve(self.session, need)

    @property
    def unchecked(self) -> bool:
        """Whether no run has been compared with the schedule yet."""
        return self._folder is not None

    @property
    def input_names(self) -> frozenset[str]:
        """Names of its model's inputs."""
        return frozenset(value.name for value in self.session.get_inputs())

    def check_usable(self) -> None:
        """Check that it runs.

        Raises:
            SessionError: an earlier run wasn't the plan's.
        """
        if self.refused is not None:
            raise EngineRefusedError(self.refused)

    def run(self, binding: Any, number: int = 0) -> None:
        """Run once.

        Args:
            binding: Everything bound.
            number: Of the CUDA graph this binding's runs are captured in and replayed from.

        Raises:
            SessionError: the runtime failed, or didn't follow the planned order; this process is a fork of the one that
                made the session.
        """
        if os.getpid() != self._owner:
            raise SessionError(
                "this session was made before the process forked, and onnxruntime's threads stay with the parent: make "
                "a session in the child, or start it by spawning (multiprocessing.set_start_method('spawn'))."
            )
        if self._folder is None:
            self._run(binding, number)
            return
        with interrupts_later():  # a run whose order was not compared must not pass for one that was
            self._run(binding, number)
            self._check_order(self._folder)

    def _run(self, binding: Any, number: int) -> None:
        self.failed_at, options = None, None
        if self.captures:  # a run that is replayed has no order to look at: the checked one isn't captured
            options = ort.run_options({"gpu_graph_id": str(-1 if self.unchecked else number)})
        try:
            self.session.run_with_iobinding(binding, options)
        except Exception as error:  # pybind exceptions share no base class
            refused = self.pool.refused if self.pool is not None else None
            named, order = _FAILED_NODE.search(str(error)), self.programs[0].order
            node = named[1] if named is not None else "?"
            self.failed_at = order.index(node) if node in order else None
            refused = refused or self._beyond_limit(str(error), node)
            raise SessionError(refused or f"onnxruntime failed: {str(error).strip()}") from error
        if self.is_new:
            self.is_new = False
            # Workspace was measured for these plans, and all else is bound: more isn't to be had. The first run may
            # take more, and gives it back: an exhaustive search for convolution algorithms tries many.
            if self.pool is not None and all(program.is_accounted for program in self.programs):
                self.pool.cap()
        if self._notes:
            ort.count_notes(self._notes)

    def _beyond_limit(self, message: str, node: str) -> str | None:
        """What to say of a run that needed more than the limit; None of any other."""
        limit = self._options.limit
        if limit is None or limit.nbytes is None or "Available memory of" not in message:
            return None
        return (
            "this run needs more memory than its limit: for what these inputs decide the size of, and for workspace, "
            f"onnxruntime may take {in_full(limit.nbytes)}, and node '{node}' asked for more. Plan "
            f"with a larger budget and such inputs ({option('budget', '4GiB')}, {option('inputs', FILE)})."
        )

    def _check_order(self, folder: ScratchFolder) -> None:
        """Compare the order of the first run that succeeded with the schedule."""
        start = self.session.get_profiling_start_time_ns()
        try:
            runs = profile.read_profile(Path(self.session.end_profiling()), last_run=True)
        except SessionError as error:
            self.refused = f"the order of the run can't be checked: {error} Make a new session once there is room."
            raise EngineRefusedError(self.refused) from error
        finally:
            folder.remove()
            self._folder = None
            self._notes = 0 if self._options.threads == 1 else len(self.programs[0].order)
        if self.pool is not None and self.pool.events is not None:
            self.workspace = workspace_of(runs, start, self.pool.events)
        program = self.programs[0]
        foreign = {run.name for run in runs if run.provider not in ("", self.device.provider)}
        left_out = program.unordered | foreign
        planned = [name for name in program.order if name not in left_out]
        executed = [run.name for run in runs if run.name not in left_out]
        unknown = sorted(foreign - set(program.order) - program.unordered)
        if planned != executed or unknown:
            self.refused = order_message(planned, executed, unknown, self.device)
            raise EngineRefusedError(self.refused)

    def next_graph(self) -> int:
        """A number for a CUDA graph: a binding needs another one where its addresses are others."""
        self._graphs += 1
        return self._graphs

    def close(self) -> None:
        """End the session, and give back what it took of a CUDA device. It can't run any more."""
        self.session = None
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def __del__(self) -> None:
        if getattr(self, "pool", None) is not None:
            self.close()


def order_message(planned: Sequence[str], executed: Sequence[str], unknown: Collection[str], device: Device) -> str:
    """What to tell a user whose plan wasn't followed."""
    step = next((i for i, (a, b) in enumerate(zip(planned, executed, strict=False)) if a != b), len(planned))
    wanted = planned[step] if step < len(planned) else "the end"
    ran = executed[step] if step < len(executed) else "the end"
    what = f"at step {step} the plan has '{wanted}', it ran '{ran}'"
    if unknown:
        what = f"it ran '{min(unknown)}' on the CPU, which isn't in the plan"
    return (
        f"onnxruntime didn't run the planned order: {what} ({len(planned)} nodes planned, {len(executed)} run). "
        f"Nothing was returned. {remedy(device)}"
    )


def remedy(device: Device) -> str:
    """What to do about a plan that the runtime doesn't follow."""
    here = option("device", str(device))
    return f"Plan the model for this device ({here}), which takes over what the runtime inserts or inlines."
