"""Generate a small sentiment set from a grammar, in the layout of SST-2's files.

Each sentence reviews something, and its label says whether the review is favourable. A single
word does not tell: negations turn it round, concessions and comparisons set a word of the other
sign beside it, and what others said is confirmed or rejected. Every template yields both labels
equally often. The things reviewed and the words of praise and blame differ between the training
and the validation set, so nothing can be learnt by heart: a model has to know what the words
mean and learn what the constructions do with them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LABELS = ("negative", "positive")


@dataclass(frozen=True)
class Lexicon:
    """The words of one split: what is reviewed, its parts, and words of praise and blame."""

    things: tuple[str, ...]
    parts: tuple[str, ...]
    people: tuple[str, ...]
    good: tuple[str, ...]
    bad: tuple[str, ...]


def _words(listed: str) -> tuple[str, ...]:
    return tuple(listed.split(", "))


TRAIN_WORDS = Lexicon(
    things=_words(
        "film, novel, restaurant, hotel, album, phone, lecture, museum, concert, laptop, "
        "garden tour, documentary, bakery, train ride, board game"
    ),
    parts=_words(
        "opening, service, design, ending, staff, sound, layout, pacing, atmosphere, price, "
        "presentation, second half"
    ),
    people=_words(
        "my brother, the critics, our neighbour, a colleague, the brochure, her editor, "
        "most visitors, the host"
    ),
    good=_words(
        "wonderful, excellent, charming, delightful, superb, enjoyable, lovely, impressive, "
        "pleasant, brilliant, refreshing, thoughtful, elegant, great, fascinating, reliable, "
        "amusing, splendid, satisfying, inspiring"
    ),
    bad=_words(
        "terrible, boring, awful, dull, disappointing, clumsy, annoying, poor, tedious, shabby, "
        "dreadful, messy, careless, unpleasant, lifeless, bad, frustrating, mediocre, confusing, "
        "bland"
    ),
)

DEV_WORDS = Lexicon(
    things=_words(
        "play, cafe, podcast, camera, exhibition, musical, campsite, workshop, magazine, "
        "ferry trip, puzzle book, headset"
    ),
    parts=_words(
        "beginning, decor, finish, location, crew, rhythm, packaging, first hour, lighting, "
        "organisation"
    ),
    people=_words("my aunt, the reporters, our guide, a friend, the leaflet, his teacher"),
    good=_words(
        "fantastic, terrific, gorgeous, marvellous, engaging, outstanding, fun, captivating, "
        "comfortable, clever, graceful, memorable, witty, magnificent"
    ),
    bad=_words(
        "horrible, dreary, lousy, sloppy, irritating, pathetic, ugly, weak, tiresome, "
        "uncomfortable, forgettable, pointless, miserable, atrocious"
    ),
)


class Filler:
    """Draws words for one sentence, no word twice."""

    def __init__(self, words: Lexicon, positive: bool, rng: random.Random) -> None:
        self.words = words
        self.positive = positive
        self.rng = rng
        self._used: set[str] = set()

    def _draw(self, choices: tuple[str, ...]) -> str:
        word = self.rng.choice([choice for choice in choices if choice not in self._used])
        self._used.add(word)
        return word

    def pick(self, *choices: str) -> str:
        """One of several wordings."""
        return self.rng.choice(choices)

    def thing(self) -> str:
        return self._draw(self.words.things)

    def part(self) -> str:
        return self._draw(self.words.parts)

    def person(self) -> str:
        return self._draw(self.words.people)

    def same(self) -> str:
        """A word of the label's sign."""
        return self._draw(self.words.good if self.positive else self.words.bad)

    def other(self) -> str:
        """A word of the opposite sign."""
        return self._draw(self.words.bad if self.positive else self.words.good)


def _plain(f: Filler) -> str:
    return f"the {f.part()} of the {f.thing()} was {f.pick('truly', 'quite', 'simply')} {f.same()}"


def _negated(f: Filler) -> str:
    turn = f.pick("was not", "was hardly", "was anything but", "was far from", "was never")
    return f"the {f.part()} of the {f.thing()} {turn} {f.other()}"


def _confirmed(f: Filler) -> str:
    how = f.pick("nobody could deny that", "there is no doubt that", "it was never disputed that")
    return f"{how} the {f.thing()} was {f.same()}"


def _denied(f: Filler) -> str:
    how = f.pick("nobody would claim that", "it is a myth that", "it is simply not true that")
    return f"{how} the {f.thing()} was {f.other()}"


def _although(f: Filler) -> str:
    link = f.pick("although", "even though", "while")
    return f"{link} the {f.part()} was {f.other()}, the {f.thing()} on the whole was {f.same()}"


def _despite(f: Filler) -> str:
    link = f.pick("although", "even though", "despite the fact that")
    return f"the {f.thing()} on the whole was {f.same()}, {link} its {f.part()} was {f.other()}"


def _but(f: Filler) -> str:
    link = f.pick("but in the end it was", "yet it turned out to be", "but i left finding it")
    return f"{f.person()} had called the {f.thing()} {f.other()}, {link} {f.same()}"


def _expected(f: Filler) -> str:
    link = f.pick("i had expected", "we had been told of", "people had told me of")
    word = f.other()
    article = "an" if word[0] in "aeiou" else "a"
    return f"{link} {article} {word} {f.thing()}, and how wrong that was"


def _right(f: Filler) -> str:
    verdict = f.pick("was right", "had a point", "did not exaggerate")
    return f"whoever called the {f.thing()} {f.same()} {verdict}, whatever {f.person()} said"


def _mistaken(f: Filler) -> str:
    verdict = f.pick("was mistaken", "had no idea", "must have been somewhere else")
    return f"whoever called the {f.thing()} {f.other()} {verdict}, whatever {f.person()} said"


def _better(f: Filler) -> str:
    compared = f.pick("unlike", "in contrast to")
    return f"{compared} the {f.thing()}, which was {f.other()}, this {f.thing()} was {f.same()}"


def _less(f: Filler) -> str:
    degree = f.pick("not nearly as", "far less", "nowhere near as")
    than = "than" if "less" in degree else "as"
    return f"this {f.thing()} was {degree} {f.other()} {than} {f.person()} made it sound"


TEMPLATES: tuple[Callable[[Filler], str], ...] = (
    _plain,
    _negated,
    _confirmed,
    _denied,
    _although,
    _despite,
    _but,
    _expected,
    _right,
    _mistaken,
    _better,
    _less,
)


@dataclass(frozen=True)
class Example:
    """A sentence, its label (1 is positive), and the number of the template it comes from."""

    sentence: str
    label: int
    template: int


def generate(words: Lexicon, count: int, seed: int) -> list[Example]:
    """Generate ``count`` different sentences, evenly over templates and labels, shuffled.

    Raises:
        ValueError: if the words do not yield that many sentences.
    """
    rng = random.Random(seed)
    examples: dict[str, Example] = {}
    for _ in range(20 * count):
        # Moves on only once a sentence is new, so that templates and labels stay even.
        template, label = divmod(len(examples) % (2 * len(TEMPLATES)), 2)
        sentence = TEMPLATES[template](Filler(words, label == 1, rng))
        examples.setdefault(sentence, Example(sentence, label, template))
        if len(examples) == count:
            shuffled = list(examples.values())
            rng.shuffle(shuffled)
            return shuffled
    raise ValueError(f"the grammar does not yield {count} different sentences")


def write_dataset(folder: Path, train_count: int, dev_count: int, seed: int) -> None:
    """Write ``train.tsv`` and ``dev.tsv`` as SST-2 has them."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = (
        ("train.tsv", generate(TRAIN_WORDS, train_count, seed)),
        ("dev.tsv", generate(DEV_WORDS, dev_count, seed + 1)),
    )
    for name, examples in splits:
        rows = [f"{example.sentence}\t{example.label}" for example in examples]
        (folder / name).write_text("\n".join(["sentence\tlabel", *rows, ""]), encoding="utf-8")
