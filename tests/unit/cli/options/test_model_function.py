"""`--model file.py:build_model`: what is run, what reaches the function, and what is refused with the user's line."""

import importlib.util
import json
import os
import sys

import numpy as np
import pytest

from dptrain.cli.main import main
from dptrain.cli.options.model_function import load_function, parse_argument
from dptrain.cli.user_code import run
from dptrain.errors import ConfigError

SOURCE = """\
import dptrain as dp


def build_model(input_shape, num_classes, units: int = 64, rate=0.5, name=None):
    stack = [dp.layers.Flatten(), dp.layers.Dense(units, "relu"), dp.layers.Dense(num_classes, "softmax")]
    return dp.Sequential([dp.layers.Input(input_shape), *stack], name=name)


def compiled(input_shape, learning_rate=0.125):
    model = build_model(input_shape, 10, units=4)
    model.compile(dp.optimizers.SGD(learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def logits(input_shape, num_classes):
    return dp.Sequential([dp.layers.Flatten(), dp.layers.Dense(num_classes)])


def narrow(input_shape):
    return dp.Sequential([dp.layers.Flatten(), dp.layers.Dense(1, "sigmoid")])


def needy(width):
    return 1 / 0


def another_thing():
    return "a model"


class Net(dp.Model):
    def __init__(self, units, marker):
        super().__init__()
        self.stack = [dp.layers.Flatten(), dp.layers.Dense(units), dp.layers.Dense(10, "softmax")]

    def call(self, x):
        for layer in self.stack:
            x = layer(x)
        return x


def subclassed(units=4):
    return Net(units, object())  # which JSON cannot hold


def by_position(units, /):
    pass
"""


@pytest.fixture
def models(tmp_path):
    path = tmp_path / "models.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def answer(models, small_npz, tmp_path, capfd):
    """Return what the command line answers to a function of the file and further arguments."""

    def ask(function, *arguments):
        arguments = ("--model", f"{models}:{function}", "--data", str(small_npz), "--epochs", "1", *arguments)
        code = main([*arguments, "--verbose", "0", "--out", str(tmp_path / "run")])
        err = capfd.readouterr().err
        assert err.count("\n") == (1 if code else 0)
        return code, err

    return ask


def test_the_function_gets_what_it_names(answer, tmp_path):
    assert answer("build_model", "--model-arg", "units=8", "--model-arg", "name=net") == (0, "")
    shapes = json.loads((tmp_path / "run" / "summary.json").read_text())["parameters"]
    assert shapes == 784 * 8 + 8 + 8 * 10 + 10


def test_a_model_compiled_by_the_function_keeps_its_optimizer(answer, tmp_path):
    assert answer("compiled") == (0, "")
    config = json.loads((tmp_path / "run" / "checkpoints" / "000001-step-8" / "state.json").read_text())
    assert config["rate"] == 0.125


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("build_model", "--model-arg unit=8", "build_model of {0} has no parameter 'unit'; did you mean 'units'?"),
        ("build_model", "--model-arg units=wide", "model.arguments.units = 'wide': expected int"),
        ("build_model", "--model-arg rate=true", "model.arguments.rate = True: expected float"),
        ("build_model", "--model-arg units", "--model-arg units: 'units' has no '='; expected name=values"),
        ("build_model", "--model-arg units=8,16", "expected one value; a list is units=[8,16]"),
        ("build_model", "--model-arg num_classes=3", "num_classes comes from the data and the run"),
        ("build_model", "--hidden 8", "model.hidden = (8,): {0}:build_model builds the model; leave it out"),
        ("compiled", "--learning-rate 0.1", "optimizer.learning_rate = 0.1: {0}:compiled compiles its model itself"),
        ("logits", "", "its last layer, 'dense', outputs logits, expected probabilities"),
        ("narrow", "", "its output has shape (None, 1), expected (None, 10)"),
        ("needy", "", "needy of {0} needs width: add --model-arg width=VALUE"),
        ("needy", "--model-arg width=1", "models.py, line 24: ZeroDivisionError: division by zero"),
        ("another_thing", "", "build_model: expected a dptrain model, found str"),
        ("by_position", "", "by_position takes 'units' by position only"),
        ("biuld_model", "", "has no function 'biuld_model'; did you mean 'build_model'?"),
    ],
)
def test_what_is_refused(answer, models, function, arguments, message):
    code, err = answer(function, *arguments.split())
    assert code == 2
    assert message.format(models) in err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\nx +\n", "models.py, line 2: SyntaxError: invalid syntax"),
        ("\n\nimport nowhere_at_all\n", "models.py, line 3: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("raise SystemExit(3)\n", "models.py, line 1: SystemExit: 3"),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(tmp_path, source, message):
    path = tmp_path / "models.py"
    path.write_text(source)
    with pytest.raises(ConfigError) as caught:
        load_function(f"{path}:build_model")
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:f", "No such file or directory"),
        ("models.py", "such as models.py:build_model"),
        ("no_such_package.models:f", "there is no module 'no_such_package'"),
        ("json:load_s", "has no function 'load_s'; did you mean 'loads' or 'load'?"),
    ],
)
def test_what_names_no_function(spec, message):
    with pytest.raises(ConfigError, match="--model") as caught:
        load_function(spec)
    assert message in str(caught.value)


def test_a_module_and_files_beside_a_file(tmp_path):
    (tmp_path / "helper_of_models.py").write_text("WIDTH = 3\n")
    (tmp_path / "json.py").write_text("from helper_of_models import WIDTH\ndef f(a: int = WIDTH, **more): pass\n")
    function = load_function(f"{tmp_path}/json.py:f")
    assert function.arguments({"a": 2, "other": [1]}) == {"a": 2, "other": [1]}
    assert json.loads("1") == 1, "a file of that name hides no module"
    assert load_function("tests.unit.cli.options.test_model_function:test_what_names_no_function").required == {
        "spec",
        "message",
    }


@pytest.mark.parametrize("place", ["models.py", "filelock.py", "helpers"])
def test_what_dptrain_imports_later_does_not_come_from_beside_a_file(tmp_path, monkeypatch, place):
    installed = importlib.util.find_spec("filelock").origin
    (tmp_path / "helpers.py").write_text("units = 3\n")
    (tmp_path / "filelock.py").write_text("units = 3\n")
    (tmp_path / "models.py").write_text("from helpers import units\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())])
    for name in [name for name in sys.modules if name.split(".")[0] in ("filelock", "helpers", "models")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    module, _, _ = run("--model", str(tmp_path / place) if place.endswith(".py") else place, "FILE.py")
    assert module.units == 3
    assert importlib.import_module("filelock").__file__ == installed


def test_a_file_that_changed_is_told_of_and_no_configuration_runs_code_by_itself(answer, models, tmp_path, capfd):
    assert answer("build_model")[0] == 0
    config = str(tmp_path / "run" / "config.yaml")
    for command in ("train", "sweep", "explain", "doctor"):
        assert main([command, "--config", config]) == 2
        message = f"names code, '{models}:build_model': add --model {models}:build_model to run it"
        assert message in capfd.readouterr().err
    load_function.cache_clear()
    with open(models, "a") as file:
        file.write("# changed\n")
    arguments = ["--config", config, "--model", f"{models}:build_model", "--out", str(tmp_path / "again")]
    assert main([*arguments, "--verbose", "0"]) == 0
    assert "models.py has changed since" in capfd.readouterr().err


def test_a_run_goes_on_with_the_same_arguments(models, small_npz, tmp_path, capfd):
    def train(*arguments):
        fixed = ["--model", f"{models}:build_model", "--data", str(small_npz), "--verbose", "0"]
        return main([*fixed, *arguments]), capfd.readouterr().err

    assert train("--model-arg", "units=4", "--epochs", "1", "--out", str(tmp_path / "run")) == (0, "")
    arguments = ["--resume", str(tmp_path / "run"), "--epochs", "2", "--out", str(tmp_path / "more")]
    code, err = train("--model-arg", "units=5", *arguments)
    assert code == 2
    assert "model.arguments.units: it has 4, this one 5" in err
    assert train("--model-arg", "units=4", *arguments) == (0, "")
    lines = (tmp_path / "more" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]


VALUES = [("a=1e-3", 1e-3), ("a=[2,3]", [2, 3]), ("a=relu", "relu"), ("a=no", False)]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_values_are_those_of_a_grid(text, value):
    assert parse_argument(text) == ("a", value)


@pytest.mark.long
def test_a_model_that_no_file_can_hold_is_trained_without(answer, models, small_npz, tmp_path, capfd):
    assert answer("subclassed") == (0, "")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert "model.safetensors" in names
    assert names.isdisjoint({"model.keras", "best.keras"})
    swept = ["sweep", "--model", f"{models}:subclassed", "--data", str(small_npz), "--grid", "units=2,3"]
    assert main([*swept, "--epochs", "1", "--verbose", "0", "--out", str(tmp_path / "s")]) == 2
    assert "the models cannot be saved (layer Net: argument 'marker' is not an attribute" in capfd.readouterr().err
    arguments = ["--seeds", "0", "--keep", "none", "--batch-size", "512"]
    assert main([*swept, *arguments, "--epochs", "1", "--verbose", "0", "--out", str(tmp_path / "s")]) == 0


def test_explain_shows_its_layers(models, capfd):
    arguments = ["--model", f"{models}:build_model", "--model-arg", "units=3", "--input-shape", "5"]
    assert main(["explain", *arguments]) == 0
    assert "5 x 3" in capfd.readouterr().out.replace("(5, 3)", "5 x 3")


def test_a_softmax_of_one_number_is_refused(models, tmp_path, capfd):
    x, y = np.zeros((8, 3), np.float32), np.arange(8) % 2
    np.savez(tmp_path / "two.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    fixed = ["--data", str(tmp_path / "two.npz"), "--task", "binary", "--out", str(tmp_path / "run"), "--verbose", "0"]
    assert main([*fixed, "--model", f"{models}:build_model"]) == 2
    assert "is a softmax of one number, which is always 1: end it with sigmoid" in capfd.readouterr().err
