"""Many models in one process: ``python -m benchmarks.serving.fleet`` writes fleet.txt.

Eight sessions of one model, and eight different models: stock onnxruntime with its default options, without its arena
and with its arena shrunk after each run, a `memonger.Session` each, and a `memonger.Fleet` with one arena and with two.
Each contestant has a process of its own and is called at random from two threads; they take turns. Memory is what the
process has grown by since onnxruntime was imported: when all is loaded, after the first calls, and after the last.

Then a minute of calls at random from eight threads, which is more than many a server has in an hour: what the process
has grown by after the first seconds, and at the end.

Then streams: an LSTM by one step a run, a decoder with a cache of fixed length, and two with caches that grow: with
tokens in front, so that a run appends in place, and with heads in front, so that two buffers swap. Stock onnxruntime is
fed its state, or has it as OrtValues of an IOBinding; memonger keeps it. A turn is whole streams, from their beginning.
"""

import hashlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

import memonger
import models
from benchmarks.machine import MIB, Table, keep, stamp
from benchmarks.turns import answers, contestants
from memonger.runtime import process_memory
from memonger.runtime.feeds import random_feeds
from memonger.runtime.program import inputs_of
from memonger.runtime.worker import Worker, say, serve
from models.streams import STREAM

MODULE = "benchmarks.serving.fleet"
BATCH, COPIES = 1, 8
DIFFERENT = (
    "mobilenet_v2", "resnet18", "resnet34", "resnet50", "googlenet", "densenet121", "densenet_bc100", "vit",
)  # fmt: skip
CONTESTANTS = ("stock", "stock, no arena", "stock, shrinking", "sessions", "fleet", "fleet, 2 arenas")
TURNS, CALLS = 5, 40  # turns that each contestant takes, and calls in each
CALLERS, WARM, MINUTE = 8, 5, 60  # threads that call for a minute, and the seconds before memory is looked at first
TABLE = Table(
    "models<10", "contestant<20", "loaded>10.1f", "first>9.1f", "last>9.1f", "÷>8.3f", "predicted>11.1f",
    "released>10.1f", "ms a call>11.2f", "÷>8.3f", "bits<7",
)  # fmt: skip
CALLED = Table(
    "models<10", "contestant<20", "calls>8", "predicted>11.1f", "begin>9.1f", "end>9.1f", "bytes a call>14.0f"
)
ROOM = 3  # models that there is room for
ROOMY = Table(
    "models<10", "arenas>7d", "contestant<14", "calls>8d", "÷>8.4f", "loads>7d", "calls a load>14.1f", "busy>6d",
    "longest wait s>16.2f", "limit>8.1f", "end>8.1f",
)  # fmt: skip
STREAMS = Table("stream<24", "contestant<26", "memory>9.2f", "predicted>11.2f", "steps/s>10.0f", "÷>8.3f", "bits<7")


@dataclass(frozen=True, slots=True)
class Job:
    """What a contestant is to load: files by name, the model's and the plan's, and inputs.

    Of a fleet also its arenas and its limit in bytes.
    """

    contestant: str
    models: Mapping[str, str]
    plans: Mapping[str, str]
    inputs: Mapping[str, str]
    arenas: int = 1
    limit: int | None = None


Run = Callable[[str, Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


def _stock(job: Job) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = job.contestant != "stock, no arena"
    options.intra_op_num_threads = 1
    asked = onnxruntime.RunOptions()
    if job.contestant == "stock, shrinking":
        asked.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    providers = ["CPUExecutionProvider"]
    made = {n: onnxruntime.InferenceSession(path, options, providers=providers) for n, path in job.models.items()}
    names = {name: [value.name for value in one.get_outputs()] for name, one in made.items()}
    return lambda name, feeds: dict(zip(names[name], made[name].run(names[name], dict(feeds), asked), strict=True))


def _planned(job: Job) -> tuple[Run, Callable[[], object], int, Callable[[], int]]:
    """Runs by name, what releases, the prediction in bytes, and what says how often models were loaded."""
    if job.contestant == "sessions":
        plans = [memonger.Plan.load(path, check_weights=False) for path in job.plans.values()]
        predicted = sum(p.parameter_bytes + (p.session_bytes or 0) + p.arena_bytes for p in plans)
        predicted += max(plan.workspace_bytes or 0 for plan in plans)
        del plans
        made = {name: memonger.Session(path) for name, path in job.plans.items()}
        return lambda n, f: made[n].run(f), lambda: [one.release() for one in made.values()], predicted, int
    fleet = memonger.Fleet(job.plans, arenas=2 if "2" in job.contestant else job.arenas, limit=job.limit)

    def loads() -> int:
        return sum(int(sum(one.values.values())) for one in fleet.figures() if one.name == "memonger_loads_total")

    return lambda n, f: fleet[n].run(f), fleet.release, fleet.memory().total, loads


def _calls(run: Run, feeds: Mapping[str, Mapping[str, np.ndarray]], seed: int) -> float:
    """Seconds of a call, of some at random from two threads at once."""
    order = random.Random(seed).choices(list(feeds), k=CALLS)

    def call(half: int) -> None:
        for name in order[half::2]:
            run(name, feeds[name])

    begin = time.perf_counter()
    _at_once(call, 2)
    return (time.perf_counter() - begin) / CALLS


def _at_once(call: Callable[[int], None], count: int) -> None:
    """Run it in so many threads, each told its number."""
    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _called_for(run: Run, feeds: Mapping[str, Mapping[str, np.ndarray]], seconds: float) -> dict[str, Any]:
    """Call at random from many threads for some seconds: how many calls there were, turned away, the longest."""
    until, counts, longest, busy = time.monotonic() + seconds, [0] * CALLERS, [0.0] * CALLERS, [0] * CALLERS

    def call(caller: int) -> None:
        order = random.Random(caller)
        while (begin := time.monotonic()) < until:
            name = order.choice(names)
            try:
                run(name, feeds[name])
                counts[caller] += 1
            except memonger.BusyError:
                busy[caller] += 1
            longest[caller] = max(longest[caller], time.monotonic() - begin)

    names = list(feeds)
    _at_once(call, CALLERS)
    return {"calls": sum(counts), "busy": sum(busy), "longest": max(longest)}


def work(job: Job) -> None:
    """Be a contestant."""
    import onnxruntime  # noqa: F401

    import memonger.serving.fleet  # noqa: F401

    feeds = {}
    for name, path in job.inputs.items():
        with np.load(path) as archive:
            feeds[name] = dict(archive)
    process_memory.settle()
    before, predicted, release = process_memory.resident().now, None, None
    loads: Callable[[], int] = int  # none
    if job.contestant.startswith("stock"):
        run = _stock(job)
    else:
        run, release, predicted, loads = _planned(job)
    loaded = process_memory.settle() - before
    digests = {name: _digest(run(name, given)) for name, given in feeds.items()}
    say({"loaded": loaded, "first": process_memory.settle() - before, "predicted": predicted, "digests": digests})

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if "turn" in request:
            return {"seconds": _calls(run, feeds, request["turn"])}
        if "minute" in request:
            before_it = loads()
            called = _called_for(run, feeds, request["minute"])
            return {**called, "loads": loads() - before_it, "memory": process_memory.settle() - before}
        last = process_memory.settle() - before
        if release is not None:
            release()
        return {"last": last, "released": process_memory.settle() - before if release is not None else None}

    serve(answer)


def _digest(outputs: Mapping[str, np.ndarray]) -> str:
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(outputs[name]).tobytes() for name in sorted(outputs))
    ).hexdigest()


def _files(names: Mapping[str, str], folder: Path) -> Job:
    """Models and plans of networks, by the names they have in the fleet; ``resnet18#3``: with other weights."""
    jobs: dict[str, dict[str, str]] = {"models": {}, "plans": {}, "inputs": {}}
    for name, network in names.items():
        paths = {kind: folder / f"{network}.{kind}" for kind in ("onnx", "planned.onnx", "npz")}
        if not paths["npz"].is_file():
            built, _, seed = network.partition("#")
            onnx.save(models.build(built, batch=BATCH, seed=int(seed or 0)), paths["onnx"])
            plan = memonger.search_plan(paths["onnx"], mode="inference", device="cpu", threads=1)
            plan.save(paths["planned.onnx"])
            np.savez(paths["npz"], **random_feeds(inputs_of(plan.model.graph)))
        for kind, key in (("onnx", "models"), ("planned.onnx", "plans"), ("npz", "inputs")):
            jobs[key][name] = str(paths[kind])
    return Job("", jobs["models"], jobs["plans"], jobs["inputs"])


def _told(job: Job, folder: Path, **changes: Any) -> list[str]:
    """What a process is told to be a contestant."""
    path = folder / f"{changes['contestant']}.json"
    path.write_text(json.dumps(asdict(job) | changes))
    return ["--worker", str(path)]


def rows(title: str, names: Mapping[str, str], folder: Path) -> Iterator[str]:
    """A table's rows: all contestants with these models."""
    job = _files(names, folder)
    arguments = {contestant: _told(job, folder, contestant=contestant) for contestant in CONTESTANTS}
    with contestants(MODULE, arguments, folder) as (workers, first):
        turns = answers(workers, [{"turn": turn} for turn in range(TURNS)])
        last = {contestant: worker.ask({}) for contestant, worker in workers.items()}
    seconds = {name: [turn["seconds"] for turn in found] for name, found in turns.items()}
    for contestant in CONTESTANTS:
        found = first[contestant]
        released, predicted = last[contestant]["released"], found["predicted"]
        yield TABLE.row(
            title, contestant, found["loaded"] / MIB, found["first"] / MIB, last[contestant]["last"] / MIB,
            last[contestant]["last"] / last["stock"]["last"], predicted / MIB if predicted else None,
            released / MIB if released is not None else None, 1e3 * statistics.median(seconds[contestant]),
            statistics.median(seconds[contestant]) / statistics.median(seconds["stock"]),
            "same" if found["digests"] == first["stock"]["digests"] else "differ",
        )  # fmt: skip


def minute_rows(title: str, names: Mapping[str, str], folder: Path) -> Iterator[str]:
    """A table's rows: a minute of calls, one contestant after the other."""
    job = _files(names, folder)
    for contestant in CONTESTANTS:
        with Worker(MODULE, _told(job, folder, contestant=contestant), folder / "minute.err") as worker:
            predicted = worker.read()["predicted"]
            begin, end = (worker.ask({"minute": seconds}) for seconds in (WARM, MINUTE))
        calls, grown = end["calls"], end["memory"] - begin["memory"]
        yield CALLED.row(
            title, contestant, str(calls), predicted / MIB if predicted else None, begin["memory"] / MIB,
            end["memory"] / MIB, grown / calls,
        )  # fmt: skip


def room_rows(title: str, names: Mapping[str, str], arenas: int, folder: Path) -> Iterator[str]:
    """A table's rows: a minute of calls within a limit that holds the largest of the models, beside none."""
    job, calls = _files(names, folder), dict[str, int]()
    sizes = {n: memonger.Plan.load(path, check_weights=False).parameter_bytes for n, path in job.plans.items()}
    largest = sorted(names, key=lambda name: -sizes[name])[:ROOM]
    with memonger.Fleet({name: job.plans[name] for name in largest}, arenas=arenas) as fleet:
        room = fleet.memory().total
    for contestant, limit in (("no limit", None), (f"room for {ROOM}", room)):
        told = _told(job, folder, contestant=contestant, arenas=arenas, limit=limit)
        with Worker(MODULE, told, folder / "room.err") as worker:
            worker.read()
            _, end = (worker.ask({"minute": seconds}) for seconds in (WARM, MINUTE))
        calls[contestant], loads = end["calls"], end["loads"]
        yield ROOMY.row(
            title, arenas, contestant, end["calls"], end["calls"] / calls["no limit"], loads,
            end["calls"] / loads if loads else None, end["busy"], end["longest"], limit / MIB if limit else None,
            end["memory"] / MIB,
        )  # fmt: skip


STREAMING = ("stock, fed", "stock, IOBinding", "memonger")


Step = tuple[Callable[[Mapping[str, np.ndarray]], np.ndarray], Callable[[], None]]
"""Runs a step; begins the stream anew."""


def _zeros(made: Any, state: Mapping[str, str]) -> dict[str, np.ndarray]:
    """A state at its beginning: what grows has no tokens."""
    shapes = {one.name: [0 if isinstance(dim, str) else dim for dim in one.shape] for one in made.get_inputs()}
    return {name: np.zeros(shapes[name], np.float32) for name in state}


def _fed(path: Path, state: Mapping[str, str]) -> Step:
    import onnxruntime

    made = onnxruntime.InferenceSession(str(path), _one_thread(), providers=["CPUExecutionProvider"])
    names = [value.name for value in made.get_outputs()]
    kept = _zeros(made, state)

    def step(feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        results = dict(zip(names, made.run(names, {**feeds, **kept}), strict=True))
        kept.update((old, results[new]) for old, new in state.items())
        return results[names[-1]]

    return step, lambda: kept.update(_zeros(made, state))


def _bound(path: Path, state: Mapping[str, str]) -> Step:
    """As its documentation says: states as OrtValues, which outputs are bound to, and which then change places.

    Of a state that grows onnxruntime allocates each output, which is the next input.
    """
    import onnxruntime

    made = onnxruntime.InferenceSession(str(path), _one_thread(), providers=["CPUExecutionProvider"])
    last = made.get_outputs()[-1].name
    grows = any(isinstance(dim, str) for one in made.get_inputs() for dim in one.shape)

    def begun() -> dict[str, Any]:
        return {n: onnxruntime.OrtValue.ortvalue_from_numpy(array) for n, array in _zeros(made, state).items()}

    now, after = begun(), begun()
    binding = made.io_binding()

    def step(feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        nonlocal now, after
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for old, new in state.items():
            binding.bind_ortvalue_input(old, now[old])
            if grows:
                binding.bind_output(new)
            else:
                binding.bind_ortvalue_output(new, after[old])
        binding.bind_output(last)
        made.run_with_iobinding(binding)
        outputs = binding.get_outputs()
        now, after = dict(zip(state, outputs, strict=False)) if grows else after, now
        found: np.ndarray = outputs[-1].numpy()
        return found

    def begin() -> None:
        nonlocal now
        now = begun()

    return step, begin


def _one_thread() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return options


def stream(name: str, contestant: str, folder: Path) -> None:
    """Be a contestant of a stream."""
    import onnxruntime  # noqa: F401

    import memonger.runtime.session

    _, state, steps = STREAM[name]()
    name = _file(name)
    path, predicted = folder / f"{name}.onnx", None
    process_memory.settle()
    before = process_memory.resident().now
    if contestant == "memonger":
        plan = memonger.Plan.load(folder / f"{name}.planned.onnx", check_weights=False)
        predicted = plan.total_bytes - plan.input_bytes + (plan.session_bytes or 0)
        session = memonger.runtime.session.Session(plan)
        del plan

        def run(feeds: Mapping[str, np.ndarray]) -> np.ndarray:
            found: np.ndarray = next(iter(session.run(feeds).values()))
            return found

        begin = session.reset_state
    else:
        run, begin = (_fed if contestant == "stock, fed" else _bound)(path, state)
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(run(feeds)).tobytes() for feeds in steps)).hexdigest()
    say({"memory": process_memory.settle() - before, "predicted": predicted, "digest": digest})

    def answer(_: Mapping[str, Any]) -> Mapping[str, Any]:
        since, count = time.perf_counter(), 0
        while time.perf_counter() - since < 0.5:
            begin()
            for feeds in steps:
                run(feeds)
            count += len(steps)
        return {"rate": count / (time.perf_counter() - since)}

    serve(answer)


def _file(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


def stream_rows(name: str, folder: Path) -> Iterator[str]:
    """A table's rows for a stream."""
    model, state, steps = STREAM[name]()
    path = folder / f"{_file(name)}.onnx"
    onnx.save(model, path)
    dims = {"past": (0, len(steps))} if "grows" in name else None
    plan = memonger.search_plan(path, mode="inference", device="cpu", threads=1, state=state, dims=dims)
    plan.save(path.with_suffix(".planned.onnx"))
    arguments = {each: ["--stream", name, "--contestant", each, "--folder", str(folder)] for each in STREAMING}
    with contestants(MODULE, arguments, folder) as (workers, first):
        turns = answers(workers, [{}] * TURNS)
    rates = {each: statistics.median(turn["rate"] for turn in found) for each, found in turns.items()}
    base = rates["stock, fed"]
    for contestant, rate in rates.items():
        predicted = first[contestant]["predicted"]
        yield STREAMS.row(
            name, contestant, first[contestant]["memory"] / MIB, predicted / MIB if predicted else None, rate,
            rate / base, "same" if first[contestant]["digest"] == first["stock, fed"]["digest"] else "differ",
        )  # fmt: skip


def lines(kinds: Sequence[str]) -> Iterator[str]:
    """The tables as they grow."""
    yield "Many models in one process, and streams that keep a state, beside stock onnxruntime"
    yield from stamp("serving.fleet", ("onnxruntime", "onnx", "numpy"))
    yield f"batch {BATCH}, a thread within a node, two threads that call at random; {TURNS} turns of {CALLS} calls"
    yield "MiB, by which the process has grown: loaded, after a call of each model, after all calls; released: after"
    yield "release(); ÷: over stock's; bits: of all outputs, against stock's; steps/s: of one stream, a thread"
    with tempfile.TemporaryDirectory() as scratch:
        if "models" in kinds:
            yield from ("", TABLE.heading)
            yield from rows(f"{COPIES} alike", {f"m{i}": "mobilenet_v2" for i in range(COPIES)}, Path(scratch))
            yield ""
            yield from rows(f"{len(DIFFERENT)} others", {name: name for name in DIFFERENT}, Path(scratch))
        if "minute" in kinds:
            yield ""
            yield f"a minute of calls at random from {CALLERS} threads: grown by after {WARM} s of them, and at the end"
            yield CALLED.heading
            yield from minute_rows(f"{COPIES} alike", {f"m{i}": "mobilenet_v2" for i in range(COPIES)}, Path(scratch))
            yield ""
            yield from minute_rows(f"{len(DIFFERENT)} others", {name: name for name in DIFFERENT}, Path(scratch))
        if "room" in kinds:
            yield ""
            calls = f"a minute of calls at random from {CALLERS} threads"
            yield f"{calls}, with room for {ROOM} of the models beside no limit"
            yield ROOMY.heading
            seeds = {f"m{i}": f"mobilenet_v2#{i}" for i in range(COPIES)}
            for arenas in (1, 2):
                yield from room_rows(f"{COPIES} seeds", seeds, arenas, Path(scratch))
            yield from room_rows(f"{len(DIFFERENT)} others", {name: name for name in DIFFERENT}, 1, Path(scratch))
        if "streams" in kinds:
            yield from ("", STREAMS.heading)
            for name in STREAM:
                yield from stream_rows(name, Path(scratch))


@click.command()
@click.option("--kinds", default="models,minute,room,streams", show_default=True)
@click.option("--worker", type=Path, hidden=True)
@click.option("--stream", "name", hidden=True)
@click.option("--contestant", hidden=True)
@click.option("--folder", type=Path, hidden=True)
def main(kinds: str, worker: Path | None, name: str | None, contestant: str, folder: Path) -> None:
    """Measure, or be a contestant."""
    if worker is not None:
        work(Job(**json.loads(worker.read_text())))
    elif name is not None:
        stream(name, contestant, folder)
    else:
        asked = kinds.split(",")
        keep(lines(asked), Path(__file__).with_suffix(".txt") if len(asked) == 4 else None)


if __name__ == "__main__":
    sys.exit(main())
