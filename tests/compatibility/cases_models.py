"""Architectures of transformers, tiny, from their configurations; recurrent networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from cases_vision import images
from harness import Loop, case
from tiny import HIDDEN, VOCABULARY
from torch import Tensor, nn

AREA = "Architectures"
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
DECODERS = {"head_dim": 16, **GROUPED}
WIDE = {"vocab_size": VOCABULARY, "d_model": HIDDEN, "pad_token_id": 0}


def tokens(examples: int = 4, length: int = 16) -> dict[str, Tensor]:
    """Random ids, the last example padded, and the ids as labels."""
    ids = torch.randint(3, VOCABULARY, (examples, length))
    mask = torch.ones_like(ids)
    ids[-1, length // 2 :] = 0
    mask[-1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def classes() -> dict[str, Tensor]:
    """The same with a class for each example, told by its first id."""
    inputs = tokens()
    return inputs | {"labels": inputs["input_ids"][:, 0] % 2}


def speech() -> dict[str, Tensor]:
    """A spectrogram of 80 bands for each text."""
    return {"input_features": torch.randn(8, 80, 32), "labels": tokens(8)["labels"]}


def sound() -> dict[str, Tensor]:
    """Waves, and the class of each."""
    return {"input_values": torch.randn(8, 800), "labels": torch.arange(8) % 2}


def pairs() -> dict[str, Any]:
    """An image for each text."""
    inputs = tokens(8)
    del inputs["labels"]
    return inputs | {"pixel_values": images(8)["pixel_values"], "return_loss": True}


def _train(
    kind: str, head: str, sizes: dict[str, Any], inputs: Callable[[], dict[str, Any]]
) -> Loop:
    """Full training of a model with random weights."""
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = getattr(transformers, head)._from_config(config).train()
    batch = inputs()
    return Loop(model, lambda: model(**batch).loss.backward())


def _register(
    name: str,
    kind: str,
    head: str,
    sizes: dict[str, Any],
    inputs: Callable[[], dict[str, Any]],
    **options: Any,
) -> None:
    case(AREA, name, **options)(partial(_train, kind, head, sizes, inputs))


for name, kind, head, sizes in (
    ("BLOOM (ALiBi)", "bloom", "BloomForCausalLM", {
        **WIDE, "hidden_size": HIDDEN, "n_layer": 2, "n_head": 4,
    }),
    ("Falcon", "falcon", "FalconForCausalLM", SIZES),
    ("Gemma 3", "gemma3_text", "Gemma3ForCausalLM", DECODERS),
    ("GPT-NeoX", "gpt_neox", "GPTNeoXForCausalLM", SIZES),
    ("Mistral, sliding window", "mistral", "MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    ("OPT", "opt", "OPTForCausalLM", {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": HIDDEN}),
    ("Phi-3", "phi3", "Phi3ForCausalLM", GROUPED),
    ("Qwen 3", "qwen3", "Qwen3ForCausalLM", DECODERS),
    ("Mixtral (mixture of experts)", "mixtral", "MixtralForCausalLM", {
        **GROUPED, "num_local_experts": 4,
    }),
    ("Qwen 2 MoE", "qwen2_moe", "Qwen2MoeForCausalLM", {
        **GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
    }),
    ("Mamba", "mamba", "MambaForCausalLM", {**SIZES, "state_size": 8, "conv_kernel": 4}),
):  # fmt: skip
    _register(name, kind, head, sizes, tokens)

for name, kind, head, sizes in (
    ("ALBERT (layers that share weights)", "albert", "AlbertForSequenceClassification", {
        **SIZES, "embedding_size": 32,
    }),
    ("DeBERTa v2", "deberta-v2", "DebertaV2ForSequenceClassification", {
        **SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
    }),
    ("DistilBERT", "distilbert", "DistilBertForSequenceClassification", {
        "vocab_size": VOCABULARY, "dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 128,
    }),
    ("ELECTRA", "electra", "ElectraForSequenceClassification", {**SIZES, "embedding_size": 32}),
    ("ModernBERT", "modernbert", "ModernBertForSequenceClassification", SIZES),
    ("XLNet", "xlnet", "XLNetForSequenceClassification", {
        **WIDE, "n_layer": 2, "n_head": 4, "d_inner": 128,
    }),
):  # fmt: skip
    _register(name, kind, head, sizes, classes)

ENCODER_DECODER = {
    **WIDE,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "decoder_start_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_register("BART", "bart", "BartForConditionalGeneration", ENCODER_DECODER, tokens)
_register(
    "Whisper",
    "whisper",
    "WhisperForConditionalGeneration",
    {**ENCODER_DECODER, "max_source_positions": 16, "max_target_positions": 32},
    speech,
)
_register(
    "wav2vec 2.0",
    "wav2vec2",
    "Wav2Vec2ForSequenceClassification",
    {**SIZES, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4],
     "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
     "apply_spec_augment": False},
    sound,
    share=0.7,
)  # fmt: skip
_register(
    "CLIP",
    "clip",
    "CLIPModel",
    {
        "text_config": {**SIZES, "eos_token_id": 2},
        "vision_config": {**SIZES, "image_size": 32, "patch_size": 8},
        "projection_dim": 32,
    },
    pairs,
    share=0.7,  # for two examples, held exactly, beside one another
)
_register(
    "ConvNeXt",
    "convnext",
    "ConvNextForImageClassification",
    {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "num_labels": 2},
    images,
)
_register(
    "Swin",
    "swin",
    "SwinForImageClassification",
    {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2],
     "window_size": 4, "num_labels": 2},
    images,
)  # fmt: skip


class Recurrent(nn.Module):
    """A tagger: an embedding, two recurrent layers in both directions, a head."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = kind(
            HIDDEN, HIDDEN, num_layers=2, dropout=0.1, bidirectional=True, batch_first=True
        )
        self.head = nn.Linear(2 * HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embed(ids))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flip(1).flatten())


def recurrent(kind: type[nn.RNNBase]) -> Loop:
    model, ids = Recurrent(kind), tokens()["input_ids"]
    return Loop(model, lambda: model(ids).backward())


for kind in (nn.LSTM, nn.GRU):
    # Much of it is small, token by token: less than a page each.
    case(AREA, kind.__name__, share=0.9)(partial(recurrent, kind))
