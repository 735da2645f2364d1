"""`--data -`: what `predict` reads from standard input, it reads as from a file."""

import io

import numpy as np
import pytest

from dptrain.cli.main import main

X = np.random.default_rng(5).random((7, 4), dtype=np.float32)


class Stdin:
    """Stands for `sys.stdin`, with bytes behind it."""

    def __init__(self, content):
        self.buffer = io.BytesIO(content)


@pytest.fixture
def predict(capfd, monkeypatch):
    """Return a function that predicts what standard input holds: exit code, output, errors."""

    def ask(run, content=None, *options):
        monkeypatch.setattr("sys.stdin", Stdin(content))
        code = main(["predict", str(run), "--data", "-", *options])
        return code, *capfd.readouterr()

    return ask


def test_arrays(predict, capfd, tmp_path):
    y = np.arange(7) % 3
    np.savez(tmp_path / "data.npz", x_train=X, y_train=y, x_test=X, y_test=y)
    arguments = ["--data", str(tmp_path / "data.npz"), "--hidden", "3", "--epochs", "1", "--verbose", "0"]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    np.save(tmp_path / "x.npy", X)
    assert main(["predict", str(tmp_path / "run"), "--data", str(tmp_path / "x.npy")]) == 0
    expected = capfd.readouterr().out
    for name in ("x.npy", "data.npz"):
        assert predict(tmp_path / "run", (tmp_path / name).read_bytes()) == (0, expected, "")
    for content, options, message in (
        (b"", (), "standard input: empty"),
        (b"a,b\n1,2\n", (), "standard input: a table, and the model was not trained on one"),
        (b"x" * 2_000, ("--data.max_bytes", "1000"), "standard input: more than max_bytes"),
        (b"\x93NUMPY1", (), "standard input"),
    ):
        code, out, error = predict(tmp_path / "run", content, *options)
        assert (code, out, error.count("\n")) == (65, "", 1)
        assert message in error


def test_a_table(predict, capfd, tmp_path):
    pytest.importorskip("pandas")
    rows = [f"{row / 10},{('a', 'b')[row % 2]},{row}" for row in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["n,c,y", *rows]) + "\n")
    arguments = ["--data", str(tmp_path / "t.csv"), "--target", "y", "--epochs", "1", "--verbose", "0"]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    assert main(["predict", str(tmp_path / "run"), "--data", str(tmp_path / "t.csv")]) == 0
    expected = capfd.readouterr().out
    assert predict(tmp_path / "run", (tmp_path / "t.csv").read_bytes()) == (0, expected, "")
    code, _, error = predict(tmp_path / "run", b"n,c\n1,z\n")
    assert code == 65
    assert "standard input, row 2, column 'c': category 'z'" in error
