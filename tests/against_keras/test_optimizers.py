"""Every optimizer with its options: 200 updates of a small network, and of Keras' from the same weights and batches."""

import itertools

import numpy as np
import pytest

import dptrain as dp
from tests.ops.test_vector_ops import Lion

# Of Keras' own, about its variables in NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

STEPS, BATCH = 200, 8


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((STEPS * BATCH // 2, 5)), rng.integers(0, 3, STEPS * BATCH // 2)


def schedule(kind):
    """Return a schedule of `dp.optimizers.schedules` or `keras.optimizers.schedules`."""
    return kind.CosineDecay(0.0, 150, 0.1, warmup_target=0.02, warmup_steps=20)


def trained(kind, optimizer, weights, **options) -> tuple[list[float], list[np.ndarray]]:
    """Return the two epochs' losses and the weights after 200 steps of dptrain or Keras."""
    x, y = data()
    model = kind.Sequential([kind.layers.Dense(7, activation="tanh"), kind.layers.Dense(3, activation="softmax")])
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
    pair, configs = [], []
    for kind in (dp, keras):
        options = {"learning_rate": 0.01, **COMMON[common], **OWN[name][number]}
        excluded = options.pop("exclude", None)
        if callable(options["learning_rate"]):
            options["learning_rate"] = options["learning_rate"](kind.optimizers.schedules)
        optimizer = getattr(kind.optimizers, name)(**options)
        if excluded:
            optimizer.exclude_from_weight_decay(var_names=excluded)
        pair.append(optimizer)
        configs.append({key: value for key, value in optimizer.get_config().items() if key != "name"})
    assert list(configs[0]) == list(configs[1])
    assert configs[0] == configs[1]
    compare(keras, *pair)
    for optimizer in pair:
        assert int(optimizer.iterations) == STEPS // COMMON[common].get("gradient_accumulation_steps", 1)


def compare(keras, mine, theirs) -> None:
    """Train with both, and require the same losses and weights."""
    rng = np.random.default_rng(1)
    weights = [0.5 * rng.standard_normal(shape) for shape in [(5, 7), (7,), (7, 3), (3,)]]
    losses, mine = trained(dp, mine, weights, dtype="float64", loops="numpy")
    keras_losses, theirs = trained(keras, theirs, weights)
    np.testing.assert_allclose(losses, keras_losses, rtol=1e-10)
    moved = 0.0
    for a, b, start in zip(mine, theirs, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11 * np.abs(b).max())
        moved += np.abs(b - start).max()
    assert moved > 0.05, "the comparison would say little"


@pytest.mark.parametrize("common", [{}, {"clipnorm": 0.1, "weight_decay": 0.1}])
def test_a_users_own_rule(keras, common):
    """Lion is Keras' own there, and an example of vector ops here."""
    compare(keras, Lion(0.002, **common), keras.optimizers.Lion(0.002, **common))


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
