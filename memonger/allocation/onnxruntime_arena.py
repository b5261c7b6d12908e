"""What onnxruntime's own CPU memory comes to for a list of buffers, without a plan: a replay of two runs.

Learned from onnxruntime's source (``bfc_arena.cc``, ``mem_pattern_planner.h``, ``execution_frame.cc``). Its arena takes
regions from the system, of 1 MiB first, each twice as large as the last, and gives none back. A request gets the
smallest free piece that holds it, which is cut only where that leaves at least as much over. The first run asks for
each buffer as it comes, and notes when; where each could lie in one block is worked out from that. The second run takes
that block beside what the first one has cut up. What kernels take as workspace, and the outputs, are asked for one by
one each time.

Counted is what was written to: pages of a region that nothing reached take no memory. For each 256 bytes of a region
the arena itself writes eight.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from memonger.allocation.buffers import Buffer

UNIT = 256  # bytes: requests are rounded up to it
HANDLE = 8  # bytes that the arena keeps of its own for each unit of a region
FIRST_REGION = 1 << 20
LARGEST_STEP = 1 << 30  # regions grow by doubling up to this
MOST_WASTE = 128 << 20  # a piece with this much to spare is cut in any case
PAGE = 4096
_ENDLESS = 1 << 62


def onnxruntime_bytes(planned: Sequence[Buffer], single: Sequence[Buffer] = ()) -> int:
    """Bytes that onnxruntime's arena has written to after its second run; later runs take no more.

    Args:
        planned: What it packs into one block from the second run on.
        single: What it asks for one by one in every run: the model's outputs, the workspace of kernels.
    """
    arena, block = _RuntimeArena(), _Pieces([(_ENDLESS, 0)])
    for buffer, begins in _events((*planned, *single)):
        arena.take(buffer.id, buffer.size) if begins else arena.give(buffer.id)
    packed: dict[int, tuple[int, int]] = {}
    peak = 0
    for buffer, begins in _events(planned):
        if begins:
            packed[buffer.id] = address, _ = block.cut(_rounded(buffer.size))
            peak = max(peak, address + packed[buffer.id][1])
        else:
            block.put(*packed.pop(buffer.id))
    if peak:
        arena.take(None, peak)
    for buffer, begins in _events(single):
        arena.take(buffer.id, buffer.size) if begins else arena.give(buffer.id)
    return arena.written()


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
        place = bisect_left(self.free, (size, -1))
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

    def __init__(self) -> None:
        self.pieces = _Pieces([])
        self.held: dict[int | None, tuple[int, int]] = {}
        self.next_region, self.end, self.kept = FIRST_REGION, 0, 0
        self.touched: list[tuple[int, int]] = []

    def take(self, number: int | None, size: int) -> None:
        """Take a piece for a buffer, and write to all of it."""
        wanted = _rounded(size)
        waste = min(wanted, MOST_WASTE)
        try:
            address, held = self.pieces.cut(wanted, waste)
        except IndexError:
            # Another region, with a gap before it so that it never joins the last one
            grown = False
            while wanted > self.next_region:
                self.next_region, grown = self.next_region * 2, True
            self.pieces.put(self.end, self.next_region)
            self.end += self.next_region + PAGE
            self.kept += self.next_region // UNIT * HANDLE
            if not grown:
                self.next_region = max(self.next_region, min(self.next_region * 2, LARGEST_STEP))
            address, held = self.pieces.cut(wanted, waste)
        self.held[number] = address, held
        self.touched.append((address, address + size))

    def give(self, number: int | None) -> None:
        """Give a buffer's piece back."""
        self.pieces.put(*self.held.pop(number))

    def written(self) -> int:
        """Bytes of all pages written to, and what the arena keeps of its own."""
        total, reached = self.kept, 0
        for begin, end in sorted(self.touched):
            first, last = begin // PAGE * PAGE, -(-end // PAGE) * PAGE
            total += max(0, last - max(first, reached))
            reached = max(reached, last)
        return total
