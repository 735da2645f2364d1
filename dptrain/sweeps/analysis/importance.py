"""Share of the variance between trials that each field explains: Optuna's fANOVA (extra `optuna`).

Source: F. Hutter, H. Hoos and K. Leyton-Brown, "An efficient approach for assessing hyperparameter importance", ICML
2014: a random forest predicts the value from the setting, and the variance of its predictions over the whole range is
split among the fields.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dptrain.sweeps.adaptive import to_optuna
from dptrain.sweeps.analysis.statistics import Summary
from dptrain.sweeps.records import Trial
from dptrain.sweeps.reporting.fields import Field, is_number
from dptrain.sweeps.space import Floats, Integers

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

# Complete trials without which a forest has nothing to learn from.
FEWEST = 8


def installed() -> bool:
    """Return whether Optuna and scikit-learn are installed."""
    try:
        import optuna  # noqa: F401
        import sklearn.ensemble  # noqa: F401  what Optuna's fANOVA needs
    except ImportError:
        return False
    return True


def importances(trials: Sequence[Trial], summaries: Sequence[Summary], fields: Sequence[Field]) -> Mapping[str, float]:
    """Return each field's share of the variance of complete trials' means, the greatest first; they add up to 1."""
    from optuna import create_study, logging
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances
    from optuna.trial import create_trial

    means = {summary.trial: summary.mean for summary in summaries if summary.complete and summary.mean is not None}
    if len(means) < FEWEST or len(set(means.values())) < 2 or not fields:
        return {}
    distributions = {field.name: _distribution(field) for field in fields}
    loud = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        study = create_study()
    finally:
        logging.set_verbosity(loud)
    for trial in trials:
        if trial.number in means:
            params = {field.name: _parameter(field, trial.setting.get(field.name)) for field in fields}
            with suppress(ValueError):  # a value that is not in the range, which was another one then
                study.add_trial(create_trial(params=params, distributions=distributions, value=means[trial.number]))
    if len(study.trials) < FEWEST:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's and Optuna's about their own insides
        by_field: Mapping[str, float] = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))
    return by_field


def _is_scale(field: Field) -> bool:
    """Return whether a field's values are numbers on a continuous scale."""
    if field.drawn_from is not None:
        return True
    return all(map(is_number, field.values)) and min(field.values) < max(field.values)


def _distribution(field: Field) -> "BaseDistribution":
    if field.drawn_from is not None:
        return to_optuna(field.drawn_from)
    if _is_scale(field):
        return to_optuna(Floats(min(field.values), max(field.values), field.is_log))
    from optuna.distributions import CategoricalDistribution

    return CategoricalDistribution([json.dumps(value) for value in field.values])


def _parameter(field: Field, value: Any) -> Any:
    if not _is_scale(field):
        return json.dumps(value)
    return value if isinstance(field.drawn_from, Integers) else float(value)
