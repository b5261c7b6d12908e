"""Devices: what is known of each kind, and how onnxruntime is driven there."""

import subprocess
import sys

import pytest

from memonger.devices import CPU, PROVIDERS, Device, parse_device
from memonger.errors import PlanError
from memonger.runtime.backend import backend


@pytest.mark.parametrize("text", ["none", "cpu", "cuda:0", "cuda:3"])
def test_a_device_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_device(text)) == text
    assert parse_device(parse_device(text)) == parse_device(text)


@pytest.mark.parametrize("text", ["", "gpu", "cpu:1", "none:0", "cuda:", "cuda:x", "CPU", "cpu\n"])
def test_what_is_no_device_is_refused_with_all_there_are(text: str) -> None:
    with pytest.raises(PlanError, match="is not a device: write none, cpu, cuda or cuda:N"):
        parse_device(text)


@pytest.mark.parametrize(
    ("device", "memory", "own"),
    [("cpu", "Cpu", True), ("cpu", "CudaPinned", False), ("cuda", "Cuda", True), ("cuda", "CudaPinned", False)],
)
def test_a_device_knows_its_own_memory(device: str, memory: str, own: bool) -> None:
    assert parse_device(device).owns(memory) is own


def test_what_runs_on_the_host_needs_no_memory_of_ours() -> None:
    for device in (Device(kind) for kind, facts in PROVIDERS.items() if facts.is_host):
        host = backend(device)
        host.check()
        assert (host.pool(), host.room()) == (None, None)
        assert host.providers(None, None, False) == [CPU.provider]


def test_a_session_on_the_cpu_imports_nothing_of_cuda() -> None:
    program = (
        "import sys, memonger\n"
        "from tests.support.training_models import batch, classifier\n"
        "plan = memonger.search_plan(classifier(), mode='inference', device='cpu')\n"
        "memonger.Session(plan).run({'x': batch()['x']})\n"
        "print([m for m in sys.modules if m.startswith(('cuda', 'memonger.runtime.cuda.'))])\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "['memonger.runtime.cuda.replay']"
