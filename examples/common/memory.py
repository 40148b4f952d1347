"""Measure how far a process's memory rises above the loaded model while it trains."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
from torch import nn
from transformers import TrainerCallback

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemoryCallback(TrainerCallback):
    """Record the peak resident memory of training above what was resident at its start.

    Put it before other callbacks, so that memory which they take at the start counts too.

    Attributes:
        baseline_bytes: resident memory when training began, with model and data loaded.
        peak_bytes: the highest resident memory during training. On Linux the kernel's
            high-water mark, reset at the start; elsewhere the process's peak since it began.
    """

    def __init__(self) -> None:
        self.baseline_bytes = 0
        self.peak_bytes = 0

    @property
    def above_baseline_bytes(self) -> int:
        return max(0, self.peak_bytes - self.baseline_bytes)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if model is not None:
            _make_resident(model)
        reset_peak()
        self.baseline_bytes = psutil.Process().memory_info().rss

    def on_train_end(self, args, state, control, **kwargs):
        self.peak_bytes = peak_bytes()


def _make_resident(model: nn.Module) -> None:
    """Read every weight once: loaded from a file, it may only be mapped until it is needed."""
    for parameter in model.parameters():
        parameter.detach().sum()


def reset_peak() -> None:
    """Lower the kernel's high-water mark to the present resident size, where that is possible."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5", encoding="utf-8")


def peak_bytes() -> int:
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    memory = psutil.Process().memory_info()
    if sys.platform == "win32":
        return memory.peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
