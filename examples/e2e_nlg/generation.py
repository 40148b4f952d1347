"""Beam search on meaning representations, as the LoRA paper's for GPT-2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerBase,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.options import require_least


@dataclass
class GenerationArguments:
    """How texts are generated; the defaults are those of the LoRA paper (table 11)."""

    num_beams: int = field(default=10, metadata={"help": "Beams; 1 is greedy search."})
    length_penalty: float = field(default=0.9, metadata={"help": "Exponent of a beam's length."})
    no_repeat_ngram_size: int = field(
        default=4, metadata={"help": "No n-gram twice in an output; 0 allows all."}
    )
    max_new_tokens: int = field(default=64, metadata={"help": "At most so many tokens a text."})

    def __post_init__(self) -> None:
        require_least(self, num_beams=1, no_repeat_ngram_size=0, max_new_tokens=1)


class NoRepeatedNGrams(NoRepeatNGramLogitsProcessor):
    """Forbid repeated n-grams within the output alone: what the prompt says may be said again."""

    def __init__(self, ngram_size: int, prompt_length: int) -> None:
        super().__init__(ngram_size)
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return super().__call__(input_ids[:, self.prompt_length :], scores)


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    options: GenerationArguments,
    batch_size: int = 8,
) -> list[str]:
    """Return one text for each prompt of token ids, in their order.

    Prompts of like length are generated together, padded on the left.
    """
    model.eval()
    device = next(model.parameters()).device
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    texts = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = tokenizer.pad(
            {"input_ids": [list(prompts[index]) for index in chosen]},
            padding_side="left",
            return_tensors="pt",
        ).to(device)
        length = batch["input_ids"].shape[1]
        processors = LogitsProcessorList()
        if options.no_repeat_ngram_size:
            processors.append(NoRepeatedNGrams(options.no_repeat_ngram_size, length))
        found = model.generate(  # type: ignore[operator]
            **batch,
            do_sample=False,
            num_beams=options.num_beams,
            length_penalty=options.length_penalty if options.num_beams > 1 else None,
            max_new_tokens=options.max_new_tokens,
            logits_processor=processors,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            use_cache=True,
        )
        outputs = tokenizer.batch_decode(found[:, length:], skip_special_tokens=True)
        for index, text in zip(chosen, outputs, strict=True):
            texts[index] = " ".join(text.split())
    return texts
