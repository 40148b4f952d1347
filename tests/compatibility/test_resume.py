"""Checkpoints, resumed runs, and what of them leaves the machine."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from test_callbacks import trainer_of
from tiny import batch, build, same, weights
from transformers import Trainer, TrainerCallback
from transformers import trainer as trainer_module

from daf_hf import DAFCallback
from daf_hf.calibration import Calibration
from daf_hf.checkpoint import FILE

AREA = "Resume"
SAVING = {
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "lr_scheduler_type": "constant",
}


@pytest.fixture
def calibrations(monkeypatch):
    """Counts what is measured."""
    counted, run = [], Calibration.run

    def counting(self):
        counted.append(self)
        run(self)

    monkeypatch.setattr(Calibration, "run", counting)
    return counted


def trained(folder, steps, resume=None, budget_mb=0.3, **options):
    """A trainer and its callback, after training."""
    callback = DAFCallback(budget_mb=budget_mb, calibrate_at=(0,))
    trainer = trainer_of(folder, [callback], max_steps=steps, **{**SAVING, **options})
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == steps
    assert 0 < callback.report.held_bytes_peak <= budget_mb * 1e6
    return trainer, callback


@pytest.mark.supports(AREA, "twice in a row")
def test_twice(tmp_path, calibrations):
    whole, _ = trained(tmp_path / "whole", 6)
    assert len(calibrations) == 1
    for steps in (2, 4, 6):
        path = tmp_path / "parts" / f"checkpoint-{steps - 2}"
        parts, _ = trained(tmp_path / "parts", steps, path if steps > 2 else None)
    assert len(calibrations) == 2  # each first run's
    assert same(weights(parts.model), weights(whole.model))


@pytest.mark.supports(AREA, "under another budget")
def test_another_budget(tmp_path, calibrations):
    trained(tmp_path, 2)
    _, callback = trained(tmp_path, 4, True, budget_mb=0.2)
    assert callback.report.budget_bytes == 0.2e6
    assert len(calibrations) == 1


EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        pytest.param({"save_total_limit": 1}, 0, id="save_total_limit=1"),
        pytest.param({"ignore_data_skip": True}, 0, id="ignore_data_skip"),
        pytest.param({"load_best_model_at_end": True, **EVALUATING}, 0, id="load_best_model"),
        # Nothing but the model is saved.
        pytest.param({"save_only_model": True}, 1, id="save_only_model"),
    ],
)
@pytest.mark.supports(AREA, "save_total_limit, ignore_data_skip, load_best_model_at_end, ...")
def test_options_of_checkpoints(tmp_path, calibrations, options, measured):
    trained(tmp_path, 4, **options)
    calibrations.clear()
    trained(tmp_path, 6, True, **options)
    assert len(calibrations) == measured
    found = {path.parent.name for path in tmp_path.rglob(FILE)}
    folders = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert found == (set() if options.get("save_only_model") else folders)


@pytest.mark.supports(AREA, "with the callback, without it, and with it again")
def test_with_and_without(tmp_path):
    trained(tmp_path, 2)
    trainer = trainer_of(tmp_path, max_steps=4, **SAVING)
    trainer.train(resume_from_checkpoint=True)
    assert not (tmp_path / "checkpoint-4" / FILE).exists()
    trained(tmp_path, 6, True)
    assert (tmp_path / "checkpoint-6" / FILE).exists()


class Keys(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        self.keys = set(model.state_dict())


@pytest.mark.supports(AREA, "adapters are PEFT's own, and load without daf_hf")
def test_adapters_load_without_daf_hf(tmp_path):
    trainer, _ = trained(tmp_path, 2)
    trainer.save_model(tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert "adapter_model.safetensors" in names and FILE not in names
    inputs = batch("bert")
    model = trainer.model.eval()
    with torch.no_grad():
        expected = model(**inputs).logits
    torch.save((model.get_base_model().config, expected), tmp_path / "expected.pt")
    base = build("bert").unload()
    torch.save(base.state_dict(), tmp_path / "base.pt")
    code = f"""
        import sys
        sys.modules["daf_hf"] = None
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch
        from peft import PeftModel
        from transformers import BertForSequenceClassification
        folder = {str(tmp_path)!r}
        config, expected = torch.load(folder + "/expected.pt", weights_only=False)
        base = BertForSequenceClassification(config)
        base.load_state_dict(torch.load(folder + "/base.pt"))
        model = PeftModel.from_pretrained(base, folder + "/saved").eval()
        inputs = torch.load(folder + "/inputs.pt")
        with torch.no_grad():
            assert torch.equal(model(**inputs).logits, expected)
            merged = model.merge_and_unload()
            torch.testing.assert_close(merged(**inputs).logits, expected)
    """
    torch.save(inputs, tmp_path / "inputs.pt")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        encoding="utf-8",
        timeout=200,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.supports(AREA, "adapters are PEFT's own, and load without daf_hf")
def test_state_and_merged_weights_are_plain(tmp_path):
    merged, adapters, keys = [], [], []
    for callbacks in ([], [DAFCallback()]):
        watch = Keys()
        trainer = trainer_of(tmp_path, [*callbacks, watch], max_steps=2)
        trainer.train()
        keys.append(watch.keys)
        adapters.append(get_peft_model_state_dict(trainer.model))
        merged.append(weights(trainer.model.merge_and_unload()))
    assert keys[0] == keys[1]
    assert same(*adapters)
    assert same(*merged)


class Hub:
    """Notes what would be uploaded."""

    def __init__(self):
        self.uploads = {}

    def upload_folder(self, folder_path, path_in_repo=".", ignore_patterns=(), **_):
        folder, ignored = Path(folder_path), ignore_patterns or ()
        names = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
        kept = [
            name
            for name in names
            if not any(fnmatch.fnmatch(name, f"{p}/*" if p[-1] == "/" else p) for p in ignored)
        ]
        self.uploads.setdefault(path_in_repo, set()).update(kept)
        return self

    def done(self):
        return True

    is_done = done

    def result(self):
        return self


class Pushing(Trainer):
    def init_hf_repo(self, token=None):
        self.hub_model_id, self.push_in_progress = "somebody/something", None

    def create_model_card(self, *_, **__):
        pass


@pytest.mark.supports(AREA, "push_to_hub")
@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_what_is_uploaded(tmp_path, monkeypatch, strategy):
    if not hasattr(trainer_module, "hf_api"):
        pytest.skip("this version of transformers uploads by other functions")
    uploads = []
    for callbacks in ([], [DAFCallback(budget_mb=0.3, calibrate_at=(0,))]):
        hub = Hub()
        monkeypatch.setattr(trainer_module, "hf_api", lambda hub=hub: hub)
        options = {"push_to_hub": True, "hub_strategy": strategy, "max_steps": 2, **SAVING}
        folder = tmp_path / str(len(uploads))
        trainer_of(folder, callbacks, kind=Pushing, **options).train()
        uploads.append(hub.uploads)
    assert uploads[0] == uploads[1]
    assert "adapter_model.safetensors" in uploads[1]["."]
