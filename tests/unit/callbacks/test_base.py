import numpy as np
import pytest

import dptrain as dp
from dptrain.callbacks import Callback, CallbackList, EarlyStopping, LambdaCallback, ModelCheckpoint, StepLogs
from tests.unit.callbacks import FakeModel, build, toy


def test_logs_are_never_none_and_those_of_a_step_are_not_read_unasked():
    seen = []
    read = []
    hooks = CallbackList(
        LambdaCallback(
            on_train_begin=lambda logs: seen.append(logs),
            on_epoch_begin=lambda epoch, logs: seen.append(logs),
            on_train_batch_begin=lambda batch, logs: seen.append(logs),
            on_train_batch_end=lambda batch, logs: seen.append(type(logs)),
        )
    )
    hooks.on_train_begin()
    hooks.on_epoch_begin(0)
    hooks.on_train_batch_begin(0)
    hooks.on_train_batch_end(0, StepLogs(lambda: read.append(1) or {}))
    assert seen == [{}, {}, {}, StepLogs]
    assert read == []


def test_what_a_callback_adds_to_logs_is_seen_by_the_next_and_not_at_the_end():
    seen = []
    adds = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(more=1.0))
    sees = LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(sorted(logs)), on_train_end=lambda logs: seen.append(sorted(logs))
    )
    x, y = toy()
    history = build().fit(x, y, verbose=0, callbacks=[adds, sees]).history
    assert seen == [["accuracy", "loss", "more"], ["accuracy", "loss"]]
    assert history["more"] == [1.0]


@pytest.mark.parametrize("given", ["one", "nested", "none"])
def test_callbacks_come_alone_or_in_lists(given):
    calls = []
    a, b = (LambdaCallback(on_train_begin=lambda logs, name=name: calls.append(name)) for name in "ab")
    x, y = toy()
    build().fit(x, y, verbose=0, callbacks={"one": a, "nested": [[a], (b,)], "none": None}[given])
    assert calls == {"one": ["a"], "nested": ["a", "b"], "none": []}[given]


def test_what_ranks_must_have_in_common():
    checkpoint = ModelCheckpoint("a.keras", save_freq=3)
    facts = CallbackList([Callback(), checkpoint, EarlyStopping(patience=2)], FakeModel())._decisive()
    assert [fact[0] for fact in facts] == ["ModelCheckpoint", "EarlyStopping"]
    assert 3 in facts[0]
    assert 2 in facts[1]


@pytest.mark.parametrize("method", ["train", "test", "predict"])
@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_hook_that_is_set_on_an_instance_sees_each_batch(method, when):
    model = dp.Sequential([dp.layers.Input((2,)), dp.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    batches, callback = [], Callback()
    setattr(callback, f"on_{method}_batch_{when}", lambda batch, logs=None: batches.append(batch))
    x, call = np.ones((9, 2)), {"train": "fit", "test": "evaluate"}.get(method, method)
    getattr(model, call)(x, *[x[:, :1]] * (method != "predict"), batch_size=2, verbose=0, callbacks=[callback])
    assert batches == [0, 1, 2, 3, 4]
