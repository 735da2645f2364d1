"""Every optimizer with its options: 200 updates by the same gradients here and in Keras."""

import itertools

import numpy as np
import pytest

from dptrain import optimizers
from dptrain.optimizers import schedules
from dptrain.program.tensor import Variable

# Of Keras' own, about its variables in NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

STEPS = 200
SHAPES = {"kernel": (5, 7), "bias": (7,)}

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
    "Adagrad": [{}, {"initial_accumulator_value": 0.5, "epsilon": 1e-3}],
    "Adadelta": [{}, {"rho": 0.8, "epsilon": 1e-3}],
    "Adamax": [{}, {"beta_1": 0.5, "beta_2": 0.9}],
    "Nadam": [{}, {"beta_1": 0.5, "beta_2": 0.9}],
    "Adafactor": [{}, {"beta_2_decay": -0.5, "clip_threshold": 0.5, "relative_step": False}],
    "Ftrl": [
        {},
        {"learning_rate_power": -0.75, "l1_regularization_strength": 0.01, "beta": 0.1},
        {"l2_regularization_strength": 0.1, "l2_shrinkage_regularization_strength": 0.05},
    ],
    "Lamb": [{}, {"beta_1": 0.5, "beta_2": 0.9}],
    "Muon": [
        {},
        {"nesterov": False, "ns_steps": 3, "rms_rate": None},
        {"exclude_layers": ["kern"], "adam_lr_ratio": 0.5},
    ],
    "Lion": [{}, {"beta_1": 0.5, "beta_2": 0.9}],
    "ScheduleFreeAdamW": [{}, {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3, "warmup_steps": 30}],
}
ALL = [(name, number) for name in OWN for number in range(len(OWN[name]))]


def schedule(kind):
    """Return a schedule of `dptrain.optimizers.schedules` or `keras.optimizers.schedules`."""
    return kind.CosineDecay(0.0, 150, 0.1, warmup_target=0.02, warmup_steps=20)


COMMON = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "clipnorm": {"clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.02},
    "global clipnorm": {"global_clipnorm": 0.2},
    "accumulation": {"gradient_accumulation_steps": 3},
    "averages": {"use_ema": True, "ema_momentum": 0.9},
    "overwriting": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 7},
    "schedule": {"learning_rate": schedule},
    "all": {
        "learning_rate": schedule,
        "weight_decay": 0.1,
        "gradient_accumulation_steps": 3,
        "use_ema": True,
        "clipnorm": 0.1,
        "exclude": ["bias"],
    },
}


def update(keras, optimizer, variables, steps):
    """Let Keras' optimizer make its updates; on JAX compiled, as `fit` does."""
    gradients = [[keras.ops.convert_to_tensor(grad) for grad in grads] for grads in steps]
    if keras.backend.backend() != "jax":
        for grads in gradients:
            optimizer.apply_gradients(zip(grads, variables, strict=True))
        return
    import jax

    optimizer.build(variables)
    values, state = [variable.value for variable in variables], [variable.value for variable in optimizer.variables]
    compiled = jax.jit(lambda values, state, grads: optimizer.stateless_apply(state, grads, values))
    for grads in gradients:
        values, state = compiled(values, state, grads)
    for variable, value in zip([*variables, *optimizer.variables], [*values, *state], strict=True):
        variable.assign(value)


@pytest.mark.parametrize("common", COMMON)
@pytest.mark.parametrize(("name", "number"), ALL)
def test_two_hundred_steps(keras, name, number, common):
    if (name, common) == ("Ftrl", "schedule"):
        pytest.skip("it divides by the learning rate, which begins with 0")
    if name == "ScheduleFreeAdamW" and keras.backend.backend() == "torch":
        pytest.skip("on PyTorch Keras takes the old momentum for the new one")
    close = 1e-5 if (name, number) == ("Muon", 0) else 1e-9  # Keras has the root of the greater side in float32
    rng = np.random.default_rng(1)
    start = {path: 0.5 * rng.standard_normal(shape) for path, shape in SHAPES.items()}
    steps = [
        [size * rng.standard_normal(weight.shape) for weight in start.values()] for size in rng.uniform(0, 0.1, STEPS)
    ]
    pair, configs, results = [], [], []
    for kind, variable in ((optimizers, Variable), (keras.optimizers, keras.Variable)):
        options = {"learning_rate": 0.01, **COMMON[common], **OWN[name][number]}
        excluded = options.pop("exclude", None)
        if callable(options["learning_rate"]):
            options["learning_rate"] = options["learning_rate"](kind.schedules)
        optimizer = getattr(kind, name)(**options)
        if excluded:
            optimizer.exclude_from_weight_decay(var_names=excluded)
        configs.append({key: value for key, value in optimizer.get_config().items() if key != "name"})
        variables = [variable(value, name=path) for path, value in start.items()]
        if kind is optimizers:
            for grads in steps:
                optimizer.apply_gradients(zip(grads, variables, strict=True))
        else:
            update(keras, optimizer, variables, steps)
        trained = [
            keras.ops.convert_to_numpy(variable) if kind is not optimizers else variable.numpy()
            for variable in variables
        ]
        optimizer.finalize_variable_values(variables)
        finished = [*trained, *variables, *optimizer.variables]
        results.append(
            [np.array(value if kind is optimizers else keras.ops.convert_to_numpy(value)) for value in finished]
        )
        pair.append(optimizer)
    assert list(configs[0]) == list(configs[1])
    assert configs[0] == configs[1]
    assert len(results[0]) == len(results[1])
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=close, atol=close / 100 * np.abs(theirs).max())
    moved = max(np.abs(a - b).max() for a, b in zip(results[0], start.values(), strict=False))
    assert moved > 1e-4, "the comparison would say little"
    for optimizer in pair:
        assert int(optimizer.iterations) == STEPS // COMMON[common].get("gradient_accumulation_steps", 1)


@pytest.mark.parametrize(("name", "number"), ALL)
def test_the_names_of_variables(keras, name, number):
    """Slots' paths but for the optimizer's name, of which Keras' is not always the class's in snake case."""
    names_of_libraries = []
    for kind, variable in ((optimizers, Variable), (keras.optimizers, keras.Variable)):
        optimizer = getattr(kind, name)(gradient_accumulation_steps=2, **OWN[name][number])
        optimizer.build([variable(np.zeros(shape), name=path) for path, shape in SHAPES.items()])
        names_of_libraries.append(
            [variable.path.partition("/")[2] for variable in optimizer.variables if variable.shape]
        )
    assert names_of_libraries[0] == names_of_libraries[1]


def test_keras_reads_what_is_serialized(keras):
    from keras import optimizers as theirs

    readable = [name for name in OWN if name != "Lamb"]  # which Keras writes and does not read
    for name, options in itertools.chain(*([(name, own) for own in OWN[name]] for name in readable)):
        mine = getattr(optimizers, name)(schedule(schedules), clipnorm=0.5, **options)
        optimizer = theirs.deserialize(optimizers.serialize(mine))
        assert isinstance(optimizer, getattr(theirs, name))
        assert optimizer.get_config() == mine.get_config()
        back = optimizers.deserialize(theirs.serialize(optimizer))
        assert type(back) is type(mine)
        assert back.get_config() == mine.get_config()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"clipnorm": 1.0, "clipvalue": 2.0}),
        ("SGD", {"momentun": 0.9}),
        ("SGD", {"use_ema": True, "ema_momentum": 2.0}),
        ("SGD", {"use_ema": True, "ema_overwrite_frequency": -1}),
        ("Adam", {"gradient_accumulation_steps": 1}),
        ("AdamW", {"weight_decay": None}),
        ("Lion", {"beta_1": 0.0}),
    ],
)
def test_the_same_errors(keras, name, options):
    messages = []
    for kind in (optimizers, keras.optimizers):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the messages are compared
            getattr(kind, name)(**options)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_the_same_errors_of_updates(keras):
    messages = []
    for kind, variable in ((optimizers, Variable), (keras.optimizers, keras.Variable)):
        optimizer, weight = kind.SGD(0.1), variable(np.zeros(2), name="kernel")
        for grads, variables in (([np.ones(2)], None), ([None], [weight]), ([np.ones(2)] * 2, None)):
            with pytest.raises(ValueError) as raised:  # noqa: PT011 - the messages are compared
                optimizer.apply(grads, variables)
            messages.append(str(raised.value))
    assert messages[:3] == messages[3:]


# Variables of any number of axes; a gradient of zeros is that of what a batch does not touch.
ANY_SHAPES = {"scalar": (), "vector": (3,), "matrix": (2, 3), "cube": (2, 3, 4), "kernel": (3, 2, 4, 5)}


@pytest.mark.parametrize("name", OWN)
def test_variables_of_any_shape_with_gradients_of_zeros(keras, name):
    rng = np.random.default_rng(2)
    start = {path: 0.5 * rng.standard_normal(shape) for path, shape in ANY_SHAPES.items()}
    start["zeros"] = np.zeros((2, 3))
    steps = [
        [
            0.0 * value if (number + step) % 3 == 0 else 0.1 * rng.standard_normal(value.shape)
            for number, value in values
        ]
        for step in range(4)
        for values in [list(enumerate(start.values()))]
    ]
    optimizer = getattr(optimizers, name)(0.01)
    ours = [Variable(value, path) for path, value in start.items()]
    for grads in steps:
        optimizer.apply(grads, ours)
    theirs = [keras.Variable(value, name=path, dtype="float64") for path, value in start.items()]
    update(keras, getattr(keras.optimizers, name)(0.01), theirs, steps)
    for variable, their_variable in zip(ours, theirs, strict=True):
        value = keras.ops.convert_to_numpy(their_variable.value)
        assert np.isfinite(variable.numpy()).all(), variable.name
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-5, atol=1e-9, err_msg=variable.name)
