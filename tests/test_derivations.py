"""Derived tensors: what is traced, what is not, and what happens when a trace is wrong."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, build, compressed, gradients, nothing_held, relative_error
from torch import nn
from torch.nn.functional import dropout, layer_norm

from daf_hf.derivations import derivation
from daf_hf.expressions import LayerNorm, Product, Reader, Sampler, Source
from daf_hf.tensors import geometry, is_contiguous

ROWS, COLS = 24, 32


class Packed:
    """What the hooks of these tests keep: the tensor and, once it is saved, its derivation."""

    def __init__(self, tensor):
        self.tensor = tensor.detach().clone()
        self.contiguous = is_contiguous(tuple(tensor.shape), tensor.stride())
        self.extent = geometry(tuple(tensor.shape), tensor.stride())[0]
        self.flat = tensor.detach().as_strided((self.extent,), (1,)).clone()
        self.expression = derivation(tensor, self.extent, resolve)


def resolve(packed):
    if isinstance(packed, torch.Tensor):
        return Source(packed.view(-1), tuple(packed.shape))
    return Source(packed, tuple(packed.tensor.shape)) if packed.contiguous else None


def elements(source):
    return (source.flat if isinstance(source, Packed) else source).clone()


read = Reader(elements)


def last_saved(make, dtype=torch.float32):
    """The last tensor that ``make(x)`` has autograd save."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLS, generator=generator).to(dtype).requires_grad_()
    saved = []

    def pack(tensor):
        if isinstance(tensor, nn.Parameter):
            return tensor.detach()
        saved.append(Packed(tensor))
        return saved[-1]

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else packed.tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = make(x)
    assert output.requires_grad
    return saved[-1]


def norm(x, weight=True, bias=True):
    generator = torch.Generator().manual_seed(2)
    vectors = [
        nn.Parameter(torch.randn(x.shape[-1], generator=generator).to(x.dtype)) if wanted else None
        for wanted in (weight, bias)
    ]
    return layer_norm(x * 2, x.shape[-1:], *vectors)


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


def frozen(x):
    """A weight that is not trained, one a column."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(x.shape[-1], generator=generator).to(x.dtype)
    return nn.Parameter(weight, requires_grad=False)


def rms_norm(x):
    """As transformers writes it."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return frozen(x) * y.to(x.dtype)


def masked(x):
    return dropout(x, 0.3)


def read_by_mm(x):
    """Has a matrix product save ``x``."""
    weight = torch.ones(x.shape[-1], 3, dtype=x.dtype, requires_grad=True)
    with torch.no_grad():
        weight += 1
    return x @ weight


DERIVED = {
    "softmax x mask": lambda x: masked(x.softmax(-1)),
    "tanh x mask": lambda x: masked(x.tanh()),
    "softmax x softmax": lambda x: x.softmax(-1) * x.softmax(0),
    "layer norm": norm,
    "layer norm, no bias": lambda x: norm(x, bias=False),
    "layer norm, nothing learnt": lambda x: norm(x, weight=False, bias=False),
    "layer norm x mask": lambda x: masked(norm(x)),
    "layer norm of two dimensions": lambda x: layer_norm((x * 2).view(6, 4, COLS), (4, COLS)),
    "native dropout": lambda x: torch.native_dropout(norm(x), 0.3, True)[0],
    "views": lambda x: masked(x.softmax(-1)).view(-1, 8)[None].squeeze(0).view(-1, COLS).t().t(),
    "a view in between": lambda x: masked(x.softmax(-1).view(-1, 8)).view(-1, COLS),
    "twice masked": lambda x: masked(masked(norm(x))),
    "a number": lambda x: x.softmax(-1) * 2,
    "a number as an operand": lambda x: torch.ops.aten.mul.Scalar(x.softmax(-1), 2),
    "a number added": lambda x: 1.0 + x.softmax(-1),
    "a factor a row": lambda x: x.softmax(-1) * x.square().sum(-1, keepdim=True).rsqrt(),
    "a factor a column": lambda x: x.softmax(-1) * frozen(x),
    "gelu's output": lambda x: torch.nn.functional.gelu(x * 2),
    "silu's output": lambda x: torch.nn.functional.silu(x * 2),
    "gelu_new's terms": lambda x: gelu_new(x * 2),
    "a gate": lambda x: torch.nn.functional.silu(x * 2) * (x.sum(-1, keepdim=True) * x),
    "rms norm": lambda x: rms_norm(x * 2),
    "rms norm x mask": lambda x: masked(rms_norm(x * 2)),
    "in place": lambda x: dropout(x.softmax(-1), 0.3, inplace=True),
}
NOT_DERIVED = {
    "itself": lambda x: x.softmax(-1),
    "an unknown operation": lambda x: masked(x.softmax(-1) + 1),
    "an unknown factor": lambda x: masked(x + 1),
    "a leaf": lambda x: x,
    "a part": lambda x: masked(x.softmax(-1))[2:],
    "columns": lambda x: masked(x.softmax(-1))[:, 4:20],
    "laid out anew": lambda x: masked(x.softmax(-1)).t().contiguous(),
    "a transposed factor": lambda x: x.softmax(-1).t() * x.tanh().t().contiguous(),
    "another order": lambda x: x.softmax(-1).t() * torch.ones(COLS, ROWS),
    "a broadcast of what was computed": lambda x: x.softmax(-1) * x.tanh()[:1],
    "a factor a column that was computed": lambda x: x.softmax(-1) * x.sum(0).exp(),
    "a number added to what is unknown": lambda x: (x * 3 + x).sin() + 1,
    "a residual stream": lambda x: x.softmax(-1) + masked(x.tanh()),
    "the input of a function": lambda x: (x * 2).tanh().add(x).sigmoid(),
    "another output": lambda x: x.softmax(-1).unbind()[1].view(1, -1),
    "a weight that was computed": lambda x: layer_norm(x * 2, x.shape[-1:], x.sum(0).exp()),
}


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_follows_from_saved_tensors_is_traced(name, dtype):
    found = last_saved(lambda x: read_by_mm(DERIVED[name](x)), dtype)
    assert found.expression is not None
    assert found.expression.numel == found.extent
    assert found.expression.agrees(found.flat, read)
    value = found.expression.evaluate(read)
    rounding = 4 * torch.finfo(dtype).eps * float(found.flat.abs().max())
    torch.testing.assert_close(value.to(dtype), found.flat, rtol=0, atol=rounding)


@pytest.mark.parametrize("name", DERIVED)
def test_witnesses_tell_what_all_elements_do(name):
    """Row statistics, weights and elements are taken at places that belong together."""
    found = last_saved(lambda x: read_by_mm(DERIVED[name](x)))
    sampler = Sampler()
    at = sampler.of(found.extent)

    def some(source):
        return sampler.of(elements(source).numel()).of(elements(source))

    few = Reader(some)

    assert found.expression.agrees(found.flat, few, at)
    for position in at.positions.tolist():
        wrong = found.flat.clone()
        wrong[position] += 1e-2
        assert not found.expression.agrees(wrong, few, at)


@pytest.mark.parametrize("name", NOT_DERIVED)
def test_what_cannot_be_followed_is_not(name):
    assert last_saved(lambda x: read_by_mm(NOT_DERIVED[name](x))).expression is None


def test_a_tensor_that_was_added_is_no_number():
    found = last_saved(lambda x: read_by_mm(x.softmax(-1) + torch.arange(COLS)))
    assert not found.expression.agrees(found.flat, read)


def test_products_are_exact():
    found = last_saved(lambda x: read_by_mm(masked(x.softmax(-1))))
    assert isinstance(found.expression, Product)
    assert torch.equal(found.expression.evaluate(read), found.flat)


def test_a_cast_is_followed():
    """As autocast makes them: the product in fp32, what the matrix product reads in bf16."""
    found = last_saved(lambda x: read_by_mm(masked(norm(x)).to(torch.bfloat16)))
    assert torch.equal(found.expression.evaluate(read).to(torch.bfloat16), found.flat)


def test_a_graph_that_was_run_backward_is_not_followed():
    def make(x):
        y = norm(x)
        y.sum().backward()
        return read_by_mm(y)

    assert last_saved(make).expression is None


def test_overflow_is_no_doubt():
    found = last_saved(lambda x: read_by_mm(masked(norm(x * float("inf")))))
    assert isinstance(found.expression.left, LayerNorm)
    assert not found.flat.isfinite().all()
    assert found.expression.agrees(found.flat, read)


# In a model -------------------------------------------------------------------------------------


def derived_sites(compressor):
    return [site for site in compressor.tracker.sites.values() if site.derived]


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "vit", "llama", "t5"])
def test_gradients_are_those_of_what_is_stored(name):
    model, inputs = build(name), batch(name, examples=16, tokens=32)
    exact = gradients(model, inputs)
    daf, compressor = compressed(model, 50.0, bits=(8,))
    assert relative_error(gradients(model, inputs, daf), exact) < 0.02
    assert nothing_held(compressor)
    if name in ("bert", "roberta"):
        # A product a layer, two inputs of lora_A, and the head's masked tanh.
        assert len(derived_sites(compressor)) == 5
        assert not compressor.ledger.counts.get("doubted")


def test_what_is_derived_takes_no_bytes_of_the_budget():
    model, inputs = build("bert"), batch("bert", examples=16, tokens=32)
    daf, compressor = compressed(model, 50.0)
    gradients(model, inputs, daf)
    before = compressor.ledger.step_peak.held
    for site in derived_sites(compressor):
        site.derived, site.doubted = False, True
    daf.step()
    gradients(model, inputs, daf)  # calibrated again: there are sites that no plan knows
    assert before < compressor.ledger.step_peak.held
    assert not derived_sites(compressor)
    reported = [site for site in daf.report.sites if site.codec == "derived"]
    assert not reported


def test_what_is_excluded_is_stored_exactly_whatever_it_follows_from():
    model, inputs = build("bert"), batch("bert", examples=16, tokens=32)
    daf, _ = compressed(model, 50.0, exclude=["*lora_A*"])
    gradients(model, inputs, daf)
    stored = [site for site in daf.report.sites if "lora_A" in site.name]
    assert stored
    assert all(site.codec == "exact" for site in stored)


class Meddles(nn.Module):
    """Changes a LayerNorm's output behind autograd's back when told to."""

    def __init__(self):
        super().__init__()
        self.input, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.output = nn.Linear(64, 64)
        self.meddles = False

    def forward(self, x, labels=None):
        x = self.norm(self.input(x))
        if self.meddles:
            x.data.mul_(torch.linspace(0.5, 1.5, 64))
        return {"loss": self.output(x).square().mean()}


@pytest.mark.parametrize("step", [0, 2])
def test_a_change_behind_autograds_back_is_noticed(step):
    """In calibration by all elements, in a later step by the witnesses."""
    torch.manual_seed(0)
    model, inputs = Meddles(), {"x": torch.randn(64, 64)}
    daf, compressor = compressed(model, 50.0, bits=(8,))
    for now in range(step + 3):
        model.meddles = now >= step
        exact = gradients(model, inputs)
        assert relative_error(gradients(model, inputs, daf), exact) < 0.01
        assert bool(derived_sites(compressor)) == (now < step)
        daf.step()
    assert compressor.ledger.counts.get("doubted", 0) == (1 if step else 0)
    assert nothing_held(compressor)


def test_what_follows_from_few_bits_is_counted_in_their_importance():
    """The plan's prediction holds for what is read through a derived tensor, too."""
    model, inputs = build("bert", dropout=0.0), batch("bert", examples=16, tokens=32)
    daf, compressor = compressed(model, 50.0)
    gradients(model, inputs, daf)
    fed = [site for site in compressor.tracker.sites.values() if site.feeds]
    assert fed
    softmax = [site for site in fed if "SafeSoftmaxBackward0.result" in site.consumers]
    norms = [site for site in fed if "NativeLayerNormBackward0.input" in site.consumers]
    assert all("MmBackward0.self" in site.consumers for site in norms)
    assert norms
    assert not softmax  # without dropout the product is the softmax itself


# What breaks traces -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_masks_of_other_types(dtype, first):
    mask = torch.arange(ROWS * COLS).view(ROWS, COLS).remainder(3).bool().to(dtype)

    def product(x):
        y = x.softmax(-1)
        return read_by_mm(mask * y if first else y * mask)

    found = last_saved(product)
    assert torch.equal(found.expression.evaluate(read), found.flat)


def test_everything_dropped():
    found = last_saved(lambda x: read_by_mm(torch.native_dropout(norm(x), 1.0, True)[0]))
    assert found.expression is None


class TwoHeads(nn.Module):
    """One LayerNorm's output, read by two heads."""

    def __init__(self):
        super().__init__()
        self.input, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.norm(self.input(x))
        return self.first(y).square().mean(), self.second(y).square().mean()


def two_heads(budget_mb):
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(256, 64)
    daf, compressor = compressed(model, budget_mb, bits=(8,))
    with daf:
        sum(model(x)).backward()
    daf.step()
    assert derived_sites(compressor)
    return model, x, daf, compressor


def test_what_is_derived_keeps_the_addresses_of_its_sources_taken():
    """Else another tensor at the same address would be taken for the source."""
    model, x, daf, compressor = two_heads(0.12)
    norm_input = next(s for s in compressor.tracker.sites.values() if s.feeds and s.shape[1] > 1)
    assert norm_input.placed[1] is not None  # in pages: an exact copy keeps its address anyhow
    with daf:
        first, second = model(x)
    first.backward(inputs=[model.input.weight, model.norm.weight])
    assert {key[0] for key in compressor._physicals} <= compressor.ledger._holdings.keys()
    second.backward(inputs=[model.second.weight])
    del first, second
    assert nothing_held(compressor)


def test_a_weight_that_changes_before_backward_is_noticed():
    model, x, daf, _ = two_heads(50.0)
    with daf:
        loss = sum(model(x))
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(inputs=[model.first.weight])


class BackwardInForward(nn.Module):
    """Runs part of its graph backward in the forward pass, from the second call on."""

    def __init__(self):
        super().__init__()
        self.input, self.output = nn.Linear(64, 64), nn.Linear(64, 64)
        self.early = False

    def forward(self, x):
        h = self.input(x)
        t, g = h.tanh(), h.sigmoid()
        if self.early:
            (t.sum() + g.sum()).backward()
        return self.output(t * g).square().mean()


def test_a_graph_that_is_freed_in_the_forward_pass():
    model, x = BackwardInForward(), torch.randn(128, 64)
    daf, compressor = compressed(model, 50.0, bits=(8,))
    with daf:
        for _ in range(3):
            loss = model(x)
            loss.backward(inputs=[model.output.weight])
            model.early = True
            daf.step()
    del loss
    assert nothing_held(compressor)


def test_a_loop_in_one_block_meets_the_same_sites():
    """Those of the root module's own operations, too."""
    model, x = BackwardInForward(), torch.randn(128, 64)
    daf, compressor = compressed(model, 50.0, bits=(8,))
    counts = []
    with daf:
        for _ in range(4):
            model(x).backward()
            counts.append(len(compressor.tracker.sites))
            daf.step()
    assert len(set(counts)) == 1
    assert derived_sites(compressor)
    assert not compressor.ledger.counts


# What looks like a derivation and is none --------------------------------------------------------


class Between(nn.Module):
    """Something between two layers, of which the second saves its input."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.first(x))).square().mean()


def steps(between, later=None, count=4):
    """Errors of steps under compression, where ``later`` takes the place after the first."""
    torch.manual_seed(0)
    model, x = Between(between), torch.randn(32, 48, 64)
    daf, compressor = compressed(model, 1e3)
    errors = []
    for step in range(count):
        model.between = later if later is not None and step else between
        exact = gradients_of(model, model(x))
        with daf:
            loss = model(x)
        errors.append(relative_error(gradients_of(model, loss), exact))
        del loss
        daf.step()
    assert nothing_held(compressor)
    return errors


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_tensor_that_is_zero_in_the_pilot_is_no_number():
    padding = torch.zeros(32, 48, 1)
    padding[::3, -8:] = -100.0
    assert max(steps(lambda h: torch.tanh(h) + padding)) < 1e-2  # 8 bits, in the step of the doubt


def test_rows_that_are_cleared_behind_autograds_back():
    def cleared(h):
        h = layer_norm(h, (64,))
        with torch.no_grad():
            h[::3, -8:] = 0
        return h

    assert max(steps(cleared)) < 1e-2


def test_a_power_that_becomes_a_tensor():
    exponent = 1 + torch.rand(64)
    assert max(steps(lambda h: h.sigmoid() ** 2.0, lambda h: h.sigmoid() ** exponent)) < 1e-2


@pytest.mark.parametrize("length", [8, 300])
@pytest.mark.parametrize(
    "link",
    [
        lambda p, h: p * h + 0.5,
        lambda p, h: p * torch.sigmoid(p) + 0.5,
        lambda p, h: torch.nn.functional.silu(p) + 1,
    ],
)
def test_long_chains_are_cut(link, length):
    """Else every link would be evaluated from the first on, and some of them twice a link."""

    def chain(h):
        h = p = torch.tanh(h[:4])
        for _ in range(length):
            p = link(p, h)
        return p

    assert max(steps(chain, count=2)) < 1e-2


def python_function(name):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    def backward(ctx, gradient):
        return gradient * 2 + 0 * ctx.saved_tensors[0]

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


@pytest.mark.parametrize("name", ["Mul", "Add", "Pow", "Gelu", "Silu", "NativeLayerNorm"])
def test_functions_of_the_users_own_by_the_same_names(name):
    own = python_function(name)
    assert max(steps(lambda h: own.apply(h.sigmoid()))) < 1e-2
    assert max(steps(lambda h: h.sigmoid() * 2, lambda h: own.apply(h.sigmoid()))) < 1e-2


@pytest.mark.parametrize(
    "odd",
    [
        lambda h: torch.ops.aten.add.Scalar(h.sigmoid(), 1),
        lambda h: (h.sigmoid() * 1j).abs(),
        lambda h: h.sigmoid() * torch.tensor(2, dtype=torch.float64),
    ],
)
def test_odd_operations(odd):
    assert max(steps(lambda h: h.sigmoid() * 2, odd)) < 1e-2
    assert max(steps(odd)) < 1e-2


def test_sites_are_the_same_in_calibration_and_in_steps_under_autocast():
    torch.manual_seed(0)
    model, x = Between(lambda h: h.float().tanh()), torch.randn(32, 48, 64)
    daf, compressor = compressed(model, 1e3)
    for _ in range(3):
        with daf, torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        loss.backward()
        daf.step()
    sites = [site for site in compressor.tracker.sites.values() if site.nbytes]
    assert all(site.probed is not None for site in sites)


def test_nothing_is_derived_where_that_is_off():
    model, inputs = build("roberta"), batch("roberta")
    held, codecs = {}, {}
    for derive in (True, False):
        model = build("roberta")
        daf, _ = compressed(model, 100.0, derive=derive)
        gradients(model, inputs, daf)
        report = daf.report
        held[derive] = report.held_bytes_peak
        codecs[derive] = {site.codec for site in report.sites}
    assert "derived" in codecs[True] and "derived" not in codecs[False]
    assert held[True] < 0.9 * held[False]


def test_what_was_doubted_is_measured_like_any_other():
    """Evaluated from others in calibration, it would have no error of its own, and get no bits."""
    model, inputs = build("llama", dropout=0.0), batch("llama", 8, 32)
    exact = gradients(model, inputs)
    daf, compressor = compressed(model, 0.8)
    gradients(model, inputs, daf)
    daf.step()
    derived = [s for s in compressor.tracker.sites.values() if s.derived and s.nbytes >= 1 << 15]
    assert derived
    for site in derived:
        site.derived, site.doubted = False, True
        compressor.unplanned.add(site)
    error = relative_error(gradients(model, inputs, daf), exact)
    measured = [site for site in derived if site.distortions]
    assert measured and all(site.importance for site in measured)
    assert error < 1.5 * daf.report.predicted_gradient_error
