"""The planned model for OpenVINO, in standard operators; it takes what order it likes."""

import json
from pathlib import Path

from memonger.errors import PlanError
from memonger.ir.save import save_model
from memonger.ir.values import required_inputs
from memonger.serving import folder as files
from memonger.serving import stock
from memonger.serving.package import Estimate, Package, check_standard

TEXT = """
`model.onnx` holds the nodes in the planned order. `load.py` compiles it for the CPU:

```python
import load

compiled = load.compiled()
outputs = compiled({{{inputs}}})
```

OpenVINO makes a model of its own of it: it fuses nodes, chooses layouts and an order, and plans its memory itself. The
file's order was seen not to matter to it. The figure below is what the plan's order needs with nothing fused, not a
promise for OpenVINO.
"""


def write(package: Package, folder: Path) -> tuple[Estimate, tuple[str, ...]]:
    """Write the model and a loader.

    Raises:
        PlanError: several plans; an operator that isn't ONNX's own.
    """
    model = package.only("openvino")
    if len(model.plans) > 1:
        raise PlanError("OpenVINO loads one plan: export each batch on its own.")
    plan = model.largest
    check_standard(plan, "OpenVINO", own=False)
    executed = range(len(plan.graph.nodes))
    save_model(stock.model_in_order(plan, executed), folder / "model.onnx")
    files.add_file(folder, "openvino_load.py", "load.py")
    estimate = package.as_stock(plan, executed, shared=True)
    inputs = ", ".join(f"{json.dumps(str(value.name))}: ..." for value in required_inputs(plan.model.graph))
    files.describe_export(package, folder, estimate, TEXT.format(inputs=inputs), threads=plan.threads)
    return estimate, (
        "OpenVINO orders nodes and plans its memory itself: the figure is what the planned order needs, not a promise.",
    )
