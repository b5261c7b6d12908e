"""The checks by name; each runs in a process of its own, so that one that crashes is a row of the table."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from memonger.devices import Device
from tests.facts.fact import LOST, Fact

TIMEOUT = 900.0  # seconds for one check


@dataclass(frozen=True, slots=True)
class Check:
    """A section of the table: a generator of facts in tests.facts."""

    title: str
    module: str
    function: str

    def facts(self, device: Device) -> Iterator[Fact]:
        yield from getattr(importlib.import_module(f"tests.facts.{self.module}"), self.function)(device)


CHECKS: Mapping[str, Check] = {
    "order": Check("Order", "order", "check_order"),
    "any-order": Check("Order: a plan's instead of onnxruntime's", "order", "check_any_order"),
    "inference": Check("Networks reloaded: inference", "order", "check_reload_inference"),
    "training": Check("Networks reloaded: training steps", "order", "check_reload_training"),
    "bound": Check("Addresses: bound outputs", "addresses", "check_bound_outputs"),
    "special": Check("Addresses: inputs, views, subgraphs, many", "addresses", "check_special_outputs"),
    "in-place": Check("Addresses: in place", "values", "check_in_place"),
    "host": Check("Values on the host", "tables", "check_host_values"),
    "allocator": Check("Memory: external allocator, statistics", "memory", "check_external_allocator"),
    "scratch": Check("Memory: scratch by cuDNN option", "memory", "check_fixed_region"),
    "arena": Check("Memory: the provider's own arena", "memory", "check_provider_arena"),
    "loading": Check("Memory: weights while loading", "memory", "check_loading"),
    "replay": Check("CUDA graphs: replay", "graphs", "check_replay"),
    "executions": Check("CUDA graphs: executions of a run", "graphs", "check_executions"),
    "graph-ids": Check("CUDA graphs: several in a session", "graphs", "check_several_graphs"),
    "graph-refusals": Check("CUDA graphs: what is refused", "graphs", "check_refusals"),
    "graph-allocation": Check("CUDA graphs: allocation under capture", "graphs", "check_allocation"),
    "graph-unbound": Check("CUDA graphs: session.run", "graphs", "check_unbound"),
    "times": Check("Profile", "values", "check_times"),
    "scatter": Check("Determinism: scattered sums", "values", "check_scatter"),
    "repeat": Check("Determinism: training steps by cudnn_conv_algo_search", "values", "check_repeatable"),
    "opsets": Check("Operators: kernels by opset", "tables", "check_opsets"),
    "operators": Check("Operators: kernels by element type", "tables", "check_operators"),
}


def in_process(name: str, device: Device) -> Iterator[Fact]:
    """A check's facts, from a process of its own; what it dies of is one more."""
    command = [sys.executable, "-m", "tests.facts", "--device", str(device), "--child", name]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        output, words, code = result.stdout, result.stderr, result.returncode
    except subprocess.TimeoutExpired as late:
        output, words, code = _text(late.stdout), f"no end after {TIMEOUT:.0f} s", -1
    yield from (Fact(**json.loads(line)) for line in output.splitlines() if line.startswith('{"claim"'))
    if code:
        last = [line for line in words.splitlines() if line.strip()][-1:]
        yield Fact(f"the check {name!r} runs to its end", f"exit status {code}: {' '.join(last)[:400]}", LOST)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
