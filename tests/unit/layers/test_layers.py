"""Layers: arguments, configurations, frozen parameters, penalties, statistics of the whole batch."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, regularizers
from dptrain.batches.sampling import GlobalSampler
from dptrain.data.loading import Split
from dptrain.errors import ConfigError
from dptrain.layers import LAYERS
from dptrain.model import Architecture
from dptrain.train.trainer import run_to_end

EXAMPLES = {
    "Activation": lambda: layers.Activation("swish"),
    "BatchNormalization": lambda: layers.BatchNormalization(momentum=0.5, gamma_regularizer="l1", trainable=False),
    "Dense": lambda: layers.Dense(
        *(3, dp.activations.elu, False, dp.initializers.HeNormal(seed=4), "ones", "l2"), name="a", input_dim=4
    ),
    "Dropout": lambda: layers.Dropout(0.25, seed=3),
    "ELU": lambda: layers.ELU(0.5),
    "Flatten": lambda: layers.Flatten(),
    "InputLayer": lambda: dp.Input((3, 4), batch_size=32, name="in"),
    "LeakyReLU": lambda: layers.LeakyReLU(0.1),
    "ReLU": lambda: layers.ReLU(negative_slope=0.1),
    "Rescaling": lambda: layers.Rescaling(0.5, 1),
    "Reshape": lambda: layers.Reshape([-1, 2]),
    "Softmax": lambda: layers.Softmax(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_configurations_come_back(name):
    import json

    one = EXAMPLES[name]()
    assert type(one) is LAYERS[name]
    described = json.loads(json.dumps(layers.serialize(one)))
    assert described["class_name"] == name
    again = layers.deserialize(described)
    assert type(again) is type(one)
    assert again.get_config() == one.config()
    # Keras writes its own dtype policy beside them.
    described["config"]["dtype"] = {"class_name": "DTypePolicy", "config": {"name": "float32"}}
    assert layers.deserialize(described).config() == one.config()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: layers.Dense(3, nodes=4), r"Unrecognized keyword arguments passed to Dense: \{'nodes': 4\}"),
        (lambda: layers.Dense(3, kernel_constraint="max_norm"), "not supported: kernel_constraint"),
        (lambda: layers.Dense(3, activity_regularizer="l1"), "not supported: activity_regularizer"),
        (lambda: layers.Dense(3, lora_rank=2), "not supported: lora_rank"),
        (lambda: layers.Dense(3, dtype="float16"), "not supported: dtype"),
        (lambda: layers.Dense(3, kernel_regularizer="l3"), "unknown regularizer 'l3'"),
        (lambda: layers.Dense(3, activation=abs), "not supported: activation"),
        (lambda: regularizers.L1(-1), "expected a non-negative float. Received: l1=-1"),
        (lambda: regularizers.L2(float("nan")), "Received: l2=nan"),
        (lambda: regularizers.deserialize({"class_name": "L1", "config": {"l2": 1}}), "regularizer L1"),
        (lambda: layers.ReLU(max_value=6), "not supported: max_value = 6 of layer ReLU"),
        (lambda: layers.ReLU(threshold=1.0), "not supported: threshold"),
        (lambda: layers.ReLU(negative_slope=-1), "cannot be None or a negative value"),
        (lambda: layers.LeakyReLU(None), "cannot be None or negative value"),
        (lambda: layers.ELU(-1), "not supported: alpha"),
        (lambda: layers.Softmax(axis=1), "not supported: axis"),
        (lambda: layers.Dropout(-0.1), "between 0 and 1"),
        (lambda: layers.Dropout(0.5, noise_shape=(1,)), "not supported: noise_shape"),
        (lambda: layers.Rescaling([0.5, 1]), "not supported: Rescaling"),
        (lambda: layers.Flatten("channels_first"), "not supported: data_format"),
        (lambda: layers.Reshape((2, -1, -1)), "at most one unknown dimension"),
        (lambda: layers.Reshape((0, 2)), "positive integers"),
        (lambda: Architecture([layers.Reshape((4, -1))], (6,)), "total size of the samples must be unchanged"),
        (lambda: layers.BatchNormalization(renorm=True), "not supported: renorm"),
        (lambda: layers.BatchNormalization(momentum=2), "0 <= momentum <= 1"),
        (lambda: Architecture([layers.BatchNormalization(axis=1)], (2, 3)), "not supported: axis = 1"),
        (lambda: dp.Input(), "You must pass a `shape` argument"),
        (lambda: dp.Input((3,), batch_shape=(None, 3)), "at the same time"),
        (lambda: dp.Input((None, 3)), "positive integers"),
        (lambda: dp.Input(5), "positive integers. Received: shape=5"),
        (lambda: layers.Dense(3, input_shape=5), "positive integers. Received: shape=5"),
        (lambda: layers.Dense(3, input_shape=(None,)), r"positive integers. Received: shape=\(None,\)"),
        (lambda: layers.Dense(3, input_dim=0), r"positive integers. Received: shape=\(0,\)"),
        (lambda: dp.Input((3,), sparse=True), "not supported: sparse"),
        (lambda: Architecture([layers.Dense(3), dp.Input((3,))], (2,)), "only before the first layer"),
        (lambda: Architecture([dp.Input((3,))]), "at least one layer"),
        (lambda: layers.deserialize({"class_name": "Dens", "config": {}}), "did you mean 'Dense'"),
        (lambda: layers.deserialize({"class_name": "Dense", "config": {}}), "layer Dense"),
        (lambda: layers.deserialize("Dense"), "expected"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_input_states_the_shape_and_is_no_layer_of_the_model():
    model = Architecture([dp.Input((2, 3)), layers.Flatten(), layers.ReLU(), layers.LeakyReLU(), layers.ReLU()])
    assert model.input_shape == (2, 3)
    assert [layer.name for layer in model.layers] == ["flatten", "re_lu", "leaky_re_lu", "re_lu_1"]


def small(stack, loss="mse", optimizer=None, **options):
    model = dp.Sequential(stack, seed=5)
    model.compile(optimizer or dp.optimizers.SGD(0.1), loss, dtype="float64", jit_compile=False, **options)
    return model


def data(rows=23, outputs=2):
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 4)) + 3, rng.standard_normal((rows, outputs))


QUIET = {"batch_size": 8, "verbose": 0}


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "sgd"])
def test_frozen_parameters_keep_their_bits(optimizer):
    model = small(
        [
            dp.Input((4,)),
            layers.Dense(5, "tanh"),
            layers.BatchNormalization(trainable=False),
            layers.Dense(5, "gelu", trainable=False, kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dense(2),
        ],
        optimizer=optimizer,
    )
    before = model.named_weights()
    model.fit(*data(), epochs=3, **QUIET)
    after = model.named_weights()
    frozen = {name for name in before if before[name].tobytes() == after[name].tobytes()}
    assert frozen == {
        *(f"batch_normalization/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")),
        *("dense_1/kernel", "dense_1/bias"),
    }
    assert list(before)[:6] == [
        *("dense/kernel", "dense/bias"),
        *(f"batch_normalization/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")),
    ]
    text = model.architecture.summary()
    assert "Non-trainable params: 60" in text  # 20 + 30 of frozen layers, 10 moving averages


def test_a_model_without_anything_to_train_stays_as_it_is():
    model = small([dp.Input((4,)), layers.Dense(2, trainable=False)])
    before = model.get_weights()
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        history = model.fit(*data(), epochs=2, **QUIET).history["loss"]
    assert history[0] == pytest.approx(history[1], rel=1e-12)  # sums in another order
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


def test_parameters_move_when_trainable_changes():
    stack = [layers.Dense(3), layers.BatchNormalization(), layers.Dense(2)]
    first = Architecture(stack, (4,))
    assert first.as_trainable_now() is first
    stack[0].trainable = False
    second = first.as_trainable_now()
    assert [entry.name for entry in second.layout.entries] == [entry.name for entry in first.layout.entries]
    assert second.layout.size == first.layout.size - 128
    assert second.layout.full_size == first.layout.full_size
    values = first.layout.initial(1, np.float64)
    moved = second.layout.rearranged(values, first.layout)
    assert not np.array_equal(moved, values)
    for name, view in second.layout.views(moved).items():
        assert np.array_equal(view, first.layout.views(values)[name])


def test_the_penalty_is_in_the_loss_and_its_gradient_in_the_update():
    x, y = data(20)
    rate, l1, l2 = 0.05, 0.3, 0.7
    regularizer = regularizers.L1L2(l1, l2)
    model = small([dp.Input((4,)), layers.Dense(2, kernel_regularizer=regularizer)], optimizer=dp.optimizers.SGD(rate))
    kernel, bias = model.get_weights()
    error = x @ kernel + bias - y
    penalty = l1 * np.abs(kernel).sum() + l2 * (kernel**2).sum()
    assert model.evaluate(x, y, verbose=0) == pytest.approx((error**2).mean() + penalty, rel=1e-12)
    history = model.fit(x, y, batch_size=20, epochs=1, shuffle=False, verbose=0).history
    assert history["loss"] == [pytest.approx((error**2).mean() + penalty, rel=1e-12)]
    gradient = x.T @ error / 20 + l1 * np.sign(kernel) + 2 * l2 * kernel
    np.testing.assert_allclose(model.get_weights()[0], kernel - rate * gradient, rtol=1e-12)


def test_batch_normalization_trains_with_the_batch_and_predicts_with_moving_averages():
    x, y = data(24, outputs=4)
    model = small([dp.Input((4,)), layers.BatchNormalization(momentum=0.75)], optimizer=dp.optimizers.SGD(1e-12))
    normalized = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3)
    history = model.fit(x, y, batch_size=24, epochs=1, verbose=0).history
    assert history["loss"] == [pytest.approx(((normalized - y) ** 2).mean(), rel=1e-12)]
    _, _, moving_mean, moving_variance = model.get_weights()
    np.testing.assert_allclose(moving_mean, 0.25 * x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moving_variance, 0.75 + 0.25 * x.var(0), rtol=1e-12)
    expected = (x - moving_mean) / np.sqrt(moving_variance + 1e-3)
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-9)


def test_two_shards_a_rank_are_refused_with_batch_normalization():
    x, y = data(16)
    sampler = GlobalSampler(16, 8, shards_per_batch=2)
    split = Split.whole(x, y, 0, 1)
    model = small([dp.Input((4,)), layers.BatchNormalization(), layers.Dense(2)])
    with pytest.raises(ConfigError, match="needs all samples of a batch at once: 2 shards a rank are not supported"):
        run_to_end(model.fit_splits_steps(split, None, sampler, epochs=1, verbose=0))
    plain = small([dp.Input((4,)), layers.Dense(2)])
    run_to_end(plain.fit_splits_steps(split, None, sampler, epochs=1, verbose=0))


def test_dropout_of_everything_and_with_a_seed_of_its_own():
    x, y = data()
    model = small([dp.Input((4,)), layers.Dense(5), layers.Dropout(1.0), layers.Dense(2)])
    before = model.named_weights()
    model.fit(x, y, **QUIET)
    after = model.named_weights()
    assert [name for name in before if not np.array_equal(before[name], after[name])] == ["dense_1/bias"]

    def trained(run_seed: int, own: int | None) -> bytes:
        one = small([dp.Input((4,)), layers.Dropout(0.5, seed=own), layers.Dense(2, kernel_initializer="ones")])
        one.seed = run_seed
        one.fit(x, y, shuffle=False, **QUIET)
        return one.get_weights()[0].tobytes()

    assert trained(1, 7) == trained(2, 7)
    assert len({trained(1, 7), trained(1, 8), trained(1, None), trained(2, None)}) == 4


def test_activations_by_name_and_by_object():
    assert layers.Dense(2, dp.activations.swish).activation == layers.Activation("silu").activation == "silu"
    assert layers.Dense(2).activation == dp.activations.get(None).name == "linear"
    assert dp.activations.deserialize(dp.activations.serialize(dp.activations.gelu)) is dp.activations.gelu
