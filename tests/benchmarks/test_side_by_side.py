"""training.side_by_side: the peers compute the same, and whatever happens to one of them is a row of the table."""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
if find_spec("transformers") is None:  # importing it takes a process half a second, of tests that never need it, too
    pytest.skip("needs transformers", allow_module_level=True)

from benchmarks.training import peers  # noqa: E402
from benchmarks.training.side_by_side import contestants, cores, devices, networks, results, rows, turns  # noqa: E402
from benchmarks.training.side_by_side.export import export  # noqa: E402
from benchmarks.training.side_by_side.search import TOLERANCE, TRIES, largest_batch  # noqa: E402
from benchmarks.training.side_by_side.table import table  # noqa: E402
from benchmarks.training.side_by_side.turns import Clock, OutOfTime  # noqa: E402
from memonger.runtime.worker import Worker  # noqa: E402
from models import torch_networks  # noqa: E402

PUBLISHED = {
    "resnet50": 25_557_032,
    "resnet200": 64_673_832,
    "densenet121": 7_978_856,
    "densenet_bc100": 769_162,
    "mobilenet_v2": 3_504_872,
    "unet": 31_030_658,
    "gpt": 124_439_808,
    "lstm": 10_000 * 1024 + 2 * 4 * (2 * 1024 * 1024 + 2 * 1024) + 1025 * 10_000,
    "convnext_tiny": 28_589_128,
    "swin_tiny": 28_288_354,
    "resnext50": 25_028_904,
    "efficientnet_b0": 5_288_548,
    "bert": 109_514_298,
    "llama": 162_417_408,
}

SMALL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "resnet50": ((2, 3, 16, 16), {"units": (1, 2, 1)}),
    "densenet121": ((2, 3, 32, 32), {"blocks": (2, 3), "growth": 4}),
    "densenet_bc100": ((2, 3, 8, 8), {"blocks": (3, 3), "growth": 4}),
    "mobilenet_v2": ((2, 3, 16, 16), {}),
    "unet": ((2, 1, 16, 16), {"width": 4, "depth": 2}),
    "gpt": ((2, 12), {"width": 16, "depth": 3, "heads": 2, "words": 50, "length": 12}),
    "lstm": ((2, 10), {"width": 8, "words": 50}),
    "bert": (
        (2, 10),
        {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16},
    ),
}
TINY = networks.Size(4, (3, 8, 8), {"blocks": (2, 2), "growth": 4})


def test_the_networks_have_their_published_numbers_of_parameters() -> None:
    assert set(PUBLISHED) == set(networks.NETWORKS)
    for name, count in PUBLISHED.items():
        with torch.device("meta"):
            module = networks.build(name, networks.size_of(name, "cuda:0").options)
        assert sum(parameter.numel() for parameter in module.parameters()) == count, name


@pytest.mark.parametrize("name", SMALL)
def test_checkpoints_change_neither_losses_nor_gradients(name: str) -> None:
    shape, options = SMALL[name]
    torch.manual_seed(1)
    x = torch.randn(shape) if len(shape) > 2 else torch.randint(50, shape)
    module = torch_networks.initialized(name, x, **options)
    with torch.no_grad():
        scores = module(x)
    labels = torch.randint(scores.shape[1], (len(scores), *scores.shape[2:]))
    found = []
    for forward in (module, module.checkpointed):
        module.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(forward(x), labels)
        loss.backward()
        found.append((loss.detach(), [parameter.grad.clone() for parameter in module.parameters()]))
    (loss, gradients), (other, others) = found
    torch.testing.assert_close(other, loss, rtol=1e-6, atol=0.0)
    assert any(bool(gradient.abs().max() > 1e-6) for gradient in gradients)
    for mine, theirs in zip(others, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["resnet50", "densenet_bc100", "gpt"])
def test_a_checkpointed_network_keeps_less_for_its_backward_pass(name: str) -> None:
    shape, options = SMALL[name]
    x = torch.randn(shape) if len(shape) > 2 else torch.randint(50, shape)
    module = torch_networks.initialized(name, x, **options)
    sizes = []
    for forward in (module, module.checkpointed):
        kept: dict[int, int] = {}

        def pack(tensor: Any, kept: dict[int, int] = kept) -> Any:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward(x).sum()
        sizes.append(sum(kept.values()))
        del loss
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 16, 18, 60, 68])
def test_segments_are_about_sqrt_n_of_about_sqrt_n_stages(count: int) -> None:
    stages: list[Any] = [lambda x, index=index: x + index for index in range(count)]
    found = torch_networks.segments(stages)
    lengths = [len(segment) for segment in found]
    assert [stage for segment in found for stage in segment] == stages
    assert len(found) == round(math.sqrt(count))
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("limit", [1_000.0, 12_345.0, 1e6])
@pytest.mark.parametrize("start", [1, 16, 5_000])
@pytest.mark.parametrize(
    "need",
    [
        lambda batch: 100 + 7.5 * batch,
        lambda batch: 100 + 7.5 * batch if batch < 400 else math.inf,
        lambda batch: 50 + batch**1.3,
        lambda batch: 300 + 64 * math.ceil(batch / 8),
    ],
    ids=["line", "out of memory", "curve", "steps"],
)
def test_the_largest_batch_is_found_to_the_tolerance(need: Callable[[int], float], start: int, limit: float) -> None:
    found, known = largest_batch(need, limit, start)
    assert need(found) <= limit
    assert need(found + max(1, int(found * TOLERANCE))) > limit
    assert len(known) <= TRIES


def test_there_is_no_largest_batch_where_one_sample_is_too_much() -> None:
    assert largest_batch(lambda batch: 100.0 * batch, 99.0, 8)[0] == 0
    assert largest_batch(lambda batch: math.inf, 99.0, 8)[0] == 0


def _settings(folder: Path, **changes: Any) -> turns.Settings:
    plain = turns.Settings(
        device=devices.Device("cpu", ()), threads=1, clock=Clock(), patience=120.0, rounds=1, seconds=0.0, tf32=False,
        tuned=False, memory=10**9, without=(), folder=folder, effort=1000,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("side_by_side")


def test_training_contestants_have_the_same_losses(folder: Path) -> None:
    keys = ("eager", "none", "share70")
    without = tuple(one.key for one in contestants.training("cpu") if one.key not in keys)
    settings = _settings(folder, without=without)
    there = rows.folder_of("densenet_bc100", TINY, settings)
    there.mkdir()
    export("densenet_bc100", TINY, there)  # here: a process for it would import PyTorch's exporter once more
    row = rows.measure("training", "densenet_bc100", TINY, settings)
    found = {result.contestant: result for result in row.results if not result.failed}
    assert tuple(found) == keys
    for result in found.values():
        assert result.apart is not None
        assert result.apart < 1e-4
        assert result.seconds
    less, more = found["share70"].predicted, found["none"].predicted
    assert less
    assert more
    assert less < more


def test_a_contestant_that_fails_is_a_row_with_the_reason(folder: Path) -> None:
    settings = _settings(folder)
    np.savez(folder / "inputs.npz", x=np.zeros((4, 3, 8, 8), np.float32), labels=np.zeros(4, np.int64))
    broken = turns.Entry(results.Result("share70", "memonger"), _job(folder, model="nowhere.onnx"))
    unplanned = turns.Entry(results.Result("none", "memonger", failed="no plan: why"), None)
    found = turns.compete([broken, unplanned], settings, folder)
    assert "nowhere.onnx" in found[0].failed
    assert found[1].failed == "no plan: why"
    row = results.Row("training", "densenet_bc100", 4, (3, 8, 8), tuple(found))
    text = table(results.Record(("head",), 1, (row,)), cuda=False)
    assert "failed: no plan: why" in text
    assert "nowhere.onnx" in text


def _job(place: Path, model: str) -> Any:
    from benchmarks.training.side_by_side.job import Job

    return Job(
        library="memonger", mode="", network="densenet_bc100", device="cpu",
        inputs=str(place / "inputs.npz"), weights="", model=model, results=str(place / "broken.npz"),
        weight_bytes=0, state_bytes=0, threads=1, options=TINY.options,
    )  # fmt: skip


class _Steady:
    """A contestant whose turns take 1, 2, 3 ... seconds."""

    def __init__(self) -> None:
        self.count = 0

    def times(self, *_: object) -> list[float]:
        self.count += 1
        return [float(self.count)]


def _turns(
    monkeypatch: pytest.MonkeyPatch, states: list[bool | None], **changes: Any
) -> tuple[dict[int, turns._Times], int]:
    seen = iter(states)
    monkeypatch.setattr(turns.cores, "share_a_cache", lambda: next(seen))
    worker = _Steady()
    settings = _settings(Path(), rounds=2, threads=2, **changes)
    found = turns._turns({0: worker}, settings, [results.Result("eager", "eager")])  # type: ignore[dict-item]
    return found, worker.count


def test_turns_are_kept_apart_by_whether_the_cores_shared_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    found, count = _turns(monkeypatch, [True, True, False, False, True, True])
    assert found[0] == turns._Times(near=[1.0, 5.0], far=[3.0], changed=[2.0, 4.0])
    assert count == 5
    assert found[0].figures() == {"seconds": 3.0, "near": 2, "far_seconds": 3.0, "far": 1}


def test_where_they_never_did_all_turns_count(monkeypatch: pytest.MonkeyPatch) -> None:
    found, count = _turns(monkeypatch, [False] * 20)
    assert count == 2 * turns.PATIENT
    assert found[0].figures() == {"seconds": 4.5, "near": 0, "far_seconds": 4.5, "far": 8}


def test_where_there_is_no_telling_there_are_as_many_turns_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _turns(monkeypatch, [None] * 20)[1] == 2
    assert _turns(monkeypatch, [], device=devices.Device("cuda:0", ()))[1] == 2


def test_a_core_shares_its_cache_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores.share_a_cache() in (True, False, None)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0})
    assert cores.share_a_cache() is None
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(cores.os, "sched_setaffinity", lambda *_: None)
    for across, expected in ((1.0, True), (1.5, True), (2.0, False)):
        monkeypatch.setattr(cores, "_seconds", lambda one, other, across=across: 1.0 if one == other else across)
        assert cores.share_a_cache() is expected


def test_the_clock_ends_a_wait(tmp_path: Path) -> None:
    clock = Clock(time.monotonic() + 0.2)
    with Worker("json.tool", [], tmp_path / "a.err", left=clock.left) as worker, pytest.raises(OutOfTime):
        worker.read(60.0)
    assert worker.process.poll() is not None


def _row(kind: str, name: str, batch: int = 4, *_: Any) -> results.Row:
    first = results.Result("eager", "PyTorch eager", batch=4, peak=300, beside=20, held=80, seconds=0.5, apart=0.0)
    second = results.Result("none", "memonger", batch=4, peak=130, beside=20, held=80, predicted=100, seconds=0.25)
    return results.Row(kind, name, batch, (3, 8, 8), (first, second))


def _asked(*arguments: str) -> argparse.Namespace:
    return peers.parser().parse_args(arguments)


def test_a_second_run_measures_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[tuple[str, str, int]] = []

    def fake(kind: str, name: str, batch: int, settings: turns.Settings) -> results.Row:
        settings.clock.left()
        measured.append((kind, name, batch))
        return _row(kind, name, batch)

    monkeypatch.setattr(peers, "_measured", fake)
    output, device = tmp_path / "peers.json", devices.Device("cpu", ("title", "machine"))
    asked = _asked("--rows", "unet,lstm", "--kinds", "training", "--times", "1")
    assert peers.run(asked, device, output) == 0
    assert measured == [("training", "unet", 1), ("training", "lstm", 16)]
    asked = _asked("--rows", "gpt,lstm", "--kinds", "training", "--resume", "--times", "1,4")
    assert peers.run(asked, device, output) == 0
    assert measured[2:] == [("training", "gpt", 2), ("training", "gpt", 8), ("training", "lstm", 64)]
    assert [(row.network, row.batch) for row in results.load(output).rows] == [
        ("unet", 1), ("gpt", 2), ("gpt", 8), ("lstm", 16), ("lstm", 64),
    ]  # fmt: skip
    assert peers.run(_asked("--resume", "--minutes", "0"), device, output) == 0
    assert len(measured) == 5
    assert "out of time" in capsys.readouterr().err
    assert (tmp_path / "peers_training.png").stat().st_size > 0
    assert (tmp_path / "peers.txt").read_text().count("PyTorch eager") >= 3


def test_the_table_has_ratios_errors_and_means(tmp_path: Path) -> None:
    record = results.Record(("head",), 2_000_000_000, (_row("training", "unet"), _row("largest", "unet")))
    results.save(record, tmp_path / "record.json")
    assert results.load(tmp_path / "record.json") == record
    text = table(record, cuda=True)
    line = next(line for line in text.splitlines() if line.split()[:1] == ["memonger"])
    assert "0.433" in line  # 130 of 300 bytes
    assert "0.150" in line  # 30 of 200 beside weights
    assert "+10.0%" in line
    assert "0.500" in line
    assert "Largest batch trained in 2 GB" in text
    assert "peak 0.433, net 0.150, time 0.500 (1 rows)" in text


def test_at_equal_memory_stands_the_fastest_plan_that_takes_no_more() -> None:
    made = [
        ("eager", 300, 4.0),
        ("compile", 200, 3.0),
        ("compile30", 50, 5.0),
        ("none", 290, 2.0),
        ("share50", 190, 6.0),
    ]
    row = results.Row("training", "gpt", 2, (8,), tuple(results.Result(k, k, peak=p, seconds=s) for k, p, s in made))
    text = table(results.Record(("head",), 1, (row,)), cuda=False).partition("at equal memory")[2]
    assert [line.split() for line in text.splitlines() if line.startswith("gpt")] == [
        ["gpt", "2", "0.500", "2.000", "none"]
    ]
    assert "PyTorch checkpoint" not in text  # which had no part in any row


def test_what_was_measured_on_cores_without_a_shared_cache_stands_apart() -> None:
    made = [("eager", 300, 4.0, 5.0), ("none", 290, 2.0, 6.0)]
    found = [results.Result(k, k, peak=p, seconds=n, near=3, far_seconds=f, far=2) for k, p, n, f in made]
    text = table(results.Record(("head",), 1, (results.Row("training", "gpt", 2, (8,), tuple(found)),)), cuda=False)
    rows = [line.split() for line in text.splitlines() if line.startswith("gpt")]
    assert [row[2] for row in rows[1:]] == ["0.500", "1.200"]
    assert "2000.00 0.500 3 6000.00 1.200 2" in " ".join(text.split())


def test_the_head_names_the_calls_but_not_where_files_went() -> None:
    arguments = ["--rows", "unet", "--folder", "/somewhere", "--threads", "1", "--output=/elsewhere", "--resume"]
    assert peers._telling(arguments) == ["--rows", "unet", "--threads", "1", "--resume"]


def test_kinds_and_rows_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("--rows", "resnet51"), ("--kinds", "serving"), ("--memory", "much"), ("--times", "0")):
        with pytest.raises(SystemExit) as status:
            _asked(*arguments)
        assert status.value.code == 2
    assert "resnet51" in capsys.readouterr().err


def test_largest_batches_on_the_cpu_are_asked_for() -> None:
    device = devices.Device("cpu", ())
    assert {kind for kind, _, _ in peers.wanted(_asked(), device)} == {"training"}
    found = peers.wanted(_asked("--kinds", "largest"), device)
    assert [name for _, name, _ in found] == [name for name in networks.NETWORKS if name in peers.LARGEST]


def test_the_driver_is_watched_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    level = [1000]
    monkeypatch.setattr(devices, "used_bytes", lambda index: level[0])
    with devices.Watch(0) as watch:
        level[0] = 5000
        until = time.monotonic() + 5
        while watch.most == 0 and time.monotonic() < until:
            time.sleep(0.01)
        level[0] = 2000
        assert watch.peak() == 4000


def test_every_kind_has_its_contestants() -> None:
    cpu, cuda = ({kind: of(device) for kind, of in contestants.KINDS.items()} for device in ("cpu", "cuda:0"))
    assert [one.key for one in cuda["training"]] == [
        "eager", "checkpoint", "compile", "compile70", "compile50", "compile30",
        "none", "share70", "share50", "share30",
    ]  # fmt: skip
    for kinds in (cpu, cuda):
        assert all(len({one.key for one in found}) == len(found) for found in kinds.values())
