"""Each permission in the aliasing lists is exercised on onnxruntime; each known corruption is shown."""

import numpy as np
import onnx_ir as ir
import pytest

pytest.importorskip("onnxruntime")

from memonger.graph import aliasing
from tests.support.aliasing_examples import CORRUPTED, EXAMPLES
from tests.support.aliasing_runs import (
    ML,
    MS,
    Arrays,
    Draw,
    Example,
    Pair,
    aligned,
    mismatches,
    open_session,
    outlives_its_inputs,
    outputs_of,
    parts_model,
    run_bound,
)


def _draw(example: Example, n: int | None = None, dtype: str | None = None) -> Arrays:
    return example.inputs(Draw(n or max(example.sizes), dtype or example.dtypes[0]))


def _pairs(example: Example, arrays: Arrays) -> list[Pair]:
    """What the lists allow, where bytes and element sizes are as the caller demands."""
    node, outputs = example.node(arrays), outputs_of(example, arrays)
    allowed = dict.fromkeys(aliasing.view_pairs(node) + aliasing.inplace_pairs(node))
    return [pair for pair in allowed if _same_layout(arrays[pair[0]], outputs[pair[1]])]


def _same_layout(before: np.ndarray | None, after: np.ndarray) -> bool:
    return before is not None and (before.nbytes, before.itemsize) == (after.nbytes, after.itemsize)


def _threads(example: Example, n: int) -> tuple[int, ...]:
    """How many threads can make a difference: small inputs run on one."""
    return (4,) if n == max(example.sizes) else (1,)


@pytest.mark.parametrize(("domain", "op"), dict.fromkeys((each.domain, each.op) for each in EXAMPLES))
def test_shared_memory_gives_the_bits_of_separate_memory(domain: str, op: str) -> None:
    for example in (each for each in EXAMPLES if (each.domain, each.op) == (domain, op)):
        used = 0
        for dtype in example.dtypes:
            for n in example.sizes if dtype == example.dtypes[0] else example.sizes[-2:]:
                arrays = _draw(example, n, dtype)
                for pair in _pairs(example, arrays):
                    used += 1
                    for threads in _threads(example, n):
                        assert mismatches(example, arrays, pair, threads) == [], (example, pair, dtype, n, threads)
        assert used > 0, example


def test_every_rule_has_an_example() -> None:
    """That is a permission (domain, operator, input, output) of which some example makes use."""
    used = set()
    for example in EXAMPLES:
        pairs = _pairs(example, _draw(example, min(example.sizes)))
        used.update((example.domain, example.op, *pair) for pair in pairs)
    for rule in aliasing.VIEWS + aliasing.IN_PLACE:
        assert any(
            (domain, op, target) == (rule.domain, rule.op, rule.output) and rule.input in (None, source)
            for domain, op, source, target in used
        ), rule


_REPEATABLE = {(r.domain, r.op) for r in aliasing.IN_PLACE if r.elementwise}


def test_one_value_at_every_input_may_be_overwritten() -> None:
    tried = 0
    for example in EXAMPLES:
        arrays = _draw(example, 1031) if (example.domain, example.op) in _REPEATABLE else ()
        if len(arrays) > 1 and len({(array.shape, array.dtype) for array in arrays if array is not None}) == 1:
            for pair in _pairs(example, arrays):
                tried += 1
                assert mismatches(example, arrays, pair, threads=2, one_value=True) == [], (example, pair)
    assert tried


def test_unbound_outputs_outlive_their_inputs_unless_the_node_may_alias() -> None:
    tried = 0
    for example in EXAMPLES:
        arrays = _draw(example, min(example.sizes[-1], 1031))
        if not aliasing.may_alias_unbound(example.node(arrays)):
            tried += 1
            assert outlives_its_inputs(example, arrays), example
    assert tried


def test_an_unbound_view_changes_with_its_input() -> None:
    reshape = next(example for example in EXAMPLES if example.op == "Reshape")
    assert not outlives_its_inputs(reshape, _draw(reshape, 7))


@pytest.mark.parametrize(("example", "pair"), CORRUPTED, ids=str)
def test_known_corruptions_are_real_and_refused(example: Example, pair: Pair) -> None:
    arrays = _draw(example, 1031)
    assert mismatches(example, arrays, pair, threads=1)
    node = example.node(arrays)
    assert pair not in aliasing.view_pairs(node) + aliasing.inplace_pairs(node)


@pytest.mark.parametrize("op", ["BiasGelu", "Gelu", "FastGelu", "QuickGelu"])
def test_only_the_gelu_that_buffers_its_input_is_in_place(op: str) -> None:
    node = ir.Node(MS, op, [ir.Value(name="x"), *([ir.Value(name="bias")] if op == "BiasGelu" else [])])
    assert aliasing.inplace_pairs(node) == (((0, 0),) if op == "BiasGelu" else ())


def test_a_value_read_twice_is_overwritten_only_by_elementwise_kernels() -> None:
    x, y = ir.Value(name="x"), ir.Value(name="y")
    assert aliasing.inplace_pairs(ir.Node("", "Mul", [x, x])) == ((0, 0), (1, 0))
    assert aliasing.inplace_pairs(ir.Node("", "LayerNormalization", [x, y])) == ((0, 0),)
    assert aliasing.inplace_pairs(ir.Node("", "LayerNormalization", [x, x])) == ()


def test_absent_inputs_and_outputs_have_no_pairs() -> None:
    x, skip, scale = (ir.Value(name=name) for name in ("x", "skip", "scale"))
    node = ir.Node(MS, "SkipLayerNormalization", [x, skip, scale], num_outputs=4)
    for output, name in zip(node.outputs, ["y", "", "", "sum"], strict=True):
        output.name = name
    assert aliasing.inplace_pairs(node) == ((0, 0), (1, 0), (0, 3), (1, 3))
    node.outputs[3].name = ""
    assert aliasing.inplace_pairs(node) == ((0, 0), (1, 0))
    assert aliasing.inplace_pairs(ir.Node("", "Gemm", [x, skip, None])) == ()


def test_what_is_unknown_is_refused() -> None:
    x, perm = ir.Value(name="x"), ir.AttrInt64s("perm", [0, 1])
    assert aliasing.view_pairs(ir.Node("", "Transpose", [x], [perm])) == ()
    assert aliasing.view_pairs(ir.Node("", "Cast", [x], [ir.AttrInt64("to", 1)])) == ()
    assert aliasing.inplace_pairs(ir.Node("", "LogSoftmax", [x])) == ()
    assert aliasing.inplace_pairs(ir.Node("", "Sum", [x, x, x])) == ()
    assert aliasing.inplace_pairs(ir.Node("my.ops", "Relu", [x])) == ()


def test_training_batch_normalization_and_dropout_share_nothing() -> None:
    values = [ir.Value(name=name) for name in "xsbmv"]
    training = ir.Node("", "BatchNormalization", values, [ir.AttrInt64("training_mode", 1)], num_outputs=3)
    assert aliasing.inplace_pairs(training) == ()
    assert aliasing.may_alias_unbound(training)
    assert aliasing.view_pairs(ir.Node("", "Dropout", values[:3])) == ()


def test_other_providers_have_no_rules_until_they_are_verified() -> None:
    node = ir.Node("", "Relu", [ir.Value(name="x")])
    assert aliasing.inplace_pairs(node, "WebGpuExecutionProvider") == ()


def test_on_cuda_only_what_is_elementwise_runs_in_place() -> None:
    x, y, z = (ir.Value(name=name) for name in "xyz")
    opsets = {"": 20}
    for op, allowed in (("Relu", True), ("Softmax", False), ("LRN", False), ("LayerNormalization", False)):
        assert bool(aliasing.inplace_pairs(ir.Node("", op, [x]), aliasing.CUDA)) == allowed
    pair, three = ir.Node("", "Max", [x, y]), ir.Node("", "Max", [x, y, z])
    ir.Graph([x, y, z], [], nodes=[pair, three], opset_imports=opsets)
    assert aliasing.inplace_pairs(pair, aliasing.CUDA) == ((0, 0), (1, 0))
    assert aliasing.inplace_pairs(three, aliasing.CUDA) == ()
    assert aliasing.view_pairs(ir.Node("", "Reshape", [x, y]), aliasing.CUDA) == ((0, 0),)
    assert aliasing.view_pairs(ir.Node("", "Expand", [x, y]), aliasing.CUDA) == ()


def test_nodes_that_onnxruntime_may_alias() -> None:
    x = ir.Value(name="x")
    sequence = ir.Value(name="s", type=ir.SequenceType(ir.TensorType(ir.DataType.FLOAT)))
    branch = ir.AttrGraph("then_branch", ir.Graph([], [], nodes=[]))
    assert aliasing.may_alias_unbound(ir.Node("", "If", [x], [branch]))
    assert aliasing.may_alias_unbound(ir.Node("", "SequenceAt", [sequence, x]))
    assert aliasing.may_alias_unbound(ir.Node("my.ops", "Relu", [x]))
    assert not aliasing.may_alias_unbound(ir.Node(ML, "Scaler", [x]))


def test_no_rule_is_given_twice() -> None:
    rules = [(r.domain, r.op, r.input, r.output, p) for r in aliasing.IN_PLACE for p in r.providers]
    assert len(set(rules)) == len(rules)


@pytest.mark.parametrize("op", ["Concat", "Split", "Slice"])
@pytest.mark.parametrize("dtype", ["float32", "bool", "float16", "int64"])
def test_parts_inside_their_whole_are_copied_onto_themselves(op: str, dtype: str) -> None:
    """Three parts of one whole, all of them or only some at their place in it, the others in memory of their own."""
    for rows, inner, threads, inside in (
        ((1, 2, 3), (3,), 1, (0, 1, 2)),
        ((5, 31, 2), (1, 64), 1, (1,)),
        ((7, 1000, 40), (1031,), 4, (0, 1, 2)),
        ((300, 9, 700), (1031,), 4, (0, 2)),
    ):
        whole = aligned(Draw(sum(rows), dtype).real(1, sum(rows), *inner))
        model = parts_model(op, whole, rows)
        starts = [sum(rows[:number]) for number in range(len(rows))]
        views = [whole[:, start : start + count] for start, count in zip(starts, rows, strict=True)]
        found = aliasing.windows(next(iter(ir.serde.deserialize_model(model).graph)))
        assert [byte for *_, byte in found][-1] == starts[1 if op == "Slice" else 2] * views[0][:, :1].nbytes
        parts = [view if number in inside else aligned(view) for number, view in enumerate(views)]
        expected = whole.copy()
        if op == "Concat":
            for number, view in enumerate(views):
                if number not in inside:
                    view[...] = 0
            given, made = {f"part{n}": part for n, part in enumerate(parts)}, {"whole": whole}
        else:
            for number, part in enumerate(parts):
                if number not in inside:
                    part[...] = 0
            chosen = [1] if op == "Slice" else range(3)
            given, made = {"whole": whole}, {f"part{n}": parts[n] for n in chosen}
        session = open_session(model, threads)
        run_bound(session, given, {name: (array, array.ctypes.data) for name, array in made.items()})
        assert np.array_equal(whole, expected), (rows, threads, inside)
        for number in range(3) if op != "Slice" else [1]:
            assert np.array_equal(parts[number], expected[:, starts[number] : starts[number] + rows[number]])
