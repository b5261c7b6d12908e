"""A decoder as onnxruntime-genai's model builder writes it, its caches as a state: what stock onnxruntime says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import memonger
from memonger.runtime.program import inputs_of
from models.decoder import Sizes, decoder
from tests.support import networks

MOST, TOKENS = 32, 12
KV_HEADS, HEAD, STATE = Sizes().kv_heads, Sizes().head, Sizes().state

GROWS: dict[str, Any] = {
    "batch_size": 1, "sequence_length": (1, 6), "past_sequence_length": (0, MOST - 6),
    "total_sequence_length": "past_sequence_length + sequence_length",
}  # fmt: skip
FIXED: dict[str, Any] = {
    "batch_size": 1, "sequence_length": (1, 6), "past_sequence_length": MOST, "total_sequence_length": MOST
}  # fmt: skip
PROMPT = np.array([[5, 9, 33, 2, 71]])


def _stock() -> Iterator[dict[str, np.ndarray]]:
    session = networks.stock(decoder())
    kept = {name: np.zeros((1, KV_HEADS, 0, HEAD), np.float32) for name in STATE}
    ids, length = PROMPT, 0
    while True:
        length += ids.shape[1]
        given = {"input_ids": ids, "attention_mask": np.ones((1, length), np.int64)}
        found = networks.run_stock(session, {**given, **kept})
        kept = {old: found[new] for old, new in STATE.items()}
        ids = found["logits"][:, -1:].argmax(-1)
        yield found


def _planned(plan: memonger.Plan | Path, is_fixed: bool) -> Iterator[dict[str, np.ndarray]]:
    session = memonger.Session(plan)
    ids, length = PROMPT, 0
    while True:
        length += ids.shape[1]
        mask = np.zeros((1, MOST if is_fixed else length), np.int64)
        mask[:, :length] = 1
        found = session.run({"input_ids": ids, "attention_mask": mask})
        ids = found["logits"][:, -1:].argmax(-1)
        yield found


@pytest.mark.parametrize("is_fixed", [False, True])
def test_it_says_what_stock_says(is_fixed: bool, tmp_path: Path) -> None:
    plan = memonger.search_plan(decoder(), mode="inference", dims=FIXED if is_fixed else GROWS, state=STATE)
    caches = sum(KV_HEADS * HEAD * MOST * 4 for _ in STATE)
    assert plan.state_bytes == (caches if is_fixed else 2 * caches * (MOST - 6) // MOST)
    assert bool(plan.why_swapped) is not is_fixed
    assert plan.run_time == {}
    path = tmp_path / "planned.onnx"
    plan.save(path)
    words = set[int]()
    for _, stock, ours, read in zip(
        range(TOKENS), _stock(), _planned(plan, is_fixed), _planned(path, is_fixed), strict=False
    ):
        for mine in (ours, read):
            assert networks.same_bits({"logits": mine["logits"]}, {"logits": stock["logits"]})
        words.add(int(stock["logits"][0, -1].argmax()))
    assert len(words) > 4  # it says more than one word


def test_a_cache_that_can_not_be_written_in_place_says_what_would_do() -> None:
    plan = memonger.search_plan(decoder(), mode="inference", dims=GROWS, state=STATE)
    (note,) = plan.state_notes
    assert "writes behind what is there only where 'past_key_values.0.key' has its full length from the start" in note


def _counted(text: str, **shapes: tuple[list[int | str], int]) -> dict[str, int]:
    sets = '"": 24, "com.microsoft": 1'
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{sets}]> g () => () {{ {text} }}")
    for name, (shape, kind) in shapes.items():
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, shape))
    return {value.name: value.fill for value in inputs_of(ir.from_proto(model).graph)}


FLOAT, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
PAST: tuple[list[int | str], int] = ([1, 2, 7, 8], FLOAT)


def test_masks_and_lengths_that_nobody_gives_count_all_there_is() -> None:
    found = _counted(
        "y, k2, v2 = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2>(q, k, v, pk, pv, n, t)",
        q=([1, 3, 16], FLOAT), k=([1, 3, 16], FLOAT), v=([1, 3, 16], FLOAT), pk=PAST, pv=PAST,
        n=([1], INT32), t=([1], INT32),
    )  # fmt: skip
    assert (found["n"], found["t"]) == (9, 10)
    found = _counted(
        "y = Attention<q_num_heads=2, kv_num_heads=2>(q, k, v, , , , n)",
        q=([1, 3, 16], FLOAT), k=([1, 5, 16], FLOAT), v=([1, 5, 16], FLOAT), n=([1], onnx.TensorProto.INT64),
    )  # fmt: skip
    assert found["n"] == 5
    assert all(count == 0 for name, count in found.items() if name != "n")
