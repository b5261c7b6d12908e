"""Shapes of the operators of classical learners and of text: ai.onnx.ml, and what counts words."""

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
        return ((*rows, shapes[1][-1]),)

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
