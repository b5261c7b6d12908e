"""What must be true of a model before anything is done with it; if it isn't, a check raises a `LoadError`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from memonger.errors import LoadError
from memonger.files import instead
from memonger.ir import onnx_process
from memonger.ir.model import Model
from memonger.ir.operators import RANKS
from memonger.ir.tensors import UNSIZED, all_tensors, bodies, external_tensors
from memonger.ir.values import LARGEST, SMALL, all_values, graphs, nbytes, read_values, static_shape

RUNTIME_DOMAINS = ("com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc", "com.microsoft.experimental")

STANDARD_DOMAINS = frozenset({"", "ai.onnx.ml", "ai.onnx.preview.training"})

RUNTIME_OPERATORS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""What onnxruntime's optimizer writes into ONNX's own domain, whether the operator set has it or not."""

_WITHOUT_SCHEMA = RUNTIME_OPERATORS | {"MemcpyFromHost", "MemcpyToHost"}
"""These, and the copies between host and device that it writes there."""


PLAIN = frozenset({
    "Abs", "Add", "AveragePool", "BatchNormalization", "Cast", "Clip", "Concat", "Constant", "Conv", "ConvTranspose",
    "Div", "Dropout", "Elu", "Erf", "Exp", "Flatten", "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool",
    "HardSigmoid", "HardSwish", "Identity", "LRN", "LayerNormalization", "LeakyRelu", "Log", "MatMul", "MaxPool", "Mul",
    "Neg", "PRelu", "Pow", "Reciprocal", "ReduceMean", "Relu", "Sigmoid", "Softmax", "Sqrt", "Sub", "Sum", "Tanh",
    "Transpose",
})  # fmt: skip
"""Operators whose inference was tried with negative, huge and missing dimensions and attributes, and did no harm."""


def root_cause(error: BaseException) -> str:
    """What the error says that began it, without its full stop."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().rstrip(".") or type(error).__name__


def check_tensors(model: Model) -> None:
    """Every tensor of the model has as many elements as its dimensions say. External data is `check_external_data`'s.

    What is small is read, as it may decide shapes; of others the length is looked at, where they came from outside.
    """
    for tensor in all_tensors(model.ir):
        dims = tensor.shape.numpy()
        if any(dim < 0 for dim in dims):
            raise LoadError(f"{model.name} is not a valid ONNX model: tensor '{tensor.name}' has dimensions {dims}.")
        if isinstance(tensor, ir.ExternalTensor):
            continue
        try:
            fits = _fits(tensor, whole=model.foreign)
        except (ValueError, TypeError, AssertionError, KeyError, NotImplementedError, OverflowError) as error:
            raise LoadError(
                f"{model.name} is not a valid ONNX model: tensor '{tensor.name}' can't be read: {root_cause(error)}."
            ) from error
        if not fits:
            raise LoadError(f"{model.name}: tensor '{tensor.name}' doesn't hold the {tensor.size} elements it should.")


def _fits(tensor: ir.TensorProtocol, *, whole: bool) -> bool:
    """Whether a tensor has the elements it should; without ``whole`` large ones count as right."""
    proto = tensor.raw if isinstance(tensor, ir.TensorProtoTensor) else None
    if proto is not None and tensor.nbytes >= 2**31:  # no message is as large
        return False
    if tensor.size > SMALL and not whole:
        return True
    if proto is not None and tensor.size > SMALL and proto.HasField("raw_data"):
        return len(proto.raw_data) == tensor.nbytes
    return bool(tensor.numpy().size == tensor.size)


def check_sizes(model: Model) -> None:
    """No tensor has a dimension below zero, or takes more bytes than can be counted."""
    for value in all_values(model.graph):
        dims = static_shape(value) or ()
        node = value.producer()
        where = described(node) if node is not None else "an input"
        if any(dim < 0 for dim in dims):
            raise LoadError(
                f"{model.name}: its shapes or types contradict each other: '{value.name}' ({where}) would have the "
                f"dimensions {list(dims)}."
            )
        if (nbytes(value) or 0) >= LARGEST:
            raise LoadError(f"{model.name}: '{value.name}' ({where}) would take 2**62 bytes or more: {list(dims)}.")


def check_external_data(model: Model) -> None:
    """Every external tensor lies whole in a file inside the model's own folder."""
    for tensor in external_tensors(model.ir):
        if tensor.dtype in UNSIZED:
            raise LoadError(
                f"{model.name} is not a valid ONNX model: tensor '{tensor.name}' ({tensor.dtype.name}) can't lie in a "
                "file of its own: only numbers can."
            )
        try:
            folder, path = Path(tensor.base_dir).resolve(), Path(tensor.path).resolve()
        except (OSError, ValueError) as error:  # ValueError: a null byte
            raise LoadError(f"{model.name}: tensor '{tensor.name}' points to no file: {error}.") from error
        if Path(tensor.location).is_absolute() or not path.is_relative_to(folder):
            raise LoadError(
                f"{model.name}: tensor '{tensor.name}' points to {tensor.location}, outside the model's folder "
                f"{folder}. Files elsewhere are not read; move the data beside the model."
            )
        if not path.is_file():
            raise LoadError(f"{model.name}: the external data of tensor '{tensor.name}' is missing: no file {path}.")
        start, size = tensor.offset or 0, path.stat().st_size
        length = tensor.length if tensor.length is not None else tensor.nbytes
        if start < 0 or length < tensor.nbytes or size < start + length:
            raise LoadError(
                f"{model.name}: the external data of tensor '{tensor.name}' is cut short: {path} has {size} bytes, the "
                f"tensor needs {tensor.nbytes} from byte {start} and is given {length}.{instead(path)}"
            )


def check_versions(model: Model) -> None:
    """Neither the file format nor an operator set is newer than what the installed onnx knows."""
    if (model.ir.ir_version or 0) > onnx.IR_VERSION:
        raise LoadError(
            f"{model.name} has IR version {model.ir.ir_version}; the installed onnx {onnx.__version__} knows up to "
            f"{onnx.IR_VERSION}. Upgrade onnx: pip install -U onnx."
        )
    for domain, version in model.ir.opset_imports.items():
        if not 1 <= version < 2**31:
            raise LoadError(
                f"{model.name} is not a valid ONNX model: it imports version {version} of the domain "
                f"'{domain or 'ai.onnx'}'."
            )
    opset, newest = model.ir.opset_imports.get("", 0), onnx.defs.onnx_opset_version()
    if opset > newest:
        raise LoadError(
            f"{model.name} is in opset {opset}; the installed onnx {onnx.__version__} knows up to {newest}. Upgrade "
            "onnx (pip install -U onnx), or export the model with an older opset."
        )


def check_text(model: Model) -> None:
    """Every name is text: what isn't UTF-8 in a file comes as bytes."""
    for body in bodies(model.ir):
        for node in body:
            for name in (node.op_type, node.domain, node.name, *(value.name for value in node.outputs)):
                if name is not None and not isinstance(name, str):
                    raise LoadError(f"{model.name} is not a valid ONNX model: the name {name!r} is no text (UTF-8).")


def check_structure(model: Model) -> None:
    """There is something to compute, and every value that is read or returned is there."""
    check_text(model)
    if not model.graph.outputs:
        nothing = "" if model.graph.num_nodes() else "an empty graph: no nodes and "
        raise LoadError(f"{model.name} has {nothing}no outputs, so there is nothing to plan.")
    for graph in graphs(model.ir):
        counts = Counter(value.name for value in graph.inputs)
        twice = next((each for each, count in counts.items() if count > 1), None)
        if twice is not None:
            raise LoadError(f"{model.name} is not a valid ONNX model: it has two inputs named '{twice}'.")
        for node in graph:
            for value in node.inputs:
                if value is not None and _is_nowhere(value):
                    raise LoadError(
                        f"{model.name} is not a valid ONNX model: {described(node)} reads '{value.name}', which no "
                        "node writes and which is neither an input nor an initializer."
                    )
        for value in graph.outputs:
            if _is_nowhere(value):
                raise LoadError(
                    f"{model.name} is not a valid ONNX model: no node writes the output '{value.name}' of graph "
                    f"'{graph.name}', and it is neither an input nor an initializer."
                )
    for value in model.graph.inputs:
        if value.type is None:
            raise LoadError(f"{model.name} is not a valid ONNX model: input '{value.name}' has no type.")


def _is_nowhere(value: ir.Value) -> bool:
    return value.producer() is None and not value.is_graph_input() and not value.is_initializer()


def described(node: ir.Node) -> str:
    """A node, for messages: its name if it has one, else what it writes."""
    if node.name:
        return f"node '{node.name}' ({node.op_type})"
    written = next((value.name for value in node.outputs if value.name), None)
    return f"the {node.op_type} node that writes '{written}'" if written else f"a {node.op_type} node"


def check_operators(model: Model, *, is_planned: bool = False) -> None:
    """Every operator is one that ONNX defines, or lies in a domain of onnxruntime's own, and is used as it is defined.

    A process that only runs plans doesn't load ONNX's definitions, 8 MiB that would stay: another looks at a planned
    file, and ends.

    Args:
        model: The model. One from outside is checked by onnx's own checker as well.
        is_planned: Whether operators of memonger's plans may be in it.
    """
    for node in model.graph.all_nodes():
        problem = _beyond_onnx(node)
        if problem:
            raise LoadError(f"{model.name} is not a valid ONNX model: {described(node)} {problem}.")
    if is_planned and model.foreign and not _signature.cache_info().currsize and _is_right_elsewhere(model):
        return
    for node in model.graph.all_nodes():
        if node.domain in RUNTIME_DOMAINS or (is_planned and node.domain == RANKS):
            continue
        opset = model.ir.opset_imports.get(node.domain)
        if opset is None or not onnx.defs.has(node.op_type, opset, node.domain):
            if opset is not None and not node.domain and node.op_type in _WITHOUT_SCHEMA:
                continue
            raise LoadError(f"{model.name}{_unknown(node, opset)}")
        problem = _misuse(node, _signature(node.op_type, opset, node.domain))
        if problem:
            raise LoadError(f"{model.name} is not a valid ONNX model: {described(node)} {problem}.")
    if model.foreign:
        # onnx's own checker sees each kind once, and in another process what isn't well known
        for is_plain, nodes in _kinds(model).items():
            if not nodes:
                continue
            try:
                wrong = onnx_process.check_nodes(_nodes_alone(model, nodes), here=is_plain)
            except RuntimeError as error:
                raise LoadError(f"{model.name} can't be checked: {root_cause(error)}.") from error
            if wrong is not None:
                raise LoadError(
                    f"{model.name} is not a valid ONNX model: {described(nodes[wrong[0]])}: {wrong[1].rstrip('.')}."
                )


def _is_right_elsewhere(model: Model) -> bool:
    """Whether all operators are in known domains, and onnx's own checker in another process finds nothing wrong."""
    imported = STANDARD_DOMAINS & model.ir.opset_imports.keys()
    if any(node.domain not in {*imported, *RUNTIME_DOMAINS, RANKS} for node in model.graph.all_nodes()):
        return False
    plain, others = _kinds(model).values()
    if not plain and not others:
        return True
    try:
        return _is_right(_nodes_alone(model, [*plain, *others]).SerializeToString(deterministic=True))
    except RuntimeError:
        return False


@lru_cache(maxsize=64)
def _is_right(nodes: bytes) -> bool:
    """Whether onnx's checker finds nothing wrong with nodes; those of a file that a fleet loads again are known.

    Raises:
        RuntimeError: as `onnx_process.check_nodes`.
    """
    return onnx_process.check_nodes(onnx.ModelProto.FromString(nodes), here=False, once=True) is None


def _kinds(model: Model) -> dict[bool, list[ir.Node]]:
    """A node of each kind that onnx's checker knows: those of well-known operators, and others."""
    kinds: dict[bool, dict[object, ir.Node]] = {True: {}, False: {}}
    for node in model.graph.all_nodes():
        known = node.domain in model.ir.opset_imports and node.domain not in RUNTIME_DOMAINS
        if known and node.op_type not in _WITHOUT_SCHEMA and node.op_type != "Constant":
            is_plain = not node.domain and node.op_type in PLAIN
            kinds[is_plain].setdefault(_kind(node), node)
    return {is_plain: list(nodes.values()) for is_plain, nodes in kinds.items()}


def _nodes_alone(model: Model, nodes: Sequence[ir.Node]) -> onnx.ModelProto:
    """A model of nothing but these nodes."""
    graph = onnx.GraphProto(name="nodes", node=[_alone(node) for node in nodes])
    opsets = {domain: version for domain, version in model.ir.opset_imports.items() if domain not in RUNTIME_DOMAINS}
    imports = [onnx.OperatorSetIdProto(domain=domain, version=version) for domain, version in opsets.items()]
    return onnx.ModelProto(ir_version=onnx.IR_VERSION, graph=graph, opset_import=imports)


def _kind(node: ir.Node) -> object:
    """What the checker tells nodes apart by."""
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    plain = [one for one in node.attributes.values() if not isinstance(one, ir.Attr) or one.type not in graphs]
    attributes = tuple((one.name, one.type, repr(one.value)) for one in plain)
    inputs = tuple(value is not None for value in node.inputs)
    return node.op_identifier(), attributes, inputs, len(node.outputs)


def _alone(node: ir.Node) -> onnx.NodeProto:
    """A node without what its subgraphs hold: the nodes in them are checked on their own."""
    proto = onnx.NodeProto(
        op_type=node.op_type, domain=node.domain, name=node.name or "",
        input=["x" if value is not None else "" for value in node.inputs],
        output=[f"y{number}" for number in range(len(node.outputs))],
    )  # fmt: skip
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            proto.attribute.add(name=attribute.name, type=onnx.AttributeProto.GRAPH, g=onnx.GraphProto(name="body"))
        elif attribute.type != ir.AttributeType.GRAPHS:
            proto.attribute.append(ir.serde.serialize_attribute(attribute))
    return proto


def _unknown(node: ir.Node, opset: int | None) -> str:
    """What to say, behind the model's name, of an operator that isn't in the model's operator set."""
    where, domain = described(node), node.domain or "ai.onnx"
    if node.domain not in {schema.domain for schema in onnx.defs.get_all_schemas()}:
        return (
            f": {where} is in the domain '{node.domain}', which neither ONNX nor onnxruntime defines. Give the "
            "operator a function body in the model, or cut it out."
        )
    if opset is None:
        return (
            f" is not a valid ONNX model: {where} is in the domain '{domain}', of which the model imports no version "
            "(opset_import)."
        )
    return f": {where} is an unknown operator: domain '{domain}' has no '{node.op_type}' in opset {opset}."


@dataclass(frozen=True, slots=True)
class _Signature:
    """What an operator takes: numbers of inputs, places of those that have to be there, outputs, attributes' types."""

    inputs: tuple[int, int]
    required: tuple[int, ...]
    outputs: tuple[int, int]
    attributes: Mapping[str, int]
    required_attributes: tuple[str, ...]


@cache
def _signature(op_type: str, opset: int, domain: str) -> _Signature:
    schema: Any = onnx.defs.get_schema(op_type, opset, domain)  # onnx's stubs are wrong about what follows
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return _Signature(
        (schema.min_input, schema.max_input),
        tuple(place for place, each in enumerate(schema.inputs) if each.option == single),
        (schema.min_output, schema.max_output),
        {name: int(attribute.type.value) for name, attribute in schema.attributes.items()},
        tuple(name for name, attribute in schema.attributes.items() if attribute.required),
    )


def _beyond_onnx(node: ir.Node) -> str | None:
    """What is wrong with a node that ONNX's definitions and its checker say nothing of."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            return f"refers to an attribute '{attribute.ref_attr_name}' of a function, and is in none"
    parts = node.attributes.get("num_outputs") if node.op_type == "Split" and not node.domain else None
    if parts is not None and parts.type == ir.AttributeType.INT and parts.as_int() != len(node.outputs):
        # of which onnxruntime's kernel may end the process
        return f"has {len(node.outputs)} outputs, and its num_outputs is {parts.as_int()}"
    if node.op_type == "Constant" and not node.domain and len(node.attributes) != 1:
        return f"has {len(node.attributes)} attributes in place of one value"
    return None


def _misuse(node: ir.Node, signature: _Signature) -> str | None:
    """What is wrong with a node, of what onnxruntime refuses and onnx's inference may crash on."""
    least, most = signature.inputs
    if not least <= len(node.inputs) <= most:
        return f"has {len(node.inputs)} inputs, and takes {least}" + (f" to {most}" if most > least else "")
    for place in signature.required:
        if place < len(node.inputs) and node.inputs[place] is None:
            return f"lacks its input {place}"
    least, most = signature.outputs
    if not least <= len(node.outputs) <= most:
        return f"has {len(node.outputs)} outputs, and gives {least}" + (f" to {most}" if most > least else "")
    for name, attribute in node.attributes.items():
        if int(attribute.type) != signature.attributes.get(name, int(attribute.type)) or not attribute.type:
            return f"has an attribute '{name}' of the wrong type ({attribute.type.name})"
    for name in signature.required_attributes:
        if name not in node.attributes:
            return f"lacks its attribute '{name}'"
    return None


def sort_nodes(model: Model) -> bool:
    """A pass: every node stands after the nodes it reads from. In an order in which they do they stay.

    Raises:
        LoadError: the graph has a cycle.
    """
    if all(is_sorted(graph) for graph in graphs(model.ir)):
        return False
    try:
        model.graph.sort()
    except ValueError as error:
        raise LoadError(
            f"{model.name}: its graph has a cycle, so no order can run it: {', '.join(_cycle(model.graph))}."
        ) from error
    return True


def is_sorted(graph: ir.Graph) -> bool:
    """Whether every node stands after the nodes it reads from, what its subgraphs capture included."""
    seen: set[ir.Node] = set()
    for node in graph:
        if any(producer.graph is graph and producer not in seen for producer in producers(node)):
            return False
        seen.add(node)
    return True


def producers(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes that write what this one reads; for subgraphs also those inside."""
    return (made for value in read_values(node) if (made := value.producer()) is not None)


def _cycle(graph: ir.Graph) -> list[str]:
    """Some nodes on a cycle, in the order they read from one another."""
    left = {node: {p for p in producers(node) if p.graph is graph} for node in graph}
    while free := [node for node, needed in left.items() if not needed & left.keys()]:
        for node in free:
            del left[node]
    if not left:
        return [f"in a subgraph of '{graph.name}'"]
    path = [next(iter(left))]
    while True:
        following = next(node for node in graph if node in left[path[-1]] and node in left)
        if following in path:
            loop = path[path.index(following) :]
            return [
                f"{described(a)} reads from {described(b)}" for a, b in zip(loop, [*loop[1:], loop[0]], strict=True)
            ]
        path.append(following)
