"""trials.csv and report.html: what a sweep found, for programs and for people."""

import base64
import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dptrain.runtime.files import write_atomically
from dptrain.sweeps import formatting, pictures
from dptrain.sweeps.findings import sentences
from dptrain.sweeps.records import Ending, Trial
from dptrain.sweeps.statistics import Mode, Summary, compare, failure, last_endings, rank, summarize

# Columns of trials.csv after "trial" and the swept fields: attributes of `Summary`.
MEASURES = ("n", "mean", "std", "ci_low", "ci_high", "median", "best", "seconds", "failed", "epochs_trained")

_MOST_FAILURES = 200

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222;
       background: #fff; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #ccc; padding: 0.25rem 0.7rem; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 1rem 0 2rem; }
img { max-width: 100%; }
figcaption { color: #555; }
pre { background: #f3f3f3; padding: 0.7rem; overflow-x: auto; white-space: pre-wrap; }
"""


def write_trials_csv(path: Path, trials: Sequence[Trial], summaries: Sequence[Summary], fields: Sequence[str]) -> None:
    """Write one row for each trial: its number, the swept fields, and its summary.

    Floats have as many digits as give the same float back; lists and truth values are JSON; what there is none of
    (the deviation of one run) is empty.

    Args:
        path: the file; an existing one is replaced.
        trials: the sweep's trials; the order of the rows.
        summaries: of these trials, in any order.
        fields: the swept fields, in the order of their columns.

    Raises:
        OutputError: the file cannot be written.
    """
    of_trial = {summary.trial: summary for summary in summaries}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *fields, *MEASURES])
    for trial in trials:
        summary = of_trial[trial.number]
        setting = [formatting.cell(trial.setting.get(field)) for field in fields]
        measures = [formatting.cell(getattr(summary, name)) for name in MEASURES]
        writer.writerow([trial.number, *setting, *measures])
    write_atomically(path, _encoded(text.getvalue()))


def write_report(
    path: Path,
    trials: Sequence[Trial],
    endings: Sequence[Ending],
    epochs: Iterable[Mapping[str, Any]],
    *,
    metric: str,
    mode: Mode,
    fields: Sequence[str],
    facts: Mapping[str, Any],
    repeat: str = "",
    title: str = "Sweep",
) -> None:
    """Write the report as one HTML file with its pictures inside; without Matplotlib, without pictures.

    Args:
        path: the file; an existing one is replaced.
        trials: the sweep's trials.
        endings: of their runs, oldest first.
        epochs: objects as in results.jsonl, with "trial", "run", "epoch" and metrics; read once.
        metric: the log key that trials are judged by.
        mode: whether more of it is better ("max") or less ("min").
        fields: the swept fields, in the order to show them.
        facts: what else to show: versions, devices, the command.
        repeat: how to train one run again, a command.
        title: of the report.

    Raises:
        ConfigError: a run's logs have no such metric; SciPy is missing.
        OutputError: the file cannot be written.
    """
    summaries = summarize(trials, endings, metric, mode)
    comparisons = compare(summaries, endings, metric, mode)
    said = "".join(f"<p>{escape(text)}</p>\n" for text in sentences(trials, summaries, comparisons, metric, mode))
    parts = [
        f"<h1>{escape(title)}</h1>\n",
        f"<p>{escape(_scope(trials, endings, metric, mode))}</p>\n",
        "<h2>What was found</h2>\n" + said,
        "<h2>What was swept</h2>\n" + _swept(trials, fields),
        "<h2>Ranking</h2>\n" + _ranking(trials, summaries, fields, mode),
        "<h2>Pictures</h2>\n" + _pictures(trials, endings, epochs, summaries, metric, mode, fields),
        "<h2>Failed runs</h2>\n" + _failures(endings, metric),
    ]
    if repeat:
        parts.append(f"<h2>Training one run again</h2>\n<pre>{escape(repeat)}</pre>\n")
    if facts:
        rows = [[name, value if isinstance(value, str) else formatting.brief(value)] for name, value in facts.items()]
        parts.append("<h2>Made with</h2>\n" + _table(["", ""], rows))
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{''.join(parts)}</body>\n</html>\n"
    )
    write_atomically(path, _encoded(page))


def _encoded(text: str) -> bytes:
    # A command line that is not UTF-8 comes as text that UTF-8 has no bytes for.
    return text.encode("utf-8", "backslashreplace")


def _scope(trials: Sequence[Trial], endings: Sequence[Ending], metric: str, mode: Mode) -> str:
    last = last_endings(endings)
    statuses: dict[str, int] = defaultdict(int)
    for ending in last:
        statuses[ending.status.value] += 1
    runs = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items())) or "none ended yet"
    failed = sum(failure(ending, metric) is not None for ending in last)
    seconds = math.fsum(ending.seconds for ending in last)
    return (
        f"{formatting.counted(len(trials), 'trial')}, {formatting.counted(len({e.run.seed for e in last}), 'seed')}, "
        f"{formatting.counted(len(last), 'run')} ({runs}), {failed} without a value because something went wrong. "
        f"Trials are judged by {metric} after the last epoch; "
        f"{'more' if mode == 'max' else 'less'} is better. The runs took {seconds:.1f} seconds together."
    )


def _swept(trials: Sequence[Trial], fields: Sequence[str]) -> str:
    rows = []
    for field in fields:
        values = list(
            {formatting.cell(trial.setting.get(field)): trial.setting.get(field) for trial in trials}.values()
        )
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(values) > 12 and len(numbers) == len(values):
            low, high = formatting.brief(min(numbers)), formatting.brief(max(numbers))
            rows.append([field, f"{len(values)} values from {low} to {high}"])
        else:
            rows.append([field, formatting.listed([formatting.brief(value) for value in values])])
    return _table(["field", "values"], rows)


def _ranking(trials: Sequence[Trial], summaries: Sequence[Summary], fields: Sequence[str], mode: Mode) -> str:
    settings = {trial.number: trial.setting for trial in trials}
    rows = []
    for place, summary in enumerate(rank(summaries, mode), 1):
        remarks = []
        if summary.failed:
            remarks.append(f"{summary.failed} failed")
        if not summary.complete:
            remarks.append("stopped early or unfinished" if summary.n else "no value")
        rows.append(
            [
                place,
                summary.trial,
                *(formatting.brief(settings[summary.trial].get(field)) for field in fields),
                summary.n,
                formatting.number(summary.mean),
                formatting.interval(summary.ci_low, summary.ci_high).replace(" ", "\N{NO-BREAK SPACE}"),
                formatting.number(summary.std),
                formatting.number(summary.median),
                formatting.number(summary.best),
                summary.epochs_trained,
                f"{summary.seconds:.1f}",
                ", ".join(remarks),
            ]
        )
    measures = ["n", "mean", "95 % interval", "std", "median", "best run", "epochs", "seconds", ""]
    note = "<p>Behind complete trials: those that lost runs, however good the rest; then those stopped early.</p>\n"
    return _table(["place", "trial", *fields, *measures], rows) + note


def _pictures(
    trials: Sequence[Trial],
    endings: Sequence[Ending],
    epochs: Iterable[Mapping[str, Any]],
    summaries: Sequence[Summary],
    metric: str,
    mode: Mode,
    fields: Sequence[str],
) -> str:
    if not pictures.installed():
        return "<p>There are none: matplotlib is not installed. For pictures: pip install 'dptrain[sweep]'</p>\n"
    parts = []
    curves = pictures.curves_of(epochs, metric)
    if any(runs for of_trial in curves.values() for runs in of_trial.values()):
        caption = (
            "Lines: the mean over the runs that have the epoch. Bands: the 95 % confidence interval of the mean over "
            "seeds; with fewer than 3 runs, from the lowest to the highest."
        )
        if len(curves) > pictures.MOST_CURVES:
            caption += f" Only the best {pictures.MOST_CURVES} of {len(curves)} trials are drawn."
        parts.append(_figure(pictures.draw_curves(trials, summaries, curves, metric, mode), caption))
    valued = sum(summary.n > 0 for summary in summaries)
    if valued:
        caption = "Points: means. Bars: 95 % confidence intervals of the mean over seeds; none with a single run."
        if valued > pictures.MOST_RANKED:
            caption += f" Only the best {pictures.MOST_RANKED} of {valued} trials are drawn."
        parts.append(_figure(pictures.draw_ranking(trials, summaries, metric, mode), caption))
    if valued and fields:
        caption = (
            "Each dot is a run, each diamond the mean of a trial; hollow ones were stopped early or are unfinished. "
            "Failed runs are not drawn."
        )
        parts.append(_figure(pictures.draw_hyperparameters(trials, summaries, endings, metric, fields), caption))
    return "".join(parts) or "<p>No run has logged a value yet.</p>\n"


def _figure(picture: bytes, caption: str) -> str:
    data = base64.b64encode(picture).decode("ascii")
    return (
        f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def _failures(endings: Sequence[Ending], metric: str) -> str:
    failed = [(ending, failure(ending, metric)) for ending in last_endings(endings)]
    rows = [[e.run.number, e.run.trial, e.run.seed, e.status.value, e.epochs, reason] for e, reason in failed if reason]
    if not rows:
        return "<p>None.</p>\n"
    text = _table(["run", "trial", "seed", "status", "epochs", "reason"], rows[:_MOST_FAILURES])
    if len(rows) > _MOST_FAILURES:
        text += f"<p>The first {_MOST_FAILURES} of {len(rows)}.</p>\n"
    return text


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header) if any(header) else ""
    lines = [f"<tr>{head}</tr>"] if head else []
    for row in rows:
        cells = [
            f"<td{_alignment(value)}>{escape(value if isinstance(value, str) else str(value))}</td>" for value in row
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>\n"


def _alignment(value: Any) -> str:
    return "" if isinstance(value, str) else ' class="number"'
