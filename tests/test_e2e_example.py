"""The E2E NLG example: prompts and labels, generation, the packaged model, and whole runs."""

import importlib
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config
from transformers.convert_slow_tokenizer import bytes_to_unicode

for package in ("evaluate", "nltk", "pycocoevalcap", "sacrebleu"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra e2e)")

E2E = Path(__file__).parents[1] / "examples" / "e2e_nlg"
END = 256  # id of <|endoftext|> in the tiny vocabulary


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(E2E))
    yield importlib.import_module("run_e2e")
    sys.path.remove(str(E2E))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A folder with a tiny GPT-2's configuration and a vocabulary of bytes, without weights."""
    folder = tmp_path_factory.mktemp("tiny_gpt2")
    vocabulary = {letter: index for index, letter in enumerate(bytes_to_unicode().values())}
    vocabulary["<|endoftext|>"] = END
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    GPT2Config(
        vocab_size=len(vocabulary),
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=128,
        bos_token_id=END,
        eos_token_id=END,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory):
    """Generated files with two MRs, of two references each."""
    folder = tmp_path_factory.mktemp("e2e")
    rows = [
        f'"name[{name}], area[{area}]","{name} is {there} the {area}."\n'
        for name, area in (("The Mill", "riverside"), ("Aromi", "city centre"))
        for there in ("in", "located in")
    ]
    for name in ("trainset.csv", "devset.csv", "testset_w_refs.csv"):
        (folder / name).write_text("".join(["mr,ref\n", *rows]), encoding="utf-8")
    return folder


@pytest.fixture
def tokenizer(script, tiny_model):
    arguments = script.ModelArguments(str(tiny_model), from_config=True)
    return script.load_model_parts(arguments)[2]


def arguments(model, data_dir, output_dir, *extra):
    return [
        *("--model_name_or_path", str(model), "--from_config", "--data_dir", str(data_dir)),
        *("--output_dir", str(output_dir), "--max_steps", "2", "--disable_tqdm", "True"),
        *("--use_cpu", "--num_beams", "2", "--max_new_tokens", "5", *extra),
    ]


def test_a_whole_plain_run(script, tiny_model, tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)  # METEOR takes a while
    script.main(arguments(tiny_model, tiny_data, tmp_path, "--no_daf"))
    results = json.loads((tmp_path / "all_results.json").read_text())
    scores = ("test_BLEU", "test_NIST", "test_ROUGE_L", "test_CIDEr")
    for key in ("train_loss", "train_peak_rss_above_model_bytes", "eval_loss", *scores):
        assert math.isfinite(results[key]), key
    lines = (tmp_path / "predictions.txt").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 2 + 1
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "daf_report.json").exists()


@pytest.mark.parametrize("smoothing", ["0", "0.1"])
def test_a_run_under_a_budget(script, tiny_model, tiny_data, tmp_path, smoothing):
    extra = ("--do_train", "--budget_mb", "inf", "--label_smoothing_factor", smoothing)
    script.main(arguments(tiny_model, tiny_data, tmp_path, *extra))
    report = json.loads((tmp_path / "daf_report.json").read_text())
    assert report["held_bytes_peak"] > 0
    assert not (tmp_path / "predictions.txt").exists()


def test_padding_is_not_skipped_where_the_loss_is_not_the_models_own(script):
    basic = ["--output_dir", "unused", "--budget_mb", "7"]
    for smoothing, skipped in (("0", True), ("0.1", False)):
        daf = script.parse_arguments([*basic, "--label_smoothing_factor", smoothing])[-2]
        assert script.daf_config(daf).skip_padding is skipped
    plain = ["--output_dir", "unused", "--no_daf", "--label_smoothing_factor", "0.1"]
    assert script.daf_config(script.parse_arguments(plain)[-2]) is None


def test_only_the_reference_and_its_end_have_labels(script, tokenizer):
    pairs = script.Dataset.from_list([{"mr": "name[A]", "ref": "A is."}])
    (row,) = script.tokenize(pairs, tokenizer, 100)
    assert tokenizer.decode(row["input_ids"]) == "name[A]\nA is.<|endoftext|>"
    answer = [label for label in row["labels"] if label != script.IGNORED]
    assert tokenizer.decode(answer) == "A is.<|endoftext|>"
    assert row["labels"][-len(answer) :] == answer
    assert len(row["labels"]) == len(row["input_ids"]) == len(row["attention_mask"])
    (cut,) = script.tokenize(pairs, tokenizer, 10)
    assert len(cut["labels"]) == len(cut["input_ids"]) == 10


def test_a_reference_that_is_cut_away_is_not_trained_on(script, tokenizer, capsys):
    pairs = [{"mr": "name[A]", "ref": "A is."}, {"mr": "name[A], area[riverside]", "ref": "A is."}]
    rows = script.tokenize(script.Dataset.from_list(pairs), tokenizer, 12)
    assert len(rows) == 1 and "1 of 2 pairs are left out" in capsys.readouterr().out
    with pytest.raises(script.UsageError, match="--max_seq_length 8: that leaves nothing"):
        script.tokenize(script.Dataset.from_list(pairs), tokenizer, 8)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("max_seq_length", 0), ("max_train_samples", 0), ("max_eval_samples", -1)),
        *(("max_predict_samples", 0), ("num_beams", 0), ("num_beams", -1)),
        *(("no_repeat_ngram_size", -1), ("max_new_tokens", 0), ("lora_r", 0)),
        *(("lora_alpha", 0), ("lora_dropout", 1.0), ("lora_dropout", -0.1)),
        *(("per_device_train_batch_size", 0), ("per_device_eval_batch_size", 0)),
        ("learning_rate", -1),
    ],
)
def test_values_that_none_can_have(script, option, value):
    with pytest.raises(script.UsageError, match=rf"--{option} {value:g}: use .* or more"):
        script.parse_arguments(["--output_dir", "unused", "--no_daf", f"--{option}={value}"])


def test_modules_that_are_not_there(script, tiny_model, tiny_data, tmp_path):
    options = arguments(tiny_model, tiny_data, tmp_path, "--no_daf", "--target_modules", "q_proj")
    with pytest.raises(script.models.ModelError, match=r"--target_modules q_proj: .*not found"):
        script.main(options)


def test_modules_to_train_in_full_that_are_not_there(script, tiny_model, tiny_data, tmp_path):
    options = ("--no_daf", "--modules_to_save", "nothing")
    with pytest.raises(script.models.ModelError, match="--modules_to_save nothing: not found"):
        script.main(arguments(tiny_model, tiny_data, tmp_path, *options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resume_from_checkpoint", "absent"), "--resume_from_checkpoint absent: no such folder"),
        (("--bf16", "--fp16"), "At most one of fp16 and bf16"),
        (("--model_name_or_path", "absent/folder/of/this"), "absent/folder/of/this: no such model"),
    ],
)
def test_what_is_not_there(script, tiny_model, tiny_data, tmp_path, options, message):
    with pytest.raises((script.UsageError, script.models.ModelError), match=message):
        script.main([*arguments(tiny_model, tiny_data, tmp_path, "--no_daf"), *options])


def test_a_recommended_budget(script):
    options = ["--output_dir", "unused", "--budget_mb", "recommended"]
    assert script.daf_config(script.parse_arguments(options)[-2]).budget_mb == "recommended"


def test_metrics_that_cannot_be_computed_end_the_run_before_it_trains(
    script, tiny_model, tiny_data, tmp_path, monkeypatch
):
    def load(*args, **kwargs):
        raise ImportError("you need to install the following dependencies['sacrebleu']")

    monkeypatch.setattr(script.evaluate, "load", load)
    with pytest.raises(script.UsageError, match=r"sacrebleu.*\n.*daf-hf\[e2e\]"):
        script.main(arguments(tiny_model, tiny_data, tmp_path, "--no_daf"))
    assert not list(tmp_path.iterdir())


# --- generation ------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_come_in_the_order_of_prompts_whatever_the_batch(
    script, tiny_model, tokenizer, beams
):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)  # so that outputs depend on the prompt
    prompts = [script.encode_prompt(mr, tokenizer) for mr in ("name[A], b", "c", "de", "fghi")]
    options = script.GenerationArguments(num_beams=beams, max_new_tokens=8)
    together = script.generate(model, tokenizer, prompts, options, 4)
    alone = [script.generate(model, tokenizer, [prompt], options, 1)[0] for prompt in prompts]
    assert together == alone
    assert len(set(alone)) > 1


def test_what_the_prompt_says_may_be_said_again(script):
    generation = importlib.import_module("generation")
    ids = torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 1]])
    scores = torch.zeros(2, 5)
    found = generation.NoRepeatedNGrams(2, 2)(ids, scores)
    # Of the outputs [3, 1, 2] and [3, 4, 1] no bigram begins with the last token.
    assert torch.equal(found, scores)
    found = generation.NoRepeatedNGrams(2, 0)(ids, scores)
    assert found[0].tolist() == [0, 0, 0, -math.inf, 0]
    assert found[1].tolist() == [0, 0, -math.inf, 0, 0]


# --- the packaged model ----------------------------------------------------------------------


def test_a_package_that_is_not_installed(script, monkeypatch, tmp_path):
    smollm2 = importlib.import_module("smollm2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "package_that_is_absent")
    with pytest.raises(smollm2.ModelError, match="run: make smollm2"):
        smollm2.smollm2_folder()


def test_a_model_is_converted_once(script, monkeypatch, tmp_path):
    smollm2 = importlib.import_module("smollm2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_packaged_weights", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(smollm2, "convert", lambda weights, folder: folder.mkdir(parents=True))
    folder = smollm2.smollm2_folder()
    monkeypatch.delattr(smollm2, "convert")
    assert smollm2.smollm2_folder() == folder
    assert folder.is_relative_to(tmp_path)
