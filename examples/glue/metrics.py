"""GLUE's metrics as a local `evaluate` module, so that scoring needs no network.

Load it by path, with the task as its configuration:

>>> metric = evaluate.load("examples/glue/metrics.py", "mrpc")
>>> metric.compute(predictions=[0, 1], references=[0, 1])
{'accuracy': 1.0, 'f1': 1.0}

`evaluate` copies this file elsewhere before it imports it: it must stand alone.
"""

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

_DESCRIPTION = """\
The metrics that the GLUE benchmark reports for each of its tasks: Matthews correlation for cola,
Pearson and Spearman correlation for stsb, accuracy and F1 for mrpc and qqp, accuracy elsewhere.
"""

_CITATION = """\
@inproceedings{wang2019glue,
  title={{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author={Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and
          Bowman, Samuel R.},
  booktitle={International Conference on Learning Representations},
  year={2019}
}
"""

_INPUTS = """\
predictions: class ids, or scores for stsb.
references: the same kind of values from the data.
"""


def _correlation(function, predictions, references) -> float:
    """Correlate two lists; 0 where one of them is constant and no correlation is defined."""
    if np.ptp(predictions) == 0 or np.ptp(references) == 0:
        return 0.0
    return float(function(predictions, references)[0])


METRICS = {
    "accuracy": lambda p, r: float(accuracy_score(r, p)),
    "f1": lambda p, r: float(f1_score(r, p, zero_division=0)),  # type: ignore[arg-type]
    "matthews_correlation": lambda p, r: float(matthews_corrcoef(r, p)),
    "pearson": lambda p, r: _correlation(pearsonr, p, r),
    "spearmanr": lambda p, r: _correlation(spearmanr, p, r),
}

TASK_METRICS = {
    "cola": ("matthews_correlation",),
    "sst2": ("accuracy",),
    "mrpc": ("accuracy", "f1"),
    "stsb": ("pearson", "spearmanr"),
    "qqp": ("accuracy", "f1"),
    "mnli": ("accuracy",),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
}


class GlueMetric(evaluate.Metric):
    """The metrics of one GLUE task, which is named by the configuration."""

    def _info(self):
        if self.config_name not in TASK_METRICS:
            raise KeyError(f"no GLUE task {self.config_name!r}; known: {', '.join(TASK_METRICS)}")
        value = datasets.Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, *, predictions=None, references=None, **kwargs):
        return {
            name: METRICS[name](predictions, references) for name in TASK_METRICS[self.config_name]
        }
