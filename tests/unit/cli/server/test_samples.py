"""`POST /predict`: texts, pictures and arrays in; classes, probabilities and values out."""

import base64
import io
import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from dptrain.cli.server.samples import describe_outputs, read_samples
from dptrain.cli.server.served_model import describe
from dptrain.cli.server.tensors import NotFiniteError
from dptrain.data.preprocessing import Column, Preprocessing
from dptrain.errors import DataError

pytest.importorskip("pandas")


def served(model, loss="mse", preprocessing=None):
    model.compile("sgd", loss, device="cpu")
    model.preprocessing = preprocessing
    return describe(model, "name", "1")


def read(model, body, content_type="application/json", **options):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    arrays = read_samples(content, content_type, model, options.pop("unseen", None), 8)
    assert len(model.predict(arrays)[0]) == len(arrays[0])
    return [array.tolist() for array in arrays]


@pytest.fixture(scope="module")
def texts():
    column = Column("text", "words", ("good", "film"), text=True, length=3)
    model = dp.Sequential([layers.Input((3,)), layers.Embedding(4, 2), layers.Flatten(), layers.Dense(1, "sigmoid")])
    return served(model, "binary_crossentropy", Preprocessing("binary", (column,), "label", ("bad", "good")))


@pytest.fixture(scope="module")
def pictures():
    pytest.importorskip("PIL")
    model = dp.Sequential([layers.Input((2, 3, 3)), layers.Flatten(), layers.Dense(3, "softmax")])
    preprocessing = Preprocessing("multiclass", class_names=("ant", "bee", "cat"), picture=(2, 3, 3))
    return served(model, "sparse_categorical_crossentropy", preprocessing)


@pytest.fixture(scope="module")
def arrays():
    inputs = layers.Input((2,), name="left"), layers.Input((None,), dtype="int32", name="ids")
    right = layers.GlobalAveragePooling1D()(layers.Embedding(9, 2)(inputs[1]))
    outputs = {"sum": layers.Dense(1)(inputs[0]), "both": layers.Add()([inputs[0], right])}
    return describe(dp.Model([*inputs], outputs), "name", "1")


def test_texts(texts):
    assert read(texts, ["A good film!", "bad"]) == [[[1, 2, 3], [1, 0, 0]]]
    assert read(texts, [{"text": "film"}]) == [[[3, 0, 0]]]
    assert [spec.metadata()["shape"] for spec in texts.inputs] == [[-1, 3]]
    (answer,) = describe_outputs(texts, [np.float32([[0.9]])])
    assert answer == {"class": "good", "probabilities": {"bad": 0.1, "good": 0.9}} or answer["class"] == "good"
    assert answer["probabilities"] == {"bad": pytest.approx(0.1), "good": 0.9}


def png(height=2, width=3, mode="RGB"):
    content = io.BytesIO()
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)
    image.fromarray(pixels).convert(mode).save(content, "PNG")
    return content.getvalue()


def test_pictures(pictures):
    pixels = np.arange(18).reshape(1, 2, 3, 3).tolist()
    content = png()
    in_base64 = base64.b64encode(content).decode()
    assert read(pictures, content, "image/png") == [pixels]
    assert read(pictures, content, "application/octet-stream") == [pixels]
    assert read(pictures, [in_base64, {"b64": in_base64}]) == [pixels * 2]
    assert read(pictures, pixels) == [pixels]
    assert pictures.inputs[0].metadata() == {"name": "input_layer", "datatype": "UINT8", "shape": [-1, 2, 3, 3]}
    (answer,) = describe_outputs(pictures, [np.float32([[0.25, 0.5, 0.25]])])
    assert answer == {"class": "bee", "probabilities": {"ant": 0.25, "bee": 0.5, "cat": 0.25}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"GIF", "body: not a picture"),
        (png(4, 4), "body: 4x4, expected 2x3"),
        (png()[:45], "body: damaged"),
        (["?"], "picture 0 .*not base64"),
        ([base64.b64encode(b"x").decode()], "picture 0 .*: not a picture"),
        ([7], "expected its file in base64"),
        ([[1]], "expected .-1, 2, 3, 3"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_picture(pictures, body, message):
    with pytest.raises(DataError, match=message):
        read(pictures, body, "image/png" if isinstance(body, bytes) else "application/json")


def test_arrays_by_name(arrays):
    assert read(arrays, [{"left": [1, 2], "ids": [3, 4, 5]}]) == [[[1, 2]], [[3, 4, 5]]]
    assert {spec.name: spec.shape for spec in arrays.outputs} == {"sum": (1,), "both": (2,)}
    answer = describe_outputs(arrays, [np.float32([[0.1]]), np.float32([[1, 2]])])
    assert answer == [dict(zip([spec.name for spec in arrays.outputs], ([0.1], [1, 2]), strict=True))]
    for body, message in (
        ([{"left": [1, 2]}], "an object with input 'ids'"),
        ([[1, 2]], "an object with input 'left'"),
        ([{"left": [1, 2], "ids": []}], "input 'ids': shape"),
        ([{"left": [1, 2], "ids": [[1]]}], "input 'ids': shape .*of lists"),
        ([{"left": [1, 2], "ids": [1.5]}], "input 'ids': .*integers"),
        ([{"left": [1, 2], "ids": [1]}, {"left": [1, 2], "ids": [1, 2]}], "input 'ids': .*not nested"),
        ([{"left": [1, 2], "ids": [10]}], "id 10"),
        ([{"left": [1, 2], "ids": [1]}] * 9, "9 rows, a request has at most 8"),
    ):
        with pytest.raises(DataError, match=message):
            read(arrays, body)


def test_a_model_of_texts_takes_texts():
    vector = layers.TextVectorization(output_sequence_length=4, vocabulary=["a", "b"])
    model = describe(
        dp.Sequential([layers.Input((1,), dtype="string"), vector, layers.Embedding(5, 2), layers.Flatten()]),
        "name",
        "1",
    )
    assert model.inputs[0].datatype == "BYTES"
    assert read(model, ["a b", "c"]) == [[["a b"], ["c"]]]
    assert read(model, [["a b"]]) == [[["a b"]]]


def test_rows_of_a_model_that_depend_on_each_other_are_noticed():
    class Centred(layers.Layer):
        def call(self, x):
            return x - dp.ops.mean(x, axis=0)

    def of(*more):
        return describe(dp.Sequential([layers.Input((3,)), layers.Dense(2), *more]), "name", "1")

    assert not of(Centred()).joins_rows
    model = dp.Sequential([layers.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "mse", device="cpu", jit_compile=False)  # NumPy's products depend on the number of rows
    assert not describe(model, "name", "1").joins_rows


def test_values_by_the_name_of_the_target():
    model = dp.Sequential([layers.Input((1,)), layers.Dense(1)])
    houses = served(model, preprocessing=Preprocessing("regression", (Column("rooms", "number"),), "price"))
    assert describe_outputs(houses, [np.float32([[25443.1], [3]])]) == [{"price": 25443.1}, {"price": 3}]
    assert read(houses, {"rooms": 2}) == [[[2]]]
    with pytest.raises(NotFiniteError, match="row 1"):
        describe_outputs(houses, [np.float32([[1], [np.nan]])])


def test_unseen_categories_as_the_server_was_told():
    columns = (Column("town", "one-hot", ("Bergen", "Oslo")),)
    model = dp.Sequential([layers.Input((2,)), layers.Dense(1)])
    houses = served(model, preprocessing=Preprocessing("regression", columns, "price"))
    assert read(houses, [{"town": "Paris"}], unseen="other") == [[[0, 0]]]
    with pytest.raises(DataError, match="Paris"):
        read(houses, [{"town": "Paris"}])
