"""Ctrl-C, which a terminal sends to all ranks at once."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.launching import when_ready
from tests.sample import sample

SCRIPT = """
import numpy as np, dptrain as dp
x, y = np.zeros((64, 4), np.float32), np.zeros(64, np.int64)
model = dp.Sequential([dp.layers.Dense(2, "softmax", input_shape=(4,))])
model.compile("sgd", "sparse_categorical_crossentropy")
say = dp.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(f"Epoch {epoch}", flush=True))
model.fit(x, y, epochs=1, verbose=0, callbacks=[say])  # all ranks have started
model.fit(x, y, epochs=100_000_000, verbose=0)
"""


@pytest.mark.parametrize("ranks", sample([0, 2], 2, first=1))
@pytest.mark.parametrize("way", ["train", "script", "sweep"])
def test_it_ends_all_with_one_line(small_npz, tmp_path, way, ranks):
    if way == "script" and ranks == 0:
        pytest.skip("a script alone is Python's own to end")
    (tmp_path / "script.py").write_text(SCRIPT)
    forever = ["--data", str(small_npz), "--epochs", "100000000", "--out", "out"]
    arguments, ready = {
        "train": (["-m", "dptrain", *forever], "Epoch 2/"),
        "script": (["script.py"], "Epoch 0"),
        "sweep": (["-m", "dptrain", "sweep", *forever, "--seeds", "0-3"], "results go to"),
    }[way]
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if ranks and launcher is None:
        pytest.skip("no mpirun: pip install mpich")
    start = [str(launcher), "-n", str(ranks)] if ranks else []
    ctrl_c = lambda process, lines: os.killpg(process.pid, signal.SIGINT)  # noqa: E731
    code, err = when_ready([*start, sys.executable, *arguments], ready, ctrl_c, tmp_path)
    assert code == 130, err
    (line,) = (line for line in err.splitlines() if line.startswith("dptrain: "))
    expected = r"interrupted after .*; start again with --out out to continue" if way == "train" else ".*interrupted"
    assert re.fullmatch(f"dptrain: {expected}", line)
    assert "Traceback" not in err
