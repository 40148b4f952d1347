"""Whether a saved tensor was changed in place."""

from __future__ import annotations

import torch
from torch import Tensor

_EMPTY: dict[tuple[torch.dtype, torch.device], Tensor] = {}


class Version:
    """Notices in-place changes of a saved tensor, as plain autograd does.

    A detached alias shares the version counter of its source; giving it empty data lets go of
    the source's memory but not of the counter.

    Args:
        tensor: the saved tensor.
        alias: a detached alias, if one is kept anyhow.
    """

    __slots__ = ("_counter", "_shape", "_version")

    def __init__(self, tensor: Tensor, alias: Tensor | None = None) -> None:
        self._counter = _without_memory(tensor) if alias is None else alias
        self._shape = tensor.shape
        self._version = tensor._version

    def check(self) -> None:
        """Raise if the tensor was changed.

        Raises:
            RuntimeError: as autograd would.
        """
        if self._counter._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a saved tensor of shape {tuple(self._shape)} is at version "
                f"{self._counter._version}; expected version {self._version} instead"
            )


def _without_memory(tensor: Tensor) -> Tensor:
    key = (tensor.dtype, tensor.device)
    empty = _EMPTY.get(key)
    if empty is None:
        empty = _EMPTY[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alias = tensor.detach()
    alias.data = empty
    return alias
