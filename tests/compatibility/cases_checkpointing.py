"""Gradient checkpointing."""

from __future__ import annotations

from functools import partial

import torch
from cases_trainer import trainer
from harness import Loop, Training, case
from tiny import batch, build, checkpointing
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

AREA = "Gradient checkpointing"
NEWER = ("transformers>=5",)


def loop(model, name, scope=None) -> Loop:
    inputs = batch(name)

    def step() -> None:
        if scope is None:
            loss = model(**inputs).loss
        else:
            with scope():
                loss = model(**inputs).loss
        loss.backward()

    return Loop(model, step)


def whole(name, reentrant) -> Loop:
    model = build(name)
    checkpointing(model, reentrant)
    return loop(model, name)


def layers_of(model):
    """The list of layers that holds most of a model."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def run_checkpointed(forward, options, *args, **kwargs):
    """What reentrant checkpoints take as well: tensors that are differentiated by position."""
    return checkpoint(partial(forward, **kwargs), *args, **options)


def by_hand(name, every=1, **options) -> Loop:
    """Every so many layers' forward in ``torch.utils.checkpoint``."""
    model = build(name)
    model.config.use_cache = False
    model.enable_input_require_grads()
    for layer in layers_of(model)[::every]:
        layer.forward = partial(run_checkpointed, layer.forward, options)
    return loop(model, name)


MOST = 0.8
"""Share of the budget where the layers' inputs, kept exactly, are most of what is saved."""

for _reentrant, _kind in ((True, "reentrant"), (False, "not reentrant")):
    for _name in ("roberta", "gpt2", "llama", "t5"):
        case(AREA, f"{_kind}, {_name}", share=MOST)(partial(whole, _name, _reentrant))
    case(AREA, f"{_kind}, checkpoint_inputs=8", options={"checkpoint_inputs": 8})(
        partial(whole, "roberta", _reentrant)
    )
    case(AREA, f"{_kind}, every second layer by hand")(
        partial(by_hand, "roberta", 2, use_reentrant=_reentrant)
    )


def model_in_one(reentrant) -> Loop:
    """The whole model, its own forward and loss, as one region."""
    model, inputs = build("roberta"), batch("roberta")
    # Only what is differentiated makes a reentrant checkpoint run again.
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()

    def step() -> None:
        def run(embeddings):
            return model(inputs_embeds=embeddings, **inputs).loss

        checkpoint(run, embeddings, use_reentrant=reentrant).backward()

    return Loop(model, step)


case(AREA, "reentrant, the model as one region")(partial(model_in_one, True))
case(AREA, "not reentrant, the model as one region")(partial(model_in_one, False))


@case(AREA, "activation_checkpointing of every second layer", needs=NEWER)
def every_second() -> Loop:
    model = build("llama")
    model.enable_input_require_grads()
    model.base_model.model.activation_checkpointing_enable(every_n_layers=2)
    return loop(model, "llama")


def over_layers(hooks) -> Loop:
    """Every second layer's forward inside of others' hooks, which themselves are inside ours."""
    model = build("roberta")
    model.enable_input_require_grads()
    for layer in layers_of(model)[::2]:
        layer.forward = partial(run_inside, layer.forward, hooks)
    return loop(model, "roberta")


def run_inside(forward, hooks, *args, **kwargs):
    with hooks():
        return forward(*args, **kwargs)


@case(AREA, "save_on_cpu around the model")
def outer_hooks() -> Loop:
    return loop(build("roberta"), "roberta", save_on_cpu)


@case(AREA, "save_on_cpu around layers")
def inner_hooks() -> Loop:
    return over_layers(save_on_cpu)


@case(AREA, "save_on_cpu around checkpointed layers")
def hooks_around_checkpoints() -> Loop:
    model = build("roberta")
    model.enable_input_require_grads()
    for layer in layers_of(model)[::2]:
        checkpointed = partial(run_checkpointed, layer.forward, {"use_reentrant": False})
        layer.forward = partial(run_inside, checkpointed, save_on_cpu)
    return loop(model, "roberta")


@case(AREA, "save_on_cpu in checkpointed layers")
def hooks_in_checkpoints() -> Loop:
    model = build("roberta")
    model.enable_input_require_grads()
    for layer in layers_of(model)[::2]:
        offloaded = partial(run_inside, layer.forward, save_on_cpu)
        layer.forward = partial(run_checkpointed, offloaded, {"use_reentrant": False})
    return loop(model, "roberta")


def keep_products(context, operation, *args, **kwargs):
    """A policy: products of matrices are saved, the rest is recomputed."""
    saved = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@case(AREA, "selective")
def selective() -> Loop:
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    return by_hand("gpt2", use_reentrant=False, context_fn=contexts)


@case(AREA, "Trainer, activation_checkpointing=True", share=MOST, needs=NEWER)
def trainer_option() -> Training:
    return trainer("roberta", activation_checkpointing=True)


@case(AREA, "Trainer, activation_checkpointing=True, reentrant", share=MOST, needs=NEWER)
def trainer_reentrant() -> Training:
    return trainer(
        "roberta",
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": True},
    )


@case(AREA, "with bf16 autocast", share=MOST)
def with_autocast() -> Loop:
    model = build("gpt2")
    checkpointing(model, False)
    return loop(model, "gpt2", partial(torch.autocast, "cpu", torch.bfloat16))
