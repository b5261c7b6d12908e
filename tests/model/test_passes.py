"""Passes say whether they changed a model, and a plan lists those that did."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import IdentityEliminationPass

import memonger
from memonger.ir.checks import sort_nodes
from memonger.ir.marks import forget_composites, mark_nodes
from memonger.ir.model import Model, PassRecord
from memonger.ir.names import name_nodes
from memonger.ir.passes import Pass, name_of, run_passes
from memonger.ir.rewrite import remove_unused
from memonger.lowering.cpu import fuse_products
from memonger.lowering.cpu_convolutions import block_convolutions
from memonger.lowering.cpu_narrow import widen_narrow_nodes
from memonger.lowering.cuda import write_out_for_cuda
from memonger.model.branches import open_branches
from memonger.model.load import drop_listed_initializers, inline_functions, lift_constants, open_unsized
from memonger.model.opset import raise_opset

ODD = """<ir_version: 3, opset_import: ["": 17, "own": 1]>
g (float[2,3,4] x, float[2,5,4] z, bool c, float[4] w)
=> (float[2,3,5] y, float[4] v, float16[2] n) <float[4] w = {1,2,3,4}> {
    y = MatMul(x, t)
    t = Transpose <perm=[0,2,1]> (z)
    unread = Neg(x)
    k = Constant <value = float[4] {1,1,1,1}> ()
    s = own.Twice(k)
    i = Identity(s)
    v = If(c) <then_branch = a () => (float[4] o) { o = Add(i, w) },
               else_branch = e () => (float[4] p) { n0 = Shape(z) p = ConstantOfShape(n0) }>
    h = Constant <value = float16[2] {1,2}> ()
    n = Neg(h)
}
<domain: "own", opset_import: ["": 17]> Twice (a) => (b) { b = Add(a, a) }"""


def _odd() -> Model:
    return Model(ir.from_proto(onnx.parser.parse_model(ODD)), "odd")


def _unsized() -> Model:
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[-1] x) => (float[-1] y) { y = Neg(x) }'
    return Model(ir.from_proto(onnx.parser.parse_model(text)), "unsized")


def _step() -> Model:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[2,32,9,9] x, float[32,1,3,3] w, float[2,3,4] a, float[2,5,4] b, uint32[3] k)
    => (float[2,32,9,9] y, float[2,3,5] z, uint32[3] u) {
        u = BitwiseXor(k, k)
        y = Conv <group=32, pads=[1,1,1,1]> (x, w)
        t = Transpose <perm=[0,2,1]> (b)
        z = MatMul(a, t) }"""
    return memonger.differentiate(onnx.parser.parse_model(text), wrt=["x", "w", "a", "b"])


def _content(model: Model) -> bytes:
    return ir.to_proto(model.ir).SerializeToString(deterministic=True)


PASSES: tuple[Pass, ...] = (
    open_unsized, inline_functions, drop_listed_initializers, sort_nodes, lift_constants, raise_opset, name_nodes,
    remove_unused, forget_composites, fuse_products, partial(fuse_products, exact=False), block_convolutions,
    widen_narrow_nodes, write_out_for_cuda, open_branches, partial(mark_nodes, mirror=["*"], keep=[]),
    IdentityEliminationPass(),
)  # fmt: skip


ODD_NAMES = {
    "inline functions", "drop listed initializers", "sort nodes", "lift constants", "raise opset", "name nodes",
    "remove unused", "widen narrow nodes", "open branches", "mark nodes", "identity elimination",
}  # fmt: skip
STEP_NAMES = {
    "forget composites", "fuse products", "block convolutions", "write out for cuda", "mark nodes",
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "names"),
    [(_odd, ODD_NAMES), (_unsized, {"open unsized", "name nodes", "mark nodes"}), (_step, STEP_NAMES)],
)
def test_a_pass_says_that_it_changed_a_model_where_it_did(make: Callable[[], Model], names: set[str]) -> None:
    changed = set[str]()
    for each in PASSES:
        model = make()
        before = _content(model)
        made = run_passes(dataclasses.replace(model, passes=()), "load", each)
        assert (_content(made) != before) == bool(made.passes), name_of(each)
        changed.update(record.name for record in made.passes)
    assert changed == names


def test_passes_that_change_nothing_leave_the_model_and_no_record() -> None:
    model = run_passes(_odd(), "load", sort_nodes, name_nodes)
    assert [(each.stage, each.name) for each in model.passes] == [("load", "sort nodes"), ("load", "name nodes")]
    assert run_passes(model, "lower", sort_nodes, name_nodes) is model


def test_a_plan_lists_the_passes_in_order_and_its_file_does_not(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 17]> g (float[8,6] x) => (float[8,3] y) <float[3,6] w = {SOME}> {
        two = Constant <value = float {2.0}> ()
        t = Transpose <perm=[1,0]> (w)
        p = MatMul(x, t)
        y = Mul(p, two) }""".replace("SOME", ",".join(map(str, range(18))))
    model = memonger.load(onnx.parser.parse_model(text))
    plans = [memonger.search_plan(model, loss="mean_squared_error", device="none", strategy="none") for _ in range(2)]
    assert plans[0].passes == plans[1].passes
    assert plans[0].passes[:4] == (
        PassRecord("load", "lift constants", 3), PassRecord("load", "infer shapes", 3),
        PassRecord("differentiate", "raise opset", 3), PassRecord("differentiate", "name nodes", 3),
    )  # fmt: skip
    names = [each.name for each in plans[0].passes[4:]]
    assert names == [
        "attach loss", "fold transposes into products", "write backward pass", "remove unused",
    ]  # fmt: skip
    assert plans[0].passes[-1].nodes == plans[0].model.graph.num_nodes()
    plans[0].save(tmp_path / "planned.onnx")
    assert memonger.Plan.load(tmp_path / "planned.onnx").passes == ()


def test_a_plan_for_the_cpu_lists_what_the_device_form_changed_whatever_order_onnxruntime_writes() -> None:
    plans = [memonger.search_plan(_step(), mode="training", device="cpu", strategy="none") for _ in range(2)]
    assert plans[0].passes == plans[1].passes
    assert next(each.name for each in plans[0].passes if each.stage == "lower") == "fuse products"
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[1,8,9,9] x) => (float[1,8,9,9] y) {
        i = Identity(x) s = Add(i, i) r = Relu(s) y = Identity(r) }"""
    plan = memonger.search_plan(onnx.parser.parse_model(text), mode="inference", device="cpu")
    assert PassRecord("lower", "optimize with onnxruntime", 2) in plan.passes
    assert plan.model.graph.num_nodes() == 2
