"""docs/tutorial.md, typed as it stands: what its files, commands and their output are."""

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import completed, find_mpirun, run

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|sh|text|json)\n(.*?)```", PAGE, re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# The page shows a server, and a request to it in another terminal; both are told apart from what ends by itself.
SERVE, CURL = "python -m dptrain serve ", "curl -d "
# What they cost: output is compared, time is not.
TIMED = re.compile(r"[\d.]+ s - [\d,]+ samples/s")


def environment() -> dict[str, str | None]:
    """Return variables under which `python` and `mpirun` are those of the tests."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), str(Path(find_mpirun()).parent), os.environ["PATH"]])
    return {"PATH": folders, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": None}


def answer(command: str, folder: Path) -> dict:
    """Serve as a command says; return the answer to the page's request."""
    (request,) = (text for kind, text in BLOCKS if kind == "sh" and text.startswith(CURL))
    _, _, body, url = shlex.split(request)
    words = [sys.executable, *shlex.split(command)[1:], "--port", "0"]
    with subprocess.Popen(
        words, cwd=folder, env=completed(environment()), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0]
            with urllib.request.urlopen(
                address + re.sub(r"^http://[^/]+", "", url), body.encode(), timeout=100
            ) as answered:
                return json.load(answered)
        finally:
            process.terminate()


def same(shown: str, printed: str) -> bool:
    """Say whether a line is what was printed, up to times, and numbers to one in a thousand."""
    shown, printed = TIMED.sub("", shown), TIMED.sub("", printed)
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    numbers = ([float(text.replace(",", "")) for text in pair] for pair in pairs)
    return all(left == pytest.approx(right, rel=2e-3) for left, right in numbers)


@pytest.mark.slow
@pytest.mark.long
def test_what_the_page_says_happens(tmp_path):
    for module in ("pandas", "PIL", "starlette", "uvicorn"):
        pytest.importorskip(module)
    printed: list[str] = []
    for kind, text in BLOCKS:
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name is not None, "a file's first line is its name"
            (tmp_path / name[1]).write_text(text)
        elif kind == "sh" and text.startswith(SERVE):
            printed = [json.dumps(answer(text, tmp_path))]
        elif kind == "sh" and not text.startswith(CURL):
            done = run(["bash", "-euo", "pipefail", "-c", text], cwd=tmp_path, timeout=300, **environment())
            assert done.code == (65 if "dptrain: houses.csv: " in done.err else 0), done.err
            assert "Traceback" not in done.err
            printed = (done.out + done.err).splitlines()
        elif kind == "json":
            (line,) = printed
            shown, got = json.loads(text), json.loads(line)
            assert list(shown) == list(got)
            assert got["predictions"][0]["price"] == pytest.approx(shown["predictions"][0]["price"], rel=2e-3)
        elif kind == "text":
            for line in text.splitlines():
                assert line == "..." or any(same(line, other) for other in printed), (line, printed)
    for name in ("houses", "longer", "shapes", "two"):
        assert (tmp_path / "runs" / name / "model.keras").is_file()


def test_lines_are_compared_up_to_rounding():
    assert same("loss: 1,000.1 - 0.1 s - 5 samples/s", "loss: 1,000.2 - 9.0 s - 7 samples/s")
    assert not same("loss: 1,000.1", "loss: 1,010.1")
    assert not same("loss: 1", "mae: 1")
