"""A Triton model repository for its ONNX Runtime backend, which runs the model with stock onnxruntime.

The backend sets no execution order, so the file is written for ``DEFAULT`` order (`memonger.serving.order`). Options
are those of ``triton-inference-server/onnxruntime_backend``, ``src/onnxruntime.cc``.
"""

from pathlib import Path

from memonger.ir.save import save_model
from memonger.plan import Plan
from memonger.serving import folder as files
from memonger.serving import order, stock
from memonger.serving.package import Estimate, Package, check_standard, stock_notes
from memonger.serving.triton_config import config, text_of
from memonger.units import MiB

MODEL = "model.onnx"
DISABLE_ALL = 2  # the backend's number for it
LIMIT_FACTOR = (
    2  # of activations and workspace: a best-fit arena leaves gaps, and only a GPU's plan knows its workspace
)

TEXT = """
A Triton model repository: `tritonserver --model-repository=<this folder>`. Its ONNX Runtime backend runs the model with
stock onnxruntime; for the arena that the plan lays out export the target `triton-python`.

| in `config.pbtxt` | why |
|---|---|
| `enable_mem_arena` 0 | on the CPU all goes back after a run: onnxruntime's own arena keeps what it ever took |
| `enable_mem_pattern` 1 | from the second run on values lie in one block, not scattered over the heap |
| `arena_extend_strategy` 1, `gpu_mem_limit` | what a GPU's arena grows by, and to at most, from the plan |
| `session.use_device_allocator_for_initializers` | weights beside the arena, not in it |
| `share_session_between_instances` | instances read one copy of the weights |
| `optimization` level 2, none | only where onnxruntime optimized the model before it was planned |

Strategy and limit both have to stand there: Triton resets the one that is absent. With `KIND_CPU` it reads neither.

The file's nodes are written so that the order the backend takes, which can't be set, needs the least memory found:
{peak} bytes at the worst step. {batching}
"""


def write(package: Package, folder: Path) -> tuple[Estimate, tuple[str, ...]]:
    """Write the repository.

    Raises:
        PlanError: a type or shape Triton refuses; an operator that is bound to the processor.
    """
    served = package.only("triton")
    plan = served.largest
    check_standard(plan, "Triton", own=True)
    chosen = order.best_file_order(plan.graph)
    model, notes = stock.model_in_order(plan, chosen.written), stock_notes(plan)
    batches = served.batches
    if batches and max(batches) > 1 and not stock.open_batch(model, max(batches)):
        notes.append(
            "Requests have to come in the planned batch: it is written into the model elsewhere than in its inputs, or "
            "there is no onnxruntime to try others. ServingTarget triton-python has a plan for each batch."
        )
        batches = None
    elif batches == (1,):
        batches = None
    elif batches is None and plan.batch is not None:
        notes.append(
            "Requests have to come in the planned shapes: an input or output of the model doesn't begin with the batch."
        )
    shared = package.instances > 1
    estimate = package.as_stock(plan, chosen.executed, shared=shared)
    content = config(package, served, MODEL, batches, parameters(plan, estimate, shared))
    if plan.stamp is not None:
        content["optimization"] = {"graph": {"level": DISABLE_ALL}}
        notes.append(f"The model has operators of {plan.stamp.runtime}: Triton's has to be that version or newer.")
    version = folder / package.name / "1"
    version.mkdir(parents=True)
    save_model(model, version / MODEL)
    (version.parent / "config.pbtxt").write_text(text_of(content))
    batching = f"Requests are put together to batches, at best of {', '.join(map(str, batches))}." if batches else ""
    files.describe_export(package, folder, estimate, TEXT.format(peak=chosen.peak_bytes, batching=batching))
    return estimate, tuple(notes)


def parameters(plan: Plan, estimate: Estimate, shared: bool) -> dict[str, str]:
    """The backend's parameters."""
    limit = LIMIT_FACTOR * (estimate.activations + estimate.workspace) + estimate.inputs
    settings = {
        "enable_mem_arena": "0",
        "enable_mem_pattern": "1",
        "arena_extend_strategy": "1",
        "gpu_mem_limit": str(-(-limit // MiB) * MiB),
        "session.use_device_allocator_for_initializers": "1",
    }
    if shared:
        settings["share_session_between_instances"] = "true"
    if plan.threads:
        settings["intra_op_thread_count"] = str(plan.threads)
    return settings
