"""The output of fused attention, and its row sums, from queries, keys and values.

A fused kernel's backward pass makes the attention weights again as ``exp(q k - log_sum_exp)``
(Dao et al. 2022, arXiv 2205.14135, algorithm 4). With keys and queries of few bits and exact row
sums those would be no weights any more: where an error moves a score by ten, a weight is twenty
thousand. So the sums, and the output, are made again from the same restored keys and queries: the
weights of a row sum to one whatever the error, and neither has to be stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .expressions import Expression, Places, Reader, Source

OUTPUT, SUMS = 0, 1
"""Which result of the kernel."""

KERNELS: dict[str, Callable[..., Any]] = {
    "ScaledDotProductFlashAttentionForCpu": (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    ),
}
"""By the name of the autograd node, the operation that gives its output and row sums."""


@dataclass(frozen=True)
class Attended:
    """One call of a fused attention kernel.

    Attributes:
        kernel: an operation of :data:`KERNELS`.
        inputs: queries, keys and values, ``[batch, heads, tokens, size]`` each.
        mask: that is added to the scores, or None.
        causal, scale: the kernel's arguments.
    """

    kernel: Callable[..., Any]
    inputs: tuple[Source, ...]
    mask: Source | None
    causal: bool
    scale: float | None
    _kept: dict[int, Tensor] = field(default_factory=dict)

    def result(self, which: int, read: Reader) -> Tensor:
        """One of the results. Its backward pass reads the sums, then the output, so that one is
        kept in between.
        """
        kept = self._kept.pop(which, None)
        if kept is not None:
            return kept
        query, key, value = (source.laid_out(read) for source in self.inputs)
        mask = None if self.mask is None else self.mask.laid_out(read)
        results = self.kernel(query, key, value, 0.0, self.causal, attn_mask=mask, scale=self.scale)
        if which == SUMS:
            self._kept[OUTPUT] = results[OUTPUT]
        return results[which]


@dataclass(frozen=True)
class Attention(Expression):
    """The output ``[batch, heads, tokens, size]`` of fused attention, or the logarithms of its row
    sums ``[batch, heads, tokens]``, as they lie in memory.
    """

    attended: Attended
    which: int = OUTPUT
    witnessed = False

    def operands(self) -> tuple[Expression, ...]:
        mask = self.attended.mask
        return self.attended.inputs if mask is None else (*self.attended.inputs, mask)

    @property
    def numel(self) -> int:
        query, _, value = self.attended.inputs
        return math.prod(query.shape[:-1]) * (value.shape[-1] if self.which == OUTPUT else 1)

    @property
    def operations(self) -> int:
        keys = self.attended.inputs[1].shape[-2]
        return 2 + keys // 64

    def evaluate(self, read: Reader, at: Places | None = None) -> Tensor:
        if at is not None:
            raise RuntimeError("an element of attention's output takes whole rows of its operands")
        result = self.attended.result(self.which, read)
        return result.as_strided((result.numel(),), (1,))

    def agrees(self, flat: Tensor, read: Reader, at: Places | None = None) -> bool:
        """As others; but of a few places it says True: node and operands are the kernel's own."""
        return at is not None or super().agrees(flat, read)
