"""A copy of the planned model that carries the plan where Netron shows it: in the metadata of nodes and values."""

import onnx_ir as ir

from memonger.ir.marks import AGAIN
from memonger.plan_file import KEY
from memonger.report.view import MOST_OTHERS, Rectangle, View

IR_VERSION = 10
"""The first in which values carry metadata."""


def annotated(view: View) -> ir.Model:
    """The copy: an ordinary model, without a plan in it.

    Keys begin with ``memonger.``. A node has ``step``, ``recomputed``, ``workspace_bytes``, ``module``; a value of the
    arena ``offset``, ``bytes``, ``steps``, ``kind``, and ``shared_with`` where others lie at the same place.
    """
    model = view.plan.model.clone()
    model.metadata_props.pop(KEY, None)
    model.ir_version = max(model.ir_version or 0, IR_VERSION)
    lies = {name: each for each in view.arena for name in (each.name, *each.others)}
    for number, (node, step) in enumerate(zip(model.graph, view.steps, strict=True)):
        node.metadata_props["memonger.step"] = str(number)
        node.metadata_props["memonger.recomputed"] = str(bool(node.metadata_props.pop(AGAIN, "")))
        if step.workspace:
            node.metadata_props["memonger.workspace_bytes"] = str(step.workspace)
        if step.module:
            node.metadata_props["memonger.module"] = "/".join(step.module)
        for value in node.outputs:
            if value.name in lies:
                value.metadata_props.update(_described(value.name, lies[value.name]))
    return model


def _described(name: str, place: Rectangle) -> dict[str, str]:
    facts = {
        "memonger.offset": str(place.offset), "memonger.bytes": str(place.size),
        "memonger.steps": f"{place.start} to {place.stop - 1}", "memonger.kind": place.kind,
    }  # fmt: skip
    if not place.others:
        return facts
    others = [other for other in (place.name, *place.others) if other != name]
    more = f" and {len(others) - MOST_OTHERS} more" if len(others) > MOST_OTHERS else ""
    return facts | {"memonger.shared_with": ", ".join(others[:MOST_OTHERS]) + more}
