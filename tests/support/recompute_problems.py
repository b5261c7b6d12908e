"""Training problems of a few shapes, for the tests of what is kept and what is recomputed."""

from collections.abc import Sequence

from hypothesis import strategies as st

from memonger.schedule.problem import Problem


def drawn_drops(problem: Problem, data: st.DataObject) -> list[int]:
    """Some of the nodes that may be dropped."""
    may = [node for node in range(problem.nodes) if problem.forward[node] and problem.recomputable[node]]
    return sorted(data.draw(st.sets(st.sampled_from(may)))) if may else []


def training(reads: Sequence[Sequence[int]], size: int = 1000, inner: int = 1) -> Problem:
    """A forward pass, node i of which reads those nodes' values, and its backward pass.

    The gradient of a node is a node that reads its value, what it read, and the gradients of its readers.

    Args:
        reads: Of each forward node.
        size: Bytes of every value.
        inner: Every so many nodes there is one whose value no gradient needs but its own.
    """
    n = len(reads)
    readers: list[list[int]] = [[] for _ in reads]
    edges = [(source, node) for node, sources in enumerate(reads) for source in sources]
    for source, node in edges:
        readers[source].append(node)
    for node in reversed(range(n)):
        gradient = 2 * n - 1 - node
        needed = {node, *(source for source in reads[node] if source % inner == 0)}
        edges += [(each, gradient) for each in sorted(needed | {2 * n - 1 - reader for reader in readers[node]})]
    return Problem.from_edges([1.0] * n + [2.0] * n, [size] * 2 * n, edges, forward=(True,) * n + (False,) * n)


def chain(layers: int) -> Problem:
    """Equal layers in a row."""
    return training([[i - 1] if i else [] for i in range(layers)])


def u_net(depth: int, width: int = 3) -> Problem:
    """Blocks down and up again, with a skip connection from each block down to the one across."""
    blocks = 2 * depth
    reads = [[i - 1] if i else [] for i in range(blocks * width)]
    for block in range(depth, blocks):
        reads[block * width].append((blocks - block) * width - 1)
    return training([sorted(set(each)) for each in reads])


def dense(blocks: int, layers: int) -> Problem:
    """Blocks in which every layer reads all before it, with one node between them."""
    reads: list[list[int]] = [[]]
    for _ in range(blocks):
        begin = len(reads) - 1
        for _ in range(layers):
            reads.append(list(range(begin, len(reads))))
    return training(reads)


def trainings(most: int = 14) -> st.SearchStrategy[Problem]:
    """Random `problems` of large values, with forward and backward nodes mixed."""
    return problems(most, sizes=(0, 1, 3000, 5000, 9000), is_training=True)


@st.composite
def problems(draw: st.DrawFn, most: int = 8, *, sizes: Sequence[int] = range(10), is_training: bool = False) -> Problem:
    """Problems with several outputs a node, zero sizes and costs, pinned values, scratch, fixed nodes, deadlines, and
    nodes that may overwrite what they read."""
    n = draw(st.integers(1, most))
    reads, writes, drawn = [], [], list[int]()
    for _ in range(n):
        reads.append(tuple(sorted(draw(st.sets(st.integers(0, len(drawn) - 1), max_size=3)))) if drawn else ())
        count = draw(st.sampled_from([1, 1, 1, 2]))
        writes.append(tuple(range(len(drawn), len(drawn) + count)))
        drawn += [draw(st.sampled_from(sizes)) for _ in range(count)]
    costs = tuple(float(draw(st.integers(0, 9))) for _ in range(n))
    free = tuple(draw(st.sampled_from([True, True, True, False])) for _ in range(n))
    late = {i: [j for j in range(i + 1, n) if not free[j]] for i in range(n)}
    begin, mixed = (draw(st.integers(0, n)), draw(st.booleans())) if is_training else (n, False)
    return Problem(
        costs,
        tuple(reads),
        tuple(writes),
        tuple(drawn),
        recomputable=free,
        pinned=tuple(v for v in range(len(drawn)) if draw(st.integers(0, 9)) == 0),
        workspace=tuple(draw(st.integers(0, 3)) for _ in range(n)),
        base=draw(st.integers(0, 5)),
        deadline=tuple(draw(st.sampled_from([n, n, *late[i]])) for i in range(n)),
        inplace=tuple(tuple(v for v in values if draw(st.booleans())) for values in reads),
        forward=tuple(draw(st.booleans()) if mixed else node < begin for node in range(n)),
    )
