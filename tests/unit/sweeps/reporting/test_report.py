"""trials.csv and report.html: what is in them, and that what a user wrote stays text."""

import csv
import dataclasses
import math
import re
import sys
from html.parser import HTMLParser

import pytest

pytest.importorskip("scipy", reason="statistics need the extra 'sweep'")

from dptrain.errors import ConfigError, OutputError
from dptrain.sweeps.analysis import importance
from dptrain.sweeps.analysis.pareto import front_of
from dptrain.sweeps.analysis.statistics import summarize
from dptrain.sweeps.records import Status, Trial
from dptrain.sweeps.reporting import drawing, report
from dptrain.sweeps.reporting.report import MEASURES, Report, write_report, write_trials_csv
from tests.unit.sweeps.samples import ending, endings, logs, trials

NASTY = "<b>&\"'</td><script>alert(1)</script>$\\frac{$"
FIELDS = ["learning_rate", "model.hidden"]
HEADLINES = (
    *("What was found", "What was swept", "Ranking", "Result", "Runs", "Differences", "Over epochs"),
    *("What the fields do", "Failed runs", "Training the best run again", "How the numbers are computed", "Made with"),
)
# Elements that have no end tag.
VOID = {"meta"}


class Page(HTMLParser):
    """A page's elements, their attributes, and the text of each cell and paragraph; elements must nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts, self.rows = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data

    @property
    def text(self):
        return "".join(self.texts)

    @property
    def pictures(self):
        """How many there are; each is there twice, wide and narrow."""
        assert self.tags.count("svg") == 2 * self.tags.count("figure")
        return self.tags.count("figure")

    def headlines(self):
        return [text for text in self.texts if text in HEADLINES]

    def table(self, first):
        """Return the rows below the header that starts with this name, up to the next header or rows of other width."""
        [start] = [n for n, row in enumerate(self.rows) if row[0] == first]
        header = self.rows[start]
        cells = []
        for row in self.rows[start + 1 :]:
            if len(row) != len(header):
                break
            cells.append(dict(zip(header, row, strict=True)))
        return cells


def written(path, all_trials, ended, *, fields=FIELDS, facts=None, **options):
    facts = {"dptrain": "1.2.3"} if facts is None else facts
    write_report(path, Report(all_trials, ended, iter(logs(ended)), "val_accuracy", "max", fields, facts, **options))
    return Page(path.read_text(encoding="utf-8"))


# --- trials.csv ---


def test_trials_csv_is_the_summaries(tmp_path):
    all_trials = [
        Trial(0, {"learning_rate": 0.1 + 0.2, "model.hidden": [128, 64], "name": 'a,"b"\nc'}),
        Trial(1, {"learning_rate": 1e-05, "model.hidden": [], "name": None}),
        Trial(2, {"learning_rate": 1, "model.hidden": [1], "name": True}),
    ]
    ended = [*endings({0: [1 / 3, 2 / 3, 0.1], 1: [0.7]}), ending(2, 0, status=Status.DIVERGED, epochs=4)]
    summaries = summarize(all_trials, ended, "val_accuracy", "max")
    path = tmp_path / "trials.csv"
    write_trials_csv(path, all_trials, summaries[::-1], ["name", "model.hidden", "learning_rate"])
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == ["trial", "name", "model.hidden", "learning_rate", *MEASURES]
    assert MEASURES == (
        "n",
        "mean",
        "std",
        "ci_low",
        "ci_high",
        "median",
        "best",
        "seconds",
        "failed",
        "epochs_trained",
    )
    assert [row["trial"] for row in rows] == ["0", "1", "2"]
    assert [row["learning_rate"] for row in rows] == ["0.30000000000000004", "1e-05", "1"]
    assert [row["model.hidden"] for row in rows] == ["[128, 64]", "[]", "[1]"]
    assert [row["name"] for row in rows] == ['a,"b"\nc', "", "true"]
    for row, summary in zip(rows, summaries, strict=True):
        for name in MEASURES:
            value = getattr(summary, name)
            assert row[name] == "" if value is None else float(row[name]) == value
    assert rows[2]["n"] == "0"
    assert rows[2]["failed"] == "1"
    assert rows[1]["std"] == rows[1]["ci_low"] == rows[1]["ci_high"] == rows[2]["mean"] == ""


def test_trials_csv_that_cannot_be_written(tmp_path):
    with pytest.raises(OutputError, match=r"trials\.csv"):
        write_trials_csv(tmp_path / "missing" / "trials.csv", [], [], [])


# --- report.html ---


@pytest.mark.parametrize("pictures", [0, 1, 2])
def test_a_report_in_a_hurry_draws_nothing_more(tmp_path, pictures):
    pytest.importorskip("matplotlib", reason="pictures need the extra 'sweep'")
    requests = []

    def hurries():
        requests.append(1)
        return len(requests) > pictures

    all_endings = endings({0: [0.5, 0.6, 0.7], 1: [0.8, 0.9, 0.95]})
    page = written(tmp_path / "report.html", trials(2), all_endings, hurries=hurries)
    assert page.pictures == pictures
    assert [row["trial"] for row in page.table("place")] == ["1", "0"]
    assert ("No pictures: a signal has stopped the sweep" in page.text) == (pictures == 0)


def test_report_holds_all_trials_numbers_and_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra 'sweep'")
    ended = endings({0: [0.5, 0.6, 0.7], 1: [0.8, 0.9, 0.95], 2: [0.1, 0.2, 0.2]})
    ended[8] = ending(2, 2, status=Status.DIVERGED, epochs=1)
    page = written(
        tmp_path / "report.html",
        trials(3),
        ended,
        facts={"dptrain": "1.2.3", "devices": ["cpu", "cpu"]},
        repeat="python -m dptrain train --seed 7",
        title="My sweep",
    )
    assert page.texts.count("My sweep") == 2  # title and headline
    assert "3 trials, 3 seeds, 9 runs (1 diverged, 8 done), 1 without a value" in page.text
    ranking = page.table("place")
    assert [(row["place"], row["trial"], row["n"]) for row in ranking] == [
        ("1", "1", "3"),
        ("2", "0", "3"),
        ("3", "2", "2"),
    ]
    assert [row["mean"] for row in ranking] == ["0.88333", "0.6", "0.15"]
    assert ranking[1]["95 % interval"] == "0.3476 to 0.80854".replace(" ", "\N{NO-BREAK SPACE}")
    assert [row["hidden"] for row in ranking] == ["[128]", "[64]", "[192]"]
    assert "1 failed" in ranking[2].values()
    assert page.table("run") == [
        {
            "run": "202",
            "trial": "2",
            "seed": "2",
            "status": "diverged",
            "epochs": "1",
            "reason": "loss is nan at step 7",
        }
    ]
    swept = {row["field"]: row["values"] for row in page.table("field")}
    assert swept == {
        "learning_rate": "1, 0.1 and 0.01",
        "model.hidden": "[64], [128] and [192]",
        "seeds": "0, 1 and 2",
    }
    assert "Trial 1 (learning_rate=0.1, model.hidden=[128]) has the best mean" in page.text
    for text in ("python -m dptrain train --seed 7", "1.2.3", '["cpu", "cpu"]'):
        assert text in page.text
    assert "not estimated from fewer than 8 complete trials" in page.text
    assert page.pictures == 4  # the ranking, epochs, parallel coordinates, the metric against each field
    assert page.headlines() == [name for name in HEADLINES if name not in ("Result", "Runs")]


@pytest.mark.usefixtures("undrawn")
def test_the_report_and_the_table_mark_the_front(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra 'sweep'")
    all_trials, ended = trials(3), endings({0: [0.5, 0.6], 1: [0.8, 0.9], 2: [0.1, 0.2]})
    ended = [
        dataclasses.replace(ending, metrics={**ending.metrics, "size": 9 - ending.run.trial % 2}) for ending in ended
    ]
    front = front_of(all_trials, ended, {"val_accuracy": "max", "size": "min"})
    page = written(tmp_path / "report.html", all_trials, ended, front=front)
    ranking = page.table("place")
    assert [(row["trial"], row["mean size"], row["remarks"]) for row in ranking] == [
        ("1", "8", "Pareto front"),
        ("0", "9", ""),
        ("2", "9", ""),
    ]
    assert page.pictures == 5
    assert page.texts.count("Pareto front") == 2  # the remark and the headline
    write_trials_csv(
        tmp_path / "trials.csv", all_trials, summarize(all_trials, ended, "val_accuracy", "max"), FIELDS, front
    )
    with open(tmp_path / "trials.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["mean_size"], row["pareto"]) for row in rows] == [("9.0", "false"), ("8.0", "true"), ("9.0", "false")]


def test_nothing_a_user_wrote_becomes_html(tmp_path):
    all_trials = [Trial(n, {NASTY: f"{NASTY}{n}"}) for n in range(2)]
    ended = [
        *endings({0: [0.5, 0.6], 1: [0.7, 0.9]}),
        dataclasses.replace(ending(1, 2, status=Status.FAILED), reason=f"reason {NASTY}"),
    ]
    page = written(
        tmp_path / "report.html",
        all_trials,
        ended,
        fields=[NASTY],
        facts={f"fact {NASTY}": NASTY},
        repeat=NASTY,
        title=NASTY,
    )
    assert "b" not in page.tags
    assert page.tags.count("script") == 1  # the page's own
    for text in (f"{NASTY}0", f"{NASTY}1", f"reason {NASTY}", f"fact {NASTY}"):
        assert any(text in row for row in page.rows)
    assert page.texts.count(NASTY) >= 4  # title, headline, fact, command


@pytest.mark.usefixtures("no_pictures")
def test_differences_are_those_of_the_best_trial_and_then_of_other_pairs(tmp_path):
    noise = [0.0, 0.003, -0.002, 0.004, -0.003, 0.001, -0.002, -0.001]
    values = {
        0: [0.7 + x for x in noise],
        1: [0.9 + x for x in reversed(noise)],
        2: [0.9 + x for x in noise],
    }
    page = written(tmp_path / "report.html", trials(3), endings(values))
    rows = page.table("than trial")
    assert [(row["than trial"], row["setting"]) for row in rows] == [("2", "0.01, [192]"), ("0", "1, [64]")]
    assert [row["at 5 %"] for row in rows] == ["not told apart", "significant"]
    assert rows[1]["difference"] == "+0.2"
    low, high = (float(end) for end in rows[1]["interval, corrected"].split("\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}"))
    assert low < 0.2 < high
    assert rows[1]["effect"].startswith("+")
    assert rows[1]["effect"].endswith(", huge")
    assert re.fullmatch(r"[+-][0-9.]+", rows[0]["effect"])  # no word for what may be chance
    assert 0 < float(rows[1]["p"]) < float(rows[1]["p corrected"]) < 0.05
    [other] = page.table("trials")
    assert (other["trials"], other["difference"]) == ("0 and 2", "-0.2")
    assert "1 other pair of trials" in page.text


@pytest.mark.usefixtures("no_pictures")
def test_mean_interval_and_verdict_stand_in_a_box_above_the_prose(tmp_path):
    page = written(tmp_path / "report.html", trials(2), endings({0: [0.5, 0.6, 0.5], 1: [0.8, 0.9, 0.85]}))
    assert ("class", "box") in page.attributes
    above = page.text.partition("What was found")[0]
    for text in (
        "mean of val_accuracy of trial 1, the best",
        "95 % interval over seeds alone",
        "better than the other",
    ):
        assert text in above
    few = written(tmp_path / "report.html", trials(2), endings({0: [0.5, 0.6], 1: [0.9, 0.7]}))
    assert re.search(r"too few seeds to tell it from trial 0: add at least \d+", few.text.partition("What was")[0])
    [row] = few.table("than trial")
    assert re.fullmatch(r"too few seeds: add at least \d+", row["at 5 %"])


@pytest.mark.usefixtures("no_pictures")
def test_remarks_of_a_ranking(tmp_path):
    ended = [*endings({0: [0.5, 0.6]}), ending(1, 0, 0.5, Status.PRUNED), ending(2, 0, 0.4, Status.PAUSED)]
    page = written(tmp_path / "report.html", trials(4), [*ended, ending(3, 0, status=Status.FAILED)])
    remarks = {row["trial"]: row["remarks"] for row in page.table("place")}
    assert remarks == {"0": "", "1": "stopped early", "2": "unfinished", "3": "1 failed, no value"}


def test_no_cell_is_a_formula(tmp_path):
    formulas = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"]
    all_trials = [Trial(n, {"word": text}) for n, text in enumerate(formulas)]
    ended = endings({n: [0.5] for n in range(len(all_trials))})
    write_trials_csv(tmp_path / "trials.csv", all_trials, summarize(all_trials, ended, "val_accuracy", "max"), ["word"])
    with open(tmp_path / "trials.csv", newline="") as file:
        assert [row["word"] for row in csv.DictReader(file)] == [f"'{text}" for text in formulas]


@pytest.mark.usefixtures("no_pictures")
def test_which_interval_it_is(tmp_path):
    def methods(value):
        page = written(tmp_path / "report.html", trials(2), endings({0: [0.5, 0.6], 1: [0.7, value]}))
        return page.text.partition("How the numbers are computed")[2]

    assert "Student's t intervals of the mean's logit" in methods(0.9)
    assert "logit" not in methods(90.0)


@pytest.mark.usefixtures("no_pictures")
def test_ranges_are_those_that_were_swept(tmp_path):
    space = {"random": {"learning_rate": "log:1e-5..10.0"}, "grid": {"model.hidden": [[64], [128]]}, "samples": 2}
    page = written(tmp_path / "report.html", trials(2), endings({0: [0.5, 0.6], 1: [0.7, 0.9]}), space=space)
    swept = {row["field"]: row["values"] for row in page.table("field")}
    assert swept["learning_rate"] == "1e-05 to 10, evenly in the logarithm"


@pytest.mark.usefixtures("undrawn")
def test_importances_are_shown_where_there_are_trials_enough(tmp_path):
    values = {n: [n / 10, n / 10 + 0.01] for n in range(8)}
    page = written(tmp_path / "report.html", trials(8), endings(values))
    assert ("fANOVA" in page.text) == (drawing.why_not() is None and importance.installed())


def test_report_needs_nothing_from_outside(tmp_path):
    path = tmp_path / "report.html"
    page = written(path, trials(2), endings({0: [0.5, 0.6], 1: [0.7, 0.9]}))
    assert not {"link", "iframe", "object", "base", "img"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name != "src"
        assert name not in ("href", "xlink:href") or value.startswith("#")
    [policy] = [value for name, value in page.attributes if name == "content" and "default-src" in value]
    assert policy.startswith("default-src 'none'; ")
    text = path.read_text()
    assert text.count("url(") == text.count("url(#")
    assert "@import" not in text


@pytest.mark.usefixtures("no_pictures")
def test_metrics_that_are_not_finite_are_failures_with_a_reason(tmp_path):
    ended = [*endings({0: [0.5, 0.6]}), ending(0, 2, math.nan)]
    page = written(tmp_path / "report.html", trials(1), ended)
    assert [row["reason"] for row in page.table("run")] == ["val_accuracy is nan at the end"]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_report_of_nothing_finished(tmp_path, number):
    page = written(tmp_path / "report.html", trials(number), [])
    assert len(page.table("place")) == number
    assert "No run has ended with a value of val_accuracy" in page.text
    assert page.pictures == 0


@pytest.mark.usefixtures("undrawn")
def test_report_of_a_sweep_over_seeds_alone(tmp_path):
    page = written(tmp_path / "report.html", [Trial(0, {})], endings({0: [0.5, 0.7]}), fields=[], facts={})
    assert [(row["trial"], row["mean"], row["n"]) for row in page.table("place")] == [("0", "0.6", "2")]
    assert [(row["seed"], row["val_accuracy"]) for row in page.table("seed")] == [("0", "0.5"), ("1", "0.7")]
    assert "Only the seed: all runs have the same setting." in page.text
    assert page.table("field") == [{"field": "seeds", "values": "0 and 1"}]
    assert "Ranking" not in page.headlines()
    assert "Differences" not in page.headlines()
    assert page.pictures == (2 if drawing.why_not() is None else 0)  # the seeds, and epochs


@pytest.mark.usefixtures("undrawn")
def test_report_of_one_run(tmp_path):
    page = written(tmp_path / "report.html", [Trial(0, {})], endings({0: [0.5]}), fields=[], facts={})
    assert [(row["n"], row["95 % interval"]) for row in page.table("place")] == [("1", "-")]


@pytest.mark.usefixtures("undrawn")
def test_report_of_many_trials_and_failures_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_MOST_FAILURES", 3)
    ended = endings({n: [0.5 + n / 1000, 0.5 + n / 900] for n in range(300)})
    ended += [ending(n, 2, status=Status.FAILED) for n in range(7)]
    page = written(tmp_path / "report.html", trials(300), ended)
    assert len(page.table("place")) == 300
    assert len(page.table("run")) == 3
    assert "The first 3 of 7." in page.text
    if page.pictures:
        assert "Only the best 12 of 300 trials are drawn." in page.text
        assert "Only the best 30 of 300 trials are drawn." in page.text
    swept = {row["field"]: row["values"] for row in page.table("field")}
    assert swept["model.hidden"].endswith(" and 288 more")


def test_report_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = written(tmp_path / "report.html", trials(2), endings({0: [0.5, 0.6], 1: [0.7, 0.9]}))
    assert page.pictures == 0
    assert "pip install 'scipy" in page.text
    assert len(page.table("place")) == 2


def test_report_of_an_unknown_metric(tmp_path):
    with pytest.raises(ConfigError, match="expected one of loss, val_accuracy"):
        write_report(tmp_path / "report.html", Report(trials(1), endings({0: [1.0]}), [], "x", "max", [], {}))
    assert list(tmp_path.iterdir()) == []
