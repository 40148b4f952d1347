"""Packing by a worker: elements are encoded into pages while the forward pass goes on.

Locks. A :class:`Packing` has a lock of its own, held while its elements are encoded. Under it
nothing else is waited for: what ends meanwhile only *tries* the placement's lock, and otherwise
leaves its end to that lock's next holder (:class:`daf_hf.handles.DeferredEnds`). So whoever holds
the placement's lock may wait for the worker, and the worker waits for nobody.

Pages. Jobs are added under the placement's lock, and under the same lock the arena has all of them
finished before it demotes or moves anything (``before_change`` of :class:`daf_hf.arena.Arena`).
So pages stay where they are, as many as they are, until they are written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

from .arena import Arena, Stored
from .handles import Copy, Lease, Pages, Physical
from .kernels import Backend
from .kernels.format import PageSpace
from .pinned_pages import PinnedPages, host_is_faster

SMALLEST_BYTES = 1 << 20
"""Smaller tensors are encoded sooner than handed over."""


class Packing(Physical):
    """Elements on their way into pages, held exactly until they are there.

    Whoever comes first encodes them: the worker, or a thread that needs them. Elements that turn
    out not to be representable stay as they are.

    Args:
        copy: the elements, exactly.
        pages: where they go; not written yet.
        encode: writes the pages; False where the elements cannot be represented.
        waits: ends when the elements wait no longer.

    Attributes:
        copy, pages: one of them is None as soon as the elements are in the other.
        queue: what it leaves when it is finished.
    """

    __slots__ = ("_encode", "_error", "_lock", "_process", "_waits", "copy", "pages", "queue")

    def __init__(
        self, copy: Copy, pages: Pages, encode: Callable[[], bool], waits: Lease | None = None
    ) -> None:
        super().__init__(pages.site, private=pages.private)
        self.copy: Copy | None = copy
        self.pages: Pages | None = pages
        self.queue: dict[Packing, None] = {}
        self._encode: Callable[[], bool] | None = encode
        self._waits = waits
        self._error: Exception | None = None
        self._lock, self._process = Lock(), os.getpid()

    def finish(self) -> None:
        """Encode, or wait for who does. What goes wrong is raised where the elements are read."""
        if self._process != os.getpid():
            # A forked child: whoever held the lock is not in it.
            self._lock, self._process = Lock(), os.getpid()
        with self._lock:
            if self._encode is None:
                return
            try:
                done = self._encode()
            except Exception as error:
                self._error, done = error, False
            self._encode = None
            if done:
                self.copy = None
            else:
                self.pages = None
            self._waits = None
            self.queue.pop(self, None)

    def _place(self) -> Physical:
        self.finish()
        if self._error is not None:
            raise self._error
        place = self.pages or self.copy
        assert place is not None
        return place

    def flat(self) -> Tensor:
        return self._place().flat()

    def own(self) -> Tensor:
        return self._place().own()

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        yield from self._place().parts()


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
        self._queue: dict[Packing, None] = {}  # what is not packed yet, oldest first
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

    def submit(self, packing: Packing) -> None:
        """Have ``packing`` finished soon, or at the latest by its reader."""
        packing.queue = self._queue
        self._queue[packing] = None
        if self._executor is None or self._process != os.getpid():
            # A forked child lacks the thread of its parent.
            self._executor, self._process = ThreadPoolExecutor(1, "daf_hf"), os.getpid()
        with suppress(RuntimeError):  # no new thread, or the interpreter ends: the readers do it
            self._executor.submit(_finish_oldest, self._queue)

    def finish_all(self) -> bool:
        """Finish all that was submitted, together with the worker; False when nothing was."""
        jobs = list(self._queue)
        for packing in reversed(jobs):  # the worker comes from the other end
            packing.finish()
        if self._pinned is not None:
            self._pinned.synchronize()
        return bool(jobs)


def _finish_oldest(queue: dict[Packing, None]) -> None:
    for packing in list(queue)[:1]:
        packing.finish()


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
