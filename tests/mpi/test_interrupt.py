"""Ctrl-C, which a terminal sends to all ranks at once."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

SCRIPT = """
import numpy as np, dptrain as dp
x, y = np.zeros((64, 4), np.float32), np.zeros(64, np.int64)
model = dp.Sequential([dp.layers.Dense(2, "softmax", input_shape=(4,))])
model.compile("sgd", "sparse_categorical_crossentropy")
print("Epoch 0", flush=True)
model.fit(x, y, epochs=100_000_000, verbose=0)
"""


def interrupted(command: list[str], ready: str, cwd: Path) -> tuple[int, str]:
    """Send SIGINT to a command's process group once it has printed a line with `ready`; return exit code and stderr."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, start_new_session=True
    )
    timer = threading.Timer(100, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        assert process.stdout is not None
        assert any(ready in line for line in process.stdout), process.communicate()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate()
    finally:
        timer.cancel()
    return process.returncode, err


@pytest.mark.parametrize("ranks", [0, 3])
@pytest.mark.parametrize("what", ["train", "script", "sweep"])
def test_it_ends_all_with_one_line(small_npz, tmp_path, what, ranks):
    if what == "script" and ranks == 0:
        pytest.skip("a script alone is Python's own to end")
    (tmp_path / "script.py").write_text(SCRIPT)
    forever = ["--data", str(small_npz), "--epochs", "100000000", "--out", "out"]
    arguments, ready = {
        "train": (["-m", "dptrain", *forever], "Epoch 2/"),
        "script": (["script.py"], "Epoch 0"),
        "sweep": (["-m", "dptrain", "sweep", *forever, "--seeds", "0-3"], "results go to"),
    }[what]
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if ranks and launcher is None:
        pytest.skip("no mpirun: pip install 'dptrain[mpich]'")
    start = [str(launcher), "-n", str(ranks)] if ranks else []
    code, err = interrupted([*start, sys.executable, *arguments], ready, tmp_path)
    assert code == 130, err
    (line,) = (line for line in err.splitlines() if line.startswith("dptrain: "))
    assert line.endswith("interrupted")
    assert "Traceback" not in err
