"""TRL's trainers: losses of log-probabilities, pairs of answers, a reference without adapters."""

from __future__ import annotations

from typing import Any

import torch
from harness import Training, case
from tiny import VOCABULARY, build, lora
from transformers import LlamaForSequenceClassification

AREA = "Others' trainers"
EXAMPLES = 16
TRAINING = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}
PLAIN = {"bf16": False, "gradient_checkpointing": False}
"""In place of defaults of TRL's own."""


def tokenizer() -> Any:
    """Of words w3, w4, ..., for the vocabulary of the tiny models."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>"]
    words = special + [f"w{index}" for index in range(len(special), VOCABULARY)]
    bare = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=bare, **names)


def words(first: int, count: int) -> str:
    """A text of so many words."""
    span = VOCABULARY - 3
    return " ".join(f"w{3 + (first * 7 + index * 5) % span}" for index in range(count))


def pairs() -> Any:
    """Prompts with two answers each, of unequal lengths."""
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "prompt": words(index, 6) + " ",
                "chosen": words(index + 40, 4 + index % 5),
                "rejected": words(index + 80, 8 - index % 5),
            }
            for index in range(EXAMPLES)
        ]
    )


def texts() -> Any:
    """Texts of unequal lengths."""
    from datasets import Dataset

    return Dataset.from_list([{"text": words(i, 8 + i % 9)} for i in range(EXAMPLES)])


def prompts() -> Any:
    """Prompts alone."""
    return pairs().remove_columns(["chosen", "rejected"])


def judged() -> Any:
    """Prompts with an answer each, every other of which is wanted."""
    from datasets import Dataset

    rows = enumerate(pairs())
    return Dataset.from_list(
        [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2 == 0} for i, r in rows]
    )


def rewards(completions: list[str], **given: Any) -> list[float]:
    """Of answers, some number."""
    return [float(sum(map(ord, answer)) % 17) for answer in completions]


def training(
    name: str, model: Any, data: Any, given: dict[str, Any] | None = None, **options: Any
) -> Training:
    """A subject: TRL's trainer of that name, given more."""
    import trl

    def make(folder, steps, callbacks):
        if "ref" in model.peft_config:  # an earlier DPOTrainer's, which would refuse to add it
            model.delete_adapter("ref")
        config = getattr(trl, f"{name}Config")
        args = config(output_dir=str(folder), max_steps=steps, **{**TRAINING, **options})
        return getattr(trl, f"{name}Trainer")(
            model,
            args=args,
            train_dataset=data,
            processing_class=tokenizer(),
            callbacks=callbacks,
            **(given or {}),
        )

    return Training(model, make)


@case(AREA, "TRL SFTTrainer", needs=("trl",))
def sft() -> Training:
    return training("SFT", build("llama"), texts(), **PLAIN)


@case(
    AREA, "TRL SFTTrainer, its defaults (bf16, gradient checkpointing)", share=0.8, needs=("trl",)
)
def sft_defaults() -> Training:
    return training("SFT", build("llama"), texts())


@case(AREA, "TRL SFTTrainer, label smoothing", needs=("trl",))
def sft_smoothing() -> Training:
    return training("SFT", build("llama"), texts(), label_smoothing_factor=0.1, **PLAIN)


@case(AREA, "TRL SFTTrainer, packing without padding", needs=("trl",))
def sft_packing() -> Training:
    return training("SFT", build("llama"), texts(), packing=True, max_length=32, **PLAIN)


@case(AREA, "TRL SFTTrainer, dynamic fine-tuning (`dft`)", needs=("trl",))
def sft_dft() -> Training:
    return training("SFT", build("llama"), texts(), loss_type="dft", **PLAIN)


@case(AREA, "TRL DPOTrainer", needs=("trl",))
def dpo() -> Training:
    return training("DPO", build("llama"), pairs(), **PLAIN)


@case(AREA, "TRL DPOTrainer, three losses, no padding, reference computed before", needs=("trl",))
def dpo_losses() -> Training:
    return training(
        "DPO",
        build("llama"),
        pairs(),
        loss_type=["sigmoid", "bco_pair", "sft"],
        loss_weights=[0.8, 0.2, 1.0],
        padding_free=True,
        precompute_ref_log_probs=True,
        **PLAIN,
    )


@case(AREA, "TRL KTOTrainer", needs=("trl",))
def kto() -> Training:
    return training("KTO", build("llama"), judged(), **PLAIN)


SAMPLED = {"num_generations": 4, "max_completion_length": 6, **PLAIN}


@case(AREA, "TRL GRPOTrainer, two updates with each answer", needs=("trl",))
def grpo() -> Training:
    given = {"reward_funcs": rewards}
    options = {"beta": 0.1, "num_iterations": 2, **SAMPLED}
    return training("GRPO", build("llama"), prompts(), given, **options)


@case(AREA, "TRL RLOOTrainer", needs=("trl",))
def rloo() -> Training:
    return training("RLOO", build("llama"), prompts(), {"reward_funcs": rewards}, **SAMPLED)


@case(AREA, "TRL RewardTrainer", needs=("trl",))
def reward() -> Training:
    config = build("llama").config
    config.num_labels = 1
    torch.manual_seed(0)
    model = lora(LlamaForSequenceClassification(config), ["q_proj", "v_proj"], task_type="SEQ_CLS")
    return training("Reward", model.train(), pairs(), **PLAIN)
