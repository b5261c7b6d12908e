"""The example of docs/FEEDING.md runs, and prints what stands there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "FEEDING.md"


def _model() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> small (float[N,3,32,32] image) => (float[N,4] scores) {
            rows = Flatten(image)
            scores = Gemm(rows, weight)
        }"""
    )
    weight = np.random.default_rng(0).standard_normal((3 * 32 * 32, 4)).astype(np.float32) / 50
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    return model


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(48):
        image = np.random.default_rng(number).standard_normal((3, 32, 32)).astype(np.float32)
        np.savez(tmp_path / "photos" / f"{number}.npz", image=image, label=number % 4)
    onnx.save(_model(), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    source, printed = re.findall(r"^```(?:python|text)\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)[
        :2
    ]
    names: dict[str, Any] = {}
    exec(source, names)
    assert capsys.readouterr().out.split() == printed.split()
    assert names["loss"] < 1.5
    assert sorted(names["feeds"].identities) == sorted(names["photos"])
    assert names["trainer"].steps == 3
