"""Many models in one process: ``python -m benchmarks.fleet`` writes fleet.txt.

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
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import memonger
import models
from benchmarks.machine import HERE, MIB, Table, keep, stamp
from memonger.cli.worker import Worker, say, serve
from memonger.runtime import process_memory
from memonger.runtime.feeds import inputs_of, random_feeds

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


def _calls(run: Run, feeds: Mapping[str, Mapping[str, np.ndarray]], seed: int) -> list[float]:
    """Seconds of each of some calls at random, from two threads at once."""
    order, seconds = random.Random(seed).choices(list(feeds), k=CALLS), list[float]()

    def call(names: Sequence[str]) -> None:
        for name in names:
            begin = time.perf_counter()
            run(name, feeds[name])
            seconds.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=call, args=(order[half::2],)) for half in (0, 1)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(time.perf_counter() - begin) / CALLS]


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

    names, threads = list(feeds), [threading.Thread(target=call, args=(caller,)) for caller in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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


def rows(title: str, names: Mapping[str, str], folder: Path) -> Iterator[str]:
    """A table's rows: all contestants with these models."""
    job = _files(names, folder)
    with ExitStack() as stack:
        workers, first = {}, {}
        for number, contestant in enumerate(CONTESTANTS):
            path = folder / f"job{number}.json"
            path.write_text(json.dumps({**asdict(job), "contestant": contestant}))
            workers[contestant] = stack.enter_context(
                Worker("benchmarks.fleet", ["--worker", str(path)], folder / f"{number}.err")
            )
            first[contestant] = workers[contestant].read()
        seconds: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
        for turn in range(TURNS):
            for contestant, worker in workers.items():
                seconds[contestant] += worker.ask({"turn": turn})["seconds"]
        last = {contestant: worker.ask({}) for contestant, worker in workers.items()}
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
        path = folder / "job.json"
        path.write_text(json.dumps({**asdict(job), "contestant": contestant}))
        with Worker("benchmarks.fleet", ["--worker", str(path)], folder / "minute.err") as worker:
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
        path = folder / "job.json"
        path.write_text(json.dumps({**asdict(job), "contestant": contestant, "arenas": arenas, "limit": limit}))
        with Worker("benchmarks.fleet", ["--worker", str(path)], folder / "room.err") as worker:
            worker.read()
            _, end = (worker.ask({"minute": seconds}) for seconds in (WARM, MINUTE))
        calls[contestant], loads = end["calls"], end["loads"]
        yield ROOMY.row(
            title, arenas, contestant, end["calls"], end["calls"] / calls["no limit"], loads,
            end["calls"] / loads if loads else None, end["busy"], end["longest"], limit / MIB if limit else None,
            end["memory"] / MIB,
        )  # fmt: skip


Stream = tuple[onnx.ModelProto, dict[str, str], list[dict[str, np.ndarray]]]
"""One step, which output each input becomes in the next, and what the caller gives step by step."""


def lstm_step(width: int = 512, layers: int = 2) -> Stream:
    """One time step of an LSTM, its state as inputs and outputs; and what the caller gives."""
    rng, nodes, weights, state, x = np.random.default_rng(0), list[onnx.NodeProto](), list[Any](), {}, "x"
    inputs, outputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, width])], []
    for layer in range(layers):
        for name, shape in (("W", (1, 4 * width, width)), ("R", (1, 4 * width, width)), ("B", (1, 8 * width))):
            array = (rng.standard_normal(shape) / width**0.5).astype(np.float32)
            weights.append(numpy_helper.from_array(array, f"{name}{layer}"))
        h, c = f"h{layer}", f"c{layer}"
        given = [x, f"W{layer}", f"R{layer}", f"B{layer}", "", h, c]
        made = [f"y{layer}", f"{h}_next", f"{c}_next"]
        nodes.append(helper.make_node("LSTM", given, made, name=f"lstm{layer}", hidden_size=width))
        nodes.append(helper.make_node("Squeeze", [f"y{layer}", "one"], [f"x{layer}"], name=f"squeeze{layer}"))
        x = f"x{layer}"
        for name in (h, c):
            state[name] = f"{name}_next"
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, width]))
            outputs.append(helper.make_tensor_value_info(f"{name}_next", TensorProto.FLOAT, [1, 1, width]))
    weights.append(numpy_helper.from_array(np.array([1]), "one"))
    outputs.append(helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, 1, width]))
    graph = helper.make_graph(nodes, "lstm_step", inputs, outputs, weights)
    steps = [{"x": rng.standard_normal((1, 1, width)).astype(np.float32)} for _ in range(32)]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), state, steps


class _Decoder:
    """A GPT-2-like decoder as it is written, layer after layer."""

    def __init__(self, cache: str, width: int, heads: int, length: int) -> None:
        self.cache, self.width = cache, width
        per = width // heads
        self.shapes: dict[str, Callable[[Any], list[Any]]] = {
            "fixed": lambda _: [1, heads, length, per],
            "tokens": lambda tokens: [1, tokens, heads, per],
            "heads": lambda tokens: [1, heads, tokens, per],
        }
        self.rng, self.nodes, self.state = np.random.default_rng(0), list[onnx.NodeProto](), dict[str, str]()
        self.inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, width])]
        if cache == "fixed":
            self.inputs.append(helper.make_tensor_value_info("at", TensorProto.INT64, [1, heads, 1, 3]))
            self.inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, [1, 1, 1, length]))
        self.outputs = list[onnx.ValueInfoProto]()
        self.weights = [
            numpy_helper.from_array(np.array([1, 1, heads, per]), "split"),
            numpy_helper.from_array(np.array([1, 1, width]), "join"),
            numpy_helper.from_array(np.ones(width, np.float32), "scale"),
        ]

    def node(self, op: str, given: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, given, [name], name=f"{op}_{name}", **attributes))
        return name

    def product(self, given: str, weight: str, shape: tuple[int, int], name: str) -> str:
        array = (self.rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        self.weights.append(numpy_helper.from_array(array, weight))
        return self.node("MatMul", [given, weight], name)

    def cached(self, kind: str, i: int, row: str) -> str:
        """The keys or values of all tokens: those of the cache and this token's."""
        old, new = f"{kind}cache{i}", f"{kind}cache{i}_next"
        self.state[old] = new
        if self.cache == "fixed":
            self.node("ScatterND", [old, "at", row], new)
        else:
            self.node("Concat", [old, row], new, axis=1 if self.cache == "tokens" else 2)
        shape = self.shapes[self.cache]
        self.inputs.append(helper.make_tensor_value_info(old, TensorProto.FLOAT, shape("past")))
        self.outputs.append(helper.make_tensor_value_info(new, TensorProto.FLOAT, shape("past + 1")))
        return new

    def attention(self, n: str, i: int) -> str:
        """What each head mixes from the values, before the heads are joined."""
        rows, width, in_front = {}, self.width, self.cache == "tokens"
        for kind in "qkv":
            flat = self.product(n, f"w{kind}{i}", (width, width), f"{kind}{i}")
            rows[kind] = self.node("Reshape", [flat, "split"], f"{kind}h{i}")
            if kind == "q" or not in_front:
                rows[kind] = self.node("Transpose", [rows[kind]], f"{kind}t{i}", perm=[0, 2, 1, 3])
        keys, values = (self.cached(kind, i, rows[kind]) for kind in "kv")
        keys = self.node("Transpose", [keys], f"kk{i}", perm=[0, 2, 3, 1] if in_front else [0, 1, 3, 2])
        scores = self.node("MatMul", [rows["q"], keys], f"s{i}")
        if self.cache == "fixed":
            scores = self.node("Add", [scores, "mask"], f"m{i}")
        elif in_front:
            values = self.node("Transpose", [values], f"vv{i}", perm=[0, 2, 1, 3])
        return self.node("MatMul", [self.node("Softmax", [scores], f"p{i}"), values], f"o{i}")

    def layer(self, x: str, i: int) -> str:
        width = self.width
        n = self.node("LayerNormalization", [x, "scale"], f"n{i}", axis=-1)
        turned = self.node("Transpose", [self.attention(n, i)], f"ot{i}", perm=[0, 2, 1, 3])
        joined = self.node("Reshape", [turned, "join"], f"oj{i}")
        x = self.node("Add", [x, self.product(joined, f"wo{i}", (width, width), f"a{i}")], f"x{i}")
        wide = self.node("Gelu", [self.product(x, f"up{i}", (width, 4 * width), f"u{i}")], f"g{i}")
        return self.node("Add", [x, self.product(wide, f"down{i}", (4 * width, width), f"d{i}")], f"z{i}")

    def made(self, x: str) -> onnx.ModelProto:
        self.outputs.append(helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, 1, self.width]))
        graph = helper.make_graph(self.nodes, "decoder_step", self.inputs, self.outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def decoder_step(cache: str = "fixed", width: int = 512, layers: int = 6, heads: int = 8, length: int = 512) -> Stream:
    """One token of a GPT-2-like decoder: keys and values of all tokens before lie in caches.

    These have a ``fixed`` length, or grow, with ``tokens`` or with ``heads`` in front of the other.
    """
    decoder, x = _Decoder(cache, width, heads, length), "x"
    for i in range(layers):
        x = decoder.layer(x, i)
    steps: list[dict[str, np.ndarray]] = []
    for token in range(length):  # all of the cache: what was never written takes no memory
        steps.append({"x": decoder.rng.standard_normal((1, 1, width)).astype(np.float32)})
        if cache != "fixed":
            continue
        at = np.array([[[0, head, token]] for head in range(heads)]).reshape(1, heads, 1, 3)
        mask = np.where(np.arange(length) <= token, 0, -1e9).astype(np.float32).reshape(1, 1, 1, length)
        steps[-1].update({"at": at, "mask": mask})
    return decoder.made(x), decoder.state, steps


STREAM: dict[str, Callable[[], Stream]] = {
    "lstm": lstm_step,
    "decoder": decoder_step,
    "grows, tokens in front": partial(decoder_step, "tokens"),
    "grows, heads in front": partial(decoder_step, "heads"),
}
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
    with ExitStack() as stack:
        workers, first = {}, {}
        for number, contestant in enumerate(STREAMING):
            arguments = ["--stream", name, "--contestant", contestant, "--folder", str(folder)]
            workers[contestant] = stack.enter_context(Worker("benchmarks.fleet", arguments, folder / f"{number}.err"))
            first[contestant] = workers[contestant].read()
        rates: dict[str, list[float]] = {contestant: [] for contestant in STREAMING}
        for _ in range(TURNS):
            for contestant, worker in workers.items():
                rates[contestant].append(worker.ask({})["rate"])
    base = statistics.median(rates["stock, fed"])
    for contestant in STREAMING:
        predicted, rate = first[contestant]["predicted"], statistics.median(rates[contestant])
        yield STREAMS.row(
            name, contestant, first[contestant]["memory"] / MIB, predicted / MIB if predicted else None, rate,
            rate / base, "same" if first[contestant]["digest"] == first["stock, fed"]["digest"] else "differ",
        )  # fmt: skip


def lines(kinds: Sequence[str]) -> Iterator[str]:
    """The tables as they grow."""
    yield "Many models in one process, and streams that keep a state, beside stock onnxruntime"
    yield from stamp("fleet", ("onnxruntime", "onnx", "numpy"))
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
        keep(lines(asked), HERE / "fleet.txt" if len(asked) == 4 else None)


if __name__ == "__main__":
    sys.exit(main())
