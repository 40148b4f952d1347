"""The size of a model's inputs, and smaller batches cut from them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .sites import Batch

MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class NothingToLearnError(ValueError):
    """No output of a forward pass depends on a parameter that is trained."""


def main_input(inputs: Inputs) -> Tensor | None:
    """The tensor whose sizes are the batch's: by name, else the first there is."""
    args, kwargs = inputs
    for name in MAIN_INPUTS:
        if isinstance(kwargs.get(name), Tensor):
            return kwargs[name]
    leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return next((leaf for leaf in leaves if leaf.dim()), None)


def batch_of(inputs: Inputs) -> Batch:
    """Examples and tokens of the inputs (one token where the main input is no sequence)."""
    main = main_input(inputs)
    if main is None:
        return Batch(1)
    integer_ids = main.dim() == 2 and not main.dtype.is_floating_point
    embeddings = main.dim() == 3 and main.dtype.is_floating_point
    return Batch(main.shape[0], main.shape[1] if integer_ids or embeddings else 1)


def signature(inputs: Inputs) -> tuple[Any, ...]:
    """Shapes of all input tensors: equal for inputs whose saved tensors have equal sizes."""
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))


def cut(inputs: Inputs, start: int, size: Batch) -> Inputs:
    """``size.examples`` examples from ``start`` on, their first ``size.tokens`` tokens.

    Where the batch's last tokens are padding, the last one is among them: some models take another
    way, and save other tensors, where nothing is padded. The tensors are copies, as a model may
    change its inputs in place.
    """
    whole = batch_of(inputs)
    kept = list(range(size.tokens))
    if 1 < size.tokens < whole.tokens and _ends_padded(inputs):
        kept[-1] = whole.tokens - 1

    def one_each(leaf: Any) -> bool:
        return isinstance(leaf, list) and len(leaf) == whole.examples

    def part(leaf: Any) -> Any:
        if one_each(leaf):
            return tree_map(copy, leaf[start : start + size.examples])
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() and leaf.shape[0] == whole.examples:
            leaf = leaf[start : start + size.examples]
            if size.tokens < whole.tokens:
                for dim in range(1, leaf.dim()):
                    if leaf.shape[dim] == whole.tokens:
                        leaf = leaf.index_select(dim, torch.tensor(kept, device=leaf.device))
        return copy(leaf)

    def copy(leaf: Any) -> Any:
        # Models do take a view(-1) of their labels.
        return leaf.clone(memory_format=torch.contiguous_format) if is_plain(leaf) else leaf

    args, kwargs = tree_map(part, inputs, is_leaf=one_each)
    return args, kwargs


def _ends_padded(inputs: Inputs) -> bool:
    """Whether the last token of some example is padding, by the mask ``[examples, tokens]``."""
    mask = inputs[1].get("attention_mask")
    return isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask[:, -1].all())


def is_plain(leaf: Any) -> bool:
    """Whether this is an ordinary tensor, of strides."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def scalar_loss(outputs: Any, seed: int) -> Tensor:
    """The loss in a model's outputs; without one, a fixed random projection of the outputs.

    Raises:
        NothingToLearnError: when no output depends on anything that is trained.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss.float().mean()
    tensors = [t for t in tree_leaves(_plain(outputs)) if isinstance(t, Tensor) and t.requires_grad]
    if not tensors:
        raise NothingToLearnError("no output of the model depends on a parameter that is trained")
    if tensors[0].dim() == 0:
        return tensors[0]
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), device=tensors[0].device)
    for tensor in tensors:
        weights = torch.randn(tensor.shape, generator=generator).to(tensor.device)
        total = total + (tensor.float() * weights).sum()
    return total


def _plain(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return dict(outputs)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    return outputs
