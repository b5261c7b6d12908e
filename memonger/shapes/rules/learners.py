"""Shapes of classical learners and of text, of Fourier transforms, windows, and what is made of spectra."""

import math
from collections.abc import Sequence
from typing import Any

from memonger.shapes.rules.pointwise import broadcast
from memonger.shapes.shaping import Compute, NoRuleError, Shape, Site, shape_rule, shape_rules

_ML = "ai.onnx.ml::"


def _rows(shape: Shape) -> int:
    return shape[0] if len(shape) > 1 else 1


@shape_rule(_ML + "LinearClassifier", _ML + "SVMClassifier", _ML + "TreeEnsembleClassifier")
def _classifier(site: Site) -> Compute:
    """A label for each row, and a score for each class."""
    labels = site.count("classlabels_ints", "classlabels_int64s", "classlabels_strings")
    declared = site.declared[1] if site.outputs > 1 else ()
    classes = declared[1] if len(declared) > 1 and declared[1] is not None else labels
    if site.op_type == "SVMClassifier" and not site.count("prob_a") and classes != labels:
        raise NoRuleError("votes in place of probabilities")
    if not classes and site.outputs > 1:
        raise NoRuleError("no labels")
    return lambda shapes, _: ((_rows(shapes[0]),), (_rows(shapes[0]), classes))[: site.outputs]


@shape_rule(_ML + "LinearRegressor", _ML + "SVMRegressor", _ML + "TreeEnsemble", _ML + "TreeEnsembleRegressor")
def _regressor(site: Site) -> Compute:
    targets = 1 if site.op_type == "SVMRegressor" else site.integer("n_targets", site.integer("targets", 1))
    return lambda shapes, _: ((_rows(shapes[0]), targets),)


@shape_rule(_ML + "OneHotEncoder")
def _one_hot_encoder(site: Site) -> Compute:
    categories = site.count("cats_int64s", "cats_strings")
    return lambda shapes, _: ((*shapes[0], categories),)


@shape_rule(_ML + "FeatureVectorizer")
def _feature_vectorizer(site: Site) -> Compute:
    widths = sum(site.integers("inputdimensions") or ())
    return lambda shapes, _: ((_rows(shapes[0]), widths),)


@shape_rule(_ML + "ArrayFeatureExtractor")
def _array_feature_extractor(_: Site) -> Compute:
    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        rows = shapes[0][:-1] if len(shapes[0]) > 1 else (1,)
        return ((*rows, math.prod(shapes[1])),)

    return compute


@shape_rule("TfIdfVectorizer")
def _tf_idf(site: Site) -> Compute:
    columns = max(site.integers("ngram_indexes") or (0,)) + 1
    return lambda shapes, _: ((*shapes[0][:-1], columns),)


shape_rules({
    "ai.onnx.ml::Binarizer ai.onnx.ml::CategoryMapper ai.onnx.ml::Imputer ai.onnx.ml::LabelEncoder "
    "ai.onnx.ml::Normalizer ai.onnx.ml::Scaler RegexFullMatch": lambda shapes, _: shapes[:1],
    "StringConcat": lambda shapes, _: (broadcast(*shapes),),
})  # fmt: skip


@shape_rule("DFT")
def _dft(site: Site) -> Compute:
    one_sided, inverse = site.integer("onesided", 0), site.integer("inverse", 0)
    fixed = site.integer("axis", 1) if site.opset < 20 else -2

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        shape, (length, axis) = list(shapes[0]), (*contents[1:3], None, None)[:2]
        at = (fixed if axis is None else axis.item()) % len(shape)
        is_one_sided_inverse = one_sided and inverse
        shape[at] = length.item() if length is not None else 2 * (shape[at] - 1) if is_one_sided_inverse else shape[at]
        if one_sided and not inverse:
            shape[at] = shape[at] // 2 + 1
        shape[-1] = 1 if is_one_sided_inverse else 2
        return (tuple(shape),)

    return compute


@shape_rule("STFT")
def _stft(site: Site) -> Compute:
    one_sided = site.integer("onesided", 1)

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        batch, length = shapes[0][:2]
        if len(contents) > 3 and contents[3] is not None:
            frame = contents[3].item()
        else:
            frame = shapes[2][0] if site.has(2) else length
        windows = (length - frame) // contents[1].item() + 1
        return ((batch, windows, frame // 2 + 1 if one_sided else frame, 2),)

    return compute


@shape_rule("com.microsoft::Rfft", "com.microsoft::Irfft")
def _real_transform(site: Site) -> Compute:
    if site.integer("signal_ndim", 1) != 1 or not site.integer("onesided", 1):
        raise NoRuleError("more than one axis, or both sides")
    if site.op_type == "Rfft":
        return lambda shapes, _: ((*shapes[0][:-1], shapes[0][-1] // 2 + 1, 2),)
    return lambda shapes, _: ((*shapes[0][:-2], 2 * (shapes[0][-2] - 1)),)


shape_rules({
    "BlackmanWindow HammingWindow HannWindow": lambda _, contents: ((contents[0].item(),),),
    "MelWeightMatrix": lambda _, contents: ((contents[1].item() // 2 + 1, contents[0].item()),),
})  # fmt: skip
