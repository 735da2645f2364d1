import io
import re
import sys
from contextlib import redirect_stdout

import pytest
from rich.console import Console

from dptrain.callbacks import CallbackList, ProgbarLogger
from dptrain.callbacks.progbar_logger import for_verbosity
from tests.unit.callbacks import Rank1, build, toy, trainer


@pytest.mark.parametrize(
    ("verbose", "terminal", "expected"),
    [("auto", True, 1), ("auto", False, 2), (0, True, 0), (1, False, 1), (2, True, 2)],
)
def test_verbosity(verbose, terminal, expected):
    assert for_verbosity(verbose, terminal) == expected


def printed(action) -> str:
    text = io.StringIO()
    with redirect_stdout(text):
        action()
    return text.getvalue()


def test_epoch_lines():
    x, y = toy(50)
    lines = printed(lambda: build().fit(x, y, batch_size=16, epochs=2, verbose=2, validation_data=(x, y))).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("Epoch 2/2 - 4 steps - ")
    for part in (" samples/s - loss: ", " - accuracy: ", " - val_loss: ", " - val_accuracy: "):
        assert part in lines[1]


def test_a_live_line_becomes_the_epochs_line(monkeypatch):
    monkeypatch.setattr("dptrain.callbacks.progbar_logger._REFRESH", 0.0)
    x, y = toy(50)
    text = io.StringIO()
    shown = ProgbarLogger(text, Console(file=text, force_terminal=True, width=80))
    build().fit(x, y, batch_size=10, epochs=2, verbose=1, callbacks=shown)
    live = re.findall(r"Epoch 1/2 +(\d)/5 [^\r\n]*ETA[^\r\n]*samples/s - loss: [0-9.]+", text.getvalue())
    assert sorted(set(live)) == ["1", "2", "3", "4", "5"]
    assert len(re.findall(r"Epoch \d/2 - 5 steps - [0-9.]+ s - [0-9,]+ samples/s - loss: ", text.getvalue())) == 2


def test_an_error_gives_the_terminal_back():
    from dptrain.callbacks import LambdaCallback

    def fail(batch, logs):
        raise KeyError("planted")

    x, y = toy()
    before = sys.stdout
    shown = ProgbarLogger(io.StringIO(), Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(KeyError, match="planted"):
        build().fit(x, y, verbose=1, callbacks=[shown, LambdaCallback(on_train_batch_end=fail)])
    assert sys.stdout is before


@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_lines_of_evaluation_and_prediction(verbose):
    x, y = toy(50)
    model = build()
    model.fit(x, y, verbose=0)
    line = printed(lambda: model.evaluate(x, y, batch_size=10, verbose=verbose))
    assert re.fullmatch(r"5 steps - [0-9.]+ s - [0-9,]+ samples/s - loss: [0-9.]+ - accuracy: [0-9.]+\n", line)
    assert re.fullmatch(r"5 steps - [0-9.]+ s\n", printed(lambda: model.predict(x, batch_size=10, verbose=verbose)))
    assert printed(lambda: model.predict_on_batch(x)) == ""


def test_silence():
    x, y = toy(50)
    model = build()

    def use():
        model.fit(x, y, verbose=0)
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)

    assert printed(use) == ""


def test_a_users_own_is_the_only_one():
    x, y = toy(50)
    assert printed(lambda: build().fit(x, y, verbose=2, callbacks=[ProgbarLogger()])).count("Epoch 1/1") == 1


def test_only_rank_0_shows_anything(capsys):
    hooks = CallbackList(ProgbarLogger(), verbose=1, epochs=1, steps=1)
    hooks.set_trainer(trainer(Rank1()))
    hooks.on_predict_begin()
    hooks.on_predict_end()
    hooks.on_epoch_begin(0)
    hooks.on_train_batch_end(0, {})
    assert capsys.readouterr().out == ""


def test_steps_cost_nothing_where_no_line_is_live():
    assert not CallbackList(ProgbarLogger(), verbose=2, epochs=1, steps=1).has_batch_hooks("train")
    live = CallbackList(ProgbarLogger(), verbose=1, epochs=1, steps=1)
    assert live.has_batch_hooks("train")
    assert not live.has_batch_hooks("test")
