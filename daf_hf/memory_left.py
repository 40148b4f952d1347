"""What a device has left: the least of all limits that a process is under.

Sources: proc(5) (``MemAvailable``, ``VmSize``, ``VmData``), getrlimit(2), the kernel's
admin-guide/cgroup-v2 (``memory.max``, ``memory.high``, ``memory.current``, ``memory.events``) and
cgroup-v1/memory, and accounting/psi (pressure stall information).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True)
class Reading:
    """One look at what is left.

    Attributes:
        available: bytes that may be taken until the nearest limit is reached.
        source: that limit, in words.
        stalled: of the last ten seconds, the share (0 to 1) in which some task waited for memory
            (PSI's ``some avg10``); 0 where nobody tells.
        events: how often the process's control groups ran into their limits so far.
    """

    available: float
    source: str
    stalled: float = 0.0
    events: int = 0


class MemoryLeft:
    """Reads what a device has left.

    Args:
        device: a CPU's memory is the system's, also bounded by the process's control groups and
            resource limits; a CUDA device's is its own, with what torch keeps of it for reuse.
        root: of the file system; tests have one of their own.
    """

    def __init__(self, device: torch.device, root: Path = Path("/")) -> None:
        self.device = device
        self._proc = root / "proc"
        self._groups = tuple(_groups(root))

    def read(self) -> Reading:
        """The nearest limit now."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            kept = torch.cuda.memory_reserved(self.device)
            kept -= torch.cuda.memory_allocated(self.device)
            return Reading(free + kept, str(self.device))
        limits = [(self._system(), "the system"), *self._process()]
        stalled, events = _stalled(self._proc / "pressure" / "memory"), 0
        for group in self._groups:
            limits.append((group.available(), f"control group {group.name}"))
            stalled = max(stalled, _stalled(group.folder / "memory.pressure"))
            counts = _table(group.folder / "memory.events")
            events += sum(counts.get(event, 0) for event in ("high", "max", "oom"))
        return Reading(*min(limits), stalled, events)

    def _system(self) -> float:
        kilobytes = _table(self._proc / "meminfo").get("MemAvailable")
        return psutil.virtual_memory().available if kilobytes is None else kilobytes * 1024

    def _process(self) -> Iterator[tuple[float, str]]:
        with suppress(ImportError):  # Windows has no such limits
            import resource

            used = _table(self._proc / "self" / "status")
            for which, field, name in (
                (resource.RLIMIT_AS, "VmSize", "address space (RLIMIT_AS)"),
                (resource.RLIMIT_DATA, "VmData", "data (RLIMIT_DATA)"),
            ):
                limit, _ = resource.getrlimit(which)
                if limit != resource.RLIM_INFINITY and field in used:
                    yield limit - used[field] * 1024, f"the process's {name}"


@dataclass(frozen=True)
class _Group:
    """A memory control group: its folder, and the files' names of its version."""

    name: str
    folder: Path
    limits: tuple[str, ...]
    usage: str
    reclaimable: str

    def available(self) -> float:
        """Bytes until its limit; what the kernel can take back from files at once is among them."""
        limit = min(_number(self.folder / name) for name in self.limits)
        if math.isinf(limit):
            return math.inf
        idle = _table(self.folder / "memory.stat").get(self.reclaimable, 0)
        return limit - _number(self.folder / self.usage) + idle


def _groups(root: Path) -> Iterator[_Group]:
    """The process's own memory control group and those that it is in, as far as they are seen."""
    mount = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            places = [mount, mount / "unified"]
            files = ("memory.max", "memory.high"), "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            places = [mount / "memory"]
            files = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # A container may see its own group as the root, whatever its path is outside.
        parts = Path(path.lstrip("/")).parts
        for place in places:
            for depth in range(len(parts), -1, -1):
                folder = place.joinpath(*parts[:depth])
                if (folder / files[0][0]).is_file():
                    yield _Group("/" + "/".join(parts[:depth]), folder, *files)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(path: Path) -> float:
    """A file's number; inf for ``max``, for none, and for what cgroup v1 takes for unlimited."""
    text = _text(path).strip()
    value = float(text) if text.isdigit() else math.inf
    return value if value < 1 << 60 else math.inf


def _table(path: Path) -> dict[str, int]:
    """Names and their numbers, one pair a line."""
    rows = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _stalled(path: Path) -> float:
    for line in _text(path).splitlines():
        if line.startswith("some avg10="):
            return float(line.split()[1].removeprefix("avg10=")) / 100
    return 0.0
