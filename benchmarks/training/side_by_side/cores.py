"""Whether two cores of this machine share a cache right now.

A virtual machine's cores are threads that its host moves about: at times both lie on one L3 cache, at times on two.
Then what one core wrote reaches the other at half the speed or less, and every contestant's step takes longer, but not
by the same factor: by the more the more often a node's output is read by another core. So turns are kept apart by it.
"""

import os
import threading
import time

import numpy as np

SIZE = 1 << 20  # bytes: more than an L1 cache holds, not more than an L2
TRIES = 80
SHARED = 0.6  # of the speed at which a core reads what it wrote itself: 0.30 to 0.52 were seen, and 0.66 to 0.92
CALM = 0.05  # seconds after which threads of a step that just ended no longer wait busily


def share_a_cache() -> bool | None:
    """Whether they do; None where there are fewer cores than two, or none can be chosen."""
    if not hasattr(os, "sched_setaffinity") or len(allowed := sorted(os.sched_getaffinity(0))) < 2:
        return None
    time.sleep(CALM)
    one, other = allowed[0], allowed[-1]
    try:
        return _seconds(one, one) >= SHARED * _seconds(one, other)
    finally:
        os.sched_setaffinity(0, allowed)


def _seconds(writer: int, reader: int) -> float:
    """The least time in which a core copies `SIZE` bytes that another has just written."""
    source, target = np.ones(SIZE // 4, np.float32), np.ones(SIZE // 4, np.float32)
    times: list[float] = []

    def copy() -> None:
        os.sched_setaffinity(0, {reader})
        begin = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begin)

    for value in range(TRIES):
        os.sched_setaffinity(0, {writer})
        source[:] = value
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
    return min(times)
