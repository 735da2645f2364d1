"""Pictures as elements of a page."""

import functools
import re
import sys

import pytest

pytest.importorskip("matplotlib", reason="pictures need the extra 'sweep'")

from dptrain.errors import ConfigError
from dptrain.sweeps.reporting import drawing
from dptrain.sweeps.reporting.drawing import draw, make_figure, names_title, trial_name


def pair(name):
    def picture(width):
        figure = make_figure(width, 2)
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 2], gid="line-trial-7")
        axes.set_title("<!-- --><script>")
        return figure

    return draw(name, picture)


drawn_once = functools.cache(pair)


def test_a_picture_is_two_elements_that_fit_two_widths():
    text = drawn_once("one")
    assert re.findall(r'<svg class="(\w+)"', text) == ["wide", "narrow"]
    assert [float(width) for width in re.findall(r'<svg [^>]*\bwidth="([\d.]+)pt"', text)] == [828, 270]


def test_pictures_of_one_page_share_no_identifier():
    text = drawn_once("one") + drawn_once("two")
    names = re.findall(r'\bid="([^"]*)"', text)
    assert len(names) == len(set(names))
    assert [name for name in names if "trial-7" in name] == [
        f"{picture}-{width}-line-trial-7" for picture in ("one", "two") for width in ("wide", "narrow")
    ]
    for used in re.findall(r'(?:href="#|url\(#)([^")]*)', text):
        assert used in names


def test_pictures_hold_no_words_of_users_and_no_addresses():
    text = drawn_once("one")
    for unwanted in ("<script", "<!--", "<?xml", "<!DOCTYPE", "<metadata", "http:", "https:"):
        assert unwanted not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)


def test_the_same_picture_has_the_same_bytes():
    assert pair("one") == drawn_once("one")


def test_without_matplotlib(monkeypatch):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    assert drawing.why_not().startswith("matplotlib is not installed. For them: pip install ")
    with pytest.raises(ConfigError, match=r"matplotlib is not installed: pip install .* 'matplotlib>="):
        pair("one")


def test_names_of_trials():
    assert trial_name(3, {"rate": 0.123456, "units": [128]}, 44) == "3: 0.123, [128]"
    assert trial_name(3, {"name": "x" * 50}, 10) == "3: xxxxxx…"
    assert trial_name(0, {}, 44) == "trial 0"
    assert names_title({"rate": 1, "units": 2}, 40) == "trial: rate, units"
    assert names_title({}, 40) == ""


def test_a_picture_that_fails_leaves_the_page_its_words(capfd):
    def fail(width):
        raise ValueError("a <bad> number")

    assert draw("seeds", fail).startswith("<p>No picture: ValueError: a &lt;bad&gt; number (")
    assert capfd.readouterr().err.startswith("dptrain: warning: no picture of seeds: ValueError: a <bad> number (")
