"""Gradients of a case against finite differences.

A case is differentiated by all floating inputs, with random gradients of the outputs; then for each input ⟨gradient,
direction⟩ is compared with the change of ⟨outputs, their gradients⟩ along a random direction, in float64 where the
operator takes that, else in float32.
"""

import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator

import memonger
from memonger.errors import MemongerError
from memonger.ir.operators import facts_of
from tests.support.node_cases import Case

STEP = {8: 1e-5, 4: 3e-3, 2: 3e-2}  # of the differences, by bytes of an element: their error is about STEP²
TOLERANCE = {8: 1e-6, 4: 2e-2, 2: 5e-2}  # of the largest gradient
Arrays = dict[str, np.ndarray]
AGREED = ("float64", "float32", "float16", "rounded")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case.

    Attributes:
        kind: ``float64``, ``float32``, ``float16``: agreed, in that type; ``rounded``: a cast to fewer than 16 bits,
            whose gradient is that of the number before it; ``refused``, ``wrong``, ``crashed``; or ``none``: it has no
            gradient.
        message: Of what is refused, wrong or has none.
    """

    kind: str
    message: str = ""


def judge(case: Case) -> Verdict:
    """Differentiate a case and compare with finite differences: on either runtime, in ever smaller steps, as a case
    may stand beside a kink, and kernels for double may compute in single; at last in float32."""
    if case.obstacle:
        return Verdict("none", case.obstacle)
    try:
        training = ir.to_proto(memonger.differentiate(case.model, wrt=list(case.wrt)).ir)
    except MemongerError as error:
        return Verdict("refused", str(error))
    except Exception:
        return Verdict("crashed", traceback.format_exc(limit=-3))
    verdict = Verdict("wrong", "nothing runs it")
    attempts = [(Onnxruntime, 1.0), (Reference, 1.0), (Onnxruntime, 1e-2), (Reference, 1e-2)]
    for runtime, factor in attempts:
        try:
            found = _compare(case, training, runtime, factor)
        except CannotRunError as error:
            found = Verdict("wrong", f"can't be run: {error}")
        if found.kind != "wrong":
            return found
        if "can't be run" not in found.message or verdict.message == "nothing runs it":
            verdict = found
    return judge(case.single()) if case.single is not None else verdict


def in_own_type(case: Case) -> str:
    """Whether a test in 16 bits has, in these, the gradients that it has in more.

    ``agrees``, ``differs``, or ``not run`` by either runtime; "" of other tests.
    """
    if case.own is None or case.obstacle:
        return ""
    generator, own = np.random.default_rng(1), case.own()
    found: list[Arrays] = []
    seeds: Arrays = {}
    for each in (own, case):
        training = ir.to_proto(memonger.differentiate(each.model, wrt=list(each.wrt)).ir)
        feeds = {k: v.astype(each.feeds[k].dtype) for k, v in own.feeds.items()}
        for value in training.graph.input:
            kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            if value.name not in feeds and value.name.endswith(".grad"):
                seeds.setdefault(value.name, np.asarray(generator.standard_normal(shape)).astype(kind))
            feeds.setdefault(value.name, seeds.get(value.name, np.ones(shape)).astype(kind))
        for runtime in (Onnxruntime, Reference):
            try:
                found.append(runtime(training)(feeds))
                break
            except CannotRunError:
                continue
    if len(found) < 2:
        return "not run"
    errors = []
    for name, value in found[1].items():
        wanted = np.asarray(value, np.float64)
        finite = np.isfinite(wanted)
        error = np.abs(np.asarray(found[0][name], np.float64) - wanted)[finite].max(initial=0)
        errors.append(error / np.abs(wanted[finite]).max(initial=1))
    return "agrees" if max(errors) < TOLERANCE[2] else "differs"


class CannotRunError(Exception):
    """The runtime doesn't run the model."""


class Onnxruntime:
    """Runs a model on onnxruntime."""

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        self.names = [o.name for o in model.graph.output]
        self.inputs = {i.name for i in model.graph.input}
        try:
            providers = ["CPUExecutionProvider"]
            self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
        except Exception as error:  # onnxruntime's own classes derive from no common one
            raise CannotRunError(str(error)[:300]) from error

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """The outputs by name."""
        try:
            results = self.session.run(None, {k: v for k, v in feeds.items() if k in self.inputs})
        except Exception as error:
            raise CannotRunError(str(error)[:300]) from error
        return dict(zip(self.names, results, strict=True))


class Reference:
    """Runs a model on onnx.reference."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.names = [o.name for o in model.graph.output]
        self.inputs = {i.name for i in model.graph.input}
        self.model = model

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """The outputs by name."""
        feeds = {k: v for k, v in feeds.items() if k in self.inputs}
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                results = ReferenceEvaluator(self.model).run(None, feeds)
        except Exception as error:  # whatever its kernels raise
            raise CannotRunError(str(error)[:300]) from error
        return dict(zip(self.names, (np.asarray(v) for v in results), strict=True))


def _compare(case: Case, training: onnx.ModelProto, runtime: type[Onnxruntime | Reference], factor: float) -> Verdict:
    generator = np.random.default_rng(1)
    feeds, seeds = dict(case.feeds), Arrays()
    for value in training.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if value.name.endswith(".grad") and value.name not in feeds:
            seeds[value.name] = np.asarray(generator.standard_normal(shape)).astype(kind)
        elif value.name not in feeds:
            feeds[value.name] = np.ones(shape, kind)  # the random key and the step
    stepped = _either(training, runtime)
    # What is random is compared with itself: the numbers are others than those of the runtime.
    plain = _either(training if facts_of(case.operator).random else case.model, runtime)
    outputs = plain({**feeds, **seeds})
    for name in seeds:  # masks of infinity: no difference can be taken there
        finite = np.isfinite(np.asarray(outputs[name.removesuffix(".grad")], np.float64))
        seeds[name] = np.where(finite, seeds[name], np.zeros((), seeds[name].dtype))
    results = stepped({**feeds, **seeds})
    size = min(v.dtype.itemsize for v in (*(case.feeds[n] for n in case.wrt), *seeds.values()))
    for name, value in outputs.items() if size > 1 else ():
        wanted, found = np.asarray(value, np.float64), np.asarray(results.get(name, value), np.float64)
        if not np.allclose(found, wanted, TOLERANCE[size], TOLERANCE[size], equal_nan=True):
            return Verdict("wrong", f"{name} itself has changed: {found.ravel()[:4]}, it was {wanted.ravel()[:4]}")
    return _differences(case, lambda shifted: plain({**feeds, **seeds, **shifted}), results, seeds, size, factor)


def _either(model: onnx.ModelProto, runtime: type[Onnxruntime | Reference]) -> Onnxruntime | Reference:
    """On that runtime, or the other one where it has no kernel."""
    other = Reference if runtime is Onnxruntime else Onnxruntime
    try:
        return runtime(model)
    except CannotRunError:
        return other(model)


def _differences(
    case: Case, run: Callable[[Arrays], Arrays], results: Arrays, seeds: Arrays, size: int, factor: float
) -> Verdict:
    generator = np.random.default_rng(2)

    def projected(shifted: Arrays) -> float:
        outputs = run(shifted)
        total = 0.0
        for name, seed in seeds.items():
            y, weights = (np.asarray(v, np.float64) for v in (outputs[name.removesuffix(".grad")], seed))
            total += float(np.sum(np.where(weights == 0, 0.0, y) * weights))
        return total

    if size == 1:  # rounding to a few bits: the gradient is that of the unrounded number, as PyTorch has it
        (name,), (seed,) = case.wrt, seeds.values()
        same = np.array_equal(results[f"{name}.grad"], seed.astype(case.feeds[name].dtype), equal_nan=True)
        return Verdict("rounded") if same else Verdict("wrong", f"{name}: the gradient isn't what was given")
    for name in case.wrt:
        x, step = case.feeds[name], STEP[size] * (factor if size == 8 else 1)
        direction = generator.standard_normal(x.shape)
        moved = [(x.astype(np.float64) + s * direction).astype(x.dtype) for s in (step, -step)]
        up, down = (projected({name: m}) for m in moved)
        expected = (up - down) / (2 * step)
        gradient = np.asarray(results.get(f"{name}.grad", np.zeros(x.shape)), np.float64)
        found = float(np.sum(gradient * direction))
        scale = max(1.0, abs(expected), float(np.abs(gradient).max(initial=0.0)))
        if not abs(expected - found) < TOLERANCE[size] * scale:
            return Verdict("wrong", f"{name}: finite differences give {expected}, the gradient {found}")
    return Verdict({8: "float64", 4: "float32", 2: "float16"}[size])
