"""sentence-transformers: several forward passes of one model for each loss, outside of it."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from cases_trl import AREA, EXAMPLES, TRAINING, tokenizer, words
from harness import Training, case
from tiny import HIDDEN, VOCABULARY, lora
from transformers import BertConfig, BertModel

NEEDS = ("sentence_transformers", "datasets")


def encoder() -> Any:
    """A sentence transformer of a tiny BERT with LoRA and a pooling layer."""
    from sentence_transformers import SentenceTransformer

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        model = SentenceTransformer(folder, device="cpu")
    model[0].auto_model = lora(model[0].auto_model, ["query", "value"])
    return model.train()


def training(loss: str, columns: dict[str, list[Any]], **loss_options: Any) -> Training:
    """A subject: its trainer with the loss of that name."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses

    model = encoder()

    def make(folder, steps, callbacks):
        return st.SentenceTransformerTrainer(
            model,
            st.SentenceTransformerTrainingArguments(str(folder), max_steps=steps, **TRAINING),
            train_dataset=Dataset.from_dict(columns),
            loss=getattr(losses, loss)(model, **loss_options),
            callbacks=callbacks,
        )

    return Training(model, make)


def pairs() -> dict[str, list[Any]]:
    """Anchors and what is like them, of unequal lengths."""
    return {
        "anchor": [words(i, 8 + i % 7) for i in range(EXAMPLES)],
        "positive": [words(i + 3, 12 - i % 5) for i in range(EXAMPLES)],
    }


@case(AREA, "sentence-transformers, MultipleNegativesRankingLoss", needs=NEEDS)
def ranking() -> Training:
    return training("MultipleNegativesRankingLoss", pairs())


@case(AREA, "sentence-transformers, CoSENTLoss", needs=NEEDS)
def cosent() -> Training:
    scores = [i / EXAMPLES for i in range(EXAMPLES)]
    return training("CoSENTLoss", {**pairs(), "label": scores})


@case(AREA, "sentence-transformers, gradient cache", needs=NEEDS)
def cached() -> Training:
    return training("CachedMultipleNegativesRankingLoss", pairs(), mini_batch_size=4)
