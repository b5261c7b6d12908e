"""Low-rank adapters beside weights (LoRA, Hu et al. 2021): ``x·W`` becomes ``x·W + alpha/rank · (x·A)·B``.

The weights stay as they are, and only A and B are trained. What adapters a model has stands as JSON in
``metadata_props["memonger.lora"]``.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir import training_roles
from memonger.ir.decoding import decode_metadata
from memonger.ir.emitter import Emitter
from memonger.ir.model import Model
from memonger.ir.names import name_nodes, named_by
from memonger.ir.passes import run_passes
from memonger.ir.rewrite import Replacer
from memonger.ir.values import add_initializer, static_shape
from memonger.model import parameters
from memonger.model.load import Source, load
from memonger.model.opset import raise_opset
from memonger.words import option

KEY = "memonger.lora"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of one weight.

    Attributes:
        weight: Name of the matrix.
        a: Name of A, ``[inputs, rank]``.
        b: Name of B, ``[rank, outputs]``.
        factor: alpha / rank.
        swapped: Whether the weight is stored ``[outputs, inputs]``.
    """

    weight: str
    a: str
    b: str
    factor: float
    swapped: bool

    def merged(self, weight: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The weight with the adapter in it, computed in float32 at least."""
        kind = np.result_type(weight.dtype if weight.dtype.kind == "f" else np.float32, np.float32)
        change = self.factor * (a.astype(kind) @ b.astype(kind))
        merged: np.ndarray = weight.astype(kind) + (change.T if self.swapped else change)
        return merged.astype(weight.dtype)


@dataclass(frozen=True, slots=True)
class _Listed:
    """The form of the metadata."""

    adapters: tuple[Adapter, ...]


@dataclass(frozen=True, slots=True)
class _Product:
    """A node that multiplies rows by a weight.

    Attributes:
        node: MatMul or Gemm.
        swapped: Whether it takes the weight transposed.
    """

    node: ir.Node
    swapped: bool


def add_lora(
    source: Source | Model,
    rank: int,
    pattern: str | Sequence[str] = "*",
    *,
    alpha: float | None = None,
    seed: int = 0,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> Model:
    """Put a low-rank adapter beside chosen weights of products (MatMul, Gemm), to train those alone.

    ``x·W`` becomes ``x·W + alpha/rank · (x·A)·B``. A, ``<weight>.lora_A`` of ``[inputs, rank]``, begins as normal
    random numbers of deviation 1/rank, and B, ``<weight>.lora_B`` of ``[rank, outputs]``, as zeros: the model computes
    what it did. The adapters are the model's parameters from then on (metadata ``memonger.parameters``); to train
    others beside them, name all: ``differentiate(..., wrt=["*.lora_?", "classifier.*"])``. `merge_lora` and
    `TrainingSession.export` write trained adapters into the weights.

    Source: Hu et al. 2021, LoRA, https://arxiv.org/abs/2106.09685; without its dropout.

    Args:
        source: What `memonger.load` takes or gives. Adapters come before `to_training_mode` and `differentiate`.
        rank: Of A·B; at most the smaller side of each weight.
        pattern: Names or glob patterns of weights, or of the nodes that read them. Of a pattern's weights those count
            that products alone read, as their right matrix.
        alpha: The adapter's part is scaled by alpha / rank; None: alpha is the rank.
        seed: What A derives from, with the weight's name.
        batch: See `memonger.load`.
        dims: See `memonger.load`.

    Raises:
        LoadError: the model can't be read.
        PlanError: a pattern names no weight of a product; the rank is above a weight's side; the model has adapters,
            or is in training form, already.
    """
    if type(rank) is not int or rank < 1:
        raise PlanError(f"the rank of adapters must be a whole number, 1 or more, not {rank!r}.")
    if alpha is not None and not (isinstance(alpha, int | float) and 0 < alpha < math.inf):
        raise PlanError(f"alpha must be a finite number above 0, not {alpha!r}.")
    if type(seed) is not int or seed < 0:
        raise PlanError(f"seed must be a whole number, 0 or more, not {seed!r}.")
    model = load(source, batch=batch, dims=dims)
    if KEY in model.ir.metadata_props:
        raise PlanError(f"{model.name} has adapters already: memonger.merge_lora writes them into its weights.")
    if training_roles.KEY in model.ir.metadata_props:
        raise PlanError(f"{model.name} is in training form already: add adapters to the forward model first.")
    trained = parameters.trainable(model)
    copy = run_passes(model.clone(), "differentiate", raise_opset, name_nodes)
    products = _products(copy, trained)
    op, adapters = Emitter(copy.ir), []
    named = {name: [name, *(str(each.node.name) for each in read)] for name, read in products.items()}
    what = "weight that MatMul or Gemm reads as its right matrix, and nothing else reads"
    for name in named_by(named, pattern, f"{copy.name}: {option('pattern')}", what):
        weight = copy.graph.initializers[name]
        if rank > min(sides := static_shape(weight) or (0,)):
            raise PlanError(
                f"{copy.name}: rank {rank} is above the smaller side of '{weight.name}', which is {list(sides)}: "
                "choose a smaller rank, or a pattern that leaves it out."
            )
        adapter = Adapter(name, f"{name}.lora_A", f"{name}.lora_B", (alpha or rank) / rank, products[name][0].swapped)
        _add(op, adapter, weight, rank, products[name], seed)
        adapters.append(adapter)
    copy.ir.metadata_props[KEY] = json.dumps(asdict(_Listed(tuple(adapters))), separators=(",", ":"))
    copy.ir.metadata_props[parameters.KEY] = json.dumps([name for each in adapters for name in (each.a, each.b)])
    return copy


def _products(model: Model, trained: Sequence[str]) -> dict[str, list[_Product]]:
    """By weight the products that read it, for each matrix that only products of one kind read."""
    products = {}
    for name in trained:
        weight = model.graph.initializers.get(name)
        if weight is None or weight.is_graph_output() or len(static_shape(weight) or ()) != 2:
            continue
        found = _readers(model.graph, weight, swapped=False)
        if found and None not in found and len({each.swapped for each in found if each is not None}) == 1:
            products[name] = [each for each in found if each is not None]
    return products


def _readers(graph: ir.Graph, weight: ir.Value, *, swapped: bool) -> list[_Product | None]:
    """What reads a matrix, through a Transpose, too; None for what isn't a product with it on the right."""
    found: list[_Product | None] = []
    for node, index in weight.uses():
        inner, y = node.domain != "" or node.graph is not graph, node.outputs[0]
        if not inner and node.op_type == "Transpose" and not y.is_graph_output() and not swapped:
            found.extend(_readers(graph, y, swapped=True))
        elif not inner and index == 1 and node.op_type == "MatMul":
            found.append(_Product(node, swapped))
        elif not inner and index == 1 and node.op_type == "Gemm" and not node.attributes.get_int("transA", 0):
            found.append(_Product(node, swapped ^ bool(node.attributes.get_int("transB", 0))))
        else:
            found.append(None)
    return found


def _add(op: Emitter, adapter: Adapter, weight: ir.Value, rank: int, products: Sequence[_Product], seed: int) -> None:
    """Register A and B, and add their part behind each product."""
    inputs, outputs = (static_shape(weight) or ())[:: -1 if adapter.swapped else 1]
    generator = np.random.default_rng([seed, zlib.crc32(adapter.weight.encode())])
    kind = (weight.dtype or ir.DataType.FLOAT).numpy()
    a = _initializer(op, adapter.a, (generator.standard_normal((inputs, rank)) / rank).astype(kind))
    b = _initializer(op, adapter.b, np.zeros((rank, outputs), kind))
    for product in products:
        node = product.node
        y, x = node.outputs[0], op.given(node, 0)
        readers = tuple(y.uses())
        scale = adapter.factor * (op.attribute(node, "alpha", 1.0) if node.op_type == "Gemm" else 1.0)
        with op.at(f"{node.name}/lora"), op.behind(node):
            rows = op.size(x) // inputs
            low = op.Gemm(_viewed(op, x, (rows, inputs)), a)
            both = op.Gemm(low, b, _viewed(op, y, (rows, outputs)), alpha=scale)
            made = _viewed(op, both, op.dims(y))
        name, y.name = y.name, op.fresh(f"{y.name}.base")
        made.name = name
        for reader, index in readers:
            reader.replace_input_with(index, made)
        op.graph.outputs[:] = [made if value is y else value for value in op.graph.outputs]


def _viewed(op: Emitter, x: ir.Value, dims: Sequence[int]) -> ir.Value:
    """``x`` with another shape, by a node of its own that `take_out` finds: `Emitter.reshape` joins views."""
    return x if op.dims(x) == tuple(dims) else op.Reshape(x, op.ints(*dims))


def _initializer(op: Emitter, name: str, content: np.ndarray) -> ir.Value:
    if op.fresh(name) != name:
        raise PlanError(f"the model has a value named '{name}' already, as an adapter would be called.")
    return add_initializer(op.graph, name, content)


def adapters_of(model: ir.Model, name: str) -> tuple[Adapter, ...]:
    """The adapters that a model says it has.

    Raises:
        PlanError: what it says is malformed.
    """
    found = decode_metadata(_Listed, model.metadata_props, KEY, name)
    return () if found is None else found.adapters


def merge_lora(source: Source | Model) -> Model:
    """The model without its adapters: their parts are added to the weights, ``W + alpha/rank · A·B``.

    Args:
        source: A model of `add_lora`, as a file or in memory.

    Raises:
        LoadError: the model can't be read.
        PlanError: it has no adapters, or they were changed so that they can't be taken out.
    """
    model = load(source).clone()
    if KEY not in model.ir.metadata_props:
        raise PlanError(f"{model.name} has no adapters of memonger.add_lora.")
    if training_roles.KEY in model.ir.metadata_props:
        raise PlanError(f"{model.name} is in training form: TrainingSession.export writes its forward model.")
    take_out(model.ir, model.name)
    return model


def take_out(model: ir.Model, name: str) -> None:
    """Write the adapters of a model into its weights, and remove their nodes.

    Raises:
        PlanError: a matrix or node of an adapter isn't there.
    """
    into = Replacer(model.graph, Emitter(model))
    for adapter in adapters_of(model, name):
        weight, a, b = (model.graph.initializers.get(each) for each in (adapter.weight, adapter.a, adapter.b))
        contents = [value.const_value.numpy() for value in (weight, a, b) if value is not None and value.const_value]
        if weight is None or b is None or len(contents) < 3:
            raise PlanError(f"{name}: the adapter of '{adapter.weight}' lacks a matrix, or its content.")
        for node, index in tuple(b.uses()):
            if node.op_type != "Gemm" or index != 1 or len(node.inputs) < 3:
                raise PlanError(f"{name}: node '{node.name}' reads '{adapter.b}' otherwise than an adapter does.")
            _remove(into, node)
        weight.const_value = ir.tensor(adapter.merged(*contents), name=weight.name)
    into.finish()
    del model.metadata_props[KEY]
    model.metadata_props.pop(parameters.KEY, None)


def _remove(into: Replacer, gemm: ir.Node) -> None:
    """Let what reads an adapted product read the product itself, under its own name."""
    y, last = gemm.inputs[2], gemm
    view = None if y is None else y.producer()
    readers = [node for node, _ in gemm.outputs[0].uses()]
    if view is not None and view.op_type == "Reshape" and [node.op_type for node in readers] == ["Reshape"]:
        y, (last,) = view.inputs[0], readers
    assert y is not None
    end = last.outputs[0]
    name, end.name = end.name, None
    y.name = name
    into.replace(last, (y,))


def into_weights(
    adapters: Sequence[Adapter], trained: Mapping[str, np.ndarray], values: Mapping[str, ir.Value]
) -> dict[str, np.ndarray]:
    """Trained tensors for a model without the adapters among them: these are added to the weights it has.

    Args:
        adapters: Of the model that was trained.
        trained: Its trained tensors, by name.
        values: The other model's initializers and inputs, by name; adapters it has are left alone.
    """
    tensors = dict(trained)
    for each in adapters:
        weight = values.get(each.weight)
        if each.a in values or each.a not in tensors or weight is None or weight.const_value is None:
            continue
        base = tensors.get(each.weight, weight.const_value.numpy())
        tensors[each.weight] = each.merged(base, tensors.pop(each.a), tensors.pop(each.b))
    return tensors
