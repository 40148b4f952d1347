"""Packing by a worker: elements are encoded into pages while the forward pass goes on.

Locks. A :class:`Job` has a lock of its own, held while its elements are encoded. Under it
nothing else is waited for: what ends meanwhile only *tries* the placement's lock, and otherwise
leaves its end to that lock's next holder (:class:`daf_hf.leases.DeferredEnds`). So whoever holds
the placement's lock may wait for the worker, and the worker waits for nobody.

Pages. Jobs are added under the placement's lock, and under the same lock the arena has all of them
finished before it demotes or moves anything (``before_change`` of :class:`daf_hf.arena.Arena`).
So pages stay where they are, as many as they are, until they are written.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

from .arena import Arena
from .kernels import Backend
from .kernels.format import PageSpace
from .leases import Lease
from .physical import Copy, Pages, Physical
from .pinned_pages import PinnedPages, host_is_faster
from .stored import Stored

SMALLEST_BYTES = 1 << 20
"""Smaller tensors are encoded sooner than handed over."""


class Packing(Physical):
    """Elements that are, or were, on their way into pages.

    Args:
        job: brings them there.

    Attributes:
        place: where they are for good; None while the job is not finished.
    """

    __slots__ = ("job", "place")

    def __init__(self, job: Job) -> None:
        assert job.pages is not None
        super().__init__(job.pages.site, private=job.pages.private)
        self.place: Physical | None = None
        self.job = job
        job.packing = weakref.ref(self)

    def _finished(self) -> Physical:
        self.job.finish()
        if self.job.error is not None:
            raise self.job.error
        assert self.place is not None
        return self.place

    def flat(self) -> Tensor:
        return self._finished().flat()

    def own(self) -> Tensor:
        return self._finished().own()

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        yield from self._finished().parts()


class Job:
    """Encodes elements, which it holds exactly until then.

    Whoever comes first encodes: the worker, or a thread that needs it done. It does not hold what
    it is done for: where that is gone, all of it has ended when the job is finished.

    Args:
        copy: the elements, exactly. They stay there if they cannot be represented.
        pages: where they go; not written yet.
        encode: writes the pages; False where the elements cannot be represented.
        waits: ends when the elements wait no longer.

    Attributes:
        copy, pages: None when it is finished.
        error: what encoding raised.
        packing: whom to tell.
        queue: what it leaves when it is finished.
    """

    def __init__(self, copy: Copy, pages: Pages, encode: Callable[[], bool], waits: Lease) -> None:
        self.copy: Copy | None = copy
        self.pages: Pages | None = pages
        self.error: Exception | None = None
        self.packing: Callable[[], Packing | None] = lambda: None
        self.queue: dict[Job, None] = {}
        self._encode: Callable[[], bool] | None = encode
        self._waits: Lease | None = waits
        self._lock, self._process = Lock(), os.getpid()

    def finish(self) -> None:
        """Encode, or wait for who does."""
        if self._process != os.getpid():
            # A forked child: whoever held the lock is not in it.
            self._lock, self._process = Lock(), os.getpid()
        with self._lock:
            if self._encode is not None:
                self._run(self._encode)
            # What nobody needs any more has ended by now, before the queue says so.
            self._waits = None
            self.queue.pop(self, None)

    def _run(self, encode: Callable[[], bool]) -> None:
        try:
            done = encode()
        except Exception as error:
            self.error, done = error, False
        packing = self.packing()
        if packing is not None:
            packing.place = self.pages if done else self.copy
        self._encode = self.copy = self.pages = None


class Packer:
    """One worker thread, which starts with the first job and ends with its packer.

    The caller of :meth:`submit` and :meth:`finish_all` holds the placement's lock.

    Args:
        device: where the elements come from.
        backend: the device's.

    Attributes:
        pages: the backend between tensors on the device and pages on the host.
    """

    def __init__(self, device: torch.device, backend: Backend) -> None:
        self._pinned = PinnedPages(backend, device) if device.type == "cuda" else None
        self.pages: Backend = self._pinned or backend
        self._queue: dict[Job, None] = {}  # what is not packed yet, oldest first
        self._executor: ThreadPoolExecutor | None = None
        self._process = -1

    def arena(self, limit_bytes: float) -> Arena:
        """An arena in host memory of which nothing is changed that a job still writes."""
        return Arena(limit_bytes, "cpu", self.finish_all, pinned=self._pinned is not None)

    @property
    def idle(self) -> bool:
        """Whether all that was submitted is packed."""
        return not self._queue

    def takes(self, flat: Tensor) -> bool:
        """Whether to hand a tensor over: it is large, and keeps no more memory than its own."""
        own = self._pinned is not None or flat.untyped_storage().nbytes() <= flat.nbytes
        return own and flat.nbytes >= SMALLEST_BYTES

    def encoder(
        self, flat: Tensor, stored: Stored, space: PageSpace
    ) -> tuple[Tensor, Callable[[], bool]]:
        """The elements on the host, and what encodes them once they are complete."""
        elements, complete, backend = flat, None, self.pages
        if self._pinned is not None:
            (elements, complete), backend = self._pinned.bring(flat), self._pinned.host
        # The arena's own grows meanwhile.
        here = PageSpace(space.pages_per_segment, space.segments[:], space.pointers[:])

        def encode() -> bool:
            if complete is not None:
                complete()
            return backend.encode(elements, stored.layout, stored.bits, stored.table, here)

        return elements, encode

    def submit(self, job: Job) -> Packing:
        """Have ``job`` finished soon, or at the latest by whoever reads the elements."""
        packing = Packing(job)
        job.queue = self._queue
        self._queue[job] = None
        if self._executor is None or self._process != os.getpid():
            # A forked child lacks the thread of its parent.
            self._executor, self._process = ThreadPoolExecutor(1, "daf_hf"), os.getpid()
        with suppress(RuntimeError):  # no new thread, or the interpreter ends: the readers do it
            self._executor.submit(_finish_oldest, self._queue)
        return packing

    def finish_all(self) -> bool:
        """Finish all that was submitted, together with the worker; False when nothing was."""
        jobs = list(self._queue)
        for job in reversed(jobs):  # the worker comes from the other end
            job.finish()
        if self._pinned is not None:
            self._pinned.synchronize()
        return bool(jobs)


def _finish_oldest(queue: dict[Job, None]) -> None:
    for job in list(queue)[:1]:
        job.finish()


def choose_packer(packing: str, device: torch.device, backend: Backend) -> Packer | None:
    """The packer that the option ``packing`` asks for; None to encode on the device.

    Raises:
        ValueError: ``"host"`` for a device that a worker cannot serve.
    """
    if packing == "host" and device.type not in ("cpu", "cuda"):
        raise ValueError(f"packing='host' cannot serve {device}: use 'device' or 'auto'")
    if packing == "auto" and device.type == "cuda" and host_is_faster(device, backend):
        packing = "host"
    return Packer(device, backend) if packing == "host" else None
