"""What a loss outside the model holds for backward, which a callback alone does not compress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from daf_hf.handles import Handle, Kept
from daf_hf.hook_stack import pop_hooks, push_hooks
from daf_hf.tensors import is_ordinary


class LossWatch:
    """Counts what is saved while a loss is computed, the model's own forward passes aside.

    These have hooks of their own, on top of the ones here.

    Attributes:
        nbytes: unique bytes of what one loss saved, parameters excluded; of the largest so far.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._storages: dict[int, int] = {}
        self._hooks = (self._pack, Handle.restore)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count inside, for one loss."""
        if not torch.is_grad_enabled():
            yield
            return
        self._storages.clear()
        push_hooks(self._hooks)
        try:
            yield
        finally:
            pop_hooks(self._hooks)
            self.nbytes = max(self.nbytes, sum(self._storages.values()))

    def _pack(self, tensor: Tensor) -> Handle:
        base = tensor if tensor._base is None else tensor._base
        if is_ordinary(tensor) and not isinstance(base, nn.Parameter):
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage.nbytes()
        return Kept(tensor)
