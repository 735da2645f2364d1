"""report.html: what it says of a classifier, a regression and hostile names; in a browser where there is one."""

import json

import numpy as np
import pytest

pytest.importorskip("jinja2", reason="pages of runs need the extra 'report'")
pytest.importorskip("matplotlib", reason="pictures need the extra 'report'")

from dptrain.cli.building import Splits
from dptrain.cli.options.config import resolve
from dptrain.cli.reporting import page
from dptrain.cli.reporting.baselines import Baseline, constant
from dptrain.cli.reporting.importance import Importance
from dptrain.cli.reporting.outcomes import ClassOutcome, NumberOutcome
from dptrain.cli.reporting.page import run_page
from dptrain.cli.reporting.quality import Quality
from dptrain.data.loading import LoadedData, Split
from dptrain.data.preprocessing import Column, Preprocessing
from dptrain.sweeps.reporting import drawing
from tests.sample import sample
from tests.unit.cli.reporting.pages import Page
from tests.unit.sweeps.reporting.test_page import installed_browser, look

RNG = np.random.default_rng(6)
HOSTILE = ["</script><img src=x onerror=alert(1)>", "<b>&amp;\"'", "東京 {{ 7 * 7 }} $x_{$", "\x1b[2J\u202e\ud800"]
EPOCHS = [
    {"epoch": n, "loss": 2.0 if n == 1 else 0.01 + n / 1e4, "val_loss": 0.02, "samples_per_second": 100.0 * n}
    for n in range(1, 9)
]
SUMMARY = {
    "metrics": {"loss": 0.0104, "val_loss": 0.02, "val_accuracy": 0.9, "accuracy": 0.95},
    "test": {"loss": 0.03},
    "epochs": 8,
    "restored": 4,
    "best": {"epoch": 4, "monitor": "val_loss", "value": 0.02},
    "seconds": 12.34,
    "started": "2026-11-28T10:00:00+0000",
    "world_size": 2,
    "devices": [[0, "host-a", 11, "CPU"], [1, "host-b", 12, "CPU"]],
    "memory": [250_000_000, 260_000_000],
    "parameters": 101_770,
    "versions": {"dptrain": "0.1.0"},
}


def data_of(x, y, task, classes=0, preprocessing=None, notes=()):
    split = Split(x, y)
    return LoadedData("houses", split, split, classes, task, preprocessing, notes), Splits(split, split, None)


def written(data, splits, quality, summary=SUMMARY, epochs=EPOCHS, name="run", **settings):
    config = resolve({}, "", {key.replace("__", "."): value for key, value in settings.items()})
    content = run_page(
        name, config, data, splits, summary, epochs, quality, "python -m dptrain --config run/config.yaml"
    )
    return content.decode()


def classifier(names, rows=120, pictures=True):
    classes = len(names)
    labels = RNG.integers(0, classes, rows)
    probabilities = RNG.dirichlet(np.ones(classes), rows) if classes > 1 else np.ones((rows, 1))
    x = RNG.integers(0, 256, (rows, 12, 12), dtype=np.uint8) if pictures else RNG.normal(size=(rows, 20))
    data, splits = data_of(x, labels, "multiclass", classes)
    outcome = ClassOutcome(names, labels, probabilities)
    compared = np.arange(rows)
    others = [constant(labels, rows, classes)]
    return data, splits, Quality("", splits.validation, outcome, baselines=others, compared=compared)


@pytest.fixture(scope="module")
def classes_page():
    return written(*classifier(["zero", "one", "two"]), train__early_stopping=2)


@pytest.fixture(scope="module")
def numbers_page():
    rows = 300
    columns = Column("area", "number"), Column("<i>city", "one-hot", tuple(HOSTILE[:3]))
    table = Preprocessing("regression", columns, "price")
    x = np.column_stack([RNG.uniform(20, 200, rows), np.eye(3)[RNG.integers(0, 3, rows)]]).astype(np.float32)
    y = (x[:, 0] * 2543 + 100_000).round().astype(np.float32)
    data, splits = data_of(x, y, "regression", preprocessing=table, notes=("600 rows <b> held out",))
    predicted = y + RNG.normal(0, 9000, rows).astype(np.float32)
    others = [constant(y, rows, 0), Baseline("gradient boosting (its defaults)", y + 20_000, rows, "without note")]
    outcome = NumberOutcome.of("price", y, predicted)
    important = [Importance("area", 81_234.5, 812.0), Importance("<i>city", -3.0, 5.0)]
    return written(
        data, splits, Quality("", splits.validation, None, [outcome], important, 300, others, np.arange(rows))
    )


@pytest.fixture
def _no_pictures(monkeypatch):
    """Draw nothing, which takes most of a page's time, for tests of its text alone."""
    monkeypatch.setattr(drawing, "why_not", lambda extra="sweep": "not now")


def test_a_classifiers_page_holds_what_is_asked_for(classes_page):
    shown = Page(classes_page)
    assert "The model was trained on houses to tell 3 classes apart." in shown.text
    assert "the weights of epoch 4, which early stopping restored as the best by val_loss" in shown.text
    assert "The epoch was chosen by these same samples" in shown.text
    rows = shown.table("precision")
    assert [row["class"] for row in rows] == ["zero", "one", "two"]
    assert sum(int(row["samples"]) for row in rows) == 120
    matrix = next(table for table in shown.tables if table[0] == ["", "zero", "one", "two"])
    assert sum(int(cell) for row in matrix[1:] for cell in row[1:]) == 120
    assert [row["model"] for row in shown.table("mean F1")] == [
        "this network",
        "always the most frequent class, from 120 samples",
    ]
    assert len(shown.images) == 20
    assert "Calibration" in shown.text
    assert "python -m dptrain --config run/config.yaml" in shown.text
    assert [row["samples"] for row in shown.table("it is so")]


def test_what_it_took(classes_page):
    costs = dict(next(table for table in Page(classes_page).tables if ["ranks", "2"] in table))
    assert costs["time, from start to saved model"] == "12.3 s"
    assert costs["samples a second, median of the epochs"] == "450"
    assert costs["rank 1"] == "host-b, CPU; at most 260.0 MB of memory"


def test_a_regressions_page_has_the_targets_digits(numbers_page):
    shown = Page(numbers_page)
    assert "to predict the number price" in shown.text
    (network, mean, boosted) = shown.table("root mean squared error")
    assert boosted["mean absolute error"] == "20,000"
    assert 6000 < int(network["mean absolute error"].replace(",", "")) < 9000
    assert mean["R²"] in ("0.000", "0.0000", "0")
    assert "lower than that of gradient boosting without note by" in shown.text
    deciles = shown.table("true value")
    assert [row["samples"] for row in deciles] == ["30"] * 10
    assert "e+" not in "".join(row["true value"] for row in deciles)
    assert shown.table("mean absolute error rises by")[0]["mean absolute error rises by"] == "81,234 ± 812"
    worst = shown.table("index")
    assert len(worst) == 20
    assert worst[0]["<i>city"] in HOSTILE[:3]
    errors = [abs(int(row["error"].removeprefix("off by ").replace(",", ""))) for row in worst]
    assert errors == sorted(errors, reverse=True)


def test_hostile_names_stay_text():
    shown = Page(written(*classifier(HOSTILE), name="<script>x</script>"))
    assert shown.tags.count("script") == 1
    assert "<script>x</script>" in shown.text
    assert [row["class"] for row in shown.table("precision")][:3] == HOSTILE[:3]
    assert "{{ 7 * 7 }}" in shown.text, "a name is no template"
    assert "\x1b" not in shown.text
    assert "\u202e" not in shown.text


def test_a_thousand_classes_are_shown_in_part():
    names = [f"class {n}" for n in range(1000)]
    text = written(*classifier(names, 3000, pictures=False))
    shown = Page(text)
    assert len(shown.table("precision")) == 50
    assert "950 more are in summary.json" in shown.text
    assert "Confusion matrix" not in shown.text
    assert len(shown.table("taken for")) == 15
    assert len(text) < 1_000_000


@pytest.mark.usefixtures("_no_pictures")
@pytest.mark.parametrize("names", [["only"], ["no", "yes"]])
def test_few_classes(names):
    shown = Page(written(*classifier(names)))
    assert [row["class"] for row in shown.table("precision")] == names


@pytest.mark.usefixtures("_no_pictures")
def test_a_class_that_is_never_predicted_has_no_precision():
    labels = np.array([0, 0, 1])
    data, splits = data_of(np.zeros((3, 4)), labels, "multiclass", 3)
    outcome = ClassOutcome(["a", "b", "c"], labels, np.eye(3)[[0, 0, 0]])
    rows = Page(written(data, splits, Quality("", splits.validation, outcome))).table("precision")
    assert [(row["precision"], row["recall"]) for row in rows] == [("0.667", "1.000"), ("-", "0.000"), ("-", "-")]


@pytest.mark.usefixtures("_no_pictures")
def test_a_model_that_is_always_right_has_no_worst_samples():
    labels = np.array([0, 1])
    data, splits = data_of(np.zeros((2, 4)), labels, "multiclass", 2)
    shown = Page(written(data, splits, Quality("", splits.validation, ClassOutcome(["a", "b"], labels, np.eye(2)))))
    assert "Nowhere: every held-out sample is taken for its class." in shown.text


def test_no_number_anywhere_is_said():
    y = np.arange(20, dtype=np.float32)
    data, splits = data_of(np.zeros((20, 3)), y, "regression")
    for predicted in (np.full(20, np.nan, np.float32), np.where(y < 5, np.inf, y)):
        outcome = NumberOutcome.of("target", y, predicted)
        shown = Page(written(data, splits, Quality("", splits.validation, None, [outcome])))
        assert ("No prediction is finite" in shown.text) == np.isnan(predicted[0])
        assert ("5 samples without a finite prediction" in shown.text) != np.isnan(predicted[0])
    labels = np.array([0, 1])
    data, splits = data_of(np.zeros((2, 3)), labels, "multiclass", 2)
    nothing = ClassOutcome(["a", "b"], labels, np.full((2, 2), np.nan))
    assert (
        "The probabilities are not numbers" in Page(written(data, splits, Quality("", splits.validation, nothing))).text
    )


def test_what_is_not_measured_is_said():
    data, splits = data_of(np.zeros((0, 3)), np.zeros(0, np.int32), "multiclass", 2)
    shown = Page(written(data, splits, Quality("there are no held-out samples"), epochs=[]))
    assert "Not measured: there are no held-out samples." in shown.text
    assert "Classes" not in shown.text


@pytest.mark.usefixtures("_no_pictures")
def test_a_hostile_summary_is_shown_as_far_as_it_is_one():
    data, splits = data_of(np.zeros((3, 3)), np.zeros(3, np.int32), "multiclass", 2)
    nonsense = {key: "<b>" for key in SUMMARY} | {"devices": [1, [2], [0, "<i>", 1, "<u>"]], "best": {"epoch": -1}}
    for summary in ({}, nonsense, dict.fromkeys(SUMMARY), {"seconds": 10**400, "memory": [10**400], "epochs": 1e300}):
        Page(written(data, splits, Quality("no"), summary))


def test_without_matplotlib_there_are_tables_and_a_line(monkeypatch, classes_page):
    monkeypatch.setattr(drawing, "why_not", lambda extra="sweep": f"matplotlib is not installed. For them: {extra}")
    shown = Page(written(*classifier(["zero", "one"])))
    assert "No pictures: matplotlib is not installed. For them: report" in shown.text
    assert (shown.images, shown.tags.count("svg")) == ([], 0)
    assert shown.table("precision")


@pytest.mark.long
def test_the_same_run_writes_the_same_page():
    arguments = classifier(["zero", "one", "two"])
    assert written(*arguments) == written(*arguments)


def test_whether_it_is_installed(monkeypatch):
    assert page.installed()
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    assert not page.installed()


SHOWN = """
const pictures = [...page.querySelectorAll("svg")].filter((one) => one.getClientRects().length);
return {
  fits: page.documentElement.scrollWidth <= view.innerWidth,
  kinds: [...new Set(pictures.map((one) => one.classList[0]))],
  widest: Math.max(...pictures.map((one) => one.getBoundingClientRect().right)),
  outside: view.performance.getEntriesByType("resource").length,
  broken: [...page.images].filter((one) => !one.naturalWidth).length,
  title: page.title,
};
"""


@pytest.mark.parametrize(("width", "kind"), [(1200, "wide"), (400, "narrow")])
@pytest.mark.parametrize("fixture", sample(["classes_page", "numbers_page"], 2))
def test_it_fits_a_window_and_loads_nothing(tmp_path, request, fixture, width, kind):
    installed_browser()
    measured = look(tmp_path, request.getfixturevalue(fixture), SHOWN, width)
    assert json.loads(json.dumps(measured)) | {"widest": 0} == {
        "fits": True,
        "kinds": [kind],
        "widest": 0,
        "outside": 0,
        "broken": 0,
        "title": "run",
    }
    assert measured["widest"] <= width
