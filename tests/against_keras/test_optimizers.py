"""Every optimizer with its options: 200 updates of a small network, and of Keras' from the same weights and batches."""

import itertools

import numpy as np
import pytest

import dptrain as dp

# Of Keras' own, about its variables in NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

STEPS, BATCH = 200, 8


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((STEPS * BATCH // 2, 5)), rng.integers(0, 3, STEPS * BATCH // 2)


def schedule(kind):
    """Return a schedule of `dp.optimizers.schedules` or `keras.optimizers.schedules`."""
    return kind.CosineDecay(0.0, 150, 0.1, warmup_target=0.02, warmup_steps=20)


def trained(kind, layers, sequential, optimizer, weights, **options) -> tuple[list[float], list[np.ndarray]]:
    """Return the two epochs' losses and the weights after 200 steps."""
    x, y = data()
    model = sequential([layers.Dense(7, activation="tanh"), layers.Dense(3, activation="softmax")])
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    model.predict(x[:BATCH])  # makes the weights
    model.set_weights(weights)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"], model.get_weights()


OWN = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "RMSprop": [
        {},
        {"momentum": 0.5, "rho": 0.8},
        {"centered": True, "epsilon": 1e-4},
        {"momentum": 0.5, "centered": True},
    ],
    "Adam": [{}, {"amsgrad": True, "beta_2": 0.9}],
    "AdamW": [{}, {"weight_decay": 0.3, "amsgrad": True}],
}
COMMON = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "clipnorm": {"clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.02},
    "global clipnorm": {"global_clipnorm": 0.2},
    "accumulation": {"gradient_accumulation_steps": 3},
    "schedule": {"learning_rate": schedule},
    "all": {
        "learning_rate": schedule,
        "weight_decay": 0.1,
        "gradient_accumulation_steps": 3,
        "clipnorm": 0.1,
        "exclude": ["bias"],
    },
}


@pytest.mark.parametrize("common", COMMON)
@pytest.mark.parametrize(("name", "number"), [(name, n) for name in OWN for n in range(len(OWN[name]))])
def test_two_hundred_steps(keras, name, number, common):
    rng = np.random.default_rng(1)
    weights = [0.5 * rng.standard_normal(shape) for shape in [(5, 7), (7,), (7, 3), (3,)]]
    results, configs = [], []
    for kind in (dp, keras):
        options = {"learning_rate": 0.01, **COMMON[common], **OWN[name][number]}
        excluded = options.pop("exclude", None)
        if callable(options["learning_rate"]):
            options["learning_rate"] = options["learning_rate"](kind.optimizers.schedules)
        optimizer = getattr(kind.optimizers, name)(**options)
        if excluded:
            optimizer.exclude_from_weight_decay(var_names=excluded)
        own = {"dtype": "float64", "loops": "numpy"} if kind is dp else {}
        results.append(trained(kind, kind.layers, kind.Sequential, optimizer, weights, **own))
        configs.append(dict(optimizer.get_config()))
        assert int(optimizer.iterations) == STEPS // options.get("gradient_accumulation_steps", 1)
    for config in configs:
        del config["name"]
    assert list(configs[0]) == list(configs[1])
    assert configs[0] == configs[1]
    (losses, mine), (keras_losses, theirs) = results
    np.testing.assert_allclose(losses, keras_losses, rtol=1e-6)  # Keras' means are float32 always
    moved = 0.0
    for a, b, start in zip(mine, theirs, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10 * np.abs(b).max())
        moved += np.abs(b - start).max()
    assert moved > 0.05, "the comparison would say little"


def test_keras_reads_what_is_serialized(keras):
    from keras import optimizers as theirs

    for name, own in itertools.chain(*([(name, own) for own in OWN[name]] for name in OWN)):
        mine = getattr(dp.optimizers, name)(schedule(dp.optimizers.schedules), clipnorm=0.5, **own)
        optimizer = theirs.deserialize(dp.optimizers.serialize(mine))
        assert isinstance(optimizer, getattr(theirs, name))
        assert optimizer.get_config() == mine.get_config()
        back = dp.optimizers.deserialize(theirs.serialize(optimizer))
        assert type(back) is type(mine)
        assert back.get_config() == mine.get_config()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"clipnorm": 1.0, "clipvalue": 2.0}),
        ("SGD", {"momentun": 0.9}),
        ("Adam", {"gradient_accumulation_steps": 1}),
        ("AdamW", {"weight_decay": None}),
    ],
)
def test_the_same_errors(keras, name, options):
    messages = []
    for kind in (dp, keras):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the messages are compared
            getattr(kind.optimizers, name)(**options)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
