"""Files and temporary folders through what ends processes: forks that exit, kills, and two that save at once."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from memonger import files
from memonger.files import ScratchFolder, copy_part, in_small_writes, write_whole
from memonger.ir import save
from memonger.ir.save import save_model
from tests.support.interruptions import KINDS, content, kill_while_saving, model

ROOT = Path(__file__).parents[1]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def _aged(folder: Path) -> None:
    """Give a folder the age at which one that nobody holds counts as abandoned; this process looks for such again."""
    hour_ago = time.time() - 3600
    os.utime(folder, (hour_ago, hour_ago))
    files._LOOKED.clear()


def test_the_exit_of_a_forked_child_leaves_its_parents_folder(temporary: Path) -> None:
    script = (
        "import os, sys\n"
        "from memonger.files import ScratchFolder, copy_part, in_small_writes, write_whole\n"
        "folder = ScratchFolder()\n"
        "(folder.path / 'momenta').write_bytes(b'1')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(0)\n"  # runs what is to run at exit, unlike os._exit
        "os.waitpid(child, 0)\n"
        "assert (folder.path / 'momenta').read_bytes() == b'1'\n"
        "print(folder.path)\n"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    ran = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert not Path(ran.stdout.strip()).exists(), "its own exit removes it"


def test_what_a_killed_process_left_is_removed_by_the_next(temporary: Path) -> None:
    script = (
        "import time\nfrom memonger.files import ScratchFolder, copy_part, in_small_writes, write_whole\n"
        "folder = ScratchFolder()\nprint(folder.path, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        _aged(left)
        ScratchFolder().remove()
        assert left.is_dir(), "while its process lives it stays, however old"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert left.is_dir()
    _aged(left)
    ScratchFolder().remove()
    assert not left.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")
def test_who_saves_in_a_temporary_folder_of_its_own_waits_for_nobody(temporary: Path) -> None:
    import fcntl

    folder = ScratchFolder()
    descriptor = os.open(folder.path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as a save of large weights does, but it would wait
    os.close(descriptor)
    folder.remove()


def test_only_abandoned_folders_of_ours_are_removed(temporary: Path) -> None:
    young, foreign = temporary / "memonger-tmp-abcd1234", temporary / "memonger-mine"
    for folder in (young, foreign):
        folder.mkdir()
    _aged(foreign)
    ScratchFolder().remove()
    assert young.is_dir()
    assert foreign.is_dir()
    _aged(young)
    ScratchFolder().remove()
    assert not young.exists()


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "INLINE_LIMIT", 100)


@pytest.mark.usefixtures("small_limit")
def test_earlier_weights_go_once_nobody_refers_to_them(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save_model(model(1.0), path)
    (first,) = tmp_path.glob("m.onnx.*.data")
    save_model(ir.load(path), tmp_path / "other.onnx")  # refers to the same weights
    save_model(model(2.0), path)
    assert first.exists()
    assert content(tmp_path / "other.onnx") == {1.0}
    (tmp_path / "other.onnx").unlink()
    save_model(model(3.0), path)
    assert len(list(tmp_path.iterdir())) == 2
    assert content(path) == {3.0}


@pytest.mark.usefixtures("small_limit")
def test_equal_weights_are_one_file_and_the_same_bytes(tmp_path: Path) -> None:
    for _ in range(2):
        save_model(model(1.0), tmp_path / "m.onnx")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("small_limit")
def test_two_that_save_at_once_leave_one_wholemodel(tmp_path: Path) -> None:
    path, stop = tmp_path / "m.onnx", time.monotonic() + 1.0

    def saves(fill: float) -> None:
        while time.monotonic() < stop:
            save_model(model(fill), path)

    threads = [threading.Thread(target=saves, args=(fill,)) for fill in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert content(path) in ({1.0}, {2.0})
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("kind", ["model and weights", "state", "export"])
def test_a_kill_leaves_the_old_or_the_new_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "saved"
    assert kill_while_saving(kind, path, times=1) == {"old or new": 1}
    for left in tmp_path.glob(".memonger-tmp-*"):
        _aged(left)
    KINDS[kind][0](path, 1.0)
    assert not list(tmp_path.glob(".memonger-tmp-*"))


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="NUL"):
        write_whole(tmp_path / "a\0b", lambda target: target.write(b""))
    assert list(tmp_path.iterdir()) == []


def _pipes() -> bool:
    return hasattr(os, "mkfifo")


@pytest.mark.parametrize("size", [0, 1, 3_000_001])
def test_what_is_written_in_small_writes_is_the_file(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(0).bytes(size)
    with in_small_writes(tmp_path / "file"):
        assert (tmp_path / "file").is_fifo() == _pipes()
        if size:
            (tmp_path / "file").write_bytes(data)
    assert [each.name for each in tmp_path.iterdir()] == (["file"] if size else [])
    assert not size or (tmp_path / "file").read_bytes() == data


def test_who_writes_in_small_writes_fails_as_always(tmp_path: Path) -> None:
    def write() -> None:
        with in_small_writes(tmp_path / "file"):
            (tmp_path / "file").write_bytes(b"some")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full") or not _pipes(), reason="needs a device that is full")
def test_a_full_disk_ends_small_writes_and_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "file.content").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), in_small_writes(tmp_path / "file"):
        (tmp_path / "file").write_bytes(bytes(3_000_001))
    assert not (tmp_path / "file").exists()


def test_a_pipe_ends_though_another_process_has_it_open(tmp_path: Path) -> None:
    """A process that was forked meanwhile holds the end that is written to."""
    if not _pipes():
        return
    with in_small_writes(tmp_path / "file"):
        (tmp_path / "file").write_bytes(b"some")
        held = os.open(tmp_path / "file", os.O_WRONLY)
    os.close(held)
    assert (tmp_path / "file").read_bytes() == b"some"


@pytest.mark.parametrize("has_call", [True, False])
def test_a_part_of_a_file_is_copied_behind_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_call: bool
) -> None:
    if not has_call:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    data = np.random.default_rng(0).bytes(400_000)
    (tmp_path / "source").write_bytes(data)
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("wb") as target:
        target.write(b"before")
        assert copy_part(source, 1000, 300_000, target) == 300_000
        target.write(b"behind")
        assert copy_part(source, 399_990, 100, target) == 10
    copied = b"before" + data[1000:301_000] + b"behind" + data[399_990:]
    assert (tmp_path / "target").read_bytes() == copied
