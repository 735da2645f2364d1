"""Paired bootstrap over test samples: the part of a metric's variance that is due to the samples."""

from typing import Any

import numpy as np

from dptrain.batches.inputs import as_array, is_array
from dptrain.errors import ConfigError
from dptrain.models import Model
from dptrain.models.cloning import scorer
from dptrain.random import Purpose, stream
from dptrain.sweeps.analysis.intervals import counts_samples

DRAWS = 200
# Most elements of kept predictions: so many samples leave little to chance.
_MOST = 1 << 26


def resampled(model: Model, x: Any, y: Any, metric: str) -> list[float]:
    """Return a metric on `DRAWS` bootstrap draws, the same for every model; [] for accuracies or if not scorable."""
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
        scoring._put_on(None)  # the metrics may be the model's
    return draws
