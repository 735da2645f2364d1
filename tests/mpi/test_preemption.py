"""SIGTERM, SIGUSR1 and Ctrl-C end a training after a step that all ranks agree on, with a checkpoint to go on from."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import completed, find_mpirun, interpreter, is_gone, mpirun, python, run, sleep_of, when_ready
from tests.sample import sample

# So that the training tells of its beginning.
SLOWLY = ("--epochs", "5", "--batch-size", "8", "--hidden", "8", "--dropout", "0.2", "--jit-compile", "off")


# The command line, which waits at the end of the second epoch until a signal has been sent.
HELD = """
import pathlib, sys, time
import dptrain.__main__ as begun
from dptrain.cli.run_directory import RunDirectory
add_epoch = RunDirectory.add_epoch

def held(self, epoch):
    add_epoch(self, epoch)
    end = time.monotonic() + 60
    while epoch["epoch"] == 2 and not pathlib.Path("sent").exists() and time.monotonic() < end:
        time.sleep(0.01)

RunDirectory.add_epoch = held
sys.exit(begun.main(sys.argv[1:]))
"""


def command(ranks: int, *arguments: str, fresh: bool = False) -> list[str]:
    python = interpreter(completed({}), arguments, fresh)
    return [*([find_mpirun(), "-n", str(ranks)] if ranks else []), *python, *arguments]


def signalled(start: list[str], number: int, one_rank: bool, cwd: Path) -> tuple[int, str]:
    """Send a signal to a training, or to its highest rank, after the first epoch; return exit code and stderr."""

    def send(process: subprocess.Popen[str], lines: list[str]) -> None:
        ranks = [int(match[1]) for line in lines if (match := re.search(r"(\d+):? +CPU", line))]
        os.kill(ranks[-1] if one_rank else process.pid, number)
        (cwd / "sent").touch()

    return when_ready(start, "Epoch 1/", send, cwd)


def results(path: Path) -> tuple[bytes, list[dict]]:
    epochs = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in epoch.items() if "second" not in key} for epoch in epochs]
    return (path / "model.safetensors").read_bytes(), kept


@pytest.fixture(scope="module")
def whole(small_npz, tmp_path_factory):
    """The results of an uninterrupted training by number of ranks."""
    outcomes: dict[int, tuple[bytes, list[dict]]] = {}

    def train(ranks: int) -> tuple[bytes, list[dict]]:
        if ranks not in outcomes:
            out = tmp_path_factory.mktemp("whole") / "out"
            done = python(ranks, "-m", "dptrain", "--data", str(small_npz), *SLOWLY, "--out", str(out), timeout=100)
            assert (done.code, done.err) == (0, "")
            outcomes[ranks] = results(out)
        return outcomes[ranks]

    return train


@pytest.mark.parametrize(("ranks", "name"), sample([(0, "SIGTERM"), (2, "SIGUSR1")], 2, first=1))
def test_a_signal_saves_and_the_next_start_goes_on(small_npz, tmp_path, whole, ranks, name):
    start = ("-m", "dptrain", "--data", str(small_npz), *SLOWLY, "--out", "out")
    code, err = signalled(command(ranks, "-c", HELD, *start[2:], fresh=True), getattr(signal, name), False, tmp_path)
    assert code == 75, err
    (line,) = (line for line in err.splitlines() if line.startswith("dptrain: "))
    saved = r"after (\d+) steps, saved as out/checkpoints/0000\d\d-step-(\d+)"
    match = re.fullmatch(rf"dptrain: {name} {saved}; start again with --out out to continue", line)
    assert match, line
    assert match[1] == match[2]
    assert not (tmp_path / "out" / "summary.json").exists()
    done = python(ranks, *start, timeout=100, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "Epoch 1/" not in done.out
    assert results(tmp_path / "out") == whole(ranks)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sharded", "on", "said"),
    sample(
        [
            ([], ["--mesh", "model=2", "--shard-optimizer"], "; mesh model=2; slots sharded (ZeRO-1)"),
            (["--stages", "2", "--microbatches", "3"], ["--shard-weights"], "; weights and slots sharded (FSDP)"),
            (["--shard-weights"], ["--stages", "2"], "; 2 stages"),
        ],
        3,
        first=1,
    ),
)
def test_a_signal_to_one_rank_is_all_ranks_and_others_go_on(small_npz, tmp_path, whole, sharded, on, said):
    """On another mesh, on which other ranks have other parts of weights and slots."""
    start = ("-m", "dptrain", "--data", str(small_npz), *SLOWLY, "--out", "out")
    code, err = signalled(command(2, "-c", HELD, *start[2:], *sharded), signal.SIGTERM, True, tmp_path)
    assert code == 75, err
    done = python(2, *start, *on, timeout=100, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert f" an epoch{said}\n" in done.out
    for epoch, expected in zip(results(tmp_path / "out")[1], whole(0)[1], strict=True):
        assert epoch == pytest.approx(expected, rel=1e-3)


def test_a_signal_at_the_start_is_not_lost(small_npz, tmp_path):
    code = (
        "import os, signal, sys\nimport dptrain.__main__ as begun\nos.kill(os.getpid(), signal.SIGUSR1)\n"
        f"sys.exit(begun.main(['--data', {str(small_npz)!r}, '--out', 'out']))"
    )
    done = run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.code == 75, done.err
    assert done.messages == ["dptrain: SIGUSR1 before the first step; start again with --out out to continue"]


@pytest.mark.long
def test_a_signal_in_a_validation_is_obeyed_in_it_and_the_epoch_goes_on_there(tmp_path):
    script = str(ROOT / "tests/mpi/scripts/validation.py")
    done = mpirun(3, script, str(tmp_path), "signal")
    assert done.code == 75, done.err
    (line,) = done.messages
    assert re.fullmatch(r"dptrain: SIGUSR1 after 14 steps, saved as .*/backup/000002-step-14", line)
    assert sorted(done.out.splitlines()) == [f"rank {rank}: 2 begun, 1 ended" for rank in range(3)]
    done = mpirun(3, script, str(tmp_path), "none")
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == [f"rank {rank}: 2 begun, 2 ended" for rank in range(3)]


HANGING_COMPILER = """#!/bin/sh
case "$*" in *--version*) exec c++ "$@";; esac
touch "$0.compiles"
SLEEP 600
true
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.parametrize(
    ("ranks", "name"), sample([(0, "SIGTERM"), (0, "SIGUSR1"), (2, "SIGTERM"), (2, "SIGUSR1")], 2, first=1)
)
def test_a_signal_ends_a_sweep_that_measures_and_its_compiler(small_npz, tmp_path, ranks, name):
    """Of MPICH, SIGUSR1 was lost there: its own handler took it."""
    compiler, sleep = tmp_path / "compiler", sleep_of(tmp_path)
    compiler.write_text(HANGING_COMPILER.replace("SLEEP", sleep))
    compiler.chmod(0o755)
    words = ("-m", "dptrain", "sweep", "--seeds", "0-1", "--grid", "hidden=4,8", "--epochs", "1", "--out", "out")
    process = subprocess.Popen(
        command(ranks, *words, "--data", str(small_npz), fresh=True),
        env=completed({"CXX": str(compiler), "DPTRAIN_CACHE": str(tmp_path / "cache"), "DPTRAIN_JIT_COMPILE": None}),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "compiler.compiles").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(getattr(signal, name))
        _, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75, err
    (line,) = (line for line in err.splitlines() if line.startswith("dptrain: ") and "waiting for" not in line)
    assert line.endswith(f"ended by {name}")
    assert is_gone(sleep)


@pytest.mark.long
def test_a_signal_ends_a_scripts_sweep_that_measures(tmp_path):
    script = (
        "import os, signal, numpy as np, dptrain as dp\n"
        "def build(units):\n    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    model = dp.Sequential([dp.layers.Dense(units, input_shape=(3,))])\n"
        "    model.compile('sgd', 'mse')\n    return model\n"
        "x = np.ones((8, 3), np.float32)\n"
        "dp.sweep(build, {'units': [1]}, seeds=2, x=x, y=x[:, :1], validation_split=0.5, verbose=0)\n"
    )
    done = run([sys.executable, "-c", script], cwd=tmp_path)
    assert (done.code, done.messages) == (75, ["dptrain: ended by SIGUSR1"])
