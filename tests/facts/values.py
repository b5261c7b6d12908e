"""Checks that take kernels that run: in place, determinism, times. On a stand-in they run, and tell nothing."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from memonger.devices import Device
from memonger.graph import aliasing
from memonger.runtime.profile import read_profile
from tests.facts.device import Place, Wish, bind, driver, feeds, open_session, place, short, sizes
from tests.facts.fact import FAILS, HOLDS, LOST, SEEN, UNTOLD, Fact, judged
from tests.facts.networks import FROZEN, training
from tests.support.aliasing_examples import EXAMPLES
from tests.support.aliasing_runs import Draw

SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
REPEATS = 3  # of a run that overwrites its input
STEPS = (f"resnet50{FROZEN}", "googlenet", "unet", "gpt", "lstm")


def check_in_place(device: Device) -> Iterator[Fact]:
    """Every entry of memonger/graph/aliasing.py, by the examples that the CPU's list is tested with."""
    results: dict[str, dict[str, int]] = {}
    failed: dict[str, list[str]] = {}
    used = set[str]()
    for example in EXAMPLES:
        for dtype, n in itertools.product(example.dtypes, example.sizes):
            node = example.node(example.inputs(Draw(n, dtype)))
            pairs = aliasing.view_pairs(node, aliasing.CUDA) + aliasing.inplace_pairs(node, aliasing.CUDA)
            used |= {f"{example.op} {source}->{target}" for source, target in pairs}
            for key, verdict in _pairs_of(example, dtype, n, device):
                counts = results.setdefault(key, {"same": 0, "differ": 0, "cpu": 0, "error": 0})
                counts[verdict.partition(":")[0]] += 1
                if verdict.startswith(("differ", "error")):
                    failed.setdefault(key, []).append(f"{example} {dtype} {n} {verdict}")
    yield from _in_place_facts(results, failed, driver(device).is_real)
    wrong = [f"{key} ({counts['differ']} runs)" for key, counts in results.items() if counts["differ"] and key in used]
    seen = f"{len(used)} entries; other bits: {', '.join(wrong) or 'none'}"
    claim = "of these, the entries that plans for CUDA use have the bits of separate memory"
    yield judged(claim, seen, not wrong, driver(device).is_real)


def _in_place_facts(results: dict[str, dict[str, int]], failed: dict[str, list[str]], real: bool) -> Iterator[Fact]:
    on_cuda = sorted(k for k, c in results.items() if c["same"] + c["differ"] + c["error"])
    right = [k for k in on_cuda if not results[k]["differ"] + results[k]["error"]]
    runs = sum(results[k]["same"] + results[k]["differ"] for k in on_cuda)
    yield Fact(
        "an output bound over its input has the bits of separate memory, for each entry of aliasing.py on CUDA",
        f"{len(right) if real else '?'} of {len(on_cuda)} entries (operator input->output), {runs} runs: "
        f"{', '.join(right if real else on_cuda)}",
        (HOLDS if right == on_cuda else FAILS) if real else UNTOLD,
    )
    for key in (k for k in on_cuda if real and k not in right):
        counts = results[key]
        seen = f"{counts['differ']} of {counts['same'] + counts['differ']} runs differ, {counts['error']} fail"
        yield Fact(f"in place, {key}", f"{seen}; {'; '.join(failed[key][:4])}", FAILS)
    elsewhere = sorted(k for k in results if k not in on_cuda)
    yield Fact("entries whose examples run on the CPU alone", ", ".join(elsewhere), SEEN)


def _pairs_of(example: Any, dtype: str, n: int, device: Device) -> Iterator[tuple[str, str]]:
    """(entry, what became of it) for each pair the lists give this example."""
    arrays = example.inputs(Draw(n, dtype))
    node = example.node(arrays)
    pairs = dict.fromkeys(aliasing.view_pairs(node) + aliasing.inplace_pairs(node))
    live = {f"i{i}": a for i, a in enumerate(arrays) if a is not None and i not in example.constants}
    try:
        session = open_session(example.model(arrays), device, Wish(entries=RECORDED))
        found = [value.numpy() for value in _separate(session, live)]
    except Exception as error:  # pybind exceptions share no base class
        for source, target in pairs:
            yield f"{example.op} {source}->{target}", f"error: {short(error, 120)}"
        return
    on_cuda = all(part.ep_name == "CUDAExecutionProvider" for part in session.get_provider_graph_assignment_info())
    outputs = dict(zip((value.name for value in session.get_outputs()), found, strict=True))
    for source, target in pairs:
        before, after = arrays[source], outputs[f"o{target}"]
        if before is None or (before.nbytes, before.itemsize) != (after.nbytes, after.itemsize):
            continue
        verdict = _shared(session, live, outputs, (f"i{source}", f"o{target}"), device) if on_cuda else "cpu"
        yield f"{example.op} {source}->{target}", verdict


RECORDED = {"session.record_ep_graph_assignment_info": "1"}


def _separate(session: Any, live: dict[str, np.ndarray]) -> Any:
    make = onnxruntime.OrtValue.ortvalue_from_numpy
    return session.run_with_ort_values(None, {name: make(np.ascontiguousarray(a)) for name, a in live.items()})


def _shared(
    session: Any, live: dict[str, np.ndarray], outputs: dict[str, np.ndarray], pair: tuple[str, str], device: Device
) -> str:
    """Run with the pair at one address; whether every output has the bits of separate device memory."""
    wanted = _at_addresses(session, live, outputs, None, device)
    wrong: set[str] = set()
    for _ in range(REPEATS):  # threads race
        found = _at_addresses(session, live, outputs, pair, device)
        wrong.update(name for name in outputs if wanted[name].tobytes() != found[name].tobytes())
    return f"differ: {', '.join(sorted(wrong))}" if wrong else "same"


def _at_addresses(
    session: Any,
    live: dict[str, np.ndarray],
    outputs: dict[str, np.ndarray],
    pair: tuple[str, str] | None,
    device: Device,
) -> dict[str, np.ndarray]:
    unit = driver(device)
    infos = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    on_host = {value.name for value, memory in infos if memory.name != "Cuda"}
    inputs = {name: place(device, array, array) for name, array in live.items() if name not in on_host}
    targets = {name: place(device, array) for name, array in outputs.items() if not pair or name != pair[1]}
    mine = [at.address for at in (*inputs.values(), *targets.values())]
    if pair:
        targets[pair[1]] = Place(inputs[pair[0]].address, outputs[pair[1]])
    binding = bind(session, device, inputs, targets)
    for name in on_host & live.keys():
        binding.bind_cpu_input(name, np.ascontiguousarray(live[name]))
    session.run_with_iobinding(binding)
    found = {name: unit.read(at.address, at.like) for name, at in targets.items()}
    for address in mine:
        unit.free(address)
    return found


def check_scatter(device: Device) -> Iterator[Fact]:
    """ScatterElements and ScatterND with reduction add, many updates at one place."""
    real, runs = driver(device).is_real, 20
    for op, indices in (("ScatterElements", (1 << 20,)), ("ScatterND", (1 << 20, 1))):
        random = np.random.default_rng(0)
        given = {
            "data": np.zeros(1024, np.float32),
            "indices": random.integers(0, 1024, size=indices),
            "updates": random.standard_normal(1 << 20).astype(np.float32),
        }
        session = open_session(_scatter(op, given), device)
        found = {session.run(None, given)[0].tobytes() for _ in range(runs)}
        yield judged(
            f"{op}(add) of a million numbers onto 1,024 places gives the same bits every time",
            f"{len(found)} different results in {runs} runs",
            len(found) == 1,
            real,
        )


def _scatter(op: str, given: dict[str, np.ndarray]) -> onnx.ModelProto:
    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}
    info = [helper.make_tensor_value_info(name, kinds[a.dtype], a.shape) for name, a in given.items()]
    node = helper.make_node(op, list(given), ["y"], name="scatter", reduction="add")
    made = helper.make_graph([node], op, info, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1024])])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def check_repeatable(device: Device) -> Iterator[Fact]:
    """Two runs, and two sessions, under each of cuDNN's ways to choose an algorithm."""
    real = driver(device).is_real
    for name, save in training(iter(STEPS)):
        with tempfile.TemporaryDirectory() as folder:
            path = save(Path(folder))
            for search in SEARCHES:
                claim = f"{name}, training step, cudnn_conv_algo_search {search}: the same bits in every run"
                try:
                    yield _repeated(claim, path, device, search, real)
                except Exception as error:  # pybind exceptions share no base class
                    yield Fact(claim, short(error), LOST)


def _repeated(claim: str, path: str, device: Device, search: str, real: bool) -> Fact:
    results: list[list[np.ndarray]] = []
    for _ in range(2):
        session = open_session(path, device, Wish(options={"cudnn_conv_algo_search": search}))
        given = feeds(session)
        results += [session.run(None, given) for _ in range(2)]
        del session
    names = ("second run of one session", "first run of another session", "second run of that")
    seen = [f"{n}: {_unequal(results[0], r)}" for n, r in zip(names, results[1:], strict=True)]
    return judged(claim, "\n".join(seen), all(": the same" in line for line in seen), real)


def _unequal(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> str:
    differ = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x.tobytes() != y.tobytes()]
    if not differ:
        return f"the same {sizes(a):,} bytes"
    worst = max(float(np.nanmax(np.abs(a[i].astype(np.float64) - b[i]))) for i in differ)
    return f"{len(differ)} of {len(a)} outputs differ, by up to {worst:.1e}"


def check_times(device: Device) -> Iterator[Fact]:
    """Whether the profiler's kernel times are the device's, or those of the launch."""
    side, runs = 8192, 8
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [side, side]) for name in ("x", "y")]
    weights = numpy_helper.from_array(np.ones((side, side), np.float32), "w")
    made = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="m")], "g", info[:1], info[1:], [weights]
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    like = np.zeros((side, side), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(model, device, Wish(profile=str(Path(folder) / "profile")))
        binding = bind(session, device, {"x": place(device, like, like)}, {"y": place(device, like)})
        seconds = []
        for _ in range(runs):
            begin = time.perf_counter()
            session.run_with_iobinding(binding)
            driver(device).wait()
            seconds.append(time.perf_counter() - begin)
        kernel = [run.seconds for run in read_profile(Path(session.end_profiling()))]
    real, profiled, whole = driver(device).is_real, statistics.median(kernel), statistics.median(seconds)
    yield judged(
        "a node's time in the profile is the device's",
        f"a product of two {side}x{side} matrices: {profiled * 1e3:.3f} ms in the profile, {whole * 1e3:.3f} ms until "
        "the device is done",
        profiled > 0.5 * whole,
        real,
    )
