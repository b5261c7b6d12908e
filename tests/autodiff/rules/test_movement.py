"""Gradients of operators that move elements."""

from typing import Any

import numpy as np
import pytest
import torch

import memonger
from tests.support.gradient_checks import check, gradients, parse

VIEWS = {
    "Reshape(x, dims)": ("3,8", "{3, 8}", lambda x: x.reshape(3, 8)),
    "Reshape(x, dims) ": ("2,12", "{0, -1}", lambda x: x.reshape(2, 12)),
    "Flatten(x)": ("2,12", "{0, 0}", lambda x: x.flatten(1)),
    "Flatten <axis=-1> (x)": ("6,4", "{0, 0}", lambda x: x.reshape(6, 4)),
    "Unsqueeze(x, dims)": ("1,2,3,1,4", "{0, 3}", lambda x: x[None, :, :, None]),
    "Unsqueeze(x, dims) ": ("2,3,1,4,1", "{-3, -1}", lambda x: x[:, :, None, :, None]),
    "Transpose(x)": ("4,3,2", "{0, 0}", lambda x: x.permute(2, 1, 0)),
    "Transpose <perm=[1, 2, 0]> (x)": ("3,4,2", "{0, 0}", lambda x: x.permute(1, 2, 0)),
    "Transpose <perm=[0, 1, 2]> (x)": ("2,3,4", "{0, 0}", lambda x: x.clone()),
}


@pytest.mark.parametrize("op", VIEWS)
def test_views(op: str) -> None:
    shape, dims, function = VIEWS[op]
    check(f"g (FLOAT[2,3,4] x) => (FLOAT[{shape}] y) <int64[2] dims = {dims}> {{ y = {op} }}", function)


@pytest.mark.parametrize(
    ("op", "shape"), [("Squeeze(x)", "3"), ("Squeeze(x, axes)", "3,1"), ("Squeeze(x, last)", "1,3")]
)
def test_squeeze(op: str, shape: str) -> None:
    check(
        f"g (FLOAT[1,3,1] x) => (FLOAT[{shape}] y) <int64[1] axes = {{0}}, int64[1] last = {{-1}}> {{ y = {op} }}",
        lambda x: x.reshape([int(n) for n in shape.split(",")]),
    )


def test_views_of_nothing() -> None:
    text = (
        "g (float[2,0] x, float[3] z) => (float[0,5] y, float[3] w)"
        "<int64[2] dims = {0, 5}> { y = Reshape <allowzero=1> (x, dims) w = Neg(z) }"
    )
    assert gradients(text, {"x": np.zeros((2, 0)), "z": np.zeros(3)})["x"].shape == (2, 0)


EXPANDED = {"1,3": ("2,3", "{2, 3}"), "3": ("2,3", "{2, 1}"), "2,1": ("4,2,3", "{4, 1, 3}"), "": ("2,2", "{2, 2}")}


@pytest.mark.parametrize("given", EXPANDED)
def test_expand_sums_what_it_repeated(given: str) -> None:
    shape, dims = EXPANDED[given]
    out = [int(n) for n in shape.split(",")]
    check(
        f"g ({f'FLOAT[{given}]' if given else 'FLOAT'} x) => (FLOAT[{shape}] y)"
        f"<int64[{dims.count(',') + 1}] dims = {dims}> {{ y = Expand(x, dims) }}",
        lambda x: x.expand(out),
    )


@pytest.mark.parametrize("repeats", [(1, 1, 1), (2, 1, 1), (1, 3, 2), (2, 2, 2)])
def test_tile_sums_what_it_repeated(repeats: tuple[int, int, int]) -> None:
    shape = ",".join(str(n * r) for n, r in zip((2, 1, 3), repeats, strict=True))
    check(
        f"g (FLOAT[2,1,3] x) => (FLOAT[{shape}] y) <int64[3] repeats = {{{', '.join(map(str, repeats))}}}>"
        "{ y = Tile(x, repeats) }",
        lambda x: x.repeat(repeats),
    )


@pytest.mark.parametrize("wrt", [["a", "b", "c"], ["b"], ["a", "c"]])
@pytest.mark.parametrize("axis", [1, -2])
def test_concat_cuts_apart(axis: int, wrt: list[str]) -> None:
    check(
        f"g (FLOAT[2,1,3] a, FLOAT[2,4,3] b, FLOAT[2,2,3] c) => (FLOAT[2,7,3] y)"
        f"{{ y = Concat <axis={axis}> (a, b, c) }}",
        lambda *parts: torch.cat(parts, axis),
        wrt=wrt,
    )


def test_concat_of_one_value_with_itself_and_alone() -> None:
    check("g (FLOAT[2,3] a) => (FLOAT[2,6] y) { y = Concat <axis=1> (a, a) }", lambda a: torch.cat([a, a], 1))
    check("g (FLOAT[2,3] a) => (FLOAT[2,3] y) { y = Concat <axis=1> (a) }", lambda a: a.clone())


SPLITS = {
    "sizes": ("Split <axis=1> (x, sizes)", (1, 4, 2)),
    "uneven": ("Split <axis=-2, num_outputs=3> (x)", (3, 3, 1)),
    "even": ("Split <axis=0, num_outputs=2> (x)", (1, 1)),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_joins(name: str) -> None:
    op, sizes = SPLITS[name]
    axis = 0 if name == "even" else 1
    parts = [f"y{k}" for k in range(len(sizes))]
    outputs = ", ".join(
        f"FLOAT[{f'{n},7' if axis == 0 else f'2,{n}'},3] {p}" for p, n in zip(parts, sizes, strict=True)
    )
    check(
        f"g (FLOAT[2,7,3] x) => ({outputs}) <int64[3] sizes = {{1, 4, 2}}> {{ {', '.join(parts)} = {op} }}",
        lambda x: torch.split(x, list(sizes), axis),
    )


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_parts_of_a_split_that_nobody_differentiates_get_zeros(used: tuple[int, ...]) -> None:
    names = " ".join(f"y{k} = Mul(p{k}, p{k})" for k in used)
    outputs = ", ".join(f"FLOAT[2,{(1, 4, 2)[k]}] y{k}" for k in used)
    check(
        f"g (FLOAT[2,7] x) => ({outputs}) <int64[3] sizes = {{1, 4, 2}}>"
        f"{{ p0, p1, p2 = Split <axis=1> (x, sizes) {names} }}",
        lambda x: tuple(torch.split(x, [1, 4, 2], 1)[k] ** 2 for k in used),
    )


MAX = 2**63 - 1
SLICES = {
    "inside": ([1], [3], [1], None, lambda x: x[:, 1:3]),
    "no axes": ([0, 2], [2, 5], None, None, lambda x: x[:2, 2:5]),
    "to the end": ([2], [MAX], [1], None, lambda x: x[:, 2:]),
    "int32 end": ([2], [2**31 - 1], [-1], None, lambda x: x[..., 2:]),
    "all of it": ([0], [MAX], [1], None, lambda x: x.clone()),
    "negative start": ([-3], [-1], [-2], None, lambda x: x[:, -3:-1]),
    "before the start": ([-100], [2], [1], None, lambda x: x[:, :2]),
    "several axes": ([1, 1, 0], [3, 4, 6], [0, 1, 2], None, lambda x: x[1:3, 1:4, :6]),
    "step that divides": ([0], [MAX], [2], [2], lambda x: x[:, :, ::2]),
    "step that divides, from 1": ([1], [MAX], [2], [2], lambda x: x[:, :, 1::2]),
    "step that does not": ([0], [MAX], [1], [2], lambda x: x[:, ::2]),
    "step with a rest": ([1], [MAX], [1], [3], lambda x: x[:, 1::3]),
    "large step": ([3], [MAX], [1], [9], lambda x: x[:, 3::9]),
    "steps": ([0, 1], [MAX, MAX], [1, 2], [2, 3], lambda x: x[:, ::2, 1::3]),
    "focus": ([1, 0], [MAX, MAX], [0, 2], [2, 2], lambda x: x[1::2, :, ::2]),
    "backwards": ([-1], [-MAX], [1], [-1], lambda x: x.flip(1)),
    "part backwards": ([3], [0], [1], [-1], lambda x: x[:, [3, 2, 1]]),
    "backwards by two": ([MAX], [-MAX], [1], [-2], lambda x: x[:, [4, 2, 0]]),
    "both directions": ([-1, 1], [-MAX, 6], [1, 2], [-2, 2], lambda x: x[:, [4, 2, 0]][..., 1:6:2]),
}


@pytest.mark.parametrize("case", SLICES.values(), ids=SLICES)
def test_slice_puts_back(case: tuple[Any, ...]) -> None:
    *numbers, function = case
    shape = ",".join(map(str, function(torch.zeros(4, 5, 6)).shape))
    named = [(n, v) for n, v in zip(("starts", "ends", "axes", "steps"), numbers, strict=True) if v is not None]
    constants = ", ".join(f"int64[{len(v)}] {n} = {{{', '.join(map(str, v))}}}" for n, v in named)
    inputs = "x, starts, ends" + (", axes" if case[2] else ", " if case[3] else "") + (", steps" if case[3] else "")
    training = check(f"g (FLOAT[4,5,6] x) => (FLOAT[{shape}] y) <{constants}> {{ y = Slice({inputs}) }}", function)
    assert not any("Scatter" in node.op_type for node in training.graph.node)


def test_a_slice_of_nothing_gives_zeros() -> None:
    text = (
        "g (float[5] x, float[3] z) => (float[0] y, float[3] w)"
        "<int64[1] one = {1}> { y = Slice(x, one, one) w = Neg(z) }"
    )
    np.testing.assert_array_equal(gradients(text, {"x": np.ones(5), "z": np.ones(3)})["x"], np.zeros(5))


PADS = {
    "around": ([0, 1, 2, 3], None),
    "cutting": ([-1, 0, 0, -2], None),
    "both": ([-1, 2, 1, -1], None),
    "nothing": ([0, 0, 0, 0], None),
    "axes": ([1, 2], [-1]),
    "swapped axes": ([1, -1, 2, 0], [1, 0]),
}


@pytest.mark.parametrize(("pads", "axes"), PADS.values(), ids=PADS)
def test_pad_with_a_constant(pads: list[int], axes: list[int] | None) -> None:
    full = np.zeros(4, int)
    for k, axis in enumerate(axes if axes is not None else [0, 1]):
        full[axis % 2], full[2 + axis % 2] = pads[k], pads[k + len(pads) // 2]
    shape = f"{4 + full[0] + full[2]},{5 + full[1] + full[3]}"
    joined = [", ".join(map(str, numbers)) for numbers in (pads, axes or [0, 1])]
    check(
        f"g (FLOAT[4,5] x, FLOAT fill) => (FLOAT[{shape}] y) <int64[{len(pads)}] pads = {{{joined[0]}}},"
        f"int64[{len(axes or [0, 1])}] axes = {{{joined[1]}}}> {{ y = Pad(x, pads, fill{', axes' if axes else ''}) }}",
        lambda x, fill: torch.nn.functional.pad(x - fill, [full[1], full[3], full[0], full[2]]) + fill,
        given={"fill": np.array(0.7)},
    )


@pytest.mark.parametrize("pads", [(0, 0, 1, 2, 0, 0, 2, 1), (0, 0, 0, 3, 0, 0, 0, 0), (0, 0, 3, 0, 0, 0, 1, 0)])
@pytest.mark.parametrize(("mode", "name"), [("reflect", "reflect"), ("edge", "replicate"), ("wrap", "circular")])
def test_pad_with_what_is_there(mode: str, name: str, pads: tuple[int, ...]) -> None:
    shape = f"2,2,{4 + pads[2] + pads[6]},{5 + pads[3] + pads[7]}"
    check(
        f"g (FLOAT[2,2,4,5] x) => (FLOAT[{shape}] y) <int64[8] pads = {{{', '.join(map(str, pads))}}}>"
        f'{{ y = Pad <mode="{mode}"> (x, pads) }}',
        lambda x: torch.nn.functional.pad(x, [pads[3], pads[7], pads[2], pads[6]], mode=name),
    )


def test_a_wide_edge_is_added_up() -> None:
    check(
        'g (FLOAT[3] x) => (FLOAT[10] y) <int64[2] pads = {5, 2}> { y = Pad <mode="edge"> (x, pads) }',
        lambda x: torch.cat([x[:1].expand(5), x, x[-1:].expand(2)]),
    )


@pytest.mark.parametrize("pads", [(3, 0), (-1, 1)])
def test_reflections_that_are_not_written_are_refused(pads: tuple[int, int]) -> None:
    text = (
        f"g (float[3] x) => (float[{3 + sum(pads)}] y) <int64[2] pads = {{{pads[0]}, {pads[1]}}}>"
        '{ y = Pad <mode="reflect"> (x, pads) }'
    )
    with pytest.raises(memonger.PlanError, match=r"Pad.*mode='reflect'.*pads from 0 to 2 would work"):
        memonger.differentiate(parse(text, "float", 20), wrt=["x"])


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space(mode: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if mode == "CRD":
            return torch.nn.functional.pixel_shuffle(x, 2)
        return x.reshape(2, 2, 2, 3, 2, 5).permute(0, 3, 4, 1, 5, 2).reshape(2, 3, 4, 10)

    check(
        f'g (FLOAT[2,12,2,5] x) => (FLOAT[2,3,4,10] y) {{ y = DepthToSpace <blocksize=2, mode="{mode}"> (x) }}',
        function,
    )


def test_space_to_depth() -> None:
    check(
        "g (FLOAT[2,3,4,6] x) => (FLOAT[2,12,2,3] y) { y = SpaceToDepth <blocksize=2> (x) }",
        lambda x: x.reshape(2, 3, 2, 2, 3, 2).permute(0, 3, 5, 1, 2, 4).reshape(2, 12, 2, 3),
    )


@pytest.mark.parametrize(("batch", "time"), [(1, 0), (0, 1)])
def test_reverse_sequence(batch: int, time: int) -> None:
    lengths = [1, 4, 2] if batch else [3, 2, 3, 1]

    def function(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        rows = [torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(x.unbind(batch), lengths, strict=True)]
        return torch.stack(rows, batch)

    check(
        f"g (FLOAT[4,3,2] x, int64[{len(lengths)}] n) => (FLOAT[4,3,2] y)"
        f"{{ y = ReverseSequence <batch_axis={batch}, time_axis={time}> (x, n) }}",
        function,
        given={"n": np.array(lengths)},
    )


def test_numbers_that_are_an_input_are_refused() -> None:
    text = (
        "g (float[4] x, int64[1] starts = {1}) => (float[2] y) <int64[1] ends = {3}>"
        "{ cut = Slice(x, starts, ends) y = Neg(cut) }"
    )
    with pytest.raises(memonger.PlanError, match=r"operator Slice.*starts that aren't constant: 'starts'.*alone"):
        memonger.differentiate(parse(text, "float", 20), wrt=["x"])
