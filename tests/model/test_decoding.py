"""JSON becomes frozen dataclasses only where every value has the type of its field."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from memonger.devices import Cuda, Stamp
from memonger.ir.decoding import AtLeast, DecodingError, OneOf, decode


@dataclass(frozen=True, slots=True)
class Inner:
    name: str
    exact: bool = True


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: Annotated[int, AtLeast(1)]
    step: Annotated[int, OneOf((64, 128))] = 64
    inner: Inner | None = None
    sizes: Mapping[str, Annotated[int, AtLeast(0)]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    places: frozenset[str] = frozenset()


def test_every_kind_of_field() -> None:
    text = (
        '{"count": 3, "step": 128, "inner": {"name": "a", "exact": false}, "sizes": {"x": 0}, "names": ["b", "b"],'
        ' "places": ["c"]}'
    )
    wanted = Outer(count=3, step=128, inner=Inner("a", False), sizes={"x": 0}, names=("b", "b"), places=frozenset("c"))
    assert decode(Outer, json.loads(text)) == wanted


def test_fields_with_defaults_may_be_missing() -> None:
    assert decode(Outer, {"count": 1}) == Outer(count=1)
    assert decode(Outer, {"count": 1, "inner": None}) == Outer(count=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "'count' is 0, and must be an integer from 1 to below 2**62"),
        ({"count": 2**62}, "'count' is 4611686018427387904, and must be an integer from 1 to below 2**62"),
        ({"count": True}, "'count' is True, and must be an integer from 1 to below 2**62"),
        ({"count": None}, "'count' is None, and must be an integer from 1 to below 2**62"),
        ({"step": 96}, "'step' is 96, and must be one of 64, 128"),
        ({"step": 64.0}, "'step' is 64.0, and must be one of 64, 128"),
        ({"inner": 5}, "'inner' is 5, and must be an object"),
        ({"inner": {}}, "'inner' at 'name' is missing"),
        ({"inner": {"name": 1}}, "'inner' at 'name' is 1, and must be a string"),
        ({"inner": {"name": "a", "exact": 1}}, "'inner' at 'exact' is 1, and must be true or false"),
        ({"sizes": []}, "'sizes' is [], and must be an object"),
        ({"sizes": {"x": 0.5}}, "'sizes' at 'x' is 0.5, and must be an integer from 0 to below 2**62"),
        ({"names": "ab"}, "'names' is 'ab', and must be a list"),
        ({"names": ["a", 1]}, "'names' is 1, and must be a string"),
        ({"places": {}}, "'places' is {}, and must be a list"),
        ({"other": 1}, "'other' is unknown"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodingError) as caught:
        decode(Outer, {"count": 1, **change})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [({}, "'count' is missing"), ([], "is [], and must be an object"), (None, "is None, and must be an object")],
)
def test_what_is_no_record_at_all(content: object, message: str) -> None:
    with pytest.raises(DecodingError) as caught:
        decode(Outer, content)
    assert str(caught.value) == message


def test_unknown_entries_are_left_out_on_demand() -> None:
    assert decode(Outer, {"count": 1, "other": 1}, ignore_unknown=True) == Outer(count=1)


def test_a_record_that_refuses_its_values_is_named() -> None:
    content = {"runtime": "r", "provider": "p", "machine": "m", "level": "all", "cuda": {"convolution_search": "slow"}}
    with pytest.raises(DecodingError, match=r"^'cuda' is wrong: .*'slow'"):
        decode(Stamp, content)
    content["cuda"] = {"convolution_search": "default", "tf32": False}
    assert decode(Stamp, content).cuda == Cuda("default", tf32=False)
