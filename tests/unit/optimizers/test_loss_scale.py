"""The optimizer that scales losses: Keras' decisions, alike on all ranks."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers, ops
from dptrain.errors import ConfigError
from dptrain.optimizers import SGD, Adam, LossScaleOptimizer, deserialize, serialize
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests.unit.program.virtual_ranks import run_on_ranks


def state(optimizer):
    return float(optimizer.dynamic_scale), int(optimizer.step_counter), int(optimizer.iterations)


def test_gradients_are_divided_by_the_scale_and_updates_left_out_where_one_is_not_finite():
    weight, other = Variable(np.array([1.0, 2.0], np.float32)), Variable(np.float32(3))
    optimizer = LossScaleOptimizer(SGD(0.5, momentum=0.9), initial_scale=8, dynamic_growth_steps=2)
    for number in range(2):
        loss = optimizer.scale_loss(ops.sum(ops.square(weight)) + other)
        weight._gradient = other._gradient = None
        loss.backward()
        np.testing.assert_allclose(other.value.grad.numpy(), 8)
        optimizer.apply([weight.value.grad, other.value.grad], [weight, other])
        assert state(optimizer) == ((8, 1, 1), (16, 0, 2))[number]
    plain, momentum = Variable(np.array([1.0, 2.0], np.float32)), SGD(0.5, momentum=0.9)
    for _ in range(2):
        momentum.apply([2 * plain], [plain])
    np.testing.assert_allclose(weight.numpy(), plain.numpy(), rtol=1e-6)
    before = [one.numpy() for one in (weight, other, *optimizer.inner_optimizer.variables)]
    for bad in (np.inf, np.nan, -np.inf):
        optimizer.apply([ops.convert_to_tensor([0.0, bad]), ops.convert_to_tensor(1.0)], [weight, other])
    for variable, value in zip((weight, other, *optimizer.inner_optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert state(optimizer) == (2, 0, 2)


def test_all_ranks_decide_alike_when_one_has_an_infinity():
    """Ranks 0 and 2 have finite samples only; steps by the rows that they have."""
    weight = Variable(np.ones(3, np.float32), "w")
    optimizer = LossScaleOptimizer(Adam(0.1), initial_scale=2.0**10)
    optimizer.build([weight])

    def step(x):
        weight._gradient = None
        optimizer.scale_loss(ops.mean(ops.cast(x, "float16") * ops.cast(weight, "float16"))).backward()
        optimizer.apply([weight.value.grad], [weight])
        return {"scale": optimizer.dynamic_scale * 1}

    program = trace(step, {"x": ((Dim.rows(6), 3), "float32")})
    for worst in (1.0, 65504.0, np.inf):
        x = np.ones((6, 3), np.float32)
        x[3, 1] = worst
        full, updates = evaluate(program, {"x": x})
        assert (full["scale"] == 2.0**9) == (worst > 1)
        for shards in ([2, 2, 2], [1, 5], [6]):
            for outputs, updated in run_on_ranks(place(program), {"x": x}, shards, {"x": 0})[0]:
                assert outputs["scale"] == full["scale"]
                for variable, value in updates.items():
                    np.testing.assert_allclose(updated[variable], value, rtol=1e-3, err_msg=variable.path)
        changed = not np.array_equal(updates[weight], np.ones(3))
        assert changed == (worst == 1)


class Own(keras.Model):
    """A model with a policy of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)


class OwnSequential(keras.Sequential):
    """A chain that sets its policy."""

    def __init__(self):
        super().__init__()
        self.dtype_policy = "mixed_float16"
        self.add(layers.Dense(2))


def functional(**options):
    inputs = layers.Input((3,))
    return keras.Model(inputs, layers.Dense(2)(inputs), **options)


def under_global_policy():
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
    keras.mixed_precision.set_global_policy("float32")
    return model


def loaded(directory, **options):
    path = directory / "model.keras"
    model = functional(dtype="mixed_float16")
    model.compile("sgd", "mse")
    model.save(path)
    return keras.models.load_model(path, **options)


MODELS = {
    "functional": lambda _: functional(dtype="mixed_float16"),
    "policy": lambda _: functional(dtype=keras.DTypePolicy("mixed_float16")),
    "subclass": lambda _: Own(dtype="mixed_float16"),
    "subclass of Sequential": lambda _: OwnSequential(),
    "global policy": lambda _: under_global_policy(),
    "loaded": lambda directory: loaded(directory, compile=False),
    "clone": lambda _: keras.models.clone_model(functional(dtype="mixed_float16")),
    "from_config": lambda _: keras.Model.from_config(functional(dtype="mixed_float16").get_config()),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", ["sgd", "two"])
def test_a_model_with_the_policy_scales_its_loss(name, optimizer, tmp_path):
    """Targets so near to the outputs that float16 gradients vanish without a scale."""
    model = MODELS[name](tmp_path)
    two = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(SGD(0.5), {".*bias": SGD(0.5)}))
    model.compile("sgd" if optimizer == "sgd" else two, "mse")
    model.build((None, 3))
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert {layer.dtype_policy.name for layer in model.layers} == {"mixed_float16"}
    for weight in model.weights:
        weight.assign(ops.zeros_like(weight))
    x, y = np.full((64, 3), 2.0**-10, np.float32), np.full((64, 2), 2.0**-10, np.float32)
    model.fit(x, y, batch_size=64, verbose=0)
    assert all(np.all(weight.numpy() > 0) for weight in model.weights)


@pytest.mark.parametrize("make", [Own, functional])
def test_the_policy_of_compile_replaces_the_models(make):
    model = make(dtype="mixed_float16")
    model.compile("sgd", "mse", dtype="float32")
    assert isinstance(model.optimizer, SGD)
    assert model.dtype_policy.name == "float32"
    model = make()
    model.compile("sgd", "mse", dtype="mixed_float16")
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert model.dtype_policy.name == "mixed_float16"


# How a model gets an optimizer.
WAYS = {
    "compile": lambda model, optimizer, auto: model.compile(optimizer, "mse", auto_scale_loss=auto),
    "compile again": lambda model, optimizer, auto: [
        model.compile(each, "mse", auto_scale_loss=each_auto)
        for each, each_auto in (("adam", not auto), (optimizer, auto))
    ],
    "attribute": lambda model, optimizer, auto: (
        model.compile("adam", "mse", auto_scale_loss=auto),
        setattr(model, "optimizer", optimizer),
    ),
    "attribute after a fit": lambda model, optimizer, auto: (
        model.compile("adam", "mse", auto_scale_loss=auto, jit_compile=False),
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0),
        setattr(model, "optimizer", optimizer),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("auto", [True, False])
def test_an_optimizer_is_wrapped_where_it_has_to_be_however_a_model_gets_it(way, auto):
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        for optimizer in (
            "sgd",
            SGD(0.1),
            keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(SGD(0.1), {})),
        ):
            model = functional(dtype=policy)
            WAYS[way](model, optimizer, auto)
            assert isinstance(model.optimizer, LossScaleOptimizer) == (auto and policy == "mixed_float16"), policy


def test_a_loaded_model_scales_its_loss(tmp_path):
    assert isinstance(loaded(tmp_path).optimizer, LossScaleOptimizer)


@pytest.mark.parametrize("auto", [True, False])
def test_mixed_float16_scales_by_itself(auto):
    def build(optimizer):
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model.compile(optimizer, "mse", dtype="mixed_float16", auto_scale_loss=auto, device="cpu", jit_compile=False)
        return model

    model = build("adam")
    assert isinstance(model.optimizer, LossScaleOptimizer) == auto
    scaled = LossScaleOptimizer(SGD(0.1), 4.0)
    assert build(scaled).optimizer is scaled
    x = np.ones((4, 3), np.float32)
    model.fit(x, np.ones((4, 2)), epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 2
    model.optimizer.learning_rate = 0.25
    assert float(model.optimizer.learning_rate) == 0.25
    again = keras.models.clone_model(model)
    again.compile(**model._compile_arguments | {"optimizer": "sgd"})
    assert isinstance(again.optimizer, LossScaleOptimizer) == auto
    for name in ("bfloat16", "mixed_bfloat16", "float32"):
        model.compile("adam", "mse", dtype=name, device="cpu", jit_compile=False)
        assert isinstance(model.optimizer, Adam)


def test_a_training_finds_its_scale():
    """At 2^40 the first gradients are infinite in float16: the scale falls until they are not."""
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    optimizer = LossScaleOptimizer(SGD(0.1), 2.0**40)
    model.compile(optimizer, "mse", dtype="mixed_float16", device="cpu", jit_compile=False)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)).astype("f")
    logs = model.fit(x, x[:, :2], epochs=20, batch_size=16, verbose=0).history["loss"]
    assert 2.0**10 < float(optimizer.dynamic_scale) < 2.0**20
    assert 20 <= int(optimizer.iterations) < 80
    assert logs[-1] < 0.1 * logs[0]


def test_the_configuration_is_keras_own():
    optimizer = LossScaleOptimizer(Adam(0.01, beta_1=0.8), 64.0, 10)
    described = serialize(optimizer)
    assert described["class_name"] == "LossScaleOptimizer"
    assert set(described["config"]) == {"name", "inner_optimizer", "initial_scale", "dynamic_growth_steps"}
    restored = deserialize(described)
    assert restored.get_config() == optimizer.get_config()
    assert isinstance(restored.inner_optimizer, Adam)
    assert keras.mixed_precision.LossScaleOptimizer is LossScaleOptimizer


def test_a_fixed_factor():
    weight, plain = Variable(np.float32(3)), Variable(np.float32(3))
    scaled, optimizer = SGD(0.1, loss_scale_factor=16.0), SGD(0.1)
    scaled.scale_loss(weight * weight).backward()
    assert float(weight.value.grad) == 96
    (plain * plain).backward()
    scaled.apply([weight.value.grad], [weight])
    optimizer.apply([plain.value.grad], [plain])
    assert float(weight) == float(plain)
    assert SGD.from_config(scaled.get_config()).loss_scale_factor == 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossScaleOptimizer("adam"), "expected an optimizer, found str"),
        (lambda: LossScaleOptimizer(LossScaleOptimizer(SGD())), "expected an optimizer, found LossScaleOptimizer"),
        (lambda: LossScaleOptimizer(SGD(), 0.0), "initial_scale=0.0"),
        (lambda: LossScaleOptimizer(SGD(), dynamic_growth_steps=0), "dynamic_growth_steps=0"),
        (lambda: LossScaleOptimizer(SGD(), dynamic=False), "set `loss_scale_factor` directly on the `inner"),
        (lambda: LossScaleOptimizer(SGD(), clipnorm=1.0), "set `clipnorm` on the `inner_optimizer`"),
        (lambda: LossScaleOptimizer(SGD(), foo=True, bar=3), "does not support arguments: `foo`, `bar`"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_slots_are_those_of_the_inner_optimizer():
    """By which they are sharded."""
    optimizer, weight = LossScaleOptimizer(Adam(0.1)), Variable(np.ones(2, np.float32), "weight")
    optimizer.build([weight])
    assert [parameter for _, parameter in optimizer._all_slots] == [weight, weight]
    assert [slot for slot, _ in optimizer._all_slots] == list(optimizer._slots_of(weight).values())


@pytest.mark.parametrize("named", [True, False])
def test_what_a_variable_is_overwritten_with_is_not_divided_by_the_scale(named):
    weight, other = Variable(np.zeros(3, np.float32)), Variable(np.zeros(3, np.float32))
    weight.overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=8)
    optimizer.build([weight, other])
    optimizer.apply([ops.array([1.0, 6.0, 7.0]), ops.array([8.0, 16.0, 0.0])], [weight, other] if named else None)
    np.testing.assert_array_equal(weight.numpy(), [1, 6, 7])
    np.testing.assert_array_equal(other.numpy(), [-1, -2, 0])


def test_configurations_of_older_files_have_defaults_of_the_inner_optimizer():
    config = LossScaleOptimizer(SGD(0.5), 2.0).get_config()
    older = dict.fromkeys(("weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor"))
    older |= {"use_ema": False, "ema_momentum": 0.99, "ema_overwrite_frequency": None}
    optimizer = LossScaleOptimizer.from_config(config | older | {"gradient_accumulation_steps": None})
    assert (optimizer.initial_scale, float(optimizer.inner_optimizer.learning_rate)) == (2.0, 0.5)


def test_stateless_apply():
    optimizer, weight = LossScaleOptimizer(SGD(0.5), 4.0), Variable(np.array([1.0, 2.0], np.float32), "weight")
    optimizer.build([weight])
    state = [variable.numpy() for variable in optimizer.variables]
    (value,), state = optimizer.stateless_apply(state, [np.array([4.0, 8.0], np.float32)], [weight.numpy()])
    np.testing.assert_array_equal(value, [0.5, 1.0])
    (same,), state = optimizer.stateless_apply(state, [np.array([np.inf, 8.0], np.float32)], [value])
    np.testing.assert_array_equal(same, value)
    scale = [id(variable) for variable in optimizer.variables].index(id(optimizer.dynamic_scale))
    assert (float(state[scale]), float(optimizer.dynamic_scale)) == (2.0, 4.0)
