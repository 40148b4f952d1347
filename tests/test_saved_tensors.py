"""Pack and unpack: layouts, dtypes, exact paths, deduplication, leases."""

from __future__ import annotations

import gc
import math
import random
import weakref

import pytest
import torch
from tiny import Tagged, hooks_on_stack, nothing_held, save
from torch import nn

from daf_hf import BudgetError, DAFConfig
from daf_hf.allocation import Option
from daf_hf.arena import PAGE_COST
from daf_hf.codecs import GELU
from daf_hf.placement import SMALLEST_BYTES
from daf_hf.saved_tensors import Compressor
from daf_hf.sites import SaveSite

MODEL = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
NOT_COMPRESSED = (torch.float64, torch.complex64, torch.complex128)


def compressor(budget_mb=10.0, **options):
    options.setdefault("bits", (8,))
    return Compressor(MODEL, DAFConfig(budget_mb=budget_mb, **options))


def noise(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


LAYOUTS = {
    "contiguous": lambda x: x,
    "offset": lambda x: x[3:],
    "offset in a row": lambda x: x.flatten()[5:],
    "columns": lambda x: x[:, 7:50],
    "every other": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "flipped": lambda x: x.flip(0, 1),
    "expanded": lambda x: x[:, None].expand(-1, 5, -1),
    "expanded from one": lambda x: x[:1, :1].expand(300, 40),
    "expanded row": lambda x: x[0].expand(50, 64),
    "channels last": lambda x: x.view(8, 4, 8, 32).contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.view(8, 4, 8, 32).permute(2, 0, 3, 1),
    "overlapping": lambda x: x.flatten().unfold(0, 128, 32),
    "diagonal": lambda x: x.view(8, 32, 32).diagonal(dim1=1, dim2=2).expand(8, 8, 32),
    "strides that skip": lambda x: x.as_strided((20, 64), (130, 1), 11),
    "no columns": lambda x: x.flatten()[::3],
    "one dimension of one": lambda x: x[:, None, :, None],
    "scalar": lambda x: x[0, 0],
    "view of a view": lambda x: x[2:].t()[4:].reshape(-1, 2),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_restored_tensor_is_the_saved_one(layout, dtype, freed_pages_are_noise):
    x = LAYOUTS[layout](noise(128, 64, dtype=dtype))
    with (daf := compressor()).scope():
        y, out = save(x)
    y.backward()
    assert (out[0].shape, out[0].dtype, out[0].device) == (x.shape, x.dtype, x.device)
    assert torch.allclose(out[0].float(), x.float(), atol=0.05)
    if x.is_contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.is_contiguous():
        assert out[0].stride() == x.stride()
    del y, out
    assert nothing_held(daf)


@pytest.mark.parametrize("dtype", (*INTEGERS, *NOT_COMPRESSED), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_dtypes_are_restored_bit_for_bit(layout, dtype):
    x = noise(128, 64, dtype=torch.float64).mul(9).to(dtype)
    x = LAYOUTS[layout](x)
    with (daf := compressor()).scope():
        y, out = save(x)
    y.backward()
    assert torch.equal(out[0], x)
    assert out[0].dtype == dtype
    del y, out
    assert nothing_held(daf)


@pytest.mark.parametrize("shape", [(0,), (0, 64), (64, 0, 3)])
@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64, torch.bool), ids=str)
def test_tensors_without_elements(shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    with (daf := compressor()).scope():
        y, out = save(x)
    y.backward()
    assert (out[0].shape, out[0].dtype) == (x.shape, dtype)
    assert daf.ledger.peak.held == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_kept_exactly(dtype, odd):
    x = noise(64, 64, dtype=dtype)
    x[3, 5] = odd
    with (daf := compressor()).scope():
        y, out = save(x)
    y.backward()
    assert torch.equal(out[0].view(torch.int16), x.view(torch.int16))
    assert daf.ledger.peak.exact == x.nbytes
    assert daf.ledger.counts["not_finite"] == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("values", [(0.0, 1.1), (0.0, -math.inf), (-3.0, 7.5), (2.0, 2.0)])
def test_two_values_take_one_bit_without_loss(dtype, values):
    low, high = (torch.tensor(v, dtype=dtype) for v in values)
    x = torch.where(noise(128, 128) > 0, low, high)
    with (daf := compressor()).scope():
        y, out = save(x)
    assert daf.ledger.peak.held <= 4 * PAGE_COST
    y.backward()
    assert torch.equal(out[0], x)


def test_booleans_take_one_bit():
    x = noise(128, 128) > 0
    with (daf := compressor()).scope():
        save(x)
    assert daf.ledger.peak.held <= 3 * PAGE_COST


def test_a_third_value_late_in_the_tensor_is_not_lost():
    x = torch.where(noise(64, 64) > 0, 0.0, 1.0)
    x[-1, -1] = 0.5
    with compressor().scope():
        y, out = save(x)
    y.backward()
    assert torch.allclose(out[0], x, atol=0.01)


def test_small_tensors_are_exact():
    x = noise(SMALLEST_BYTES // 4 - 1)
    with (daf := compressor()).scope():
        y, out = save(x)
    assert daf.ledger.peak.exact == x.nbytes
    y.backward()
    assert torch.equal(out[0], x)


def test_an_expanded_tensor_takes_what_was_expanded():
    x = noise(64, 64)
    with (daf := compressor()).scope():
        save(x[None].expand(1000, 64, 64))
    assert daf.ledger.plain_peak == x.nbytes
    assert daf.ledger.peak.held < x.nbytes


@pytest.mark.parametrize("budget", [10.0, math.inf])
@pytest.mark.parametrize(
    "view", [lambda p: p, lambda p: p.t(), lambda p: p[3:], lambda p: p.detach().view(-1)]
)
def test_parameters_and_buffers_take_nothing(budget, view):
    tensors = [view(MODEL[0].weight), MODEL[1].running_mean, MODEL[1].running_var]
    with (daf := compressor(budget)).scope():
        y, out = save(*tensors)
    assert daf.ledger.peak.held == daf.ledger.plain_peak == 0
    y.backward()
    assert all(torch.equal(a, b) for a, b in zip(out, tensors, strict=True))


def test_low_precision_copies_of_the_current_modules_parameters_take_nothing():
    daf = compressor()
    with daf.scope():
        daf.tracker._calls().append(type(daf.tracker._calls()[0])(MODEL[0], "0"))
        weight = MODEL[0].weight.to(torch.bfloat16)
        y, out = save(weight, weight.t())
        assert daf.held_bytes() == 0
        z, other = save(weight + 1)
        assert daf.held_bytes() > 0
        daf.tracker._calls().pop()
    (y + z).backward()
    assert torch.allclose(other[0], weight + 1, atol=0.05)
    assert torch.equal(out[0], weight)
    assert torch.equal(out[1], weight.t())


# Identity ----------------------------------------------------------------------------------------


def test_a_tensor_saved_many_times_is_stored_once():
    x = noise(64, 64)
    with (daf := compressor()).scope():
        y, out = save(x, x, x.view(-1), x.detach())
        one = daf.held_bytes()
        z, more = save(x)
    assert daf.held_bytes() == one
    (y + z).backward()
    assert all(torch.allclose(t.reshape(64, 64), x, atol=0.05) for t in [*out, *more])
    del y, z
    assert nothing_held(daf)


def test_views_of_one_storage_keep_their_own_elements():
    x = noise(128, 64)
    views = [x, x.t(), x[:64], x[64:], x[:, :32], x[:, 32:], x.view(64, 128), x[::2]]
    views += [x[:, ::2], x[:64, ::2].t(), x[:64, ::2]]
    with compressor().scope():
        y, out = save(*views)
    y.backward()
    assert all(torch.allclose(a, b, atol=0.05) for a, b in zip(out, views, strict=True))


def test_reinterpreted_bits_are_another_tensor():
    x = noise(64, 64)
    with compressor().scope():
        y, out = save(x, x.view(torch.int32))
    y.backward()
    assert torch.equal(out[1], x.view(torch.int32))


def test_a_changed_tensor_is_another_one():
    x = noise(64, 64)
    daf = compressor()
    with daf.scope():
        before = daf._pack(x)
        x.zero_()
        after = daf._pack(x)
    assert torch.equal(daf._unpack(after), torch.zeros(64, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        daf._unpack(before)


def test_new_tensors_at_freed_addresses_are_not_mistaken():
    daf = compressor()
    with daf.scope():
        for seed in range(30):
            x = noise(64, 64, seed=seed)
            expected = x.clone()
            handle = daf._pack(x)
            del x
            other = noise(64, 64, seed=1000 + seed)  # may get the memory that x had
            another = daf._pack(other)
            assert torch.allclose(daf._unpack(handle), expected, atol=0.05)
            assert torch.allclose(daf._unpack(another), other, atol=0.05)


def saved_for_gelu(daf):
    """A site whose only consumer is GELU, stored in GELU's own codec."""
    site = SaveSite("a/0", "a", consumers={"GeluBackward0.self"}, known=True)
    site.option = Option(1, 0.0, GELU, 4, (0.0,) * 9)
    daf.tracker.site = lambda *_: site
    return site


def test_the_gelu_codec_serves_gelu():
    x = noise(64, 64).requires_grad_()
    expected = torch.autograd.grad(nn.functional.gelu(x).sum(), x)[0]
    daf = compressor(bits=(4,))
    saved_for_gelu(daf)
    with daf.scope():
        y = nn.functional.gelu(x).sum()
    assert torch.allclose(torch.autograd.grad(y, x)[0], expected, atol=0.1)


def test_the_gelu_codec_serves_nobody_else():
    daf = compressor(bits=(4,))
    site = saved_for_gelu(daf)
    with daf.scope():
        y, _ = save(noise(64, 64))
    with pytest.raises(RuntimeError, match=r"ReadsBackward reads .* saved at a/0.*exclude=\['a'\]"):
        y.backward()
    assert site.consumers == {"GeluBackward0.self"}


def test_what_gelu_stored_is_not_shared_with_other_sites():
    x = noise(64, 64)
    daf = compressor()
    with daf.scope():
        saved_for_gelu(daf)
        first = daf._pack(x)
        daf.tracker.site = lambda *_: SaveSite("b/0", "b")
        other = daf._pack(x)
    assert first.physical is not other.physical
    assert torch.allclose(daf._unpack(other), x, atol=0.05)


# In-place changes --------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [10.0, math.inf])
@pytest.mark.parametrize(
    "make",
    [
        lambda: noise(64, 64),
        lambda: noise(64, 64)[3:, ::2],
        lambda: noise(4),
        lambda: noise(64, 64) > 0,
        lambda: torch.arange(5000),
        lambda: torch.where(noise(64, 64) > 0, 0.0, 1.0),
        lambda: torch.full((64, 64), math.nan),
        lambda: noise(64, 64, dtype=torch.float64),
        lambda: MODEL[0].weight.detach(),
        lambda: noise(64, 64, dtype=torch.bfloat16),
    ],
)
def test_a_change_in_place_raises(make, budget):
    x = make()
    before = x.clone()
    with compressor(budget).scope():
        y, _ = save(x)
    with torch.no_grad():
        x.copy_(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    assert torch.equal(x, before) or x.isnan().all()


def test_a_change_of_the_storage_through_a_view_raises():
    x = noise(64, 64)
    with compressor().scope():
        y, _ = save(x[:32])
    x[40:].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# Integers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "size"),
    [(0, 255, 1), (0, 256, 2), (-128, 127, 1), (-100, 30_000, 2), (0, 32_768, 4), (0, 2**31, 8)],
)
def test_integers_are_held_in_as_few_bytes_as_they_need(low, high, size):
    x = torch.full((4096,), low, dtype=torch.int64)
    x[7] = high
    with (daf := compressor()).scope():
        y, out = save(x, x.view(64, 64))
    assert daf.arena.held_bytes == size * x.numel()
    y.backward()
    assert out[0].dtype == torch.int64
    assert torch.equal(out[0], x)
    assert torch.equal(out[1], x.view(64, 64))


def test_integers_that_are_held_anyhow_are_not_copied():
    x = torch.arange(4096, dtype=torch.int32)
    x[0] = 2**30
    with (daf := compressor()).scope():
        y, out = save(x, x[:2048])  # the second is narrow, and there
    assert daf.arena.held_bytes == x.nbytes
    y.backward()
    assert torch.equal(out[1], x[:2048])


# Ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [10.0, math.inf])
def test_bytes_go_with_the_graph(budget):
    with (daf := compressor(budget)).scope():
        y, out = save(noise(64, 64), torch.arange(3000), noise(64, 64) > 0)
    assert daf.held_bytes() > 0
    y.backward()
    del y
    assert nothing_held(daf)
    del out


@pytest.mark.parametrize("budget", [10.0, math.inf])
def test_memory_goes_without_backward(budget):
    x = noise(64, 64).requires_grad_()
    with (daf := compressor(budget)).scope():
        y = x.exp()  # saves its own result
    storage = weakref.ref(y.untyped_storage())
    gc.collect()
    gc.disable()
    try:
        del y
        assert nothing_held(daf)
        assert storage() is None
    finally:
        gc.enable()


def test_handles_are_read_in_any_order(freed_pages_are_noise):
    tensors = [noise(32 + i, 64, seed=i) for i in range(20)]
    daf = compressor()
    with daf.scope():
        handles = [daf._pack(x) for x in tensors]
    order = list(range(20)) * 2
    random.Random(0).shuffle(order)
    last = {i: place for place, i in enumerate(order)}
    for place, i in enumerate(order):
        assert torch.allclose(daf._unpack(handles[i]), tensors[i], atol=0.05)
        if last[i] == place:
            handles[i] = None
    assert nothing_held(daf)


def test_a_handle_that_dies_while_the_lock_is_held_is_freed_later():
    daf = compressor()
    with daf.scope():
        handle = daf._pack(noise(64, 64))
    with daf.lock:
        del handle  # as a garbage collection in the middle of a pack would
        assert daf.arena.held_bytes > 0
    assert nothing_held(daf)


# The budget --------------------------------------------------------------------------------------


def test_live_tensors_are_demoted_for_new_ones():
    daf = compressor(0.05, bits=(0, 1, 2, 4))
    with daf.scope():
        saved = [save(noise(128, 64, seed=i)) for i in range(12)]
    assert daf.arena.demotions > 0
    assert daf.ledger.peak.held <= 50_000
    for y, _ in saved:
        y.backward()


def test_too_much_at_the_fewest_bits_is_refused():
    daf = compressor(0.03)
    with daf.scope():
        saved = [save(noise(128, 64, seed=i)) for i in range(12)]
    error = daf.placement.take_refusal()
    assert isinstance(error, BudgetError)
    assert "budget_mb=0.03" in str(error)
    with pytest.raises(BudgetError):
        saved[-1][0].backward()
    assert daf.placement.take_refusal() is None


def test_the_least_budget_that_is_named_does():
    tensors = [noise(128, 64, seed=i) for i in range(12)] + [torch.arange(8000)]

    def error_at(budget_mb):
        daf = compressor(budget_mb, bits=(0, 1, 2, 4))
        with daf.scope():
            saved = [save(x) for x in tensors]
        del saved
        return daf.placement.take_refusal()

    error = error_at(0.01)
    assert error is not None
    assert error_at(error.least_mb) is None
    assert error_at(0.9 * error.least_mb) is not None


def test_spilling_loses_nothing():
    """What is restored is, bit for bit, what a budget with room for all would restore."""
    tensors = [noise(128, 64, seed=i) for i in range(12)] + [torch.arange(9000), noise(64, 64) > 0]
    tensors += [noise(128, 64, dtype=torch.bfloat16).t(), noise(100, 100)[:, ::2]]

    def restored(budget_mb):
        daf = compressor(budget_mb, on_overflow="spill")
        with daf.scope():
            saved = [save(x) for x in tensors]
        for y, _ in saved:
            y.backward()
        return [out[0] for _, out in saved], daf.ledger

    spilled, ledger = restored(0.03)
    assert ledger.peak.held <= 30_000
    assert ledger.counts["spilled"] >= 9
    roomy, ledger = restored(10)
    assert "spilled" not in ledger.counts
    assert all(map(torch.equal, spilled, roomy))
    exact = [not x.is_floating_point() for x in tensors]
    assert [torch.equal(*pair) for pair in zip(spilled, tensors, strict=True)] == exact


# What is not understood --------------------------------------------------------------------------


def test_subclasses_pass_through_and_are_counted():
    x = noise(64, 64).as_subclass(Tagged)
    with (daf := compressor()).scope():
        y, out = save(x)
    assert daf.ledger.peak.exact == x.nbytes
    assert daf.ledger.counts["not_understood"] == 1
    y.backward()
    assert type(out[0]) is Tagged
    assert torch.equal(out[0], x)
    del y
    assert daf.held_bytes() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: noise(64, 64).to_sparse(),
        lambda: noise(64, 64, dtype=torch.complex64).conj(),
        lambda: noise(64, 64, dtype=torch.complex64).conj().imag,
        lambda: torch.empty(64, 64, device="meta"),
    ],
    ids=["sparse", "conjugate", "negative", "meta"],
)
def test_odd_tensors_pass_through(make):
    x = make()
    with (daf := compressor()).scope():
        y, out = save(x)
    y.backward()
    assert out[0].layout == x.layout
    assert out[0].device == x.device
    if not x.is_meta:
        assert torch.equal(out[0].to_dense(), x.to_dense())
    del y
    assert daf.held_bytes() == 0


def test_inference_tensors_are_refused_as_torch_does():
    with torch.inference_mode():
        x = noise(64, 64)
    with compressor().scope(), pytest.raises(RuntimeError, match="Inference tensors"):
        noise(64, 64).requires_grad_() * x


def test_scope_leaves_nothing_on_the_stack():
    daf = compressor()
    with pytest.raises(KeyboardInterrupt), daf.scope():
        assert daf.active
        raise KeyboardInterrupt
    assert not daf.active
    assert hooks_on_stack() is None


def test_what_is_excluded_is_exact_though_others_saved_it_first():
    """Elements that another module's site has stored in few bits do not serve for it."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"low": nn.Linear(64, 64), "exact": nn.Linear(64, 64)})
    daf = Compressor(model, DAFConfig(budget_mb=1.0, bits=(1,), exclude=("exact",)))
    daf.tracker.install()
    x = torch.randn(64, 64)
    with daf.scope():
        low, exact = model["low"](x), model["exact"](x)
    assert not torch.equal(low.grad_fn._saved_mat1, x)
    assert torch.equal(exact.grad_fn._saved_mat1, x)
