"""`evaluate`, `predict` and `export`: what is done with a run that has ended."""

import csv
import io
import json
import os
import shutil

import numpy as np
import pytest
import safetensors.numpy

import dptrain as dp
from dptrain.cli.main import main
from dptrain.cli.predictions import Meaning, as_arrays, as_csv
from dptrain.errors import ConfigError

RNG = np.random.default_rng(5)
X = RNG.random((23, 4), dtype=np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's folder, with a classifier's model and arrays beside it."""
    path = tmp_path_factory.mktemp("serving")
    y = np.arange(23) % 3
    np.savez(path / "data.npz", x_train=X, y_train=y, x_test=X[:7], y_test=y[:7])
    np.save(path / "x.npy", X)
    arguments = ["--data", str(path / "data.npz"), "--hidden", "5", "--epochs", "1"]
    assert main([*arguments, "--verbose", "0", "--out", str(path / "run")]) == 0
    return path


def ask(capfd, *arguments) -> str:
    assert main([*map(str, arguments)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return out


def refused(capfd, code: int, *arguments) -> str:
    assert main([*map(str, arguments)]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_evaluate_says_what_the_training_said(folder, capfd):
    report = json.loads(ask(capfd, "evaluate", folder / "run", "--json"))
    metrics = json.loads((folder / "run" / "summary.json").read_text())["metrics"]
    assert report["metrics"] == {"loss": metrics["val_loss"], "accuracy": metrics["val_accuracy"]}
    assert report["samples"] == 7
    train = ask(capfd, "evaluate", folder / "run" / "model.keras", "--data", folder / "data.npz", "--part", "train")
    assert train.startswith(f"{folder / 'data.npz'}: 23 samples: loss ")


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_evaluate_with_targets_in_a_file_of_their_own(folder, capfd, tmp_path, shape):
    np.save(tmp_path / "y.npy", (np.arange(23) % 3).reshape(shape))
    report = ask(
        *(capfd, "evaluate", folder / "run", "--data", folder / "x.npy", "--target", tmp_path / "y.npy", "--json")
    )
    full_report = ask(capfd, "evaluate", folder / "run", "--data", folder / "data.npz", "--part", "train", "--json")
    assert json.loads(report)["metrics"] == json.loads(full_report)["metrics"]


OWN_LAYERS = """
import dptrain as dp
from dptrain.layers import Dense

print("the file is run")

class Scaled(dp.layers.Layer):
    def call(self, x):
        return 3 * x

def build_model(num_classes):
    return dp.Sequential([dp.layers.Input((4,)), Scaled(), Dense(num_classes, "softmax")])
"""


def test_a_model_s_own_classes_are_in_a_file_that_the_command_line_names(folder, capfd, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_LAYERS)
    arguments = ["--data", folder / "data.npz", "--model", f"{tmp_path / 'mine.py'}:build_model", "--epochs", 1]
    run = tmp_path / "run"
    ask(capfd, *arguments, "--out", run, "--verbose", 0)
    command = ("predict", run, "--data", folder / "x.npy")
    message = refused(capfd, 65, *command)  # what the folder names is not run
    assert "custom object 'Scaled' of module 'mine'" in message
    assert "--custom-objects FILE.py" in message
    options = ("--custom-objects", tmp_path / "mine.py")
    assert ask(capfd, *command, *options).startswith("the file is run\nindex,class,p_0,p_1,p_2\n0,")
    assert "accuracy" in ask(capfd, "evaluate", run, *options)
    ask(capfd, "export", run, "--out", tmp_path / "m.program", *options)
    assert "(3, x)" in ask(capfd, "explain", run, *options, "--step", "predict")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "broken.py, line 1: ZeroDivisionError: division by zero"),
        ("def f(:", "broken.py, line 1: SyntaxError"),
        ("import sys; sys.exit(3)", "broken.py, line 1: SystemExit: 3"),
    ],
)
def test_code_that_fails_ends_in_one_line(folder, capfd, tmp_path, text, message):
    (tmp_path / "broken.py").write_text(text)
    assert message in refused(capfd, 2, "predict", folder / "run", "--custom-objects", tmp_path / "broken.py")
    assert "no module 'nowhere'" in refused(capfd, 2, "predict", folder / "run", "--custom-objects", "nowhere")


def test_two_files_must_not_have_different_classes_of_one_name(folder, capfd, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}_file.py").write_text(OWN_LAYERS.replace('print("the file is run")', ""))
    arguments = [word for name in ("one", "two") for word in ("--custom-objects", tmp_path / f"{name}_file.py")]
    assert "defines 'Scaled', and so does an earlier file" in refused(capfd, 2, "predict", folder / "run", *arguments)


def test_predict_writes_a_line_a_row(folder, capfd):
    text = ask(capfd, "predict", folder / "run", "--data", folder / "x.npy")
    rows = list(csv.DictReader(io.StringIO(text)))
    expected = dp.models.load_model(folder / "run").predict(X, verbose=0)
    assert list(rows[0]) == ["index", "class", "p_0", "p_1", "p_2"]
    assert [int(row["index"]) for row in rows] == list(range(23))
    assert [int(row["class"]) for row in rows] == expected.argmax(axis=1).tolist()
    actual = np.array([[row[f"p_{label}"] for label in range(3)] for row in rows], np.float32)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["p.csv", "p.npy", "p.npz"])
def test_predict_writes_a_file_in_one_piece(folder, capfd, tmp_path, name):
    out = tmp_path / name
    out.write_text("old")
    assert ask(capfd, "predict", folder / "run", "--data", folder / "x.npy", "--batch-size", 5, "--out", out) == ""
    expected = dp.models.load_model(folder / "run").predict(X, verbose=0)
    if name != "p.csv":
        actual = np.load(out)
        np.testing.assert_array_equal(actual if name == "p.npy" else actual["output"], expected)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("form", ["keras", "safetensors", "npz", "program", "onnx"])
def test_export_writes_every_format(folder, capfd, tmp_path, form):
    if form == "onnx":
        pytest.importorskip("onnx", reason="needs the extra 'onnx'")
    out = tmp_path / f"model.{form}"
    assert ask(capfd, "export", folder / "run", "--out", out).startswith(f"{out}: {form}, ")
    model = dp.models.load_model(folder / "run", device="cpu")
    if form == "keras":
        exported = dp.models.load_model(out, device="cpu")
        assert exported.optimizer.get_config() == model.optimizer.get_config()
        np.testing.assert_array_equal(exported.predict(X, verbose=0), model.predict(X, verbose=0))
    elif form == "program":
        exported = dp.saving.load_program(out, device="cpu")(X)
        np.testing.assert_array_equal(exported, model.predict(X, verbose=0))
    elif form == "onnx":
        model.export(tmp_path / "own", format="onnx")
        assert out.read_bytes() == (tmp_path / "own").read_bytes()
    else:
        exported = safetensors.numpy.load_file(out) if form == "safetensors" else np.load(out)
        weights = model._named_weights()
        assert sorted(exported) == sorted(weights)
        assert all(np.array_equal(exported[name], array) for name, array in weights.items())
    assert f"{out} exists; --overwrite replaces it" in refused(capfd, 74, "export", folder / "run", "--out", out)
    ask(capfd, "export", folder / "run", "--out", out, "--overwrite")


def test_arrays_of_a_file_are_found_by_name(folder, capfd, tmp_path):
    ask(capfd, "predict", folder / "run", "--data", folder / "data.npz", "--out", tmp_path / "a.npy")
    np.savez(tmp_path / "xy.npz", y=np.zeros(7, int), x=X[:7])
    np.savez(tmp_path / "other.npz", features=X[:7])
    for name in ("xy", "other"):
        ask(capfd, "predict", folder / "run", "--data", tmp_path / f"{name}.npz", "--out", tmp_path / f"{name}.npy")
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), np.load(tmp_path / "a.npy"))


def test_several_inputs_are_named_in_the_file(capfd, tmp_path):
    a, b = dp.layers.Input((2,), name="a"), dp.layers.Input((3,), name="b")
    model = dp.Model([a, b], {"sum": dp.layers.Dense(1)(dp.layers.Concatenate()([a, b])), "same": a})
    model.save(tmp_path / "m.keras")
    np.savez(tmp_path / "d.npz", a=X[:, :2], b=X[:, :3])
    out = tmp_path / "p.npz"
    ask(capfd, "predict", tmp_path / "m.keras", "--data", tmp_path / "d.npz", "--out", out)
    actual, expected = np.load(out), model.predict([X[:, :2], X[:, :3]], verbose=0)
    assert all(np.array_equal(actual[name], array) for name, array in expected.items())
    text = ask(capfd, "predict", tmp_path / "m.keras", "--data", tmp_path / "d.npz")
    assert text.splitlines()[0] == "index,same_0,same_1,sum"


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, "evaluate", "the following arguments are required: RUN"),
        (65, "predict nowhere", "nowhere: not found; expected the folder of a run, or a .keras file"),
        (65, "predict RUN --data nowhere.npz", "nowhere.npz not found"),
        (65, "predict RUN --data DIR/wide.npy", "model expects 4 features of shape (4,), data has 5 of shape (5,)"),
        (65, "predict RUN --data DIR/text.npy", "expected integers or floats"),
        (65, "predict RUN --data DIR/two.npz", "no features in the archive; expected x_test or x, found a, b"),
        (65, "evaluate RUN --data DIR/x.npy", "no targets to compare with; --target FILE.npy names them; `python"),
        (65, "evaluate RUN --data DIR/x.npy --target DIR/short.npy", "x.npy has 23 rows, "),
        (65, "evaluate RUN --data DIR/x.npy --target nowhere.npy", "nowhere.npy not found"),
        (2, "evaluate RUN --data DIR/data.npz --target DIR/short.npy", "expected --data X.npy --target Y.npy"),
        (2, "evaluate RUN --target DIR/short.npy", "add --data FILE.npy, the samples of these targets"),
        (2, "evaluate DIR/plain.keras --data DIR/data.npz", "saved without loss and metrics (it was not compiled)"),
        (2, "evaluate DIR/plain.keras", "--data is missing"),
        (2, "predict RUN --out p.txt", "expected a file that ends in .csv, .npy, .npz"),
        (2, "predict RUN --batch-size 0", "--batch-size 0: expected an integer >= 1"),
        (2, "predict RUN --hidden 4", "unknown '--hidden'"),
        (74, "predict RUN --out DIR/nowhere/p.csv", "choose another --out"),
        (65, "predict RUN --best", "no best.keras: the run monitored no metric; its last model is model.keras"),
        (2, "export RUN --out m.bin --format keras", "expected a file that ends in .keras"),
        (2, "export RUN --out m", "its suffix is not that of a format; use --format keras|"),
        (2, "export RUN --out m.h5 --format h5", "--format h5: expected one of keras, "),
    ],
)
def test_what_does_not_go_ends_in_one_line(folder, capfd, monkeypatch, tmp_path, code, arguments, message):
    monkeypatch.chdir(tmp_path)
    (folder / "run" / "best.keras").unlink(missing_ok=True)  # as where the run's logs lack what it monitors
    np.save(folder / "wide.npy", np.ones((2, 5)))
    np.save(folder / "text.npy", np.array(["a", "b"]))
    np.savez(folder / "two.npz", a=X, b=X)
    np.save(folder / "short.npy", np.zeros(3, int))
    if not (folder / "plain.keras").exists():
        dp.Sequential([dp.layers.Input((4,)), dp.layers.Dense(3)]).save(folder / "plain.keras")
    words = [word.replace("RUN", str(folder / "run")).replace("DIR", str(folder)) for word in arguments.split()]
    assert message in refused(capfd, code, *words)
    assert list(tmp_path.iterdir()) == []


def test_help_shows_a_command_s_own_options(capfd):
    with pytest.raises(SystemExit):
        main(["predict", "--help"])
    out = capfd.readouterr().out
    assert "python -m dptrain predict RUN [options]" in out
    assert "--out FILE" in out
    assert "--hidden" not in out


def test_help_shows_one_group_of_options(capfd):
    with pytest.raises(SystemExit):
        main(["--help", "optimizer"])
    out = capfd.readouterr().out
    assert "optimizer:\n  The update rule.\n" in out
    assert "--learning-rate" in out
    assert "--hidden" not in out
    assert "no such group; did you mean 'data'?" in refused(capfd, 2, "sweep", "--help", "dat")


# Tables


def test_a_table_with_gaps_is_filled_as_in_the_training(capfd, tmp_path):
    rows = [f"{n % 7 if n % 5 else ''},{'' if n % 9 == 0 else 'ab'[n % 2]},{n * 0.5}" for n in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["n,c,y", *rows]))
    run = tmp_path / "run"
    train = ("--data", tmp_path / "t.csv", "--target", "y", "--epochs", 1, "--hidden", 3, "--out", run)
    expected = "2 columns miss values: n (12), c (7); fill them in"
    assert expected in (message := refused(capfd, 65, *train, "--verbose", 0))
    assert "--missing mean" in message
    assert "column 'n': 12 of 60 values are missing" in ask(capfd, *train, "--missing", "mean")
    (tmp_path / "new.csv").write_text("n,c\n,a\n3,\n,\n")
    lines = ask(capfd, "predict", run, "--data", tmp_path / "new.csv").splitlines()
    preprocessing = dp.models.load_model(run).preprocessing
    mean = preprocessing.columns[0].mean
    gaps = [preprocessing.encode([{"n": gap, "c": gap}]).tolist() for gap in (None, "", " ")]
    assert gaps == [gaps[0]] * 3, "a blank in a record is one, too"
    (tmp_path / "full.csv").write_text(f"n,c\n{mean},a\n3,(missing)\n{mean},(missing)\n")
    assert ask(capfd, "predict", run, "--data", tmp_path / "full.csv").splitlines() == lines
    assert len(set(lines)) == 4


def test_evaluate_says_what_is_right_of_each_class(folder, capfd):
    report = json.loads(ask(capfd, "evaluate", folder / "run", "--json"))
    by_class = report["classes"]
    right = sum(by_class["confusion"][label][label] for label in range(3))
    assert right / 7 == pytest.approx(report["metrics"]["accuracy"])
    assert [sum(row) for row in by_class["confusion"]] == [3, 2, 2]
    assert set(by_class) == {"names", "precision", "recall", "f1", "confusion"}
    out = ask(capfd, "evaluate", folder / "run")
    assert "precision" in out
    assert "taken for" in out


def test_balanced_classes_are_trained(folder, capfd, tmp_path):
    train = ("--data", folder / "data.npz", "--hidden", "5", "--epochs", "1", "--verbose", "0", "--out")
    ask(capfd, *train, tmp_path / "even", "--class-weight", "balanced")
    assert "class_weight: balanced" in (tmp_path / "even" / "config.yaml").read_text()
    losses = [json.loads((run / "summary.json").read_text())["metrics"]["loss"] for run in
              (tmp_path / "even", folder / "run")]  # fmt: skip
    assert losses[0] != losses[1]


def test_a_run_s_own_folder_neither_bounds_its_data_nor_names_another_user_s(folder, capfd, tmp_path):
    """Whoever made the folder wrote its config.yaml."""
    run = shutil.copytree(folder / "run", tmp_path / "run")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("max_bytes: 1000000000", f"max_bytes: {2**62}"))
    assert str(2**62) in config.read_text()
    assert "max_bytes" in refused(capfd, 65, "evaluate", run, "--data.max_bytes", 10)
    config.write_text(config.read_text().replace(f"max_bytes: {2**62}", "max_bytes: 1"))
    assert "loss" in ask(capfd, "evaluate", run)
    if os.geteuid() == 0:
        os.chown(config, 12345, -1)
        assert "config.yaml belongs to another user and names the data '" in refused(capfd, 2, "evaluate", run)
        assert "loss" in ask(capfd, "evaluate", run, "--data", folder / "data.npz")


def lines(predictions, means=None) -> list[str]:
    return as_csv(predictions, means or Meaning()).splitlines()


def test_values_have_a_column_each():
    assert lines(np.float32([[0.1], [2]]), Meaning(target="price")) == ["index,price", "0,0.1", "1,2.0"]
    assert lines(np.float64([[1, np.nan]])) == ["index,output_0,output_1", "0,1.0,nan"]
    assert lines(np.zeros((0, 1))) == ["index,output"]


def test_classes_have_names_where_they_are_known():
    meaning = Meaning("multiclass", ("cat", "dog, wet"))
    assert lines(np.float32([[0.25, 0.75]]), meaning) == ['index,class,p_cat,"p_dog, wet"', '0,"dog, wet",0.25,0.75']
    assert "'=1+1" in lines(np.float32([[0.75, 0.25]]), Meaning("multiclass", ("=1+1", "b")))[1]
    binary = np.float32([[0.25], [0.75]])
    assert lines(binary, Meaning("binary", ("no", "yes"))) == ["index,class,p_yes", "0,no,0.25", "1,yes,0.75"]
    assert lines(binary, Meaning("binary")) == ["index,class,p_1", "0,0,0.25", "1,1,0.75"]


def test_pictures_do_not_fit_into_a_table():
    with pytest.raises(ConfigError, match=r"an output of shape \(None, 4, 4\) does not fit into a table; use --out"):
        as_csv(np.zeros((2, 4, 4)), Meaning())
    with pytest.raises(ConfigError, match=r"several outputs, an .npy file holds one"):
        as_arrays({"a": X, "b": X}, ".npy")
