"""From data to a model: its head, its loss, what standardises its inputs."""

import dataclasses

import numpy as np
import pytest

from dptrain import layers
from dptrain.cli.building import balanced_weights, build_model, describe_network, make_optimizer, standardize
from dptrain.cli.options.config import resolve
from dptrain.cli.options.network import embedding_length
from dptrain.data.loading import LoadedData, Split
from dptrain.data.preprocessing import Column, Preprocessing
from dptrain.errors import ConfigError
from dptrain.optimizers import OPTIMIZERS

ROWS = 12
RNG = np.random.default_rng(3)


def config(**overrides):
    return resolve({"model": {"hidden": [4]}, "device": "cpu"}, "file", overrides)


def data(task, y, x=None, meaning=None):
    x = RNG.normal(size=(ROWS, 3)).astype(np.float32) if x is None else x
    split = Split(x, y)
    return LoadedData("set", split, split, int(y.max()) + 1 if task != "regression" else 0, task, meaning)


NUMBERS = data("regression", (1000 + 100 * np.arange(ROWS)).astype(np.float32))


@pytest.mark.parametrize(
    ("loaded", "loss", "metrics", "head"),
    [
        (data("multiclass", np.arange(ROWS) % 3), "sparse_categorical_crossentropy", ["accuracy"], "softmax"),
        (data("binary", np.arange(ROWS) % 2), "binary_crossentropy", ["accuracy", "auc"], "sigmoid"),
        (NUMBERS, "mse", ["mae", "rmse", "r2"], "linear"),
    ],
    ids=["multiclass", "binary", "regression"],
)
def test_the_task_says_head_loss_and_metrics(loaded, loss, metrics, head):
    model = build_model(config(), loaded)
    dense = [layer for layer in model.layers if isinstance(layer, layers.Dense)][-1]
    assert (model.loss, dense.get_config()["activation"], dense.units) == (loss, head, loaded.outputs)
    logs = model.evaluate(loaded.train.x, loaded.train.y, return_dict=True, verbose=0)
    assert list(logs) == [*sorted(metrics), "loss"] or set(logs) == {"loss", *metrics}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_its_own_defaults(name):
    assert make_optimizer(config(**{"optimizer.name": name})).get_config() == OPTIMIZERS[name]().get_config()


def test_numbers_are_predicted_in_their_own_units():
    model = build_model(config(), NUMBERS)
    assert abs(model.predict(NUMBERS.train.x, verbose=0).mean() - NUMBERS.train.y.mean()) < 600


def test_a_loss_of_the_task_may_be_chosen_and_another_not():
    loss = build_model(config(**{"train.loss": "huber"}), NUMBERS).loss
    assert loss.get_config()["delta"] == pytest.approx(NUMBERS.train.y.std())
    with pytest.raises(ConfigError, match="binary_crossentropy is for binary; use one of mse, mae"):
        build_model(config(**{"train.loss": "binary_crossentropy"}), NUMBERS)


@pytest.mark.parametrize(
    ("name", "of_standard"),
    [
        ("mse", np.square),
        ("mae", np.abs),
        ("huber", lambda error: np.where(np.abs(error) <= 1, error**2 / 2, np.abs(error) - 0.5)),
    ],
)
def test_a_regression_s_loss_is_that_of_standardised_targets_and_its_metrics_are_in_their_units(name, of_standard):
    model = build_model(config(**{"train.loss": name}), NUMBERS)
    x, y = NUMBERS.train.x, NUMBERS.train.y.astype(np.float64)
    logs = model.evaluate(x, NUMBERS.train.y, return_dict=True, verbose=0)
    error = model.predict(x, verbose=0)[:, 0] - y
    assert logs["loss"] == pytest.approx(of_standard(error / y.std()).mean(), rel=1e-4)
    assert logs["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-5)
    assert logs["rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)
    assert logs["r2"] == pytest.approx(1 - (error**2).mean() / y.var(), rel=1e-4, abs=1e-4)


def test_targets_of_any_unit_are_learned_alike():
    """Also by a rule that knows no scale; before, prices made it diverge."""
    losses = []
    for unit in (1, 1e6):
        training_data = data("regression", (NUMBERS.train.y * unit).astype(np.float32), NUMBERS.train.x)
        model = build_model(config(**{"optimizer.name": "sgd"}), training_data)
        losses.append(model.fit(training_data.train.x, training_data.train.y, epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def test_balanced_classes_weigh_the_same():
    weights = balanced_weights(Split(np.zeros((8, 1)), np.array([0, 0, 0, 0, 0, 0, 2, 2])))
    assert weights == {0: 8 / (2 * 6), 2: 8 / (2 * 2)}
    assert balanced_weights(Split(np.zeros((4, 1)), np.array([0, 1, 1, 1]), np.array([0, 1]))) == {0: 1.0, 1: 1.0}
    with pytest.raises(ConfigError, match="--class-weight balanced: the targets are numbers, not classes"):
        balanced_weights(NUMBERS.train)


def pictures(side, channels=3):
    x = RNG.integers(0, 256, (ROWS, side, side, channels)).astype(np.uint8)
    preprocessing = Preprocessing("multiclass", class_names=("a", "b", "c"), picture=(side, side, channels))
    return data("multiclass", np.arange(ROWS) % 3, x, preprocessing)


def kinds(model):
    return [type(layer).__name__ for layer in model.layers]


def test_folders_of_pictures_have_convolutions_and_small_ones_dense_layers():
    training_data = pictures(16, 1)
    model = build_model(config(), training_data)
    block = ["Conv2D", "BatchNormalization", "Activation", "MaxPooling2D"]
    first = ["Rescaling", "RandomTranslation", "RandomZoom"]
    assert kinds(model) == [*first, *block, *block, "GlobalAveragePooling2D", "Dense", "Dense"]
    assert describe_network(config(), training_data) == "16x16x1 -> convolutions 16, 32 -> 4 -> 3"
    model.fit(training_data.train.x, training_data.train.y, verbose=0)
    assert "Conv2D" not in kinds(build_model(config(), pictures(15)))
    assert "Conv2D" not in kinds(build_model(config(**{"model.network": "dense"}), training_data))
    assert "RandomZoom" not in kinds(build_model(config(**{"model.augment": "off"}), training_data))
    assert "RandomFlip" in kinds(build_model(config(**{"model.augment": "flip"}), training_data))


def test_other_images_have_convolutions_where_asked_for():
    x = RNG.random((ROWS, 28, 28)).astype(np.float32)
    training_data = data("multiclass", np.arange(ROWS) % 3, x)
    assert "Conv2D" not in kinds(build_model(config(), training_data))
    model = build_model(config(**{"model.network": "convolutional"}), training_data)
    assert model.predict(x, verbose=0).shape == (ROWS, 3)
    with pytest.raises(ConfigError, match=r"model\.network = convolutional: expected pictures, found samples of 3"):
        build_model(config(**{"model.network": "convolutional"}), NUMBERS)


TABLE = Preprocessing(
    "regression",
    (Column("n", "number"), Column("c", "one-hot", ("a", "b")), Column("e", "embedding", ("p", "q", "r", "s"))),
    "y",
)
CODES = np.stack([np.arange(ROWS), np.arange(ROWS) % 2, (np.arange(ROWS) + 1) % 2, np.arange(ROWS) % 4], 1)
TABULAR = data("regression", NUMBERS.train.y, CODES.astype(np.float32), TABLE)


def normalization(model):
    return next(
        layer for layer in model._flatten_layers() if isinstance(layer, layers.Normalization) and not layer.invert
    )


def test_numbers_are_standardised_categories_are_not():
    layer = normalization(build_model(config(), TABULAR))
    np.testing.assert_allclose(layer.adapt_mean.numpy(), [5.5, 0, 0])
    np.testing.assert_allclose(layer.adapt_variance.numpy(), [143 / 12, 1, 1], rtol=1e-6)


def test_only_rows_that_are_trained_on_say_mean_and_variance():
    model = build_model(config(), TABULAR, np.array([0, 2]))
    np.testing.assert_allclose(normalization(model).adapt_mean.numpy(), [1, 0, 0])
    standardize(model, TABULAR, np.array([3, 3]))
    np.testing.assert_allclose(normalization(model).adapt_mean.numpy(), [3, 0, 0])
    np.testing.assert_allclose(normalization(model).adapt_variance.numpy(), [1, 1, 1])  # and not 0
    np.testing.assert_allclose(model.layers[-1].adapt_mean.numpy(), [1300])


def test_large_categories_are_embedded():
    model = build_model(config(), TABULAR)
    table = next(layer for layer in model._flatten_layers() if isinstance(layer, layers.Embedding))
    assert (table.input_dim, table.output_dim) == (4, 2)
    assert model.predict(TABULAR.train.x, verbose=0).shape == (ROWS, 1)


def test_categories_alone_need_no_numbers():
    table = dataclasses.replace(TABLE, columns=TABLE.columns[2:])
    model = build_model(config(), data("regression", NUMBERS.train.y, TABULAR.train.x[:, 3:], table))
    assert model.predict(TABULAR.train.x[:, 3:], verbose=0).shape == (ROWS, 1)


@pytest.mark.parametrize(("categories", "length"), [(17, 9), (99, 50), (100, 50), (5000, 50)])
def test_length_of_an_embedding(categories, length):
    assert embedding_length(categories) == length


def test_layers_that_were_adapted_by_others_stay():
    model = build_model(config(), TABULAR)
    layer, back = normalization(model), model.layers[-1]
    layer.follows_data = False
    standardize(model, TABULAR, np.array([0]))
    np.testing.assert_allclose(layer.adapt_mean.numpy(), [5.5, 0, 0])
    np.testing.assert_allclose(back.adapt_mean.numpy(), [1000])


def test_a_rank_s_own_rows_standardise_nothing():
    part = dataclasses.replace(NUMBERS, train=dataclasses.replace(NUMBERS.train, total=2 * ROWS))
    with pytest.raises(ConfigError, match="whose numbers are standardized over all rows"):
        build_model(config(), part)
