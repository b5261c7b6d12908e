"""Which nodes of a model run in loops, and on how many slices: candidates by estimate, of which runs decide.

An estimate says what each candidate needs and how much longer it takes (`memonger.tiling.chunk_times`); the first of
them are put into the order of what onnxruntime's allocator is expected to take (`memonger.lowering.as_stock`). Then the
file is written, and stock onnxruntime runs it with its default options in a process of its own, taking turns with
another that runs the model as it was: the same outputs bit for bit, no longer than is allowed, in less memory; or the
next candidate.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir as ir

from memonger.errors import LoadError, PlanError
from memonger.files import write_whole
from memonger.ir.maps import maps_of
from memonger.ir.save import as_proto, save_model
from memonger.ir.values import static_shape
from memonger.loops.branch import (
    BATCHES,
    add_sizes,
    can_be_in_branch,
    forms_in_branch,
    open_batch,
    with_first_piece,
)
from memonger.loops.candidates import Candidate, Loop, along, in_regions, in_rows, rounded, why_not
from memonger.loops.copies import with_copies
from memonger.loops.targets import RUNTIMES, Weights
from memonger.loops.writer import NotInLoopsError, settle_constants, settle_scales
from memonger.lowering.as_stock import Expected, expected
from memonger.model import original_model
from memonger.model.load import Source, lift_constants, load, load_as_is
from memonger.option_names import LoopTarget
from memonger.options import Options
from memonger.plan_file import KEY
from memonger.planner import search_plan as planner
from memonger.planner.chunk_timing import NOISE
from memonger.planner.job import solve
from memonger.runtime import feeds as feeding
from memonger.runtime import process_memory
from memonger.runtime.measure import MeasuredSession, RunJob, read_arrays, take_turns, write_arrays
from memonger.runtime.pairs import Pairs
from memonger.runtime.program import inputs_of
from memonger.runtime.worker import WorkerError
from memonger.shapes.inference import infer_once, tell_sizes
from memonger.tiling.candidates import ToSlice
from memonger.tiling.chunk_times import cores_of
from memonger.tiling.chunking import ROUNDED, ChunkSearch
from memonger.tiling.slice_check import SliceCheck
from memonger.tiling.writer import SliceWriter
from memonger.units import format_size
from memonger.words import FILE, NAME, N, either, option, quoted

TRIED, FORECAST = 8, 8
"""Candidates that are run, and of how many it is forecast what they take before the next is chosen."""

WORTH_PIECE = 0.97
"""A piece that is asked for first has a run take no more than so much of the memory."""

ALIKE = 1.1
"""What is expected to take up to so many times the least takes about as much."""

UNSURE, SLACK = 0.4, 1.5
"""Candidates that are estimated to take so much more of the time than is allowed are run, too; and where one was too
slow, those of which an estimate of so many times more is as much as is allowed by what that took."""

WORTH = 0.9
"""What takes more than so much of the memory of a run isn't worth another file."""

LEAST = 256 << 10
"""Bytes that a run has to take less: what a process's memory differs by without reason."""

_SLOWER = 1e-9
"""Seconds by which a candidate loses against one that takes as much."""

UNEXPECTED = 1.1
"""Of what takes so many times what was expected the next form is tried, too: the one is taken that takes less."""

SLOW_FORMS, NEARLY = 2, 1.15
"""So many forms of a candidate that take up to so many times the time that is allowed are timed: of a form in which
results are written into what they are computed from a run is a little faster than of one in which they aren't."""

DIFFER = "outputs differ in their last bits"
"""Why a candidate isn't taken."""

TURNS, TURN_SECONDS, ALL_SECONDS = (5, 12), 0.3, 24.0
"""Turns of each process, at least and at most, where it isn't clear before on which side of the limit the ratio
is; about how long one takes, if a run isn't longer; and all of them, beyond the least."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model takes in stock onnxruntime with its default options, measured in a process of its own.

    Attributes:
        loaded_bytes: Of the process's own memory, once loaded; None where nothing was run, or the system doesn't say.
        run_bytes: The most of a run beyond that, outputs included; likewise.
        seconds: The median run; None where nothing was run.
        expected: What a run was expected to take, without running it; None where there is no onnxruntime, or only a run
            can tell a size.
    """

    loaded_bytes: int | None
    run_bytes: int | None
    seconds: float | None
    expected: Expected | None = None

    @classmethod
    def of(cls, measured: MeasuredSession, expected: Expected | None = None) -> "Footprint":
        """Of a process that took its turns, and what was expected of it."""
        seconds = statistics.median(measured.seconds)
        return cls(measured.loaded["loaded_bytes"], measured.loaded["peak_bytes"], seconds, expected)


_NOTHING_RUN = Footprint(None, None, None)


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A model in loops.

    Attributes:
        model: The model, in standard operators.
        loops: What runs in them, in order; a loop with fewer slices surrounds those before it of the same band. None
            where its nodes stand in a branch (`memonger.loops.branch`) and run as they did.
        before: What the model takes as it was.
        after: What it takes now.
        notes: What there is to say of it.
        target: What runs it; None: onnxruntime on a processor.
        time_ratio: The time of a run over that of one before, the median of pairs; None where nothing was run.
    """

    model: ir.Model
    loops: tuple[Loop, ...]
    before: Footprint
    after: Footprint
    notes: tuple[str, ...] = ()
    target: LoopTarget | None = None
    time_ratio: float | None = None

    def save(self, path: str | Path, *, weights: Weights | None = None) -> None:
        """Write the file. Whole or not at all.

        Args:
            path: The file.
            weights: Where they lie: in a data file beside it, or inside for what reads no other file: then onnxruntime
                holds those of loops twice. None: where the target needs them, else beside it.

        Raises:
            PlanFileError: it can't be written; with weights inside that are more than a message holds.
            PlanError: the target needs weights elsewhere.
        """
        if (weights or "beside" if self.target is None else RUNTIMES[self.target].weights_or(weights)) == "beside":
            save_model(self.model.clone(), Path(path), limit=0, own=True)
        else:
            data = as_proto(self.model, str(path)).SerializeToString()
            write_whole(Path(path), lambda target: target.write(data))


def shrink(
    source: Source, *, batch: int | None = None,
    dims: Mapping[str, int | tuple[int, int] | tuple[int, int, int] | str] | None = None,
    max_overhead: float = 0.05, check: bool = True, allow_rounding: bool = False, target: LoopTarget | None = None,
    inputs: feeding.Feeds | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Shrunk:  # fmt: skip
    """A plain ONNX model that gives the same outputs in less memory wherever onnxruntime runs.

    Nodes that are independent along an axis of their values, the batch or a transformer's tokens, run in a loop on one
    slice after the other, so that only slices of their values exist at a time; those on single images for some rows
    after the other.

    Args:
        source: What `memonger.load` takes.
        batch: Size of the inputs' open first dimension; None: 1.
        dims: Sizes of other open dimensions, by name. One of them may be a range of sizes, as ``(1, 16)``, if it is the
            first of the inputs: it stays open in the file.
        max_overhead: The most extra time of a run, as a fraction, by measurement.
        check: Run the model before and after in stock onnxruntime. Without, estimates decide alone.
        allow_rounding: Whether outputs may differ in their last bits.
        target: What will run the file, where that isn't onnxruntime on a processor: the file gets a form that it takes.
        inputs: Arrays by name for the runs that are compared; random numbers if None. Their shapes also give the sizes
            of dimensions that are still open.
        progress: Called with the name of each stage of the work.

    Raises:
        LoadError: the model can't be read or its shapes can't be made static.
        PlanError: nothing is gained: no node can run in a loop (the message names one and says why), or none that can
            saves memory in the time that is allowed, with the same outputs; or more than one dimension is to stay open;
            or the target can't run such a file.
        RuntimeUnavailableError: onnxruntime isn't there to check with.
    """
    asked = Options(batch=batch, dims=dims, max_overhead=max_overhead, allow_rounding=allow_rounding)
    ranges = asked.ranges
    if len(ranges) > 1:
        raise PlanError(f"one dimension may stay open, and {' and '.join(ranges)} are to: give the others one size.")
    if target is not None and target not in RUNTIMES:
        raise PlanError(f"{target!r} is no target: there are {', '.join(RUNTIMES)}.")
    options = Options(device="none", mode="inference", progress=progress)
    loaded = load(source, batch=batch, dims=asked.sizes, input_shapes=feeding.shapes_of(inputs))
    if KEY in loaded.ir.metadata_props:
        raise PlanError(f"{loaded.name} is planned: shrink the model that it was planned from.")
    asks, maps = inputs_of(loaded.graph), maps_of(loaded.ir, loaded.name)
    if table := next((value.name for value in loaded.ir.graph.inputs if value.name in maps), None):
        raise PlanError(
            f"{loaded.name}: input '{table}' is a dictionary, and a plain file would take a table in its place. "
            f"A session of a plan takes either ({either('memonger.search_plan', 'memonger plan')})."
        )
    if inputs is not None:
        feeding.check_feeds(asks, inputs, loaded.name)
    original = load_as_is(source).ir
    in_branches = (target is None or RUNTIMES[target].branches) and can_be_in_branch(original)
    settled = SliceWriter(loaded.ir.clone())
    settle_constants(settled)
    settle_scales(settled)
    settled.drop_unread()
    told = tell_sizes(settled.model)
    job = planner.prepare(replace(loaded, ir=settled.model), options)
    progress("search")
    search = ChunkSearch(job.lowered, job.request, options, job.device, job.source.batch, solve(job))
    axes, cores, open_size = search.axes_without({}), cores_of(0), next(iter(ranges), "")
    sliced = SliceCheck(0, job.lowered.spent) if check and not allow_rounding else None
    if sliced is not None:
        axes = search.axes_without({name: ROUNDED for axis in axes for name in rounded(axis, sliced)})
    whole = float(search.job.plain.arena_bytes)
    found = [each for axis in axes for each in along(axis, open_size)]
    is_step = search.job.training is not None
    has_whole_batch = not ranges and not any(axis.axis == 0 and axis.ranges for axis in axes)
    if is_step or has_whole_batch:
        found += in_regions(search, sliced, allow_rounding)
    if not is_step and has_whole_batch:
        found += in_rows(search.job, sliced, in_branches)
        copied = with_copies(search.job.lowered.model, search.job.product_seconds, max_overhead * search.seconds, whole)
        if copied is not None:
            again = planner.prepare(replace(loaded, ir=copied[0]), options)
            other = ChunkSearch(again.lowered, again.request, options, again.device, batch, solve(again))
            copies = in_rows(other.job, sliced, in_branches)
            found += (replace(each, seconds=each.seconds + copied[1]) for each in copies)
    if target is not None and not RUNTIMES[target].nests:
        found = [each for each in found if not each.is_nested]
    most = whole if in_branches else WORTH * whole  # in a branch it takes less in any case
    less, once = [each for each in found if each.bytes + each.twice < most], search.seconds
    limit = (max_overhead + (UNSURE if check else 0.0)) * once
    fast = sorted((c for c in less if c.seconds <= limit), key=_need)
    why = _why_no_loops(search.job, [*axes, *found], less, max_overhead) if not fast else ""
    found = fast
    if in_branches:
        is_static = all(static_shape(value) is not None for value in original.graph.inputs)
        are_sizes_given = not ranges and any(v.shape is None or v.shape.is_dynamic() for v in original.graph.inputs)
        are_sizes_given = are_sizes_given and (batch is not None or bool(dims) or inputs is not None)
        is_open = any(not isinstance(v.shape[0], int) for v in original.graph.inputs if v.shape is not None and v.shape)
        unranked = _unranked(source) if is_open else frozenset[str]()
        is_open = is_open and any(_is_product(node, unranked) for node in job.lowered.model.graph)
        if are_sizes_given:  # it counts where it takes less than what stays open, by more than `ALIKE`
            found.append(Candidate(whole, _SLOWER, partial(_in_order, settled.model), ()))
        found = [replace(each, forms=partial(forms_in_branch, is_open=is_open, unranked=unranked)) for each in found]
        as_it_is = partial(_in_order, settled.model if told and is_static else source)
        found.append(Candidate(whole, 0.0, as_it_is, (), forms=forms_in_branch))
    if not found:
        raise PlanError(f"{job.source.name} {why}.")
    shapes = {str(v.name): shape for v in job.lowered.model.graph.inputs if (shape := static_shape(v)) is not None}
    forecast = _Forecast(found, shapes, cores, in_branches and check and not ranges)
    if not check:
        made = _unchecked(forecast, job.source.name)
    else:
        with TemporaryDirectory() as folder:
            progress("compare")
            others = [n for r in ranges.values() for n in sorted({r.least, (r.least + r.most) // 2} - {0, r.most})]
            given = feeding.random_feeds(asks) if inputs is None else inputs
            contest = _Contest(Path(folder), source, given, max_overhead, allow_rounding, open_size, others, once)
            made = contest.winner(
                forecast, f"{job.source.name} {why}; nor in a branch" if why else "the model gains nothing in loops"
            )
    before = replace(made.before, expected=expected(original, shapes, cores))
    original_model.embed(made.model, original)
    notes = made.notes
    if tables := [value.name for value in loaded.ir.graph.outputs if value.name in maps]:
        notes += (
            f"{quoted(tables)}: a table in the file, with a column for each key, where the model gives dictionaries.",
        )
    if target is not None:
        RUNTIMES[target].check(made.model)
        notes += (f"{RUNTIMES[target].name}: {RUNTIMES[target].note}",)
    return replace(made, before=before, notes=notes, target=target)


def _need(candidate: Candidate) -> tuple[float, float]:
    return candidate.bytes + candidate.twice, candidate.seconds


@dataclass(slots=True)
class _Forecast:
    """Candidates as models, each written once, and what onnxruntime's allocator is expected to give them.

    Attributes:
        left: Candidates that weren't chosen yet, those first that are estimated to need the least; the last of them
            may be chosen from the start.
        shapes: Of the model's inputs.
        threads: Within a node.
        with_piece: Whether a model may request a piece of memory first (`with_first_piece`): one in a branch, for one
            size, if it is measured that it takes less. Little more than was expected is twice as much then.
        refused: Why candidates can't be written.
    """

    left: list[Candidate]
    shapes: Mapping[str, tuple[int, ...]]
    threads: int
    with_piece: bool
    refused: list[str] = field(default_factory=list)
    _made: dict[int, tuple["_Form", Iterator["_Form"]]] = field(default_factory=dict)

    def best(self) -> tuple[Candidate, Iterator["_Form"]] | None:
        """Of the first that are left, and the last, the one that is expected to take the least; it is left no more.

        Of those that take about as much, it is the fastest by estimate. Forecasts of memory are closer than estimates;
        where there is none, the estimate counts. Its forms come in the order in which they are to be tried.
        """
        found = list[Candidate]()
        while len(found) < min(FORECAST, len(self.left)):
            place = len(found) if len(found) < FORECAST - 1 else len(self.left) - 1
            if self._write(self.left[place]):
                found.append(self.left[place])
            else:
                del self.left[place]
        if not found:
            return None
        enough = ALIKE * min(map(self._needed, found))
        best = min(found, key=lambda one: (self._needed(one) > enough, one.seconds, self._needed(one)))
        self.left = [each for each in self.left if each is not best]
        first, others = self._made.pop(id(best))
        return best, itertools.chain([first], others)

    def _write(self, candidate: Candidate) -> bool:
        """Whether it can be written."""
        if id(candidate) not in self._made:
            forms = self._forms(candidate)
            try:
                self._made[id(candidate)] = next(forms), forms
            except NotInLoopsError as error:
                self.refused.append(str(error))
                return False
        return True

    def _forms(self, candidate: Candidate) -> Iterator["_Form"]:
        """Its forms, of those that compute alike those first that are expected to take less.

        Each may ask for a piece of memory first, where it takes less then. Where onnxruntime makes one node of a
        convolution and a sum in the first of them, by their sizes, those of which it makes two are left out.
        """
        for alike in candidate.forms(candidate.write()):
            forms, sums = list[_Form](), None
            for model in alike:
                known = expected(model, self.shapes, self.threads, with_piece=self.with_piece)
                sums = known.sums if known and sums is None else sums
                if known and known.sums != sums:
                    continue
                forms.append((model, known))
                if known and known.first_piece and known.with_first_piece <= WORTH_PIECE * known.run_bytes:
                    made = with_first_piece(model, known.first_piece)
                    forms.append((made, replace(known, run_bytes=known.with_first_piece)))
            yield from sorted(forms, key=lambda form: math.inf if form[1] is None else form[1].run_bytes)

    def _needed(self, candidate: Candidate) -> float:
        (_, known), _ = self._made[id(candidate)]
        return (candidate.bytes if known is None else known.run_bytes) + candidate.twice


_Form = tuple[ir.Model, Expected | None]
"""A model, and what it is expected to take."""


def _unchecked(forecast: _Forecast, name: str) -> Shrunk:
    """The candidate that is expected to take the least. Nothing is measured."""
    best = forecast.best()
    if best is None:
        why = "; of another ".join(dict.fromkeys(reason.rstrip(".") for reason in forecast.refused))
        raise PlanError(f"{name} gains nothing in loops: {why}.")
    candidate, forms = best
    made, known = next(forms)
    said = "nothing was run: neither that the outputs are the same nor what it takes is checked."
    return Shrunk(made, candidate.loops, _NOTHING_RUN, replace(_NOTHING_RUN, expected=known), (said,))


def _in_order(source: Source) -> ir.Model:
    """The model as it is, its nodes in an order in which they can run; with its batch told it may round otherwise."""
    whole = load_as_is(source)
    lift_constants(whole)  # of one in a node onnxruntime holds a second copy
    model = whole.ir  # no copy of the original: what isn't in order can't be copied
    model.graph.sort()
    if (batch := open_batch(model)) is not None:
        with suppress(LoadError):  # a size that it can't have
            few, many = (load(source, batch=size).ir for size in BATCHES)
            if not tell_sizes(few):  # else some contradict those that ONNX's inference counts
                add_sizes(model, batch, few, many)
    return model


def _most_slices(candidate: Candidate) -> int:
    return max((loop.slices for loop in candidate.loops), default=0)


def _unranked(source: Source) -> frozenset[str]:
    """Names of a model's values of which no inference knows even how many dimensions they have."""
    model = load_as_is(source)
    try:
        infer_once(model)
    except LoadError:  # its inference may fail as long as sizes are open
        return frozenset()
    return frozenset(str(value.name) for node in model.graph for value in node.outputs if value.shape is None)


def _is_product(node: ir.Node, unranked: Collection[str]) -> bool:
    """Whether onnxruntime may make one node of a product and the sum behind it, only where it is told their sizes."""
    given = node.inputs[0] if node.op_type == "MatMul" else None
    return given is not None and (len(static_shape(given) or ()) > 2 or str(given.name) in unranked)


def _why_no_loops(job: ToSlice, found: Sequence[object], less: Sequence[object], max_overhead: float) -> str:
    """Why no loop is to be tried: there is none, none of them needs less, or all of these take too long."""
    if not found:
        return f"can't run in loops: {why_not(job.lowered.model, trains=job.training is not None)}"
    if not less:
        return "gains nothing in loops: what can run in slices needs as much memory whole"
    given = option("max_overhead", max_overhead)
    return f"gains nothing in loops: all are estimated to take longer than {given} allows"


@dataclass(slots=True)
class _Contest:
    """A model as it was, in a process of its own, against candidates.

    Attributes:
        folder: For files that pass between processes.
        source: The model as it was.
        inputs: What both are given, by name.
        max_overhead: See `shrink`.
        allow_rounding: See `shrink`.
        open_size: Name of the dimension that stays open, or nothing.
        others: Sizes of that to compare outputs at, too.
        once: Seconds that a run is estimated to take.
        tried: What there is to say of candidates that were run.
    """

    folder: Path
    source: Source
    inputs: feeding.Feeds
    max_overhead: float
    allow_rounding: bool
    open_size: str
    others: Sequence[int]
    once: float
    tried: list[str] = field(default_factory=list)

    def winner(self, forecast: _Forecast, nothing: str) -> Shrunk:
        """The first of the candidates that gives the same outputs in less memory and in the time that is allowed.

        Args:
            forecast: Of the candidates, of which the last is tried in any case.
            nothing: What a message begins with where nothing is gained.
        """
        write_arrays(self.folder / "inputs.npz", self.inputs)
        path = Path(self.source) if isinstance(self.source, str | Path) else self.folder / "source.onnx"
        if not path.exists():
            save_model(load_as_is(self.source).ir, path)
        last = forecast.left[-1]
        with self._process_of_the_model(path) as before:
            for number in range(1, TRIED + 1):
                if number == TRIED and last in forecast.left:
                    forecast.left = [last]
                best = forecast.best()
                if best is None:
                    break
                candidate, forms = best
                found, pairs = self._best_form(candidate, forms, path, before, number)
                if found is not None:
                    return found
                if pairs is not None and pairs.is_too_slow:
                    if candidate.seconds > 0:  # what is estimated to be faster comes next
                        most = SLACK * candidate.seconds * self.max_overhead / (pairs.ratio - 1)
                        most = min(most, candidate.seconds - 0.01 * self.once)
                        most = max(most, _SLOWER)
                        forecast.left = [each for each in forecast.left if each.seconds <= most or each is last]
                    else:  # no estimate tells how much longer it takes: coarser slices come next
                        half = _most_slices(candidate) / 2
                        forecast.left = [c for c in forecast.left if _most_slices(c) <= half or c is last]
        self.tried += forecast.refused
        why = "; of another ".join(dict.fromkeys(reason.rstrip(".") for reason in self.tried))
        raise PlanError(f"{nothing}: of {len(self.tried)} that were tried, {why}.{self._hint}")

    def _best_form(
        self, candidate: Candidate, forms: Iterator["_Form"], path: Path, before: MeasuredSession, number: int
    ) -> tuple[Shrunk | None, Pairs | None]:
        """Of the forms of a candidate the first that will do, if it takes what was expected; else the best of several.

        Where one is nearly fast enough the next is timed, too.

        Returns: None where none will do; and the runs of the fastest that was timed.
        """
        found, fastest, file, slow = None, None, self.folder / f"{number}.onnx", 0
        for made, known in forms:
            save_model(made.clone(), file, limit=0)
            is_as_expected, pairs = True, None
            try:
                with self._process(file, f"after{number}") as after:
                    taken = after.loaded["peak_bytes"] or 0
                    is_as_expected = known is None or taken <= UNEXPECTED * known.run_bytes
                    pairs, why_not = self._compared(before, after, number)
                    others = filter(None, (self._at(size, path, file) for size in self.others))
                    why_not = why_not or next(others, "")
                    if pairs is not None and not why_not and (found is None or taken < (found.after.run_bytes or 0)):
                        was, now = Footprint.of(before), Footprint.of(after, known)
                        found = Shrunk(made, candidate.loops, was, now, self._notes(), time_ratio=pairs.ratio)
            except WorkerError as error:
                why_not = f"onnxruntime doesn't run it ({str(error).rstrip('.')})"
            if pairs is not None and (fastest is None or pairs.ratio < fastest.ratio):
                fastest = pairs
            is_nearly = pairs is not None and pairs.is_too_slow and pairs.ratio <= NEARLY * pairs.limit
            slow += is_nearly
            if why_not and found is None:
                self.tried.append(why_not)
            goes_on = why_not == DIFFER or (is_nearly and slow < SLOW_FORMS)
            if is_as_expected and not goes_on:
                break
        return found, fastest

    @property
    def _hint(self) -> str:
        """What allows candidates that were too slow; empty where none was."""
        if not any("of the time" in reason for reason in self.tried):
            return ""
        allowed = option("max_overhead", self.max_overhead)
        return f" {allowed} is what a run may take longer; other programs that run now make it seem more."

    def _notes(self) -> tuple[str, ...]:
        """Why what was tried before isn't taken."""
        if not self.tried:
            return ()
        one = "one that" if len(self.tried) == 1 else "what"
        why = "; of another ".join(dict.fromkeys(self.tried))
        return (f"{one} was expected to take less isn't taken: {why}.{self._hint}",)

    def _process_of_the_model(self, path: Path) -> MeasuredSession:
        try:
            return self._process(path, "before")
        except WorkerError as error:
            sizes, given = option("dims", {NAME: N}), option("inputs", FILE)
            whole = either("check=False", "--no-check")
            raise PlanError(
                f"stock onnxruntime doesn't run the model: {str(error).rstrip('.')}. Give other sizes "
                f"({sizes}), or inputs where random numbers won't do ({given}), or have nothing compared ({whole})."
            ) from error

    def _process(self, path: Path, name: str, inputs: str = "inputs") -> MeasuredSession:
        job = RunJob(
            str(path.absolute()), str(self.folder / f"{inputs}.npz"), str(self.folder / f"{name}.npz"), planned=False
        )
        return MeasuredSession(job, self.folder, name)

    def _at(self, size: int, before: Path, after: Path) -> str:
        """Why outputs at another size of the open dimension won't do, empty where they do."""
        arrays = read_arrays(self.folder / "inputs.npz")
        write_arrays(self.folder / "other.npz", {name: array[:size] for name, array in arrays.items()})
        results = []
        for name, path in (("other_before", before), ("other_after", after)):
            with self._process(path, name, "other"):
                results.append(read_arrays(self.folder / f"{name}.npz"))
        return "" if self.allow_rounding or _same(*results) else f"outputs differ where {self.open_size} is {size}"

    def _compared(self, before: MeasuredSession, after: MeasuredSession, number: int) -> tuple[Pairs | None, str]:
        """Their runs by pairs, if they were timed; and why the second won't do, empty where it does."""
        want, got = read_arrays(self.folder / "before.npz"), read_arrays(self.folder / f"after{number}.npz")
        if not self.allow_rounding and not _same(want, got):
            return None, DIFFER
        if process_memory.is_measurable():
            needs, needed = after.loaded["peak_bytes"], before.loaded["peak_bytes"]
            more = max(0, after.loaded["loaded_bytes"] - before.loaded["loaded_bytes"])
            if needs + more > min(WORTH * needed, needed - LEAST):  # loaded and running count together
                held = f", and loaded it takes {format_size(more)} more" if more else ""
                return None, f"a run takes {needs / max(1, needed):.0%} of the memory{held}"
        pairs = in_pairs(after, before, 1 + self.max_overhead + NOISE)
        return pairs, f"a run takes {pairs.ratio:.2f} of the time" if pairs.is_too_slow else ""


def in_pairs(after: MeasuredSession, before: MeasuredSession, limit: float) -> Pairs:
    """Turns of a model after and before, until it is clear on which side of a limit the ratio of their times is."""
    before.round(1)
    runs = max(1, round(TURN_SECONDS / before.seconds[-1]))
    turns = int(ALL_SECONDS / (2 * runs * before.seconds[-1]))
    before.turns.clear()
    pairs = Pairs(limit, min(max(turns, TURNS[0]), TURNS[1]))
    while not pairs.are_enough:
        take_turns([after, before], 1, runs)
        pairs.add(*(statistics.median(worker.turns[-1]) for worker in (after, before)))
    return pairs


def _same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return all(one[name].shape == other[name].shape and one[name].tobytes() == other[name].tobytes() for name in one)
