"""`model.export` and `dptrain.saving.load_program`: the same bits as `predict`, without the model's Python."""

import json
import os
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dptrain as dp
from dptrain import layers, ops
from dptrain.errors import ConfigError, DataError
from tests.sample import examples

RNG = np.random.default_rng(8)
CPU = {"device": "cpu"}


class Noisy(dp.Model):
    """Draws random numbers in prediction, and looks at the number of rows."""

    def __init__(self) -> None:
        super().__init__(seed=3)
        self.dense, self.dropout = layers.Dense(2), layers.Dropout(0.5)

    def call(self, inputs: Any) -> Any:
        return self.dropout(self.dense(inputs), training=True) / inputs.shape[0]


def flat() -> tuple[dp.Model, Any]:
    stack = [layers.Dense(7, "gelu", input_shape=(5,)), layers.BatchNormalization(), layers.Dense(3, "softmax")]
    return dp.Sequential(stack), RNG.random((300, 5))


def images() -> tuple[dp.Model, Any]:
    stack = [layers.Input((8, 8, 1), dtype="uint8"), layers.Rescaling(1 / 255), layers.Conv2D(3, 3, activation="relu")]
    stack += [layers.MaxPooling2D(), layers.Flatten(), layers.Dropout(0.3), layers.Dense(4)]
    return dp.Sequential(stack), RNG.integers(0, 256, (40, 8, 8, 1), np.uint8)


def words() -> tuple[dp.Model, Any]:
    stack = [layers.Input((6,), dtype="int32"), layers.Embedding(20, 4), layers.LayerNormalization(), layers.Flatten()]
    return dp.Sequential([*stack, layers.Dense(2, "tanh")]), RNG.integers(0, 20, (33, 6))


def several() -> tuple[dp.Model, Any]:
    a, b = layers.Input((3,), name="a"), layers.Input((2,), name="b")
    merged = layers.Concatenate()([a, layers.Dense(3)(b)])
    outputs = [layers.Dense(2)(merged), {"mean": ops.mean(merged, 1, keepdims=True)}]
    return dp.Model({"a": a, "b": b}, outputs), {"a": RNG.random((20, 3)), "b": RNG.random((20, 2))}


def noisy() -> tuple[dp.Model, Any]:
    return Noisy(), RNG.random((31, 4))


MODELS = {"flat": flat, "images": images, "words": words, "several": several, "noisy": noisy}


def exported_model(kind: str, folder: Any, dtype: str = "float32") -> tuple[dp.Model, Any, Any]:
    model, x = MODELS[kind]()
    model.compile(dtype=dtype, **CPU)
    before = {variable: variable.numpy() for variable in model.variables}
    model.predict(x, verbose=0)
    for variable, value in before.items():
        variable.assign(value)  # the numbers of random draws, which prediction counts
    model.export(folder / "program")
    return model, x, dp.saving.load_program(folder / "program", **CPU)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_bits_of_predict(tmp_path, kind, dtype):
    model, x, program = exported_model(kind, tmp_path, dtype)
    for _ in range(2):
        np.testing.assert_equal(program(x), model.predict(x, verbose=0))


@pytest.mark.parametrize("rows", [0, 1, 2, 255, 256, 257])
def test_any_number_of_rows(tmp_path, rows):
    model, x, program = exported_model("flat", tmp_path)
    result = program(x[:rows])
    assert result.shape == (rows, 3)
    if rows:
        np.testing.assert_array_equal(result, model.predict(x[:rows], verbose=0))


def test_what_it_takes_is_told(tmp_path):
    _, _, program = exported_model("several", tmp_path)
    assert program.inputs == {"a": ((None, 3), "float32"), "b": ((None, 2), "float32")}
    for x, message in (
        ({"a": np.zeros((2, 3))}, "structure"),
        ({"a": np.zeros((2, 3)), "b": np.zeros((2, 3))}, r"b: expected real numbers of shape \(None, 2\)"),
        ({"a": np.zeros((2, 3)), "b": np.zeros((3, 2))}, "2, 3 rows"),
        ({"a": np.full((2, 3), "x"), "b": np.zeros((2, 2))}, "a: expected real numbers"),
    ):
        with pytest.raises(DataError, match=message):
            program(x)


def test_it_goes_on_without_the_model_s_python(tmp_path):
    model, x, _ = exported_model("noisy", tmp_path)
    np.save(tmp_path / "x.npy", x)
    code = (
        "import sys, numpy as np, dptrain as dp\n"
        "program = dp.saving.load_program(sys.argv[1], device='cpu')\n"
        "np.save(sys.argv[3], program(np.load(sys.argv[2])))\n"
    )
    arguments = [str(tmp_path / name) for name in ("program", "x.npy", "y.npy")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), model.predict(x, verbose=0))


def test_the_file_holds_no_code(tmp_path):
    exported_model("flat", tmp_path)
    content = (tmp_path / "program").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = json.loads(header["__metadata__"]["about"])
    names = {node["op"] for node in metadata["nodes"] if "op" in node}
    assert {"add", "exp", "erf"} <= names
    assert metadata["inputs"] == "input"
    assert "batch_normalization/moving_mean" in header


def test_a_model_that_is_written_over(tmp_path):
    model, _, _ = exported_model("flat", tmp_path)
    with pytest.raises(dp.errors.OutputError, match="exists; pass overwrite=True"):
        model.export(tmp_path / "program", overwrite=False)
    model.export(tmp_path / "program")


def test_an_output_without_input_is_refused(tmp_path):
    class Constant(dp.Model):
        def call(self, inputs: Any) -> Any:
            return ops.ones((3,))

    model = Constant()
    model.build((None, 2))
    with pytest.raises(ConfigError, match="does not depend on the inputs"):
        model.export(tmp_path / "program")


def test_a_number_of_rows_that_is_python_s_is_refused(tmp_path):
    class Mean(dp.Model):
        def call(self, inputs: Any) -> Any:
            return inputs * (1.0 / int(inputs.shape[0]))

    model = Mean()
    model.build((None, 2))
    with pytest.raises(ConfigError, match="uses the number of rows as a Python integer"):
        model.export(tmp_path / "program")


def about_with(content: bytes, change: Any) -> bytes:
    """Return a file whose JSON is changed, with a checksum that holds."""
    from dptrain.saving import state

    metadata, arrays = state.unpack(content, "file", "dptrain program 1", "")
    change(metadata)
    return state.pack(arrays, metadata, "dptrain program 1")


def first_op(metadata: dict[str, Any]) -> dict[str, Any]:
    return next(node for node in metadata["nodes"] if "op" in node)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda metadata: first_op(metadata).update(op="system"), "op 'system', which this version does not have"),
        (lambda metadata: first_op(metadata).update(inputs=[99]), r"has inputs \[99\]"),
        (lambda metadata: first_op(metadata).update(inputs=[-1]), r"has inputs \[-1\]"),
        (lambda metadata: first_op(metadata).update(attributes={"a": 3}), "has no attribute 'a'"),
        (lambda metadata: metadata.update(nodes=3), "damaged"),
        (lambda metadata: metadata["results"].update(output=999), "damaged"),
        (lambda metadata: metadata.update(outputs=["none"]), r"outputs \['none'\]: not nodes of its program"),
        (lambda metadata: metadata.update(inputs={"a": "a"}), r"inputs {'a': 'a'}.*not nodes of its program"),
        (
            lambda metadata: metadata["nodes"].append(
                {"op": "broadcast_along", "inputs": [_constant(metadata)], "attributes": {"shape": [1 << 20, 1 << 20]}}
            ),
            "is too large|damaged",
        ),
    ],
)
def test_programs_that_are_none(tmp_path, change, message):
    exported_model("several", tmp_path)
    path = tmp_path / "program"
    path.write_bytes(about_with(path.read_bytes(), change))
    with pytest.raises(DataError, match=message) as caught:
        dp.saving.load_program(path, **CPU)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def _constant(metadata: dict[str, Any]) -> int:
    return next(number for number, node in enumerate(metadata["nodes"]) if "constant" in node)


def test_a_file_that_is_larger_than_it_says_is_not_read(tmp_path):
    """All that lies behind its end would otherwise be read first."""
    exported_model("flat", tmp_path)
    path = tmp_path / "program"
    os.truncate(path, 1 << 42)
    with pytest.raises(DataError, match=r"program is damaged .*; export it again"):
        dp.saving.load_program(path, **CPU)


@pytest.mark.parametrize("limit", [0, 100])
def test_a_header_has_a_limit(tmp_path, monkeypatch, limit):
    from dptrain.saving import state

    exported_model("flat", tmp_path)
    content = (tmp_path / "program").read_bytes()
    monkeypatch.setattr(state, "_MAX_HEADER", int.from_bytes(content[:8], "little") - limit)
    with open(tmp_path / "program", "rb") as file:
        assert (state.read_packed(file) == content) == (not limit)


def test_files_that_are_none(tmp_path):
    path = tmp_path / "program"
    with pytest.raises(DataError, match="not found"):
        dp.saving.load_program(path)
    for content in (b"", b"\x80\x04pickle", b"<html>"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"is damaged .*; export it again"):
            dp.saving.load_program(path)
    dp.Sequential([layers.Dense(2, input_shape=(3,))]).save_weights(tmp_path / "w.safetensors")
    with pytest.raises(DataError, match="is not a program of this version"):
        dp.saving.load_program(tmp_path / "w.safetensors")


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("exported")
    exported_model("several", folder)
    return (folder / "program").read_bytes()


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=3))
def test_changed_bytes_are_found(content, tmp_path, places):
    changed = bytearray(content)
    for place, value in places:
        changed[place % len(changed)] ^= value
    if changed == content:
        return
    (tmp_path / "program").write_bytes(changed)
    with pytest.raises(DataError) as caught:
        dp.saving.load_program(tmp_path / "program", **CPU)
    assert "\n" not in str(caught.value)
