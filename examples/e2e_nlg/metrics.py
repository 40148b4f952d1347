r"""The official metrics of E2E NLG: BLEU, NIST, METEOR, ROUGE_L and CIDEr, on kept libraries.

    python examples/e2e_nlg/metrics.py --references testset_w_refs.csv --predictions tgen.tsv

prints a JSON object with a score for each. As an `evaluate` module:

>>> metric = evaluate.load("examples/e2e_nlg/metrics.py")
>>> metric.compute(predictions=["A pub."], references=[["A pub.", "This is a pub."]])

The scores are those of https://github.com/tuetschek/e2e-metrics to 4 decimals. NIST is that of
its default run (mteval-v13a), by which systems are published; its option ``-p`` computes another.
Without Java, METEOR is left out, and words for ROUGE_L and CIDEr are told by nltk.

`evaluate` copies this file elsewhere before it imports it: scoring must stand alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import evaluate
from nltk.tokenize import TreebankWordTokenizer
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.meteor.meteor import Meteor
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.tokenizer import ptbtokenizer
from sacrebleu import corpus_bleu
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

logger = logging.getLogger(__name__)

MAX_NGRAM = 5
_STANFORD_TOKENIZER = "edu.stanford.nlp.process.PTBTokenizer"
_NO_JAVA = (
    "METEOR is left out, for it needs Java, and `java` does not run here; "
    "ROUGE_L and CIDEr are computed on nltk's words in place of Stanford's"
)

_DESCRIPTION = """\
The metrics of the E2E NLG challenge, as its official scripts compute them. BLEU, METEOR and
ROUGE_L are between 0 and 1, CIDEr between 0 and 10.
"""

_CITATION = """\
@article{dusek2020evaluating,
  title={Evaluating the State-of-the-Art of End-to-End Natural Language Generation: The {E2E}
         {NLG} Challenge},
  author={Du{\\v{s}}ek, Ond{\\v{r}}ej and Novikova, Jekaterina and Rieser, Verena},
  journal={Computer Speech \\& Language},
  year={2020}
}
"""

_INPUTS = """\
predictions: one text for each instance.
references: a list of texts for each instance.
"""


class E2EMetric(evaluate.Metric):
    """All metrics at once; METEOR only where Java runs."""

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": text, "references": [text]}),
        )

    def _compute(self, *, predictions=None, references=None, **kwargs):
        return score(list(predictions or ()), list(references or ()))


def score(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
    """Score texts against the references of each; without Java, METEOR is missing.

    Raises:
        ValueError: if the two do not have the same number of instances, or none, or if an
            instance has no reference.
    """
    if not predictions or len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} predictions for {len(references)} instances with references; "
            "expected one for each"
        )
    if any(isinstance(texts, str) for texts in references):
        raise ValueError("references: a list of texts for each instance, not a text alone")
    references = [list(texts) for texts in references]
    if not all(references):
        raise ValueError(f"instance {references.index([]) + 1} has no reference")
    scores = {"BLEU": bleu(predictions, references), "NIST": nist(predictions, references)}
    java = _java_runs()
    if not java:
        logger.warning(_NO_JAVA)
    words = _stanford_words if java else _nltk_words
    answers, truths = _tokenized(predictions, references, words)
    if java:
        scores["METEOR"] = _meteor(truths, answers)
    for name, metric in (("ROUGE_L", Rouge()), ("CIDEr", Cider())):
        scores[name] = float(metric.compute_score(truths, answers)[0])
    return scores


def bleu(predictions: list[str], references: list[list[str]]) -> float:
    """Return BLEU-4 of lower-cased texts, as mteval-v13a has it (0 to 1)."""
    streams = [
        [texts[i] if i < len(texts) else None for texts in references]
        for i in range(max(map(len, references)))
    ]
    return corpus_bleu(predictions, streams, lowercase=True).score / 100


def nist(predictions: list[str], references: list[list[str]]) -> float:
    """Return NIST-5 of lower-cased texts, as mteval-v13a has it.

    Source: Doddington, HLT 2002, equations 2 and 3: the information of the n-grams that a text
    shares with any of its references, over the number of its n-grams, summed over n = 1 to 5,
    times a penalty for texts shorter than the references. The length that they are compared
    with is instances times mean length of *all* references, to mteval's effect; the mean over
    instances of each one's mean length is what the option ``-p`` of e2e-metrics takes.
    """
    tokenizer = Tokenizer13a()
    answers = [tokenizer(text.lower()).split() for text in predictions]
    truths = [[tokenizer(text.lower()).split() for text in texts] for texts in references]
    occurrences: Counter = Counter()
    for words in (words for texts in truths for words in texts):
        occurrences.update(_ngrams(words))
        occurrences[()] += len(words)
    information = [0.0] * (MAX_NGRAM + 1)
    for words, texts in zip(answers, truths, strict=True):
        known: Counter = Counter()
        for reference in texts:
            known |= _ngrams(reference)
        for ngram, count in (_ngrams(words) & known).items():
            rarity = math.log2(occurrences[ngram[:-1]] / occurrences[ngram])
            information[len(ngram)] += count * rarity
    total = 0.0
    for n in range(1, MAX_NGRAM + 1):
        candidates = sum(max(0, len(words) - n + 1) for words in answers)
        total += information[n] / max(1, candidates)
    mean_length = occurrences[()] / sum(map(len, truths))
    return total * _length_penalty(sum(map(len, answers)), len(truths) * mean_length)


def _ngrams(words: list[str]) -> Counter:
    """Count the n-grams of a text, for n = 1 to 5."""
    return Counter(
        tuple(words[start : start + n])
        for n in range(1, MAX_NGRAM + 1)
        for start in range(len(words) - n + 1)
    )


def _length_penalty(length: int, reference_length: float) -> float:
    """Return a half at two thirds of the references' length, 1 from their length on."""
    if length == 0 or reference_length == 0:
        return 0.0
    shortfall = math.log(min(1.0, length / reference_length))
    return math.exp(math.log(0.5) * (shortfall / math.log(1.5)) ** 2)


def _java_runs() -> bool:
    """Say whether Java can be started; the name alone may be a stub, as on macOS."""
    if shutil.which("java") is None:
        return False
    return subprocess.run(["java", "-version"], capture_output=True, check=False).returncode == 0


def _tokenized(predictions, references, words) -> tuple[dict, dict]:
    """Return predictions and references as pycocoevalcap takes them: instance -> texts.

    Each text is its words, lower-cased, without punctuation, with spaces between them.
    """
    texts = [*predictions, *(text for texts in references for text in texts)]
    clean = [
        " ".join(word for word in line if word not in ptbtokenizer.PUNCTUATIONS)
        for line in words([" ".join(text.split()) for text in texts])
    ]
    rest = iter(clean[len(predictions) :])
    truths = {index: [next(rest) for _ in texts] for index, texts in enumerate(references)}
    return {index: [clean[index]] for index in range(len(predictions))}, truths


def _stanford_words(texts: list[str]) -> list[list[str]]:
    """Tell words by the Penn Treebank tokenizer of CoreNLP 3.4.1, which e2e-metrics uses."""
    jar = Path(ptbtokenizer.__file__).with_name(ptbtokenizer.STANFORD_CORENLP_3_4_1_JAR)
    run = subprocess.run(
        ["java", "-cp", str(jar), _STANFORD_TOKENIZER, "-preserveLines", "-lowerCase"],
        input="".join(text + "\n" for text in texts),
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    lines = run.stdout.removesuffix("\n").split("\n")
    return [line.split() for line in lines]


def _nltk_words(texts: list[str]) -> list[list[str]]:
    """Tell words by nltk's Penn Treebank tokenizer, helped to do as Stanford's does.

    Stanford's ends sentences within a text and takes quotes and dashes off words, and writes a
    pound sign as #.
    """
    tokenizer = TreebankWordTokenizer()
    lines = []
    for text in texts:
        text = re.sub("[£#] *", "# ", text.lower())
        text = re.sub(r"(?<!\w)['.-](?=\w)", " ", text)  # a quote, dash or period before a word
        text = re.sub(r"(\w\w|\d)['-]*\.+['-]*(?=[\s\"')]|$)", r"\1 ", text)  # a sentence's end
        text = re.sub(r"(?<=\w)-(?!\w)", " ", text)  # a dash after a word
        lines.append(tokenizer.tokenize(text))
    return lines


def _meteor(truths: dict, answers: dict) -> float:
    metric = Meteor()
    try:
        return metric.compute_score(truths, answers)[0]
    finally:
        for stream in (metric.meteor_p.stdout, metric.meteor_p.stderr):
            stream.close()


def main(argv: list[str] | None = None) -> None:
    """Score a file of predictions, and print the scores as JSON."""
    from e2e_data import DataError, read_predictions, read_references

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--references",
        type=Path,
        required=True,
        help="csv with the columns mr and ref, or text with a blank line between instances",
    )
    parser.add_argument(
        "--predictions",
        type=Path,
        required=True,
        help="tsv with MR and output below a header, or text with one output a line",
    )
    options = parser.parse_args(argv)
    try:
        mrs, references = read_references(options.references)
        answered, predictions = read_predictions(options.predictions)
        if len(predictions) != len(references):
            raise DataError(
                f"{options.predictions}: {len(predictions)} outputs for {len(references)} "
                f"instances of {options.references}"
            )
        if mrs is not None and answered is not None:
            for number, pair in enumerate(zip(answered, mrs, strict=True), start=2):
                if pair[0] != pair[1]:
                    raise DataError(
                        f"{options.predictions}, line {number}: the MR {pair[0]!r} "
                        f"is not that of the references, {pair[1]!r}"
                    )
        print(json.dumps(score(predictions, references), indent=2))
    except DataError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    main()
