"""Every command on a page is one that there is, with options that there are."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from dptrain.cli.main import _parse, _split_command
from tests.conftest import ROOT

# Up to the end of a line, of code in backquotes, of a cell, or to a comment.
COMMAND = re.compile(r"python3? -m dptrain((?:[ \t]+[^`\n|#]*)?)")
PAGES = [ROOT / "README.md", ROOT / "launch" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each command of dptrain's on a page; one that goes on in the next line is one."""
    for match in COMMAND.finditer(page.read_text(encoding="utf-8").replace("\\\n", " ")):
        yield shlex.split(match[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_commands_that_there_are(page):
    for arguments in commands(page):
        command, options = _split_command(arguments)
        if command == "launch":
            assert not options or "--" in options, "what launch is to start stands behind it"
        elif options and "--help" not in options:  # alone, it is named rather than shown
            _parse(command, options)


def test_a_command_of_before_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "| `python -m dptrain --lr 1` |\n    python -m dptrain sweep --seeds 0-3 \\\n      --grid hidden=1,2  # two\n"
    )
    first, second = commands(page)
    assert second == ["sweep", "--seeds", "0-3", "--grid", "hidden=1,2"]
    with pytest.raises(Exception, match="unknown '--lr'"):
        _parse("train", first)


NEEDS = {
    "sweep": r"\bdptrain sweep\b",
    "tables": r"\.(csv|parquet)\b",
    "images": r"--image-size",
    "report": r"\breport runs/X",
    "serve": r"\bdptrain serve\b",
}


def test_what_readme_shows_works_after_what_it_installs():
    """Rows of its tables take no extra that its first command leaves out."""
    text = (ROOT / "README.md").read_text()
    installed = re.search(r"pip install -q -e '\.\[([\w,]+)\]' && mpirun", text)[1].split(",")
    assert [extra for extra, pattern in NEEDS.items() if re.search(pattern, text) and extra not in installed] == []


def test_a_clone_holds_one_copy():
    """Installed in place: a second copy in the environment would be another version after the next change."""
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for command in re.findall(r"pip install [^&`\n]*'\.\[[\w,]+\]'", path.read_text()):
            assert " -e " in command, path
