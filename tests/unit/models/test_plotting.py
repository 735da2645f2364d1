"""A model as a picture: what is in it, and where it is written."""

import os
import stat
from xml.etree import ElementTree

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers as L  # noqa: N812
from dptrain.errors import ConfigError
from dptrain.models import plotting
from dptrain.utils import model_to_dot, plot_model

SVG = "{http://www.w3.org/2000/svg}"


def branched():
    x = keras.Input((3,), name="x")
    left, right = L.Dense(2, "relu", name="left")(x), L.Dense(2, name="right")(x * 2)
    return keras.Model(x, L.Add(name="sum")([left, right]))


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_every_layer_and_op_is_a_box_and_every_tensor_an_arrow(tmp_path):
    svg = plot_model(branched(), tmp_path / "m.svg")
    assert (tmp_path / "m.svg").read_text() == svg
    assert sorted(texts(svg)) == ["left (Dense)", "multiply", "right (Dense)", "sum (Add)", "x (InputLayer)"]
    root = ElementTree.fromstring(svg)
    assert len(list(root.iter(f"{SVG}line"))) == 5
    assert len(list(root.iter(f"{SVG}rect"))) == 1 + 5  # the background
    ends = [float(line.get("y1")) - float(line.get("y2")) for line in root.iter(f"{SVG}line")]
    assert max(ends) < 0  # downward


def test_what_boxes_say_on_request():
    model = keras.Sequential([keras.Input((3,)), L.Dense(2, "relu", trainable=False), L.Dropout(0.5)])
    dot = model_to_dot(
        model,
        show_shapes=True,
        show_dtype=True,
        show_layer_names=False,
        show_layer_activations=True,
        show_trainable=True,
        rankdir="LR",
    )
    assert '  1 [label="Dense\\nActivation: relu\\nOutput shape: (None, 2)\\ndtype: float32\\nNon-trainable"]\n' in dot
    assert '  2 [label="Dropout\\nOutput shape: (None, 2)\\ndtype: float32"]\n' in dot
    assert "  0 -> 1\n" in dot
    assert "rankdir=LR" in dot


def test_names_are_text_and_no_markup(tmp_path):
    model = keras.Sequential([keras.Input((3,)), L.Dense(1, name='<b>"&')])
    assert texts(plot_model(model, tmp_path / "m.svg", rankdir="LR"))[1] == '<b>"& (Dense)'
    assert '[label="<b>\\"& (Dense)"]' in plot_model(model, tmp_path / "m.dot")


def test_a_subclass_is_a_row_of_layers(tmp_path):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = L.Dense(2), L.Dense(1)

        def call(self, x):
            return self.b(self.a(x))

    model = Own()
    with pytest.raises(ConfigError, match="This model has not yet been built"):
        plot_model(model, tmp_path / "m.svg")
    model(np.ones((2, 3)))
    result = texts(plot_model(model, tmp_path / "m.svg", show_shapes=True))
    assert result[:2] == ["dense (Dense)", "Output shape: (None, 2)"]


def test_without_graphviz_it_is_an_svg_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(UserWarning, match=r"no Graphviz \(dot\) to write .*m.png; wrote .*m.svg"):
        plot_model(branched(), tmp_path / "m.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.svg"]


def program(folder, text):
    path = folder / "dot"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_graphviz_draws_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program(tmp_path, 'echo "$1"; head -1')
    plot_model(branched(), tmp_path / "m.png")
    assert (tmp_path / "m.png").read_text() == "-Tpng\ndigraph {\n"
    program(tmp_path, 'echo "Format: \\"xyz\\" not recognized." >&2; exit 1')
    with pytest.raises(ConfigError, match='Graphviz: Format: "xyz" not recognized'):
        plot_model(branched(), tmp_path / "m.xyz")
    monkeypatch.setattr(plotting, "_PATIENCE", 0.2)
    program(tmp_path, "sleep 60")
    with pytest.raises(ConfigError, match=r"dot has drawn nothing within 0\.2 s: write \.svg or \.dot"):
        plot_model(branched(), tmp_path / "m.png")
    (tmp_path / "dot").write_bytes(b"\x7fELF")
    with pytest.raises(ConfigError, match="dot: Exec format error: write"):
        plot_model(branched(), tmp_path / "m.png")


def test_another_direction():
    with pytest.raises(ConfigError, match="rankdir = 'BT': expected 'TB' or 'LR'"):
        model_to_dot(branched(), rankdir="BT")
