"""The planned model for plain onnxruntime, with the session options that honour it."""

import json
from pathlib import Path

from memonger.errors import PlanError
from memonger.files import add_json
from memonger.ir.save import save_model
from memonger.ir.values import required_inputs
from memonger.serving import folder as files
from memonger.serving import order, stock
from memonger.serving.package import Estimate, Package, check_standard, stock_notes

MODEL, OTHER, OPTIONS = "model.planned.onnx", "model.default-order.onnx", "session_options.json"

TEXT = """
`model.planned.onnx` is an ordinary ONNX file. Its nodes stand in the planned order; `session_options.json` holds the
session options with which onnxruntime keeps to it:

| option | why |
|---|---|
| `execution_order` PRIORITY_BASED | nodes run in file order |
| `graph_optimization_level` ORT_DISABLE_ALL | no pass moves or merges nodes |
| `enable_cpu_mem_arena` off | all goes back after a run: onnxruntime's own arena keeps what it ever took |
| `enable_mem_pattern` on | from the second run on values lie in one block, not scattered over the heap |

Nothing is fused at that level. `load.session("ORT_ENABLE_ALL")` lets onnxruntime optimize the model first: faster, on
processors with blocked layouts often smaller, and the order is then its own.

In Python (`load.py` needs onnxruntime alone):

```python
import load

session = load.session()
outputs = session.run(None, {{{inputs}}})
```

The arena that the plan lays out needs memonger: `memonger.Session("model.planned.onnx")`.

## C, C++ and other languages

No setter for the execution order was found in their interface (onnxruntime 1.31.1), nor a config entry. Sessions run in
DEFAULT order: depth first from the outputs, of two branches the one later in the file first.

{other}
"""

SAME = "For this model that order needs no more memory than others it can reach: load `model.planned.onnx`."
BETTER = (
    "`model.default-order.onnx` is the same model, its nodes written so that this order comes out at the least memory "
    "found: {best} bytes at the worst step, {planned} with `model.planned.onnx`. Load that one."
)


def write(package: Package, folder: Path) -> tuple[Estimate, tuple[str, ...]]:
    """Write the planned file, its options, a loader and a README; a second file where C programs need one.

    Raises:
        PlanError: several plans; an operator that is bound to the processor.
    """
    model = package.only("onnxruntime")
    if len(model.plans) > 1:
        raise PlanError("plain onnxruntime loads one plan: export each batch on its own.")
    plan = model.largest
    check_standard(plan, "onnxruntime", own=True)
    plan.save(folder / MODEL)
    best, planned = order.best_file_order(plan.graph), order.written_as_is(plan.graph)
    is_better = best.peak_bytes < planned.peak_bytes
    if is_better:
        save_model(stock.model_in_order(plan, best.written), folder / OTHER)
    add_json(folder / OPTIONS, options(plan.threads))
    files.add_file(folder, "onnxruntime_load.py", "load.py")
    estimate = package.as_stock(plan, range(len(plan.graph.nodes)))
    other = BETTER.format(best=best.peak_bytes, planned=planned.peak_bytes) if is_better else SAME
    inputs = ", ".join(f"{json.dumps(str(value.name))}: ..." for value in required_inputs(plan.model.graph))
    files.describe_export(package, folder, estimate, TEXT.format(inputs=inputs, other=other))
    return estimate, tuple(stock_notes(plan))


def options(threads: int) -> dict[str, object]:
    """Session options, by their names in onnxruntime's Python interface."""
    return {
        "graph_optimization_level": "ORT_DISABLE_ALL",
        "execution_mode": "ORT_SEQUENTIAL",
        "execution_order": "PRIORITY_BASED",
        "enable_cpu_mem_arena": False,
        "enable_mem_pattern": True,
        "intra_op_num_threads": threads,
    }
