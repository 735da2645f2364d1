"""Settings chosen while a sweep runs, by Optuna's `TPESampler` (extra `optuna`; Bergstra et al., NeurIPS 2011)."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dptrain.errors import ConfigError
from dptrain.random import Purpose, stream
from dptrain.runtime.extras import pip_install
from dptrain.sweeps.records import Setting, Trial
from dptrain.sweeps.scheduling.scheduler import SettingSource
from dptrain.sweeps.space import Choice, FieldDistribution, Floats, Integers

Mode = Literal["max", "min"]

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import TPESampler


class OptunaSource(SettingSource):
    """Settings chosen from the values of earlier trials.

    A setting depends only on the seed, its number and the values known at that time, so a continued sweep chooses as an
    uninterrupted one would. A running trial counts as bad ("constant liar"), which keeps concurrent trials apart.
    Several metrics are optimized together (Y. Ozaki et al., "Multiobjective Tree-Structured Parzen Estimator", JAIR 73,
    2022).
    """

    def __init__(
        self, fields: Mapping[str, FieldDistribution], trials: int, modes: Mode | Sequence[Mode], seed: int = 0
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
        """Number of settings."""
        return self._total

    def next(self, number: int) -> Setting | None:
        """Return the setting of a new trial; None after the last."""
        if number >= self._total:
            return None
        self._study.sampler = self._sampler(number)
        optuna_trial = self._study.ask(self._distributions)
        assert optuna_trial.number == number, f"Optuna's trial {optuna_trial.number} for trial {number}"
        return {name: _value(field, optuna_trial.params[name]) for name, field in self._fields.items()}

    def tell(self, trial: Trial, value: float | None, *further: float) -> None:
        """Report a trial's values."""
        if value is None:
            self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
        elif any(map(math.isnan, (value, *further))):
            # Optuna takes no NaN for a value. Pruned without one, a trial is behind all others for the estimator, which
            # leaves out failed ones.
            self._study.tell(trial.number, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial.number, [value, *further])

    def restore(self, trials: Sequence[Trial]) -> None:
        """Register the trials of a journal."""
        for trial in trials:
            params = {name: _parameter(field, trial.setting[name]) for name, field in self._fields.items()}
            running = self._optuna.trial.TrialState.RUNNING
            self._study.add_trial(
                self._optuna.trial.create_trial(state=running, params=params, distributions=self._distributions)
            )

    def _sampler(self, number: int) -> "TPESampler":
        seed = int(stream(self._seed, Purpose.SWEEP, number).integers(2**32))
        with warnings.catch_warnings():
            # Optuna warns that the constant liar is experimental.
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def to_optuna(distribution: FieldDistribution) -> "BaseDistribution":
    """Convert a distribution to Optuna's; choices become JSON texts, as Optuna has no lists."""
    import optuna

    match distribution:
        case Floats(low, high, log):
            return optuna.distributions.FloatDistribution(low, high, log=log)
        case Integers(low, high, log):
            return optuna.distributions.IntDistribution(low, high, log=log)
        case Choice(choices):
            return optuna.distributions.CategoricalDistribution([json.dumps(choice) for choice in choices])
    raise TypeError(f"{distribution} is not a distribution that Optuna supports")


def _value(distribution: FieldDistribution, parameter: Any) -> Any:
    return json.loads(parameter) if isinstance(distribution, Choice) else parameter


def _parameter(distribution: FieldDistribution, value: Any) -> Any:
    return json.dumps(value) if isinstance(distribution, Choice) else value
