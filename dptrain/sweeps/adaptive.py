"""Settings that are chosen as a sweep goes: Optuna's tree-structured Parzen estimator (extra `optuna`).

Source: Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011; Optuna's `TPESampler`.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dptrain.errors import ConfigError
from dptrain.random import Purpose, stream
from dptrain.runtime.extras import pip_install
from dptrain.sweeps.records import Setting, Trial
from dptrain.sweeps.scheduler import SettingSource
from dptrain.sweeps.space import Choice, Distribution, Floats, Integers

Mode = Literal["max", "min"]

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import TPESampler


class OptunaSource(SettingSource):
    """Settings that follow from the values of earlier ones.

    A setting depends on the seed, its number and what is known when it is asked for, and on nothing else: a sweep that
    is continued chooses as it would have chosen. With several trials at a time what is known depends on which ends
    first; a trial without a value yet counts as a bad one, which keeps trials at a time apart ("constant liar"). One
    that diverged counts as worse than all that have a value; one that failed otherwise is left out.

    Args:
        fields: name -> where its values come from.
        trials: how many settings there are.
        modes: whether a high or a low value is good; with several metrics, of each: all are optimized (Y. Ozaki et al.,
            "Multiobjective Tree-Structured Parzen Estimator", JAIR 73, 2022).
        seed: of the choices, 0 to 2**63 - 1.

    Raises:
        ConfigError: Optuna is not installed, or there is no field.
    """

    def __init__(
        self, fields: Mapping[str, Distribution], trials: int, modes: Mode | Sequence[Mode], seed: int = 0
    ) -> None:
        if not fields:
            raise ConfigError("an adaptive sweep needs a field to draw at random")
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(f"Optuna is not installed: {pip_install('optuna')}") from error
        all_modes = [modes] if isinstance(modes, str) else modes
        self._optuna = optuna
        self._fields = dict(fields)
        self._distributions = {name: to_optuna(field) for name, field in fields.items()}
        self._total = trials
        self._seed = seed
        loud = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._study = optuna.create_study(
                directions=["maximize" if mode == "max" else "minimize" for mode in all_modes], sampler=self._sampler(0)
            )
        finally:
            optuna.logging.set_verbosity(loud)

    @property
    def total(self) -> int:
        """How many settings there are."""
        return self._total

    def next(self, number: int) -> Setting | None:
        """Return the setting of a new trial; None once there are as many as asked for."""
        if number >= self._total:
            return None
        self._study.sampler = self._sampler(number)
        asked = self._study.ask(self._distributions)
        assert asked.number == number, f"Optuna's trial {asked.number} for trial {number}"
        return {name: _value(field, asked.params[name]) for name, field in self._fields.items()}

    def told(self, trial: Trial, value: float | None, *further: float) -> None:
        """Learn a trial's values."""
        if value is None:
            self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
        elif any(map(math.isnan, (value, *further))):
            # Optuna takes no NaN for a value. Pruned without one, a trial is behind all others for the estimator, which
            # leaves out failed ones.
            self._study.tell(trial.number, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial.number, [value, *further])

    def restore(self, trials: Sequence[Trial]) -> None:
        """Take up the trials of a journal."""
        for trial in trials:
            params = {name: _parameter(field, trial.setting[name]) for name, field in self._fields.items()}
            running = self._optuna.trial.TrialState.RUNNING
            self._study.add_trial(
                self._optuna.trial.create_trial(state=running, params=params, distributions=self._distributions)
            )

    def _sampler(self, number: int) -> "TPESampler":
        """Return a sampler whose random numbers are those of one trial."""
        seed = int(stream(self._seed, Purpose.SWEEP, number).integers(2**32))
        with warnings.catch_warnings():
            # It would warn that the constant liar is experimental.
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def to_optuna(distribution: Distribution) -> "BaseDistribution":
    """Return Optuna's word for a distribution; values of a choice are JSON texts, as Optuna has no lists."""
    import optuna

    match distribution:
        case Floats(low, high, log):
            return optuna.distributions.FloatDistribution(low, high, log=log)
        case Integers(low, high, log):
            return optuna.distributions.IntDistribution(low, high, log=log)
        case Choice(choices):
            return optuna.distributions.CategoricalDistribution([json.dumps(choice) for choice in choices])
    raise TypeError(f"{distribution} is no distribution that Optuna knows")


def _value(distribution: Distribution, parameter: Any) -> Any:
    return json.loads(parameter) if isinstance(distribution, Choice) else parameter


def _parameter(distribution: Distribution, value: Any) -> Any:
    return json.dumps(value) if isinstance(distribution, Choice) else value
