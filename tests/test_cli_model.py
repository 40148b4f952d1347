"""Models and batches that a command line asks for."""

from __future__ import annotations

import argparse

import pytest
import torch
from peft import PeftModel
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification

from daf_hf.cli_arguments import UsageError, add_model_arguments
from daf_hf.cli_model import IGNORED_LABEL, build_batch, build_model, default_task

COMMON = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = {
    "roberta": {**COMMON, "intermediate_size": 64, "vocab_size": 100},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 100},
    "llama": {**COMMON, "intermediate_size": 64, "vocab_size": 100, "num_key_value_heads": 1},
    "distilbert": {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64, "vocab_size": 100},
}


def config_folder(path, kind):
    """A folder with nothing but the configuration of a small model."""
    folder = path / kind
    CONFIG_MAPPING[kind](**SMALL[kind], bos_token_id=0, eos_token_id=2).save_pretrained(folder)
    return folder


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return parser.parse_args([*map(str, arguments)])


def built(*arguments):
    options = parsed(*arguments, "--batch_size", 4, "--seq_len", 8)
    model, config, task = build_model(options)
    return model, build_batch(options, config, task), task


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("kind", "task", "targets"),
    [
        ("roberta", "seq_cls", {"query", "value"}),
        ("gpt2", "causal_lm", {"c_attn"}),
        ("llama", "causal_lm", {"q_proj", "v_proj"}),
    ],
)
def test_from_a_configuration(tmp_path, kind, task, targets):
    model, batch, found = built(config_folder(tmp_path, kind), "--from_config")
    assert found == task and isinstance(model, PeftModel)
    adapted = {
        name.split(".lora_")[0].rpartition(".")[2] for name in trained(model) if "lora" in name
    }
    assert adapted == targets
    assert batch["input_ids"].shape == (4, 8) and batch["input_ids"].max() < 100
    assert batch["labels"].shape == ((4, 8) if task == "causal_lm" else (4,))
    assert model(**batch)["loss"].requires_grad
    again, other, _ = built(tmp_path / kind, "--from_config")
    assert torch.equal(batch["input_ids"], other["input_ids"])
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_may_be_asked_for(tmp_path):
    folder = config_folder(tmp_path, "gpt2")
    arguments = ("--from_config", "--task", "seq_cls", "--dtype", "bfloat16", "--lora_r", 2)
    model, batch, task = built(
        folder, *arguments, "--target_modules", "c_fc", "--config_overrides", "n_layer=3"
    )
    assert task == "seq_cls" and batch["labels"].shape == (4,)
    sizes = {n: p.shape for n, p in model.named_parameters() if "lora_A" in n}
    assert len(sizes) == 3 and all("c_fc" in n and s == (2, 32) for n, s in sizes.items())
    assert model.dtype is torch.bfloat16
    assert model(**batch)["loss"].requires_grad
    whole, _, _ = built(folder, "--from_config", "--lora_r", 0)
    assert len(trained(whole)) == len(list(whole.parameters()))


def test_from_weights(tmp_path):
    config = CONFIG_MAPPING["roberta"](**SMALL["roberta"])
    saved = AutoModelForSequenceClassification.from_config(config)
    saved.save_pretrained(tmp_path / "model")
    model, _, task = built(tmp_path / "model", "--lora_r", 0)
    assert task == "seq_cls"
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, saved.state_dict()[name]), name


def test_no_token_of_a_random_batch_is_padding(tmp_path):
    model, _, _ = built(config_folder(tmp_path, "roberta"), "--from_config")
    options = parsed("x", "--batch_size", 64, "--seq_len", 64)
    ids = build_batch(options, model.config, "seq_cls")["input_ids"]
    assert len(ids.unique()) == 99 and not (ids == model.config.pad_token_id).any()


def test_texts(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = config_folder(tmp_path, "gpt2")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="b"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)
    text = tmp_path / "lines.txt"
    text.write_text("a b a\n\nb\na a a a a a a a a a\nb b\na\n")
    _, batch, _ = built(folder, "--from_config", "--text_file", text)
    assert batch["input_ids"].tolist()[:2] == [[0, 1, 0, *[2] * 5], [1, *[2] * 7]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 1, 8, 2]
    assert batch["labels"].tolist()[1] == [1, *[IGNORED_LABEL] * 7]
    text.write_text("a\n")
    with pytest.raises(UsageError, match="1 lines with text, and --batch_size asks for 4"):
        built(folder, "--from_config", "--text_file", text)


@pytest.mark.parametrize(
    ("kind", "architectures", "task"),
    [
        ("roberta", ["RobertaForMaskedLM"], "seq_cls"),
        ("roberta", ["RobertaForCausalLM"], "causal_lm"),
        ("gpt2", ["GPT2LMHeadModel"], "causal_lm"),
        ("llama", ["LlamaForSequenceClassification"], "seq_cls"),
        ("llama", None, "causal_lm"),
        ("bert", None, "seq_cls"),
    ],
)
def test_the_task_by_default(kind, architectures, task):
    assert default_task(CONFIG_MAPPING[kind](architectures=architectures)) == task


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder"], "is no folder with a config.json, nor .* --from_config .* roberta"),
        (["ROBERTA"], "holds no weights; --from_config"),
        (["ROBERTA", "--from_config", "--config_overrides", "depth=3"], "'roberta' has no depth"),
        (["roberta", "--from_config", "--config_overrides", "depth=3"], "'roberta' has no depth"),
        (["roberta", "--from_config", "--config_overrides", "depth"], "use KEY=VALUE"),
        (["roberta", "--from_config", "--config_overrides", "hidden_size=x"], "hidden_size"),
        (["ROBERTA", "--from_config", "--seq_len", "9999"], "at most 512 tokens"),
        (["ROBERTA", "--from_config", "--target_modules", "c"], "LoRA: .*of dense.*query"),
        (["DISTILBERT", "--from_config"], "LoRA: .*--target_modules, of .*q_lin"),
        (["ROBERTA", "--from_config", "--device", "moon"], "--device moon"),
        (["ROBERTA", "--from_config", "--text_file", "nowhere"], "--text_file nowhere"),
        (["vit", "--from_config", "--task", "causal_lm"], "no such model of type 'vit'"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = [
        config_folder(tmp_path, a.lower()) if a in ("ROBERTA", "DISTILBERT") else a
        for a in arguments
    ]
    with pytest.raises(UsageError, match=message):
        built(*arguments) if "--seq_len" not in arguments else build_model(parsed(*arguments))
