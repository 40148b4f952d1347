"""Tiny models from config, batches for them, and a look at what is held from outside."""

from __future__ import annotations

import contextlib
import weakref
from array import array

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from daf_hf.arena import PAGE_COST, TABLE_ENTRY_BYTES
from daf_hf.kernels import reference
from daf_hf.kernels.format import PAGE_BYTES, PageSpace
from daf_hf.loops import compress_activations
from daf_hf.matching import Matched
from daf_hf.repeats import Repeated
from daf_hf.rows import LiveRows

VOCABULARY = 120
INNER = {Repeated: "once", LiveRows: "kept", Matched: "rows"}
"""Of what restores elements from others', where these are."""
HIDDEN = 64


def lora(model, targets, dropout=0.1, **options):
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets, **options)
    return get_peft_model(model, config)


def bert(dropout=0.1):
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = BertForSequenceClassification(config)
    return lora(model, ["query", "value"], dropout, modules_to_save=["classifier"])


def roberta(dropout=0.1):
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=66,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = RobertaForSequenceClassification(config)
    return lora(model, ["query", "value"], dropout, modules_to_save=["classifier"])


def gpt2(dropout=0.1):
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return lora(GPT2LMHeadModel(config), ["c_attn"], dropout, fan_in_fan_out=True)


def llama(dropout=0.1):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=64,
        attention_dropout=dropout,
        pad_token_id=0,
    )
    return lora(LlamaForCausalLM(config), ["q_proj", "v_proj"], dropout)


def t5(dropout=0.1):
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=16,
        d_ff=2 * HIDDEN,
        num_layers=2,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return lora(T5ForConditionalGeneration(config), ["q", "v"], dropout)


def vit(dropout=0.1):
    config = ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    config.num_labels = 2
    return lora(ViTForImageClassification(config), r".*\.(q_proj|query|v_proj|value)", dropout)


class Block(nn.Module):
    """A residual block with in-place activations."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(x + y)


class ConvNet(nn.Module):
    """A small residual network."""

    def __init__(self, dropout=0.1, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 2)

    def forward(self, pixel_values, labels=None):
        x = self.pool(self.relu(self.norm(self.stem(pixel_values))))
        logits = self.head(self.dropout(self.blocks(x).mean((2, 3))))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


MODELS = {
    "bert": bert,
    "roberta": roberta,
    "gpt2": gpt2,
    "llama": llama,
    "t5": t5,
    "vit": vit,
    "conv": ConvNet,
}


def build(name, dropout=0.1, seed=0):
    """The model of that name, in training mode."""
    torch.manual_seed(seed)
    return MODELS[name](dropout).train()


def batch(name, examples=8, tokens=16, seed=0):
    """Inputs with labels for the model of that name."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    if name in ("vit", "conv"):
        pixels = torch.randn(examples, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels, "labels": integers(0, 2, examples)}
    ids = integers(3, VOCABULARY, examples, tokens)
    mask = torch.ones_like(ids)
    mask[0, tokens // 2 :] = 0
    if name in ("gpt2", "llama"):
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}
    if name == "t5":
        labels = integers(3, VOCABULARY, examples, tokens)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {"input_ids": ids, "attention_mask": mask, "labels": integers(0, 2, examples)}


def needs_compiler(**options):
    """Skip where torch.compile cannot work: without a compiler, or in an ASCII locale."""
    try:
        torch.compile(lambda x: x.sin() + 1, **options)(torch.ones(4, requires_grad=True))
    except Exception as error:
        pytest.skip(f"torch.compile does not work here: {type(error).__name__}")


def checkpointing(model, reentrant):
    """Switch gradient checkpointing on, under the name that transformers has for it."""
    model.enable_input_require_grads()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})


def restored(x, codec, bits, backend=reference):
    """``x`` after a round trip through a codec."""
    layout = codec.layout(x.numel(), x.shape[-1], bits)
    pages = layout.pages(bits)
    segment = torch.zeros(max(pages, 1) * PAGE_BYTES, dtype=torch.uint8)
    space = PageSpace(1 << pages.bit_length(), [segment], array("q", [segment.data_ptr()]))
    table = array("i", range(pages))
    assert backend.encode(x.flatten(), layout, bits, table, space)
    out = torch.empty(x.numel())
    backend.decode(out, layout, bits, table, space)
    return out.view(x.shape)


def loss_of(outputs):
    return outputs["loss"]


def gradients(model, inputs, scope=None, seed=7):
    """Gradients by name; the RNG is seeded, so dropout is the same each time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with scope if scope is not None else contextlib.nullcontext():
        loss = loss_of(model(**inputs))
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_error(measured, exact):
    """Relative error of gradients as one vector."""
    change = sum(float((measured[n] - exact[n]).square().sum()) for n in exact)
    return (change / sum(float(g.square().sum()) for g in exact.values())) ** 0.5


def weights(model):
    """A copy of all parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(a, b):
    """Whether two dictionaries of tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def compressed(model, budget_mb, **options):
    """A context manager that compresses, and its compressor."""
    daf = compress_activations(model, budget_mb=budget_mb, **options)
    return daf, daf._session.compressor


def hooks_on_stack():
    """What the thread's stack of saved-tensors hooks has on top."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class Watch:
    """Counts from outside, at every pack, what is held for backward.

    Attributes:
        peak: the most there was.
        footprint_peak: the most there was with whole segments in place of pages.
        packs: saved tensors seen.
        sites: save sites whose tensors were stored.
    """

    def __init__(self, compressor):
        self.compressor = compressor
        self.peak = self.packs = 0
        self.footprint_peak = 0
        self._physicals = weakref.WeakSet()
        self.sites = set()
        save = compressor._save

        def counting(tensor, frame):
            handle = save(tensor, frame)
            self.packs += 1
            physical = getattr(handle, "physical", None)
            if physical is not None:
                self.sites.add(physical.site)
                while physical is not None:
                    self._physicals.add(physical)
                    inner = INNER.get(type(physical))
                    physical = getattr(physical, inner) if inner else None
            self.peak = max(self.peak, self.held())
            self.footprint_peak = max(self.footprint_peak, self.footprint())
            return handle

        compressor._save = counting

    def held(self):
        """Pages with their table entries, exact copies and RNG states, of all that is alive."""
        return self.pages() * PAGE_COST + self.exact()

    def footprint(self):
        """The same with whole segments in place of pages."""
        segments = self.compressor.arena.space.segments
        entries = self.pages() * TABLE_ENTRY_BYTES
        return sum(s.nbytes for s in segments if s is not None) + entries + self.exact()

    def _places(self):
        """Where elements are: those on their way into pages are in two places."""
        for physical in self._physicals:
            place = getattr(physical, "place", None) or physical
            yield place
            if isinstance(place, Matched) and place is not physical:
                yield place.rows
        packer = self.compressor.placement.packer
        for job in list(packer._queue) if packer else ():
            yield from (job.pages, job.copy)

    def pages(self):
        return sum(len(p.stored.table) for p in self._places() if hasattr(p, "stored"))

    def exact(self):
        tensors = [p.elements for p in self._places() if hasattr(p, "elements")]
        tensors += [p.noise.state for p in self._places() if hasattr(p, "noise")]
        rows = [p.pick.rows for p in self._physicals if isinstance(p, LiveRows)]
        tensors += [mask for each in rows for mask in each.masks.values()]
        for each in self._places():
            tensors += each.statistics if isinstance(each, Matched) else ()
        tensors += [p.witnesses for p in self._physicals if p.witnesses is not None]
        copies = (tensor.untyped_storage() for tensor in tensors)
        return sum({storage.data_ptr(): storage.nbytes() for storage in copies}.values())


def nothing_held(compressor):
    """Whether the arena, the ledger and the bookkeeping are empty."""
    compressor.held_bytes()
    arena = compressor.arena
    arena.check()
    return (
        arena.held_bytes == 0
        and len(arena) == 0
        and not compressor._physicals
        and not compressor.ledger._holdings
        and compressor.ledger.plain == 0
    )


class Reads(torch.autograd.Function):
    """Saves tensors as they are, and hands those that backward gets to ``out``."""

    @staticmethod
    def forward(ctx, trained, out, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.out = out
        return trained.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.out.extend(ctx.saved_tensors)
        return (gradient, None, *(None for _ in ctx.saved_tensors))


def save(*tensors):
    """A graph that saved the tensors: (its output, the list that backward puts them into)."""
    out = []
    return Reads.apply(torch.zeros(1, requires_grad=True), out, *tensors), out


class Tagged(torch.Tensor):
    """A tensor subclass."""
