import sys

import numpy as np
import pytest

from dptrain.callbacks import CallbackList, TensorBoard
from dptrain.errors import ConfigError, OutputError
from tests.unit.callbacks import Rank1, build, drive, toy


def events(folder) -> list[tuple[str, int, object]]:
    """Return (tag, step, value) of what is in a folder's files; of a histogram the number of its values."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    results = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            event = Event.FromString(content[12 : 12 + length])
            for value in event.summary.value:
                results.append(
                    (value.tag, event.step, value.histo.num if value.HasField("histo") else value.simple_value)
                )
            content = content[16 + length :]
    return results


@pytest.fixture
def board():
    pytest.importorskip("tensorboardX")


@pytest.mark.usefixtures("board")
def test_scalars_of_epochs(tmp_path):
    drive(TensorBoard(tmp_path), [{"loss": 2.0, "val_loss": 3.0}, {"loss": 1.0}])
    rate = float(np.float32(0.1))
    assert events(tmp_path / "train") == [
        ("epoch_loss", 0, 2.0),
        ("epoch_learning_rate", 0, rate),
        ("epoch_loss", 1, 1.0),
        ("epoch_learning_rate", 1, rate),
    ]
    assert events(tmp_path / "validation") == [("epoch_loss", 0, 3.0)]


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize(("freq", "steps"), [("batch", [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4]), ("epoch", [])])
def test_scalars_of_steps(tmp_path, freq, steps):
    logs = [[{"loss": 10.0 * epoch + step} for step in range(3)] for epoch in range(2)]
    drive(TensorBoard(tmp_path, update_freq=freq), [{"loss": 1.0}] * 2, steps=logs)
    values = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]
    batch_events = [event for event in events(tmp_path / "train") if event[0].startswith("batch_")]
    assert batch_events == [("batch_loss", step, values[step - 1]) for step in steps]


@pytest.mark.usefixtures("board")
def test_a_training_with_histograms_and_evaluations(tmp_path):
    x, y = toy()
    model = build()
    callback = TensorBoard(tmp_path, histogram_freq=2, write_steps_per_second=True)
    history = model.fit(x, y, batch_size=25, epochs=3, verbose=0, callbacks=callback, validation_data=(x, y)).history
    train, validation = events(tmp_path / "train"), events(tmp_path / "validation")
    assert [(step, value) for tag, step, value in train if tag == "dense/kernel/histogram"] == [(0, 48), (2, 48)]
    losses = [value for tag, _, value in validation if tag == "evaluation_loss_vs_iterations"]
    np.testing.assert_allclose(losses, history["val_loss"], rtol=1e-6)
    assert [step for tag, step, _ in validation if tag == "evaluation_loss_vs_iterations"] == [2, 4, 6]
    assert sum(tag == "epoch_steps_per_second" and value > 0 for tag, _, value in train) == 3
    model.evaluate(x, y, verbose=0, callbacks=callback)
    assert sum(tag == "evaluation_loss_vs_iterations" for tag, *_ in events(tmp_path / "validation")) == 4


@pytest.mark.usefixtures("board")
def test_a_second_training_leaves_the_files_of_the_first(tmp_path):
    for _ in range(2):
        drive(TensorBoard(tmp_path), [{"loss": 2.0}])
    assert [tag for tag, *_ in events(tmp_path / "train")].count("epoch_loss") == 2


@pytest.mark.usefixtures("board")
def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another `log_dir` of TensorBoard"):
        drive(TensorBoard(tmp_path / "file"), [{"loss": 1.0}])


def test_only_rank_0_writes(tmp_path):
    drive(TensorBoard(tmp_path / "logs"), [{"loss": 1.0}], comm=Rank1())
    assert not (tmp_path / "logs").exists()


def test_without_tensorboardx(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install tensorboardX"):
        drive(TensorBoard(tmp_path), [{"loss": 1.0}])


@pytest.mark.parametrize("options", [{"write_images": True}, {"profile_batch": 2}, {"embeddings_freq": 1}])
def test_what_is_not_supported(options):
    with pytest.raises(ConfigError, match=f"not supported: {next(iter(options))}="):
        TensorBoard(**options)


def test_steps_cost_nothing_where_nobody_listens():
    assert not CallbackList(TensorBoard())._has_batch_hooks("train")
    assert CallbackList(TensorBoard(update_freq=5))._has_batch_hooks("train")
