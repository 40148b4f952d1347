"""Loops and trainers of others that take a model as it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from cases_trainer import Examples
from cases_trl import AREA
from harness import Loop, Run, Subject, Training, case, gradients_of
from tiny import batch, build, weights
from torch import nn
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from daf_hf import compress_activations

OPTIONS = {
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-2,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}


@case(AREA, "Seq2SeqTrainer")
def seq2seq() -> Training:
    model = build("t5")

    def make(folder, steps, callbacks):
        args = Seq2SeqTrainingArguments(str(folder), max_steps=steps, **OPTIONS)
        return Seq2SeqTrainer(model, args, train_dataset=Examples("t5"), callbacks=callbacks)

    return Training(model, make)


@case(AREA, "plain PyTorch, a loss outside the model")
def plain() -> Loop:
    model, inputs = build("roberta"), batch("roberta")
    labels = inputs.pop("labels")
    return Loop(
        model, lambda: nn.functional.cross_entropy(model(**inputs).logits, labels).backward()
    )


@case(AREA, "R-Drop: two passes, and how far apart they are")
def r_drop() -> Loop:
    model, inputs = build("roberta"), batch("roberta")

    def step():
        first, second = model(**inputs), model(**inputs)
        logs = [each.logits.log_softmax(-1) for each in (first, second)]
        apart = nn.functional.kl_div(*logs, log_target=True, reduction="batchmean")
        (first.loss + second.loss + apart).backward()

    return Loop(model, step)


@case(AREA, "several backward passes, `retain_graph=True`, and `torch.autograd.grad`")
def retained() -> Loop:
    model, inputs = build("roberta"), batch("roberta")
    trained = [p for p in model.parameters() if p.requires_grad]

    def step():
        outputs = model(**inputs)
        outputs.loss.backward(retain_graph=True)
        outputs.logits.square().mean().backward(retain_graph=True)
        for parameter, more in zip(
            trained, torch.autograd.grad(2 * outputs.loss, trained), strict=True
        ):
            parameter.grad += more

    return Loop(model, step)


@case(AREA, "a gradient penalty, `create_graph=True`")
def penalty() -> Loop:
    model, inputs = build("llama"), batch("llama")
    model.set_attn_implementation("eager")  # the fused one has no second derivative
    ids = inputs.pop("input_ids")

    def step():
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        loss = model(inputs_embeds=embedded, **inputs).loss
        (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
        (loss + gradient.square().sum()).backward()

    return Loop(model, step)


@case(AREA, "`functional_call`, forward and backward in another thread")
def elsewhere() -> Loop:
    model, inputs = build("roberta"), batch("roberta")
    parameters = dict(model.named_parameters())

    def run():
        torch.manual_seed(0)
        torch.func.functional_call(model, parameters, (), inputs).loss.backward()

    def step():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run).result()

    return Loop(model, step)


@case(AREA, "an accelerate loop, two passes a step")
def accelerated() -> Loop:
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test's
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build("gpt2")
    trained = [p for p in model.parameters() if p.requires_grad]
    data = DataLoader(Examples("gpt2"), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(trained, 1e-2), data)
    batches = [each for each, _ in zip(data, range(2), strict=False)]

    def step():
        for inputs in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**inputs).loss)

    return Loop(model, step, optimizer.step)


class Lightning(Subject):
    """Lightning's Trainer around a module whose steps are compressed."""

    def __init__(self, name: str) -> None:
        self.model = build(name)
        self._name = name

    def train(
        self,
        steps: int,
        folder: Path,
        options: dict[str, Any] | None = None,
        at_end: Any = lambda step, run: None,
    ) -> Run:
        import lightning

        run, model = Run(), self.model
        daf = None if options is None else compress_activations(model, **options)
        if daf is not None:
            run.compressor = daf._session.compressor

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = model

            def training_step(self, inputs, index):
                if daf is None:
                    return self.model(**inputs).loss
                with daf:
                    return self.model(**inputs).loss

            def on_before_optimizer_step(self, optimizer):
                if not self.global_step:
                    run.gradients = gradients_of(model)

            def on_train_batch_end(self, outputs, inputs, index):
                if daf is not None:
                    daf.step()
                at_end(self.global_step - 1, run)

            def configure_optimizers(self):
                return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)

        quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            default_root_dir=str(folder),
            **dict.fromkeys(quiet, False),
        )
        torch.manual_seed(0)
        trainer.fit(Module(), DataLoader(Examples(self._name, 128), batch_size=8))
        run.weights = weights(model)
        run.report = daf.report if daf is not None else None
        return run


@case(AREA, "Lightning", needs=("lightning",))
def lightning_trainer() -> Lightning:
    return Lightning("roberta")
