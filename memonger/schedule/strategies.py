"""Every strategy by name. To add one, write a file with its `Strategy` record and name the record in the list below."""

from collections.abc import Mapping
from types import MappingProxyType

from memonger.schedule.budget import BUDGET
from memonger.schedule.cheap import CHEAP
from memonger.schedule.cp_sat import EXACT
from memonger.schedule.forced import MARKS
from memonger.schedule.segments import BLOCK, LOG, SQRT
from memonger.schedule.strategy import Outcome, Strategy
from memonger.schedule.sweep import SWEEP

NONE = Strategy("none", "Nothing runs again.", lambda request: Outcome(tuple(range(len(request.graph.nodes)))))

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {strategy.name: strategy for strategy in (NONE, CHEAP, BLOCK, SQRT, LOG, SWEEP, MARKS, BUDGET, EXACT)}
)
