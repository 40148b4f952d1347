"""Where tensors go that the budget has no room for."""

from __future__ import annotations

import math
import os
import tempfile
import threading
import weakref
from typing import Any

import torch
from sortedcontainers import SortedDict
from torch import Tensor


class SpillFile:
    """A temporary file without a name; it never outlives the process.

    The file is made when something is first written. It ends with the last thing in it that is
    alive. Usable by several threads. A fork gives it to the child too, which leaves it alone.

    Args:
        limit_bytes: that it, and what is spilled to host memory, may take together.

    Attributes:
        process: whose it is.
    """

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self.process = os.getpid()
        self._limit = limit_bytes
        self._descriptor = -1
        self._closing: Any = None
        self._alive: SortedDict = SortedDict()  # sizes by offset
        self._elsewhere = 0
        self._lock = threading.RLock()  # whatever dies while something is written is forgotten

    @property
    def _end(self) -> int:
        with self._lock:
            if not self._alive:
                return 0
            offset, nbytes = self._item(-1)
            return offset + nbytes

    def _item(self, place: int) -> tuple[int, int]:
        item: Any = self._alive.peekitem(place)
        return item

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes more stay within the limit."""
        return self._end + self._elsewhere + nbytes <= self._limit

    def _open(self) -> None:
        file = tempfile.TemporaryFile(prefix="daf_hf-")  # noqa: SIM115 - closed at our end
        self._closing = weakref.finalize(self, file.close)
        self._descriptor = file.fileno()

    def write(self, flat: Tensor) -> int:
        """Append a flat CPU tensor; returns its offset (-1 for one without elements).

        Raises:
            OSError: when the disk is full, naming the folder.
        """
        data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        if not data.nbytes:  # it has no place of its own: the next one's would be the same
            return -1
        with self._lock:
            offset = self._end
            self._alive[offset] = data.nbytes
        try:
            if self._descriptor < 0:
                self._open()
            written = 0
            while written < data.nbytes:  # Linux takes no more than 2 GiB at a time
                more = os.pwrite(self._descriptor, data[written:], offset + written)
                if not more:
                    raise OSError(f"wrote {written} of {data.nbytes} bytes")
                written += more
        except OSError as error:
            self.forget(offset)
            raise OSError(
                f"cannot spill {data.nbytes} bytes to a temporary file in "
                f"{tempfile.gettempdir()}: {error}. Free disk space there, set TMPDIR to a folder "
                "with room, or raise budget_mb."
            ) from error
        return offset

    def read(self, offset: int, out: Tensor) -> None:
        """Fill the flat CPU tensor ``out`` from ``offset``.

        Backward wants first what was written last: what was written before this is asked of the
        disk meanwhile.

        Raises:
            RuntimeError: in a forked child: its parent goes on writing to the file.
        """
        if self.process != os.getpid():
            raise RuntimeError(
                "what was spilled to a file before a fork belongs to the parent: run backward in "
                "the process that ran forward, or fork between two steps"
            )
        data = memoryview(out.view(torch.uint8).numpy())  # type: ignore[arg-type]
        if not data.nbytes:
            return
        with self._lock:
            place = self._alive.bisect_left(offset) - 1
            before = self._item(place) if place >= 0 else None
        if before is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, *before, os.POSIX_FADV_WILLNEED)
        done = 0
        while done < data.nbytes:
            more = os.preadv(self._descriptor, [data[done:]], offset + done)
            if not more:
                raise OSError("the spill file is shorter than what was written to it")
            done += more

    def forget(self, offset: int) -> None:
        """What was written at an offset is no longer needed."""
        if self.process != os.getpid():
            return
        with self._lock:
            end = self._end
            del self._alive[offset]
            # At the process's end the file is closed first, and its number may be another's.
            if self._end < end and self._closing is not None and self._closing.alive:
                os.ftruncate(self._descriptor, self._end)

    def hold(self, nbytes: int) -> None:
        """Count bytes that are spilled to host memory; negative ones are there no longer."""
        if self.process != os.getpid():
            return
        with self._lock:
            self._elsewhere += nbytes


class Parcel:
    """A tensor that was spilled: from a CPU to the file, from an accelerator to host memory.

    Args:
        flat: the tensor.
        spill: the file, which also counts.
    """

    __slots__ = ("_host", "_nbytes", "_offset", "_spill")

    def __init__(self, flat: Tensor, spill: SpillFile) -> None:
        self._spill, self._nbytes = spill, flat.nbytes
        self._host: Tensor | None = None
        self._offset = -1
        if flat.device.type == "cpu":
            self._offset = spill.write(flat)
        else:
            self._host = flat.cpu()
            spill.hold(self._nbytes)

    def read(self, out: Tensor) -> None:
        """Fill a flat tensor of the same size and kind of device."""
        if self._host is not None:
            out.copy_(self._host)
        else:
            self._spill.read(self._offset, out)

    def __del__(self) -> None:
        if self._host is not None:
            self._spill.hold(-self._nbytes)
        elif self._offset >= 0:
            self._spill.forget(self._offset)
