"""benchmarks.gpu_day without a device: rows, limits, what is said of them, and the bundle that travels."""

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

import models
from benchmarks.gpu_day import __main__ as program
from benchmarks.gpu_day import bundle, join, record, report, slices, stages
from memonger.runtime.worker import Worker
from tests.facts.checks import CHECKS

ABOUT = {
    "stage": "about", "item": "versions", "seconds": 0.0, "device": "NVIDIA X", "machine": "here",
    "versions": "CUDA 13", "context": 1 << 20, "is_real": True, "tf32": True,
}  # fmt: skip


def _ran(taken: int, milliseconds: float, same: bool = True) -> dict[str, Any]:
    return {"peak": taken, "taken": taken, "milliseconds": milliseconds, "same_bits": same, "apart": 0.0}


def _inference(item: str, predicted: int, same: bool = True) -> dict[str, Any]:
    found = {
        "planned": _ran(50, 1.0, same),
        "graph": _ran(50, 0.5),
        "requested": _ran(80, 1.0),
        "default": _ran(100, 2.0),
    }
    return {"stage": "inference", "item": item, "seconds": 1.0, "predicted": predicted, "contestants": found}


SERVER = """
import json, sys, time
for line in sys.stdin:
    item = json.loads(line)["item"]
    if item == "hangs":
        time.sleep(60)
    if item == "crashes":
        sys.exit("it broke")
    print(json.dumps({"failed": "no such thing"} if item == "fails" else {"found": item}), flush=True)
"""


def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, items: tuple[str, ...]) -> tuple[Any, stages.Stage]:
    (tmp_path / "gpu_day_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = program.Program(stages.Settings(), tmp_path / "rows.jsonl", time.monotonic() + 60)
    monkeypatch.setattr(made, "_worker", lambda stage, folder: Worker("gpu_day_server", [], tmp_path / "err"))
    return made, stages.Stage("facts", "", items, (), share=60, each=0, limit=1.0)


def test_a_crash_a_hang_and_a_failure_lose_a_row_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, stage = _program(tmp_path, monkeypatch, ("one", "crashes", "two", "hangs", "three", "fails", "four"))
    made.run(made.jobs([stage], 1.0))
    rows = record.load(tmp_path / "rows.jsonl")
    assert [row["item"] for row in record.of(rows, "facts")] == ["one", "two", "three", "four"]
    lost = {row["item"]: row["failed"] for row in record.failed(rows, "facts")}
    assert lost == {"crashes": "it broke", "hangs": "no answer within 1 s", "fails": "no such thing"}


def test_a_later_call_measures_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, stage = _program(tmp_path, monkeypatch, ("one", "fails", "two"))
    record.append(made.path, {"stage": "facts", "item": "one", "seconds": 0, "found": "earlier"})
    with made.path.open("a") as file:
        file.write('{"stage": "facts", "item": "two", "sec')  # the machine went away
    assert [job.item for job in made.jobs([stage], 1.0)][:2] == ["fails", "two"]
    made.path.write_text(made.path.read_text().rpartition("\n")[0] + "\n")
    made.run(made.jobs([stage], 1.0))
    rows = {row["item"]: row for row in record.load(made.path)}
    assert rows["one"]["found"] == "earlier"
    assert set(rows) == {"one", "fails", "two"}
    assert not list(made.jobs([stage], 1.0))


def test_a_stage_has_its_share_and_then_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = _program(tmp_path, monkeypatch, ())
    first = stages.Stage("facts", "", ("a", "b", "c"), (), share=25, each=20, limit=50)
    last = stages.Stage("slices", "", ("d",), (), share=10, each=5, limit=50)
    now = [0.0]
    monkeypatch.setattr(program.time, "monotonic", lambda: now[0])
    made.end = 1000.0
    order = []
    for job in made.jobs([first, last], 1.0):
        order.append(job.item)
        record.append(made.path, {"stage": job.stage.key, "item": job.item, "seconds": 20})
        now[0] += 20
    assert order == ["a", "d", "b", "c"]
    made.path.unlink()
    now[0], made.end = 0.0, 46.0
    assert [job.seconds for job in made.jobs([first], 1.0)][:1] == [pytest.approx(41.0)]


def test_nothing_measured_is_said_to_be_so(tmp_path: Path) -> None:
    assert report.sentences([]) == [
        "Nothing was measured on a GPU yet: `python -m benchmarks.gpu_day` does it in ten minutes."
    ]
    assert report.sentences([{**ABOUT, "is_real": False}, _inference("a:1", 50)]) == report.sentences([])
    lines = report.sentences([ABOUT, _inference("a:1", 50), _inference("b:1", 60, same=False)])
    assert lines[0] == "Measured on NVIDIA X:"
    text = "\n".join(lines)
    assert "2 cases of inference a session takes 0.50 of stock onnxruntime's device memory (0.62 of" in text
    assert (
        "at 0.50 of its time, 0.25 as a CUDA graph; 1 of 2 took what was predicted to 5%; 1 of 2 have its bits" in text
    )
    assert "- Training steps beside PyTorch: not measured yet." in lines
    assert len(lines) == 1 + len(stages.STAGES)
    assert "not measured" in report.table([ABOUT])


def test_budgets_below_the_weights_are_said_beside_the_plan_that_holds_all() -> None:
    moved = {"total": 60 << 20, "on_the_host": 30 << 20, "copied": 45 << 20}
    found = {
        "budget 100%": _ran(100 << 20, 2.0) | {"total": 99 << 20, "on_the_host": 0, "copied": 0},
        "budget 60%": _ran(60 << 20, 4.0) | moved,
        "budget 60%, ahead": _ran(60 << 20, 3.0) | moved | {"ahead": 15 << 20},
        "budget 40%": _ran(40 << 20, 8.0, same=False) | moved,
        "budget 25%": {"failed": "out of memory", **moved},
        "stock": _ran(120 << 20, 2.0),
    }
    rows = [ABOUT, {"stage": "windows", "item": "a:1", "seconds": 1.0, "contestants": found}]
    (said,) = (line for line in report.sentences(rows) if line.startswith("- Budgets below"))
    assert "60 %: 0.60 of the memory at 2.00 of the time, stock's bits in 1 of 1 (copied ahead in 0.75 of" in said
    assert "40 %: 0.40 of the memory at 4.00 of the time, stock's bits in 0 of 1" in said
    assert "25 %: not measured" in said
    text = report.table(rows)
    planned = "60.0 MiB planned, 30.0 of weights on the host, 45.0 copied a run"
    assert f"a:1, budget 60%: {planned}" in text
    assert f"a:1, budget 60%, ahead: {planned}, 15.0 of them ahead" in text
    assert "budget 25%  failed: out of memory" in text


def test_the_page_says_what_the_kept_rows_say() -> None:
    rows = record.load(Path(program.__file__).parent / "measured" / "rows.jsonl")
    assert report.sentences_in(report.PAGE.read_text(encoding="utf-8")) == report.sentences(rows)
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter"
    assert report.sentences_in(report.with_sentences(page, [ABOUT])) == report.sentences([ABOUT])


def test_rows_become_tables_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    failed = {"stage": "inference", "item": "c:1", "seconds": 2.0, "failed": "no answer within 60 s"}
    facts = {
        "stage": "facts",
        "item": "repeat",
        "seconds": 1.0,
        "facts": [{"claim": "x", "seen": "y", "verdict": "holds"}],
    }
    path = tmp_path / "rows.jsonl"
    for row in (ABOUT, _inference("a:1", 50), failed, facts):
        record.append(path, row)
    result = CliRunner().invoke(program.main, ["--print", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    table = (tmp_path / "table.txt").read_text()
    assert "a:1" in table
    assert "failed: c:1: no answer within 60 s" in table
    assert "not measured: resnet50:64" in table
    assert "[holds] x" in (tmp_path / "cuda_facts.txt").read_text()
    assert (tmp_path / "inference.png").stat().st_size > 5000


def test_every_item_is_one_that_there_is() -> None:
    assert set(stages.FACTS) == set(CHECKS)
    for networks in (stages.INFERENCE, stages.TINY):
        assert set(networks) <= set(models.NAMES)
    assert len(stages.INFERENCE) == 8
    assert sum(stage.share for stage in stages.STAGES) <= 580
    result = CliRunner().invoke(program.main, ["--stages", "inferense"])
    assert result.exit_code == 2
    assert "'inferense' is no stage: sessions, facts" in result.output


@pytest.mark.parametrize("form", [slices.unrolled, slices.looped])
def test_a_batch_in_slices_computes_the_same(form: Any) -> None:
    whole, part = (models.build("mobilenet_v2", batch=n, **stages.TINY["mobilenet_v2"]) for n in (4, 2))
    x = np.random.default_rng(0).standard_normal((4, 3, 32, 32)).astype(np.float32)
    found = []
    for model in (whole, form(part, 2)):
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        found.append(session.run(None, {session.get_inputs()[0].name: x})[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert not np.allclose(found[0][0], found[0][2])


def _provider(path: Path, archs: dict[int, bytes]) -> None:
    """A library that is nothing but a section with machine code for some architectures."""
    entries = b"".join(struct.pack("<IIQQII", 2, 32, len(code), 0, 0, arch) + code for arch, code in archs.items())
    fatbin = struct.pack("<IHHQ", bundle.FATBIN_MAGIC, 1, 16, len(entries)) + entries
    names = b"\0.nv_fatbin\0.shstrtab\0"
    begin = 64
    table = begin + len(fatbin) + len(names)
    header = b"\x7fELF" + bytes(36) + struct.pack("<Q", table) + bytes(10) + struct.pack("<HHH", 64, 3, 2)
    rows = [(0, 0, 0, 0, 0, 0), (1, 1, 0, 0, begin, len(fatbin)), (12, 3, 0, 0, begin + len(fatbin), len(names))]
    sections = b"".join(struct.pack("<IIQQQQ", *row) + bytes(24) for row in rows)
    path.parent.mkdir(parents=True)
    path.write_bytes(header.ljust(begin, b"\0") + fatbin + names + sections)


def test_a_bundle_keeps_one_architecture_and_says_which_piece_is_missing(tmp_path: Path) -> None:
    site = tmp_path / "site"
    noise = np.random.default_rng(0).bytes
    _provider(site / bundle.PROVIDER, {80: noise(4096), 90: (kept := noise(4096))})
    assert bundle.keep_architecture(site / bundle.PROVIDER, 90) == (4096, 4096)
    data = (site / bundle.PROVIDER).read_bytes()
    assert kept in data
    assert bytes(4096) in data
    with pytest.raises(ValueError, match="no machine code for sm_75"):
        bundle.keep_architecture(site / bundle.PROVIDER, 75)
    pieces = bundle.pack(site, tmp_path / "out", 3000)
    assert len(pieces) > 1
    made = tmp_path / "made"
    join.join(tmp_path / "out", made)
    assert (made / bundle.PROVIDER).read_bytes() == data
    whole = pieces[1].read_bytes()
    pieces[1].write_bytes(whole[:-1])
    with pytest.raises(SystemExit, match="one was cut short on its way"):
        join.join(tmp_path / "out", made)
    pieces[1].unlink()
    with pytest.raises(
        SystemExit, match=rf"of the bundle's {len(pieces)} pieces 1 isn't below .*: copy part1 there, too"
    ):
        join.join(tmp_path / "out", made)
    with pytest.raises(SystemExit, match="there is no piece of a bundle"):
        join.join(made, made)


def test_without_a_device_it_says_what_is_missing(tmp_path: Path) -> None:
    from tests.support.cuda import ABSENT

    if not ABSENT:
        pytest.skip("there is a device")
    result = CliRunner().invoke(program.main, ["--out", str(tmp_path), "--stages", "facts", "--no-torch"])
    assert result.exit_code == 1
    assert "cuda:0" in result.output
    assert not (tmp_path / "rows.jsonl").exists()
