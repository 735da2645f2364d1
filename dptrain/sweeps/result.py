"""Results of a sweep: its files, and the same as an object."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dptrain.errors import ConfigError, ExitCode
from dptrain.runtime import signals
from dptrain.runtime.text import counted
from dptrain.saving.run_folder import REPORT
from dptrain.sweeps.analysis import intervals, statistics
from dptrain.sweeps.analysis.pareto import Front, front_of
from dptrain.sweeps.directory import TRIALS, SweepDirectory
from dptrain.sweeps.records import Run, Setting, Trial
from dptrain.sweeps.reporting import formatting
from dptrain.sweeps.reporting.findings import sentences
from dptrain.sweeps.reporting.report import MEASURES, Report, write_report, write_trials_csv
from dptrain.sweeps.scheduling.messages import ending_fact
from dptrain.sweeps.sweep import Stop, SweepPlan

# Names that a swept field cannot have, as they are taken.
RESERVED = frozenset({"trial", "run", "seed", "fold", "epoch", "status", "reason", "metrics", *MEASURES})


@dataclass(frozen=True)
class SweepResult:
    """All trials and runs of a sweep, the same on every rank.

    Attributes:
        metric: log key that trials are compared by.
        mode: "max" or "min".
        trials: by number: "trial", the swept fields, "n", "mean", "std", "ci_low", "ci_high", "median", "best",
            "seconds", "failed", "epochs_trained"; with several metrics the mean of each further one, such as
            "mean_parameters", and "pareto", whether it is on the front; None for missing values.
        runs: by number: "run", "trial", "seed", in cross-validation "fold" (from 0), the swept fields, "status",
            "epochs_trained", "seconds", "reason", "metrics" (the last of the logs).
        ranking: numbers of the trials, the best first.
        findings: sentences on significant differences, and on the best trial's models on a test set.
        exit_code: 0 if every run succeeded, else that of the first that did not; of a stopped sweep 75, by Ctrl-C 130.
        test: of the best trial on the test set: "trial", "metric", "n" (seeds), "samples", "mean", "ci_low", "ci_high",
            "covers" (the sources of chance that the interval allows for); None without a test set or if stopped.
        models: files of the kept models, relative to the directory.
        stopped: why the sweep is incomplete, such as "interrupted"; else empty.
        signal: that stopped it, such as "SIGINT"; else empty.
        modes: of every metric, "max" or "min".
        front: numbers of the trials on the Pareto front, the best of the first metric first; empty with one metric.
    """

    metric: str
    mode: str
    trials: Sequence[Mapping[str, Any]]
    runs: Sequence[Mapping[str, Any]]
    ranking: Sequence[int]
    findings: Sequence[str]
    exit_code: int
    test: Mapping[str, Any] | None = None
    models: Sequence[str] = ()
    stopped: str = ""
    signal: str = ""
    modes: Mapping[str, str] = field(default_factory=dict)
    front: Sequence[int] = ()

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The best trial; None if no trial has a value."""
        if not self.ranking or self.trials[self.ranking[0]]["mean"] is None:
            return None
        return self.trials[self.ranking[0]]

    def to_pandas(self) -> Any:
        """Return the runs as a DataFrame, a row each with metrics as columns; ConfigError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError("to_pandas: pandas is not installed: pip install pandas") from error
        return pandas.DataFrame(
            [{k: v for k, v in run.items() if k != "metrics"} | run["metrics"] for run in self.runs]
        )


def best_trial(directory: SweepDirectory, plan: SweepPlan) -> int | None:
    """Return the number of the best complete trial; None if there is none."""
    summaries = statistics.summarize(directory.trials, directory.endings, plan.metric, plan.mode)
    best = next(iter(statistics.rank(summaries, plan.mode)), None)
    return None if best is None or not best.complete else best.trial


def conclude(
    directory: SweepDirectory,
    plan: SweepPlan,
    facts: Mapping[str, Any],
    repeat: Callable[[Setting, Run], str] | None = None,
    *,
    notes: Sequence[str] = (),
    models: Sequence[str] = (),
    stopped: Stop | None = None,
    writes_report: bool = True,
) -> SweepResult:
    """Write trials.csv and, where wanted, report.html; return the result. `repeat` returns the command of a run."""
    trials, endings = directory.trials, directory.endings
    summaries = statistics.summarize(trials, endings, plan.metric, plan.mode, plan.validation_samples)
    front = front_of(trials, endings, plan.modes)
    write_trials_csv(directory.path / TRIALS, trials, summaries, plan.fields, front)
    test = _test(directory, plan)
    notes = [*([] if test is None else _test_sentences(directory, test, plan)), *notes]
    notes = [*([] if front is None else [front.sentence()]), *notes]
    notes = [*_stop_sentences(directory, stopped), *notes, *_fold_sentences(plan)]
    best = _best_run(directory, plan, summaries)
    report = Report(
        trials,
        endings,
        directory.epochs(),
        plan.metric,
        plan.mode,
        plan.fields,
        facts,
        samples=plan.validation_samples,
        space=plan.decides.get("space"),
        repeat="" if best is None or repeat is None else repeat(directory.trials[best.trial].setting, best),
        notes=notes,
        front=front,
        title=f"Sweep {directory.path.resolve().name}",
        hurries=lambda: signals.caught() is not None or (stopped is not None and stopped.signal != ""),
    )
    if writes_report:
        write_report(directory.path / REPORT, report)
    comparisons = statistics.compare(summaries, endings, plan.metric, plan.mode)
    last = sorted(statistics.last_endings(endings), key=lambda ending: ending.run.number)
    failed = next((ending.exit_code or int(ExitCode.INTERNAL) for ending in last if not ending.status.is_success), 0)
    return SweepResult(
        plan.metric,
        plan.mode,
        _trial_records(trials, summaries, front),
        [_run(ending_fact(ending), trials[ending.run.trial].setting) for ending in last],
        [summary.trial for summary in statistics.rank(summaries, plan.mode)],
        [*sentences(trials, summaries, comparisons, plan.metric, plan.mode), *notes],
        failed if stopped is None else stopped.exit_code,
        test,
        list(models),
        "" if stopped is None else stopped.why,
        "" if stopped is None else stopped.signal,
        plan.modes,
        [] if front is None else front.trials,
    )


def _trial_records(
    trials: Sequence[Trial], summaries: Sequence[statistics.Summary], front: Front | None
) -> list[dict[str, Any]]:
    by_trial = {summary.trial: asdict(summary) for summary in summaries}
    return [
        {"trial": trial.number, **trial.setting}
        | {key: value for key, value in by_trial[trial.number].items() if key in MEASURES}
        | ({} if front is None else front.columns(trial.number))
        for trial in trials
    ]


def _stop_sentences(directory: SweepDirectory, stopped: Stop | None) -> list[str]:
    ended = len({ending.run.number for ending in directory.endings if ending.status.is_final})
    if stopped is None:
        return []
    return [f"The sweep is incomplete ({stopped.why}): {ended} of the runs have ended so far."]


def _fold_sentences(plan: SweepPlan) -> list[str]:
    if plan.folds == 1:
        return []
    return [
        f"n counts seeds and {plan.folds} folds. Trainings of cross-validation share samples, so intervals and tests "
        "are those of the corrected resampled t-test of Nadeau and Bengio."
    ]


def _best_run(directory: SweepDirectory, plan: SweepPlan, summaries: Sequence[statistics.Summary]) -> Run | None:
    best = next((summary for summary in statistics.rank(summaries, plan.mode) if summary.n), None)
    if best is None:
        return None
    values = statistics.values_by_seed(directory.endings, plan.metric)[best.trial]
    chosen = (max if plan.mode == "max" else min)(values, key=lambda replicate: values[replicate])
    runs = {ending.run.replicate: ending.run for ending in directory.endings if ending.run.trial == best.trial}
    return runs[chosen]


def _test(directory: SweepDirectory, plan: SweepPlan) -> dict[str, Any] | None:
    """Return test statistics of the best trial's models, over seeds, each the mean over its folds."""
    best, key = best_trial(directory, plan), plan.metric.removeprefix("val_")
    runs = {ending.run.number: ending.run for ending in directory.endings if ending.run.trial == best}
    by_seed: dict[int, list[float]] = {}
    draws: list[list[float]] = []
    for number, run in runs.items():
        value = directory.tested.get(number, {}).get(key)
        if value is not None and math.isfinite(value):
            by_seed.setdefault(run.seed, []).append(value)
            draws.append(directory.draws.get(number, []))
    if not by_seed:
        return None
    means = [math.fsum(values) / len(values) for _, values in sorted(by_seed.items())]
    samples = None
    if plan.test_samples and intervals.counts_samples(key):
        samples = intervals.SampleSize(plan.test_samples)
    elif plan.test_samples and draws[0] and all(len(drawn) == len(draws[0]) for drawn in draws):
        # The draws are the same for all models, so the variance of their mean over models is the samples' alone.
        variance = float(np.var(np.mean(draws, axis=0), ddof=1))
        samples = intervals.SampleSize(plan.test_samples, variance) if math.isfinite(variance) else None
    interval = intervals.interval_of(means, intervals.bounds_of(key, means), samples=samples)
    return {
        **{"trial": best, "metric": key, "n": len(means), "samples": plan.test_samples},
        **{"mean": interval.mean, "ci_low": interval.low, "ci_high": interval.high, "covers": interval.covers},
    }


def _test_sentences(directory: SweepDirectory, test: Mapping[str, Any], plan: SweepPlan) -> list[str]:
    number = formatting.number
    over = f"n = {counted(test['n'], 'seed')}"
    if "samples" in test["covers"]:
        over += f" and {counted(test['samples'], 'sample')}"
    between = f"95 % interval {formatting.interval(test['ci_low'], test['ci_high'])} over {test['covers']}, "
    if test["ci_low"] is None:
        between = "" if test["n"] == 1 else "the same with every seed, so no interval; "
        over = over if test["n"] > 1 else "one seed, so no interval"
    findings = [
        f"On the test set, which was not used to choose anything, the {test['metric']} of trial {test['trial']} is "
        f"{number(test['mean'])} ({between}{over})."
    ]
    if plan.folds > 1:
        findings[0] += f" A seed's value is the mean over the models of its {plan.folds} folds."
    trials = {ending.run.trial for ending in directory.endings if ending.run.number in directory.tested}
    if len(trials) > 1:
        findings.append(
            f"The test set has been evaluated for {len(trials)} trials, because the sweep was extended: to choose "
            "between them by it, you need another one."
        )
    return findings


def _run(fact: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    number, trial, seed, fold, folds = fact["run"]
    which = {"run": number, "trial": trial, "seed": seed} | ({"fold": fold} if folds > 1 else {})
    outcome = {key: fact[key] for key in ("status", "seconds", "reason", "metrics")}
    return {**which, **setting, "epochs_trained": fact["epochs"], **outcome}
