"""From arrays to a task: what targets are for."""

import numpy as np
import pytest

from dptrain.comm import SoloCommunicator
from dptrain.data.loading import load_dataset
from dptrain.errors import AgreedError

X = np.zeros((4, 3), np.float32)


def loaded(folder, y, y_test=None, **options):
    test = y if y_test is None else y_test
    np.savez(folder / "set.npz", x_train=X, y_train=y, x_test=X[: len(test)], y_test=test)
    return load_dataset(str(folder / "set.npz"), SoloCommunicator(), **options)


@pytest.mark.parametrize(
    ("y", "task", "classes", "outputs"),
    [
        (np.array([0, 1, 2, 1]), "multiclass", 3, 3),
        (np.array([0, 1, 0, 1]), "multiclass", 2, 2),
        (np.array([0.0, 1, 0, 1]), "binary", 2, 1),
        (np.array([[0.0], [1], [0], [1]]), "binary", 2, 1),
        (np.array([0.0, 1, 0, 1.5]), "regression", 0, 1),
        (np.zeros((4, 2)) + 0.5, "regression", 0, 2),
    ],
)
def test_the_type_of_targets_says_the_task(tmp_path, y, task, classes, outputs):
    data = loaded(tmp_path, y)
    assert (data.task, data.num_classes, data.outputs) == (task, classes, outputs)
    assert bool(data.notes) == (y.dtype.kind == "f")


def test_the_test_part_decides_with_the_training_part(tmp_path):
    assert loaded(tmp_path, np.array([0.0, 1, 0, 1]), np.array([0.5])).task == "regression"


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_whole_numbers_may_be_asked_to_be_something_else(tmp_path, task):
    assert loaded(tmp_path, np.array([0, 1, 0, 1]), task=task).task == task


@pytest.mark.parametrize(
    ("y", "task", "message"),
    [
        (np.array([0.5, 1, 0, 1]), "multiclass", "labels are float64, expected integers"),
        (np.array([0, 1, 2, 1]), "binary", "y_train: label 2 at index 2; 2 classes allow 0-1"),
        (np.array([0, 1, 0.5, 1]), "binary", "y_train: target 0.5 at index 2; two classes are 0 and 1"),
        (np.array([0, 1, np.nan, 1.5]), None, "y_train: NaN at sample 2"),
    ],
)
def test_targets_that_are_not_of_the_task_are_refused(tmp_path, y, task, message):
    with pytest.raises(AgreedError, match=message):
        loaded(tmp_path, y, task=task)


@pytest.mark.parametrize("label", [1_000_000, 1 << 40, 2**63 - 1])
def test_a_label_with_a_flipped_bit_is_damage_not_a_huge_model(tmp_path, label):
    with pytest.raises(AgreedError, match=f"y_train: label {label} at index 2; 1000000 classes allow 0-999999"):
        loaded(tmp_path, np.array([0, 1, label, 1]))
    assert loaded(tmp_path, np.array([0, 1, 999_999, 1])).num_classes == 1_000_000


def test_as_many_classes_as_samples_are_no_damage(tmp_path):
    y = np.arange(1_000_001)
    np.savez(tmp_path / "set.npz", x_train=np.zeros((len(y), 1), np.uint8), y_train=y, x_test=X[:1, :1], y_test=y[:1])
    assert load_dataset(str(tmp_path / "set.npz"), SoloCommunicator()).num_classes == len(y)
