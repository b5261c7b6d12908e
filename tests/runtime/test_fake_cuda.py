"""The stand-in for CUDA counts, limits and records memory as it says: through ctypes alone, without a provider."""

import ctypes
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.fake_cuda import build

pytestmark = pytest.mark.skipif(bool(build.missing_tools()), reason="needs gcc, nm and readelf")

PREAMBLE = """
import ctypes, os
folder = os.environ["FAKE_LIBRARIES"]
runtime, driver, monitor = (
    ctypes.CDLL(os.path.join(folder, name)) for name in ("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1")
)
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
FULL, WRONG = 2, 1


def allocate(size):
    pointer = ctypes.c_void_p()
    return runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)), pointer


def free_and_total():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value, total.value


def copy(to, source, size, kind, stream=None):
    return runtime.cudaMemcpyAsync(to, source, ctypes.c_size_t(size), kind, stream)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime, driver and monitor, compiled with every warning an error."""
    made = tmp_path_factory.mktemp("fake_cuda") / "lib"
    build.build(made, extra=("-Werror",))
    return made


def run(folder: Path, code: str, **settings: str) -> str:
    """What a program prints, in a process of its own that has the stand-in's settings."""
    environment = {"FAKE_LIBRARIES": str(folder), "LD_LIBRARY_PATH": str(folder), **settings}
    program = PREAMBLE + textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("source", sorted(path.name for path in build.HERE.glob("*.c")))
def test_every_source_compiles_without_warnings(source: str, tmp_path: Path) -> None:
    command = ["gcc", *build.FLAGS, "-Werror", "-c", "-o", str(tmp_path / "object"), str(build.HERE / source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_allocations_are_counted_to_the_byte(folder: Path) -> None:
    run(
        folder,
        """
        before, total = free_and_total()
        assert before == total == 1 << 20
        error, first = allocate(1000)
        error, second = allocate(0)
        assert free_and_total() == (total - 1000, total)
        assert runtime.cudaFree(first) == runtime.cudaFree(second) == 0
        assert free_and_total() == (total, total)
        assert runtime.cudaFree(first) == WRONG
        """,
        FAKE_CUDA_MEMORY=str(1 << 20),
    )


def test_a_full_device_refuses_and_keeps_its_count(folder: Path) -> None:
    run(
        folder,
        """
        error, all_of_it = allocate(1 << 20)
        assert error == 0
        assert allocate(1)[0] == FULL
        assert free_and_total()[0] == 0
        runtime.cudaFree(all_of_it)
        assert allocate(1 << 20)[0] == 0
        """,
        FAKE_CUDA_MEMORY=str(1 << 20),
    )


def test_memory_that_is_not_written_takes_no_pages(folder: Path) -> None:
    run(
        folder,
        """
        import resource
        size = 64 << 30
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert allocate(size)[0] == 0
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB
        """,
        FAKE_CUDA_MEMORY=str(128 << 30),
    )


def test_copies_carry_bytes_one_way_only(folder: Path) -> None:
    printed = run(
        folder,
        """
        host, back = ctypes.create_string_buffer(b"memory", 8), ctypes.create_string_buffer(8)
        (_, one), (_, two) = allocate(8), allocate(8)
        assert copy(one, host, 8, TO_DEVICE) == copy(two, one, 8, ON_DEVICE) == copy(back, two, 8, TO_HOST) == 0
        assert back.value == b"memory"
        assert copy(one, host, 8, TO_HOST) == WRONG
        assert copy(host, one, 8, TO_DEVICE) == WRONG
        assert copy(one, host, 8, ON_DEVICE) == WRONG
        assert copy(back, host, 8, TO_HOST) == WRONG
        assert runtime.cudaMemset(host, 0, ctypes.c_size_t(8)) == WRONG
        assert host.value == b"memory"
        assert driver.cuMemcpyHtoD_v2(one, two, ctypes.c_size_t(8)) == WRONG
        """,
    )
    assert "cudaMemcpyAsync of 8 bytes, kind 2, to device from host memory" in printed


def test_addresses_inside_an_allocation_belong_to_it_and_those_behind_do_not(folder: Path) -> None:
    run(
        folder,
        """
        host = ctypes.create_string_buffer(4096)
        pointers = [allocate(4096)[1].value for _ in range(2000)]  # enough for the table to grow
        for pointer in pointers[::2]:
            assert runtime.cudaFree(ctypes.c_void_p(pointer)) == 0
        for number, pointer in enumerate(pointers):
            error = copy(ctypes.c_void_p(pointer + 4088), host, 8, TO_DEVICE)
            assert error == (0 if number % 2 else WRONG), number
        """,
    )


def test_devices_have_memory_of_their_own(folder: Path) -> None:
    run(
        folder,
        """
        count = ctypes.c_int()
        assert runtime.cudaGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 2
        allocate(600)
        assert allocate(600)[0] == FULL
        assert runtime.cudaSetDevice(1) == 0
        assert free_and_total() == (1000, 1000)
        assert allocate(600)[0] == 0
        assert runtime.cudaSetDevice(2) == 101
        assert free_and_total() == (400, 1000)
        """,
        FAKE_CUDA_DEVICES="2",
        FAKE_CUDA_MEMORY="1000",
    )


def test_no_devices_is_an_error_not_a_crash(folder: Path) -> None:
    run(
        folder,
        """
        count = ctypes.c_int(7)
        assert runtime.cudaGetDeviceCount(ctypes.byref(count)) == 100 and count.value == 0
        assert driver.cuInit(0) == 100
        assert allocate(8)[0] != 0
        assert runtime.cudaMemGetInfo(ctypes.byref(ctypes.c_size_t()), ctypes.byref(ctypes.c_size_t())) != 0
        """,
        FAKE_CUDA_DEVICES="0",
    )


def test_a_graph_does_its_copies_when_it_is_launched(folder: Path) -> None:
    run(
        folder,
        """
        stream, graph, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        host, back = ctypes.create_string_buffer(b"first", 8), ctypes.create_string_buffer(8)
        _, memory = allocate(8)
        assert runtime.cudaStreamCreate(ctypes.byref(stream)) == 0
        assert runtime.cudaStreamBeginCapture(stream, 0) == 0
        assert copy(memory, host, 8, TO_DEVICE, stream) == 0
        assert copy(back, memory, 8, TO_HOST, stream) == 0
        assert runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
        assert back.value == b""
        assert runtime.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)) == 0
        for word in (b"second", b"third"):
            host.value = word
            assert runtime.cudaGraphLaunch(executable, stream) == 0
            assert back.value == word
        """,
    )


def test_kernels_are_counted_and_not_run(folder: Path) -> None:
    run(
        folder,
        """
        runtime.fakeLaunches.restype = ctypes.c_long
        _, memory = allocate(8)
        assert [runtime.cudaLaunchKernel(memory) for _ in range(3)] == [0, 0, 0]
        assert runtime.fakeLaunches() == 3
        """,
    )


@pytest.mark.parametrize(
    "call", ["allocate(8)[0]", "runtime.cudaFree(memory)", "runtime.cudaStreamSynchronize(stream)"]
)
def test_what_cannot_be_captured_spoils_the_capture(call: str, folder: Path) -> None:
    run(
        folder,
        f"""
        stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
        _, memory = allocate(8)
        runtime.cudaStreamCreate(ctypes.byref(stream))
        assert runtime.cudaStreamBeginCapture(stream, 0) == 0
        assert {call} == 900
        assert runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 901
        assert {call} == 0
        """,
    )


def test_the_legacy_stream_cannot_be_captured(folder: Path) -> None:
    run(folder, "assert runtime.cudaStreamBeginCapture(None, 0) == 900")


def test_the_monitor_and_the_driver_see_what_the_runtime_allocated(folder: Path) -> None:
    run(
        folder,
        """
        class Memory(ctypes.Structure):
            _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

        assert monitor.nvmlInit_v2() == 0
        handles = [ctypes.c_void_p(), ctypes.c_void_p()]
        for index, handle in enumerate(handles):
            assert monitor.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
        assert monitor.nvmlDeviceGetHandleByIndex_v2(2, ctypes.byref(ctypes.c_void_p())) != 0
        assert runtime.cudaSetDevice(1) == 0
        pointer = ctypes.c_void_p()
        assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(300)) == 0
        seen = [Memory(), Memory()]
        for handle, memory in zip(handles, seen):
            assert monitor.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        assert [(m.total, m.free, m.used) for m in seen] == [(1000, 1000, 0), (1000, 700, 300)]
        """,
        FAKE_CUDA_DEVICES="2",
        FAKE_CUDA_MEMORY="1000",
    )


def test_stubs_stand_in_for_what_the_sources_lack(tmp_path: Path) -> None:
    library = build.Library("libcublas.so.13", ("cublasGetMathMode", "cublasSnew", "cublasThingCreate"), versioned=True)
    runtime = build.Library("libcudart.so.13", versioned=True)
    for each in (runtime, library):
        build.compile_library(each, runtime, tmp_path, ("-Werror",))
    ctypes.CDLL(str(tmp_path / runtime.soname))
    made = ctypes.CDLL(str(tmp_path / library.soname))
    handle = ctypes.c_void_p()
    assert made.cublasSnew() == made.cublasThingCreate(ctypes.byref(handle)) == 0
    assert handle.value
