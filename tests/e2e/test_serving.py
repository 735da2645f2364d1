"""What an engineer who serves models types: load, evaluate, predict, export."""

import csv
import json

import numpy as np
import pytest

import dptrain as dp
from tests.launching import dptrain
from tests.sample import sample
from tests.tolerances import assert_near


@pytest.fixture(scope="module")
def served(small_npz, tmp_path_factory):
    """A run, and the features of its test part."""
    path = tmp_path_factory.mktemp("served")
    arguments = ["--data", str(small_npz), "--epochs", "1", "--hidden", "16", "--verbose", "0"]
    done = dptrain(0, *arguments, "--out", "runs/first", cwd=path)
    assert (done.code, done.err) == (0, "")
    with np.load(small_npz) as data:
        np.save(path / "new.npy", data["x_test"])
    return path


@pytest.mark.parametrize("ranks", sample([0, 3], 2, first=1))
def test_predictions_are_the_model_s_in_the_rows_order(served, ranks):
    out = f"predictions-{ranks}.csv"
    done = dptrain(ranks, "predict", "runs/first", "--data", "new.npy", "--out", out, cwd=served, fresh=not ranks)
    assert (done.code, done.out, done.err) == (0, "", "")
    with open(served / out, newline="") as file:
        rows = list(csv.DictReader(file))
    expected = dp.models.load_model(served / "runs" / "first").predict(np.load(served / "new.npy"), verbose=0)
    assert [int(row["index"]) for row in rows] == list(range(201))
    probabilities = np.array([[row[f"p_{label}"] for label in range(10)] for row in rows], np.float32)
    np.testing.assert_allclose(probabilities, expected, rtol=1e-5, atol=1e-7)
    assert [int(row["class"]) for row in rows] == probabilities.argmax(axis=1).tolist()


@pytest.mark.parametrize("ranks", sample([0, 2], 2))
def test_evaluation_is_the_training_s(served, ranks):
    done = dptrain(ranks, "evaluate", "runs/first", "--json", cwd=served, fresh=not ranks)
    assert (done.code, done.err) == (0, "")
    answer = json.loads(done.out)
    metrics = json.loads((served / "runs" / "first" / "summary.json").read_text())["metrics"]
    assert answer["samples"] == 201
    assert answer["metrics"]["loss"] == pytest.approx(metrics["val_loss"], rel=1e-6)
    assert answer["metrics"]["accuracy"] == metrics["val_accuracy"]


@pytest.mark.parametrize("ranks", sample([0, 2], 2))
def test_predictions_go_to_standard_output_alone(served, ranks):
    done = dptrain(ranks, "predict", "runs/first", "--data", "new.npy", cwd=served)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("index,class,p_0,")
    assert [line.partition(",")[0] for line in lines[1:]] == [str(row) for row in range(201)]


@pytest.mark.parametrize("ranks", sample([0, 2], 2, first=1))
def test_a_run_that_has_not_finished_says_so(served, tmp_path, ranks):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "checkpoints" / "000001-step-8").mkdir(parents=True)
    done = dptrain(ranks, "predict", str(tmp_path), "--data", "new.npy", cwd=served)
    assert (done.code, done.out) == (65, "")
    (message,) = done.messages
    assert "the run has not finished; its newest checkpoint is checkpoints/000001-step-8; `python -m dptrain" in message


def test_an_exported_model_runs_in_onnx_runtime(served):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("onnx", reason="needs the extra 'onnx'")
    done = dptrain(2, "export", "runs/first", "--out", "model.onnx", cwd=served, fresh=True)
    assert (done.code, done.err) == (0, "")
    x = np.load(served / "new.npy")
    session = onnxruntime.InferenceSession(served / "model.onnx", providers=["CPUExecutionProvider"])
    (input_info,) = session.get_inputs()
    assert input_info.shape == ["rows", 28, 28]
    (outputs,) = session.run(None, {input_info.name: x.astype(np.float32)})
    assert_near(outputs, dp.models.load_model(served / "runs" / "first").predict(x, verbose=0), "float32")
