"""Small values that together are most of what a pass writes are decided about as large ones are."""

import pytest

from memonger.graph.graph import Graph
from memonger.schedule.reduction import reduce


@pytest.mark.parametrize(("count", "is_folded"), [(4, True), (400, False)])
def test_small_values_are_folded_where_they_are_few(count: int, is_folded: bool) -> None:
    sizes = (1 << 20, *[1 << 10] * count)
    nodes = len(sizes)
    graph = Graph(
        nodes=tuple(f"n{n}" for n in range(nodes)),
        ops=("Tanh",) * nodes,
        values=tuple(f"v{n}" for n in range(nodes)),
        sizes=sizes,
        planned=(True,) * nodes,
        reads=((), *((n,) for n in range(nodes - 1))),
        writes=tuple((n,) for n in range(nodes)),
        outputs=(nodes - 1,),
        forward=(True,) * nodes,
        costs=(1.0,) * nodes,
        workspace=(0,) * nodes,
    )
    members = reduce(graph).members
    assert len(members) == (3 if is_folded else nodes)  # a group touches no more than the largest node
