"""Static shapes by ONNX's own inference, with shape arithmetic folded; sizes that constants decide, or only a run.

ONNX knows no types of onnxruntime's own operators, of which quantized models are made (``QLinearAdd``, ``QGemm``,
``MatMulNBits``), nor some of ai.onnx.ml, and what stands behind one would have no type either: `OPERATORS` has them
from onnxruntime's schemas. Shapes are by `memonger.shapes.rules`.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir

from memonger.errors import LoadError, PlanError
from memonger.ir import checks, onnx_process
from memonger.ir.checks import PLAIN, root_cause
from memonger.ir.model import Model
from memonger.ir.operators import facts, operator_name
from memonger.ir.tensors import in_memory
from memonger.ir.values import (
    INFERENCE_ERRORS,
    SMALL,
    add_initializer,
    all_values,
    dense,
    graphs,
    input_at,
    static_shape,
    subgraphs,
    tensor_shape,
)
from memonger.ir.windows import windows_of
from memonger.shapes.sizes import Sizes

LONG = 1 << 20
"""Inference goes element by element through the content of vectors: longer ones take more memory than they should."""


def forget_symbolic(model: ir.Model) -> None:
    """Drop every shape with a symbolic dimension: inference fills it in anew from the inputs' sizes."""
    for graph in graphs(model):
        for node in graph:
            for value in node.outputs:
                if value.shape is not None and static_shape(value) is None:
                    value.shape = None


def infer_shapes(model: Model) -> bool:
    """A pass: values have every type and shape that ONNX's own inference can tell; shape arithmetic is folded.

    What a file declares of values in between is often stale: the shapes of the batch it was exported with. It counts
    only for sizes that inference can't tell from the inputs, and in bodies of ``If``, ``Loop`` and ``Scan`` not at all,
    but for what a ``Scan``'s body returns.

    Raises:
        LoadError: shapes or types that contradict each other, with the node that shows it, or that can't be.
    """
    ranks = {value: len(value.shape) for value in model.graph.outputs if value.shape is not None}
    of_scans = [
        (value, ir.Shape([dim if isinstance(dim, int) else None for dim in value.shape]))
        for node in model.ir.graph.all_nodes()
        if node.op_type == "Scan"
        for body in subgraphs(node)
        for value in body.outputs
        if value.shape is not None
    ]
    nodes, was_unknown = len(model.graph), _has_unknown(model.graph)
    forget_symbolic(model.ir)
    declared = _forget_declared(model.graph)
    for body in graphs(model.ir):
        _forget_declared(body)
    complaint = _infer_and_fold(model)
    if _has_unknown(model.graph) and _restore(model.ir, declared):
        complaint = _infer_and_fold(model)
    if complaint is not None and _has_unknown(model.graph):
        raise LoadError(_contradiction(model.name, complaint)) from complaint
    for value in model.graph.outputs:  # onnx's checker wants their ranks
        if value.shape is None and value in ranks:
            value.shape = ir.Shape([None] * ranks[value])
    for value, shape in of_scans:  # onnxruntime doesn't run a Scan without
        if value.shape is None:
            value.shape = shape
    checks.check_sizes(model)
    is_other = any(value.shape is None or value.shape.dims != shape.dims for value, shape in declared.items())
    return was_unknown or is_other or len(model.graph) != nodes


def _infer_and_fold(model: Model) -> Exception | None:
    complaint = infer_types(model)
    while fold_shape_arithmetic(model.ir) and _has_unknown(model.graph):
        complaint = infer_once(model)
    return complaint


def infer_types(model: Model) -> Exception | None:
    """ONNX's own inference as `infer_once`, with the types that it doesn't know."""
    complete_types(model.graph, _UNINFERRED)
    complaint = infer_once(model)
    while complete_types(model.graph, ("", *_UNINFERRED)):
        complaint = infer_once(model)
    return complaint


def _forget_declared(graph: ir.Graph) -> dict[ir.Value, ir.Shape]:
    """Shapes that the file declares. A 0 says nothing: some exporters write it where they didn't know the size."""
    declared = {}
    for value in (v for node in graph for v in node.outputs):
        if value.shape is not None and dense(value):
            shape, value.shape = value.shape, None
            if 0 not in shape.dims:
                declared[value] = shape
    return declared


def _restore(model: ir.Model, declared: dict[ir.Value, ir.Shape]) -> bool:
    """Give declared sizes back to values that are still without one, those that only the run can tell left out.

    Where a size depends on a default that callers may override, the declaration means that none of them does.
    """
    dynamic = run_time_sized(model, overridden=False)
    fitting = [v for v, shape in declared.items() if static_shape(v) is None and _fits(shape, v.shape)]
    restored = [value for value in fitting if value not in dynamic]
    for value in restored:
        value.shape = declared[value]
    return bool(restored)


def _fits(declared: ir.Shape, inferred: ir.Shape | None) -> bool:
    if inferred is None:
        return True
    pairs = zip(declared, inferred, strict=False)
    return len(declared) == len(inferred) and all(not isinstance(known, int) or known == dim for dim, known in pairs)


def _has_unknown(graph: ir.Graph) -> bool:
    return any(dense(v) and static_shape(v) is None for v in all_values(graph)) or any(
        v.type is None for v in all_values(graph) if v.name
    )


def infer_once(model: Model) -> Exception | None:
    """ONNX's own inference alone: types and shapes are filled in, nodes stay as they are.

    Returns: what its strict mode says of anything but the model's nodes, if it does: it can't read the bodies of some
        old operators that ONNX defines as functions. That matters only where a size stays unknown.

    Raises:
        LoadError: shapes or types that contradict each other.
    """
    try:
        skeleton = _skeleton(model.ir)
    except SERIALIZING_ERRORS as error:
        raise LoadError(f"{model.name} is not a valid ONNX model: {root_cause(error)}.") from error
    onnx_infer: Callable[..., onnx.ModelProto] = onnx.shape_inference.infer_shapes
    if model.foreign and not _is_plain(model.ir):  # it could end this process
        onnx_infer = partial(onnx_process.call, "infer_shapes")
    # At most how many elements a vector has whose content inference follows: joined vectors make longer ones
    lengths = {v: 1 if v.const_value is None else v.const_value.size for v in model.graph.initializers.values()}
    lengths = {value: size for value, size in lengths.items() if size <= SMALL}
    longest = 0
    for node in model.graph:
        inputs = [lengths.get(value, 1) for value in node.inputs if value is not None]
        most = (sum(inputs) if node.op_type == "Concat" else max(inputs)) if inputs else 1
        longest = max(longest, most)
        lengths.update(dict.fromkeys(node.outputs, most))
    follows = longest <= LONG
    complaint: Exception | None = None
    try:
        inferred = onnx_infer(skeleton, strict_mode=True, data_prop=follows)
    except INFERENCE_ERRORS:
        try:  # of shapes alone: where it follows values it complains of models that are right
            onnx_infer(skeleton, strict_mode=True)
        except INFERENCE_ERRORS as error:
            complaint = error
        if complaint is not None and _COMPLAINT.search(str(complaint)):
            raise LoadError(_contradiction(model.name, complaint)) from complaint
        try:
            inferred = onnx_infer(skeleton, data_prop=follows)
        except INFERENCE_ERRORS as error:
            raise LoadError(_contradiction(model.name, error)) from error
    info_of = {info.name: info for info in (*inferred.graph.value_info, *inferred.graph.output)}
    for value in (value for node in model.graph for value in node.outputs):
        info = info_of.get(value.name or "")
        fresh = None if info is None else ir.serde.deserialize_value_info_proto(info, None)
        if fresh is not None and fresh.type is not None:
            value.type = fresh.type
        if fresh is not None and fresh.shape is not None and static_shape(value) is None:
            value.shape = fresh.shape
    return complaint


def _is_plain(model: ir.Model) -> bool:
    """Whether inference can do no harm: none but well-known operators, and no vectors that are followed for long."""
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        dims = static_shape(value) or ()
        followed = value.dtype is None or (value.dtype.is_integer() and math.prod(dims) > SMALL)
        if followed or max(dims, default=0) > LONG:
            return False
    return all(node.domain == "" and node.op_type in PLAIN for node in model.graph)


SERIALIZING_ERRORS = (ir.serde.SerdeError, ValueError, TypeError)

# How onnx writes a complaint about a node of the model; one about a function's body has another list in place of text,
# and one about an input without a type is for `complete_types`: what writes it may have no inference of its own.
_HEAD = "[ShapeInferenceError] Inference error(s): "

_UNTYPED = r"Input \d+ expected to have type but instead is null"

_COMPLAINT = re.compile(
    rf"^(?:{re.escape(_HEAD)})?\(op_type:[^)]*\): (?!\[\w+\] (?:Inference error|{_UNTYPED}))", re.MULTILINE
)


def _contradiction(name: str, complaint: Exception) -> str:
    """The first of onnx's complaints, on one line."""
    if isinstance(complaint, onnx_process.DiedError):
        return f"{name} can't be read: {complaint}, as shapes below zero or an input left out would make it."
    lines = str(complaint).strip().removeprefix(_HEAD).splitlines()
    return f"{name}: its shapes or types contradict each other: {lines[0].rstrip('.') if lines else complaint!r}."


def _skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto, with its big initializers as inputs: their data is never touched."""
    graph = model.graph
    big = [v for v in graph.initializers.values() if v.const_value is None or v.const_value.size > SMALL]
    inputs = len(graph.inputs)
    tensors = [value.const_value for value in big]
    order = list(graph.initializers.values())
    outside = {value: value.const_value for value in order if isinstance(value.const_value, ir.ExternalTensor)}
    try:
        for value in outside.keys() - set(big):
            value.const_value = in_memory(outside[value])  # inference reads no files
        for value, tensor in zip(big, tensors, strict=True):
            if tensor is not None:
                value.shape, value.dtype = tensor_shape(tensor), tensor.dtype
            del graph.initializers[str(value.name)]
            if not value.is_graph_input():
                graph.inputs.append(value)
        proto = ir.serde.serialize_model(model)
        for node in proto.graph.node:
            if node.op_type == "SimplifiedLayerNormalization" and not node.domain:
                node.op_type = "LayerNormalization"  # onnx has no other; shapes are as this one's
        _correct(proto.graph, model)
        return proto
    finally:
        while len(graph.inputs) > inputs:
            graph.inputs.pop()  # deleting a slice would leave the values marked as inputs
        graph.initializers.clear()
        for value, tensor in outside.items():
            value.const_value = tensor
        for value in order:
            graph.initializers[str(value.name)] = value


def _is_misjudged(node: ir.Node) -> bool:
    """Whether ONNX's own inference gives an operator's output a wrong size.

    It takes `STFT` without the attribute as two-sided; it counts a window of pooling that begins behind the image,
    which nobody computes, those of dilated windows with padding that onnxruntime finds otherwise, and rows that a
    transposed convolution adds to the size that it was asked for.
    """
    if operator_name(node) == "STFT":
        return "onesided" not in node.attributes
    is_same = node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME")
    if operator_name(node) == "ConvTranspose":
        return is_same and any(node.attributes.get_ints("output_padding") or ())
    is_dilated = any(each > 1 for each in node.attributes.get_ints("dilations") or ())
    is_pool = operator_name(node) in ("AveragePool", "LpPool", "MaxPool")
    return is_pool and (node.attributes.get_int("ceil_mode", 0) == 1 or (is_same and is_dilated))


def tell_sizes(model: ir.Model) -> bool:
    """Write nodes so that ONNX's inference gives their outputs' sizes, too. Returns whether there were any.

    onnxruntime makes room for what branches and bodies of loops give by that inference, and refuses another size.

    Args:
        model: With static shapes. Changed.

    Raises:
        PlanError: nothing says the size of a pool's output.
    """
    opset = model.graph.opset_imports.get("") or 1
    wrong = [node for node in model.graph if _is_misjudged(node) and _inferred_alone(node, opset) != _shapes(node)[1]]
    for node in wrong:
        image, result = _shapes(node)
        kernel = node.attributes.get_ints("kernel_shape") or ()
        if node.op_type == "STFT":
            told: dict[str, int | list[int]] = {"onesided": 1}  # as if it were left out
        elif node.op_type == "ConvTranspose":
            weight = (node.inputs[1] and static_shape(node.inputs[1])) or ()
            at = windows_of(node, result[2:], image[2:], weight[2:], up=True)
            told = {"pads": [*at.begin, *at.end]}
        else:
            at = windows_of(node, image[2:], result[2:], kernel)
            is_rounded, is_counted = (
                node.attributes.get_int(name, 0) > 0 for name in ("ceil_mode", "count_include_pad")
            )
            try:
                told = at.padding(is_pool=True, rounded=is_rounded, counted=is_counted)
            except ValueError as error:
                raise PlanError(
                    f"node '{node.name}' ({node.op_type}): {error}, as onnxruntime computes them: export the model "
                    "with other 'pads', without 'ceil_mode' or 'auto_pad'."
                ) from error
        for name in ("auto_pad", "ceil_mode"):
            node.attributes.pop(name, None)
        node.attributes.update({each.name: each for each in ir.convenience.convert_attributes(told)})
    return bool(wrong)


def _shapes(node: ir.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those of a node's first input and output; nothing where they aren't known."""
    read, made = node.inputs[0], node.outputs[0]
    return (static_shape(read) if read is not None else None) or (), static_shape(made) or ()


def _inferred_alone(node: ir.Node, opset: int) -> tuple[int, ...]:
    """The shape of a node's first output by ONNX's inference; nothing where it can't tell."""
    types = {str(v.name): ir.serde.serialize_value(v).type for v in node.inputs if v is not None and v.type is not None}
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    proto = ir.serde.serialize_node(node)
    made = onnx.shape_inference.infer_node_outputs(schema, proto, types)[proto.output[0]]
    return tuple(dim.dim_value for dim in made.tensor_type.shape.dim)


def _correct(skeleton: onnx.GraphProto, model: ir.Model) -> None:
    """Give operators that ONNX's inference misjudges the sizes of our own rules, or none where those can't tell it:
    a `Reshape` stands for each, which has its input's type.
    """
    wrong = {str(node.outputs[0].name) for node in model.graph if _is_misjudged(node)}
    if not wrong:
        return
    described = {str(v.name): shape for v in all_values(model.graph) if (shape := static_shape(v)) is not None}
    try:
        shapes, _ = Sizes(model).as_far_as_known(described)
    except PlanError:
        return  # malformed attributes: whoever runs the node says so
    nodes = list(skeleton.node)
    del skeleton.node[:]
    for proto in nodes:
        if not proto.output or proto.output[0] not in wrong:
            skeleton.node.append(proto)
            continue
        shape = shapes.get(proto.output[0])
        size = f"{proto.output[0]}.size"
        if shape is None:
            skeleton.input.append(onnx.helper.make_tensor_value_info(size, onnx.TensorProto.INT64, None))
        else:
            skeleton.initializer.append(onnx.helper.make_tensor(size, onnx.TensorProto.INT64, [len(shape)], shape))
        skeleton.node.add(op_type="Reshape", input=[proto.input[0], size], output=proto.output[:1])
        for indices in proto.output[1:]:
            as_integers = skeleton.node.add(op_type="Cast", input=proto.output[:1], output=[indices])
            as_integers.attribute.append(onnx.helper.make_attribute("to", onnx.TensorProto.INT64))


def input_independent(model: ir.Model, *, overridden: bool = True) -> set[ir.Value]:
    """Values that are the same whatever the inputs hold: constants, static shapes, and what is computed from them.

    ``overridden``: whether callers may override initializers that are inputs as well.
    """
    fixed = {v for v in model.graph.initializers.values() if not (overridden and v.is_graph_input())}
    for node in model.graph:
        if facts(node).random or subgraphs(node):
            continue
        first = node.inputs[0] if facts(node).shape_only else None
        if (first is not None and static_shape(first) is not None) or all(v is None or v in fixed for v in node.inputs):
            fixed.update(node.outputs)
    return fixed


def give_sizes(model: ir.Model) -> None:
    """Give values of a known type the sizes that rules tell of the inputs' sizes, where they have none."""
    before, lacking = math.inf, _lacking(model.graph)
    while 0 < len(lacking) < before:  # rules may read what is fixed of the shapes that others gave
        before = len(lacking)
        _give_sizes(model, lacking)
        lacking = _lacking(model.graph)


def _lacking(graph: ir.Graph) -> list[ir.Value]:
    return [value for value in all_values(graph) if value.name and dense(value) and static_shape(value) is None]


def _give_sizes(model: ir.Model, lacking: Sequence[ir.Value]) -> Mapping[str, np.ndarray]:
    """The same for some values. Returns: what the sizes alone decide the content of."""
    described = {str(v.name): shape for v in all_values(model.graph) if (shape := static_shape(v)) is not None}
    try:
        shapes, contents = Sizes(model, contents_alone=not lacking).as_far_as_known(described)
    except PlanError:
        return {}  # malformed attributes: whoever runs the node says so
    for value in lacking:
        if (shape := shapes.get(str(value.name))) is not None:
            value.shape = ir.Shape(list(shape))
    return contents


def fold_shape_arithmetic(model: ir.Model) -> bool:
    """Give values the shapes that rules tell; where the content of an input decides the size of an output, make that
    content an initializer.

    This is done where constants and static shapes decide the content, and it is integers or booleans. Other readers of
    the same values are left as they are: onnxruntime accepts fewer models whose conditions have become constants.

    Returns: whether anything was folded.
    """
    graph, known = model.graph, set(model.graph.initializers.values())
    lacking = _lacking(graph)
    deciding = [
        (node, place, value)
        for node in graph.all_nodes()
        for place in facts(node).sized_by
        if place < len(node.inputs) and (value := node.inputs[place]) is not None and value not in known
        if node.domain == "" and (writer := value.producer()) is not None and writer.graph is graph
    ]
    if not lacking and not deciding:
        return False
    contents = _give_sizes(model, lacking)
    made: dict[ir.Value, ir.Value] = {}
    names = {str(value.name) for value in all_values(graph)}
    for node, place, value in deciding:
        content = contents.get(str(value.name))
        if content is None or content.dtype.kind not in "iub":
            continue
        if value not in made:
            name = next(name for k in itertools.count() if (name := f"{value.name}.constant{k or ''}") not in names)
            names.add(name)
            made[value] = add_initializer(graph, name, content)
        node.replace_input_with(place, made[value])
    outputs = set(graph.outputs)
    for node in reversed(graph):
        is_computed = bool(node.outputs) and node.outputs[0].name in contents
        if is_computed and not any(value.uses() or value in outputs for value in node.outputs):
            graph.remove(node, safe=True)
    return bool(made)


def run_time_sized(model: ir.Model, *, overridden: bool = True) -> set[ir.Value]:
    """Values whose size only a run can tell: it depends on what the inputs hold, or on another such value.

    ``overridden``: as for `input_independent`.
    """
    dynamic: set[ir.Value] = set()
    open_nodes = [n for n in model.graph if any(static_shape(v) is None for v in n.outputs if v.name)]
    independent = input_independent(model, overridden=overridden) if open_nodes else set()
    for node in open_nodes:
        given = [value for value in node.inputs if value is not None]
        deciding = (node.inputs[place] for place in facts(node).sized_by if place < len(node.inputs))
        decides = (
            facts(node).sized_at_run_time
            or bool(subgraphs(node))
            or any(value.type is not None and not dense(value) for value in (*given, *node.outputs))
            or any(value is not None and value not in independent for value in deciding)
        )
        if decides or any(value in dynamic for value in given):
            anyway = _handed_on(node) or (facts(node).sized_anyway if dynamic.isdisjoint(given) else ())
            dynamic.update(v for at, v in enumerate(node.outputs) if static_shape(v) is None and at not in anyway)
    return dynamic


def _handed_on(node: ir.Node) -> frozenset[int]:
    """Outputs of a Loop that are as its inputs were, of a known size: its body returns what it is given."""
    if node.op_type != "Loop" or node.domain:
        return frozenset()
    body = node.attributes["body"].as_graph()
    return frozenset(
        at
        for at, given in enumerate(node.inputs[2:])
        if body.outputs[1 + at] is body.inputs[2 + at] and given is not None and static_shape(given) is not None
    )


_FLOAT, _INT32 = ir.DataType.FLOAT, ir.DataType.INT32
_BOOL, _INT64 = ir.DataType.BOOL, ir.DataType.INT64

Source = int | ir.DataType | tuple[int, ir.DataType]

_LIKE_FIRST = """
    Attention AttnLSTM BiasAdd BiasGelu BiasSoftmax BiasSplitGelu BifurcationDetector BranchwiseRMSNorm
    CDist CausalConvWithState ComplexMul ComplexMulConj ConvStateReplay ConvTransposeWithDynamicPads
    DecoderAttention DecoderMaskedSelfAttention DynamicQuantizeLSTM DynamicQuantizeMatMul EngramGate
    ExpandDims FastGelu FusedConv FusedGemm FusedMatMul FusedMatMulActivation GatedAdd
    GatedDeltaNetStateReplay GatedRMSNorm GatedRelativePositionBias GatherND Gelu GemmFastGelu GroupNorm
    HyperConnectionLowRankMix HyperConnectionPostMix HyperConnectionPreMix Inverse Irfft
    LinearAttentionGate LongformerAttention MRotaryEmbedding MatMulBlockQuantizedFp4Weight
    MatMulBlockQuantizedFp8Weight MatMulBnb4 MatMulFpQ4 MatMulNBits MatMulNBitsMlp MatMulNBitsQLoRA
    MatMulNBitsQkv MatMulPacked MaxpoolWithMask MoE MoEPacked NGramHashMapping NhwcConv NhwcFusedConv
    NhwcMaxPool PackedAttention PackedMultiHeadAttention PackedSparseAttentionIndexerMerge Pad
    QLinearAdd QLinearAveragePool QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearReduceMean
    QLinearSigmoid QLinearSoftmax QMoE QOrderedAttention QOrderedGelu QOrderedLayerNormalization
    QOrderedLongformerAttention QOrderedMatMul QuickGelu Range RelativePositionBias RestorePadding Rfft
    RotaryEmbedding RouterGateUpProj ScaledSiLU SkipGroupNorm SparseAttention SwiGLU Tokenizer
    TorchEmbedding TransposeMatMul Trilu UnfoldTensor VarlenCausalConvWithState
"""
"""Operators all of whose outputs have the type of their first input."""

OPERATORS: Mapping[str, tuple[Source, ...]] = {
    "BiasDropout": (0, _BOOL),
    "BitmaskBiasDropout": (0, ir.DataType.UINT32),
    "BitmaskDropout": (0, ir.DataType.UINT32),
    "DequantizeLinear": (1,),
    "EmbedLayerNormalization": (2, 0, 2),
    "GatherBlockQuantized": (2,),
    "CropAndResize": (0,),
    "DecoderMaskedMultiHeadAttention": (0, 0, 0),
    "DynamicTimeWarping": (_INT32,),
    "GreedySearch": (_INT32,),
    "GridSample": (0,),
    "GroupQueryAttention": (0, (3, _FLOAT), (4, _FLOAT), 0),
    "IsAllFinite": (_BOOL,),
    "MatMulIntegerToFloat": (2,),
    "MatMulInteger16": (_INT32,),
    "MulInteger": (_INT32,),
    "NGramRepeatBlock": (1,),
    "PagedAttention": (0, 3, 4),
    "QAttention": (3, 3),
    "QEmbedLayerNormalization": (8, 0),
    "QGemm": ((8, _FLOAT),),
    "QLinearConcat": (1,),
    "QLinearConv": (7,),
    "QLinearWhere": (1,),
    "QuantizeLinear": ((2, ir.DataType.UINT8),),
    "RemovePadding": (0, 1, 1, 1),
    "SkipLayerNormalization": (0, _FLOAT, _FLOAT, 0),
    "SkipSimplifiedLayerNormalization": (0, _FLOAT, _FLOAT, 0),
    "SparseToDenseMatMul": (1,),
    "Unique": (0, _INT64, _INT64),
    "WordConvEmbedding": (1,),
    "BeamSearch": (1, 5, 5),
    "LinearAttention": (0, 3),
    "MultiHeadAttention": (0, 0, 0),
    **dict.fromkeys(_LIKE_FIRST.split(), (0,)),
}  # fmt: skip
"""For each output the input that it has the type of, and what it is where that isn't there. One entry alone is for all
outputs."""


_UNINFERRED = ("com.microsoft", "com.microsoft.nchwc", "ai.onnx.ml")
"""Domains whose operators ONNX has no inference for, or gives no types to."""


def complete_types(graph: ir.Graph, domains: Sequence[str]) -> bool:
    """Give types to outputs without one of operators of these domains. Returns: whether any were."""
    found = False
    for node in graph:
        if node.domain not in domains:
            continue
        for place, value in enumerate(node.outputs):
            if value.name and value.dtype is None and (dtype := output_type(node, place)) is not None:
                value.type, found = ir.TensorType(dtype), True
    return found


def output_type(node: ir.Node, place: int) -> ir.DataType | None:
    """The type of an output of a node, which ONNX's inference may not know; None where nothing tells it."""
    if node.domain == "":
        # Of a standard operator whose inference leaves an output out, as old versions' do, or that is newer than the
        # model's operator set, as onnxruntime runs some: that of an input that the standard gives the same type.
        if not onnx.defs.has(node.op_type, ""):
            return None
        newest = onnx.defs.get_schema(node.op_type, "")
        opset = node.version if node.version is not None else node.graph.opset_imports.get("") if node.graph else None
        is_known = opset is not None and onnx.defs.has(node.op_type, opset, "")
        schema = onnx.defs.get_schema(node.op_type, opset or 1, "") if is_known else newest
        wanted = schema.outputs[place].type_str if place < len(schema.outputs) else ""
        several = onnx.defs.OpSchema.FormalParameterOption.Variadic
        alike = [
            value
            for value, formal in zip(node.inputs, schema.inputs, strict=False)
            if formal.type_str == wanted and formal.option != several
        ]
        return next((v.dtype for v in alike if v is not None and isinstance(v.type, ir.TensorType)), None)
    if node.domain == "com.microsoft.nchwc":
        return _FLOAT  # as all of that layout
    if node.domain == "ai.onnx.ml":
        # The type of an output of ai.onnx.ml where ONNX infers none: of a classifier a label for each row, and scores.
        if node.op_type == "Imputer":
            return None if node.inputs[0] is None else node.inputs[0].dtype
        is_classifier = node.op_type in ("LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier")
        if node.op_type in _FLOAT_OF_ANY or (is_classifier and place):
            return _FLOAT
        if not is_classifier:
            return None
        labels = node.attributes.get("classlabels_strings")
        return ir.DataType.STRING if labels is not None and labels.as_strings() else _INT64
    if node.op_type == "MurmurHash3":
        return ir.DataType.UINT32 if node.attributes.get_int("positive", 1) else _INT32
    sources = OPERATORS.get(node.op_type, ())
    if not sources or place >= len(sources) > 1:
        return None
    source, instead = sources[place if len(sources) > 1 else 0], None
    if isinstance(source, tuple):
        source, instead = source
    if isinstance(source, ir.DataType):
        return source
    value = input_at(node, source)
    if value is None:
        return instead
    return value.const_value.dtype if value.dtype is None and value.const_value is not None else value.dtype


_FLOAT_OF_ANY = (
    "FeatureVectorizer",
    "LinearRegressor",
    "Normalizer",
    "Scaler",
    "SVMRegressor",
    "TreeEnsembleRegressor",
)
