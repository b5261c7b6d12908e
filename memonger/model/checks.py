"""What must be true of a model before anything is done with it; if it isn't, a check raises a `LoadError`."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from memonger.errors import LoadError
from memonger.model.model import Model
from memonger.model.values import subgraphs

RUNTIME_DOMAINS = ("com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc", "com.microsoft.experimental")


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Every tensor of the model that lies in a file of its own: weights and attributes, subgraphs included."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value
        for _, attribute in tensor_attributes(graph):
            if isinstance(attribute.value, ir.ExternalTensor):
                yield attribute.value


def tensor_attributes(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Attr]]:
    """Every attribute of the graph's own nodes that is one tensor, with its node."""
    for node in graph:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                yield node, attribute


def check_external_data(model: Model) -> None:
    """Every external tensor lies whole in a file inside the model's own folder."""
    for tensor in external_tensors(model.ir):
        folder, path = Path(tensor.base_dir).resolve(), Path(tensor.path).resolve()
        if Path(tensor.location).is_absolute() or not path.is_relative_to(folder):
            raise LoadError(
                f"{model.name}: tensor '{tensor.name}' points to {tensor.location}, outside the model's folder "
                f"{folder}. Files elsewhere are not read; move the data beside the model."
            )
        if not path.is_file():
            raise LoadError(f"{model.name}: the external data of tensor '{tensor.name}' is missing: no file {path}.")
        _check_length(tensor, path, model.name)


def _check_length(tensor: ir.ExternalTensor, path: Path, name: str) -> None:
    start, size = tensor.offset or 0, path.stat().st_size
    length = tensor.length if tensor.length is not None else tensor.nbytes
    if start < 0 or length < tensor.nbytes or size < start + length:
        raise LoadError(
            f"{name}: the external data of tensor '{tensor.name}' is cut short: {path} has {size} bytes, the tensor "
            f"needs {tensor.nbytes} from byte {start} and is given {length}."
        )


def check_versions(model: Model) -> None:
    """Neither the file format nor an operator set is newer than what the installed onnx knows."""
    if (model.ir.ir_version or 0) > onnx.IR_VERSION:
        raise LoadError(
            f"{model.name} has IR version {model.ir.ir_version}; the installed onnx {onnx.__version__} knows up to "
            f"{onnx.IR_VERSION}. Upgrade onnx: pip install -U onnx."
        )
    opset, newest = model.ir.opset_imports.get("", 0), onnx.defs.onnx_opset_version()
    if opset > newest:
        raise LoadError(
            f"{model.name} is in opset {opset}; the installed onnx {onnx.__version__} knows up to {newest}. Upgrade "
            "onnx (pip install -U onnx), or export the model with an older opset."
        )


def check_structure(model: Model) -> None:
    """There is something to compute, and every value that is read or returned is there."""
    if not model.graph.outputs:
        nothing = "" if model.graph.num_nodes() else "an empty graph: no nodes and "
        raise LoadError(f"{model.name} has {nothing}no outputs, so there is nothing to plan.")
    for graph in model.ir.graphs():
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


def check_operators(model: Model) -> None:
    """Every operator is one that ONNX defines, or lies in a domain of onnxruntime's own."""
    known = {schema.domain for schema in onnx.defs.get_all_schemas()}
    for node in model.graph.all_nodes():
        if node.domain in RUNTIME_DOMAINS:
            continue
        where = described(node)
        if node.domain not in known:
            raise LoadError(
                f"{model.name}: {where} is in the domain '{node.domain}', which neither ONNX nor onnxruntime defines. "
                "Give the operator a function body in the model, or cut it out."
            )
        opset = model.ir.opset_imports.get(node.domain)
        domain = node.domain or "ai.onnx"
        if opset is None:
            raise LoadError(
                f"{model.name} is not a valid ONNX model: {where} is in the domain '{domain}', of which the model "
                "imports no version (opset_import)."
            )
        if not onnx.defs.has(node.op_type, opset, node.domain):
            raise LoadError(
                f"{model.name}: {where} is an unknown operator: domain '{domain}' has no '{node.op_type}' in "
                f"opset {opset}."
            )


def sort(model: Model) -> None:
    """Put every node after the nodes it reads from, where that isn't so yet."""
    if all(is_sorted(graph) for graph in model.ir.graphs()):
        return
    try:
        model.graph.sort()
    except ValueError as error:
        raise LoadError(
            f"{model.name}: its graph has a cycle, so no order can run it: {', '.join(_cycle(model.graph))}."
        ) from error


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
    pending = [node]
    while pending:
        reader = pending.pop()
        yield from reader.predecessors()
        for graph in subgraphs(reader):
            pending.extend(graph)
            yield from (made for value in graph.outputs if (made := value.producer()) is not None)


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
