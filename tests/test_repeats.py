"""Elements that are saved several times over."""

from __future__ import annotations

import pytest
import torch
from tiny import Watch, batch, build, compressed, gradients, nothing_held, relative_error

from daf_hf.repeats import condensed


def keys(grouped=True):
    torch.manual_seed(0)
    made = torch.randn(2, 40, 3, 32, requires_grad=True) * 1.5
    return made.transpose(1, 2) if grouped else made


REPEATED = {
    "expanded and copied": lambda k: k[:, :, None].expand(2, 3, 4, 40, 32).reshape(2, 12, 40, 32),
    "repeat_interleave": lambda k: k.repeat_interleave(4, dim=1),
    "of matrices": lambda k: k[:, :, None].expand(2, 3, 4, 40, 32).reshape(24, 40, 32),
    "transposed": lambda k: k.repeat_interleave(4, dim=1).transpose(2, 3),
    "first dimension": lambda k: k[None].expand(4, 2, 3, 40, 32).reshape(8, 3, 40, 32),
    "last dimension": lambda k: k[..., None].expand(2, 3, 40, 32, 4).reshape(2, 3, 40, 128),
    "two": lambda k: k[:, None, :, None].expand(2, 2, 3, 2, 40, 32).reshape(2, 12, 40, 32),
}


@pytest.mark.parametrize("how", REPEATED)
def test_repeated_elements_are_found(how):
    k = keys()
    tensor = REPEATED[how](k)
    found = condensed(tensor)
    assert found is not None
    assert found.untyped_storage().nbytes() == 4 * k.numel()
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    assert torch.equal(found.reshape(-1), flat)


NOT_REPEATED = {
    "made otherwise": lambda k: k.contiguous().reshape(2, 3, 40, 32) * 1,
    "expanded alone": lambda k: k[:, :, None].expand(2, 3, 4, 40, 32),
    "changed since": lambda k: k.repeat_interleave(4, dim=1) + 1,
    "changed in place": lambda k: k.repeat_interleave(4, dim=1).mul_(2),
    "a part": lambda k: k.repeat_interleave(4, dim=1)[:, 1:],
    "a copy": lambda k: k.clone(),
    "without a graph": lambda k: k.detach().repeat_interleave(4, dim=1),
}


@pytest.mark.parametrize("how", NOT_REPEATED)
def test_others_are_not(how):
    assert condensed(NOT_REPEATED[how](keys())) is None


def test_the_elements_have_the_last_word():
    """A change behind autograd's back, which the graph does not show."""
    tensor = keys().repeat_interleave(4, dim=1)
    tensor.data[1, 7, 3, 5] += 1e-3
    assert condensed(tensor) is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keys_and_values_of_a_group_are_stored_once(attention):
    """Four heads share each pair of keys and values, and the gradients are as predicted."""
    found = {}
    for derive in (True, False):
        model, inputs = build("llama", dropout=0.0), batch("llama", 8, 32)
        model.config._attn_implementation = attention
        exact = gradients(model, inputs)
        daf, compressor = compressed(model, 0.8, derive=derive)
        watch = Watch(compressor)
        approximate = gradients(model, inputs, daf)
        report = daf.report
        assert watch.peak <= 0.8e6 and nothing_held(compressor)
        error = relative_error(approximate, exact)
        assert error < 2 * report.predicted_gradient_error + 0.01
        found[derive] = report.predicted_gradient_error
    assert found[True] < found[False]


def test_padded_tokens_are_left_out_of_what_is_stored_once():
    model, inputs = build("llama", dropout=0.0), batch("llama", 8, 32)
    inputs["attention_mask"][4:, 16:] = 0
    inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    exact = gradients(model, inputs)
    daf, compressor = compressed(model, 0.8)
    watch = Watch(compressor)
    error = relative_error(gradients(model, inputs, daf), exact)
    assert watch.peak <= 0.8e6
    assert error < 2 * daf.report.predicted_gradient_error + 0.01
