"""What a sweep has found: its files, and the same as an object."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dptrain.errors import ConfigError, ExitCode
from dptrain.sweeps import statistics
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.findings import sentences
from dptrain.sweeps.messages import ending_fact
from dptrain.sweeps.report import MEASURES, write_report, write_trials_csv
from dptrain.sweeps.sweep import Plan

# What a swept field cannot be called, as something else is.
RESERVED = frozenset({"trial", "run", "seed", "epoch", "status", "reason", "metrics", *MEASURES})


@dataclass(frozen=True)
class SweepResult:
    """All trials and runs of a sweep, the same on every rank.

    Attributes:
        metric: key of the logs that trials are compared by.
        mode: "max" or "min".
        trials: by number: "trial", the swept fields, "n", "mean", "std", "ci_low", "ci_high", "median", "best",
            "seconds", "failed", "epochs_trained"; None where there is no value.
        runs: by number: "run", "trial", "seed", the swept fields, "status", "epochs_trained", "seconds", "reason",
            "metrics" (the last of the logs).
        ranking: numbers of the trials, the best first.
        findings: which differences are significant, in sentences.
        exit_code: 0 if every run succeeded, else that of the first that did not.
    """

    metric: str
    mode: str
    trials: Sequence[Mapping[str, Any]]
    runs: Sequence[Mapping[str, Any]]
    ranking: Sequence[int]
    findings: Sequence[str]
    exit_code: int

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The best trial; None where no trial has a value."""
        if not self.ranking or self.trials[self.ranking[0]]["mean"] is None:
            return None
        return self.trials[self.ranking[0]]

    def to_pandas(self) -> Any:
        """Return the runs as a DataFrame, one row each, their metrics as columns.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError("to_pandas: pandas is not installed: pip install pandas") from error
        return pandas.DataFrame(
            [{k: v for k, v in run.items() if k != "metrics"} | run["metrics"] for run in self.runs]
        )


def conclude(directory: SweepDirectory, plan: Plan, facts: Mapping[str, Any], repeat: str) -> SweepResult:
    """Write trials.csv and report.html; return what they say.

    Args:
        directory: of the sweep.
        plan: of the sweep.
        facts: for the report: versions, devices, ...
        repeat: for the report: how one run is repeated.

    Raises:
        OutputError: a file cannot be written.
    """
    trials, endings = directory.trials, directory.endings
    summaries = statistics.summarize(trials, endings, plan.metric, plan.mode)
    write_trials_csv(directory.path / "trials.csv", trials, summaries, plan.fields)
    write_report(
        directory.path / "report.html",
        trials,
        endings,
        directory.epochs(),
        metric=plan.metric,
        mode=plan.mode,
        fields=plan.fields,
        facts=facts,
        repeat=repeat,
    )
    comparisons = statistics.compare(summaries, endings, plan.metric, plan.mode)
    by_trial = {summary.trial: summary for summary in summaries}
    settings = {trial.number: dict(trial.setting) for trial in trials}
    last = sorted(statistics.last_endings(endings), key=lambda ending: ending.run.number)
    failed = next((ending.exit_code or int(ExitCode.INTERNAL) for ending in last if not ending.status.is_success), 0)
    return SweepResult(
        plan.metric,
        plan.mode,
        [
            {"trial": number, **setting}
            | {key: value for key, value in asdict(by_trial[number]).items() if key not in ("trial", "complete")}
            for number, setting in settings.items()
        ],
        [_run(ending_fact(ending), settings[ending.run.trial]) for ending in last],
        [summary.trial for summary in statistics.rank(summaries, plan.mode)],
        sentences(trials, summaries, comparisons, plan.metric, plan.mode),
        failed,
    )


def _run(fact: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    number, trial, seed = fact["run"]
    kept = {key: fact[key] for key in ("status", "seconds", "reason", "metrics")}
    return {"run": number, "trial": trial, "seed": seed, **setting, "epochs_trained": fact["epochs"], **kept}
