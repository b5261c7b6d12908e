"""One to three changes to an ONNX model that no exporter would make, drawn from a seeded generator."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, helper

INTEGERS = (0, 1, -1, 2, 7, -(2**31), 2**31, 2**33, 2**62, 2**63 - 1, -(2**63), 10**12)
FLOATS = (0.0, -1.0, float("nan"), float("inf"), -float("inf"), 3e38, -1e-45)
DIMS = (0, 1, 2, 3, -1, -5, 10**6, 10**12, 2**31, 2**62)
OPSETS = (0, -1, 1, 6, 7, 9, 13, 18, 27, 2**31, 2**33)
NAMES = ("", "\0", "a\0b", "\x1b[31mred", "two\nlines", "‮abc", "x" * 5000, "#conv", "../x", "{}%s", " ")
HIDDEN = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029\x7f\x85\x9b"
SECRET = "secret.bin"
"""A file beside the model's folder and in the working directory: its bytes may turn up nowhere."""
LOCATIONS = (
    f"../{SECRET}",
    SECRET,
    SECRET,
    SECRET,
    f"sub/../../{SECRET}",
    "/etc/passwd",
    "/dev/zero",
    "",
    ".",
    "model.onnx",
    "x\0y",
)
TYPES = ("Relu", "Add", "Reshape", "Shape", "Constant", "Loop", "If", "SequenceAt", "Gather", "Range", "Expand", "Nope")

Model = onnx.ModelProto
Change = Callable[[random.Random, Model], str]


def shown(what: object) -> str:
    """A value, or the type of what has no text of its own."""
    return type(what).__name__ if type(what).__repr__ is object.__repr__ else repr(what)[:40]


def text(choice: random.Random, names: Sequence[str] = ()) -> str:
    """A name: one of the model's own, or one that breaks what prints or splits it."""
    return choice.choice([*names, *names, *NAMES]) if names else choice.choice(NAMES)


def _graphs(model: Model) -> list[Any]:
    """The graph, its subgraphs and the bodies of functions."""
    found: list[Any] = [model.graph, *model.functions]
    for graph in found:
        for attribute in (a for node in graph.node for a in node.attribute):
            found += [attribute.g] if attribute.HasField("g") else []
            found += attribute.graphs
    return found


def _node(choice: random.Random, model: Model) -> onnx.NodeProto:
    nodes = [node for graph in _graphs(model) for node in graph.node]
    return choice.choice(nodes) if nodes else model.graph.node.add(op_type="Relu", input=["x"], output=["y"])


def _values(model: Model) -> list[str]:
    graph = model.graph
    written = [name for node in graph.node for name in node.output]
    return [*dict.fromkeys([*(v.name for v in graph.input), *(t.name for t in graph.initializer), *written])]


def attribute(choice: random.Random, model: Model) -> str:
    """Drop one, or give it an extreme value or another type."""
    node = _node(choice, model)
    if not node.attribute or choice.random() < 0.15:
        schema = onnx.defs.has(node.op_type, node.domain) and onnx.defs.get_schema(node.op_type, domain=node.domain)
        known = sorted(schema.attributes) if schema else []
        value = choice.choice(
            [choice.choice(INTEGERS), [choice.choice(INTEGERS)], choice.choice(FLOATS), "text", ["t"]]
        )
        node.attribute.append(helper.make_attribute(choice.choice(known or ["axis"]), value))
        return f"{node.op_type}: {node.attribute[-1].name}={value!r:.60} added"
    index = choice.randrange(len(node.attribute))
    one = node.attribute[index]
    match choice.randrange(6), one.type:
        case 0, _:
            del node.attribute[index]
            return f"{node.op_type}: {one.name} dropped"
        case 1, _:
            one.type = choice.choice([AttributeProto.UNDEFINED] * 9 + AttributeProto.AttributeType.values())
        case 2, AttributeProto.INTS:
            one.ints.extend([choice.choice(INTEGERS)] if choice.random() < 0.5 else [])
            del one.ints[: choice.randrange(3)]
        case _, AttributeProto.INTS if one.ints:
            one.ints[choice.randrange(len(one.ints))] = choice.choice(INTEGERS)
        case _, AttributeProto.INT:
            one.i = choice.choice(INTEGERS)
        case _, AttributeProto.FLOAT:
            one.f = choice.choice(FLOATS)
        case _, AttributeProto.STRING:
            one.s = choice.choice([b"", b"\xff\xfe", b"SAME_UPPER", b"no such", b"\0"])
        case _, AttributeProto.TENSOR:
            return f"{node.op_type}: {one.name}: {_spoil(choice, one.t)}"
        case _:
            one.name = text(choice)
    return f"{node.op_type}: {one.name} changed to {str(one)[:80]!r}"


def dims(choice: random.Random, model: Model) -> str:
    """Another dimension, one more, or none."""
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    value = choice.choice([v for v in values if v.type.HasField("tensor_type")] or values or [model.graph.input.add()])
    shape = value.type.tensor_type.shape
    if not shape.dim or choice.random() < 0.15:
        shape.dim.add(dim_value=choice.choice(DIMS))
        return f"{value.name}: a dimension {shape.dim[-1].dim_value} added"
    dim = choice.choice(shape.dim)
    if choice.random() < 0.2:
        dim.dim_param = text(choice, ["N"])
    elif choice.random() < 0.15:
        value.type.tensor_type.ClearField("shape")
        return f"{value.name}: shape dropped"
    else:
        dim.dim_value = choice.choice(DIMS)
    return f"{value.name}: a dimension is {dim.dim_param or dim.dim_value!r}"


def wires(choice: random.Random, model: Model) -> str:
    """Inputs and outputs of a node dropped, swapped, repeated, renamed."""
    node = _node(choice, model)
    names = choice.choice([node.input, node.output])
    match choice.randrange(5):
        case 0 if names:
            del names[choice.randrange(len(names))]
        case 1:
            names.append(text(choice, _values(model)))
        case 2 if names:
            names[choice.randrange(len(names))] = ""
        case 3:
            changed = choice.sample(list(names), len(names))
            del names[:]
            names.extend(changed)
        case _ if names:
            names[choice.randrange(len(names))] = text(choice, _values(model))
    return f"{node.op_type}: {list(node.input)!r:.60} -> {list(node.output)!r:.60}"


def ends(choice: random.Random, model: Model) -> str:
    """Inputs and outputs of the graph dropped, repeated, swapped, renamed."""
    name = choice.choice(["input", "output", "initializer"])
    values: Any = getattr(model.graph, name)
    if not values:
        return "nothing"
    index = choice.randrange(len(values))
    action = choice.choice(["drop", "repeat", "rename", "swap"])
    if action == "drop":
        del values[index]
    elif action == "repeat":
        values.add().CopyFrom(values[index])
    elif action == "rename":
        values[index].name = text(choice, _values(model))
    else:
        other = choice.randrange(len(values))
        values[index].name, values[other].name = values[other].name, values[index].name
    return f"{name} {index}: {action}"


def operator(choice: random.Random, model: Model) -> str:
    """Another operator, or domain."""
    node = _node(choice, model)
    old = node.op_type
    if choice.random() < 0.7:
        other = choice.choice([schema.name for schema in onnx.defs.get_all_schemas()])
        node.op_type = text(choice, [*TYPES, other, other])
    else:
        node.domain = text(choice, ["ai.onnx", "ai.onnx.ml", "com.microsoft", "ai.onnx.preview.training"])
    return f"{old} becomes {node.domain!r:.30}.{node.op_type!r:.30}"


def versions(choice: random.Random, model: Model) -> str:
    """Operator set and IR version."""
    if choice.random() < 0.25 or not model.opset_import:
        model.ir_version = choice.choice([0, 1, 3, 9, 99, 2**40])
        return f"ir_version {model.ir_version}"
    action = choice.choice(["change", "change", "change", "drop", "repeat"])
    if action == "drop":
        del model.opset_import[:]
    elif action == "repeat":
        model.opset_import.add(domain=text(choice, ["", "ai.onnx"]), version=choice.choice(OPSETS))
    else:
        choice.choice(model.opset_import).version = choice.choice(OPSETS)
    return f"opsets {[(o.domain, o.version) for o in model.opset_import]!r:.80}"


def dtypes(choice: random.Random, model: Model) -> str:
    """The type of a value or of a tensor."""
    types = [*TensorProto.DataType.values(), 99, -1]
    values = [v for v in (*model.graph.input, *model.graph.output) if v.type.HasField("tensor_type")]
    chosen: Any = choice.choice([*values, *_tensors(model)] or [model.graph.initializer.add()])
    new = choice.choice(types)
    if isinstance(chosen, TensorProto):
        chosen.data_type = new
    elif choice.random() < 0.15:
        kinds = ("sequence_type", "optional_type", "map_type", "sparse_tensor_type")
        getattr(chosen.type, choice.choice(kinds)).SetInParent()
    else:
        chosen.type.tensor_type.elem_type = new
    return f"{chosen.name:.30}: type {new}"


def _tensors(model: Model) -> list[TensorProto]:
    attributes = [a for graph in _graphs(model) for node in graph.node for a in node.attribute]
    inside = [t for graph in _graphs(model) for t in getattr(graph, "initializer", ())]
    return [*inside, *(a.t for a in attributes if a.HasField("t"))]


def _spoil(choice: random.Random, tensor: TensorProto) -> str:
    match choice.randrange(4):
        case 0:
            tensor.raw_data = tensor.raw_data[: choice.randrange(len(tensor.raw_data) + 1)]
            return f"{len(tensor.raw_data)} bytes left"
        case 1 if tensor.dims:
            tensor.dims[choice.randrange(len(tensor.dims))] = choice.choice(DIMS)
            return f"dims {list(tensor.dims)}"
        case 2 if tensor.data_type == TensorProto.INT64 and len(tensor.raw_data) >= 8:
            content = choice.choice(INTEGERS)
            tensor.raw_data = content.to_bytes(8, "little", signed=True) + tensor.raw_data[8:]
            return f"first element {content}"
        case _:
            return _external(choice, tensor)


def _external(choice: random.Random, tensor: TensorProto) -> str:
    """Refer to a file that is none of the model's."""
    for name in ("raw_data", "float_data", "int32_data", "int64_data"):
        tensor.ClearField(name)
    tensor.data_location = TensorProto.EXTERNAL
    location = choice.choice(LOCATIONS)
    tensor.external_data.add(key="location", value=location)
    for key in choice.sample(["offset", "length"], choice.choice([0, 0, 0, 1, 2])):
        tensor.external_data.add(key=key, value=str(choice.choice([0, 8, 64, *INTEGERS, "x"])))
    return f"external data at {location!r}"


def tensors(choice: random.Random, model: Model) -> str:
    """Content cut, of another size, or in another file."""
    found = _tensors(model)
    return _spoil(choice, choice.choice(found)) if found else constant(choice, model)


def constant(choice: random.Random, model: Model) -> str:
    """An input becomes an initializer or a Constant: sizes that shape folding evaluates."""
    node = _node(choice, model)
    if not node.input:
        return "nothing"
    index, name = choice.randrange(len(node.input)), f"constant{choice.randrange(99)}"
    content = [choice.choice(INTEGERS) for _ in range(choice.choice([0, 1, 1, 2, 4]))]
    kind = choice.choice([TensorProto.INT64, TensorProto.INT64, TensorProto.FLOAT, TensorProto.INT32])
    if kind == TensorProto.INT32:
        content = [min(max(c, -(2**31)), 2**31 - 1) for c in content]
    shape = [] if len(content) == 1 and choice.random() < 0.5 else [len(content)]
    tensor = helper.make_tensor(name, kind, shape, content)
    if choice.random() < 0.5:
        model.graph.initializer.append(tensor)
    else:
        model.graph.node.insert(0, helper.make_node("Constant", [], [name], value=tensor))
    node.input[index] = name
    return f"{node.op_type}: input {index} is {content}"


def names(choice: random.Random, model: Model) -> str:
    """A value, a node or the graph gets a name that breaks lines, or is another's; everywhere it stands."""
    new = text(choice, [node.name for node in model.graph.node if node.name])
    if choice.random() < 0.3:
        owner = choice.choice([model.graph, *model.graph.node])
        owner.name = new
        return f"named {new[:30]!r}"
    old = choice.choice(_values(model) or ["x"])
    for graph in _graphs(model):
        for value in (*graph.input, *graph.output, *getattr(graph, "initializer", ()), *graph.value_info):
            if not isinstance(value, str) and value.name == old:
                value.name = new
        for node in graph.node:
            for ends_of in (node.input, node.output):
                ends_of[:] = [new if name == old else name for name in ends_of]
    return f"{old[:30]!r} is {new[:30]!r} everywhere"


def nodes(choice: random.Random, model: Model) -> str:
    """Nodes deleted, repeated, or in another order."""
    listed = list(model.graph.node)
    action = choice.choice(["delete", "repeat", "shuffle", "reverse", "delete all"])
    if not listed:
        return "nothing"
    index = choice.randrange(len(listed))
    changed = {
        "delete": [*listed[:index], *listed[index + 1 :]],
        "repeat": [*listed, listed[index]],
        "shuffle": choice.sample(listed, len(listed)),
        "reverse": listed[::-1],
        "delete all": [],
    }[action]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in changed]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return f"nodes: {action} {index}"


def _is_deep(node: onnx.NodeProto) -> bool:
    """Whether there are subgraphs in it: a message may be 100 messages deep."""
    return any(a.HasField("g") for a in node.attribute)


def subgraph(choice: random.Random, model: Model) -> str:
    """A node goes into a branch of If or the body of a Loop, or many branches deep."""
    if not model.graph.node:
        return "nothing"
    index = choice.randrange(len(model.graph.node))
    node = onnx.NodeProto.FromString(model.graph.node[index].SerializeToString())
    ends_of = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    depth = 1 if _is_deep(node) else choice.choice([1, 1, 1, 2, 12, 28])
    constants = [helper.make_node("Constant", [], [end.name], value_float=1.0) for end in ends_of]
    for _ in range(depth):
        branch = helper.make_graph([node], text(choice, ["then", "else"]), [], ends_of)
        other = branch if depth == 1 else helper.make_graph(constants, "else", [], ends_of)
        node = helper.make_node("If", ["#condition"], [v.name for v in ends_of], then_branch=branch, else_branch=other)
    model.graph.initializer.append(helper.make_tensor("#condition", TensorProto.BOOL, [], [choice.random() < 0.5]))
    model.graph.node[index].CopyFrom(node)
    return f"node {index} inside {depth} If"


def function(choice: random.Random, model: Model) -> str:
    """A node is called through a function, in whose body a Constant may lie in another file, or which calls itself."""
    node = _node(choice, model)
    reads, writes = [n for n in node.input if n], [n for n in node.output if n]
    body = [onnx.NodeProto.FromString(node.SerializeToString())]
    action = choice.choice(["plain", "external", "external", "external", "itself", "missing", "reference"])
    if action == "external" and writes:
        ends_of = [v for v in model.graph.output if v.name == writes[0]]
        kind = ends_of[0].type.tensor_type if ends_of else onnx.TypeProto.Tensor(elem_type=TensorProto.FLOAT)
        dims_of = [dim.dim_value for dim in kind.shape.dim] if ends_of else [4]
        tensor = TensorProto(data_type=kind.elem_type, dims=dims_of, name="t")
        note = _external(choice, tensor)
        body = [helper.make_node("Constant", [], [writes[0]], value=tensor)]
        action = f"external ({note})"
    elif action == "itself":
        body = [helper.make_node("Called", reads, writes, domain="fuzz")]
    elif action == "reference" and node.attribute:
        del body[0].attribute[:]
        body[0].attribute.add(name=node.attribute[0].name, type=node.attribute[0].type, ref_attr_name="no such")
    if action != "missing":
        opsets = [onnx.OperatorSetIdProto.FromString(o.SerializeToString()) for o in model.opset_import]
        model.functions.append(helper.make_function("fuzz", "Called", reads, writes, body, opsets))
    model.opset_import.add(domain="fuzz", version=1)
    node.CopyFrom(helper.make_node("Called", reads, writes, domain="fuzz"))
    return f"a function: {action}"


def metadata(choice: random.Random, model: Model) -> str:
    """Garbage where memonger, or PyTorch's exporter, writes what it knows."""
    keys = ("memonger.plan", "memonger.training", "memonger.forward", "memonger.parameters", "mirror_stage")
    marks = ("force_mirroring", "mirror_stage", "pkg.torch.onnx.name_scopes", "memonger.origin")
    key, content = (
        choice.choice(keys),
        choice.choice(["", "{}", "[]", "null", "\0", '{"format":1}', "[[" * 9000, "7", "True"]),
    )
    owner = choice.choice([model, model.graph, *model.graph.node, *model.graph.initializer])
    owner.metadata_props.add(key=key if owner is model else choice.choice(marks), value=content)
    return f"metadata {owner.metadata_props[-1].key}={content[:20]!r}"


CHANGES: tuple[Change, ...] = (
    attribute, attribute, dims, dims, wires, ends, operator, versions, dtypes, tensors, tensors, constant, names, nodes,
    subgraph, function, metadata,
)  # fmt: skip


def change(choice: random.Random, model: Model) -> tuple[bytes, str]:
    """Change a model one to three times, in place; one in twelve also byte by byte.

    Returns: the file's bytes, and what was changed.
    """
    said = [choice.choice(CHANGES)(choice, model) for _ in range(choice.choice([1, 1, 2, 3]))]
    data = model.SerializeToString()
    if choice.random() < 1 / 12:
        data, note = spoil_bytes(choice, data)
        said.append(note)
    return data, "; ".join(said)


def spoil_bytes(choice: random.Random, data: bytes) -> tuple[bytes, str]:
    """Bits flipped, the end cut off, or something put in."""
    content = bytearray(data)
    match choice.randrange(5):
        case 0:
            del content[choice.randrange(len(content) + 1) :]
            return bytes(content), f"cut to {len(content)} bytes"
        case 1:
            at = choice.randrange(len(content) + 1)
            content[at:at] = choice.randbytes(choice.choice([1, 8, 64]))
            return bytes(content), f"bytes put in at {at}"
        case _:
            places = [choice.randrange(len(content)) for _ in range(choice.choice([1, 1, 4]))] if content else []
            for at in places:
                content[at] ^= 1 << choice.randrange(8)
            return bytes(content), f"bits flipped at {places}"
