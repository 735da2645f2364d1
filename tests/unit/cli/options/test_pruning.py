"""`--prune 0.9` in a training and in a sweep."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy

from dptrain import layers
from dptrain.cli.main import main
from dptrain.cli.options.config import Config, deciding, resolve, to_dict, without_later
from dptrain.cli.options.pruning import prune, settled
from dptrain.errors import ConfigError
from dptrain.models import Sequential, load_model

FIXED = ("--batch-size", "100", "--hidden", "8", "--verbose", "0", "--jit-compile", "off")


@pytest.fixture
def train(small_npz, tmp_path, capfd):
    """Return what trains into a folder, and returns the folder, or code and error where it is refused."""

    def train(name, *arguments):
        code = main(["--data", str(small_npz), *FIXED, *arguments, "--out", str(tmp_path / name)])
        err = capfd.readouterr().err
        assert err.count("\n") == (1 if code else 0)
        return (code, err) if code else tmp_path / name

    return train


def zeros(run, file="model.safetensors"):
    return [
        round(float(np.mean(weight == 0)), 3) for name, weight in weights(run, file).items() if name.endswith("kernel")
    ]


def weights(run, file="model.safetensors"):
    return dict(sorted(safetensors.numpy.load_file(run / file).items()))


def epochs(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


LAYER = ("--prune-scope", "layer")
PRUNE = ("--prune", "0.75", "--pruning.frequency", "4", *LAYER)


def test_a_run_becomes_sparse_and_keeps_its_best_sparse_model(train):
    run = train("run", *PRUNE, "--pruning.begin", "0", "--pruning.end", "50%", "--epochs", "4")  # 11 steps an epoch
    assert zeros(run) == [0.75, 0.75]
    sparsities = [line["sparsity"] for line in epochs(run)]
    assert 0 < sparsities[0] < sparsities[1] == sparsities[2] == sparsities[3] == pytest.approx(0.75, abs=1e-3)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metrics"]["sparsity"] == sparsities[-1]
    assert summary["best"]["epoch"] >= 2
    best = load_model(run / "best.keras", device="cpu").layers[-1].kernel.numpy()
    assert np.mean(best == 0) == 0.75


def test_a_fast_dev_run_prunes_whatever_the_lengths(small_npz, capfd):
    arguments = ("--prune", "0.75", "--pruning.begin", "25%", "--pruning.end", "40", "--fast-dev-run")
    assert main(["--data", str(small_npz), *FIXED[:4], *arguments, "--jit-compile", "off"]) == 0
    assert "sparsity: 0.75" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "epochs", "expected"),
    [
        ({}, 5, (469, 1642, 11)),  # a hundred updates and a few
        ({}, 1, (94, 328, 2)),
        ({"end": "150"}, 1, (94, 150, 1)),
        ({"begin": "10", "end": "2epochs", "frequency": "7"}, 5, (10, 938, 7)),
    ],
)
def test_when_it_is_pruned(overrides, epochs, expected):
    config = resolve(
        {}, "", {"pruning.sparsity": "0.9", **{f"pruning.{name}": value for name, value in overrides.items()}}
    )
    model = Sequential([layers.Input((6,)), layers.Dense(4), layers.Dense(2)])
    prune(model, replace(config, train=replace(config.train, epochs=epochs)), 469)
    first, second = (layer.kernel.pruning for layer in model.layers)
    assert first is second  # compared over all layers
    assert first.global_unstructured
    assert (first.schedule.begin_step, first.schedule.end_step, first.schedule.frequency) == expected


def test_exported(train, tmp_path):
    run = train("run", *PRUNE, "--epochs", "1", "--pruning.end", "5")
    onnx = pytest.importorskip("onnx", reason="needs the extra 'onnx'")
    out = tmp_path / "m.onnx"
    assert main(["export", str(run), "--out", str(out)]) == 0

    arrays = [onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(out).graph.initializer]
    kernels = sorted((array for array in arrays if array.ndim == 2 and array.size > 1), key=np.size)
    assert [float(np.mean(kernel == 0)) for kernel in kernels] == [0.75, 0.75]


def test_going_on_has_the_bits_of_one_training(train):
    fixed = (*PRUNE, "--pruning.begin", "0", "--pruning.end", "20", "--regrow")  # in the middle of the second epoch
    straight = train("straight", *fixed, "--epochs", "3")
    first_run = train("begun", *fixed, "--epochs", "1")
    resumed = train("resumed", *fixed, "--epochs", "3", "--resume", str(first_run))
    actual, expected = weights(resumed), weights(straight)
    assert all(actual[name].tobytes() == array.tobytes() for name, array in expected.items())
    assert zeros(straight)[0] > 0.7
    code, err = train("other", "--prune", "0.5", *fixed[2:], "--epochs", "3", "--resume", str(first_run))
    assert (code, "pruning.sparsity: it has 0.75, this one 0.5" in err) == (2, True)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "sparsity",
            "1.5",
            "pruning.sparsity = '1.5', set on the command line: expected a fraction of the weights, 0 to",
        ),
        ("sparsity", "1", "expected a fraction of the weights"),
        ("sparsity", "-0.1", "expected a fraction of the weights"),
        ("sparsity", "nan", "expected a fraction of the weights"),
        ("sparsity", True, "expected a fraction of the weights"),
        ("sparsity", "4:4", "expected a fraction of the weights"),
        ("block", "4", "expected a block's inputs and outputs, such as 4x4"),
        ("end", "2weeks", r"2weeks: expected steps \(500\), 2epochs or 5%"),
        ("regrow", "1", "must be less than 1"),
    ],
)
def test_values_refused(field, value, message):
    with pytest.raises(ConfigError, match=message):
        resolve({}, "", {f"pruning.{field}": value})


@pytest.mark.parametrize("value", [0, "0", 0.999, "1e-3", "3:4", "none", None])
def test_values_taken(value):
    sparsity = resolve({}, "", {"pruning.sparsity": value}).pruning.sparsity
    assert sparsity == (None if value in ("none", None) else value if ":" in str(value) else float(value))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prune", "0.5", "--prune-layers", "dence"), "unknown layer 'dence'; did you mean 'dense'"),
        (("--prune", "2:5"), "layer 'dense': its kernel of shape (784, 8) has 784 inputs, not a multiple of 5"),
        (("--regrow",), "pruning.regrow = 0.3: nothing is pruned; add --prune 0.9, for example"),
        (("--prune", "0.5", "--pruning.begin", "80%"), "pruning.begin = 80% (step 44) is after pruning.end = 70% (38)"),
        (("--sparsity", "0.5"), "unknown '--sparsity'; did you mean '--pruning.sparsity'?"),
    ],
)
def test_refused(train, arguments, message):
    code, err = train("run", *arguments)
    assert (code, message in err) == (2, True), err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--prune", "2:4", "--prune-layers", "dense_1"), [0, 0.5]),
        ((*LAYER, "--prune", "0.5", "--prune-block", "8x4", "--prune-schedule", "constant"), [0.5, 0.4]),  # of 4, 4, 2
        ((*LAYER, "--prune", "0.5", "--optimizer.gradient_accumulation_steps", "2"), [0.5, 0.5]),
    ],
)
def test_taken(train, arguments, expected):
    assert zeros(train("run", *arguments, "--epochs", "1")) == expected


def test_what_decides():
    config = resolve({}, "", {"pruning.sparsity": "0.5", "train.epochs": 4})
    assert deciding(config)["pruning"]["sparsity"] == 0.5
    assert deciding(config)["train"]["epochs"] == 4  # its end is a part of the training
    fixed = resolve({}, "", {"pruning.sparsity": "0.5", "pruning.begin": "3", "pruning.end": "2epochs"})
    assert "epochs" not in deciding(fixed)["train"]
    assert "pruning" not in deciding(Config())
    assert "pruning" not in without_later(to_dict(Config()))  # as sweeps of before have it
    assert [settled(fixed, steps) for steps in (None, 10)] == [0, 1]
    assert settled(resolve({}, "", {"pruning.sparsity": "0.5", "pruning.end": "11"}), 10) == 1
    assert settled(resolve({}, "", {"pruning.sparsity": "0.5", "pruning.end": "10"}), 10) == 0


def test_a_sweep_shows_sparsity_beside_accuracy(small_npz, tmp_path, capfd):
    out = tmp_path / "s"
    grid = ("--grid", "prune=none,0.5,0.75", "--seeds", "0-1", "--epochs", "2", "--pruning.frequency", "4")
    assert main(["sweep", "--data", str(small_npz), *FIXED, *grid, "--out", str(out)]) == 0
    capfd.readouterr()
    with open(out / "trials.csv", encoding="utf-8", newline="") as file:
        sparsities = {row["prune"]: float(row["mean_sparsity"]) for row in csv.DictReader(file)}
    assert list(sparsities) == ["", "0.5", "0.75"] or list(sparsities) == ["none", "0.5", "0.75"]
    assert list(sparsities.values()) == pytest.approx([0, 0.5, 0.75], abs=0.01)
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "sparsity" in report
    # A run of it alone has its bits.
    line = next(
        record for record in map(json.loads, (out / "results.jsonl").read_text().splitlines()) if record["run"] == 5
    )
    alone = ("--prune", "0.75", "--seed", str(line["seed"]), *grid[4:], "--out", str(tmp_path / "alone"))
    assert main(["--data", str(small_npz), *FIXED, *alone]) == 0
    first = epochs(tmp_path / "alone")[0]
    assert {key: first[key] for key in ("loss", "val_loss", "sparsity")} == {
        key: line[key] for key in ("loss", "val_loss", "sparsity")
    }
