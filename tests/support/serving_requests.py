"""The model that `benchmarks.serving.servers` serves, and requests for it: good ones with their answers, bad ones.

A request is a mapping of arrays for Triton's Python backend, whose server has read them already, and the body of an
HTTP request for the others.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime

BATCHES = (1, 4)
ROWS = 5  # of the table that the second input indexes
MODEL = """<ir_version: 10, opset_import: ["": 20]>
g (float[batch, 3, 16, 16] x, int64[batch] k) => (float[batch, 10] y) {
  a = Conv <pads = [1, 1, 1, 1]> (x, u)  b = Relu(a)  c = Conv <pads = [1, 1, 1, 1]> (b, v)  d = Sigmoid(b)
  e = Mul(c, d)  f = GlobalAveragePool(e)  h = Flatten(f)  i = MatMul(h, w)  j = Gather(t, k)  y = Add(i, j) }"""
LONGEST = 1000  # characters that a message may have
DATATYPES = {"float32": "FP32", "float64": "FP64", "int64": "INT64"}

Feeds = Mapping[str, np.ndarray]

# An HTTP status, and what came with it. Triton's errors count as 400, and what model.py raises as 500.
Answer = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent, as what kind, and the right answer: None where the request has to be refused."""

    kind: str
    content: Feeds | bytes
    answer: np.ndarray | None = None


def model() -> onnx.ModelProto:
    """Two branches of convolutions, and a row of a table that the second input picks: an index past it fails there."""
    made, rng = onnx.parser.parse_model(MODEL), np.random.default_rng(0)
    shapes = {"u": (8, 3, 3, 3), "v": (8, 8, 3, 3), "w": (8, 10), "t": (ROWS, 10)}
    for name, shape in shapes.items():
        weights = rng.standard_normal(shape).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    return made


def feeds(seed: int, batch: int) -> dict[str, np.ndarray]:
    """Inputs of the model."""
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((batch, 3, 16, 16)).astype(np.float32), "k": rng.integers(0, ROWS, batch)}


def good_requests(*, as_json: bool, count: int = 16) -> list[Request]:
    """Requests of each planned batch, no two alike, with what stock onnxruntime answers on the original model."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    stock = onnxruntime.InferenceSession(model().SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = [feeds(seed, BATCHES[seed % len(BATCHES)]) for seed in range(count)]
    given.append({**feeds(0, 1), "x": np.full((1, 3, 16, 16), 3e38, np.float32)})  # overflows: the answer is NaN
    return [Request("good", body(one) if as_json else one, stock.run(["y"], one)[0]) for one in given]


def bad_requests(*, as_json: bool) -> list[Request]:
    """Requests to refuse, one a kind; on the first the runtime itself fails."""
    arrays = [Request(kind, body(one) if as_json else one) for kind, one in _bad_feeds().items()]
    if not as_json:
        return arrays
    return arrays + [Request(kind, content) for kind, content in _bad_bodies().items()]


def body(given: Feeds) -> bytes:
    """Inputs in the form of the Open Inference Protocol."""
    return json.dumps({"inputs": _tensors(given)}).encode()


def _tensors(given: Feeds) -> list[dict[str, object]]:
    return [
        {
            "name": n,
            "shape": list(a.shape),
            "datatype": DATATYPES.get(str(a.dtype), "BYTES"),
            "data": a.ravel().tolist(),
        }
        for n, a in given.items()
    ]


def _bad_feeds() -> dict[str, Feeds]:
    one, image = feeds(1, 1), np.zeros((1, 3, 16, 16), np.float32)
    return {
        "index past the table": {**one, "k": np.array([99])},
        "input missing": {"x": image},
        "input unknown": {**one, "z": image},
        "wrong type": {**one, "x": image.astype(np.float64)},
        "wrong rank": {**one, "x": image[0]},
        "wrong shape": {**one, "x": image[..., :8]},
        "other batches": {**one, "k": np.array([0, 1])},
        "batch of none": {"x": image[:0], "k": np.array([], np.int64)},
        "strings": {**one, "x": np.array(["text"], object)},
        "no inputs": {},
    }


def _bad_bodies() -> dict[str, bytes]:
    tensors = _tensors(feeds(1, 1))

    def changed(**fields: object) -> bytes:
        return json.dumps({"inputs": [{**tensors[0], **fields}, tensors[1]]}).encode()

    data = [0.5] * 768
    without_data = {key: value for key, value in tensors[0].items() if key != "data"}
    return {
        "no such batch": body(feeds(1, 5)),
        "data short of the shape": changed(data=data[:-1]),
        "huge shape": changed(shape=[1 << 40, 3, 16, 16]),
        "negative shape": changed(shape=[-1, 3, 16, 16]),
        "shape of text": changed(shape="1, 3, 16, 16"),
        "NaN": changed(data=[float("nan"), *data[1:]]),
        "infinity": changed(data=[float("inf"), *data[1:]]),
        "past the type": changed(data=[1e39, *data[1:]]),
        "text as numbers": changed(data=["0.5"] * 768),
        "null as a number": changed(data=[None, *data[1:]]),
        "fractions as integers": json.dumps({"inputs": [tensors[0], {**tensors[1], "data": [0.5]}]}).encode(),
        "unknown datatype": changed(datatype="FP33"),
        "datatype a list": changed(datatype=[]),
        "no data": json.dumps({"inputs": [without_data, tensors[1]]}).encode(),
        "input given twice": json.dumps({"inputs": [*tensors, tensors[0]]}).encode(),
        "name of many lines": changed(name="x\n" * 2000),
        "inputs a number": b'{"inputs": 5}',
        "inputs of numbers": b'{"inputs": [1, 2]}',
        "empty object": b"{}",
        "a list": b"[1, 2, 3]",
        "nothing": b"",
        "not JSON": b"x = 1",
        "not UTF-8": b'{"inputs": "\xff\xfe"}',
        "brackets 100,000 deep": b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    }


def judge(request: Request, answer: Answer) -> str:
    """What an answer counts as."""
    status, content = answer
    if request.answer is None:
        return "bad refused" if 400 <= status < 500 and is_message(content) else "bad otherwise"
    if status != 200:
        return "good wrong"
    if not isinstance(content, np.ndarray):
        (output,) = json.loads(content)["outputs"]
        content = np.asarray(output["data"], np.float32).reshape(output["shape"])
    expected = request.answer
    is_right = content.shape == expected.shape and np.allclose(content, expected, 1e-5, 1e-5, equal_nan=True)
    return "good right" if is_right else "good wrong"


def is_message(content: str | bytes) -> bool:
    """Whether that says what is wrong in one line; in JSON the words are looked at, each by itself."""
    text = content if isinstance(content, str) else content.decode()
    try:
        words = list(_words(json.loads(text)))
    except ValueError:
        words = [text]
    return bool(words) and all(re.fullmatch(rf"[^\n\r]{{1,{LONGEST}}}", one) for one in words)


def _words(content: Any) -> Iterator[str]:
    """The messages in an error of BentoML, Ray Serve, KServe or pydantic, which echoes the input beside its own."""
    if isinstance(content, list):
        for one in content:
            yield from _words(one)
    elif isinstance(content, dict):
        for key in ("error", "detail", "msg"):
            yield from [content[key]] if isinstance(content.get(key), str) else _words(content.get(key))
