"""Gradients of every node test of onnx's backend suite against finite differences.

Run from the repository's root: ``python -m benchmarks.coverage [OPERATOR ...]``. Prints the table, and writes it to
benchmarks/coverage.txt unless operators are named. Each test of an operator with floating inputs and outputs is
differentiated by all of those, with random gradients of the outputs; then for each input ⟨gradient, direction⟩ is
compared with the change of ⟨outputs, their gradients⟩ along a random direction, in float64 where the operator takes
that, else in float32. What is refused is listed with its message.
"""

import argparse
import re
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

import memonger
from benchmarks.machine import HERE, Table, keep, stamp
from benchmarks.node_cases import FLOATS, Case, cases
from memonger.errors import MemongerError
from memonger.model.operators import facts_of

STEP = {8: 1e-5, 4: 3e-3, 2: 3e-2}  # of the differences, by bytes of an element; the error is about STEP² and rounding ÷ STEP
TOLERANCE = {8: 1e-6, 4: 2e-2, 2: 5e-2}  # of the largest gradient
Arrays = dict[str, np.ndarray]
COLUMNS = Table("operator<28", "tests>5", "float64>8", "float32>8", "refused>8", "wrong>6")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case.

    Attributes:
        kind: ``float64`` or ``float32``: agreed, in that type; ``refused``, ``wrong``, ``crashed``, or ``none``: it has
            no gradient.
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
        pairs = [(np.asarray(outputs[k.removesuffix(".grad")], np.float64), s.astype(np.float64)) for k, s in seeds.items()]
        return sum(float(np.sum(np.where(s == 0, 0.0, y) * s)) for y, s in pairs)

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("operators", nargs="*")
    parser.add_argument("-v", action="store_true")
    arguments = parser.parse_args()
    import pickle
    allv = {}
    for case in cases():
        if arguments.operators and case.operator not in arguments.operators:
            continue
        v = judge(case)
        allv[case.name] = (case.operator, v)
        if arguments.v or v.kind in ("wrong", "crashed"):
            print(case.name, case.operator, v.kind, v.message[:600], flush=True)
    print(Counter(v.kind for _, v in allv.values()))
    print(Counter((o, v.kind) for o, v in allv.values() if v.kind in ("refused","wrong","crashed")))
    pickle.dump(allv, open("/tmp/coverage/v.pkl","wb"))


if __name__ == "__main__":
    main()
