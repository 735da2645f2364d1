"""A report in a real browser (Chromium, where there is one): it fits its window, and what it runs runs."""

import dataclasses
import html
import json
import re
import shutil
import subprocess

import pytest

pytest.importorskip("scipy", reason="statistics need the extra 'sweep'")

from dptrain.sweeps.analysis.pareto import front_of
from dptrain.sweeps.records import Status, Trial
from dptrain.sweeps.reporting.page import figure, page, table
from dptrain.sweeps.reporting.report import Report, write_report
from tests.sample import sample
from tests.unit.sweeps.samples import ending, endings, logs, trials

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")

# A page that holds a report in a frame of some width, waits for it and writes down what a probe finds in it.
FRAME = """<!DOCTYPE html><meta charset="utf-8"><body style="margin: 0"><pre id="found"></pre>
<iframe style="border: 0; width: {width}px; height: 3000px" srcdoc="{report}"></iframe>
<script>
document.querySelector("iframe").addEventListener("load", ({{ target }}) => {{
  const page = target.contentDocument, view = target.contentWindow;
  document.getElementById("found").textContent = JSON.stringify((() => {{ {probe} }})());
}});
</script>"""


def installed_browser():
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser on PATH: {', '.join(BROWSERS)}")
    return browser


@pytest.fixture(scope="module")
def _browser():
    """For reports that are drawn for a browser alone."""
    installed_browser()


def look(tmp_path, report, probe, width=1200):
    """Return what a probe, the body of a function in JavaScript, finds in a report at a width in pixels.

    The frame is not bound by the report's policy; the report is.
    """
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width, report=html.escape(report), probe=probe), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [installed_browser(), *options, "--virtual-time-budget=10000", "--dump-dom", frame.as_uri()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="found">(.*?)</pre>', process.stdout, re.DOTALL)
    assert match is not None, process.stderr
    assert match[1], process.stdout[-2000:] + process.stderr
    return json.loads(html.unescape(match[1]))


@pytest.fixture(scope="module")
def report(_browser, tmp_path_factory):
    pytest.importorskip("matplotlib", reason="pictures need the extra 'sweep'")
    path = tmp_path_factory.mktemp("report") / "report.html"
    ended = endings({n: [0.5 + n / 50 + seed / 100 for seed in range(3)] for n in range(12)})
    ended += [ending(12, seed, status=Status.FAILED) for seed in range(3)]
    facts, repeat = {"command": "python " + "x" * 300}, "python -m dptrain " + "--option=value " * 30
    arguments = ("val_accuracy", "max", ["learning_rate", "model.hidden"], facts)
    write_report(path, Report(trials(13), ended, logs(ended), *arguments, repeat=repeat))
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def seeds_report(_browser, tmp_path_factory):
    pytest.importorskip("matplotlib", reason="pictures need the extra 'sweep'")
    path = tmp_path_factory.mktemp("report") / "report.html"
    ended = endings({0: [0.5 + seed / 100 for seed in range(8)]})
    write_report(path, Report([Trial(0, {})], ended, logs(ended), "val_accuracy", "max", [], {}))
    return path.read_text(encoding="utf-8")


SHOWN = """
const pictures = [...page.querySelectorAll("svg")].filter((one) => one.getClientRects().length);
return {
  fits: page.documentElement.scrollWidth <= view.innerWidth,
  width: view.innerWidth,
  kinds: [...new Set(pictures.map((one) => one.classList[0]))],
  pictures: pictures.length,
  figures: page.querySelectorAll("figure").length,
  widest: Math.max(...pictures.map((one) => one.getBoundingClientRect().right)),
  outside: view.performance.getEntriesByType("resource").length,
};
"""


@pytest.mark.parametrize(("width", "kind"), [(1200, "wide"), (400, "narrow")])
@pytest.mark.parametrize("report_fixture", sample(["report", "seeds_report"], 2))
def test_it_fits_a_window_and_loads_nothing(tmp_path, request, report_fixture, width, kind):
    measured = look(tmp_path, request.getfixturevalue(report_fixture), SHOWN, width)
    assert measured["fits"]
    assert measured["width"] == width
    assert measured["kinds"] == [kind]
    assert measured["pictures"] == measured["figures"] > 0
    assert measured["widest"] <= width
    assert measured["outside"] == 0


@pytest.fixture(scope="module")
def two_metrics_report(_browser, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    all_trials, ended = trials(4), endings({n: [0.5 + n / 50 + seed / 100 for seed in range(3)] for n in range(4)})
    ended = [
        dataclasses.replace(ending, metrics={**ending.metrics, "parameters": 50890.0 + ending.run.trial})
        for ending in ended
    ]
    front = front_of(all_trials, ended, {"val_accuracy": "max", "parameters": "min"})
    arguments = ("val_accuracy", "max", ["learning_rate", "model.hidden"], {})
    write_report(path, Report(all_trials, ended, logs(ended), *arguments, front=front))
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [1200, 400])
def test_what_matters_is_seen_without_scrolling(tmp_path, two_metrics_report, width):
    probe = """
    const right = (text) => Math.max(...[...page.querySelectorAll("td, th")].filter((one) => one.textContent === text)
      .map((one) => one.getBoundingClientRect().right));
    return ["Pareto front", "p corrected", "at 5 %", "mean"].map(right);
    """
    measured = look(tmp_path, two_metrics_report, probe, width)
    assert all(0 < right <= width for right in measured), measured


def test_a_click_on_a_column_sorts_the_ranking(tmp_path, report):
    probe = """
    const ranking = page.querySelector("table.sortable");
    const heads = [...ranking.tHead.rows[0].cells];
    const column = (name) => {
      const at = heads.findIndex((head) => head.textContent === name);
      return [...ranking.tBodies[0].rows].map((row) => row.cells[at].textContent);
    };
    const click = (name) => heads.find((head) => head.textContent === name).click();
    const before = column("trial");
    click("trial");
    const rising = column("trial");
    click("trial");
    const falling = column("trial");
    click("mean");
    const means = column("mean");
    click("mean");
    return { before, rising, falling, means, worst: column("mean").at(-1) };
    """
    measured = look(tmp_path, report, probe)
    numbers = [str(n) for n in range(13)]
    assert measured["before"] == [*(str(n) for n in range(11, -1, -1)), "12"]
    assert measured["rising"] == numbers
    assert measured["falling"] == numbers[::-1]
    assert measured["means"] == [f"{0.51 + n / 50:.5g}" for n in range(12)] + ["-"]  # what has no value is last
    assert measured["worst"] == "-"


def test_a_click_on_a_trial_shows_its_lines(tmp_path, report):
    probe = """
    const lit = () => [...page.querySelectorAll(".lit")].map((one) => one.id || `row ${one.dataset.trial}`);
    page.querySelector('tr[data-trial="10"]').click();
    const first = lit();
    const other = page.querySelector('[id="ranking-wide-mean-trial-9"]');
    other.dispatchEvent(new view.MouseEvent("click", { bubbles: true }));
    const second = lit();
    const faint = Number(view.getComputedStyle(page.querySelector('[id="ranking-wide-mean-trial-8"]')).opacity);
    other.dispatchEvent(new view.MouseEvent("click", { bubbles: true }));
    return { first, second, faint, third: lit() };
    """
    measured = look(tmp_path, report, probe)
    for number, lit in ((10, measured["first"]), (9, measured["second"])):
        assert f"row {number}" in lit
        assert {"curves-wide-line", "curves-narrow-band", "ranking-wide-bar", "parallel-narrow-line"} <= {
            name.removesuffix(f"-trial-{number}") for name in lit
        }
        assert all(name.endswith((f"-trial-{number}", f"row {number}")) for name in lit)
    assert measured["faint"] < 0.5
    assert measured["third"] == []


def test_a_script_that_got_into_a_page_would_not_run(tmp_path):
    text = page("title", ["<script>document.title = 'broken in'</script><img src='https://example.org/x.png'>"])
    probe = "return { title: page.title, own: page.body.className };"
    assert look(tmp_path, text, probe) == {"title": "title", "own": "interactive"}


def test_what_is_text_stays_text():
    assert page("<b>", []).count("&lt;b&gt;") == 1
    assert "<i>" not in figure("", "<i>")
    html_table = table(["<i>"], [["<b>", 1]], [7])
    assert "<b>" not in html_table
    assert "<i>" not in html_table
    assert '<tr data-trial="7"><td>&lt;b&gt;</td><td class="number">1</td></tr>' in html_table
    assert "<th" not in table(["", ""], [["a", "b"]])
