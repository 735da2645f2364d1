"""Training with `--device cuda` on the real GPU of this machine: DPTRAIN_REAL_GPU=1 says that there is one.

Under `tests/emulator/run` the same tests run on the emulated driver.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.emulated import inside_emulator
from tests.launching import Finished, dptrain, run

pytestmark = pytest.mark.skipif(
    os.environ.get("DPTRAIN_REAL_GPU") != "1", reason="DPTRAIN_REAL_GPU=1 runs these on a real GPU"
)
SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "every_step.py")


def succeeded(finished: Finished) -> None:
    """Drivers and MPIs of other machines may say things on standard error; dptrain must not."""
    assert finished.code == 0, finished.err
    assert not finished.messages
    assert "Traceback" not in finished.err


@pytest.fixture(scope="session")
def steps(small_npz, tmp_path_factory):
    """Return a function that trains 26 steps and returns what the script saved."""

    def train(device: str, task: str) -> dict[str, np.ndarray]:
        out = tmp_path_factory.mktemp("steps") / "out.npz"
        succeeded(run([sys.executable, SCRIPT, str(small_npz), str(out), device, task], timeout=120, PYTHONWARNINGS=""))
        with np.load(out) as saved:
            return dict(saved)

    return train


@pytest.mark.parametrize("task", ["classify", "regress"])
def test_the_losses_of_the_cpu_and_the_same_bits_again(steps, task):
    cpu, first, second = steps("cpu", task), steps("cuda", task), steps("cuda", task)
    assert len(first["losses"]) == 26
    for name in ("losses", "val"):
        np.testing.assert_allclose(first[name], cpu[name], rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(first["prediction"], cpu["prediction"], rtol=1e-3, atol=1e-4)
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


def test_a_killed_training_goes_on_with_the_same_bits(tmp_path):
    script = str(ROOT / "tests" / "mpi" / "scripts" / "callbacks.py")
    results = []
    for name in ("whole", "again"):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, script, "kill step", str(folder)]
        if name == "again":
            assert "killed" in run(command, timeout=120, PYTHONWARNINGS="", DEVICE="cuda", KILL="1").err
            assert [path.name for path in (folder / "backup").glob("0*")] == ["000002-step-8"]
        succeeded(run(command, timeout=120, PYTHONWARNINGS="", DEVICE="cuda"))
        results.append(json.loads((folder / "out.json").read_text()))
    assert results[1]["steps"][0] == [1, 1]
    assert results[1]["weights"] == results[0]["weights"]


def summary(folder: Path) -> dict[str, float]:
    metrics: dict[str, float] = json.loads((folder / "summary.json").read_text())["metrics"]
    return metrics


def test_two_ranks_on_one_gpu_train_the_same(small_npz, tmp_path):
    results = []
    for ranks in (0, 2):
        out = tmp_path / str(ranks)
        arguments = ["--device", "cuda", "--data", str(small_npz), "--epochs", "2", "--batch-size", "40"]
        finished = dptrain(ranks, *arguments, "--share-gpu", "--out", str(out), timeout=180, PYTHONWARNINGS="")
        succeeded(finished)
        results.append(summary(out))
    for name in results[0]:
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-3, abs=0.006), name  # one sample is 0.005


def test_auto_takes_the_gpu(small_npz, tmp_path):
    finished = dptrain(
        0, "--data", str(small_npz), "--fast-dev-run", cwd=tmp_path, timeout=120, COLUMNS="200", PYTHONWARNINGS=""
    )
    succeeded(finished)
    assert "GPU-" in finished.out
    assert "CPU, " not in finished.out


@pytest.mark.slow
@pytest.mark.skipif(inside_emulator(), reason="takes too long there")
@pytest.mark.parametrize("seed", [0, 1])
def test_mnist(mnist_dir, tmp_path, seed):
    """Keras reaches 0.972 to 0.975 with this model and these settings."""
    arguments = ["--data", "mnist", "--data-dir", str(mnist_dir), "--seed", str(seed), "--out", str(tmp_path / "run")]
    succeeded(dptrain(0, *arguments, "--device", "cuda", timeout=180, PYTHONWARNINGS=""))
    assert summary(tmp_path / "run")["val_accuracy"] >= 0.970


@pytest.mark.slow
@pytest.mark.skipif(inside_emulator(), reason="takes too long there")
def test_built_in_data_reaches_what_the_cpu_does(tmp_path):
    results = []
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        succeeded(dptrain(0, "--device", device, "--out", str(out), timeout=180, PYTHONWARNINGS=""))
        results.append(summary(out)["val_accuracy"])
    assert 0.93 < results[1] < 0.99
    assert abs(results[0] - results[1]) < 0.01
