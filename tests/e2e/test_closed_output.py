"""Output whose reader goes away, as in `python -m dptrain | head`."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.launching import run


def piped(command: str, cwd: Path, reader: str = "head -n 1") -> tuple[int, str, str]:
    """Run a command into a reader; return its own exit code, what was read, and standard error."""
    done = run(["bash", "-c", f"{command} | {reader}; exit ${{PIPESTATUS[0]}}"], cwd=cwd)
    return done.code, done.out, done.err


@pytest.mark.sample(2)
@pytest.mark.parametrize("arguments", ["--help", "--print-config", "doctor --device cpu"])
def test_it_ends_quietly(tmp_path, arguments):
    # A reader that is gone at once, whatever fits into a pipe
    code, _, err = piped(f"{sys.executable} -m dptrain {arguments}", tmp_path, "true")
    if arguments.startswith("doctor"):  # which says in one line on standard error if something is missing here
        assert "Traceback" not in err
        assert "BrokenPipe" not in err
    else:
        assert (code, err) == (0, "")


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_training_is_not_lost(small_npz, tmp_path, ranks):
    mpirun = f"{Path(sys.executable).with_name('mpirun')} -n {ranks} " if ranks else ""
    if ranks and not Path(sys.executable).with_name("mpirun").exists():
        pytest.skip("no mpirun beside this Python")
    arguments = f"--data {shlex.quote(str(small_npz))} --epochs 3 --out run"
    code, out, err = piped(f"{mpirun}{sys.executable} -m dptrain {arguments}", tmp_path)
    assert len(out.splitlines()) == 1
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    if not ranks:  # what mpirun does without its own output is mpirun's
        assert (code, err) == (0, "")
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["epochs"] == 3


def test_an_output_that_is_closed_from_the_start(small_npz, tmp_path):
    command = f"{sys.executable} -m dptrain --data {shlex.quote(str(small_npz))} --fast-dev-run >&-"
    done = run(["bash", "-c", command], cwd=tmp_path)
    assert (done.code, done.err) == (0, "")


def test_an_error_keeps_its_exit_code(tmp_path):
    code, _, err = piped(f"{sys.executable} -m dptrain --epochs x 2>&1", tmp_path, "true")
    assert (code, err) == (2, "")
