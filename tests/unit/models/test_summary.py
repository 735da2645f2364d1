"""The table of a model, as Keras prints it."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers as L  # noqa: N812
from dptrain.errors import ConfigError

BEFORE = """\
Model: "small"
┏━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━┓
┃ Layer (type)                 ┃ Output Shape          ┃     Param # ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━┩
│ dense (Dense)                │ ?                     │ 0 (unbuilt) │
└──────────────────────────────┴───────────────────────┴─────────────┘
 Total params: 0 (0.00 B)
 Trainable params: 0 (0.00 B)
 Non-trainable params: 0 (0.00 B)
"""
AFTER = """\
Model: "small"
┏━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━┓
┃ Layer (type)                 ┃ Output Shape          ┃     Param # ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━┩
│ dense (Dense)                │ (None, 400)           │       1,600 │
├──────────────────────────────┼───────────────────────┼─────────────┤
│ dropout (Dropout)            │ (None, 400)           │           0 │
└──────────────────────────────┴───────────────────────┴─────────────┘
 Total params: 1,600 (6.25 KB)
 Trainable params: 1,600 (6.25 KB)
 Non-trainable params: 0 (0.00 B)
"""


def printed(model, **options):
    texts = []
    model.summary(print_fn=texts.append, **options)
    [text] = texts
    return text


def rows(text):
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


def test_a_table_before_and_after_there_are_weights():
    """The lines are Keras' own for these two models."""
    assert printed(keras.Sequential([L.Dense(400)], name="small"), line_length=70) == BEFORE
    model = keras.Sequential([keras.Input((3,)), L.Dense(400), L.Dropout(0.1)], name="small")
    assert printed(model, line_length=70) == AFTER


def test_it_is_printed(capsys):
    keras.Sequential([keras.Input((3,)), L.Dense(2)]).summary()
    assert " Total params: 8 (32.00 B)\n" in capsys.readouterr().out


def nested():
    inner = keras.Sequential([keras.Input((3,)), L.Dense(2, name="deep"), L.ReLU()], name="inner")
    inner.trainable = False
    return keras.Sequential([keras.Input((3,)), inner, L.Dense(1, name="head")])


def test_models_in_a_model_are_shown_on_request():
    assert [row[0] for row in rows(printed(nested()))] == ["inner (Sequential)", "head (Dense)"]
    result = [row[0] for row in rows(printed(nested(), expand_nested=True))]
    assert result == ["inner (Sequential)", "└ deep (Dense)", "└ re_lu (ReLU)", "head (Dense)"]


def test_what_is_trained_is_shown_on_request():
    result = rows(printed(nested(), expand_nested=True, show_trainable=True, line_length=100))
    assert [row[-1] for row in result] == ["N", "N", "-", "Y"]


def test_branches_say_what_they_are_connected_to():
    x = keras.Input((3,), name="x")
    shared = L.Dense(2, name="shared")
    model = keras.Model(x, L.Add(name="sum")([shared(x), shared(x * 2)]))
    result = {row[0]: row[1:] for row in rows(printed(model, line_length=140))}
    assert result["x (InputLayer)"] == ["(None, 3)", "0", "-"]
    assert result["shared (Dense)"] == ["(None, 2)", "8", "x[0][0], multiply[0][0]"]
    assert result["sum (Add)"] == ["(None, 2)", "0", "shared[0][0], shared[1][0]"]


def test_a_chain_has_no_such_column():
    x = keras.Input((3,))
    assert "Connected to" not in printed(keras.Model(x, L.Dense(2)(L.Dense(3)(x))))


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = L.Dense(4), L.Dense(2)

    def call(self, x):
        return self.second(self.first(x))


def test_a_subclass_before_and_after_its_first_call():
    model = Own()
    assert [row[1:] for row in rows(printed(model))] == [["?", "0 (unbuilt)"]] * 2
    model(np.ones((5, 3)))
    assert [row[1:] for row in rows(printed(model))] == [["(None, 4)", "16"], ["(None, 2)", "10"]]


def test_the_optimizers_numbers_are_counted():
    model = keras.Sequential([keras.Input((3,)), L.Dense(2)])
    model.compile("adam", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    text = printed(model)
    assert " Trainable params: 8 (32.00 B)" in text
    assert " Optimizer params: 18 (" in text
    assert " Total params: 26 (" in text


def test_a_range_of_layers():
    model = keras.Sequential([keras.Input((3,)), *(L.Dense(3, name=f"layer{n}") for n in range(5))])
    result = rows(printed(model, layer_range=("layer1", "layer[23]")))
    assert [row[0] for row in result] == ["layer1 (Dense)", "layer2 (Dense)", "layer3 (Dense)"]
    for wrong in (("layer1",), (1, 2), ("layer1", "none")):
        with pytest.raises(ConfigError, match="layer_"):
            printed(model, layer_range=wrong)


def test_a_line_that_is_too_short():
    with pytest.raises(ConfigError, match="Insufficient console width to print summary"):
        printed(nested(), line_length=12)


def test_only_rank_0_prints(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    texts = []
    nested().summary(print_fn=texts.append)
    assert texts == []
