"""A paired bootstrap over test samples: how much of a metric is the doing of the samples that happen to be there."""

from typing import Any

import numpy as np

from dptrain.batches.inputs import as_array, is_array
from dptrain.errors import ConfigError
from dptrain.models import Model
from dptrain.models.scoring import scorer
from dptrain.random import Purpose, stream
from dptrain.sweeps.intervals import counts_samples

DRAWS = 200
# Elements of predictions that are kept at most: beyond, so many samples leave little to chance.
_MOST = 1 << 26


def resampled(model: Model, x: Any, y: Any, metric: str) -> list[float]:
    """Return a metric of a model on `DRAWS` draws of the test samples with replacement, the same for every model.

    Of accuracies nothing is drawn: their chance is binomial.

    Args:
        model: compiled, with its weights.
        x: as `Model.predict`.
        y: the samples' targets.
        metric: log key, without "val_".

    Returns:
        As many numbers as draws; none where predictions cannot be kept or scored: they are several, or too many, or
        the model says itself how it is scored.
    """
    if counts_samples(metric) or not is_array(y):
        return []
    targets = as_array(y, "y")
    predictions = model.predict(x, verbose=0)
    if not isinstance(predictions, np.ndarray) or predictions.size > _MOST or len(predictions) != len(targets):
        return []
    try:
        scoring = scorer(model)
    except ConfigError:
        return []
    draws = []
    random = stream(0, Purpose.RESAMPLING)
    try:
        for _ in range(DRAWS):
            rows = random.integers(len(targets), size=len(targets))
            logs = scoring.evaluate(predictions[rows], targets[rows], verbose=0, return_dict=True)
            assert isinstance(logs, dict)
            if metric not in logs:
                return []
            draws.append(float(logs[metric]))
    finally:
        scoring._put_on(None)  # metrics may be those of the model
    return draws
