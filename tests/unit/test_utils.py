"""Keras' small helpers."""

import numpy as np
import pytest

import dptrain as dp
from dptrain.batches import sampling
from dptrain.batches.adapters import PyDatasetSource
from dptrain.batches.stream import StreamBatches
from dptrain.comm import SoloCommunicator
from dptrain.errors import ConfigError
from dptrain.sweeps.arguments import Builder


def test_labels_become_one_hot_vectors():
    encoded = dp.utils.to_categorical([0, 2, 1, -1])
    assert encoded.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1]]
    assert encoded.dtype == np.float64
    assert dp.utils.to_categorical(np.uint8([[1], [0]]), 4).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert dp.utils.to_categorical(np.zeros((2, 3, 1)), num_classes=2).shape == (2, 3, 2)
    assert dp.utils.to_categorical(1).tolist() == [0, 1]
    assert dp.utils.to_categorical([], 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        ([3], 3, "labels 3 to 3 for 3 classes"),
        ([-4, 0], 3, "labels -4 to 0"),
        ([], None, "no labels; pass num_classes"),
    ],
)
def test_labels_without_a_class_are_refused(labels, classes, message):
    with pytest.raises(ConfigError, match=message):
        dp.utils.to_categorical(labels, classes)


def test_a_fixed_number_of_shards_is_chosen_by_code_or_by_the_environment(monkeypatch):
    monkeypatch.setattr(sampling, "_fixed", None)
    for text, shards in (("", None), ("0", None), ("1", 8), ("16", 16)):
        monkeypatch.setenv("DPTRAIN_REPRODUCIBLE", text)
        assert sampling.fixed_shards() == shards
    monkeypatch.setenv("DPTRAIN_REPRODUCIBLE", "yes")
    with pytest.raises(ConfigError, match="DPTRAIN_REPRODUCIBLE = 'yes': expected 0, 1, or a number of shards"):
        sampling.fixed_shards()
    with pytest.raises(ConfigError, match="shards_per_batch = 0: expected an integer >= 1"):
        dp.utils.enable_op_determinism(0)
    dp.utils.enable_op_determinism()
    assert sampling.fixed_shards() == 8


def test_where_the_bits_are_those_of_any_ranks_each_makes_whole_batches():
    class Numbers(dp.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return "whole"

        def shard(self, index, part, parts):
            return f"part {part} of {parts}"

    source = PyDatasetSource(Numbers(), rank=1, world=3)
    assert (source.sharded, next(source.start(0))()) == (True, "part 1 of 3")
    StreamBatches(source, None, SoloCommunicator(), shards=8)
    assert (source.sharded, next(source.start(0))()) == (False, "whole")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[0, 0, 1], [0, 2, 3], [4, 5, 6]]),
        ({"padding": "post"}, [[1, 0, 0], [2, 3, 0], [4, 5, 6]]),
        ({"maxlen": 2}, [[0, 1], [2, 3], [5, 6]]),
        ({"maxlen": 2, "truncating": "post", "value": -1}, [[-1, 1], [2, 3], [4, 5]]),
    ],
)
def test_sequences_become_one_array(options, expected):
    actual = dp.utils.pad_sequences([[1], [2, 3], [4, 5, 6]], **options)
    assert (actual.tolist(), actual.dtype) == (expected, np.int32)


def test_sequences_of_arrays_and_empty_ones():
    padded = dp.utils.pad_sequences([[], np.ones((2, 3))], dtype="float32")
    assert (padded.shape, padded.dtype, padded[0].sum()) == ((2, 2, 3), np.float32, 0)
    assert dp.utils.pad_sequences([]).shape == (0, 0)
    for wrong, message in (
        ({"sequences": [1]}, "Found non-iterable: 1"),
        ({"sequences": 3}, "must be iterable"),
        ({"sequences": [[1]], "padding": "left"}, 'Padding type "left" not understood'),
        ({"sequences": [[1]], "truncating": "left"}, 'Truncating type "left" not understood'),
        ({"sequences": [[[1, 2]], [[1, 2, 3]]]}, r"Shape of sample \(3,\) of sequence at position 1 is different"),
    ):
        with pytest.raises(ConfigError, match=message):
            dp.utils.pad_sequences(**wrong)


def test_vectors_of_length_1():
    normalized = dp.utils.normalize(np.array([[3.0, 4.0], [0.0, 0.0]]))
    assert normalized.tolist() == [[0.6, 0.8], [0, 0]]
    assert dp.utils.normalize([[1.0, 1.0], [3.0, 1.0]], axis=0, order=1).tolist() == [[0.25, 0.5], [0.75, 0.5]]


def test_a_split_of_arrays():
    x, y = np.arange(10), {"a": np.arange(10) * 2}
    (left, _), (right, right_y) = dp.utils.split_dataset((x, y), left_size=0.7)
    assert (left.tolist(), right.tolist()) == (list(range(7)), [7, 8, 9])
    assert right_y["a"].tolist() == [14, 16, 18]
    left, right = dp.utils.split_dataset(x, right_size=2, shuffle=True, seed=1)
    assert sorted([*left, *right]) == list(range(10))
    assert (len(right), left.tolist() != list(range(8))) == (2, True)
    for options, message in (
        ({}, "At least one of the `left_size` or `right_size`"),
        ({"left_size": 1.0}, "must be between 0 and 1"),
        ({"left_size": 10}, "must be between 0 and 10"),
        ({"left_size": 8, "right_size": 8}, "must be 10 at most. Received: 8, 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            dp.utils.split_dataset(x, **options)


MADE = {
    "model": lambda: dp.Sequential([dp.Input((2,)), dp.layers.Dense(2)]).get_weights()[0],
    "functional": lambda: dp.Model(x := dp.Input((2,)), dp.layers.Dense(2)(x)).get_weights()[0],
    "clone": lambda: dp.models.clone_model(SOURCE).get_weights()[0],
    "from JSON": lambda: dp.models.model_from_json(SOURCE.to_json()).get_weights()[0],
    "from a configuration": lambda: dp.Sequential.from_config(SOURCE.get_config()).get_weights()[0],
    "layer": lambda: dp.layers.Dense(2)(np.eye(2)).numpy(),
    "initializer": lambda: dp.initializers.GlorotUniform()((2, 2)),
    "initializer by name": lambda: dp.initializers.get("he_normal")((2, 2)),
    "random numbers": lambda: dp.random.normal((2, 2)).numpy(),
}
SOURCE = dp.Sequential([dp.Input((2,)), dp.layers.Dense(2)], seed=5)


@pytest.mark.parametrize("kind", MADE)
def test_what_is_made_in_turn_differs_and_comes_again_with_the_seed(kind):
    dp.utils.set_random_seed(3)
    values = []
    for _ in range(3):
        values.append(np.array(MADE[kind]()))
        dp.utils.clear_session(free_memory=False)  # restarts nothing; collecting takes long beside many tests
    dp.utils.set_random_seed(3)
    again = [np.array(MADE[kind]()) for _ in range(3)]
    dp.utils.set_random_seed(0)
    np.testing.assert_array_equal(values, again)
    assert len(np.unique(np.reshape(values, (3, -1)), axis=0)) == 3


def test_an_initializer_draws_the_same_each_time():
    initializer = dp.initializers.RandomNormal()
    np.testing.assert_array_equal(initializer((3,)), initializer((3,)))


def test_loading_a_model_changes_no_seed(tmp_path):
    SOURCE.save(tmp_path / "model.keras")
    kernels = []
    for loads in (False, True):
        dp.utils.set_random_seed(3)
        first = MADE["model"]()
        if loads:
            dp.models.load_model(tmp_path / "model.keras")
        kernels.append([first, MADE["model"]()])
    dp.utils.set_random_seed(0)
    np.testing.assert_array_equal(*kernels)


def test_the_members_of_an_ensemble_made_by_hand_differ():
    dp.utils.set_random_seed(0)
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.ones((40, 1))
    predictions = []
    for _ in range(3):
        model = dp.Sequential([dp.layers.Dense(4, "tanh"), dp.layers.Dropout(0.5), dp.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=10, epochs=2, verbose=0)
        predictions.append(model.predict(x, verbose=0))
    assert np.std(predictions, 0).mean() > 0.01


def test_kinds_of_things():
    x = dp.Input((3,))
    assert dp.utils.is_keras_tensor(x)
    assert dp.utils.is_keras_tensor(dp.layers.ReLU()(x))
    assert not dp.utils.is_keras_tensor(dp.ops.ones(3))
    kinds = {None: "float32", "int32": "int32", np.float64: "float64", int: "int32", float: "float32", str: "string"}
    assert {kind: dp.utils.standardize_dtype(kind) for kind in kinds} == kinds
    for kind in ("flaot32", object):
        with pytest.raises(ConfigError, match="Invalid dtype"):
            dp.utils.standardize_dtype(kind)
    assert dp.utils.pack_x_y_sample_weight(1) == 1
    assert dp.utils.pack_x_y_sample_weight([1]) == ([1],)
    assert dp.utils.pack_x_y_sample_weight(1, 2) == (1, 2)
    assert dp.utils.pack_x_y_sample_weight(1, 2, 3) == (1, 2, 3)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((), "float32"),
        (("int8", int), "int8"),
        (("int8", float), "float32"),
        (("bfloat16", int), "bfloat16"),
        (("bfloat16", "int64"), "bfloat16"),
        (("float16", "bfloat16"), "float32"),
        (("uint8", "int8"), "int16"),
        (("bool", int), "int32"),
        ((bool, bool), "bool"),
        ((None, "float64"), "float64"),
        ((int, float), "float32"),
    ],
)
def test_types_are_promoted_as_by_keras(kinds, expected):
    assert dp.backend.result_type(*kinds) == expected


def test_what_types_are():
    kinds = ("float16", "bfloat16", "float8_e4m3fn", "int8", "uint32", "bool", float, int)
    assert [kind for kind in kinds if dp.backend.is_float_dtype(kind)] == [*kinds[:3], float]
    assert [kind for kind in kinds if dp.backend.is_int_dtype(kind)] == ["int8", "uint32", int]
    with pytest.raises(ConfigError, match="no implicit conversions from float8"):
        dp.backend.result_type("float8_e4m3fn", "float32")


def test_all_models_of_a_run_have_its_seed_and_later_ones_go_on():
    """As sweeps, ensembles and the command line build models."""
    inner = []

    def build():
        inner.append(dp.Sequential([dp.Input((2,)), dp.layers.Dense(2)]))
        x = dp.Input((2,))
        model = dp.Model(x, inner[-1](x))
        model.compile("sgd", "mse")
        return model

    dp.utils.set_random_seed(3)
    seeds = [dp.Sequential().seed for _ in range(3)]
    dp.utils.set_random_seed(3)
    before = dp.Sequential().seed
    built = [Builder(build).build(seed) for seed in (7, 8)]
    after = [dp.Sequential().seed for _ in range(2)]
    dp.utils.set_random_seed(0)
    assert [model.seed for model in (*built, *inner)] == [7, 8, 7, 8]
    assert [before, *after] == seeds
    assert seeds[0] == 3
    assert len(set(seeds)) == 3
