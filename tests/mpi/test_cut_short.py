"""A file that is cut short while it is mapped ends the job with a line that names it, not with SIGBUS."""

import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.launching import Finished, mpirun, run
from tests.sample import sample

SCRIPT = """
import os, sys, numpy as np, dptrain as dp

path, mode, way, bad = *sys.argv[1:4], int(sys.argv[4])
x, y = np.load(path, mmap_mode=mode), np.arange(20_000) % 3
model = dp.Sequential([dp.layers.Input((20,)), dp.layers.Dense(3, activation="softmax")])
model.compile("sgd", "sparse_categorical_crossentropy")

def cut(epoch, logs):
    if dp.rank() == bad:
        os.truncate(path, 5000)

def batches():
    while True:
        for start in range(0, 20_000, 1000):
            yield x[start : start + 1000] * 1, y[start : start + 1000]

callbacks = [dp.callbacks.LambdaCallback(on_epoch_end=cut)]
if way == "generator":
    model.fit(batches(), steps_per_epoch=20, epochs=50, shuffle=False, verbose=0, callbacks=callbacks)
else:
    model.fit(x, y, batch_size=100, epochs=50, verbose=0, callbacks=callbacks)
print("went on")
"""


def cut_short(tmp_path: Path, ranks: int, bad: int = 0, mode: str = "r", way: str = "arrays") -> tuple[Finished, Path]:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((20_000, 20), np.float32))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [str(script), str(path), mode, way, str(bad)]
    if ranks > 1:
        return mpirun(ranks, *words, timeout=60), path
    return run([sys.executable, *words], timeout=60), path


@pytest.mark.parametrize("bad", sample([0, 1], 2, first=1))
def test_ranks_whose_file_is_cut_short(tmp_path, bad):
    done, path = cut_short(tmp_path, 2, bad)
    assert done.code == 65
    assert done.messages
    assert "went on" not in done.out
    for line in done.messages:
        assert line.startswith("dptrain: rank ")
        assert f"{path}: truncated while in use" in line


@pytest.mark.parametrize("way", sample(["arrays", "generator"], 2))
def test_a_process_alone_raises_an_error(tmp_path, way):
    done, path = cut_short(tmp_path, 1, way=way)
    assert done.code == 1  # as Python ends a script
    assert done.err.splitlines()[-1].startswith(f"dptrain.errors.DataError: {path}: truncated while in use")


def test_what_may_be_written_to_is_not_replaced_by_zeros(tmp_path):
    done, path = cut_short(tmp_path, 1, mode="r+")
    assert done.code == 65
    assert done.messages == [f"dptrain: {path}: truncated while in use, or its disk is full (SIGBUS)"]


@pytest.mark.long
def test_the_command_line_ends_with_65(tmp_path):
    path, y = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(path, np.zeros((20_000, 20), np.float32))
    np.save(y, np.arange(20_000) % 3)
    cut = tmp_path / "cut.py"
    metrics = str(tmp_path / "out/metrics.jsonl")
    cut.write_text(
        "import os, sys, threading, time\nfrom dptrain.__main__ import main\n"
        f"def cut():\n    while not os.path.exists({metrics!r}):\n        time.sleep(0.05)\n"
        f"    os.truncate({str(path)!r}, 5000)\n"
        "threading.Thread(target=cut, daemon=True).start()\nsys.exit(main(sys.argv[1:]))\n"
    )
    options = ["--data", str(path), "--target", str(y), "--epochs", "2000", "--out", str(tmp_path / "out")]
    done = run([sys.executable, str(cut), *options], timeout=60)
    assert done.code == 65
    assert f"{path}: truncated while in use" in done.messages[-1]


def test_a_private_mapping_ends_as_without_the_guard(tmp_path):
    """Nothing is replaced in it, and what cannot be read is not tried again for ever."""
    path = tmp_path / "x"
    path.write_bytes(bytes(10_000))
    script = tmp_path / "script.py"
    script.write_text(
        "import mmap, os, sys\nfrom dptrain.backend.cpu.mapped_files import guard_mapped_files\nguard_mapped_files()\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)\n"
        "os.truncate(sys.argv[1], 0)\nprint(mapped[5000])\n"
    )
    done = run([sys.executable, str(script), str(path)], timeout=60)
    assert (done.code, done.out) == (-signal.SIGBUS, "")
