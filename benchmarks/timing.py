"""What the benchmarks time with: interleaved medians, and memcpy to compare with."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
from torch import Tensor

Call = Callable[[], object]
Clock = Callable[[Call], float]
"""Runs a call, and says how many seconds it took."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_SLEEP_CYCLES = 4_000_000


def host_clock(call: Call) -> float:
    """Seconds by the host's clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def own_clock(call: Call) -> float:
    """Seconds that the calling thread was on its processor: without those of other programs."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def device_clock(device: torch.device) -> Clock:
    """Seconds of the device's own work on the current stream; the host's clock for a CPU.

    The device is kept busy while the host prepares, so that launches do not count. Where a call
    waits for the device, the way back to the host does.
    """
    if device.type == "cpu":
        return host_clock

    def clock(call: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return clock


def samples(
    calls: Mapping[str, Call], repeats: int, clock: Clock = host_clock
) -> dict[str, list[float]]:
    """Seconds of each call in ``repeats`` rounds that time all of them in turn.

    In turn, so that what else the machine does meets all of them, and so that no call finds its
    data in the cache. A round before does not count.
    """
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(clock(call))
    return times


def medians(calls: Mapping[str, Call], repeats: int, clock: Clock = host_clock) -> dict[str, float]:
    """The medians of :func:`samples`."""
    times = samples(calls, repeats, clock)
    return {name: statistics.median(each) for name, each in times.items()}


class Memcpy:
    """memcpy of a tensor's bytes by so many threads, each a part. To be closed.

    Args:
        source: a contiguous CPU tensor.
        threads: how many, the calling one included.
    """

    def __init__(self, source: Tensor, threads: int) -> None:
        self._tensors = source, torch.zeros_like(source)
        self.moved_bytes = 2 * source.nbytes
        edges = [source.nbytes * index // threads // 64 * 64 for index in range(threads)]
        edges.append(source.nbytes)
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._parts = [
            (addresses[1] + start, addresses[0] + start, end - start)
            for start, end in pairwise(edges)
        ]
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def __call__(self) -> None:
        others = []
        if self._pool:  # ctypes lets go of the interpreter's lock
            others = [self._pool.submit(ctypes.memmove, *part) for part in self._parts[1:]]
        ctypes.memmove(*self._parts[0])
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool:
            self._pool.shutdown()

    def __enter__(self) -> Memcpy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, so that results that are allocated cost no page faults.

    Elsewhere nothing is changed.
    """
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_MAX, 0)
            libc.mallopt(_M_TRIM_THRESHOLD, 0x7FFFFFFF)
