"""Every callback in a second training, which is as with a new one, and where several steps are executed at once."""

import itertools

import pytest

from dptrain.callbacks import ModelCheckpoint, TensorBoard
from dptrain.optimizers import SGD
from tests.unit.callbacks import build, toy
from tests.unit.callbacks.test_every_callback_resumes import CALLBACKS, EPOCHS, STEPS, files

# What a callback keeps from training to training, as Keras does: the best value of all, and steps since the last file.
KEPT = {ModelCheckpoint: {"_steps_since_saving", "_last_step"}}


@pytest.mark.sample(1)
@pytest.mark.parametrize("epochs", [1, EPOCHS])
@pytest.mark.parametrize("kind", CALLBACKS, ids=lambda kind: kind.__name__)
def test_a_second_training_is_as_with_a_new_callback(tmp_path, kind, epochs):
    """However short it is: one epoch, which `start_from_epoch` and `patience` may leave out."""
    x, y = toy(4 * STEPS)

    def train(folder, second):
        folder.mkdir()
        model = build(SGD(0.1, momentum=0.5, use_ema=True, ema_momentum=0.8))
        arguments = {"batch_size": 4, "verbose": 0, "validation_data": (x[:8], y[:8])}
        model.fit(x, y, **arguments, epochs=EPOCHS, callbacks=[first := CALLBACKS[kind](folder)])
        for name in KEPT.get(kind, ()):
            setattr(first, name, getattr(CALLBACKS[kind](folder), name))
        again = second(folder, first)
        model.fit(x, y, **arguments, epochs=epochs, callbacks=[again])
        weights = [weight.tolist() for weight in model.get_weights()]
        return weights, model.history.history, repr(again.state_dict()), files(folder)

    expected = train(tmp_path / "new", lambda folder, _: CALLBACKS[kind](folder))
    assert train(tmp_path / "same", lambda _, first: first) == expected


def due(freq, at_once, epochs=2, steps=5):
    """Return epoch, step (from 1) and number of the step after which so many steps have passed since the last such."""
    ends = [min(first + at_once, steps) for first in range(0, steps, at_once)]
    found, since, number = [], 0, 0
    for epoch, (before, end) in itertools.product(range(epochs), itertools.pairwise([0, *ends])):
        since, number = since + end - before, number + end - before
        if since >= freq:
            found.append((epoch + 1, end, number))
            since = 0
    return found


@pytest.mark.parametrize("freq", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
def test_steps_count_however_many_are_executed_at_once(tmp_path, monkeypatch, freq, at_once):
    written, x, y = [], *toy(20)
    monkeypatch.setattr(TensorBoard, "_begin", lambda self: None)
    monkeypatch.setattr(TensorBoard, "_write", lambda self, part, values, step: written.append((step, *values)))
    saving = ModelCheckpoint(tmp_path / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=freq)
    model = build(steps_per_execution=at_once)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[saving, TensorBoard(tmp_path, update_freq=freq)])
    assert files(tmp_path).keys() == {f"{epoch}-{step}.weights.h5" for epoch, step, _ in due(freq, at_once)}
    by_step = [step for step, name, *_ in written if name.startswith("batch_")]
    ends = [number for _, _, number in due(1, at_once)]
    assert by_step == [end for before, end in itertools.pairwise([0, *ends]) if end // freq > before // freq]
    assert written[-1][0] == 1
