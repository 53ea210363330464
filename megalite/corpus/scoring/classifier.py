"""A classifier of two samples: how likely a text comes from the good one rather than from the bad one.

    good, bad --hash words and pairs--> logistic regression on 80 % --> calibration on 10 % --> report on the last 10 %

Good is a text like those the user trusts (references of Wikipedia, textbooks, instructions), bad a text like the bulk
of the crawl; GPT-3 (Brown et al. 2020, appendix A) and DCLM (Li et al. 2024) choose their data so. A linear model on
hashed words and pairs is about what the latter's fastText is. It is a convex problem, whose one optimum is found by
L-BFGS (Liu and Nocedal 1989) without a learning rate or a seed. The two classes weigh the same however many documents
each has, so a score is a probability for even odds.

Calibration is Platt's (1999): a slope and an offset fitted on documents that training has not seen, and folded into the
weights. Which documents are held out is decided by a hash of their text.

Another use of the same is to find what must not stay: the harmful sample then stands in the place of the good one, and
the score is the probability of being harmful.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash
from pydantic import TypeAdapter

from megalite.arrays import DAMAGE
from megalite.corpus.scoring.logistic import (
    area_under_curve,
    calibrate,
    class_weights,
    dot,
    log_losses,
    minimize,
    sigmoid,
)
from megalite.errors import DataError
from megalite.stations.tasks import replacing
from megalite.texts import Texts

FORMAT = 1

CALIBRATION_SHARE = TEST_SHARE = 0.1
"""Share of each sample that is held out to calibrate on, and to report on."""

MIN_DOCUMENTS = 50
"""Fewest documents of a sample: five to calibrate on and five to test on."""

GRADIENT_TOLERANCE = 1e-6
"""Where the fit ends, by the scaled gradient: scores are then within some 1e-4 of those of the exact optimum."""


@dataclass(frozen=True)
class ClassifierReport:
    """How a classifier does on the documents held out for testing, of both classes alike."""

    accuracy: float
    """Share on the right side of 0.5."""
    auc: float
    """Probability that a good document scores above a bad one (area under the ROC curve)."""
    log_loss: float
    """Mean -log of the probability given to the right class, in nats; 0.693 is guessing."""
    test_good: int
    """Of the good sample, held out."""
    test_bad: int
    recall: float | None = None
    """Share of the good ones that score above 0.5; None in a model of an older version, as below."""
    precision: float | None = None
    """Share of the good ones among those that score above 0.5, at even odds. Where they are rarer it is lower."""


@dataclass(frozen=True)
class ClassifierSettings:
    """What a classifier is, besides its weights."""

    hash_bits: int
    l2: float
    bias: float
    num_good: int
    """Documents of the good sample, held-out ones included."""
    num_bad: int
    report: ClassifierReport
    format: int = FORMAT


class Classifier:
    """A calibrated linear classifier over hashed words and pairs.

    Args:
        weights: float32 [2^hash_bits].
        settings: what it is.
    """

    higher_is_better = True

    def __init__(self, weights: np.ndarray, settings: ClassifierSettings):
        self.weights = weights
        self.settings = settings

    def score(self, texts: Texts) -> np.ndarray:
        """Probability of being good of each text, float32 [texts]; 0 for a text without a word."""
        from megalite.corpus.scoring.classifier_kernel import logits
        from megalite.corpus.scoring.words import hash_batches

        parts = [logits(*batch, self.weights, self.settings.bias) for batch in hash_batches(texts)]
        return sigmoid(np.concatenate([np.zeros(0), *parts])).astype(np.float32)

    def save(self, path: Path) -> None:
        """Write the classifier as one .npz; the same one gives the same bytes."""
        settings = json.dumps(asdict(self.settings))
        with replacing(path) as partial, open(partial, "wb") as file:
            np.savez(file, weights=self.weights, settings=np.array(settings))

    @classmethod
    def load(cls, path: Path) -> Classifier:
        """Read a classifier.

        Raises:
            DataError: no such file, not a classifier, or one of another format.
        """
        if not path.is_file():
            raise DataError(f"{path}: no such file; expected a classifier (.npz) that was trained before")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                weights, settings = arrays["weights"], json.loads(str(arrays["settings"]))
            if (found := settings.get("format")) != FORMAT:
                raise DataError(f"{path}: format {found!r:.40}, expected {FORMAT}; train it again")
            checked = TypeAdapter(ClassifierSettings).validate_python(settings)
        except DataError:
            raise
        except (OSError, *DAMAGE) as error:
            raise DataError(f"{path}: damaged, or not a classifier ({error}); train it again") from error
        if weights.dtype != np.float32 or weights.shape != (2**checked.hash_bits,):
            raise DataError(
                f"{path}: damaged: weights of shape {weights.shape} and {weights.dtype}, expected "
                f"{2**checked.hash_bits} of float32; train it again"
            )
        return cls(weights, checked)


def train_classifier(
    good: Iterable[Texts],
    bad: Iterable[Texts],
    *,
    hash_bits: int = 20,
    l2: float = 1e-7,
    names: tuple[str, str] = ("good", "bad"),
) -> Classifier:
    """Train a classifier.

    Args:
        good: texts in batches; those without a word are left out. Memory: about 6 bytes a byte of text.
        bad: likewise.
        hash_bits: 2^hash_bits buckets of 4 bytes each.
        l2: pull of all weights towards 0: the loss is the mean log loss + l2 / 2 * the sum of squared weights.
        names: of the samples, for messages.

    Raises:
        DataError: a sample has too few documents, or the two cannot be told apart.
    """
    samples = [_read_sample(sample, name, 1 << hash_bits) for sample, name in zip((good, bad), names, strict=True)]
    training, calibration, testing = (SparseRows.join([sample[part] for sample in samples]) for part in range(3))
    labels = [np.repeat([1.0, 0.0], [sample[part].size for sample in samples]) for part in range(3)]
    weights = fit_weights(training, labels[0], 1 << hash_bits, l2)
    slope, offset = calibrate(calibration.logits(weights), labels[1])
    if slope <= 0.0:
        raise DataError(
            f"the {names[0]} and the {names[1]} sample cannot be told apart: on documents held out, the classifier is "
            "no better than chance. Give samples that differ more, or larger ones"
        )
    weights = (slope * weights).astype(np.float32)
    settings = ClassifierSettings(
        hash_bits=hash_bits,
        l2=l2,
        bias=offset,
        num_good=sum(part.size for part in samples[0]),
        num_bad=sum(part.size for part in samples[1]),
        report=_report(testing.logits(weights) + offset, labels[2]),
    )
    return Classifier(weights, settings)


@dataclass(frozen=True)
class SparseRows:
    """Features of some texts, in compressed rows."""

    borders: np.ndarray
    buckets: np.ndarray
    shares: np.ndarray

    @property
    def size(self) -> int:
        """Number of texts."""
        return self.borders.size - 1

    def logits(self, weights: np.ndarray) -> np.ndarray:
        """Mean weight of each text, float64 [texts]."""
        from megalite.corpus.scoring.classifier_kernel import row_logits

        return row_logits(self.borders, self.buckets, self.shares, weights)

    def take(self, texts: np.ndarray) -> SparseRows:
        """The chosen texts, in this order."""
        lengths = np.diff(self.borders)[texts]
        borders = np.concatenate([[0], np.cumsum(lengths)])
        entries = np.arange(borders[-1]) + np.repeat(self.borders[texts] - borders[:-1], lengths)
        return SparseRows(borders, self.buckets[entries], self.shares[entries])

    @classmethod
    def join(cls, rows: Iterable[SparseRows]) -> SparseRows:
        """One after the other."""
        rows = list(rows)
        starts = np.cumsum([0, *(each.borders[-1] for each in rows)])
        borders = [each.borders[:-1] + start for each, start in zip(rows, starts, strict=False)]
        return cls(
            np.concatenate([*borders, starts[-1:]]),
            np.concatenate([each.buckets for each in rows]),
            np.concatenate([each.shares for each in rows]),
        )


def _read_sample(batches: Iterable[Texts], name: str, num_buckets: int) -> tuple[SparseRows, SparseRows, SparseRows]:
    """The documents of a sample to train on, to calibrate on and to test on."""
    from megalite.corpus.scoring.classifier_kernel import extract
    from megalite.corpus.scoring.words import hash_batches

    rows, hashes = [], []
    for texts in batches:
        rows += [SparseRows(*extract(*batch, num_buckets)) for batch in hash_batches(texts)]
        hashes += [xxhash.xxh3_64_intdigest(texts.bytes_of(index)) for index in range(len(texts))]
    order = np.argsort(np.array(hashes, np.uint64), kind="stable")
    if rows:
        joined = SparseRows.join(rows)
        order = order[np.diff(joined.borders)[order] > 0]
    if order.size < MIN_DOCUMENTS:
        raise DataError(
            f"the {name} sample has {order.size} documents with a word in them; at least {MIN_DOCUMENTS} are needed, "
            "and some thousands are better; is text_field right for its files?"
        )
    num_calibration, num_test = int(CALIBRATION_SHARE * order.size), int(TEST_SHARE * order.size)
    parts = np.split(order, [num_calibration, num_calibration + num_test])
    calibration, testing, training = (joined.take(np.sort(part)) for part in parts)
    return training, calibration, testing


def fit_weights(rows: SparseRows, labels: np.ndarray, num_buckets: int, l2: float) -> np.ndarray:
    """Weights of the optimum, float64 [num_buckets]; the bias is fitted too, and left to calibration to find again."""
    from megalite.corpus.scoring.classifier_kernel import spread

    used = np.unique(rows.buckets)
    place = np.zeros(num_buckets, np.uint32)
    place[used] = np.arange(used.size)
    rows = SparseRows(rows.borders, place[rows.buckets], rows.shares)
    each = class_weights(labels)
    # Rare features have far less curvature than frequent ones. Parameters are scaled to have about the same.
    curvature = spread(rows.borders, rows.buckets, rows.shares**2, each / 4, used.size) + l2
    scale = np.append(1 / np.sqrt(curvature), 2.0)

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        weights, bias = np.split(parameters * scale, [-1])
        outputs = rows.logits(weights) + bias
        slopes = each * (sigmoid(outputs) - labels)
        gradient = spread(rows.borders, rows.buckets, rows.shares, slopes, weights.size) + l2 * weights
        value = dot(each, log_losses(outputs, labels)) + 0.5 * l2 * dot(weights, weights)
        return value, np.append(gradient, slopes.sum()) * scale

    fitted = minimize(loss, np.zeros(used.size + 1), tolerance=GRADIENT_TOLERANCE)
    weights = np.zeros(num_buckets)
    weights[used] = (fitted * scale)[:-1]
    return weights


def _report(logits: np.ndarray, labels: np.ndarray) -> ClassifierReport:
    right = (logits > 0) == (labels == 1)
    recall, false_alarms = float(right[labels == 1].mean()), 1 - float(right[labels == 0].mean())
    return ClassifierReport(
        accuracy=float(right[labels == 1].mean() + right[labels == 0].mean()) / 2,
        auc=area_under_curve(logits, labels),
        log_loss=dot(class_weights(labels), log_losses(logits, labels)),
        test_good=int(labels.sum()),
        test_bad=int((1 - labels).sum()),
        recall=recall,
        precision=recall / (recall + false_alarms) if recall + false_alarms else 0.0,
    )
