"""A PyTorch export with a dynamic batch: planned for several batches, equal to stock onnxruntime to the last bit."""

import warnings
from pathlib import Path

import numpy as np
import pytest

import memonger
from tests.support import networks
from tests.support.one_node_executor import run_poisoned

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")


class _Residual(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.GELU())
            for _ in range(3)
        )
        self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        tokens = x.flatten(2).transpose(1, 2)
        attended, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(self.norm(tokens + attended).mean(1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "torch.nn.Module"]:
    torch.manual_seed(0)
    module = _Residual().eval()
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        batch = torch.export.Dim("batch")
        example = (torch.randn(2, 3, 32, 32),)
        torch.onnx.export(module, example, str(path), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    return path, module


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("device", ["none", "cpu"])
def test_an_export_with_a_dynamic_batch(
    exported: tuple[Path, "torch.nn.Module"], device: str, batch: int, tmp_path: Path
) -> None:
    path, module = exported
    plan = memonger.search_plan(path, batch=batch, device=device, mode="inference")
    assert plan.arena_bytes == plan.lower_bound_bytes
    plan.save(tmp_path / "planned.onnx")
    session = memonger.Session(memonger.Plan.load(tmp_path / "planned.onnx"))
    stock = networks.stock(str(path), "ORT_DISABLE_ALL" if device == "none" else "ORT_ENABLE_ALL")
    results = []
    for seed in (1, 2):
        x = np.random.default_rng(seed).standard_normal((batch, 3, 32, 32)).astype(np.float32)
        name = session.input_names[0]
        expected = networks.run_stock(stock, {name: x})
        for byte in (0, 0xFF):
            session.arena.fill(byte)
            ours = session.run({name: x})
            assert networks.same_bits(ours, expected)
        with torch.no_grad():
            theirs = module(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(ours[session.output_names[0]], theirs, rtol=1e-4, atol=1e-5)
        results.append(expected)
    assert not networks.same_bits(*results)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_no_step_reads_a_byte_that_died(exported: tuple[Path, "torch.nn.Module"], device: str) -> None:
    path, _ = exported
    plan = memonger.search_plan(path, batch=3, device=device, mode="inference")
    x = np.random.default_rng(0).standard_normal((3, 3, 32, 32)).astype(np.float32)
    feeds = {str(plan.model.graph.inputs[0].name): x}
    stock = networks.stock(str(path), "ORT_DISABLE_ALL" if device == "none" else "ORT_ENABLE_ALL")
    assert networks.same_bits(run_poisoned(plan, feeds), networks.run_stock(stock, feeds))


def test_without_a_batch_it_is_one(exported: tuple[Path, "torch.nn.Module"]) -> None:
    plan = memonger.search_plan(exported[0], device="none", mode="inference")
    assert plan.batch == 1
    assert "has no size: it is 1" in plan.notes[0]
