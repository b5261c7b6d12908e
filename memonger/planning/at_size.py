"""A model at one size of a dimension: lowered for the search, and the bytes that no plan of it can do without."""

import dataclasses

from memonger.autodiff.training_mode import to_training_mode
from memonger.model.load import Source
from memonger.model.model import Model
from memonger.planning.dimension import Dimension
from memonger.planning.options import Options
from memonger.planning.search_plan import Job, prepare
from memonger.remat import Request
from memonger.remat.every_schedule import EFFORT, least_arena


def lower(source: Source | Model, dimension: Dimension, size: int, options: Options, train_mode: bool) -> Job:
    """The model with this size of the dimension, lowered for the search.

    Raises:
        LoadError, PlanError, RuntimeUnavailableError: as `memonger.search_plan`.
    """
    batch, dims = dimension.at(size, options)
    options = dataclasses.replace(options, batch=batch, dims=dims, progress=None)
    if train_mode:
        source = to_training_mode(source, batch=batch, dims=dims)
        options = dataclasses.replace(options, batch=None, dims=None)
    job = prepare(source, options)
    return dataclasses.replace(job, request=dataclasses.replace(job.request, progress=None))


def lower_bound(request: Request, *, recomputes: bool, effort: int = EFFORT) -> int:
    """Bytes that the total of every plan takes: what is there at each step, the largest workspace, the least arena.

    Args:
        request: The graph, what is there beside it, and what may share bytes.
        recomputes: Whether nodes may run more than once.
        effort: See `least_arena`.
    """
    graph = request.graph
    arena = least_arena(graph, request.sharing, again=recomputes, effort=effort)
    return request.base + max(graph.workspace, default=0) + arena
