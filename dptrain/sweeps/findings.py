"""What can be said of a sweep, in plain sentences, and what cannot."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dptrain.sweeps import formatting
from dptrain.sweeps.records import Trial
from dptrain.sweeps.statistics import MOST_PAIRS, SIGNIFICANCE, Comparison, Mode, Summary, rank

_MORE_SEEDS = "More seeds are needed: 5 or more to see anything but large differences."


def sentences(
    trials: Sequence[Trial],
    summaries: Sequence[Summary],
    comparisons: Sequence[Comparison],
    metric: str,
    mode: Mode,
) -> list[str]:
    """Return in plain sentences what can be said of a sweep, and what cannot.

    Args:
        trials: the sweep's trials.
        summaries: by `summarize`.
        comparisons: by `compare`, of these summaries.
        metric: the log key that trials are judged by.
        mode: as `summarize`.
    """
    ranked = [summary for summary in rank(summaries, mode) if summary.n]
    if not ranked:
        return [f"No run has ended with a value of {metric}: nothing can be said."]
    best = ranked[0]
    settings = {trial.number: trial.setting for trial in trials}
    said = [_best_sentence(best, settings.get(best.trial, {}), metric)]
    said += _difference_sentences(best, ranked, comparisons, mode)
    lost = [summary for summary in summaries if summary.failed]
    if lost:
        runs = sum(summary.failed for summary in lost)
        said.append(
            f"{formatting.counted(runs, 'run')} failed, of {_trials([s.trial for s in lost])}. Failed runs are in no "
            "mean, and a trial is ranked behind all complete ones that lost fewer, however good the rest is."
        )
    early = [summary.trial for summary in summaries if not summary.complete and summary.n]
    if early:
        said.append(
            "Stopped early or unfinished, so ranked behind the complete ones by what was reached and not compared: "
            f"{_trials(early)}."
        )
    return said


def _best_sentence(best: Summary, setting: Mapping[str, Any], metric: str) -> str:
    name = f"Trial {best.trial}" + (f" ({formatting.described(setting)})" if setting else "")
    where = (
        "the best mean"
        if best.complete
        else f"the best mean so far (no trial is complete; {best.epochs_trained} epochs)"
    )
    spread = "one run, so no interval"
    if best.n > 1:
        spread = f"95 % interval {formatting.interval(best.ci_low, best.ci_high)}, n = {best.n}"
    text = f"{name} has {where} of {metric}: {formatting.number(best.mean)} ({spread})."
    if best.failed and best.complete:
        text += f" But {formatting.counted(best.failed, 'run')} of it failed, and no complete trial lost fewer."
    return text


def _difference_sentences(
    best: Summary, ranked: Sequence[Summary], comparisons: Sequence[Comparison], mode: Mode
) -> list[str]:
    complete = [summary for summary in ranked if summary.complete]
    if len(complete) < 2:
        finished = "no trial is" if not complete else "only one trial is"
        return [
            f"Nothing can be said about differences: {finished} complete, and a comparison takes two, each with 2 "
            f"seeds at least. {_MORE_SEEDS}"
        ]
    with_best = {row.b if row.a == best.trial else row.a: row for row in comparisons if best.trial in (row.a, row.b)}
    if not with_best:
        return [
            "Nothing can be said about differences: no other complete trial shares 2 seeds with the best one, and what "
            f"one seed shows may be the seed's doing. {_MORE_SEEDS}"
        ]
    worse: list[int] = []
    better: list[int] = []
    unclear: list[int] = []
    for summary in complete[1:]:
        row = with_best.get(summary.trial)
        if row is None or row.p_corrected > SIGNIFICANCE:
            unclear.append(summary.trial)
        else:
            difference = row.difference if row.a == best.trial else -row.difference
            (worse if (difference > 0) == (mode == "max") else better).append(summary.trial)
    said = []
    if worse:
        said.append(
            f"{_trials(worse).capitalize()} {_are(worse)} significantly worse than it, at 5 % after correction."
        )
    if better:
        said.append(
            f"Over the seeds that both have, {_trials(better)} {_are(better)} significantly better than it, but lost "
            "runs that it did not lose."
        )
    if unclear:
        said.append(
            f"{_trials(unclear).capitalize()} cannot be told apart from it: that does not make them equal, and more "
            "seeds may tell."
        )
    total = math.comb(len(complete), 2)
    if total > MOST_PAIRS:
        pairs = formatting.counted(len(with_best), "pair")
        tested = (
            f"For so many trials only the best one was compared with the others ({pairs}), corrected as for all "
            f"{total} pairs, so that having picked it is allowed for"
        )
    else:
        pairs = formatting.counted(len(comparisons), "pair")
        tested = (
            f"{pairs} of trials {_are(comparisons)} compared and corrected for together, so that having picked the "
            "best is allowed for"
        )
    said.append(
        f"{tested}. The test is Student's paired t-test over the seeds that two trials share; it takes the differences "
        "over seeds to be roughly normal. The correction is that of Benjamini and Yekutieli: of the differences that "
        "are called significant, at most 5 % are expected to be none."
    )
    if any(row.p == 0 and row.ci_low == row.ci_high for row in with_best.values()):
        said.append(
            "Some differences are exactly alike for all seeds, which the test takes for certainty: a metric of few "
            "validation samples does that; more seeds or more samples are needed."
        )
    if len(complete) > 2:
        said.append(
            "The interval of the best trial does not allow for its having been picked: expect a little less of it "
            "with fresh seeds."
        )
    return said


def _trials(numbers: Sequence[int]) -> str:
    return f"{'trial' if len(numbers) == 1 else 'trials'} {formatting.listed(sorted(numbers))}"


def _are(things: Sequence[Any]) -> str:
    return "is" if len(things) == 1 else "are"
