"""The ledger and the report."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from daf_hf.accounting import Ledger, MemoryReport, ResidentPeak, SiteReport


def saved(ledger, tensor):
    storage = tensor.untyped_storage()
    return ledger.save(storage._cdata, storage)


def key(tensor):
    return tensor.untyped_storage()._cdata


def test_a_storage_counts_once_however_often_it_is_saved():
    ledger, x = Ledger(), torch.ones(100)
    assert saved(ledger, x)
    assert not saved(ledger, x[5:])
    assert ledger.plain == 400
    ledger.unsave(key(x))
    assert ledger.plain == 400
    ledger.unsave(key(x))
    assert (ledger.plain, ledger.plain_peak) == (0, 400)
    assert not ledger._holdings


def test_plain_peak_is_of_what_is_alive_together():
    ledger = Ledger()
    x, y = torch.ones(100), torch.ones(50)
    saved(ledger, x)
    ledger.unsave(key(x))
    saved(ledger, y)
    assert ledger.plain_peak == 400
    saved(ledger, x)
    assert ledger.plain_peak == 600


def test_exact_bytes_count_once():
    ledger, x = Ledger(), torch.ones(100)
    saved(ledger, x)
    assert not ledger.is_held_exactly(key(x))
    assert ledger.hold_exactly(key(x)) == 400
    assert ledger.hold_exactly(key(x)) == 0
    assert ledger.is_held_exactly(key(x))
    assert ledger.release_exactly(key(x)) == 0
    assert ledger.release_exactly(key(x)) == 400
    ledger.unsave(key(x))
    assert not ledger._holdings


def test_a_holding_ends_in_any_order():
    ledger, x = Ledger(), torch.ones(100)
    saved(ledger, x)
    ledger.hold_exactly(key(x))
    ledger.unsave(key(x))
    assert ledger.is_held_exactly(key(x))
    assert ledger.release_exactly(key(x)) == 400
    assert not ledger._holdings


def test_an_address_is_not_given_to_others_while_it_is_counted():
    ledger = Ledger()
    x = torch.ones(1000)
    address = key(x)
    saved(ledger, x)
    del x
    others = [torch.ones(1000) for _ in range(100)]
    assert address not in {key(other) for other in others}


def test_peaks_are_of_the_worst_moment():
    ledger = Ledger()
    ledger.observe(100, 40, 10, 20, budget=300)
    ledger.observe(50, 50, 1, 8)
    assert (ledger.peak.held, ledger.peak.stored, ledger.peak.exact) == (100, 60, 40)
    assert ledger.peak.mean_bits == 2
    assert ledger.peak.budget == 300
    ledger.start_step()
    assert ledger.step_peak.budget is None
    ledger.observe(70, 0, 0, 0)
    assert ledger.step_peak.held == 70
    assert ledger.step_peak.mean_bits == 0
    assert ledger.peak.held == 100


def test_events_are_counted():
    ledger = Ledger()
    ledger.count("spilled")
    ledger.count("spilled")
    assert ledger.counts == {"spilled": 2}


def test_a_report_sets_what_was_held_beside_the_budget_of_that_moment():
    same = str(MemoryReport(budget_bytes=3e6, budget_bytes_at_peak=3e6))
    assert "budget at" not in same and "budget" in same
    changed = str(MemoryReport(budget_bytes=3e6, budget_bytes_at_peak=9e6))
    assert re.search(r"budget at that moment\W+9.0", changed)
    assert re.search(r"budget at last\W+3.0", changed)


REPORT = MemoryReport(
    budget_bytes=math.inf,
    held_bytes_peak=100,
    stored_bytes_peak=60,
    exact_bytes_peak=40,
    plain_bytes=1000,
    predicted_gradient_error=math.nan,
    overhead_seconds={"kernels": 1.0},
    gradient_bytes=10,
    optimizer_bytes=20,
    peak_rss_bytes=500,
    sites=(SiteReport("a/0", "B.c", (2, 3), "float32", 24, "group+normal", 2, 0.5),),
)


def test_derived_figures():
    assert REPORT.ratio == 10
    assert REPORT.transient_bytes_peak == 370
    assert math.isnan(MemoryReport().ratio)
    assert MemoryReport(held_bytes_peak=5).transient_bytes_peak == 0


def test_dictionary_has_everything():
    values = REPORT.to_dict()
    assert (values["ratio"], values["plain_bytes"]) == (10, 1000)
    assert values["sites"][0]["shape"] == (2, 3)


def test_json_is_strict(tmp_path):
    path = tmp_path / "report.json"
    REPORT.to_json(path)

    def refuse(constant):
        pytest.fail(f"{constant} is no JSON")

    values = json.loads(path.read_text(), parse_constant=refuse)
    assert values["budget_bytes"] == "inf"
    assert values["predicted_gradient_error"] is None
    assert values["sites"] == [
        {
            "name": "a/0",
            "consumer": "B.c",
            "shape": [2, 3],
            "dtype": "float32",
            "plain_bytes": 24,
            "codec": "group+normal",
            "bits": 2,
            "importance": 0.5,
        }
    ]


@pytest.mark.parametrize("report", [REPORT, MemoryReport()])
def test_text_is_readable(report):
    text = str(report)
    for word in ("budget", "weights", "optimizer", "ratio", "gradient error not measured"):
        assert word in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_text_shows_small_sizes_and_what_the_times_are_of():
    report = MemoryReport(
        budget_bytes=20_480,
        plain_bytes=2_150_000,
        predicted_gradient_error=0.2345,
        overhead_seconds={"hooks": 0.5, "planning": 2.0},
    )
    text = str(report)
    assert "0.0205" in text and "2.1" in text
    assert "predicted gradient error 0.23," in text
    assert "hooks 0.5 s, planning and calibration 2.0 s" in text


def test_resident_peak_sees_what_was_freed():
    peak = ResidentPeak()
    block = torch.ones(8_000_000)
    peak.sample()
    del block
    assert 24e6 < peak.sample() < 200e6
