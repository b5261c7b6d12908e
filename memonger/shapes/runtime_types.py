"""Types that ONNX's inference doesn't know: of onnxruntime's own operators, and of ai.onnx.ml.

Quantized models are made of them (``QLinearAdd``, ``QGemm``, ``MatMulNBits``), and what stands behind one would have no
type either. Types are from onnxruntime's schemas, shapes from `memonger.shapes.rules`.
"""

from collections.abc import Mapping

import onnx_ir as ir

from memonger.ir.values import input_at

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
    "GroupQueryAttention": (0, (3, _FLOAT), (4, _FLOAT), 0),
    "IsAllFinite": (_BOOL,),
    "MatMulIntegerToFloat": (2,),
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


def complete_types(graph: ir.Graph) -> bool:
    """Give types to outputs of onnxruntime's own operators and of ai.onnx.ml without one. Returns: whether any were."""
    found = False
    for node in graph:
        if node.domain not in ("com.microsoft", "ai.onnx.ml"):
            continue
        for place, value in enumerate(node.outputs):
            if value.name and value.dtype is None and (dtype := output_type(node, place)) is not None:
                value.type, found = ir.TensorType(dtype), True
    return found


def output_type(node: ir.Node, place: int) -> ir.DataType | None:
    """The type of an output of a node of ``com.microsoft`` or ``ai.onnx.ml``; None where nothing tells it."""
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
