"""What the default model reaches."""

import json

import pytest

from tests.launching import dptrain

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_mnist(mnist_dir, tmp_path):
    """Keras reaches 0.972 to 0.975 with this model and these settings."""
    arguments = ["--data", "mnist", "--data-dir", str(mnist_dir), "--seed", "1", "--out", str(tmp_path / "run")]
    done = dptrain(2, *arguments, timeout=180, DPTRAIN_JIT_COMPILE="1")
    assert (done.code, done.err) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]["val_accuracy"] >= 0.970


def test_built_in_data_is_neither_trivial_nor_hopeless(tmp_path):
    done = dptrain(0, "--out", str(tmp_path / "run"), timeout=180, DPTRAIN_JIT_COMPILE="1")
    assert (done.code, done.err) == (0, "")
    assert "strokes: 60,000 + 10,000 samples" in done.out
    assert 0.93 < json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]["val_accuracy"] < 0.99
