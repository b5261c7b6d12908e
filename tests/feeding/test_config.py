"""What fits, by hand and at random."""

from typing import Any

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memonger
from memonger.feeding.samples import tensors_of
from tests.support import training_models

IMAGE = {"image": ((3, 4, 4), "float32"), "labels": ((), "int64")}  # 192 + 8 bytes


def config(limit: Any, **options: Any) -> memonger.FeederConfig:
    return memonger.FeederConfig(**{"cpu_limit": limit, "samples": IMAGE, "sample_count": 100, **options})


def test_what_fits_is_known_to_the_byte() -> None:
    made = config(9 * 100 + 200 + 4 * 10 * 200 + 37 * 200 + 199, preferred_batch=10)
    assert (made.sample_bytes, made.batch, made.cached_samples) == (200, 10, 37)
    assert made.fitting_samples == (9 * 100 + 200 + 4 * 10 * 200 + 37 * 200 + 199) // 200 == 83
    room = made.room()
    assert (room.order_bytes, room.reading_bytes, room.batch_bytes, room.cache_bytes) == (900, 200, 8000, 7400)
    assert made.total_bytes == int(made.cpu_limit) - 199
    assert str(made) == (
        "83 of 100 samples fit in 16.3 KiB, at 200 bytes each. Batches of 10, 2 read ahead; 37 samples stay in memory, "
        "63 are read again every epoch. At most 16.1 KiB (16500 bytes) are held."
    )


def test_the_smallest_limit_is_one_sample_read_one_made_one_handed_out() -> None:
    made = config(9 * 100 + 3 * 200)
    assert (made.batch, made.cached_samples, made.room().read_ahead) == (1, 0, 0)
    with pytest.raises(
        memonger.FeedError, match=r"cpu_limit is 1\.46 KiB \(1499 bytes\).*1\.46 KiB \(1500 bytes\).*200 by"
    ):
        config(9 * 100 + 3 * 200 - 1)


def test_a_gpu_limit_bounds_the_batch() -> None:
    assert config("1MiB", gpu_limit=1999).batch == 9
    with pytest.raises(memonger.FeedError, match="gpu_limit is 199 bytes, and one sample takes 200 bytes"):
        config("1MiB", gpu_limit=199)


def test_sizes_are_numbers_or_texts_and_units_can_be_called() -> None:
    assert memonger.GiB(2) == memonger.GiB * 2 == config("2GiB").cpu_limit == 2 << 30
    assert memonger.MiB(1.5) == 3 << 19
    assert type(memonger.GiB * 2) is type(memonger.KiB(0.3)) is int


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40_000), st.integers(1, 50), st.integers(1, 4), st.integers(1, 64), st.integers(0, 3), st.booleans()
)
def test_limits_are_held_and_used(limit: int, reads: int, each: int, batch: int, ahead: int, whole: bool) -> None:
    options = {"sample_count": reads * each, "one_read_count": each, "preferred_batch": batch, "read_ahead": ahead}
    try:
        room = config(limit, **options).room(whole_batches=whole)
    except memonger.FeedError:
        assert limit < 9 * reads + 3 * 200
        return
    assert room.total_bytes <= limit
    assert 1 <= room.batch <= batch
    if room.batch < min(batch, reads * each):  # one more wouldn't fit
        more = (room.batch + 1) * 200
        assert (3 * more if whole else 9 * reads + 200 + 2 * more) > limit
    if room.read_ahead < ahead:
        assert room.total_bytes - room.cache_bytes + room.batch * 200 > limit
    if room.cached_samples < reads * each and not whole:
        assert room.total_bytes + each * 200 > limit


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "bool", "<i4", float, "torch.float32"])
def test_types_by_their_names(dtype: Any) -> None:
    (tensor,) = tensors_of({"x": ((2,), dtype)})
    assert tensor.nbytes == 2 * tensor.dtype.itemsize


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_limit": "2 apples"}, "cpu_limit: '2 apples' is no size"),
        ({"cpu_limit": -1}, "cpu_limit must be at least 0 bytes"),
        ({"cpu_limit": None}, "cpu_limit must be a number of bytes"),
        ({"cpu_limit": True}, "cpu_limit must be a number of bytes"),
        ({"samples": {}}, "samples must give the shape and type"),
        ({"samples": {"x": (3, 4)}}, r"samples\['x'\] must be a shape without the batch's axis and a type"),
        ({"samples": {"x": ((3, None), "int8")}}, r"samples\['x'\] has shape \(3, None\)"),
        ({"samples": {"x": ((3,), "int7")}}, r"samples\['x'\] has type 'int7', which is none"),
        ({"samples": {"x": ((3,), str)}}, "whose elements have no size of their own"),
        ({"samples": {"x": ((0,), "int8")}}, "nothing to feed"),
        ({"outputs": ("label",)}, "outputs names 'label', and a sample has 'image', 'labels'"),
        ({"sample_count": 7, "one_read_count": 2}, "sample_count is 7, no multiple of one_read_count, 2"),
        ({"preferred_batch": 0}, "preferred_batch must be a whole number from 1"),
        ({"read_ahead": -1}, "read_ahead must be a whole number from 0"),
        ({"one_read_count": 1.5}, "one_read_count must be a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(memonger.FeedError, match=message):
        config(**{"limit": "1MiB", **options})


CLASSIFIER = {"x": ((training_models.FEATURES,), "float32"), "labels": ((), "int64")}


def test_a_plan_decides_the_batch() -> None:
    plan = memonger.search_plan(training_models.classifier(), mode="inference", device="none")
    made = config("1MiB", samples={"x": ((training_models.FEATURES,), "float32")}).for_model(plan)
    assert made.batch == training_models.BATCH
    with pytest.raises(memonger.FeedError, match=r"the plan takes .* bytes\), and it may take 10 bytes"):
        made.for_model(plan, memory=10)
    with pytest.raises(memonger.FeedError, match=r"batches of 16, and the limits and samples allow 3: raise cpu_limit"):
        config("1MiB", samples=made.samples, sample_count=3).for_model(plan)
    with pytest.raises(memonger.FeedError, match="the plan has no input 'labels'; its inputs are 'x'"):
        config("1MiB", samples=CLASSIFIER).for_model(plan)
    with pytest.raises(
        memonger.FeedError, match=r"'x' of a sample is float64\[12\], and the plan takes batches of float32\[16, 12\]"
    ):
        config("1MiB", samples={"x": ((training_models.FEATURES,), "float64")}).for_model(plan)


def test_the_largest_batch_that_fits_is_found() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> wide (float[N,3] x) => (float[N,4] y)
        <float[3,4] w = {1,1,1,1,1,1,1,1,1,1,1,1}> { y = MatMul(x, w) }"""
    )
    samples = {"x": ((3,), "float32")}
    options = {"mode": "inference", "device": "none"}
    made = config("1MiB", samples=samples, gpu_limit=2000)
    fitted = memonger.fit(model, 2000, **options)
    assert made.for_model(model, **options).batch == made.for_model(fitted).batch == fitted.size
    assert config("1MiB", samples=samples, preferred_batch=2).for_model(fitted).batch == 2
    with pytest.raises(memonger.FeedError, match="say how much the model may take"):
        config("1MiB", samples=samples).for_model(model, **options)
    with pytest.raises(
        memonger.FeedError, match=r"no batch of the model fits 70 bytes; the smallest that was found takes \d+ by"
    ):
        made.for_model(model, memory=70, **options)
