"""Who looks at what rank 0 prints, found out by real launchers, terminals and files."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dptrain.errors import ConfigError
from dptrain.runtime.output import terminal
from dptrain.runtime.output.terminal import (
    NO_BREAK,
    console,
    ends_in_file,
    progress_mode,
    say,
    terminal_columns,
    verbosity,
    wrapped,
)
from tests.launching import find_mpirun, on_terminal, run

REPORT = (
    "from dptrain.runtime.output.terminal import *; print('found', progress_mode(), terminal_columns(), flush=True)"
)
PYTHON = [sys.executable, "-c", REPORT]

# What Open MPI does: ranks get a pseudo-terminal of the launcher's, which writes what comes to its own output.
PRTERUN = """#!{python}
import os, pty, sys
parent, child = pty.openpty()
if os.fork() == 0:
    os.environ |= dict(OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0")
    os.dup2(child, 1)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
os.close(child)
try:
    while piece := os.read(parent, 4096):
        os.write(1, piece)
except OSError:
    pass
os.wait()
"""


def reported(text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith("found ")]
    return line.removeprefix("found ").strip()


@pytest.fixture
def prterun(tmp_path):
    script = tmp_path / "prterun"
    script.write_text(PRTERUN.format(python=sys.executable))
    script.chmod(0o755)
    return str(script)


def test_alone():
    assert reported(on_terminal(PYTHON, columns=93).out) == "live 93"
    assert reported(run(PYTHON, COLUMNS="50").out) == "lines None"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"COLUMNS": "50"}, "live 50"),
        ({"TERM": "dumb"}, "lines 80"),
        ({"PYTHONIOENCODING": "ascii"}, "lines 80"),
        ({"DPTRAIN_PROGRESS": "lines"}, "lines 80"),
        ({"DPTRAIN_PROGRESS": "none"}, "none 80"),
    ],
)
def test_what_the_environment_says(environment, expected):
    assert reported(on_terminal(PYTHON, **environment).out) == expected


def test_an_mpirun_whose_ranks_write_to_a_pipe(tmp_path):
    command = [find_mpirun(), "-n", "1"]
    assert reported(on_terminal([*command, *PYTHON], columns=93).out) == "live 93"
    assert reported(run([*command, *PYTHON]).out) == "lines None"


def test_another_wrapper_of_standard_output():
    python = [sys.executable, "-c", f"import sys; sys.stdout = open(1, 'w', closefd=False, encoding='utf-8'); {REPORT}"]
    assert reported(on_terminal([find_mpirun(), "-n", "1", *python], columns=93).out) == "live 93"


def test_an_mpirun_whose_ranks_write_to_a_terminal(prterun):
    assert reported(on_terminal([prterun, *PYTHON[1:]], columns=93).out) == "live 93"
    assert reported(run([prterun, *PYTHON[1:]]).out) == "lines None"


@pytest.mark.parametrize("where", ["> {log}", "| cat > {log}"])
def test_a_rank_that_writes_elsewhere_than_its_launcher(tmp_path, where):
    log = tmp_path / "log"
    script = f'{sys.executable} -c "{REPORT}" {where.format(log=log)}'
    on_terminal([find_mpirun(), "-n", "1", "sh", "-c", script])
    assert reported(log.read_text()) == "lines None"


def test_a_launcher_on_another_node():
    # No mpirun among the ancestors: the terminal may be one that the launcher's daemon made.
    environment = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    assert reported(on_terminal(PYTHON, **environment).out) == "lines None"
    assert reported(on_terminal(PYTHON, SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0").out) == "live 80"


def test_an_unknown_word(monkeypatch):
    monkeypatch.setenv("DPTRAIN_PROGRESS", "dots")
    with pytest.raises(ConfigError, match=r"^DPTRAIN_PROGRESS = 'dots': expected auto, live, lines or none$"):
        progress_mode()


@pytest.mark.parametrize(("word", "number"), [("none", 0), ("live", 1), ("lines", 2), ("auto", 2), ("", 2)])
def test_verbosity(monkeypatch, word, number):
    monkeypatch.setenv("DPTRAIN_PROGRESS", word)
    assert verbosity("auto") == number
    assert [verbosity(verbose) for verbose in (0, 1, 2)] == [0, 1, 2]


def test_streams_that_are_no_files(monkeypatch):
    closed = io.StringIO()
    closed.close()
    assert terminal_columns(io.StringIO()) is None
    assert terminal_columns(closed) is None
    monkeypatch.setattr(sys, "stdout", None)
    assert terminal_columns() is None
    assert progress_mode() == "lines"


def test_wrapping():
    line = "Epoch 1/5 - 469 steps - loss: 0.8234 - val_accuracy: 0.8550"
    assert wrapped(line, 80) == line
    assert wrapped(line, 38) == "Epoch 1/5 - 469 steps - loss: 0.8234\n  - val_accuracy: 0.8550"
    assert wrapped("  ok label  one-two three four", 24, indent=12) == "  ok label  one-two\n            three four"
    assert wrapped("a " + "b" * 50, 20) == "a\n  " + "b" * 50
    assert wrapped("", 20) == ""
    assert wrapped(f"trial 1: 0.5{NO_BREAK}[0.4,{NO_BREAK}0.6]", 20) == "trial 1:\n  0.5 [0.4, 0.6]"


def test_lines_are_wrapped_on_terminals_only(monkeypatch):
    text = io.StringIO()
    say("word " * 30, file=text)
    say(f"0.5{NO_BREAK}[0.4,{NO_BREAK}0.6]", file=text)
    assert text.getvalue() == "word " * 30 + "\n0.5 [0.4, 0.6]\n"
    monkeypatch.setattr(terminal, "terminal_columns", lambda stream=None: 40)
    text = io.StringIO()
    say("word " * 30, file=text)
    lines = text.getvalue().splitlines()
    assert " ".join(lines).split() == ["word"] * 30
    assert max(map(len, lines)) <= 40


def test_tables_are_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert (console(io.StringIO()).width, console(io.StringIO()).is_terminal) == (1000, False)
    assert (console(io.StringIO(), live=True).width, console(io.StringIO(), live=True).is_terminal) == (70, True)
    assert "\x1b" not in run([sys.executable, "-c", TABLE]).out


TABLE = (
    "from rich.table import Table; from dptrain.runtime.output.terminal import console; table = Table('rank');"
    "table.add_row('0'); console().print(table)"
)


def test_no_escape_codes_reach_the_log_of_an_mpirun_with_terminals(prterun, tmp_path):
    log = tmp_path / "log"
    with log.open("w") as file:
        subprocess.run([prterun, "-c", TABLE], stdout=file, check=True, timeout=60, env={**os.environ, "TERM": "xterm"})
    assert "rank" in log.read_text()
    assert "\x1b" not in log.read_text()
    assert "\x1b" in on_terminal([prterun, "-c", TABLE]).out


LIVE = (
    "from dptrain.runtime.output.terminal import console, ends_in_file; from rich.live import Live\n"
    "with Live('table', console=console(live=True), auto_refresh=False): pass\nprint(); print('found', ends_in_file())"
)


@pytest.mark.parametrize("launched", [False, True])
def test_what_is_live_is_so_everywhere_but_in_a_file(prterun, tmp_path, launched):
    command = [prterun, "-c", LIVE] if launched else [sys.executable, "-c", LIVE]
    environment = {**os.environ, "TERM": "xterm"}
    log = tmp_path / "log"
    with log.open("w") as file:
        subprocess.run(command, stdout=file, check=True, timeout=60, env=environment)
    assert reported(log.read_text()) == "True"
    assert "table" in log.read_text()
    assert "\x1b" not in log.read_text()
    piped = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60, env=environment, text=True).stdout
    assert "found False" in piped
    assert "\x1b" in piped


def test_the_file_of_an_mpirun_whose_ranks_write_to_a_pipe(tmp_path):
    log = tmp_path / "log"
    with log.open("w") as file:
        subprocess.run([find_mpirun(), "-n", "1", sys.executable, "-c", LIVE], stdout=file, check=True, timeout=60)
    assert reported(log.read_text()) == "True"
    assert "\x1b" not in log.read_text()


def test_no_stream_ends_in_no_file(monkeypatch):
    assert not ends_in_file(io.StringIO())
    monkeypatch.setattr(sys, "stdout", None)
    assert not ends_in_file()


def test_where_there_is_no_proc(monkeypatch):
    monkeypatch.setattr(terminal, "Path", lambda name: Path("/nonexistent"))
    terminal._launcher_behind.cache_clear()
    with terminal._launcher_output(1) as output:
        assert output is None
    terminal._launcher_behind.cache_clear()
