"""Exports that hold a session, each served by the real package over loopback: triton-python, kserve, ray, bentoml."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from memonger.errors import SessionError
from memonger.serving import export
from memonger.serving.protocol import message, read_inputs, read_request, write_body, write_outputs
from memonger.serving.serving import PlannedFleet
from tests.support import serving_requests, triton_stand_in
from tests.support.export_models import (
    ROOT,
    as_request,
    branched,
    free_port,
    images,
    needs,
    of_answer,
    planned,
    post,
    server,
)
from tests.support.stock import parse, run_stock
from tests.support.triton_stand_in import load, request_of

Ask = Callable[[dict[str, Any]], tuple[int, Any]]


def stock(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What stock onnxruntime says of the original model."""
    return run_stock(branched(), feeds, "ORT_DISABLE_ALL")


def two_models(folder: Path) -> dict[str, list[Path]]:
    """Planned files of `branched` for two batches, and of a model that doubles its input."""
    plan = memonger.search_plan(
        parse("g (float[2] x) => (float[2] z) { z = Add(x, x) }"), mode="inference", device="none"
    )
    plan.save(folder / "double.planned.onnx")
    return {"branched": planned(folder, (1, 4)), "double": [folder / "double.planned.onnx"]}


def check_fleet(ask: Callable[[str, dict[str, Any]], tuple[int, Any]], metrics: str = "") -> None:
    """Both of `two_models` answer, an unknown one doesn't, and figures of the fleet can be read."""
    check_answers(lambda request: ask("branched", request))
    status, answer = ask("double", as_request({"x": np.array([1, 2], np.float32)}))
    assert status == 200, answer
    assert of_answer(answer)["z"].tolist() == [2, 4]
    assert ask("nobody", as_request(images(7, 1)))[0] == 404
    if metrics:
        with urllib.request.urlopen(metrics, timeout=10) as content:
            text = content.read().decode()
        assert 'memonger_bytes{of="arenas"}' in text
        runs = re.search(r'memonger_runs_total{model="double"} (\d+)', text)
        assert runs is not None
        assert int(runs[1]) >= 2, text  # one of a worker before the first request, and ours


def check_answers(ask: Ask, batches: Sequence[int] = (1, 3, 4)) -> None:
    """The served model agrees with the original on two inputs of each batch, and says what a bad request lacks.

    There are plans for batches of 1 and 4: 3 rows are filled up.
    """
    for batch in batches:
        found = []
        for seed in (7, 8):
            feeds = images(seed, batch)
            status, answer = ask(as_request(feeds))
            assert status == 200, answer
            found.append(of_answer(answer)["y"])
            np.testing.assert_allclose(found[-1], stock(feeds)["y"], rtol=1e-5, atol=1e-5)
        assert np.abs(found[0] - found[1]).max() > 0.01
    status, answer = ask(as_request(images(7, 5)))
    assert 400 <= status < 500
    assert "no plan was made" in str(answer)


def test_ray_serve_answers_as_the_original_does(tmp_path: Path) -> None:
    needs("ray")
    export(two_models(tmp_path), "ray", tmp_path / "out")
    port = free_port()
    program = (
        "import ray, signal; from ray import serve; "
        "ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000); "
        f"serve.start(http_options={{'host': '127.0.0.1', 'port': {port}}}); "
        "import app; serve.run(app.app); signal.pause()"
    )
    address = f"http://127.0.0.1:{port}"
    with server(["-c", program], tmp_path / "out", f"{address}/-/healthz", RAY_USAGE_STATS_ENABLED="0"):
        check_fleet(lambda name, request: _when_routed(f"{address}/v2/models/{name}/infer", request))


def _when_routed(url: str, request: dict[str, Any]) -> tuple[int, Any]:
    """Ray's proxy is healthy before it has heard of the application."""
    for _ in range(100):
        status, answer = post(url, request)
        if status not in (404, 503) or "there is no model" in str(answer):
            break
        time.sleep(0.3)
    return status, answer


def test_bentoml_answers_as_the_original_does(tmp_path: Path) -> None:
    needs("bentoml")
    export(two_models(tmp_path), "bentoml", tmp_path / "out", instances=2)
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = ["-m", "bentoml", "serve", "service:PlannedService", "--host", "127.0.0.1", "--port", str(port)]
    home = {"BENTOML_HOME": str(tmp_path / "home"), "BENTOML_DO_NOT_TRACK": "True"}
    with server(command, tmp_path / "out", f"{address}/readyz", **home):
        check_fleet(lambda name, request: post(f"{address}/infer", {"model": name, **request}), f"{address}/metrics")


def test_kserve_answers_as_the_original_does(tmp_path: Path) -> None:
    needs("kserve")
    export(two_models(tmp_path), "kserve", tmp_path / "out")
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = ["server.py", "--http_port", str(port), "--enable_grpc", "false"]
    with server(command, tmp_path / "out", f"{address}/v2/health/ready"):
        check_fleet(lambda name, request: post(f"{address}/v2/models/{name}/infer", request), f"{address}/metrics")
        with urllib.request.urlopen(f"{address}/v2/models/branched", timeout=10) as content:
            described = json.load(content)
        assert described["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3, 16, 16]}]
        assert [(one["name"], one["shape"]) for one in described["outputs"]] == [("y", [-1, 10])]


CHECK_YAML = """
import json, sys, kserve, yaml
from kubernetes import client

def check(kind, value, path):
    kind = kind.replace("List[", "list[").replace("Dict[", "dict(")
    if kind.startswith("list["):
        assert isinstance(value, list), path
        for one in value: check(kind[5:-1], one, path)
    elif kind.startswith("dict("):
        assert isinstance(value, dict), path
    elif kind in ("str", "object"):
        assert kind == "object" or isinstance(value, str), (path, value)
    elif kind in ("int", "float", "bool"):
        assert isinstance(value, int), (path, value)
    else:
        model = getattr(kserve, kind, None) or getattr(client, kind)
        fields = {name: key for key, name in model.attribute_map.items()}
        for key, one in value.items():
            assert key in fields, f"{path}.{key} is no field of {kind}"
            check(model.openapi_types[fields[key]], one, f"{path}.{key}")
        model(**{fields[key]: one for key, one in value.items()})

content = yaml.safe_load(open(sys.argv[1]))
check("V1beta1InferenceService", content, "service")
print(json.dumps(content))
"""


def test_the_inference_service_is_one_by_kserves_own_models_and_asks_for_the_plans_memory(tmp_path: Path) -> None:
    needs("kserve")
    done = export(planned(tmp_path, (1, 4)), "kserve", tmp_path / "out", name="branched", instances=3)
    service = str(tmp_path / "out" / "inferenceservice.yaml")
    run = subprocess.run([sys.executable, "-c", CHECK_YAML, service], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    predictor = json.loads(run.stdout)["spec"]["predictor"]
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (3, 3)
    resources = predictor["containers"][0]["resources"]
    request, limit = (int(resources[key]["memory"].removesuffix("Mi")) << 20 for key in ("requests", "limits"))
    assert 0 <= request - done.estimate.instance_bytes - (512 << 20) < 1 << 20
    assert limit >= request + 2 * done.estimate.parameters
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(Path(service).read_text().replace("minReplicas", "replicas"))
    run = subprocess.run([sys.executable, "-c", CHECK_YAML, str(wrong)], capture_output=True, text=True, check=False)
    assert "replicas is no field" in run.stderr


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Triton's side of its Python backend, which is there in Triton's own processes alone."""
    module = triton_stand_in.backend_utils()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("sizes", [(1,), (1, 2), (4,), (2, 3, 4), (1, 1, 1, 1, 1)])
def test_tritons_python_model_puts_requests_together_and_takes_them_apart(
    tmp_path: Path, backend: ModuleType, sizes: tuple[int, ...]
) -> None:
    export(planned(tmp_path, (1, 4)), "triton-python", tmp_path / "out", name="branched")
    model = load(tmp_path / "out" / "branched" / "1" / "model.py")
    feeds = [images(seed, size) for seed, size in enumerate(sizes)]
    answers = model.execute([request_of(feed) for feed in feeds])
    assert [answer.error for answer in answers] == [None] * len(sizes)
    for feed, answer in zip(feeds, answers, strict=True):
        np.testing.assert_allclose(answer.outputs["y"], stock(feed)["y"], rtol=1e-5, atol=1e-5)
    assert len({answer.outputs["y"][0].tobytes() for answer in answers}) == len(sizes)


def test_tritons_python_model_answers_a_bad_request_with_an_error(tmp_path: Path, backend: ModuleType) -> None:
    export(planned(tmp_path, (1, 4)), "triton-python", tmp_path / "out", name="branched")
    model = load(tmp_path / "out" / "branched" / "1" / "model.py")
    (answer,) = model.execute([request_of({"z": np.zeros((1, 3), np.float32)})])
    assert "input 'x' is missing" in str(answer.error)


def test_a_plan_without_batch_is_run_as_requests_come(tmp_path: Path, backend: ModuleType) -> None:
    path = tmp_path / "fixed.planned.onnx"
    memonger.search_plan(branched(2), mode="inference", device="none").save(path)
    export(path, "triton-python", tmp_path / "out")
    model = load(tmp_path / "out" / "fixed" / "1" / "model.py")
    answers = model.execute([request_of(images(seed, 2)) for seed in (1, 2)])
    for seed, answer in zip((1, 2), answers, strict=True):
        np.testing.assert_allclose(answer.outputs["y"], stock(images(seed, 2))["y"], rtol=1e-5, atol=1e-5)
    assert "max_batch_size: 0" in (tmp_path / "out" / "fixed" / "config.pbtxt").read_text()


def test_requests_together_need_one_batch_in_all_inputs(tmp_path: Path) -> None:
    model = PlannedFleet({"m": planned(tmp_path, (4,))}).model()
    (answer,) = model.answer([{"x": np.zeros((0, 3, 16, 16), np.float32)}], together=True)
    assert isinstance(answer, SessionError)
    assert "one batch" in str(answer)


def test_a_bad_request_gets_its_error_and_the_others_of_its_batch_their_answers(
    tmp_path: Path, backend: ModuleType
) -> None:
    export(planned(tmp_path, (1, 4)), "triton-python", tmp_path / "out", name="branched")
    model = load(tmp_path / "out" / "branched" / "1" / "model.py")
    bad = [
        {"z": np.zeros((1, 3), np.float32)},
        {"x": np.zeros((1, 3, 8, 8), np.float32)},
        {"x": np.zeros((1, 3, 16), np.float32)},
        {"x": np.zeros((2, 3, 16, 16), np.float64)},
        {"x": np.array(["text"], object)},
        {"x": np.zeros((), np.float32)},
    ]
    feeds = [one for seed, wrong in enumerate(bad) for one in (images(seed, 1), wrong)]
    answers = model.execute([request_of(feed) for feed in feeds])
    for feed, answer in zip(feeds[::2], answers[::2], strict=True):
        assert answer.error is None
        np.testing.assert_allclose(answer.outputs["y"], stock(feed)["y"], rtol=1e-5, atol=1e-5)
    assert all(isinstance(answer.error, triton_stand_in.TritonError) for answer in answers[1::2])
    assert all(str(answer.error) for answer in answers[1::2])


def test_one_request_that_the_runtime_refuses_leaves_the_others(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (int64[N] x) => (float[N] y) <float[3] table = {1.0, 2.0, 3.0}> { y = Gather(table, x) }"""
    memonger.search_plan(onnx.parser.parse_model(text), batch=4, mode="inference", device="none").save(
        tmp_path / "gather.onnx"
    )
    model = PlannedFleet({"m": [tmp_path / "gather.onnx"]}).model()
    good, bad = {"x": np.array([0, 2])}, {"x": np.array([1, 99])}
    answers = model.answer([good, bad, good], together=True)
    assert isinstance(answers[1], SessionError)
    for answer in (answers[0], answers[2]):
        assert not isinstance(answer, SessionError)
        assert answer["y"].tolist() == [1.0, 3.0]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Planned files of the model that `benchmarks.serving.servers` serves."""
    paths = []
    for batch in serving_requests.BATCHES:
        plan = memonger.search_plan(serving_requests.model(), batch=batch, mode="inference", device="none")
        paths.append(tmp_path_factory.mktemp("tables") / f"batch{batch}.planned.onnx")
        plan.save(paths[-1])
    return paths


def test_tritons_python_model_goes_on_after_bad_requests_the_first_among_them(
    tmp_path: Path, backend: ModuleType, tables: list[Path]
) -> None:
    export(tables, "triton-python", tmp_path / "out", name="served")
    model = load(tmp_path / "out" / "served" / "1" / "model.py")
    good, bad = serving_requests.good_requests(as_json=False), serving_requests.bad_requests(as_json=False)
    requests = [good[i % len(good)] if i % 10 else bad[i // 10 % len(bad)] for i in range(400)]
    sizes, start, verdicts = (1, 2, 4, 3, 1), 0, []
    while start < len(requests):
        together = requests[start : start + sizes[start % len(sizes)]]
        for request, answer in zip(together, model.execute([request_of(one.content) for one in together]), strict=True):
            given = (400, str(answer.error)) if answer.error else (200, answer.outputs["y"])
            verdicts.append((request.kind, serving_requests.judge(request, given)))
        start += len(together)
    assert {verdict for _, verdict in verdicts} == {"good right", "bad refused"}, set(verdicts)


BODIES = serving_requests.bad_requests(as_json=True)


@pytest.mark.parametrize("request_", BODIES, ids=[one.kind for one in BODIES])
def test_a_bad_body_is_refused_in_one_line(request_: serving_requests.Request, tables: list[Path]) -> None:
    model = PlannedFleet({"m": tables}).model()
    assert isinstance(request_.content, bytes)
    with pytest.raises(SessionError) as caught:
        model.run(read_request(request_.content))
    assert 10 < len(message(caught.value)) <= 500
    assert message(caught.value).isprintable()


def test_answers_that_are_not_finite_are_null_in_json() -> None:
    body = write_body({"y": np.array([[1, np.nan], [np.inf, -np.inf]], np.float32), "n": np.array([1])})
    (y, n) = json.loads(body, parse_constant=pytest.fail)["outputs"]
    assert (y["data"], n["data"]) == ([1.0, None, None, None], [1])


def test_a_server_starts_where_made_up_inputs_fail_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (int64[4] x) => (float[4] y) <float[3] table = {1.0, 2.0, 3.0}, int64[1] far = {99}>
    { i = Sub(x, far) y = Gather(table, i) }"""
    PlannedFleet({"m": [memonger.search_plan(onnx.parser.parse_model(text), mode="inference", device="none")]})
    assert "no run before the first request" in caplog.text


def test_a_server_does_not_start_where_the_planned_order_is_not_run() -> None:
    """On the CPU onnxruntime puts Cast nodes around float16 kernels that it lacks."""
    text = """<ir_version: 10, opset_import: ["": 20]>
    half (float16[16] x) => (float16[16] y) { a = LeakyRelu(x) y = LeakyRelu(a) }"""
    plan = memonger.search_plan(onnx.parser.parse_model(text), mode="inference", device="none")
    with pytest.raises(SessionError, match="doesn't run the planned order"):
        PlannedFleet({"m": [plan]})


@pytest.mark.parametrize("kind", ["bool", "int8", "uint64", "int64", "float16", "float32", "float64"])
def test_arrays_survive_the_protocol(kind: str) -> None:
    array = np.array([[0, 1, 1], [3, 0, 2]]).astype(kind)
    (tensor,) = write_outputs({"x": array})
    (back,) = read_inputs([json.loads(json.dumps(tensor))]).values()
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()


@pytest.mark.parametrize(
    "tensor",
    [
        {"name": "x", "shape": [2], "datatype": "FP32"},
        {"name": "x", "shape": [3], "datatype": "FP32", "data": [1, 2]},
        {"name": "x", "shape": [1], "datatype": "FP33", "data": [1]},
        {"name": "x", "shape": [1], "datatype": "FP32", "data": ["one"]},
        {"name": "x", "shape": [1], "datatype": "INT8", "data": [1000]},
        {"name": "x", "shape": [1], "datatype": "UINT8", "data": [-1]},
        {"name": "x", "shape": [1], "datatype": "INT64", "data": [1 << 63]},
        {"name": "x", "shape": [1], "datatype": "INT64", "data": [1 << 64]},
        {"name": "x", "shape": [1], "datatype": "INT64", "data": [2.5]},
        {"name": "x", "shape": [1], "datatype": "BOOL", "data": [2]},
        {"name": "x", "shape": [1], "datatype": "BYTES", "data": [2]},
        {"name": "x", "shape": [1], "datatype": "FP16", "data": [65536.0]},
        {"name": "x", "shape": [1], "datatype": "FP32", "data": [None]},
        {"name": "x", "shape": [1], "datatype": "FP32", "data": ["1"]},
        {"name": "x", "shape": [True], "datatype": "FP32", "data": [1]},
    ],
)
def test_a_request_that_cant_be_read_names_the_input(tensor: dict[str, Any]) -> None:
    with pytest.raises(SessionError, match="input 'x' can't be read"):
        read_inputs([tensor])


def test_exported_programs_are_formatted_and_free_of_lint() -> None:
    pytest.importorskip("ruff")
    files = ROOT / "memonger" / "serving" / "files"
    for command in (["check"], ["format", "--check"]):
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(files)], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout
