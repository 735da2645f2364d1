"""What a terminal could take for more than letters reaches it nowhere."""

import pytest

import dptrain as dp
from dptrain.errors import AgreedError, ConfigError, DataError, ExitCode, OutputError, printable
from dptrain.runtime.failure import describe, warn
from dptrain.runtime.output import terminal

# Sets a title, clears the screen, turns the direction of writing, a C1 code, half a pair.
EVIL = "a\x1b]0;title\x07\x1b[2J\r\u202eb\x9bc\ud800"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\r\u202eb\x9bc\ud800"


def test_what_is_printable_stays_and_the_rest_is_escaped():
    assert printable("ä → 1, 日本") == "ä → 1, 日本"
    assert printable(EVIL) == SHOWN
    assert printable("a\nb") == r"a\nb"
    assert printable("a\nb\tc", keep="\n") == "a\nb\\tc"


@pytest.mark.parametrize("kind", [ConfigError, DataError, OutputError])
def test_an_error_says_nothing_else(kind):
    assert str(kind(EVIL)) == SHOWN
    assert str(kind("two\nlines")) == "two\nlines"


def test_an_error_of_all_ranks_says_nothing_else():
    assert str(AgreedError("data", ExitCode.DATA, EVIL, [])) == SHOWN


def test_other_errors_are_described_so():
    assert SHOWN.replace("\\r", " ") in describe(ValueError(EVIL))


def test_lines_and_warnings_are_shown_so(capsys):
    terminal.say(EVIL)
    assert capsys.readouterr().out == f"{SHOWN}\n"
    with pytest.warns(UserWarning, match="title") as caught:
        warn(EVIL)
    assert str(caught[0].message) == SHOWN


def test_a_models_summary_is_shown_so(capsys):
    model = dp.Sequential([dp.layers.Input((2,)), dp.layers.Dense(1, name="evil\x1b[31m")])
    model.summary(line_length=120)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"evil\x1b[31m" in out
