"""What onnxruntime's own CPU memory comes to for a list of buffers, without a plan: a replay of two runs.

Learned from onnxruntime's source (``bfc_arena.cc``, ``mem_pattern_planner.h``, ``execution_frame.cc``). Its arena takes
regions from the system, of 1 MiB first, each twice as large as the last, and gives none back. A request gets the
smallest free piece that holds it, which is cut only where that leaves at least as much over. The first run asks for
each buffer as it comes, and notes when; where each could lie in one block is worked out from that. The second run takes
that block beside what the first one has cut up. What kernels take as workspace, and the outputs, are asked for one by
one each time. A body's runs are runs of a graph of its own: the first of all asks for each buffer, and each later one,
of the next slice or of the next run, for a block, which it gives back.

Counted is what was written to: pages of a region that nothing reached take no memory. For each 256 bytes of a region
the arena itself writes eight.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memonger.allocation.buffers import Buffer

UNIT = 256  # bytes: requests are rounded up to it
HANDLE = 8  # bytes that the arena keeps of its own for each unit of a region
FIRST_REGION = 1 << 20
LARGEST_STEP = 1 << 30  # regions grow by doubling up to this
MOST_WASTE = 128 << 20  # a piece with this much to spare is cut in any case
PAGE = 4096
_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What a run of a graph asks the runtime's memory for, by steps.

    Attributes:
        planned: What is packed into one block from the second run on.
        single: What is asked for one by one in every run: outputs, the workspace of kernels.
        bodies: By step the graphs that run in it, one after the other, and how often each.
        left: By step what all turns together leave, each a part, and when it goes.
        first_at: By step the turn of the loop around it in which the first of the bodies runs, and in all others the
            other; they run both where that isn't known.
    """

    planned: Sequence[Buffer]
    single: Sequence[Buffer] = ()
    bodies: Mapping[int, Sequence[tuple["Frame", int]]] = field(default_factory=dict)
    left: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    first_at: Mapping[int, int] = field(default_factory=dict)


def onnxruntime_bytes(frame: Frame, *, arena: bool = True, freed: int = 0) -> int:
    """Bytes that onnxruntime has written to after its second run of a graph; later runs take no more.

    Args:
        frame: What a run asks for.
        arena: Whether onnxruntime's arena is on. Without, each piece comes from the C library, and goes back to it:
            counted is what was asked for at once, and not the holes that its heap is left with.
        freed: Bytes of the largest piece that went back to the C library before.
    """
    memory, blocks = _RuntimeArena(freed) if arena else _Heap(), dict[Frame, int]()
    for _ in range(2):
        _run(frame, memory, blocks)
    return memory.written()


def best_first_piece(frame: Frame, bytes_without: int, freed: int = 0) -> tuple[int, int]:
    """The bytes of a piece, asked for first in every run and given back, with which runs take least; and these bytes.

    Of as many bytes as a half of a region and a little more, so that the arena takes that region first.

    Args:
        frame: What a run asks for behind it.
        bytes_without: What `onnxruntime_bytes` gives for the frame.
        freed: See `onnxruntime_bytes`.
    """
    region, found = 2 * FIRST_REGION, [(bytes_without, 0)]
    while (piece := region // 2 + UNIT) < bytes_without:
        memory, blocks = _RuntimeArena(freed), dict[Frame, int]()
        memory.take(UNIT)  # what is asked whether the piece is to be there
        for _ in range(2):
            memory.give(memory.take(piece))
            _run(frame, memory, blocks)
        found.append((memory.written(), piece))
        region *= 2
    bytes_, piece = min(found)
    return piece, bytes_


_TURNS = 4
"""Of a body's runs so many are replayed: the others find what these left."""


def _run(frame: Frame, memory: "_RuntimeArena | _Heap", blocks: dict[Frame, int], turn: int = 0) -> None:
    """Replay a run, the first or a later one of that graph, in a turn of a loop."""
    block, held, waiting = blocks.get(frame), dict[int, tuple[int, int]](), sorted(frame.bodies, reverse=True)
    whole, pieces = memory.take(block) if block else None, list[tuple[int, tuple[int, int]]]()

    def until(now: int) -> None:
        while waiting and waiting[-1] < now:
            step = waiting.pop()
            bodies, at = frame.bodies[step], frame.first_at.get(step)
            if at is not None:
                bodies = bodies[:1] if at == turn else bodies[1:]
            pieces.extend(_run_bodies(bodies, frame.left.get(step, ()), memory, blocks, turn))
        for piece in [piece for piece in pieces if piece[0] <= now]:
            pieces.remove(piece)
            memory.give(piece[1])

    for buffer, begins in _events((*frame.planned, *frame.single) if block is None else frame.single):
        until(buffer.start if begins else buffer.stop)
        if begins:
            held[buffer.id] = memory.take(buffer.size)
        else:
            memory.give(held.pop(buffer.id))
    until(_ENDLESS)
    if whole is not None:
        memory.give(whole)
    if block is None:
        blocks[frame] = _block_bytes(frame.planned)


def _run_bodies(
    bodies: Sequence[tuple[Frame, int]], left: Sequence[tuple[int, int]], memory: "_RuntimeArena | _Heap",
    blocks: dict[Frame, int], turn: int,
) -> Iterator[tuple[int, tuple[int, int]]]:  # fmt: skip
    """Replay the runs of bodies. Gives what turns leave: when each piece goes, and where it is."""
    for body, turns in bodies:
        done = 0
        for number in [turn] if turns == 1 else [*range(min(turns - 1, _TURNS)), turns - 1]:
            _run(body, memory, blocks, number)
            for part in range(done, number + 1):
                yield from ((end, memory.take(size * (part + 1) // turns - size * part // turns)) for size, end in left)
            done = number + 1


def _block_bytes(planned: Sequence[Buffer]) -> int:
    """Bytes of the block into which the runtime packs these."""
    block, packed, most = _Pieces([(_ENDLESS, 0)]), dict[int, tuple[int, int]](), 0
    for buffer, begins in _events(planned):
        if begins:
            packed[buffer.id] = address, size = block.cut(_rounded(buffer.size))
            most = max(most, address + size)
        else:
            block.put(*packed.pop(buffer.id))
    return most


def region_bytes(buffers: Sequence[Buffer]) -> int:
    """Bytes of one region from which the arena serves all of these, where it cuts every piece as asked for.

    Tried are the most bytes alive at one step, and then ever more, by a 64th: pieces in between are wasted.
    """
    size = 0
    while True:
        pieces, held = _Pieces([(size, 0)] if size else []), dict[int, tuple[int, int]]()
        for buffer, begins in _events(buffers):
            if begins:
                try:
                    held[buffer.id] = pieces.cut(_rounded(buffer.size))
                except IndexError:
                    alive = sum(each for _, each in held.values())
                    size = max(_rounded(size + max(UNIT, size >> 6)), alive + _rounded(buffer.size))
                    break
            else:
                pieces.put(*held.pop(buffer.id))
        else:
            return size


def _events(buffers: Sequence[Buffer]) -> Iterator[tuple[Buffer, bool]]:
    """Each buffer as it begins (True) and as it ends (False): at one step first what begins, as they are listed."""
    ends: dict[int, list[Buffer]] = {}
    for buffer in buffers:
        if buffer.size:
            ends.setdefault(buffer.stop, []).append(buffer)
    stops = sorted(ends, reverse=True)
    for buffer in sorted((buffer for buffer in buffers if buffer.size), key=lambda buffer: buffer.start):
        while stops and stops[-1] <= buffer.start:
            yield from ((ended, False) for ended in ends[stops.pop()])
        yield buffer, True
    while stops:
        yield from ((ended, False) for ended in ends[stops.pop()])


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT


@dataclass(slots=True)
class _Pieces:
    """Free pieces as (size, address), the smallest first; neighbours are joined."""

    free: list[tuple[int, int]]
    size_at: dict[int, int] = field(default_factory=dict)
    start_of: dict[int, int] = field(default_factory=dict)  # by end

    def __post_init__(self) -> None:
        given, self.free = self.free, []
        for size, address in given:
            self.put(address, size)

    def cut(self, size: int, waste: int = 0) -> tuple[int, int]:
        """The smallest piece that holds ``size``, what is left over given back; whole if that is less than ``waste``.

        Returns its address and size.

        Raises:
            LookupError: there is none.
        """
        place = bisect_left(self.free, (size, -_ENDLESS))
        found, address = self.free[place]
        self._remove(found, address)
        if found - size < waste:
            return address, found
        if found > size:
            self._add(found - size, address + size)
        return address, size

    def put(self, address: int, size: int) -> None:
        """Give a piece back."""
        end = address + size
        if end in self.size_at:
            after = self.size_at[end]
            self._remove(after, end)
            size += after
        if address in self.start_of:
            start = self.start_of[address]
            before = address - start
            self._remove(before, start)
            address, size = start, size + before
        self._add(size, address)

    def _add(self, size: int, address: int) -> None:
        insort(self.free, (size, address))
        self.size_at[address], self.start_of[address + size] = size, address

    def _remove(self, size: int, address: int) -> None:
        del self.free[bisect_left(self.free, (size, address))]
        del self.size_at[address], self.start_of[address + size]


class _RuntimeArena:
    """onnxruntime's arena: regions that grow, and which of their bytes were written to."""

    def __init__(self, freed: int) -> None:
        self.pieces, self.threshold = _Pieces([]), min(max(freed, 128 << 10), 32 << 20)
        self.next_region, self.kept = FIRST_REGION, 0
        self.heap_end, self.lowest = -_ENDLESS, 0
        self.touched: list[tuple[int, int]] = []

    def take(self, size: int) -> tuple[int, int]:
        """Take a piece for a buffer, and write to all of it. Returns where it is, for `give`."""
        wanted = _rounded(size)
        waste = min(wanted, MOST_WASTE)
        try:
            address, held = self.pieces.cut(wanted, waste)
        except IndexError:
            grown = False
            while wanted > self.next_region:
                self.next_region, grown = self.next_region * 2, True
            self.pieces.put(self._region(), self.next_region)
            self.kept += self.next_region // UNIT * HANDLE
            if not grown:
                self.next_region = max(self.next_region, min(self.next_region * 2, LARGEST_STEP))
            address, held = self.pieces.cut(wanted, waste)
        self.touched.append((address, address + size))
        return address, held

    def _region(self) -> int:
        """Where another region lies, with a gap so that it never joins the last one.

        Of pieces of one size the lowest is taken. The C library's heap grows upwards. Above it, each below the last,
        lie pieces that the system gives: those from a threshold on, which rises to the largest that was given back.
        """
        if self.next_region < self.threshold:
            address, self.heap_end = self.heap_end, self.heap_end + self.next_region + PAGE
            return address
        self.lowest -= self.next_region + PAGE
        return self.lowest

    def give(self, piece: tuple[int, int]) -> None:
        """Give a buffer's piece back."""
        self.pieces.put(*piece)

    def written(self) -> int:
        """Bytes of all pages written to, and what the arena keeps of its own."""
        total, reached = self.kept, -_ENDLESS
        for begin, end in sorted(self.touched):
            first, last = begin // PAGE * PAGE, -(-end // PAGE) * PAGE
            total += max(0, last - max(first, reached))
            reached = max(reached, last)
        return total


class _Heap:
    """The C library's memory, without what its heap wastes: what is given back goes back to the system."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, size: int) -> tuple[int, int]:
        """Take a piece, and write to all of it. Returns what to `give` back."""
        self.now += size
        self.most = max(self.most, self.now)
        return 0, size

    def give(self, piece: tuple[int, int]) -> None:
        """Give a piece back."""
        self.now -= piece[1]

    def written(self) -> int:
        """The most bytes at once."""
        return self.most
