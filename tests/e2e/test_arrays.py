"""What somebody with arrays on the disk types."""

import json

import numpy as np
import pytest

from tests.launching import dptrain

COMMON = ("--data", "x.npy", "--target", "y.npy", "--batch-size", "32", "--hidden", "8", "--epochs", "3")


def test_a_regression_of_two_files(tmp_path):
    """x is mapped by every rank, and the run's own test part is evaluated where no other data is named."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=(200, 5)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", 100 + 10 * x[:, :2])
    losses = []
    for ranks in (0, 2):
        out = tmp_path / f"run-{ranks}"
        done = dptrain(ranks, *COMMON, "--loss", "huber", "--out", str(out), cwd=tmp_path)
        assert (done.code, done.err) == (0, "")
        assert "y.npy are float32: regression; --task overrides it" in done.out
        assert "40 of 200 samples, the last, are held out as the test part" in done.out
        assert "x: 160 + 40 samples; 5 -> 8 -> 2" in done.out
        losses.append(json.loads((out / "summary.json").read_text())["metrics"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    done = dptrain(0, "evaluate", "run-0", "--json", cwd=tmp_path)
    assert json.loads(done.out)["metrics"]["mae"] == pytest.approx(losses[0]["val_mae"], rel=1e-5)
    done = dptrain(0, "--data", "x.npy", "--fast-dev-run", cwd=tmp_path)
    assert done.messages == ["dptrain: --data x.npy: --target FILE.npy names the file of the targets"]
