"""Cases on forms of models: quantized by hand, planned for ranges of sizes and in tiles, exported to serving stacks."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import memonger
from memonger.serving import TARGETS, export
from memonger.serving.serving import PlannedFleet
from tests.support import networks
from tests.support.fuzzing import compared, corpus, mutate
from tests.support.fuzzing.compared import Tell
from tests.support.fuzzing.outcomes import Wrong

LEVELS = {"disable": "ORT_DISABLE_ALL", "all": "ORT_ENABLE_ALL"}
SERVED = ("bentoml", "kserve", "ray", "triton-python")
"""Targets whose folders hold a server of memonger's."""


class _Net:
    """Nodes appended one by one, and the weights that they read."""

    def __init__(self, seed: int) -> None:
        self.rng, self.nodes, self.weights = np.random.default_rng(seed), list[onnx.NodeProto](), dict[str, Any]()

    def add(self, operator: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> list[str]:
        written = [f"v{len(self.nodes)}.{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, written, f"n{len(self.nodes)}", **attributes))
        return written

    def weight(self, array: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = array
        return name

    def normal(self, *shape: int) -> str:
        return self.weight(self.rng.standard_normal(shape, np.float32) * np.float32(0.3))

    def scale(self, kind: type = np.int8, channels: int | None = None) -> list[str]:
        """A scale and a zero point, of all elements or of each channel."""
        zeros = np.zeros(channels or (), kind)
        return [self.weight(np.full(channels or (), 0.03, np.float32)), self.weight(zeros)]

    def model(self, shape: Sequence[int | str], ends: Sequence[str], opset: int) -> onnx.ModelProto:
        made = networks.model_of(self.nodes, {"x": list(shape)}, {}, **self.weights)
        made.graph.output.extend(helper.make_tensor_value_info(end, TensorProto.FLOAT, None) for end in ends)
        made.opset_import[0].version = opset
        return made


def _rounded(net: _Net, choice: random.Random, x: str) -> str:
    """A value to eight bits and back."""
    scale = net.scale(choice.choice([np.int8, np.uint8]))
    (narrow,) = net.add("QuantizeLinear", [x, *scale])
    return net.add("DequantizeLinear", [narrow, *scale])[0]


def _quantized_product(net: _Net, choice: random.Random, x: str) -> str:
    """One product with an 8 by 8 matrix, in one of the ways in which quantizers write it."""
    w = net.rng.integers(-90, 90, (8, 8)).astype(np.int8)
    match choice.randrange(5):
        case 0:  # the weight alone, whole or by columns
            columns = choice.choice([None, 8])
            (wide,) = net.add("DequantizeLinear", [net.weight(w), *net.scale(np.int8, columns)], axis=1)
            return net.add("MatMul", [x, wide])[0]
        case 1:  # both
            (wide,) = net.add("DequantizeLinear", [net.weight(w), *net.scale()])
            (product,) = net.add("MatMul", [_rounded(net, choice, x), wide])
            return _rounded(net, choice, product)
        case 2:  # dynamic
            narrow, scale, zero = net.add("DynamicQuantizeLinear", [x], 3)
            (product,) = net.add("MatMulInteger", [narrow, net.weight(w), zero])
            (real,) = net.add("Cast", [product], to=TensorProto.FLOAT)
            return net.add("Mul", [real, scale])[0]
        case 3:  # in the operator
            scale = net.scale(np.int8)
            (narrow,) = net.add("QuantizeLinear", [x, *scale])
            (product,) = net.add("QLinearMatMul", [narrow, *scale, net.weight(w), *net.scale(), *scale])
            return net.add("DequantizeLinear", [product, *scale])[0]
        case _:  # blocks of a column
            blocks = [net.weight(np.full((4, 8), 0.03, np.float32)), net.weight(np.zeros((4, 8), np.int8))]
            (wide,) = net.add("DequantizeLinear", [net.weight(w), *blocks], axis=0, block_size=2)
            return net.add("MatMul", [x, wide])[0]


def _layers(net: _Net, choice: random.Random, is_quantized: bool) -> list[str]:
    """A random network of rows of 8 numbers: products, elementwise operators, sums over shortcuts, joins."""
    values = ["x"]
    for _ in range(choice.randrange(2, 9)):
        x, other = choice.choice(values[-3:]), choice.choice(values)
        match choice.randrange(7):
            case 0 | 1:
                values.append(
                    _quantized_product(net, choice, x) if is_quantized else net.add("MatMul", [x, net.normal(8, 8)])[0]
                )
            case 2:
                values += net.add(choice.choice(["Relu", "Sigmoid", "Tanh", "Neg", "Exp", "Softmax"]), [x])
            case 3:
                values += net.add(choice.choice(["Add", "Mul", "Max"]), [x, other])
            case 4:
                (joined,) = net.add("Concat", [x, other], axis=-1)
                values += net.add("MatMul", [joined, net.normal(16, 8)])
            case 5:
                (tall,) = net.add("MatMul", [x, net.normal(8, 64)])
                values += net.add("MatMul", [net.add("Relu", [tall])[0], net.normal(64, 8)])
            case _ if is_quantized:
                values.append(_rounded(net, choice, x))
            case _:
                values += net.add("Add", [x, net.normal(8)])
    return list(dict.fromkeys([values[-1], *([choice.choice(values[1:])] if choice.random() < 0.3 else [])]))


def quantized(choice: random.Random, folder: Path, tell: Tell, only_stock: bool) -> str:
    """Networks in the ways in which quantizers write them, half of them changed: stock onnxruntime's numbers."""
    net = _Net(choice.randrange(2**32))
    model = net.model([4, 8], _layers(net, choice, is_quantized=True), 21)
    data, note = mutate.change(choice, model) if choice.random() < 0.5 else (model.SerializeToString(), "as it is")
    level = choice.choice(list(LEVELS))
    device = "cpu" if level == "all" else choice.choice(["none", "cpu"])
    tell(mutation=f"{device} {level}: {note}", stage="device plan" if device == "cpu" else "plan")
    path = compared.place(folder, data)
    feeds = {"x": net.rng.standard_normal((4, 8), np.float32)}
    if only_stock:
        return compared.compare({}, compared.stock(path, feeds, LEVELS[level]))
    plan = memonger.search_plan(path, mode="inference", device=device, level=level, threads=1)
    if choice.random() < 0.5:
        plan.save(folder / "planned.onnx")
        plan = memonger.Plan.load(folder / "planned.onnx")
    tell(stage="run")
    mine = memonger.Session(plan).run(feeds)
    tell(stage="stock")
    return compared.compare(mine, compared.stock(path, feeds, LEVELS[level]))


def tiles(choice: random.Random, folder: Path, tell: Tell, only_stock: bool) -> str:
    """Plans for a range of sizes, and plans in slices of a batch or of rows: stock's numbers at sizes inside."""
    net = _Net(choice.randrange(2**32))
    is_range = choice.random() < 0.5
    shape: list[int | str] = ["N", 8] if choice.random() < 0.5 else [2, "N", 8] if is_range else ["N", 16, 8]
    model = net.model(shape, _layers(net, choice, is_quantized=choice.random() < 0.2), 21)
    data, note = mutate.change(choice, model) if choice.random() < 0.3 else (model.SerializeToString(), "as it is")
    path = compared.place(folder, data)
    options: dict[str, Any]
    if is_range:
        least = choice.choice([1, 1, 2, 5, 0])
        most = least + choice.choice([0, 1, 6, 63])
        sizes = [choice.randint(least, most) for _ in range(3)] + [choice.choice([least, most, most + 1])]
        options = {"dims": {"N": (least, most)}}
    else:
        sizes = [choice.choice([1, 4, 6, 24])]
        options = {"dims": {"N": sizes[0]}, "chunks": choice.choice(["auto", 2, 3, 4, "1:2", "1:4", 64])}
        options |= {"max_overhead": 1e9} if choice.random() < 0.8 else {}
    options |= {"budget": choice.choice(["4KiB", "16KiB", "1MiB"]), "effort": 2_000} if choice.random() < 0.3 else {}
    device = choice.choice(["none", "cpu"]) if is_range else "cpu"
    options |= {"weights": choice.choice(["packed", "mapped"])} if choice.random() < 0.2 else {}
    tell(mutation=f"{device} {shape} {options}: {note}", stage="device plan" if device == "cpu" else "plan")
    feeds = [
        {"x": net.rng.standard_normal([size if dim == "N" else dim for dim in shape], np.float32)} for size in sizes
    ]
    if only_stock:
        return compared.compare({}, compared.stock(path, feeds[0], "ORT_DISABLE_ALL"))
    plan = memonger.search_plan(path, mode="inference", device=device, level="disable", threads=1, **options)
    tell(stage="run")
    session = memonger.Session(plan)
    results = []
    for one in feeds:
        try:
            mine = session.run(one)
        except memonger.MemongerError:
            inside = not is_range or least <= one["x"].shape[shape.index("N")] <= most
            if inside and note == "as it is":
                raise Wrong("a size inside of the range is refused") from None
            continue
        results.append(compared.compare(mine, compared.stock(path, one, "ORT_DISABLE_ALL"), f"{options}: "[:60]))
    if not results:
        raise memonger.SessionError("no size ran")
    return "right" if "right" in results else "alone"


def exports(choice: random.Random, folder: Path, tell: Tell, only_stock: bool) -> str:
    """Folders for serving stacks, whole or not there: onnx's checker takes the models in them, where it takes the one
    that was exported, and what serves them has stock onnxruntime's numbers."""
    if choice.random() < 0.5:
        model, given, name = corpus.draw(choice)
    else:
        net = _Net(choice.randrange(2**32))
        model, given = net.model([4, 8], _layers(net, choice, is_quantized=choice.random() < 0.3), 21), {}
        name = "network"
    data, note = mutate.change(choice, model) if choice.random() < 0.4 else (model.SerializeToString(), "as it is")
    target, called = choice.choice(list(TARGETS)), choice.choice(["m", "m", None, *mutate.NAMES])
    tell(mutation=f"{name} to {target} as {called!r:.20}: {note}", stage="device plan")
    path = compared.place(folder, data)
    if only_stock:
        return "alone"
    out = folder / "out"
    try:
        export(path, target, out, name=called, options=memonger.Options(threads=1, level="disable"))
    except memonger.MemongerError:
        if out.exists():
            raise Wrong("an export that was refused left a folder") from None
        raise
    files = sorted(out.rglob("*.onnx"))
    for file in (each for each in out.rglob("*") if each.is_file()):
        compared.check_secret(file)
    if _passes_checker(path):
        wrong = next((file.name for file in files if not _passes_checker(file)), None)
        if wrong is not None:
            raise Wrong("onnx's checker refuses what was exported, and takes the model")
    tell(stage="run")
    shaped = onnx.load(files[0]) if files else onnx.ModelProto.FromString(data)
    feeds = corpus.feeds_for(choice, shaped, given)
    expected = compared.stock(path, feeds, "ORT_DISABLE_ALL")
    if target == "onnxruntime":
        found = [compared.stock(file, feeds, "ORT_DISABLE_ALL") for file in files]
        if expected is not None and None in found:
            raise Wrong("stock onnxruntime refuses what was exported for it")
        results = [compared.compare(each[0], expected) for each in found if each is not None]
        return results[0] if results else "alone"
    if target not in SERVED:
        return "alone"
    mine = PlannedFleet({"m": files}).model().run(feeds)
    return compared.compare(mine, expected)


def _passes_checker(path: Path) -> bool:
    try:
        onnx.checker.check_model(str(path))
    except Exception:  # its errors have no common class
        return False
    return True


KINDS = {"quantized": quantized, "tiles": tiles, "exports": exports}
