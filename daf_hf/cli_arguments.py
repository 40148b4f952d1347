"""The options of a command line that name a model and a batch.

Apart from :mod:`daf_hf.cli_model`, whose libraries take seconds to load.
"""

from __future__ import annotations

import argparse

CAUSAL_LM, SEQ_CLS = "causal_lm", "seq_cls"


class UsageError(ValueError):
    """A command line that cannot be followed; says what would work."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that :func:`daf_hf.cli_model.build_model` and ``build_batch`` read."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "model",
        metavar="MODEL",
        help="a folder, a name on the Hub, or with --from_config a model type such as roberta",
    )
    model.add_argument(
        "--from_config",
        action="store_true",
        help="random weights; of the folder or Hub name only config.json is read",
    )
    model.add_argument(
        "--config_overrides",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="fields of the configuration, such as num_hidden_layers=4",
    )
    model.add_argument(
        "--task",
        choices=(CAUSAL_LM, SEQ_CLS),
        help="by default what the configuration's architecture says, else the model type",
    )
    model.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="float32", help="of the weights"
    )
    model.add_argument("--device", help="by default cuda where there is one")
    lora = parser.add_argument_group("LoRA")
    lora.add_argument("--lora_r", type=int, default=8, help="rank; 0 trains all weights instead")
    lora.add_argument("--lora_alpha", type=int, default=16)
    lora.add_argument("--lora_dropout", type=float, default=0.1)
    lora.add_argument(
        "--target_modules", nargs="+", metavar="NAME", help="PEFT's default if left out"
    )
    batch = parser.add_argument_group("batch")
    batch.add_argument("--batch_size", type=_positive, default=32)
    batch.add_argument("--seq_len", type=_positive, default=128, help="tokens an example")
    batch.add_argument(
        "--text_file", help="take its first lines, padded to --seq_len, not random tokens"
    )
    batch.add_argument("--seed", type=int, default=0, help="of random weights and tokens")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: use an integer of at least 1")
    return value
