"""A BentoML service whose workers hold a `memonger.Session` each."""

from pathlib import Path

from memonger.export import folder as files
from memonger.export.package import Estimate, Package, binding_notes, check_name
from memonger.export.process import request_bytes

TEXT = """
A BentoML service: `bentoml serve service:PlannedService` in this folder, or `bentoml build`. Requests are JSON in the
form of the Open Inference Protocol, answers likewise:

```bash
curl localhost:3000/infer -H 'Content-Type: application/json' \\
    -d '{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
```

Every worker is a process with weights and an arena of its own.
"""
BENTOFILE = """service: "service:PlannedService"
include:
  - "service.py"
  - "memonger.json"
  - "*.onnx"
  - "*.data"
python:
  packages:
    - "memonger[cpu]"
"""


def write(package: Package, folder: Path) -> tuple[Estimate, tuple[str, ...]]:
    """Write the service.

    Raises:
        PlanError: a name that BentoML refuses.
    """
    words = "BentoML takes lower-case letters, digits and ._- that begin and end with a letter or digit, 63 at most"
    check_name(package.name, r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", words)
    estimate = package.as_planned()
    names = files.add_plans(package, folder)
    files.add_file(folder, "bentoml_service.py", "service.py")
    (folder / "bentofile.yaml").write_text(BENTOFILE)
    files.add_settings(
        package, folder, estimate, plans=names, request_bytes=package.instances * request_bytes(estimate)
    )
    files.add_readme(package, folder, estimate, TEXT)
    return estimate, binding_notes(package)
