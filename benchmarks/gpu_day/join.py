"""Put the pieces of a bundle together: ``python3 join.py FOLDER SITE``. Any Python 3.9 runs it; see bundle.py."""

import hashlib
import io
import lzma
import re
import sys
import tarfile
from pathlib import Path

NAME = re.compile(r"bundle\.(\d+)-of-(\d+)\.([0-9a-f]{16})")


def join(folder: Path, site: Path) -> None:
    """Unpack the pieces below a folder into a site of packages.

    Raises:
        SystemExit: a piece is missing, cut short, or of another bundle; the text says which.
    """
    found = {path: NAME.fullmatch(path.name) for path in sorted(folder.rglob("bundle.*"))}
    pieces = {int(match[1]): path for path, match in found.items() if match}
    kinds = {match.group(2, 3) for match in found.values() if match}
    if not kinds:
        sys.exit(f"there is no piece of a bundle below {folder}")
    if len(kinds) > 1:
        sys.exit(f"the pieces below {folder} are of {len(kinds)} bundles: leave those of one")
    (count, digest) = kinds.pop()
    missing = [str(index) for index in range(int(count)) if index not in pieces]
    if missing:
        sys.exit(
            f"of the bundle's {count} pieces {', '.join(missing)} isn't below {folder}: "
            f"copy part{missing[0]} there, too"
        )
    data = b"".join(path.read_bytes() for _, path in sorted(pieces.items()))
    if hashlib.sha256(data).hexdigest()[:16] != digest:
        sys.exit(f"the pieces below {folder} aren't what was packed: one was cut short on its way; copy them again")
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(data))) as archive:
        archive.extractall(site, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    print(f"{site}: onnxruntime with {next(site.glob('onnxruntime/capi/*providers_cuda*')).name}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python3 join.py FOLDER SITE")
    join(Path(sys.argv[1]), Path(sys.argv[2]))
