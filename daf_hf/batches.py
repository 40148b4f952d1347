"""The size of a model's inputs, and smaller batches cut from them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map

from .chunked_loss import reduced
from .lazy_logits import LazyLogits
from .sites import Batch

MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")

IGNORED = -100
"""The label of tokens that no loss counts, as everywhere in transformers."""

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
    """``size.examples`` examples from ``start`` on, ``size.tokens`` neighbouring tokens of each.

    They are where most labels are, or, without labels of tokens, most that is not padding; else
    the first. Where the batch begins or ends with padding, so do they: some models take another
    way, and save other tensors, where nothing is padded. The tensors are copies, as a model may
    change its inputs in place.
    """
    whole = batch_of(inputs)
    kept = _tokens_of(inputs, start, size)

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


def _tokens_of(inputs: Inputs, start: int, size: Batch) -> list[int]:
    """The places of the tokens that :func:`cut` takes, in order."""
    whole = batch_of(inputs)
    if size.tokens >= whole.tokens:
        return list(range(whole.tokens))
    examples = slice(start, start + size.examples)
    labels, mask = (_of_tokens(inputs, name, whole) for name in ("labels", "attention_mask"))
    first = 0
    # A label is the next token's, and the last token may become padding.
    inner = (2, size.tokens - 1) if size.tokens > 3 else (0, size.tokens)
    labelled = None if labels is None else labels != IGNORED
    for telling, part in ((labelled, inner), (mask, (0, size.tokens))):
        if telling is None:
            continue
        counts = _within(telling[examples], size.tokens, *part)
        if counts.max() > 0:
            first = int(counts.argmax())
            break
    kept = list(range(first, first + size.tokens))
    if size.tokens > 1 and mask is not None:
        if not bool(mask[:, -1].all()):
            kept[-1] = whole.tokens - 1
        elif not bool(mask[:, 0].all()):
            kept[0] = 0
    return kept


def _within(telling: Tensor, tokens: int, first: int, last: int) -> Tensor:
    """How many each window of so many tokens has, from its ``first`` to before its ``last``, of
    those that ``telling``, ``[examples, all]``, marks.
    """
    sums = telling.sum(0, dtype=torch.float64).cumsum(0)
    sums = torch.cat((sums.new_zeros(1), sums))
    windows = len(sums) - tokens
    return sums[last : last + windows] - sums[first : first + windows]


def _of_tokens(inputs: Inputs, name: str, whole: Batch) -> Tensor | None:
    """An input of this name, if it is ``[examples, tokens]``."""
    found = inputs[1].get(name)
    if not isinstance(found, Tensor) or found.shape != (whole.examples, whole.tokens):
        return None
    return found


def is_plain(leaf: Any) -> bool:
    """Whether this is an ordinary tensor, of strides."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def scalar_loss(outputs: Any, seed: int) -> Tensor:
    """The loss in a model's outputs; without one, a fixed random projection of the outputs.

    Of a language model's logits that are never there as a whole it is the cross-entropy with
    tokens that the model itself gives; see :func:`_sampled_cross_entropy`.

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
        if isinstance(tensor, LazyLogits):
            total = total + _sampled_cross_entropy(tensor, generator)
            continue
        weights = torch.randn(tensor.shape, generator=generator).to(tensor.device)
        total = total + (tensor.float() * weights).sum()
    return total


def _sampled_cross_entropy(logits: LazyLogits, generator: torch.Generator) -> Tensor:
    """The cross-entropy, summed, with one target a row drawn from the model's own distribution.

    The expected square of its gradient is the Fisher information, which any loss that is a
    likelihood has near its optimum (Amari 1998, "Natural gradient works efficiently in learning").
    """
    rows, vocabulary = logits.shape[:-1].numel(), logits.shape[-1]
    drawn = torch.randint(1 << 24, (rows,), generator=generator).to(logits.device)

    def invert(values: Tensor, chosen: Tensor) -> Tensor:
        cumulative = values.float().softmax(-1).cumsum(-1)
        places = (chosen / (1 << 24))[:, None] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, places, right=True)[:, 0].clamp_(max=vocabulary - 1)

    with torch.no_grad():
        targets = logits.reduce(reduced, invert, drawn)
    return cross_entropy(logits.float().view(rows, vocabulary), targets, reduction="sum")


def _plain(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return dict(outputs)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return {f.name: getattr(outputs, f.name) for f in dataclasses.fields(outputs)}
    return outputs
