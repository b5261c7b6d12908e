"""A KServe InferenceService whose container holds a `memonger.Fleet`, its memory request taken from the plans."""

import json
from pathlib import Path

from memonger.serving import folder as files
from memonger.serving.package import PROCESS_BYTES, Estimate, Naming, Package, binding_notes
from memonger.units import MiB, in_full

TEXT = """
A KServe predictor. Build the image, put its name into `inferenceservice.yaml`, and apply that:

```bash
docker build -t REGISTRY/{name}:1 . && docker push REGISTRY/{name}:1
kubectl apply -f inferenceservice.yaml
```

The container asks for {request}: the model's own memory, and {process} for the process around it. Its limit leaves room
for the weights to be copied while they are loaded. Every replica holds weights and an arena of its own.

It speaks the Open Inference Protocol: `POST /v2/models/{model}/infer`. `python server.py` serves it without Kubernetes.
A request that has no arena within {wait:g} seconds gets the status 503; `/metrics` has figures of the fleet.
"""
SERVICE = """apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: {name}
spec:
  predictor:
    minReplicas: {instances}
    maxReplicas: {instances}
    containers:
      - name: kserve-container
        image: {image}
{arguments}        ports:
          - containerPort: 8080
            protocol: TCP
        resources:
          requests:
            memory: {request}
          limits:
            memory: {limit}
"""
ARGUMENTS = """        args: ["--model_name", {name}]
"""
DOCKERFILE = """FROM python:3.12-slim
RUN pip install --no-cache-dir 'memonger[cpu,kserve]'
WORKDIR /app
COPY . .
ENTRYPOINT ["python", "server.py"]
"""


NAMING = Naming(
    r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "Kubernetes takes lower-case letters, digits and -, a letter first, 40 at most"
)


def write(package: Package, folder: Path) -> tuple[Estimate, tuple[str, ...]]:
    """Write the service, the program in its container, and a file to build that."""
    estimate = package.as_planned()
    settings = files.add_models(package, folder)
    files.add_file(folder, "kserve_server.py", "server.py")
    several = len(package.models) > 1
    arguments = "" if several else ARGUMENTS.format(name=json.dumps(package.name))
    request, limit = estimate.request_bytes, estimate.limit_bytes
    service = SERVICE.format(
        name=json.dumps(package.name), arguments=arguments, instances=package.instances,
        image=json.dumps(f"REGISTRY/{package.name}:1"), request=json.dumps(f"{request // MiB}Mi"),
        limit=json.dumps(f"{limit // MiB}Mi"),
    )  # fmt: skip
    (folder / "inferenceservice.yaml").write_text(service)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    text = TEXT.format(
        name=package.name, model="NAME" if several else package.name, request=in_full(request),
        process=in_full(PROCESS_BYTES), wait=package.sharing.wait,
    )  # fmt: skip
    files.describe_export(package, folder, estimate, text + files.models_table(package), **settings)
    return estimate, binding_notes(package)
