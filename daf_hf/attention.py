"""The output of fused attention, and its row sums, from queries, keys and values.

A fused kernel's backward pass makes the attention weights again as ``exp(q k - log_sum_exp)``
(Dao et al. 2022, arXiv 2205.14135, algorithm 4). With keys and queries of few bits and exact row
sums those would be no weights any more: where an error moves a score by ten, a weight is twenty
thousand. So the sums, and the output, are made again from the same restored keys and queries: the
weights of a row sum to one whatever the error, and neither has to be stored.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .expressions import Expression, Places, Reader, Source
from .physical import Physical
from .sites import SaveSite
from .tensors import operation

INPUTS: tuple[str, ...] = ("query", "key", "value")
"""Slots of the node, in the order of the kernel's arguments."""

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

    def results(self, flats: Iterable[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and row sums, flat, of flat queries, keys and values, and the mask."""
        query, key, value = (
            source.lay_out(flat) for source, flat in zip(self.inputs, flats, strict=True)
        )
        output, sums = self.kernel(
            query, key, value, 0.0, self.causal, attn_mask=mask, scale=self.scale
        )
        return output.as_strided((output.numel(),), (1,)), sums.as_strided((sums.numel(),), (1,))


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
        return 2

    def evaluate(self, read: Reader, at: Places | None = None) -> Tensor:
        if at is not None:
            raise RuntimeError("an element of attention's output takes whole rows of its operands")
        attended = self.attended
        flats, mask = [read.whole(source.saved) for source in attended.inputs], None
        if attended.mask is not None:
            mask = attended.mask.lay_out(read.whole(attended.mask.saved))
        return attended.results(flats, mask)[self.which]

    def agrees(self, flat: Tensor, read: Reader, at: Places | None = None) -> bool:
        """As others; but of a few places it says True: node and operands are the kernel's own."""
        return at is not None or super().agrees(flat, read)


class Call:
    """What the backward pass of one call of the kernel reads, all restored at the same moment.

    Were they restored one by one, a budget that falls in between would leave row sums beside keys
    of other bits.

    Args:
        attended: its sources are physicals, or tensors of the model's own.
    """

    def __init__(self, attended: Attended) -> None:
        self._attended = attended
        self._held: dict[int, dict[str, Tensor]] = {}

    def read(self, slot: str) -> Tensor:
        """The flat elements of a slot; the node's other slots' are kept until it reads them."""
        node, thread = torch._C._current_autograd_node(), threading.get_ident()
        reads_all = node is not None and operation(node.name()) in KERNELS
        held = self._held.get(thread, {}) if reads_all else {}
        if slot not in held:
            held = self._restore()
        found = held.pop(slot)
        if reads_all and held:
            self._held[thread] = held
        else:
            self._held.pop(thread, None)
        return found

    def _restore(self) -> dict[str, Tensor]:
        attended, mask = self._attended, None
        flats = [_flat(source) for source in attended.inputs]
        if attended.mask is not None:
            mask = attended.mask.lay_out(_flat(attended.mask))
        found = dict(zip(INPUTS, flats, strict=True))
        found["output"], found["logsumexp"] = attended.results(flats, mask)
        return found


def _flat(source: Source) -> Tensor:
    return source.saved if isinstance(source.saved, Tensor) else source.saved.flat()


class Slot(Physical):
    """What a fused attention node has saved in one of its slots.

    Args:
        site: the save site.
        call: restores it.
        name: of the slot.
        saved: what lives as long.
    """

    __slots__ = ("call", "name")

    def __init__(self, site: SaveSite, call: Call, name: str, saved: Any) -> None:
        super().__init__(site)
        self.call, self.name, self.saved = call, name, saved

    def flat(self) -> Tensor:
        return self.call.read(self.name)
