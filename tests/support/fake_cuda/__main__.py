"""``python -m tests.support.fake_cuda [--site DIR] COMMAND ...``: run a command with the stand-in for CUDA.

The first call makes DIR (~/.cache/memonger/fake_cuda/... unless given): the newest onnxruntime-gpu there is,
cuda-bindings and nvidia-ml-py, by ``pip install --target`` without dependencies (260 MB to download), and the
stand-in's libraries beside them. A DIR that holds these packages is taken as it is, and where no package index answers
so is the newest that was made before. The command then finds them first (PYTHONPATH, LD_LIBRARY_PATH): its onnxruntime,
for the CPU as well, is the one of that onnxruntime-gpu, whichever version is installed beside it. It has
MEMONGER_FAKE_CUDA=1 in its environment.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from tests.support.fake_cuda import build

PACKAGES = ("onnxruntime-gpu", "cuda-bindings", "cuda-pathfinder", "nvidia-ml-py")
ROOT = Path(__file__).parents[3]
FLAG = "MEMONGER_FAKE_CUDA"


def default_site() -> Path:
    """A folder of this Python's and the newest onnxruntime-gpu's own.

    Raises:
        click.ClickException: no package index answers, and none was made before.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memonger" / "fake_cuda"
    stem = f"{sys.implementation.cache_tag}-{PACKAGES[0]}-"
    command = [sys.executable, "-m", "pip", "index", "versions", PACKAGES[0]]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    newest = re.match(rf"{PACKAGES[0]} \(([\w.]+)\)", answer.stdout)
    if newest:
        return cache / f"{stem}{newest[1]}"
    made = [site for site in cache.glob(f"{stem}*") if (site / build.PROVIDER).is_file()]
    if not made:
        raise click.ClickException(
            f"pip finds no {PACKAGES[0]} to download, and {cache} has none: {' '.join(answer.stderr.split())[-300:]}"
        )
    return max(made, key=lambda site: [int(part) for part in re.findall(r"\d+", site.name)])


def install(site: Path) -> None:
    """Fill a folder with the newest packages, unless it has them already."""
    if (site / build.PROVIDER).is_file():
        return
    if site.is_dir() and any(site.iterdir()):
        raise click.ClickException(f"{site} holds other things: name an empty folder, or one with onnxruntime-gpu")
    site.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=site.parent) as scratch:
        made = Path(scratch) / "site"
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--target", str(made)]
        subprocess.run([*command, *PACKAGES], check=True, stdout=sys.stderr)
        if site.is_dir():
            site.rmdir()
        made.rename(site)


def libraries(site: Path) -> Path:
    """The folder with the stand-in for a site's onnxruntime, built anew where a source or the provider has changed."""
    folder = site.with_name(site.name + "-lib")
    provider = site / build.PROVIDER
    stamp, state = folder / "built-from", _state(provider)
    if not stamp.is_file() or stamp.read_text() != state:
        build.build(folder, provider)
        stamp.write_text(state)
    return folder


def _state(provider: Path) -> str:
    digest = hashlib.sha256(f"{provider.stat().st_size} {provider.stat().st_mtime_ns}".encode())
    for source in sorted(build.HERE.glob("*.[chp]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def environment(site: Path, folder: Path) -> dict[str, str]:
    """The environment a command runs in."""

    def before(name: str, *paths: Path) -> str:
        return os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(name)])])

    return {
        **os.environ,
        "PYTHONPATH": before("PYTHONPATH", site, ROOT),
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", folder),
        FLAG: "1",
    }


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--site", type=click.Path(path_type=Path, file_okay=False), help="Folder of the packages.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(site: Path | None, command: tuple[str, ...]) -> None:
    """Run COMMAND on the stand-in for CUDA."""
    missing = build.missing_tools()
    if missing:
        raise click.ClickException(
            f"{', '.join(missing)} not found: apt install gcc binutils (or as your system has it)"
        )
    try:
        site = (site or default_site()).resolve()
        install(site)
        folder = libraries(site)
    except subprocess.CalledProcessError as error:
        raise click.ClickException(f"{' '.join(map(str, error.cmd))} failed: see above") from error
    try:
        os.execvpe(command[0], list(command), environment(site, folder))
    except OSError as error:
        raise click.ClickException(f"{command[0]}: {error.strerror}") from error


if __name__ == "__main__":
    main()
