r"""What if ``channel`` codes used the mean and deviation of the step before?

    python benchmarks/delayed_statistics.py --data_dir path/to/glue --task mrpc --steps 80

The encoder would read a tensor once instead of twice. Over some steps of plain training after the
first ones, every activation that autograd saves with the width of the hidden states or of the
feed-forward layers is replaced by what ``channel`` + ``normal`` restores of it: with its own
statistics, and with those of the tensor that was saved at its place in the step before. ``error``
is the relative error of the whole gradient, its mean over the steps; ``distortion`` is the squared
error of the elements relative to their variance about their channel's mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from ablations import Gradients, gradients, print_table, squared_error, training, training_parser
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from daf_hf.codecs import normal
from daf_hf.kernels.format import MAX_BITS, SMALLEST_SCALE

SMALLEST_ROWS = 64


class Channels:
    """Saved-tensors hooks that quantize by channel.

    Args:
        widths: sizes of the last dimension of what is quantized.
        bits: of a code.
        delayed: with the statistics of the call before.

    Attributes:
        lost, energy: squared error of all elements, and their squares about the mean.
    """

    def __init__(self, widths: Iterable[int], bits: int, delayed: bool) -> None:
        self._widths, self._bits, self._delayed = frozenset(widths), bits, delayed
        self._book = normal()
        self._before: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._number = 0
        self.lost = self.energy = 0.0

    def gradients(self, model: nn.Module, batch: dict[str, Tensor]) -> Gradients:
        """As :func:`ablations.gradients`, from what is restored."""
        self._number = 0
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            return gradients(model, batch)

    def _pack(self, tensor: Tensor) -> Tensor:
        x = tensor.detach()
        if not self._takes(tensor):
            return x
        flat = x.view(-1, x.shape[-1])
        own = flat.mean(0), flat.std(0, unbiased=False).clamp_min(SMALLEST_SCALE)
        place = self._number, x.shape[-1]
        self._number += 1
        mean, scale = self._before.get(place, own) if self._delayed else own
        self._before[place] = own
        restored = self._restored((flat - mean) / scale) * scale + mean
        self.lost += float((restored - flat).square().sum())
        self.energy += float((flat - own[0]).square().sum())
        return restored.view_as(x)

    def _takes(self, tensor: Tensor) -> bool:
        return (
            tensor.grad_fn is not None
            and tensor.dtype is torch.float32
            and tensor.dim() > 1
            and tensor.shape[-1] in self._widths
            and tensor.numel() >= SMALLEST_ROWS * tensor.shape[-1]
            and tensor.is_contiguous()
        )

    def _restored(self, z: Tensor) -> Tensor:
        book = self._book
        assert book.lut is not None
        cells = ((z - book.grid_origin) * book.grid_density).long().clamp_(0, book.cells - 1)
        codes = book.lut[cells].long() >> (MAX_BITS - self._bits)
        return book.tables[self._bits][codes]


def compare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[dict[str, Tensor]],
    widths: Sequence[int],
    bits: Sequence[int],
) -> list[dict[str, Any]]:
    """A row for each number of bits and kind of statistics; the model is trained meanwhile."""
    hooks = {(b, kind): Channels(widths, b, kind == "delayed")
             for b in bits for kind in ("own", "delayed")}  # fmt: skip
    errors: dict[tuple[int, str], list[float]] = {key: [] for key in hooks}
    for step, batch in enumerate(batches):
        found = {key: hook.gradients(model, batch) for key, hook in hooks.items()}
        exact = gradients(model, batch)
        optimizer.step()
        for key, errors_of in errors.items():
            if step:  # the first one has none before it
                errors_of.append(math.sqrt(squared_error(found[key], exact, by_kind=False)))
    return [
        {"bits": b, "statistics": kind, "error": sum(errors[b, kind]) / len(errors[b, kind]),
         "distortion": hooks[b, kind].lost / hooks[b, kind].energy}
        for b, kind in hooks
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = training_parser(__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--bits", nargs="+", type=int, choices=range(1, 9), default=[1, 2, 4])
    parser.add_argument("--batches", type=int, default=6, help="on which errors are measured")
    options = parser.parse_args(argv)
    model, optimizer, batches = training(options)
    config: Any = model.config
    widths = [config.hidden_size, config.intermediate_size]
    batches = islice(batches, options.batches)
    rows = compare(model, optimizer, batches, widths, options.bits)
    print_table("Statistics of the tensor itself, and of the step before", rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
