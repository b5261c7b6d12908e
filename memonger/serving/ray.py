"""A Ray Serve application whose replicas hold a `memonger.Fleet` each."""

from pathlib import Path

from memonger.serving import folder as files
from memonger.serving.package import Estimate, Package, binding_notes

TEXT = """
A Ray Serve application: `serve run app:app` in this folder. Requests are JSON in the form of the Open Inference
Protocol, answers likewise:

```bash
curl localhost:8000/v2/models/NAME/infer \\
    -d '{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
```

Other deployments call a handle: `await handle.run.remote({"x": array}, "NAME")`. Where there is one model, it needn't
be named. A request that has no arena within WAIT seconds gets the status 503; figures of the fleet are among Ray's
metrics.

Every replica is a process with weights and an arena of its own, and asks Ray for the memory it takes. On several
machines the folder has to be on each, as `working_dir` of the runtime environment, say. Replicas need
`pip install 'memonger[cpu]'`.
"""


def write(package: Package, folder: Path) -> tuple[Estimate, tuple[str, ...]]:
    """Write the application."""
    estimate = package.as_planned()
    settings = files.add_models(package, folder)
    files.add_file(folder, "ray_app.py", "app.py")
    text = TEXT.replace("WAIT", f"{package.sharing.wait:g}") + files.models_table(package)
    files.describe_export(package, folder, estimate, text, **settings, request_bytes=estimate.request_bytes)
    return estimate, binding_notes(package)
