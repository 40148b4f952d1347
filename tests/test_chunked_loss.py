"""Losses over chunks of tokens: equal to the plain path, and never silently otherwise."""

import copy
import inspect
import logging
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import VOCABULARY, build, nothing_held, relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LabelSmoother

import daf_hf
from daf_hf import DAFConfig, chunked_loss, compress_activations
from daf_hf.lazy_logits import LazyLogits
from daf_hf.vocabulary import LEAST_VOCABULARY, LazyHead, chunk_losses

COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
MODELS = {
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "llama": {**COMMON, **HEADS},
    "qwen2": {**COMMON, **HEADS},
    "gemma2": {**COMMON, **HEADS, "head_dim": 8, "final_logit_softcapping": 0.5},
    "cohere": {**COMMON, **HEADS, "logit_scale": 0.25},
    "opt": {**COMMON, "ffn_dim": 64, "num_attention_heads": 2, "word_embed_proj_dim": 32},
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of five rows."""
    monkeypatch.setattr(chunked_loss, "CHUNK_ELEMENTS", 5 * VOCABULARY + 1)


@pytest.fixture
def whole(caplog):
    """Messages about logits that were computed after all."""
    caplog.set_level(logging.INFO, logger="daf_hf")
    return lambda: [r.getMessage() for r in caplog.records if "as a whole" in r.getMessage()]


def causal_lm(kind, bias=False, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**MODELS[kind], **options})
    model = AutoModelForCausalLM.from_config(config).eval()
    if bias:
        model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY))
    return model


def adapted(kind="llama"):
    """The model with LoRA on all layers but the head, B off zero."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=2,
        target_modules="all-linear",
        exclude_modules=["lm_head"],
        fan_in_fan_out=kind == "gpt2",
    )
    model = get_peft_model(causal_lm(kind), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def padded(seed=0, shape=(3, 9)):
    """Ids with padding on the right and prompts that have no labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, shape, generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model, choice, loss=None, **more):
    """The loss and all gradients of one step: (loss, {name: gradient})."""
    restore = chunk_losses(model, choice)
    model.zero_grad()
    inputs = {**padded(), **more}
    found = loss(model, inputs) if loss else model(**inputs).loss
    found.backward()
    restore()
    return found.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal_steps(model, loss=None, tolerance=1e-5, **more):
    plain, expected = step(model, False, loss, **more)
    chunked, found = step(model, True, loss, **more)
    torch.testing.assert_close(chunked, plain, rtol=1e-6, atol=1e-6)
    assert found.keys() == expected.keys() and found
    for name in found:
        scale = expected[name].abs().max().item() + 1e-30
        error = (found[name] - expected[name]).abs().max().item()
        assert error <= tolerance * scale + 1e-9, name


# --- equal to the plain path -----------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_of_a_whole_model(kind, tied, whole):
    assert_equal_steps(causal_lm(kind, tie_word_embeddings=tied))
    assert whole() == []


@pytest.mark.parametrize("kind", MODELS)
def test_a_frozen_head_under_adapters(kind, whole):
    assert_equal_steps(adapted(kind))
    assert whole() == []


def test_a_head_with_a_bias(whole):
    assert_equal_steps(causal_lm("llama", bias=True))
    model = causal_lm("llama", bias=True)
    model.lm_head.weight.requires_grad_(False)
    assert_equal_steps(model)
    assert whole() == []


def test_a_head_that_is_trained_alone():
    model = causal_lm("llama", tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    assert_equal_steps(model)


@pytest.mark.parametrize("items", [7, torch.tensor(11)])
def test_a_loss_over_the_items_of_a_whole_batch(items, whole):
    assert_equal_steps(causal_lm("llama"), num_items_in_batch=items)
    assert whole() == []


def test_no_label_at_all():
    nothing = torch.full((3, 9), -100)
    model = causal_lm("llama")
    assert step(model, True, labels=nothing, num_items_in_batch=1)[0] == 0
    assert step(model, True, labels=nothing)[0].isnan()
    assert step(model, False, labels=nothing)[0].isnan()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("items", [None, 5])
def test_the_trainers_label_smoothing(frozen, items, whole):
    # Older versions of transformers do not hand it on.
    handed = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
    options = {"num_items_in_batch": items} if handed else {}
    model = causal_lm("gemma2")
    if frozen:
        model.lm_head.weight.requires_grad_(False)

    def loss(model, inputs):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        smoother = LabelSmoother(0.1)
        return smoother(model(**inputs), labels, shift_labels=True, **options)

    assert_equal_steps(model, loss)
    assert whole() == []


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_losss_own_label_smoothing(reduction, whole):
    def loss(model, inputs):
        logits = model(inputs["input_ids"]).logits
        entropy = nn.CrossEntropyLoss(ignore_index=7, label_smoothing=0.2, reduction=reduction)
        return entropy(logits.view(-1, VOCABULARY), inputs["input_ids"].view(-1))

    assert_equal_steps(causal_lm("llama"), loss)
    assert whole() == []


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_under_autocast(kind, whole):
    def loss(model, inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return model(**inputs).loss

    assert_equal_steps(causal_lm(kind), loss, tolerance=0.02)
    frozen = causal_lm(kind)
    frozen.get_output_embeddings().weight.requires_grad_(False)
    assert_equal_steps(frozen, loss, tolerance=0.02)
    assert whole() == []


def test_a_model_in_bfloat16():
    assert_equal_steps(causal_lm("llama").bfloat16(), tolerance=0.02)


def test_backward_twice_through_a_retained_graph():
    model = causal_lm("llama")
    restore = chunk_losses(model, True)
    loss = model(**padded()).loss
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    restore()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- logits that somebody asks for -----------------------------------------------------------


class OwnCrossEntropy(torch.autograd.Function):
    """A loss that takes logits as they are, past `__torch_function__`."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.log_softmax(-1)[..., 1].sum()

    @staticmethod
    def backward(ctx, incoming):
        (logits,) = ctx.saved_tensors
        of_logits = -logits.softmax(-1)
        of_logits[..., 1] += 1
        return incoming * of_logits


def first_class(logits):
    return logits.log_softmax(-1)[..., 1].sum()


def looked_at_in_inference_mode(logits):
    with torch.inference_mode():
        logits.argmax(-1)
    return first_class(logits)


def divided_by_a_constant_that_changes(logits):
    temperature = torch.tensor(2.0)
    scaled = logits / temperature
    if isinstance(logits, LazyLogits):  # elsewhere autograd notices it
        temperature.fill_(0.5)
    return scaled.log_softmax(-1).gather(-1, ONES).sum()


OTHERS = {
    "a function of a user's own": OwnCrossEntropy.apply,
    "the same after operations": lambda logits: OwnCrossEntropy.apply(logits[:, :-1].float() * 2),
    "a reentrant checkpoint": lambda logits: checkpoint(first_class, logits, use_reentrant=True),
    "a checkpoint": lambda logits: checkpoint(first_class, logits, use_reentrant=False),
    "in inference mode before": looked_at_in_inference_mode,
    "a constant that changes later": divided_by_a_constant_that_changes,
    "softmax": lambda logits: logits.float().softmax(-1).square().sum(),
    "one row": lambda logits: logits[:, -1].logsumexp(-1).sum(),
    "one column": lambda logits: logits[..., 5].sum(),
    "part of the vocabulary": lambda logits: logits[..., :50].square().sum(),
    "another dimension": lambda logits: logits.sum(1).square().sum(),
    "transposed": lambda logits: logits.transpose(1, 2).log_softmax(1)[:, 3].sum(),
    "a view across rows": lambda logits: logits.view(-1, 10).log_softmax(-1)[:, 1].sum(),
    "list index": lambda logits: logits[:, [0, 2]].log_softmax(-1)[..., 1].sum(),
    "of its own values": lambda logits: (logits * logits).sum(),
    "in place": lambda logits: logits.mul_(2).square().sum(),
    "an item in place": lambda logits: (logits.__setitem__((0, 0), 0.0), logits.square().sum())[1],
    "reversed": lambda logits: (1 - logits).log_softmax(-1).gather(-1, ONES).sum(),
    "a sum": lambda logits: logits.tanh().sum(-1).square().sum(),
    "a sum that keeps": lambda logits: logits.tanh().sum(dim=-1, keepdim=True).square().sum(),
    "class weights": lambda logits: nn.functional.cross_entropy(
        logits[0], torch.arange(9), weight=torch.arange(VOCABULARY) / 7
    ),
    "per token": lambda logits: (
        nn.functional.cross_entropy(logits.view(-1, VOCABULARY), torch.arange(27), reduction="none")
        .square()
        .sum()
    ),
    "a constant tensor": lambda logits: (logits * torch.tensor(0.5)).log_softmax(2)[0, 0, 0],
    "first and last": lambda logits: logits[0, 2:].log_softmax(-1).gather(-1, ONES[0, 2:]).sum(),
}
ONES = torch.ones((3, 9, 2), dtype=torch.int64)


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_is_made_of_logits_has_the_plain_gradient(name):
    def loss(model, inputs):
        return OTHERS[name](model(inputs["input_ids"]).logits)

    assert_equal_steps(causal_lm("qwen2"), loss)


@pytest.mark.parametrize("name", ["a function of a user's own", "a checkpoint"])
def test_logits_that_are_saved_as_they_are_under_compression(name):
    """They are computed while they are saved, which saves tensors itself."""
    model = causal_lm("llama")
    expected, measured = (compressed_step(model, OTHERS[name], choice) for choice in (False, True))
    assert relative_error(measured, expected) < 1e-5


def compressed_step(model, loss, choice):
    model.zero_grad()
    with compress_activations(model, chunked_loss=choice) as daf:
        loss(model(padded()["input_ids"]).logits).backward()
    assert nothing_held(daf._session.compressor)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_targets_of_another_number_raise_as_ever(lazy):
    _, logits = lazy
    with pytest.raises(ValueError, match="batch_size"):
        nn.functional.cross_entropy(logits.view(-1, VOCABULARY), torch.arange(20))


def test_a_scale_that_is_trained():
    scale = nn.Parameter(torch.tensor(0.5))

    def loss(model, inputs):
        logits = model(inputs["input_ids"]).logits * scale
        return nn.functional.cross_entropy(logits[0], torch.arange(9))

    model = causal_lm("llama")
    gradients = []
    for choice in (False, True):
        scale.grad = None
        step(model, choice, loss)
        gradients.append(scale.grad.item())
    assert gradients[1] == pytest.approx(gradients[0], rel=1e-5)


def test_both_the_loss_and_a_penalty_on_the_logits():
    def loss(model, inputs):
        outputs = model(**inputs)
        return outputs.loss + outputs.logits.logsumexp(-1).square().mean()

    assert_equal_steps(causal_lm("llama"), loss)


def test_logits_without_gradients_stay_without():
    def loss(model, inputs):
        outputs = model(**inputs)
        with torch.no_grad():
            scaled = outputs.logits.float() * 2
            chosen = outputs.logits.argmax(-1)
        assert not scaled.requires_grad
        assert not outputs.logits.detach().requires_grad
        return outputs.loss + (scaled * outputs.logits).mean() + chosen.float().mean()

    assert_equal_steps(causal_lm("llama"), loss)


@pytest.fixture
def lazy():
    model = causal_lm("llama")
    restore = chunk_losses(model, True)
    yield model, model(padded()["input_ids"]).logits
    restore()


def test_facts_need_no_logits(lazy, whole):
    _, logits = lazy
    assert isinstance(logits, LazyLogits)
    assert (logits.shape, logits.ndim, logits.dtype) == ((3, 9, VOCABULARY), 3, torch.float32)
    assert logits.size(-1) == VOCABULARY and len(logits) == 3 and logits.requires_grad
    assert logits.is_floating_point() and logits.device.type == "cpu"
    assert whole() == []
    assert "grad_fn" in repr(logits)
    assert whole() != []


def test_what_could_be_wrong_raises(lazy):
    model, logits = lazy
    with pytest.raises(RuntimeError, match=r"register_hook.*chunked_loss=False"):
        logits.register_hook(print)
    half = logits / 2
    with pytest.raises(RuntimeError, match=r"mul_\(\) changes logits .*chunked_loss=False"):
        logits.mul_(3)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    for late in (lambda: logits.softmax(-1), lambda: logits * 2, lambda: half.sum(-1)):
        with pytest.raises(RuntimeError, match=r"changed in place.*chunked_loss=False"):
            late()


def ones(logits):
    return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), padded()["input_ids"].view(-1))


CHANGES = {
    "through a view": lambda t: t.view(-1, VOCABULARY)[:, :5].fill_(0),
    "of a view": lambda t: t.view(-1, VOCABULARY).mul_(3),
    "of an example": lambda t: t[0].mul_(3),
    "of single tokens": lambda t: t[:, -1].fill_(0),
    "of what a cast to the same gives": lambda t: t.float().mul_(3),
    "by index, of a view": lambda t: t.view(-1, VOCABULARY).__setitem__((slice(None), 5), 0.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_of_what_shares_memory_is_never_lost(change, lazy):
    """It reaches the loss, as it does plainly, or raises."""
    model, logits = lazy
    with torch.no_grad():
        plain = model(padded()["input_ids"]).logits
        CHANGES[change](plain)
    try:
        CHANGES[change](logits)
        found = ones(logits)
    except RuntimeError as error:
        assert "chunked_loss=False" in str(error)
    else:
        torch.testing.assert_close(found, ones(plain))


def test_a_change_of_a_part_that_others_were_made_of_before(lazy):
    _, logits = lazy
    shifted = logits[:, :-1]
    with pytest.raises(RuntimeError, match=r"chunked_loss=False"):
        shifted.data.mul_(3)
    logits[..., 10:].mul_(0)
    with pytest.raises(RuntimeError, match=r"changed in place.*chunked_loss=False"):
        shifted.log_softmax(-1)


def test_logits_may_be_copied_into_others(lazy):
    _, logits = lazy
    ones(logits)
    expected = logits.detach() * 1
    for copied in (torch.zeros(3, 9, VOCABULARY), torch.zeros(3, 9, VOCABULARY)):
        with torch.no_grad():
            copied[:] = logits
            copied.copy_(logits)
            copied += logits
        torch.testing.assert_close(copied, 2 * expected)


@pytest.mark.parametrize("hook", ["retain_grad", "register_hook"])
def test_hooks_on_logits_that_were_reduced_before_raise(hook, lazy):
    _, logits = lazy
    ones(logits)
    logits.argmax(-1)
    with pytest.raises(RuntimeError, match=hook):
        getattr(logits, hook)(*([print] if hook == "register_hook" else []))


def test_the_weight_is_that_of_the_call():
    model = causal_lm("llama", tie_word_embeddings=False)
    ids = padded()["input_ids"]
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    restore = chunk_losses(model, True)
    logits = torch.func.functional_call(model, weights, (ids,)).logits
    ones(logits).backward()
    restore()
    found = weights["lm_head.weight"].grad.clone()
    ones(torch.func.functional_call(model, weights, (ids,)).logits).backward()
    torch.testing.assert_close(2 * found, weights["lm_head.weight"].grad)


def test_gradients_of_gradients_raise():
    model = causal_lm("llama")
    chunk_losses(model, True)
    loss = model(**padded()).loss
    with pytest.raises(RuntimeError, match=r"create_graph=True.*chunked_loss=False"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_float64_stays_float64():
    assert_equal_steps(causal_lm("llama").double(), own_loss, tolerance=1e-13)


def own_loss(model, inputs):
    return ones(model(inputs["input_ids"]).logits)


def test_a_bool_is_no_index_of_rows(lazy):
    _, logits = lazy
    found = logits[True, 0, 0]
    assert found.shape == (1, VOCABULARY)
    torch.testing.assert_close(found, logits.whole()[True, 0, 0])


def test_a_heads_method_that_somebody_kept_works_afterwards():
    model = causal_lm("llama")
    restore = chunk_losses(model, True)
    kept, hidden = model.lm_head.forward, torch.randn(2, 32, requires_grad=True)
    restore()
    assert type(kept(hidden)) is torch.Tensor
    with torch.no_grad():
        assert torch.equal(kept(hidden), model.lm_head(hidden))


def test_models_within_others_and_models_without_a_head(caplog):
    sizes = {**COMMON, "num_attention_heads": 2, "intermediate_size": 64}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        BertConfig(**sizes), BertConfig(**sizes)
    )
    model = EncoderDecoderModel(config)
    chunk_losses(model, True)
    assert not any(isinstance(module, LazyHead) for module in model.modules())

    class Own(nn.Module):
        config, base_model_prefix = None, "own"

    chunk_losses(Own(), True)()


# --- where it applies ------------------------------------------------------------------------


def test_a_model_with_an_encoder_is_left_alone(caplog):
    model = build("t5")
    chunk_losses(model, True)
    assert "chunked_loss leaves" in caplog.text and "encoder and a decoder" in caplog.text
    assert not any(isinstance(module, LazyHead) for module in model.modules())


def test_an_adapted_head_is_left_alone(caplog):
    for options in ({"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}):
        model = causal_lm("llama", tie_word_embeddings=False)
        targets = {"target_modules": ["q_proj"], **options}
        model = get_peft_model(model, LoraConfig(r=2, **targets))
        caplog.clear()
        chunk_losses(model, True)
        assert "not a plain torch.nn.Linear" in caplog.text
        assert not any(isinstance(module, LazyHead) for module in model.modules())


@pytest.mark.parametrize("choice", ["auto", False])
def test_small_vocabularies_are_left_alone_unless_asked_for(choice):
    model = causal_lm("llama")
    chunk_losses(model, choice)
    assert type(model.lm_head) is nn.Linear
    larger = causal_lm("llama", vocab_size=LEAST_VOCABULARY)
    restore = chunk_losses(larger, choice)
    assert isinstance(larger.lm_head, LazyHead) == (choice == "auto")
    restore()
    assert type(larger.lm_head) is nn.Linear


def test_copies_and_what_is_pickled_have_a_plain_head(lazy):
    model, _ = lazy
    assert type(model.lm_head) is LazyHead
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied.lm_head) is nn.Linear
        assert torch.equal(copied.lm_head.weight, model.lm_head.weight)
        assert type(copied(padded()["input_ids"]).logits) is torch.Tensor


def test_classifiers_and_generation_are_not_concerned(caplog):
    bert = build("bert")
    chunk_losses(bert, True)()
    assert caplog.text == ""
    model = causal_lm("llama")
    ids = padded()["input_ids"][:1]
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    restore = chunk_losses(model, True)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)
    with torch.no_grad():
        assert type(model(ids).logits) is torch.Tensor
    restore()


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_option_is_checked(value):
    with pytest.raises(ValueError, match=r"chunked_loss=.*: use True, False or 'auto'"):
        DAFConfig(chunked_loss=value)


# --- with daf_hf around it -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_under_compression_as_alone(kind):
    """Without a budget the gradients are those of the chunked loss; no logits are saved."""
    model = adapted(kind)
    _, expected = step(model, True)
    model.zero_grad()
    with compress_activations(model, chunked_loss=True) as daf:
        model(**padded()).loss.backward()
    assert type(model.get_output_embeddings()) is nn.Linear
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, expected[name])
    assert all(VOCABULARY not in site.shape for site in daf.report.sites)


def test_a_budget_is_kept_and_predicts_the_gradient():
    """The loss's saved gradient is a site as any other: measured, encoded, within the budget."""
    model = adapted()
    inputs = padded(shape=(8, 32))
    with compress_activations(model, chunked_loss=True, bits=(2, 4, 8)) as daf:
        model(**inputs).loss.backward()
    plain = daf.report.held_bytes_peak
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    with compress_activations(model, chunked_loss=True, budget_mb=plain / 4e6) as daf:
        model(**inputs).loss.backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    error = ((found - expected).norm() / expected.norm()).item()
    assert daf.report.held_bytes_peak <= plain / 4
    assert 0 < error < 3 * daf.report.predicted_gradient_error < 1
    (site,) = [s for s in daf.report.sites if "SummedLoss" in s.consumer]
    assert site.shape[-1] == model.config.hidden_size and site.importance is not None


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_in_a_trainer_with_accumulation_and_padding(tmp_path, attached, smoothing):
    rows = []
    for seed in range(8):
        inputs = padded(seed, (2, 9))
        rows += [{name: value[i] for name, value in inputs.items()} for i in range(2)]
    losses = []
    for choice in (False, True):
        model = adapted()
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=3,
            logging_steps=1,
            label_smoothing_factor=smoothing,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        if attached:
            daf_hf.attach(trainer, chunked_loss=choice)
        else:
            trainer.add_callback(daf_hf.DAFCallback(chunked_loss=choice))
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
