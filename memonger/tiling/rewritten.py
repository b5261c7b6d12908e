"""What is asked of a model that a pass wrote anew: in chunks, in strips, with joined products."""

import dataclasses

import onnx_ir as ir

from memonger.devices import Device
from memonger.ir.training_roles import Training
from memonger.lowering.lowered import Lowered
from memonger.plan import graph_of, parameter_bytes
from memonger.schedule import Request


def asked_of(made: Lowered, before: ir.Model, request: Request, roles: Training | None, device: Device) -> Request:
    """The same as was asked of the model before, without its marks: what they name may be there no more.

    Args:
        made: The model, with what was measured of its nodes.
        before: The model that the request is of.
        request: What is asked of that.
        roles: A training step's.
        device: The plan's.
    """
    assert made.calibration is not None
    measured = made.calibration
    graph = graph_of(made.model, roles, measured.seconds, measured.workspace, measured.host, device)
    base = request.base + parameter_bytes(made.model, roles) - parameter_bytes(before, roles)
    return dataclasses.replace(request, graph=graph, base=base, stages={}, forced={}, parts=frozenset(), estimates=None)
