import io
import re
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
from rich.console import Console

from dptrain.callbacks import CallbackList, ProgbarLogger
from dptrain.callbacks import progbar_logger as module
from dptrain.callbacks.progbar_logger import format_logs
from tests.unit.callbacks import Rank1, build, toy, trainer


def printed(action) -> str:
    text = io.StringIO()
    with redirect_stdout(text):
        action()
    return text.getvalue()


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.00101, "0.0010"), (0.001, "1.0000e-03"), (2e-5, "2.0000e-05"), (-2e-5, "-2.0000e-05"), (-1.5, "-1.5000"),
     (0.0, "0.0000e+00"), (float("nan"), "nan"), (123456.0, "123456.0000")],
)  # fmt: skip
def test_numbers_are_written_as_keras_progress_bar_writes_them(value, shown):
    assert format_logs({"a": value, "loss": 0.35}) == f"a: {shown} - loss: 0.3500"


def test_a_first_step_that_compiles_for_long_is_said_to(monkeypatch):
    file = io.StringIO()
    file.isatty = lambda: True
    logger = ProgbarLogger(file)
    logger._verbose = 2
    monkeypatch.setattr(module, "ranks_of", lambda callback: SimpleNamespace(rank=0))
    monkeypatch.setattr(module, "_SILENCE", 0.01)
    for name, message in (("training", ""), ("compilation", "compiling the step, once for this model and machine\n")):
        monkeypatch.setattr(module, "phase", SimpleNamespace(name=name))
        logger.on_train_begin()
        logger.on_epoch_begin(0)
        logger._watch.join()
        logger._release()
        logger.on_epoch_begin(1)
        assert logger._watch is None
        assert file.getvalue() == message


def test_epoch_lines():
    x, y = toy(50)
    lines = printed(lambda: build().fit(x, y, batch_size=16, epochs=2, verbose=2, validation_data=(x, y))).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("Epoch 2/2 - 4 steps - ")
    for part in (" samples/s - loss: ", " - accuracy: ", " - val_loss: ", " - val_accuracy: "):
        assert part in lines[1]
    assert printed(lambda: build().fit(x, y, batch_size=64, verbose=2)).startswith("Epoch 1/1 - 1 step - ")


def test_a_live_line_becomes_the_epochs_line(monkeypatch):
    monkeypatch.setattr("dptrain.callbacks.progbar_logger._REFRESH", 0.0)
    x, y = toy(50)
    text = io.StringIO()
    logger = ProgbarLogger(text, Console(file=text, force_terminal=True, width=80))
    build().fit(x, y, batch_size=10, epochs=2, verbose=1, callbacks=logger)
    live = re.findall(r"Epoch 1/2 +(\d)/5 [^\r\n]*ETA[^\r\n]*samples/s - loss: [0-9.]+", text.getvalue())
    assert live[0] == "1"  # several steps may be executed at once
    assert live[-1] == "5"
    assert len(re.findall(r"Epoch \d/2 - 5 steps - [0-9.]+ s - [0-9,]+ samples/s - loss: ", text.getvalue())) == 2


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80])
def test_a_live_line_leaves_out_what_does_not_fit(monkeypatch, width):
    monkeypatch.setattr("dptrain.callbacks.progbar_logger._REFRESH", 0.0)
    x, y = toy(50)
    text = io.StringIO()
    logger = ProgbarLogger(text, Console(file=text, force_terminal=True, color_system=None, width=width))
    build().fit(x, y, batch_size=10, verbose=1, callbacks=logger)
    live = re.findall(r"Epoch 1/1 +[1-5]/5 ETA [-0-9:]+ [0-9,]+ samples/s[^\r\n\x1b]*", text.getvalue())
    assert live
    assert max(map(len, live)) <= width
    assert any("loss: " in line for line in live) == (width >= 60)
    assert all(re.fullmatch(r".* samples/s( - [a-z_]+: [-+0-9.e]+)*", line.rstrip()) for line in live)


def test_a_live_line_survives_a_window_that_becomes_narrow_and_wide(monkeypatch):
    monkeypatch.setattr(module, "_REFRESH", 0.0)
    widths = iter([100, 100, 100, 45, 45, 100])
    width = 100

    def columns(stream=None):
        nonlocal width
        width = next(widths, width)
        return width

    seen = []

    class Watched(ProgbarLogger):
        _shows_only = True

        def _update(self, batch, logs=None):
            before = len(text.getvalue())
            super()._update(batch, logs)
            lines = re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", text.getvalue()[before:])
            seen.append((self._progress.console.width, max(map(len, lines))))

    text = io.StringIO()
    monkeypatch.setattr("dptrain.runtime.output.terminal.terminal_columns", columns)
    x, y = toy(50)
    with redirect_stdout(text):
        build(steps_per_execution=1).fit(x, y, batch_size=10, verbose=1, callbacks=Watched())
    assert {width for width, _ in seen} == {100, 45}
    assert all(longest <= width for width, longest in seen)
    assert any(longest > 45 for _, longest in seen)


def test_an_error_gives_the_terminal_back():
    from dptrain.callbacks import LambdaCallback

    def fail(batch, logs):
        raise KeyError("planted")

    x, y = toy()
    before = sys.stdout
    logger = ProgbarLogger(io.StringIO(), Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(KeyError, match="planted"):
        build().fit(x, y, verbose=1, callbacks=[logger, LambdaCallback(on_train_batch_end=fail)])
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
    hooks._set_trainer(trainer(Rank1()))
    hooks.on_predict_begin()
    hooks.on_predict_end()
    hooks.on_epoch_begin(0)
    hooks.on_train_batch_end(0, {})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verbose", [1, 2])
def test_ranks_do_not_meet_for_a_line(verbose):
    hooks = CallbackList(ProgbarLogger(), verbose=verbose, epochs=1, steps=1)
    assert not hooks._has_batch_hooks("train")
    assert not hooks._has_batch_hooks("test")


@pytest.mark.parametrize(("word", "lines"), [("none", 0), ("lines", 2)])
def test_the_environment_decides_for_auto(monkeypatch, word, lines):
    monkeypatch.setenv("DPTRAIN_PROGRESS", word)
    x, y = toy(50)
    assert printed(lambda: build().fit(x, y, epochs=2)).count("Epoch ") == lines
    assert printed(lambda: build().fit(x, y, epochs=2, verbose=2)).count("Epoch ") == 2


@pytest.mark.parametrize("columns", [60, 80])
def test_epoch_lines_on_a_terminal_break_between_logs(monkeypatch, columns):
    monkeypatch.setattr("dptrain.runtime.output.terminal.terminal_columns", lambda stream=None: columns)
    x, y = toy(50)
    lines = printed(lambda: build().fit(x, y, verbose=2, validation_data=(x, y))).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= columns
    assert all(re.match(r"  - [a-z_]+: \d", line) for line in lines[1:])


def test_a_subclass_may_do_more_than_show():
    class Impatient(ProgbarLogger):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    assert not CallbackList(ProgbarLogger())._has_batch_hooks("train")
    assert CallbackList(Impatient())._has_batch_hooks("train")
