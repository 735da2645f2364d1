"""Progbar: lines of progress of a script's own loop."""

import pytest

from dptrain.errors import ConfigError
from dptrain.utils import Progbar


def test_a_line_at_the_end_with_the_last_values(capsys):
    """Which are the means of all steps, as in Keras."""
    bar = Progbar(4, verbose=2, stateful_metrics=["rate"])
    bar.update(1, [("loss", 4.0), ("rate", 1.0)])
    bar.add(3, [("loss", 2.0), ("rate", 0.5)])
    line = capsys.readouterr().out
    assert line.startswith("4/4 0s ")
    assert line.endswith("ms/step - loss: 2.0000 - rate: 0.5000\n")


def test_without_a_target_it_ends_when_it_is_told(capsys):
    bar = Progbar(None, stateless_metrics=["loss"], unit_name="batch")
    bar.update(2, [("loss", 1.0)])
    assert capsys.readouterr().out == ""
    bar.update(3, [("loss", 1.0)], finalize=True)
    assert capsys.readouterr().out.startswith("3/Unknown 0s ")


def test_silence_and_refusals(capsys):
    Progbar(1, verbose=0).update(1)
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="Only one of"):
        Progbar(1, stateful_metrics=[], stateless_metrics=[])
