"""What a session gives back to the system: arena and workspace with `release`, everything with `close`."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import memonger
from memonger.runtime import process_memory
from tests.support import networks

MIB = 1 << 20
SLACK = 8  # MiB; what the runtime and Python keep, of arenas of 32

pytestmark = pytest.mark.skipif(not process_memory.is_measurable(), reason="the system doesn't say what is resident")


def _model(rows: int) -> onnx.ModelProto:
    """An arena of 1 MiB a row and as much workspace (Where's), and weights of 16 MiB."""
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"], name="mul"),
        helper.make_node("Greater", ["a", "x"], ["c"], name="greater"),
        helper.make_node("Where", ["c", "a", "x"], ["b"], name="where"),
        helper.make_node("ReduceMax", ["b", "axes"], ["y"], name="largest", keepdims=0),
    ]
    weight = np.arange(1 << 18, dtype=np.float32)
    other = np.ones((16, 1 << 18), np.float32)
    nodes.append(helper.make_node("Gather", ["table", "row"], ["t"], name="gather", axis=0))
    return networks.model_of(
        nodes,
        {"x": [rows, 1 << 18]},
        {"y": [rows], "t": [1 << 18]},
        w=weight,
        table=other,
        row=np.array(3),
        axes=np.array([1]),
    )


def _grown(baseline: int) -> float:
    return (process_memory.settle() - baseline) / MIB


def test_release_and_close() -> None:
    plan = memonger.search_plan(_model(32), device="cpu", mode="inference", chunks="off")
    x = np.random.default_rng(0).standard_normal((32, 1 << 18)).astype(np.float32)
    memonger.Session(plan).run({"x": x})  # what the runtime takes once
    before = process_memory.settle()
    with memonger.Session(plan) as session:
        loaded = _grown(before)
        first = session.run({"x": x})
        ran = _grown(before)
        session.release()
        assert ran - loaded > 0.9 * plan.arena_bytes / MIB
        assert _grown(before) - loaded < SLACK
        again = session.run({"x": x})
        assert networks.same_bits(first, again)
        assert _grown(before) - ran < SLACK
    assert _grown(before) < SLACK
    with pytest.raises(memonger.SessionError, match="the session is closed"):
        session.run({"x": x})
    session.close()


def test_an_idle_session_gives_memory_back_by_itself() -> None:
    plan = memonger.search_plan(_model(32), device="cpu", mode="inference", chunks="off")
    x = np.zeros((32, 1 << 18), np.float32)
    with memonger.Session(plan, idle_release=0.05, threads="arena") as session:
        loaded = process_memory.settle()
        session.run({"x": x})
        begin = time.monotonic()
        while _grown(loaded) > SLACK and time.monotonic() - begin < 20:
            time.sleep(0.02)
        assert _grown(loaded) < SLACK
        assert session.run({"x": x})["y"].shape == (32,)


def test_what_packing_took_of_the_allocator_of_workspace_is_given_back(tmp_path: Path) -> None:
    """A transposed convolution packs its weight there, and then takes the copy that lies in the plan's file."""
    model = networks.model_of(
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2])],
        {"x": [1, 512, 8, 8]},
        {"y": [1, 512, 17, 17]},
        w=np.random.default_rng(0).standard_normal((512, 512, 3, 3)).astype(np.float32),
    )
    memonger.search_plan(model, device="cpu", mode="inference").save(tmp_path / "planned.onnx")
    code = (
        "import memonger, sys; from memonger.runtime import ort, process_memory\n"
        "session = memonger.Session(sys.argv[1]); loaded = process_memory.settle()\n"
        "ort.shrink_host_memory(); print(loaded - process_memory.settle())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "planned.onnx")]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert int(done.stdout) < 1 * MIB  # the weight has nine


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), True, "1"])
def test_a_time_that_is_none_is_refused(seconds: object) -> None:
    plan = memonger.search_plan(_model(1), device="none", mode="inference")
    with pytest.raises(memonger.SessionError, match="idle_release="):
        memonger.Session(plan, idle_release=seconds)  # type: ignore[arg-type]


def test_a_session_that_watches_for_idleness_ends_with_the_program() -> None:
    code = (
        "import memonger, numpy as np; from tests.runtime.test_memory_given_back import _model;"
        "s = memonger.Session(memonger.search_plan(_model(1), mode='inference'), idle_release=100);"
        "s.run({'x': np.zeros((1, 1 << 18), np.float32)})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
