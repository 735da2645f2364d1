"""Exit codes of which the system keeps nothing."""

import builtins
import sys

import pytest

from dptrain.runtime import exit_codes
from dptrain.runtime.exit_codes import as_status, replace_exits


@pytest.mark.parametrize(
    ("code", "status"),
    [(0, 0), (3, 3), (255, 255), (256, 1), (512, 2), (256 * 77, 77), (65536, 1), (-256, 255), (-1, 255), (257, 1)],
)
def test_what_is_not_0_stays_so(code, status):
    assert as_status(code) == status


@pytest.fixture
def said(monkeypatch):
    for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        monkeypatch.setattr(place, name, getattr(place, name, sys.exit))
    monkeypatch.setattr(exit_codes, "requested", 0)
    lines: list[str] = []
    replace_exits(lines.append)
    return lines


@pytest.mark.parametrize(
    ("code", "left", "asked"), [(None, None, 0), (0, 0, 0), (3, 3, 3), ("no", "no", 1), (512, 2, 2)]
)
def test_exit_leaves_with_what_the_system_keeps(said, code, left, asked):
    with pytest.raises(SystemExit) as caught:
        sys.exit(code)
    assert (caught.value.code, exit_codes.requested) == (left, asked)
    assert said == (["exit code 512 would be read as 0; exiting with 2 instead"] if code == 512 else [])


def test_exit_and_quit_are_replaced_as_well(said):
    for leave in (builtins.exit, builtins.quit):
        with pytest.raises(SystemExit, match="1"):
            leave(256)
