"""Measures a trained model's quality on held-out samples, for the page about its run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dptrain.cli import predictions
from dptrain.cli.building import Splits
from dptrain.cli.reporting.baselines import Baseline, boosting, constant, sampled
from dptrain.cli.reporting.importance import Importance, importances, shuffled_rows
from dptrain.cli.reporting.outcomes import ClassOutcome, NumberOutcome
from dptrain.cli.streams import StreamSplit
from dptrain.comm import Communicator
from dptrain.data.loading import LoadedData, Split
from dptrain.program import tree

if TYPE_CHECKING:
    from dptrain.models import Model

Array = npt.NDArray[Any]
# Targets of a regression that the page shows, samples that models are compared on, and rows of a prediction that
# shuffles.
_MOST_TARGETS, _MOST_COMPARED, _BATCH = 4, 20_000, 2048


@dataclass(frozen=True)
class Quality:
    """What was measured; `why_not` says why nothing was.

    Attributes:
        held_out: the samples, None without.
        classes: of a classifier.
        numbers: of a regression, by target.
        importances: of a table's columns, of `shuffled` rows.
        baselines: other models' answers to the samples `compared`.
        no_boosting: why gradient boosting is not among them; empty where it is, or is not for such data.
    """

    why_not: str = ""
    held_out: Split | None = None
    classes: ClassOutcome | None = None
    numbers: Sequence[NumberOutcome] = ()
    importances: Sequence[Importance] = ()
    shuffled: int = 0
    baselines: Sequence[Baseline] = ()
    compared: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    no_boosting: str = ""


def held_out_of(splits: Splits) -> Split:
    """Return the samples that a run's quality is measured on: the test part, which may have served as validation."""
    return splits.validation if splits.test is None else splits.test


def measure(
    model: "Model", data: LoadedData, splits: Splits, comm: Communicator, batch_size: int, outputs: Any = None
) -> Quality:
    """Return a model's quality without baselines; `outputs` are those for the held-out samples if known. Collective."""
    held_out = held_out_of(splits)
    if isinstance(splits.train, StreamSplit):
        return Quality("samples are read from shards as a stream, of which none are kept")
    if held_out.total is not None:
        return Quality("with --sharding static each rank has samples of its own, which are not gathered")
    if not len(held_out):
        return Quality("there are no held-out samples")
    held_out = held_out.selected()
    if outputs is None:
        outputs = model.predict(held_out.x, batch_size=batch_size, verbose=0)
    classes, numbers, why_not = comm.agree("report", lambda: _outcome(model, data, held_out.y, outputs))
    if why_not:
        return Quality(why_not, held_out)
    important, shuffled = _importances(model, data, held_out, classes)
    return Quality("", held_out, classes, numbers, important, shuffled)


def beside_baselines(measured: Quality, data: LoadedData, splits: Splits) -> Quality:
    """Return a quality with other models' answers beside it, which takes some seconds for a large table."""
    held_out = measured.held_out
    if measured.why_not or held_out is None:
        return measured
    compared = sampled(len(held_out), _MOST_COMPARED)
    others, no_boosting = _baselines(data, splits.train, held_out, compared, measured.classes)
    return replace(measured, baselines=others, compared=compared, no_boosting=no_boosting)


def _outcome(
    model: "Model", data: LoadedData, y: Array, outputs: Any
) -> tuple[ClassOutcome | None, list[NumberOutcome], str]:
    """Return what a model says of classes or of numbers, or why this page cannot show it."""
    if not isinstance(outputs, np.ndarray):
        return None, [], f"the model has {len(tree.leaves(outputs))} outputs; this page shows one"
    means = predictions.meaning(model)
    probabilities = predictions.probabilities(model, outputs)
    is_label = y.size == len(y) and (y.dtype.kind in "iub" or data.task != "regression")
    if probabilities is not None and is_label:
        labels, width = y.reshape(-1).astype(np.int64), probabilities.shape[1]
        if labels.min() < 0 or labels.max() >= width:
            return None, [], f"labels from {labels.min()} to {labels.max()} do not fit {width} outputs"
        names = list(means.names) if len(means.names) == width else list(map(str, range(width)))
        return ClassOutcome(names, labels, probabilities), [], ""
    rows = outputs.reshape(len(outputs), -1)
    if data.task != "regression" or rows.shape[1] * len(y) != y.size:
        return None, [], f"outputs of shape {outputs.shape[1:]} are neither class probabilities nor targets"
    targets = y.reshape(len(y), -1)
    name = str(getattr(data.preprocessing, "target", None) or "target")
    names = [name] if targets.shape[1] == 1 else [f"{name} {index}" for index in range(targets.shape[1])]
    shown = names[:_MOST_TARGETS]
    return None, [NumberOutcome.of(name, targets[:, i], rows[:, i]) for i, name in enumerate(shown)], ""


def _importances(
    model: "Model", data: LoadedData, held_out: Split, classes: ClassOutcome | None
) -> tuple[list[Importance], int]:
    """Return the importance of a table's columns, and the number of rows that were shuffled. Collective."""
    preprocessing = data.preprocessing
    if preprocessing is None or preprocessing.kind != "table" or not isinstance(held_out.x, np.ndarray):
        return [], 0
    count = shuffled_rows(preprocessing, len(held_out))
    if not count:
        return [], 0
    rows = sampled(len(held_out), count)

    def predict(x: Array) -> Array:
        outputs: Array = model.predict(x, batch_size=_BATCH, verbose=0)
        return outputs

    def error(y: Array, outputs: Array) -> float:
        if classes is None:
            return float(np.abs(outputs.reshape(len(y), -1)[:, 0].astype(np.float64) - y).mean())
        probabilities = predictions.probabilities(model, outputs)
        assert probabilities is not None
        return float(ClassOutcome(classes.names, y.astype(np.int64), probabilities).losses.mean())

    targets = held_out.y.reshape(len(held_out.y), -1)[:, 0]
    return importances(predict, preprocessing, held_out.x[rows], targets[rows], error), count


def _baselines(
    data: LoadedData, train: Split, held_out: Split, compared: Array, outcome: ClassOutcome | None
) -> tuple[list[Baseline], str]:
    """Return other models' answers to some of the held-out samples, and why boosting is not among them."""
    train = train.selected() if isinstance(train.x, np.ndarray) else Split((), train.y[_rows_of(train)])
    classes = 0 if outcome is None else len(outcome.names)
    if train.y.size != len(train.y) or not len(train.y):
        return [], ""
    y = train.y.reshape(-1)
    answers = [constant(y, len(compared), classes)]
    preprocessing = data.preprocessing
    if preprocessing is None or preprocessing.kind != "table" or not isinstance(held_out.x, np.ndarray):
        return answers, ""
    other = boosting(preprocessing, train.x, y, held_out.x[compared], classes)
    return (answers, other) if isinstance(other, str) else ([*answers, other], "")


def _rows_of(split: Split) -> Any:
    return slice(None) if split.rows is None else split.rows
