"""The findings of a sweep as plain sentences, with their limits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dptrain.runtime.text import counted
from dptrain.sweeps.analysis.statistics import (
    MOST_PAIRS,
    SIGNIFICANCE,
    Comparison,
    Mode,
    Summary,
    effect_in_words,
    rank,
)
from dptrain.sweeps.records import Trial
from dptrain.sweeps.reporting import formatting

# Hedges' g from which means differ visibly: a large effect.
_VISIBLE = 0.8


def sentences(
    trials: Sequence[Trial],
    summaries: Sequence[Summary],
    comparisons: Sequence[Comparison],
    metric: str,
    mode: Mode,
) -> list[str]:
    """Return the findings of a sweep: the best trial, significant differences, failures, and what cannot be said."""
    ranked = [summary for summary in rank(summaries, mode) if summary.n]
    if not ranked:
        return [f"No run has ended with a value of {metric}: there is no result."]
    best = ranked[0]
    settings = {trial.number: trial.setting for trial in trials}
    alone = len(trials) == 1
    findings = [
        _single_setting_sentence(best, trials[0].setting, metric) if alone else _best_sentence(best, settings, metric)
    ]
    if not alone:
        findings += _difference_sentences(best, summaries, ranked, comparisons, mode)
    lost = [summary for summary in summaries if summary.failed]
    if lost:
        runs = sum(summary.failed for summary in lost)
        findings.append(
            f"{counted(runs, 'run')} failed and {_are([None] * runs)} not part of any mean."
            if alone
            else f"{counted(runs, 'run')} failed, of {_trials([s.trial for s in lost])}. Failed runs are not part of "
            "any mean, and a trial is ranked behind all complete ones that lost fewer, however good its other runs are."
        )
    early = [summary.trial for summary in summaries if not summary.complete and summary.n]
    if early and not alone:
        findings.append(
            "Stopped early or unfinished, so ranked behind the complete ones by their last values and not compared: "
            f"{_trials(early)}."
        )
    return findings


def _single_setting_sentence(summary: Summary, setting: Mapping[str, Any], metric: str) -> str:
    which = f"The one setting ({formatting.described(setting)})" if setting else "The one setting"
    if not summary.complete:
        which += f", not trained to its end with every seed ({counted(summary.epochs_trained, 'epoch')}),"
    spread = formatting.mean_interval(summary.ci_low, summary.ci_high, summary.n, summary.covers)
    if summary.n == 1:
        behind = f" ({spread})" if summary.covers else ", without an interval"
        return f"{which} has one run with a value: {metric} {formatting.number(summary.mean)}{behind}."
    return (
        f"{which} has a mean of {metric} of {formatting.number(summary.mean)} ({spread}); single seeds deviate from it "
        f"by {formatting.number(summary.std)} (standard deviation)."
    )


def _best_sentence(best: Summary, settings: Mapping[int, Mapping[str, Any]], metric: str) -> str:
    setting = settings.get(best.trial)
    name = f"Trial {best.trial}" + (f" ({formatting.described(setting)})" if setting else "")
    where = (
        "the best mean"
        if best.complete
        else f"the best mean so far (no trial is complete; {best.epochs_trained} epochs)"
    )
    spread = formatting.mean_interval(best.ci_low, best.ci_high, best.n, best.covers)
    text = f"{name} has {where} of {metric}: {formatting.number(best.mean)} ({spread})."
    if best.failed and best.complete:
        text += f" But {counted(best.failed, 'run')} of it failed, and no complete trial lost fewer."
    return text


def _difference_sentences(
    best: Summary,
    summaries: Sequence[Summary],
    ranked: Sequence[Summary],
    comparisons: Sequence[Comparison],
    mode: Mode,
) -> list[str]:
    complete = [summary for summary in ranked if summary.complete]
    if len(complete) < 2:
        return [_too_few_sentence(complete, summaries)]
    with_best = {row.b if row.a == best.trial else row.a: row for row in comparisons if best.trial in (row.a, row.b)}
    if not with_best:
        return [
            "No conclusion about differences: no other complete trial shares 2 seeds with the best one, and a "
            "difference on one seed may be due to that seed. More seeds are needed: 5 or more to detect any but large "
            "differences."
        ]
    worse, better, unclear = _by_outcome(best, complete[1:], with_best, mode)
    findings = []
    if worse:
        findings.append(
            f"{_trials(worse).capitalize()} {_are(worse)} significantly worse than it, at 5 % after correction."
        )
        nearest = min(worse, key=lambda trial: abs(with_best[trial].difference))
        which = "The difference" if len(worse) == 1 else f"The least difference, to trial {nearest},"
        findings.append(f"{which} is {_difference(with_best[nearest])}.")
    if better:
        findings.append(
            f"Over the seeds that both have, {_trials(better)} {_are(better)} significantly better than it, but lost "
            "runs that it did not lose."
        )
    visible = [trial for trial in unclear if differs_visibly(with_best.get(trial))]
    if visible:
        more = max(with_best[trial].missing or 0 for trial in visible)
        findings.append(
            f"There are too few seeds to tell {_trials(visible)} from it, though the means differ visibly: add at "
            f"least {more} (a wider --seeds with the same --out adds them to this sweep)."
        )
    if hidden := [trial for trial in unclear if trial not in visible]:
        findings.append(
            f"{_trials(hidden).capitalize()} cannot be told apart from it. They may still differ; more seeds may "
            "reveal it."
        )
    findings += _method_sentences(len(complete), comparisons, with_best)
    if len(complete) > 2:
        findings.append(
            "The best trial was picked by these values, which its interval does not allow for: expect slightly worse "
            "ones with fresh seeds."
        )
    return findings


def differs_visibly(row: Comparison | None) -> bool:
    """Whether two means differ a lot beside the deviation over seeds, but not significantly: seeds are missing."""
    if row is None or row.missing is None:
        return False
    return row.effect is None or abs(row.effect) >= _VISIBLE


def headline(
    trials: Sequence[Trial],
    summaries: Sequence[Summary],
    comparisons: Sequence[Comparison],
    metric: str,
    mode: Mode,
) -> list[tuple[str, str]]:
    """Return label and text of what to see first: mean, interval and verdict of the best trial; empty without one."""
    ranked = [summary for summary in rank(summaries, mode) if summary.n]
    if not ranked:
        return []
    best, name = ranked[0], "" if len(trials) == 1 else f" of trial {ranked[0].trial}, the best"
    rows = [(f"mean of {metric}{name}", formatting.number(best.mean))]
    if best.ci_low is not None and best.ci_high is not None and best.ci_low != best.ci_high:
        rows.append((f"95 % interval over {best.covers}", formatting.interval(best.ci_low, best.ci_high)))
    rows.append(("runs" if best.n != 1 else "run", str(best.n)))
    return rows if len(trials) == 1 else [*rows, ("verdict", _verdict(best, ranked, comparisons, mode))]


def _verdict(best: Summary, ranked: Sequence[Summary], comparisons: Sequence[Comparison], mode: Mode) -> str:
    """Return in a few words whether the best trial is better than the others."""
    with_best = {row.b if row.a == best.trial else row.a: row for row in comparisons if best.trial in (row.a, row.b)}
    others = [summary for summary in ranked if summary.complete and summary.trial != best.trial]
    if not with_best:
        return "no trial to compare it with" if not others else "too few seeds to tell: add at least 1"
    worse, _, unclear = _by_outcome(best, others, with_best, mode)
    if len(worse) == len(others):
        return f"better than {'the other' if len(others) == 1 else f'all {len(others)} others'}"
    visible = [trial for trial in unclear if differs_visibly(with_best.get(trial))]
    if visible:
        more = max(with_best[trial].missing or 0 for trial in visible)
        return f"too few seeds to tell it from {_trials(visible)}: add at least {more}"
    if unclear:
        return f"cannot be told apart from {_trials(unclear)}"
    return "another trial is better, but lost runs"


def _by_outcome(
    best: Summary, others: Sequence[Summary], with_best: Mapping[int, Comparison], mode: Mode
) -> tuple[list[int], list[int], list[int]]:
    """Return the trials that are significantly worse than the best, significantly better, and neither."""
    worse: list[int] = []
    better: list[int] = []
    unclear: list[int] = []
    for summary in others:
        row = with_best.get(summary.trial)
        if row is None or row.p_corrected > SIGNIFICANCE:
            unclear.append(summary.trial)
        else:
            difference = row.difference if row.a == best.trial else -row.difference
            (worse if (difference > 0) == (mode == "max") else better).append(summary.trial)
    return worse, better, unclear


def _method_sentences(
    complete: int, comparisons: Sequence[Comparison], with_best: Mapping[int, Comparison]
) -> list[str]:
    total = math.comb(complete, 2)
    if total > MOST_PAIRS:
        pairs = counted(len(with_best), "pair")
        tested = (
            f"With so many trials only the best one was compared with the others ({pairs}), with the correction for "
            f"all {total} pairs, which allows for having picked it"
        )
    else:
        pairs = counted(len(comparisons), "pair")
        tested = (
            f"{pairs} of trials {_are(comparisons)} compared and corrected together, which allows for having picked "
            "the best"
        )
    findings = [
        f"{tested}. The test is Student's paired t-test over the seeds that two trials share; it assumes roughly "
        "normal differences over seeds. The correction is Benjamini and Yekutieli's: of the differences called "
        "significant, at most 5 % are expected to be chance."
    ]
    if any(row.ci_low is None and row.difference for row in with_best.values()):
        findings.append(
            "Some differences are exactly equal for all seeds, as happens with few validation samples. Such a pair has "
            "no interval and is compared by the sign test; more seeds or more samples would resolve it."
        )
    return findings


def _too_few_sentence(complete: Sequence[Summary], summaries: Sequence[Summary]) -> str:
    """Return why no trials can be compared, and what would help."""
    text = f"No conclusion about differences: {'only one trial is' if complete else 'no trial is'} complete"
    others = [summary for summary in summaries if not summary.complete]
    if all(summary.pruned for summary in others):
        return f"{text}, as halving stopped the others early. Without halving they would all be compared."
    if all(summary.failed and not summary.n for summary in others):
        return f"{text}; the others have failed."
    return f"{text}, and a comparison needs two. Started again with the same directory, the sweep resumes."


def _difference(row: Comparison) -> str:
    size = formatting.number(abs(row.difference))
    if row.ci_low is None or row.ci_high is None:
        return f"{size}, the same for every seed"
    low, high = (
        sorted((abs(row.ci_low), abs(row.ci_high))) if row.ci_low * row.ci_high > 0 else (row.ci_low, row.ci_high)
    )
    words = effect_in_words(row.effect)
    return f"{size} (corrected interval {formatting.interval(low, high)}), {words} beside the deviation over seeds"


def _trials(numbers: Sequence[int]) -> str:
    return f"{'trial' if len(numbers) == 1 else 'trials'} {formatting.listed(sorted(numbers))}"


def _are(things: Sequence[Any]) -> str:
    return "is" if len(things) == 1 else "are"
