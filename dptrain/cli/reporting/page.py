"""report.html: a run's page, one file without network access; needs Jinja2 (extra `report`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.cli.building import Splits
from dptrain.cli.classes import scores
from dptrain.cli.options.config import Config
from dptrain.cli.reporting import baselines, figures, worst
from dptrain.cli.reporting.digits import percent, ratio
from dptrain.cli.reporting.facts import Outcome, caution, costs, counted_samples, sentences
from dptrain.cli.reporting.importance import REPEATS
from dptrain.cli.reporting.outcomes import ClassOutcome, NumberOutcome, calibration_error, r2
from dptrain.cli.reporting.quality import Quality
from dptrain.data.loading import LoadedData
from dptrain.errors import printable
from dptrain.sweeps.reporting import drawing
from dptrain.sweeps.reporting.page import Number, box, encoded, figure, page, table

if TYPE_CHECKING:
    from jinja2 import Template

_STYLE = """
h3 { margin-bottom: 0.3rem; }
.verdict { border-left: 4px solid #0072B2; padding-left: 0.7rem; }
.matrix td { min-width: 2.2rem; color: #000; }
.matrix td.right { background: rgb(0 114 178 / calc(var(--share) * 0.6)); }
.matrix td.wrong { background: rgb(213 94 0 / calc(var(--share) * 0.9)); }
.bars td.bar { width: 40%; min-width: 6rem; }
.bars i { display: block; height: 0.9rem; background: #0072B2; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 0.8rem; }
.gallery figure { margin: 0; break-inside: avoid; }
.gallery img { width: 6rem; height: 6rem; object-fit: contain; image-rendering: pixelated; background: #eee; }
.gallery pre { margin: 0; }
@media print { body { max-width: none; margin: 0; font-size: 11px; } h2, h3 { break-after: avoid; }
  table { display: table; } tr { break-inside: avoid; }
  .box, .verdict, .matrix td, .bars i { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
# Classes with a row each in the confusion matrix and in the table of classes; confusions, columns of importances.
_MOST_IN_MATRIX, _MOST_CLASSES, _MOST_CONFUSIONS, _MOST_COLUMNS = 20, 50, 15, 30


def installed() -> bool:
    """Return whether Jinja2 is installed."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        return False
    return True


def run_page(
    name: str,
    config: Config,
    data: LoadedData,
    splits: Splits,
    summary: Mapping[str, Any],
    epochs: Sequence[Mapping[str, float]],
    quality: Quality,
    command: str = "",
) -> bytes:
    """Return the page of a run: `name` its folder's, `summary` its summary.json, `epochs` its metrics.jsonl."""
    outcome = Outcome.of(summary)
    no_pictures = drawing.why_not("report")
    context = {
        "name": name,
        "sentences": sentences(config, data, splits, outcome),
        "notes": data.notes,
        "no_pictures": no_pictures,
        "curves": "" if no_pictures or not epochs else figures.curves(epochs, outcome.restored),
        "curves_caption": _curves_caption(outcome),
        **_metrics(outcome),
        "why_not": quality.why_not,
        "caution": "" if quality.why_not else caution(config, splits, outcome),
        "costs": costs(outcome, epochs),
        "command": command,
        **_of_quality(quality, data, draws=no_pictures is None),
    }
    text = _template().render(context)
    return encoded(page(printable(name), [text], _STYLE))


def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else printable(value),
    )
    environment.globals |= {
        "table": lambda *parts, **options: Markup(table(*parts, **options)),
        "figure": lambda *parts: Markup(figure(*parts)),
        "box": lambda facts: Markup(box(facts)),
    }
    return environment.from_string(Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8"))


def _curves_caption(outcome: Outcome) -> str:
    text = "Training: means over each epoch, while the weights change. Validation: after the epoch."
    if outcome.restored is not None:
        text += f" Dashed: epoch {outcome.restored}, whose weights were restored."
    return text


def _metrics(outcome: Outcome) -> dict[str, Any]:
    names = dict.fromkeys([*(key.removeprefix("val_") for key in outcome.metrics), *outcome.test])
    columns = {
        "training": outcome.metrics,
        "validation": {key.removeprefix("val_"): value for key, value in outcome.metrics.items() if key[:4] == "val_"},
        "test part": outcome.test,
    }
    used = {title: values for title, values in columns.items() if values}
    rows = [
        [name, *(Number(f"{values[name]:,.5g}") if name in values else Number("-") for values in used.values())]
        for name in names
    ]
    return {"metric_columns": list(used), "metric_rows": rows}


def _of_quality(quality: Quality, data: LoadedData, *, draws: bool) -> dict[str, Any]:
    """Return what the template shows of a quality; empty values where nothing was measured."""
    context: dict[str, Any] = dict.fromkeys(
        ("headline", "verdicts", "baseline_rows", "numbers", "importances", "worst", "worst_rows"), ()
    )
    context |= dict.fromkeys(("classes", "compared", "baseline_columns", "no_boosting", "importance_text"), "")
    context |= dict.fromkeys(("importance_unit", "worst_text"), "")
    if quality.why_not:
        return context
    assert quality.held_out is not None
    context |= {"no_boosting": quality.no_boosting, "compared": f"{len(quality.compared):,}"}
    if quality.classes is not None:
        context |= _of_classes(quality, quality.classes, draws)
    elif quality.numbers:
        context |= _of_numbers(quality, draws)
    context |= _of_importances(quality)
    samples = worst.worst_samples(quality, data.preprocessing)
    context["worst"] = samples
    context["worst_rows"] = [
        [sample.row, sample.true, sample.predicted, sample.error, *(sample.cells or {}).values()] for sample in samples
    ]
    context["worst_text"] = (
        f"The {len(samples)} held-out samples with the highest error, by index, counted from 0 as by "
        "`python -m dptrain predict RUN`."
    )
    return context


def _of_classes(quality: Quality, outcome: ClassOutcome, draws: bool) -> dict[str, Any]:
    matrix, bins = outcome.confusion, outcome.calibration()
    count, accuracy = len(outcome.labels), 1 - float(outcome.is_wrong.mean())
    by_class = scores(matrix)
    rows = _class_rows(outcome, by_class)
    is_shown = len(outcome.names) <= _MOST_IN_MATRIX
    sizes = matrix.sum(axis=1)
    binary = outcome.probabilities.shape[1] == 2
    what = f"class {outcome.names[1]}" if binary else "its answer is right"
    return {
        "headline": [
            ("accuracy on held-out samples", percent(accuracy)),
            ("mean F1 of the classes", ratio(_f1(outcome))),
            ("calibration error", percent(calibration_error(bins))),
            ("held-out samples", f"{count:,}"),
        ],
        **_class_baselines(quality, outcome),
        "classes": {
            "names": outcome.names,
            "rows": rows[:_MOST_CLASSES],
            "left_out": max(len(rows) - _MOST_CLASSES, 0),
            "matrix": [
                (name, [_cell(matrix, sizes, row, column) for column in range(len(outcome.names))])
                for row, name in enumerate(outcome.names)
            ]
            if is_shown
            else [],
            "confusions": [
                [outcome.names[row], outcome.names[column], wrong, Number(percent(wrong / int(sizes[row])))]
                for row, column, wrong in outcome.confusions(_MOST_CONFUSIONS)
            ],
            "calibration": figures.calibration(bins) if draws and bins else "",
            "calibration_text": _calibration_text(outcome, accuracy, bins),
            "calibration_caption": f"Left: how often it is so, by how sure the model is that {what}. On the dotted "
            "line both are equal. Right: the samples of each point.",
            "bins": [[Number(percent(part.confidence)), Number(percent(part.share)), part.count] for part in bins],
        },
    }


def _class_rows(outcome: ClassOutcome, by_class: Mapping[str, Sequence[float]]) -> list[list[Any]]:
    """Return a row a class: in their order, or where there are many the lowest F1 first."""
    sizes, taken = outcome.confusion.sum(axis=1), outcome.confusion.sum(axis=0)
    order = list(range(len(outcome.names)))
    if len(order) > _MOST_CLASSES:
        order.sort(key=lambda label: (by_class["f1"][label] if sizes[label] else 2, label))
    return [
        [
            outcome.names[label],
            int(sizes[label]),
            Number(ratio(by_class["precision"][label]) if taken[label] else "-"),
            Number(ratio(by_class["recall"][label]) if sizes[label] else "-"),
            Number(ratio(by_class["f1"][label]) if sizes[label] + taken[label] else "-"),
        ]
        for label in order
    ]


def _cell(matrix: Any, sizes: Any, row: int, column: int) -> tuple[str, str, bool]:
    share = float(matrix[row, column] / sizes[row]) if sizes[row] else 0.0
    return f"{matrix[row, column]:,}", f"{share:.3f}", row == column


def _calibration_text(outcome: ClassOutcome, accuracy: float, bins: Sequence[Any]) -> str:
    if not bins:
        return "The probabilities are not numbers."
    count = sum(part.count for part in bins)
    confidence = sum(part.count * part.confidence for part in bins) / count
    error = percent(calibration_error(bins))
    if outcome.probabilities.shape[1] == 2:
        share = sum(part.count * part.share for part in bins) / count
        return (
            f"On average the model gives class {outcome.names[1]} {percent(confidence)}; {percent(share)} of the "
            f"samples are of it. Over bins of alike samples the two differ by {error} on average."
        )
    word = "too sure" if confidence > accuracy else "not sure enough"
    return (
        f"On average the model is {percent(confidence)} sure, and right in {percent(accuracy)} of the cases: it is "
        f"{word}, by {error} on average over bins of alike samples."
    )


def _f1(outcome: ClassOutcome) -> float:
    """Return the mean F1 of the classes that occur."""
    occurs = outcome.confusion.sum(axis=0) + outcome.confusion.sum(axis=1) > 0
    return float(np.mean(np.array(scores(outcome.confusion)["f1"])[occurs]))


def _class_baselines(quality: Quality, outcome: ClassOutcome) -> dict[str, Any]:
    if not quality.baselines:
        return {}
    rows = quality.compared
    network = ClassOutcome(outcome.names, outcome.labels[rows], outcome.probabilities[rows])
    others = [
        (other, ClassOutcome(outcome.names, network.labels, np.asarray(other.outputs, np.float64)))
        for other in quality.baselines
    ]

    def row(name: str, answers: ClassOutcome) -> list[Any]:
        accuracy, loss = 1 - float(answers.is_wrong.mean()), float(answers.losses.mean())
        measures = percent(accuracy), ratio(loss), ratio(_f1(answers))
        return [name, *map(Number, measures)]

    return {
        "baseline_columns": ["model", "accuracy", "log loss (lower is better)", "mean F1"],
        "baseline_rows": [
            row("this network", network),
            *(row(_described(other), answers) for other, answers in others),
        ],
        "verdicts": [
            baselines.verdict(network.is_wrong, answers.is_wrong, ("share of wrong answers", _short(other)))
            for other, answers in others
        ],
    }


def _described(baseline: baselines.Baseline) -> str:
    remark = f", {baseline.remark}" if baseline.remark else ""
    return f"{baseline.name}, from {counted_samples(baseline.rows)}{remark}"


def _short(baseline: baselines.Baseline) -> str:
    return baseline.name.partition(" (")[0] + (f" {baseline.remark}" if baseline.remark else "")


def _of_numbers(quality: Quality, draws: bool) -> dict[str, Any]:
    first = quality.numbers[0]
    digits, shown = first.digits, [_of_target(outcome, index, draws) for index, outcome in enumerate(quality.numbers)]
    if not len(first.true):
        return {"headline": [("finite predictions", "0")], "numbers": shown}
    return {
        "headline": [
            (f"mean absolute error of {first.target}", digits.measure(float(first.errors.mean()))),
            ("root mean squared error", digits.measure(float(np.sqrt((first.errors**2).mean())))),
            ("R²", ratio(r2(first.true, first.predicted))),
            ("held-out samples", f"{len(first.true) + first.lost:,}"),
        ],
        **_number_baselines(quality, first),
        "numbers": shown,
    }


def _of_target(outcome: NumberOutcome, index: int, draws: bool) -> dict[str, Any]:
    digits = outcome.digits
    if not len(outcome.true):
        return {
            "target": outcome.target,
            "text": "No prediction is finite.",
            "picture": "",
            "caption": "",
            "deciles": [],
        }
    low, middle, high = np.quantile(outcome.errors, (0.5, 0.9, 0.99))
    lost = f" {counted_samples(outcome.lost)} without a finite prediction are left out." if outcome.lost else ""
    bias = float(outcome.residuals.mean())
    return {
        "target": outcome.target,
        "text": f"Half of the predictions are off by at most {digits.measure(low)}, nine of ten by at most "
        f"{digits.measure(middle)}, 99 % by at most {digits.measure(high)}. On average they are "
        f"{digits.measure(abs(bias))} too {'high' if bias > 0 else 'low'}.{lost}",
        "picture": figures.numbers(outcome, f"numbers-{index}") if draws else "",
        "caption": "Left: predicted against true, on the dotted line both are equal; at most 500 samples are drawn. "
        "Middle: residuals, without the outermost hundredth. Right: the error by tenths of the samples.",
        "deciles": [
            [
                f"{digits.value(part.low)} to {digits.value(part.high)}",
                part.count,
                Number(digits.measure(part.error)),
                Number(digits.measure(part.bias)),
            ]
            for part in outcome.deciles()
        ],
    }


def _number_baselines(quality: Quality, outcome: NumberOutcome) -> dict[str, Any]:
    if not quality.baselines or outcome.lost:
        return {}
    rows, digits = quality.compared, outcome.digits
    true, network = outcome.true[rows], outcome.predicted[rows]

    def row(name: str, predicted: Any) -> list[Any]:
        errors = predicted - true
        measures = float(np.abs(errors).mean()), float(np.sqrt((errors**2).mean()))
        return [name, *(Number(digits.measure(value)) for value in measures), Number(ratio(r2(true, predicted)))]

    return {
        "baseline_columns": ["model", "mean absolute error", "root mean squared error", "R²"],
        "baseline_rows": [
            row("this network", network),
            *(row(_described(other), other.outputs) for other in quality.baselines),
        ],
        "verdicts": [
            baselines.verdict(
                np.abs(network - true), np.abs(other.outputs - true), ("mean absolute error", _short(other))
            )
            for other in quality.baselines
        ],
    }


def _of_importances(quality: Quality) -> dict[str, Any]:
    if not quality.importances:
        return {}
    greatest = max(quality.importances[0].rise, 0.0)
    form = ratio if quality.classes is not None else quality.numbers[0].digits.measure
    unit = "log loss" if quality.classes is not None else "mean absolute error"
    shown = quality.importances[:_MOST_COLUMNS]
    left = len(quality.importances) - len(shown)
    return {
        "importance_unit": f"{unit} rises by",
        "importance_text": f"How much the {unit} rises when a column's values are shuffled among "
        f"{quality.shuffled:,} held-out samples: mean and standard deviation of {REPEATS} shuffles. Near 0 the model "
        "does without the column, or finds the same in another one."
        + (f" The first {len(shown)}; {left} more columns matter less." if left else ""),
        "importances": [
            (
                part.name,
                form(part.rise),
                form(part.deviation),
                f"{100 * max(part.rise, 0) / greatest:.1f}" if greatest else "0",
            )
            for part in shown
        ],
    }
