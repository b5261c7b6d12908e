"""A BentoML service whose workers hold a `memonger.Fleet` each."""

from pathlib import Path

from memonger.serving import folder as files
from memonger.serving.package import Estimate, Naming, Package, binding_notes

TEXT = """
A BentoML service: `bentoml serve service:PlannedService` in this folder, or `bentoml build`. Requests are JSON in the
form of the Open Inference Protocol, answers likewise:

```bash
curl localhost:3000/infer -H 'Content-Type: application/json' \\
    -d '{"model": "NAME", "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
```

Where there is one model, it needn't be named. A request that has no arena within WAIT seconds gets the status 429;
`/metrics` has figures of the fleets of all workers.

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


NAMING = Naming(
    r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?",
    "BentoML takes lower-case letters, digits and ._- that begin and end with a letter or digit, 63 at most",
)


def write(package: Package, folder: Path) -> tuple[Estimate, tuple[str, ...]]:
    """Write the service."""
    estimate = package.as_planned()
    settings = files.add_models(package, folder)
    files.add_file(folder, "bentoml_service.py", "service.py")
    (folder / "bentofile.yaml").write_text(BENTOFILE)
    text = TEXT.replace("WAIT", f"{package.sharing.wait:g}") + files.models_table(package)
    request = package.instances * estimate.request_bytes
    files.describe_export(package, folder, estimate, text, **settings, request_bytes=request)
    return estimate, binding_notes(package)
