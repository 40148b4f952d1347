"""What runs of run_glue.py leave in their folders, made up."""

from __future__ import annotations

import json

SITES = [
    {"name": "m.a/0", "consumer": "A.self", "plain_bytes": 9000, "codec": "c", "bits": 3},
    {"name": "m.a/1", "consumer": "B.self", "plain_bytes": 9000, "codec": "exact", "bits": None},
    {"name": "m.b/0", "consumer": "C.self", "plain_bytes": 9000, "codec": "drawn", "bits": None},
    {"name": "m.b/1", "consumer": "D.self", "plain_bytes": 9, "codec": "exact", "bits": None},
]


def results(task, score, peak=50e6, seconds=10.0):
    metric = {"sst2": ["accuracy"], "mrpc": ["f1", "accuracy"]}[task]
    return {
        **{f"eval_{name}": score for name in metric},
        "train_peak_rss_above_model_bytes": peak,
        "train_runtime": seconds,
    }


def daf_report(held, plain=400e6, error=0.25, bits=3.0, sites=SITES):
    return {
        "plain_bytes": plain,
        "held_bytes_peak": held,
        "ratio": plain / held,
        "predicted_gradient_error": error,
        "mean_bits": bits,
        "sites": sites,
    }


def leave(out, task, setting, seed, found, report=None):
    """A folder as a run leaves it."""
    folder = out / task / setting / str(seed)
    folder.mkdir(parents=True)
    record = {"task": task, "setting": setting, "seed": seed}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "all_results.json").write_text(json.dumps(found))
    if report is not None:
        (folder / "daf_report.json").write_text(json.dumps(report))
    return folder
