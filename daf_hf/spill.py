"""Where tensors go that the budget has no room for."""

from __future__ import annotations

import os
import tempfile
import weakref

import torch
from torch import Tensor


class SpillFile:
    """A temporary file without a name; it never outlives the process.

    The file is made when something is first written, and emptied when nothing in it is alive.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._end = 0
        self._alive = 0

    def _open(self) -> None:
        file = tempfile.TemporaryFile(prefix="daf_hf-")  # noqa: SIM115 - closed at our end
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()

    def write(self, flat: Tensor) -> int:
        """Append a flat CPU tensor; returns its offset.

        Raises:
            OSError: when the disk is full, naming the folder.
        """
        data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            if self._descriptor < 0:
                self._open()
            written = os.pwrite(self._descriptor, data, self._end)
            if written != data.nbytes:
                raise OSError(f"wrote {written} of {data.nbytes} bytes")
        except OSError as error:
            raise OSError(
                f"cannot spill {data.nbytes} bytes to a temporary file in "
                f"{tempfile.gettempdir()}: {error}. Free disk space there, set TMPDIR to a folder "
                "with room, or raise budget_mb."
            ) from error
        offset = self._end
        self._end += data.nbytes
        self._alive += 1
        return offset

    def read(self, offset: int, out: Tensor) -> None:
        """Fill the flat CPU tensor ``out`` from ``offset``."""
        data = memoryview(out.view(torch.uint8).numpy())  # type: ignore[arg-type]
        if os.preadv(self._descriptor, [data], offset) != data.nbytes:
            raise OSError("the spill file is shorter than what was written to it")

    def forget(self, _: int) -> None:
        """What was written at an offset is no longer needed."""
        self._alive -= 1
        if not self._alive:
            self._end = 0
            os.ftruncate(self._descriptor, 0)
