"""The page of a step of PyTorch's: what it shows is what is planned."""

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memonger.torch
from memonger.errors import PlanError
from tests.support.small_modules import case


def shown(path: Path) -> dict[str, Any]:
    """What a page holds."""
    found = re.search(r'id="data">([^<]*)</script>', path.read_text())
    assert found is not None
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return data


def most_live(data: dict[str, Any], kinds: list[str]) -> int:
    """The most bytes that a page shows at a step, but for inputs and weights."""
    columns, live = data["rectangles"], [0] * len(data["steps"]["node"])
    for kind, size, start, stop in zip(kinds, columns["bytes"], columns["start"], columns["stop"], strict=True):
        for step in range(start, stop) if kind not in ("input", "weight") else ():
            live[step] += size
    return max(live)


def test_the_page_shows_the_planned_step(tmp_path: Path) -> None:
    module, inputs = case("images")
    optimizer, path = torch.optim.AdamW(module.parameters()), tmp_path / "step.html"
    plan = memonger.torch.report(module, inputs, path, "1.4MiB", optimizer, title="Small images")
    text = path.read_text()
    assert "Small images takes" in text
    assert "PyTorch is expected to take about" in text
    data = shown(path)
    columns, steps = data["rectangles"], data["steps"]
    kinds = [data["kinds"][kind]["name"] for kind in columns["kind"]]
    sizes = dict.fromkeys(kinds, 0)
    for kind, size in zip(kinds, columns["bytes"], strict=True):
        sizes[kind] += size
    assert sizes["input"] == sum(one.nbytes for one in inputs)
    assert sizes["input"] + sizes["weight"] == plan.given_bytes + plan.state_bytes
    assert len(steps["node"]) == plan.nodes + 1 + plan.recomputed
    assert data["plan"]["recomputed_nodes"] == plan.recomputed > 0
    assert "recomputed" in kinds
    assert "kept" in kinds
    assert most_live(data, kinds) + plan.given_bytes + plan.state_bytes == plan.peak_bytes
    modules = {".".join(steps["modules"][module]) for module in steps["module"]}
    assert {name for name, part in module.named_modules() if isinstance(part, torch.nn.Conv2d)} <= modules
    behind = steps["node"].index("what becomes of the outputs")
    assert {steps["operators"][one] for one in steps["operator"][behind:]} >= {"aten.convolution_backward.default"}


def test_other_viewers_have_it_and_netron_does_not(tmp_path: Path) -> None:
    module, inputs = case("scores")
    memonger.torch.report(module, inputs, tmp_path / "step.json", format="perfetto")
    assert json.loads((tmp_path / "step.json").read_bytes())
    with pytest.raises(PlanError, match="netron"):
        memonger.torch.report(module, inputs, tmp_path / "step.onnx", format="netron")


@pytest.mark.parametrize(("name", "in_backward"), [("images", False), ("words", True)])
def test_the_page_of_a_checkpointed_module_shows_its_eager_step(tmp_path: Path, name: str, in_backward: bool) -> None:
    module, inputs = case(name)
    optimizer, path = torch.optim.AdamW(module.parameters()), tmp_path / "step.html"
    whole = memonger.torch.plan_of(memonger.torch.checkpoint(module, inputs, "1GiB", optimizer)).peak_bytes
    for one in module.parameters() if in_backward else ():
        one.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    memonger.torch.checkpoint(module, inputs, int(0.8 * whole), optimizer, in_backward=in_backward)
    planned = memonger.torch.plan_of(module)
    plan = memonger.torch.report(module, inputs, path)
    assert replace(plan, seconds=0) == replace(planned, seconds=0)
    data = shown(path)
    columns, steps = data["rectangles"], data["steps"]
    kinds = [data["kinds"][kind]["name"] for kind in columns["kind"]]
    assert {"recomputed", "kept"} <= {*kinds}
    assert data["plan"]["recomputed_nodes"] == plan.recomputed > 0
    assert most_live(data, kinds) + plan.given_bytes + plan.state_bytes == plan.peak_bytes
    modules = {".".join(steps["modules"][module]) for module in steps["module"]}
    assert {
        name for name, part in module.named_modules() if isinstance(part, torch.nn.LayerNorm | torch.nn.Conv2d)
    } <= modules
    with pytest.raises(PlanError, match="leave out budget"):
        memonger.torch.report(module, inputs, path, "1GiB")
