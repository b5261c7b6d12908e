"""Reads weights that stay in a plan's file ahead of the steps that need them, and drops them behind.

onnxruntime maps the file, and knows nothing of this. Whether a step has begun is seen from its weight: a page of a
mapping is present in this process's page table once somebody has read it (``/proc/self/pagemap``), and reading the file
into the system's cache makes none present. So a thread looks at pages of the weights that come next. What no later step
reads is dropped (``MADV_DONTNEED``): the pages are clean, and whoever should read them yet, as where a step began
earlier than was thought, gets them from the file again. Nothing that is done here can change a result.

Ahead of the steps the file is read into the system's cache, as far as the window has room
(``POSIX_FADV_WILLNEED``). Where memory is so short that the file doesn't fit beside all else, by the limit of the
process's control group or by what is free, what was dropped goes out of the cache as well: the system would let go the
pages that are needed next.

This is Linux's. Elsewhere plans run as well, and how much of the file is in memory is the system's business.
"""

import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from memonger.errors import SessionError
from memonger.runtime import disk, process_memory
from memonger.runtime.prepared import FileSpan, ReadSchedule
from memonger.units import MiB

if sys.platform == "linux":
    import fcntl

PAUSE = 0.5e-3
"""Seconds between two looks at the page table while a plan runs."""

_SAMPLE = 1e-3
"""Seconds between two looks at what the process's other threads do, which cost more."""

_LOADING_PAUSE = 5e-3
"""Seconds between two looks while sessions are made, which read every weight once."""

_MEANWHILE = 4 * MiB
"""Bytes that a session may have read of files, or taken, while it is made, before they are let go."""

_NEXT = 4
"""Weights that are looked at: those behind the last one of which a step has begun."""

_BEHIND = 16
"""Updated weights of which the system is asked again to let go: the first time it begins to write them."""

_FOLIO = 2 * MiB
"""Bytes that the system's cache may hold as one: of them none goes where not all are to go."""

_ALL = 16
"""Every so many looks are at all weights that are left: of some no step may read the page that is looked at."""

_PRESENT, _OF_FILE = 1 << 7, 1 << 5  # bits of the last byte of a page's eight in /proc/self/pagemap
_WRITTEN = bytes(byte for byte in range(256) if byte & (_PRESENT | _OF_FILE) == _PRESENT)

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_AROUND = 16 * _PAGE  # that many bytes the system may map around a page that is read

_DONTNEED, _PAGEOUT = 4, 21  # of madvise(2)
_ZERO = 0x11  # of fallocate(2): zeros in a file that keeps its size
_SETSIG = 10  # of fcntl(2)


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading weights from the file took in the last run.

    Attributes:
        nbytes: Bytes that passed through the window.
        written_bytes: Those that steps had updated or made, and that were written behind them.
        disk_bytes: What the process had the system fetch from the disk meanwhile; all else was in its cache.
        seconds: What the run took.
        waited: Seconds of it in which one of the process's threads waited for the disk, by looks at what they do.
        most_bytes: The most bytes of these weights that steps had read and that weren't dropped yet, at any look. More
            than the window (`memonger.Plan.window`) where steps are faster than the reader looks: it drops what is
            behind them, and holds none.
    """

    nbytes: int
    written_bytes: int
    disk_bytes: int
    seconds: float
    waited: float
    most_bytes: int


class WeightReader:
    """Holds the weights of one plan to a window, in a thread of its own. It ends with this object.

    Where nothing is read by a schedule, as of a plan for a CUDA device, whose nodes copy weights from the host, it
    checks the files alone.

    Args:
        schedule: What is read in which order.

    Attributes:
        last: What the last run took; None before it.

    Raises:
        SessionError: a file can't be read.
    """

    def __init__(self, schedule: ReadSchedule) -> None:
        own = {read.span.file for read in schedule.reads if read.is_own}
        self._files = [_DataFile(path, number in own) for number, path in enumerate(schedule.files)]
        self._owner, self._one_run = os.getpid(), threading.Lock()
        self.last: Reading | None = None
        self._nbytes = sum(read.span.length for read in schedule.reads if read.span.ahead and not read.is_made)
        self._written = sum(span.length for span in {read.span for read in schedule.reads if read.is_own})
        self._follower = _Follower(schedule, self._files)
        self._finalize = weakref.finalize(self, _end, self._follower, self._files)
        self._follows = bool(schedule.reads)
        if self._follows and not self.why_not:
            threading.Thread(target=self._follower.follow, name="memonger weights", daemon=True).start()

    @property
    def why_not(self) -> str:
        """Why the window isn't held here; empty where it is, and where there is none."""
        return self._follower.why_not if self._follows else ""

    @property
    def _holds(self) -> bool:
        """Whether there is a window, which is held."""
        return self._follows and not self.why_not

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While sessions are made: what they have read is dropped where it is more than the window."""
        before = frozenset(_maps(self._files)) if self._holds else frozenset()
        with self._at("load"):
            yield
        if self._holds:
            self._follower.find(before)

    @contextmanager
    def running(self) -> Iterator[None]:
        """For one run; others wait meanwhile.

        Raises:
            SessionError: a file has changed since the session was made.
        """
        if os.getpid() != self._owner:  # in a fork there is no such thread, and the engine refuses to run
            yield
            return
        with self._one_run, ExitStack() as held:
            for file in self._files if sys.platform == "linux" else ():
                held.enter_context(file.held())
            for file in self._files:
                file.check()
            begin, fetched = time.perf_counter(), disk.fetched()
            with self._at("run"):
                yield
            if not self._follows:
                return
            took, fetched_bytes, follower = time.perf_counter() - begin, disk.fetched() - fetched, self._follower
            self.last = Reading(
                self._nbytes, self._written, fetched_bytes, took, min(took, follower.waited), follower.most
            )

    @contextmanager
    def _at(self, work: str) -> Iterator[None]:
        if not self._holds:
            yield
            return
        self._follower.begin(work)
        try:
            yield
        finally:
            self._follower.finish()

    @cached_property
    def disk_speed(self) -> float | None:
        """Bytes a second that the disk gives of the first file, measured once, past the system's cache.

        None where that can't be measured, as of a file that lies in memory (tmpfs).
        """
        return disk.speed(self._files[0].path)

    @property
    def said(self) -> tuple[Reading | None, str, float | None]:
        """What there is to say: what the last run took, `why_not`, and `disk_speed` where that run read the disk."""
        return self.last, self.why_not, self.disk_speed if self.last is not None and self.last.disk_bytes else None

    def close(self) -> None:
        """End the thread, and close the files."""
        self._finalize()


@contextmanager
def dropping(copies: Mapping[str, Sequence[tuple[int, int]]]) -> Iterator[None]:
    """While a session is made: let go pages of packed copies that it has compared with its own (`memonger.ir.packed`),
    and memory that its own were in.

    Else the largest weight is there three times for a moment: as the model has it, packed, and packed in the file; and
    the C library keeps what each was packed into, as no other fits there, so that in the end all are in memory. A copy
    stays mapped from before the first is compared until the session ends, so that its address is no other's.

    Args:
        copies: Where they lie: of each file their first bytes and lengths.
    """
    if not copies or _why_not():
        yield
        return
    files, is_over = [_DataFile(path) for path in copies], threading.Event()
    spans = [FileSpan(file, *span, ahead=False) for file, each in enumerate(copies.values()) for span in each]
    others, before = _maps(files), _present()  # the mappings are of other sessions, which may end meanwhile

    def follow() -> None:
        with suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as pages:
            own, least = before
            while not is_over.wait(PAUSE):
                now, of_files = _present()
                if now - own > _MEANWHILE:
                    process_memory.give_back()
                    own, of_files = _present()
                own = min(own, now)
                if of_files - least > _MEANWHILE:
                    maps = _maps(files)
                    for address, length in chain.from_iterable(_addresses(maps, span) for span in spans):
                        if not any(one.address <= address < one.address + one.length for one in others):
                            _drop(pages.fileno(), address, length // _PAGE * _PAGE)
                    _, least = _present()
                least = min(least, of_files)

    thread = threading.Thread(target=follow, name="memonger copies", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for file in files:
            file.close()


def _end(follower: "_Follower", files: "list[_DataFile]") -> None:
    follower.end()
    for file in files:
        file.close()


class _DataFile:
    """A file that weights lie in, as it was when it was opened; or one of the session's own, which steps write."""

    def __init__(self, path: str, is_own: bool = False) -> None:
        self.path, self.is_own = path, is_own
        self.name = os.path.basename(os.readlink(path) if is_own else path)
        try:
            self.descriptor = os.open(path, os.O_RDWR if is_own else os.O_RDONLY)
        except OSError as error:
            raise SessionError(f"{path} can't be read, which has weights of the plan: {error.strerror}.") from error
        self.status = os.fstat(self.descriptor)

    def check(self) -> None:
        """Check that it is as it was: reading behind the end of a mapped file ends the process.

        Raises:
            SessionError: it isn't.
        """
        if self.is_own:
            return
        now, then = os.fstat(self.descriptor), self.status
        is_as_it_was = (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns)
        if now.st_nlink == then.st_nlink:  # else a name came or went, which changes that time and no byte
            is_as_it_was = is_as_it_was and now.st_ctime_ns == then.st_ctime_ns
        if not is_as_it_was:
            what = "shorter" if now.st_size < self.status.st_size else "another"
            raise SessionError(
                f"{self.path} was changed since the session was made: it is {what} now, and weights stay in it. Save "
                "the plan again, and make a new session."
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have whoever wants to open it for writing, or to cut it short, wait until this is over: a lease for reading.

        The system lets them wait no longer than ``/proc/sys/fs/lease-break-time`` says, 45 seconds. There is none where
        it is open for writing already, is another user's, or its file system has no leases.
        """
        is_held = False
        if not self.is_own:
            with suppress(OSError):
                fcntl.fcntl(self.descriptor, _SETSIG, signal.SIGURG)  # which is ignored; by default a break ends us
                fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                is_held = True
        try:
            yield
        finally:
            if is_held:
                with suppress(OSError):
                    fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def forget(self, begin: int, length: int) -> None:
        """Have zeros in place of bytes that nobody needs: so none is written any more, nor read to be written over.

        They stay taken on the disk. A file system that can't do that keeps them, which costs time alone.
        """
        libc = process_memory.libc()
        if hasattr(libc, "fallocate"):
            size = ctypes.c_int64
            libc.fallocate(ctypes.c_int(self.descriptor), ctypes.c_int(_ZERO), size(begin), size(length))

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _why_not() -> str:
    """Why no window can be held on this system; empty where it can."""
    if sys.platform != "linux" or not hasattr(process_memory.libc(), "madvise"):
        return "on this system nothing tells which pages of a file are in memory (it takes Linux)"
    try:
        with open("/proc/self/pagemap", "rb") as pages:
            pages.read(8)
    except OSError as error:
        return f"/proc/self/pagemap can't be read ({error.strerror}), which tells which weights steps have read"
    return ""


class _Follower:
    """What the thread does.

    Attributes:
        why_not: Why it doesn't; empty where it does.
        most: The most bytes that were in memory when it looked, in the last run; at its end it looks at all.
        waited: Seconds of the last run in which some thread waited for the disk.
    """

    def __init__(self, schedule: ReadSchedule, files: list[_DataFile]) -> None:
        self._schedule, self._files = schedule, files
        self._begins, self._is_over, self._is_idle = threading.Event(), threading.Event(), threading.Event()
        self._is_idle.set()
        self._work = ""
        self.why_not, self.most, self.waited = _why_not(), 0, 0.0
        # Of each weight addresses and lengths of whole pages, and the addresses of those that tell whether it is read
        self._pieces: list[list[tuple[int, int]]] = [[] for _ in schedule.reads]
        self._watched: list[list[int]] = [[] for _ in schedule.reads]
        self._before = [-1] * len(schedule.reads)  # the time before that steps read the same place, or an equal weight
        self._there, self._ahead = set[int](), 0  # weights that steps have read and that weren't dropped
        self._is_short = False
        self._gone = -1, 0, 0  # file, first byte and end of what went out of the cache last, side by side
        self._behind: list[FileSpan] = []  # what was updated last, which the disk may not have yet

    # By the thread that runs the plan

    def begin(self, work: str) -> None:
        self._is_over.clear()
        self._is_idle.clear()
        self._work = work
        self._begins.set()

    def finish(self) -> None:
        self._is_over.set()
        self._is_idle.wait()

    def end(self) -> None:
        self._is_idle.wait(1.0)
        self._work = "end"
        self._begins.set()

    def find(self, before: Collection["_Map"]) -> None:
        """Find where the weights are mapped by the sessions that were made, and drop what these have read.

        Mappings of before are of other sessions: who uses an address of theirs may find that it is another's by then.
        """
        maps = [one for one in _maps(self._files) if one not in before or self._files[one.file].is_own]
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for one in maps:
                _drop(pages.fileno(), one.address, one.length)
        latest = dict[tuple[int, int], int]()
        for number, read in enumerate(self._schedule.reads):
            span = read.span
            places, key = _addresses(maps, span), (span.file, span.begin)
            self._before[number], latest[key] = latest.get(key, -1), number
            if not places:
                path = self._files[span.file].path
                self.why_not = f"onnxruntime doesn't map {path}, but has weights in memory of its own"
            for begin, length in places:
                first, last = -(-begin // _PAGE) * _PAGE, (begin + length) // _PAGE * _PAGE
                self._pieces[number].append((first, last - first))
                middle = begin + length // 2
                self._watched[number] += [min(begin + _AROUND, middle), middle] if span.ahead else []

    # By the thread

    def follow(self) -> None:
        pages = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            while True:
                self._begins.wait()
                self._begins.clear()
                if self._work == "end":
                    return
                if self._work == "load":
                    self._while_loading()
                else:
                    self._while_running(pages)
                self._is_idle.set()
        except OSError as error:
            self.why_not = f"the system refused to tell or to read pages ({error.strerror})"
        finally:
            os.close(pages)
            self.why_not = self.why_not or "its thread has ended"
            self._is_idle.set()

    def _while_loading(self) -> None:
        """Have the system take back what is mapped of the files when it is more than half of the window.

        Unlike dropping that does no harm where a session unmaps a weight meanwhile, and its address becomes another's.
        """
        _, base = _present()
        while not self._is_over.wait(_LOADING_PAUSE):
            if _present()[1] - base > self._schedule.nbytes // 2:
                for one in _maps(self._files):
                    _advise(one.address, one.length, _PAGEOUT)

    def _while_running(self, pages: int) -> None:
        reads, newest, self.most, self.waited, is_over = self._schedule.reads, -1, 0, 0.0, False
        room = process_memory.room()
        self._is_short = room is not None and room < sum(span.length for span in {read.span for read in reads})
        tasks, looked = disk.other_threads(), time.perf_counter()
        for look in count():
            begun, looks_at_all = newest, is_over or look % _ALL == 0
            newest = self._newest(pages, begun, len(reads) if looks_at_all else _NEXT)
            if newest > begun:
                self._there |= {*range(begun + 1, newest + 1)}
                self.most = max(self.most, self._bytes(self._there))
                for number in sorted(self._there):
                    if reads[number].last < reads[newest].first:
                        self._drop(pages, number)
            if is_over:
                break
            if newest > begun or not look:  # else there is as much room as there was
                self._read_ahead(newest)
            is_over = self._is_over.wait(0 if newest > begun else PAUSE)
            now = time.perf_counter()
            if is_over or now - looked >= _SAMPLE:
                self.waited += now - looked if any(map(disk.waits, tasks)) else 0.0
                looked = now
        for task in tasks:
            os.close(task)
        for number in range(len(reads)):  # those too that were dropped: a step that was believed to be over has read on
            self._drop(pages, number)
        for read in reads:
            if read.is_made:  # the run is over, and what it made for later steps isn't needed any more
                self._files[read.span.file].forget(read.span.begin, read.span.length)
        self._ahead = 0
        self._read_ahead(-1)

    def _newest(self, pages: int, begun: int, among: int) -> int:
        """The last weight that some step has begun to read, ``among`` so many that come next."""
        newest = begun
        for number in range(begun + 1, len(self._watched)):
            if number > newest + among:
                break
            before = self._before[number]
            if before >= 0 and (before > begun or before in self._there):
                continue  # pages that are there may be those of the time before
            for address in self._watched[number]:
                if os.pread(pages, 8, address // _PAGE * 8)[7] >> 7:
                    newest = number
                    break
        return newest

    def _bytes(self, numbers: Iterable[int]) -> int:
        """Bytes of these weights: of one that steps read several times they are the same."""
        reads = (self._schedule.reads[number] for number in numbers)
        return sum({(read.span.file, read.span.begin): read.resident for read in reads}.values())

    def _read_ahead(self, begun: int) -> None:
        """Have the system read what comes next, as far as there is room beside what steps read now."""
        reads = self._schedule.reads
        self._ahead = max(self._ahead, begun + 1)
        if self._ahead == len(reads):
            return
        there = self._bytes((*self._there, *range(begun + 1, self._ahead)))
        while self._ahead < len(reads) and there + reads[self._ahead].resident <= self._schedule.nbytes:
            there += reads[self._ahead].resident
            span = reads[self._ahead].span
            if span.ahead and not reads[self._ahead].is_made:
                os.posix_fadvise(self._files[span.file].descriptor, span.begin, span.length, os.POSIX_FADV_WILLNEED)
            self._ahead += 1

    def _drop(self, pages: int, number: int) -> None:
        self._there.discard(number)
        for address, length in self._pieces[number]:
            _drop(pages, address, length)
        read = self._schedule.reads[number]
        if self._is_short:
            self._behind += [read.span]
            for span in self._behind:
                begin, end = span.begin, span.begin + span.length
                if span.file == self._gone[0] and 0 <= begin - self._gone[2] < _FOLIO:
                    begin = max(self._gone[1], begin - _FOLIO)
                self._gone = span.file, begin, end
                os.posix_fadvise(self._files[span.file].descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
            self._behind = self._behind[-_BEHIND:] if read.is_own else self._behind[:-1]


def _drop(pages: int, address: int, length: int) -> None:
    """Let go pages of a mapping, but where one was written to: those are no pages of the file any more."""
    if length <= 0:
        return
    found = os.pread(pages, length // _PAGE * 8, address // _PAGE * 8)[7::8]
    if len(found.translate(None, _WRITTEN)) == len(found):
        _advise(address, length, _DONTNEED)


def _advise(address: int, length: int, advice: int) -> None:
    process_memory.libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)


class _Map(NamedTuple):
    """Bytes of a file that are mapped in this process: number of the file, the first one, address, length."""

    file: int
    offset: int
    address: int
    length: int


def _maps(files: list[_DataFile]) -> list[_Map]:
    """Where files are mapped in this process."""
    numbers = {(one.status.st_ino, one.name): number for number, one in enumerate(files)}
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *name = line.split(maxsplit=5)
        number = numbers.get((int(inode), os.path.basename(name[0]))) if name else None
        if number is not None:
            begin, end = (int(one, 16) for one in span.split("-"))
            found.append(_Map(number, int(offset, 16), begin, end - begin))
    return found


def _addresses(maps: list[_Map], span: FileSpan) -> list[tuple[int, int]]:
    """Where bytes of a file are mapped: address and length of each piece."""
    end = span.begin + span.length
    cut = [
        (
            one.address + max(span.begin, one.offset) - one.offset,
            min(end, one.offset + one.length) - max(span.begin, one.offset),
        )
        for one in maps
        if one.file == span.file
    ]
    return [(address, length) for address, length in cut if length > 0]


def _present() -> tuple[int, int]:
    """Bytes that are present in this process: of memory of its own, and of mapped files."""
    resident, of_files = (int(pages) * _PAGE for pages in Path("/proc/self/statm").read_text().split()[1:3])
    return resident - of_files, of_files
