import csv

import numpy as np
import pytest

from dptrain.callbacks import CSVLogger
from dptrain.errors import OutputError
from tests.unit.callbacks import Rank1, build, drive, toy

EPOCHS = [{"loss": 1.5, "accuracy": 0.25}, {"loss": 1.0, "accuracy": 0.5, "val_loss": 2.0}]


def test_lines_are_keras(tmp_path):
    path = tmp_path / "log.csv"
    drive(CSVLogger(path), EPOCHS)
    assert path.read_bytes() == (
        b"epoch,accuracy,loss,val_accuracy,val_loss\r\n0,0.25,1.5,NA,NA\r\n1,0.5,1.0,NA,2.0\r\n"
    )


def test_validated_epochs_have_no_columns_too_many(tmp_path):
    path = tmp_path / "log.csv"
    drive(CSVLogger(path, separator=";"), [{"val_loss": 2.0, "loss": 1.0}])
    assert path.read_text().splitlines() == ["epoch;loss;val_loss", "0;1.0;2.0"]


@pytest.mark.parametrize("before", [None, b"", b"old\r\n"])
@pytest.mark.parametrize("append", [False, True])
def test_an_existing_file(tmp_path, before, append):
    path = tmp_path / "log.csv"
    if before is not None:
        path.write_bytes(before)
    drive(CSVLogger(path, append=append), [{"loss": 1.0}])
    lines = path.read_text().splitlines()
    assert lines == (["old", "0,1.0,NA"] if append and before else ["epoch,loss,val_loss", "0,1.0,NA"])


def test_arrays_are_lists(tmp_path):
    path = tmp_path / "log.csv"
    drive(CSVLogger(path), [{"a": np.array([1, 2]), "b": np.array(3.0)}])  # type: ignore[dict-item]
    with open(path, newline="") as file:
        assert next(csv.DictReader(file)) == {"epoch": "0", "a": '"[1, 2]"', "b": "3.0", "val_a": "NA", "val_b": "NA"}


def test_only_rank_0_writes(tmp_path):
    drive(CSVLogger(tmp_path / "log.csv"), EPOCHS, comm=Rank1())
    assert not (tmp_path / "log.csv").exists()


def test_a_file_that_cannot_be_written(tmp_path):
    expected = r"No such file or directory; choose another `filename` of CSVLogger"
    with pytest.raises(OutputError, match=expected):
        drive(CSVLogger(tmp_path / "no" / "log.csv"), EPOCHS)


def test_the_history_of_a_training(tmp_path):
    x, y = toy()
    history = build().fit(x, y, epochs=2, verbose=0, callbacks=CSVLogger(tmp_path / "log.csv")).history
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == history["loss"]
