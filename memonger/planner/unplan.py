"""A plan → the user's own model, as it was before it was planned: OptNet's ``removeOptimization``."""

from pathlib import Path

from memonger.errors import LoadError, PlanError
from memonger.graph.schedule import drop_copies
from memonger.ir import marks, training_roles
from memonger.ir.model import Model
from memonger.ir.save import read_in
from memonger.model import forward_model, original_model
from memonger.model.load import load_as_is
from memonger.plan import Plan
from memonger.plan_file import is_planned, without_plan
from memonger.words import option


def unplan(plan: Plan | str | Path, *, as_planned: bool = False) -> Model:
    """Give a plan's model back without the plan: the same outputs bit for bit, marks kept.

    - A plan that was just made gives the model it was made from, as `memonger.load` read it.
    - A file of a training plan gives the forward model that was differentiated, with the weights of the file.
    - A file of a portable plan gives its own nodes: recomputed copies and the plan are taken out, the order stays. In
      chunks there are copies of these: then it keeps the model that it was made from.
    - A file that `memonger.shrink` wrote gives the model that it was made from, which it keeps.
    - A file for a device holds what onnxruntime's optimizer made of the model, in operators of its own: the user's
      model isn't in it. Nodes that run in chunks are there once for each.

    Args:
        plan: A plan, or a planned file.
        as_planned: Give the model that was planned instead: a training plan's whole step, or what onnxruntime made of
            the model. That one runs on the runtime and machine it was made for alone.

    Raises:
        PlanFileError: the file can't be read, has no plan, or was changed.
        PlanError: a file for a device, and no ``as_planned``.
    """
    name = str(plan)
    if isinstance(plan, str | Path):
        shrunk = _original(Path(plan))
        if shrunk is not None:
            return shrunk
        plan = Plan.load(plan)
    elif not isinstance(plan, Plan):
        raise PlanError(f"a plan is given as memonger.Plan or as the path of a planned file, not as {plan!r}.")
    elif plan.source is not None and not as_planned:
        return plan.source.clone()
    else:
        name = str(plan.model.graph.name)
    if not as_planned:
        original = original_model.extract(plan.model, name) if plan.chunks else None
        if original is not None:
            return Model(original, name, plan.batch, foreign=True)
        forward = forward_model.extract(plan.model, name, trained=True)
        if forward is not None:
            return Model(forward, name, plan.batch, foreign=True)
        if plan.stamp is not None:
            fused = sorted({node.domain for node in plan.model.graph} - {""})
            operators = f", with operators of {', '.join(fused)}" if fused else ""
            raise PlanError(
                f"{name} holds what {plan.stamp.runtime} made of the model for this device{operators}; the model it "
                f"was made from isn't in it: use that file. {option('as_planned', True)} gives this one without its "
                f"plan, for that runtime and machine; plans made with {option('device', 'none')} can be undone."
            )
    # A copy without plan and recomputed copies: who reads a copy reads what it is a copy of
    model = without_plan(plan.open_model)
    if training_roles.KEY not in model.metadata_props:
        marks.forget_parts(model)
    drop_copies(model)
    if plan.files is not None:
        read_in(model)  # its tensors lie in files that go with the plan
    return Model(model, name, plan.batch, foreign=True)


def _original(path: Path) -> Model | None:
    """The model that a file in loops was made from; None where it is no such file."""
    try:
        read = load_as_is(path)
    except LoadError:
        return None  # what is wrong with it is said where it is read as a plan
    original = None if is_planned(read.ir) else original_model.extract(read.ir, str(path))
    return None if original is None else Model(original, str(path), foreign=True)
