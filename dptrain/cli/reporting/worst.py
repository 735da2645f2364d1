"""The held-out samples that a model is most wrong about: what they are, as a picture or as their row."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.cli.reporting.columns import plain_number, row_of
from dptrain.cli.reporting.quality import Quality
from dptrain.data.preprocessing import Preprocessing
from dptrain.sweeps.reporting import drawing, formatting

Array = npt.NDArray[Any]

MOST = 20
# The longest side of a picture, the shortest of what is taken for one; numbers and letters of other samples.
_SIDE, _LEAST_SIDE, _NUMBERS, _LETTERS = 96, 8, 8, 300


@dataclass(frozen=True)
class WorstSample:
    """A sample that the model is wrong about.

    Attributes:
        row: its index among the held-out samples, from 0, as `predict` counts.
        true, predicted: in words, with the probability of a class.
        error: in words: the true class's probability, or predicted minus true.
        picture: a data URI; empty where it is none.
        cells: of a table, by column.
        text: of other samples.
    """

    row: int
    true: str
    predicted: str
    error: str
    picture: str = ""
    cells: dict[str, str] | None = None
    text: str = ""


def worst_samples(quality: Quality, preprocessing: Preprocessing | None) -> list[WorstSample]:
    """Return the wrong samples of highest loss, or those of the largest error of the first target."""
    assert quality.held_out is not None
    if quality.classes is not None:
        outcome = quality.classes
        order = np.argsort(-np.where(outcome.is_wrong > 0, outcome.losses, -1), kind="stable")[:MOST]
        rows = [int(row) for row in order if outcome.is_wrong[row]]
        words = [
            (
                outcome.names[outcome.labels[row]],
                f"{outcome.names[outcome.predicted[row]]} ({_probability(outcome, row, outcome.predicted[row])})",
                f"the true class had {_probability(outcome, row, outcome.labels[row])}",
            )
            for row in rows
        ]
    else:
        numbers = quality.numbers[0]
        order = np.argsort(-numbers.errors, kind="stable")[:MOST]
        rows, digits = [int(numbers.rows[place]) for place in order], numbers.digits
        words = [
            (
                digits.value(numbers.true[place]),
                digits.value(numbers.predicted[place]),
                f"off by {'+' if numbers.residuals[place] > 0 else ''}{digits.value(numbers.residuals[place])}",
            )
            for place in order
        ]
    if not rows:
        return []
    samples = np.asarray(quality.held_out.x[np.array(rows)])
    return [
        WorstSample(row, *said, **_shown(sample, preprocessing))
        for row, said, sample in zip(rows, words, samples, strict=True)
    ]


def _probability(outcome: Any, row: int, label: int) -> str:
    value = float(outcome.probabilities[row, label])
    return f"{100 * value:.1f} %" if np.isfinite(value) else "no number"


def _shown(sample: Array, preprocessing: Preprocessing | None) -> dict[str, Any]:
    if preprocessing is not None and preprocessing.kind == "table":
        cells = row_of(preprocessing, sample)
        return {"cells": {name: formatting.shortened(cell, _LETTERS) for name, cell in cells.items()}}
    if _is_picture(sample) and drawing.why_not() is None:
        return {"picture": f"data:image/png;base64,{base64.b64encode(drawing.png(_pixels(sample))).decode()}"}
    values = sample.reshape(-1)
    more = f", … ({values.size:,} numbers)" if values.size > _NUMBERS else ""
    return {"text": ", ".join(map(plain_number, values[:_NUMBERS])) + more}


def _is_picture(sample: Array) -> bool:
    has_sides = sample.ndim in (2, 3) and min(sample.shape[:2]) >= _LEAST_SIDE
    return has_sides and (sample.ndim == 2 or sample.shape[2] in (1, 3)) and sample.dtype.kind in "uif"


def _pixels(sample: Array) -> npt.NDArray[np.uint8]:
    """Return a small picture, uint8 (height, width, 3); other numbers than bytes are stretched to all of the range."""
    step = -(-max(sample.shape[:2]) // _SIDE)
    pixels = sample[::step, ::step]
    if pixels.dtype != np.uint8:
        pixels = np.nan_to_num(pixels.astype(np.float64), posinf=0, neginf=0)
        low, high = pixels.min(), pixels.max()
        pixels = (255 * (pixels - low) / (high - low or 1)).astype(np.uint8)
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))
