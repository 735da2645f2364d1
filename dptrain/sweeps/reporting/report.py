"""trials.csv and report.html: results of a sweep for programs and for people."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from dptrain.runtime.extras import pip_install
from dptrain.runtime.storage.files import write_atomically
from dptrain.runtime.text import counted, no_formula
from dptrain.sweeps.analysis import importance
from dptrain.sweeps.analysis.intervals import UNBOUNDED, bounds_of, counts_samples
from dptrain.sweeps.analysis.pareto import Front
from dptrain.sweeps.analysis.statistics import (
    EFFECTS,
    SIGNIFICANCE,
    Comparison,
    Mode,
    Summary,
    compare,
    effect_in_words,
    failure,
    last_endings,
    rank,
    summarize,
    values_by_seed,
)
from dptrain.sweeps.records import Ending, Trial
from dptrain.sweeps.reporting import drawing, field_pictures, formatting, pictures
from dptrain.sweeps.reporting.fields import Field, listed_values, swept_fields
from dptrain.sweeps.reporting.findings import differs_visibly, headline, sentences
from dptrain.sweeps.reporting.page import box, encoded, figure, page, table

# Columns of trials.csv after "trial" and the swept fields: attributes of `Summary`.
MEASURES = ("n", "mean", "std", "ci_low", "ci_high", "median", "best", "seconds", "failed", "epochs_trained")

_MOST_FAILURES = 200
# Why a sweep stopped by a signal draws nothing: drawing takes seconds, and a scheduler soon kills.
_HURRIED = "a signal has stopped the sweep; the same command with --max-time 0s draws them"
# Shown pairs of trials: with the best trial, and others.
_MOST_WITH_BEST, _MOST_OTHERS = 50, 300


def write_trials_csv(
    path: Path,
    trials: Sequence[Trial],
    summaries: Sequence[Summary],
    fields: Sequence[str],
    front: Front | None = None,
) -> None:
    """Write one row per trial, in their order; floats round-trip, lists are JSON, missing values are empty."""
    of_trial = {summary.trial: summary for summary in summaries}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *map(no_formula, fields), *MEASURES, *([] if front is None else front.names)])
    for trial in trials:
        summary = of_trial[trial.number]
        setting = [formatting.cell(trial.setting.get(field)) for field in fields]
        measures = [formatting.cell(getattr(summary, name)) for name in MEASURES]
        further = [] if front is None else front.columns(trial.number).values()
        writer.writerow([trial.number, *setting, *measures, *map(formatting.cell, further)])
    write_atomically(path, encoded(text.getvalue()))


@dataclass(frozen=True)
class Report:
    """Data of a report; `hurries` is asked before each picture."""

    trials: Sequence[Trial]
    endings: Sequence[Ending]
    epochs: Iterable[Mapping[str, Any]]  # logs
    metric: str
    mode: Mode
    fields: Sequence[str]  # that were swept
    facts: Mapping[str, Any]  # versions, command and the like
    samples: int | None = None  # of the validation set
    space: Mapping[str, Any] | None = None  # from which settings were drawn
    repeat: str = ""  # command that trains the best run again
    notes: Sequence[str] = ()
    front: Front | None = None
    title: str = "Sweep"
    hurries: Callable[[], bool] = lambda: False


def write_report(path: Path, report: Report) -> None:
    """Write a report as one HTML file; pictures need Matplotlib."""
    trials, endings, metric, mode = report.trials, report.endings, report.metric, report.mode
    summaries = summarize(trials, endings, metric, mode, report.samples)
    comparisons = compare(summaries, endings, metric, mode)
    findings = [*sentences(trials, summaries, comparisons, metric, mode), *report.notes]
    swept = swept_fields(report.space, trials, report.fields)
    parts = [
        f"<h1>{escape(report.title)}</h1>\n",
        box(headline(trials, summaries, comparisons, metric, mode)),
        f"<p>{escape(_scope(trials, endings, metric, mode))}</p>\n",
        "<h2>What was found</h2>\n" + _paragraphs(findings),
        "<h2>What was swept</h2>\n" + _swept(swept, endings),
        *_results(report, summaries, comparisons, swept),
        "<h2>Failed runs</h2>\n" + _failures(endings, metric),
    ]
    if report.repeat:
        parts.append(f"<h2>Training the best run again</h2>\n<pre>{escape(report.repeat)}</pre>\n")
    parts.append("<h2>How the numbers are computed</h2>\n" + _methods(endings, metric, report.samples))
    if report.facts:
        parts.append("<h2>Made with</h2>\n" + _made_with(report.facts))
    write_atomically(path, encoded(page(report.title, parts)))


def _results(
    report: Report, summaries: Sequence[Summary], comparisons: Sequence[Comparison], swept: Sequence[Field]
) -> Iterator[str]:
    """Yield tables and pictures of the trials; fields have the names that there is room for."""
    endings, metric, mode, front = report.endings, report.metric, report.mode, report.front
    short = dict(zip(report.fields, formatting.ends(report.fields), strict=True))
    swept = [replace(field, name=short[field.name]) for field in swept]
    trials = [
        replace(trial, setting={short[name]: trial.setting.get(name) for name in report.fields})
        for trial in report.trials
    ]
    alone = len(trials) == 1
    ranking = _ranking(trials, summaries, list(short.values()), mode, front)
    yield f"<h2>{'Result' if alone else 'Ranking'}</h2>\n" + ranking
    undrawn = _HURRIED if report.hurries() else drawing.why_not()
    if undrawn is not None:
        yield f"<p>No pictures: {escape(undrawn, quote=False)}</p>\n"
    elif alone:
        yield _seeds_picture(summaries[0], endings, metric)
    else:
        yield _ranking_picture(trials, summaries, metric, mode)
        if front is not None and front.trials:
            yield "<h2>Pareto front</h2>\n" + _front_picture(front)
    if alone and summaries[0].n:
        yield "<h2>Runs</h2>\n" + _runs(endings, metric)
    if comparisons:
        yield "<h2>Differences</h2>\n" + _differences(trials, summaries, comparisons, mode)
    if undrawn is not None or report.hurries():
        return
    folds = max((ending.run.folds for ending in endings), default=1)
    if curves := _curves_picture(trials, summaries, report.epochs, metric, mode, folds):
        yield "<h2>Over epochs</h2>\n" + curves
    if swept and not alone and any(summary.n for summary in summaries) and not report.hurries():
        drawn = _fields(trials, summaries, endings, metric, mode, swept, report.hurries)
        yield "<h2>What the fields do</h2>\n" + drawn


def _scope(trials: Sequence[Trial], endings: Sequence[Ending], metric: str, mode: Mode) -> str:
    last = last_endings(endings)
    statuses: dict[str, int] = defaultdict(int)
    for ending in last:
        statuses[ending.status.value] += 1
    runs = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items())) or "none ended yet"
    failed = sum(failure(ending, metric) is not None for ending in last)
    seconds = math.fsum(ending.seconds for ending in last)
    return (
        f"{counted(len(trials), 'trial')}, {counted(len({e.run.seed for e in last}), 'seed')}, "
        f"{counted(len(last), 'run')} ({runs}), {failed} without a value because something went wrong. "
        f"{'The setting is' if len(trials) == 1 else 'Trials are'} judged by {metric} after the last epoch; "
        f"{'more' if mode == 'max' else 'less'} is better. The runs took {seconds:.1f} seconds together."
    )


def _swept(fields: Sequence[Field], endings: Sequence[Ending]) -> str:
    seeds = sorted({ending.run.seed for ending in endings})
    rows = [[field.name, field.range] for field in fields]
    if seeds:
        rows.append(["seeds", listed_values(seeds)])
    text = table(["field", "values"], rows)
    return text if fields else "<p>Only the seed: all runs have the same setting.</p>\n" + text


def _ranking(
    trials: Sequence[Trial], summaries: Sequence[Summary], fields: Sequence[str], mode: Mode, front: Front | None
) -> str:
    settings = {trial.number: trial.setting for trial in trials}
    rows = []
    ranked = rank(summaries, mode)
    others = [] if front is None else [*front.modes][1:]
    for place, summary in enumerate(ranked, 1):
        remarks = [] if front is None or summary.trial not in front.trials else ["Pareto front"]
        further = [] if front is None else front.means[summary.trial][1:]
        if summary.failed:
            remarks.append(f"{summary.failed} failed")
        if not summary.complete:
            remarks.append("no value" if not summary.n else "stopped early" if summary.pruned else "unfinished")
        rows.append(
            [
                place,
                summary.trial,
                ", ".join(remarks),
                formatting.number(summary.mean),
                _interval(summary.ci_low, summary.ci_high),
                summary.n,
                *map(formatting.number, further),
                *(formatting.brief(settings[summary.trial].get(field)) for field in fields),
                formatting.number(summary.std),
                formatting.number(summary.median),
                formatting.number(summary.best),
                summary.epochs_trained,
                f"{summary.seconds:.1f}",
            ]
        )
    # A narrow window shows the first columns, the others after scrolling.
    header = ["place", "trial", "remarks", "mean", "95 % interval", "n", *(f"mean {name}" for name in others), *fields]
    header += ["std", "median", "best run", "epochs", "seconds"]
    if not any(row[2] for row in rows):
        header, rows = [*header[:2], *header[3:]], [[*row[:2], *row[3:]] for row in rows]
    text = table(header, rows, [summary.trial for summary in ranked])
    if len(trials) == 1:
        return text
    return (
        "<p>Trials that lost runs rank behind complete ones, however good their other runs are; trials that "
        "were stopped early come last. Click a column's name to sort by it, or a trial to highlight it in the "
        "pictures.</p>\n" + text
    )


def _runs(endings: Sequence[Ending], metric: str) -> str:
    rows = [
        [
            ending.run.seed if ending.run.folds == 1 else ending.run.label.removeprefix("seed "),
            formatting.number(ending.metrics.get(metric)),
            ending.epochs,
            f"{ending.seconds:.1f}",
        ]
        for ending in last_endings(endings)
        if failure(ending, metric) is None
    ]
    return table(["seed", metric, "epochs", "seconds"], rows)


def _differences(
    trials: Sequence[Trial], summaries: Sequence[Summary], comparisons: Sequence[Comparison], mode: Mode
) -> str:
    settings = {trial.number: trial.setting for trial in trials}
    ranked = [summary.trial for summary in rank(summaries, mode)]
    best = ranked[0]
    with_best = sorted(
        (_mirrored(row, best) for row in comparisons if best in (row.a, row.b)), key=lambda row: ranked.index(row.b)
    )
    others = sorted((row for row in comparisons if best not in (row.a, row.b)), key=lambda row: row.p)
    header = ["at 5 %", "p corrected", "difference", "interval, corrected", "effect", "n", "p"]
    text = ""
    if with_best:
        rows = [
            [row.b, *_difference_cells(row), ", ".join(map(formatting.brief, settings[row.b].values()))]
            for row in with_best[:_MOST_WITH_BEST]
        ]
        text += f"<p>The best trial, {best}, beside the others, over the seeds that both have.</p>\n" + table(
            ["than trial", *header, "setting"], rows
        )
        if len(with_best) > _MOST_WITH_BEST:
            text += f"<p>The first {_MOST_WITH_BEST} of {len(with_best)}.</p>\n"
    if others:
        rows = [[f"{row.a} and {row.b}", *_difference_cells(row)] for row in others[:_MOST_OTHERS]]
        some = f", the {_MOST_OTHERS} of least p" if len(others) > _MOST_OTHERS else ""
        text += (
            f"<details><summary>{counted(len(others), 'other pair')} of trials{some}</summary>\n"
            + table(["trials", *header], rows)
            + "</details>\n"
        )
    return text


def _difference_cells(row: Comparison) -> list[Any]:
    significant = row.p_corrected <= SIGNIFICANCE
    effect = "-" if row.effect is None else f"{row.effect:+.2f}"
    if row.effect is not None and significant:  # a difference that may be chance gets no word
        effect += f", {effect_in_words(row.effect)}"
    return [
        "significant"
        if significant
        else f"too few seeds: add at least {row.missing}"
        if differs_visibly(row)
        else "not told apart",
        f"{row.p_corrected:.2g}",
        f"{row.difference:+.5g}",
        _interval(row.ci_low, row.ci_high),
        effect,
        row.n,
        f"{row.p:.2g}",
    ]


def _mirrored(row: Comparison, first: int) -> Comparison:
    if row.a == first:
        return row
    low, high = (None if end is None else -end for end in (row.ci_high, row.ci_low))
    effect = None if row.effect is None else -row.effect
    return replace(row, a=row.b, b=row.a, difference=-row.difference, ci_low=low, ci_high=high, effect=effect)


def _interval(low: float | None, high: float | None) -> str:
    return formatting.interval(low, high).replace(" ", "\N{NO-BREAK SPACE}")


def _curves_picture(
    trials: Sequence[Trial],
    summaries: Sequence[Summary],
    epochs: Iterable[Mapping[str, Any]],
    metric: str,
    mode: Mode,
    folds: int,
) -> str:
    curves = pictures.curves_of(epochs, metric)
    if not any(runs for of_trial in curves.values() for runs in of_trial.values()):
        return ""
    caption = (
        "Lines: the mean over the runs that have the epoch. Bands: the 95 % confidence interval of the mean over "
        f"{'seeds' if folds == 1 else 'seeds and folds'}; with fewer than 3 runs, from the lowest to the highest."
    )
    if len(curves) > pictures.MOST_CURVES:
        caption += f" Only the best {pictures.MOST_CURVES} of {len(curves)} trials are drawn."
    return figure(pictures.draw_curves(trials, summaries, curves, metric, mode, folds), caption)


def _ranking_picture(trials: Sequence[Trial], summaries: Sequence[Summary], metric: str, mode: Mode) -> str:
    valued = sum(summary.n > 0 for summary in summaries)
    if not valued:
        return ""
    covers = " or ".join(sorted({summary.covers for summary in summaries if summary.covers})) or "seeds alone"
    caption = f"Points: means. Bars: 95 % confidence intervals of the mean over {covers}; none where nothing shows one."
    if valued > pictures.MOST_RANKED:
        caption += f" Only the best {pictures.MOST_RANKED} of {valued} trials are drawn."
    return figure(pictures.draw_ranking(trials, summaries, metric, mode), caption)


def _front_picture(front: Front) -> str:
    caption = (
        "Points: means over the seeds of complete trials that lost the fewest runs. Filled: the Pareto front. "
        "Line: the front in these two metrics."
    )
    if len(front.modes) > 2:
        caption += " A front trial off the line is there because of another metric."
    others = len(front.compared) - len(front.trials)
    if others > pictures.MOST_BESIDE:
        caption += f" Of the {others} other trials only the best {pictures.MOST_BESIDE} are drawn."
    return figure(pictures.draw_front(front), caption)


def _seeds_picture(summary: Summary, endings: Sequence[Ending], metric: str) -> str:
    if not summary.n:
        return ""
    band = (
        f" and band: their mean and its 95 % confidence interval over {summary.covers}" if summary.covers else ": mean"
    )
    caption = f"Points: {metric} of each seed's run. Line{band}."
    return figure(pictures.draw_seeds(summary, endings, metric), caption)


def _fields(
    trials: Sequence[Trial],
    summaries: Sequence[Summary],
    endings: Sequence[Ending],
    metric: str,
    mode: Mode,
    fields: Sequence[Field],
    hurries: Callable[[], bool],
) -> str:
    parts = []
    complete = sum(summary.complete for summary in summaries)
    if len(fields) > 1 and complete < importance.FEWEST:
        parts.append(
            f"<p>How much each field matters is not estimated from fewer than {importance.FEWEST} complete trials."
            "</p>\n"
        )
    elif len(fields) > 1 and not importance.installed():
        parts.append(
            f"<p>How much each field matters: {escape(pip_install('optuna'), quote=False)} to have it estimated.</p>\n"
        )
    elif len(fields) > 1 and (by_field := importance.importances(trials, summaries, fields)):
        caption = (
            "Share of the variance between trials' means due to a field alone, or to its interactions with others: "
            f"fANOVA with a random forest, from {complete} complete trials. A hint where to look, not a test."
        )
        parts.append(figure(field_pictures.draw_importances(by_field), caption))
    if 1 < len(fields) < field_pictures.MOST_AXES and not hurries():
        valued = sum(summary.n > 0 for summary in summaries)
        caption = (
            "A line for each trial, yellow where it is good and dark where it is bad, thick for the best; dashed where "
            "it was stopped early or is unfinished."
        )
        if valued > field_pictures.MOST_PARALLEL:
            caption += f" Only the best {field_pictures.MOST_PARALLEL} of {valued} trials are drawn."
        parts.append(figure(field_pictures.draw_parallel(trials, summaries, metric, mode, fields), caption))
    caption = (
        "Each dot is a run, each diamond the mean of a trial; hollow ones were stopped early or are unfinished. "
        "Failed runs are not drawn."
    )
    if not hurries():
        parts.append(figure(field_pictures.draw_hyperparameters(trials, summaries, endings, metric, fields), caption))
    return "".join(parts)


def _methods(endings: Sequence[Ending], metric: str, samples: int | None) -> str:
    values = values_by_seed(endings, metric).values()
    bounds = bounds_of(metric, (value for of_trial in values for value in of_trial.values()))
    if samples and counts_samples(metric):
        interval = (
            f"Wilson intervals of the {counted(samples, 'sample')} with the seeds' variance added to the binomial one"
        )
    elif bounds == UNBOUNDED:
        interval = "Student's t intervals"
    elif bounds[1] == math.inf:
        interval = (
            f"Student's t intervals of the mean's logarithm, brought back to the scale of {metric}: none is below 0"
        )
    else:
        interval = (
            f"Student's t intervals of the mean's logit, brought back to the scale of {metric}: none leaves 0 to 1"
        )
    sources = "delta method; Papke and Wooldridge, Journal of Applied Econometrics 11, 1996"
    if samples and counts_samples(metric):
        sources = "Wilson, JASA 22, 1927; Franco et al., Journal of Survey Statistics and Methodology 7, 2019"
    effects = ", ".join(f"from {least} {word}" for least, word in EFFECTS.items())
    paragraphs = [
        f"Intervals of means are 95 % {interval} ({sources}). Intervals over seeds alone show how precisely the "
        "trained seeds determine the mean over all seeds, not how much another validation set would change it.",
        "Differences are over the seeds that two trials share, with Student's t interval, cut where the metric's range "
        "ends, and the p-value of the paired t-test; where all differences are alike, that of the sign test. Corrected "
        "p-values are for all pairs together (Benjamini and Yekutieli, Annals of Statistics 29, 2001): of the "
        "differences that are called significant, at most 5 % are expected to be chance. Intervals are corrected "
        "likewise (Benjamini and Yekutieli, JASA 100, 2005): those that leave out 0 are those of significant "
        "differences, and of these at most 5 % are expected to miss the true difference.",
        f"Too few seeds: the means differ by {min(e for e, word in EFFECTS.items() if word == 'large')} deviations or "
        "more, but not significantly. The advised number would be significant if the difference and its deviation over "
        "seeds stayed as they are; to be likely to see it, add more.",
        "Effects are Hedges' g: the difference over the two trials' standard deviation over seeds. Below "
        f"{min(EFFECTS)} it is called negligible, {effects} (Cohen, Statistical Power Analysis for the Behavioral "
        "Sciences, 1988; Sawilowsky, Journal of Modern Applied Statistical Methods 8, 2009); only a significant "
        "difference gets such a word. Seeds of one setting differ little, so a huge effect can be useless: look at the "
        "difference too.",
    ]
    return _paragraphs(paragraphs)


def _paragraphs(texts: Sequence[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>\n" for text in texts)


def _made_with(facts: Mapping[str, Any]) -> str:
    rows = [[name, value if isinstance(value, str) else formatting.brief(value)] for name, value in facts.items()]
    return table(["", ""], rows)


def _failures(endings: Sequence[Ending], metric: str) -> str:
    failed = [(ending, failure(ending, metric)) for ending in last_endings(endings)]
    rows = [[e.run.number, e.run.trial, e.run.seed, e.status.value, e.epochs, reason] for e, reason in failed if reason]
    if not rows:
        return "<p>None.</p>\n"
    text = table(["run", "trial", "seed", "status", "epochs", "reason"], rows[:_MOST_FAILURES])
    if len(rows) > _MOST_FAILURES:
        text += f"<p>The first {_MOST_FAILURES} of {len(rows)}.</p>\n"
    return text
