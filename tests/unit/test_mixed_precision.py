"""Policies: what layers and models compute in that nobody has told."""

from typing import get_args, get_type_hints

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers, mixed_precision, ops
from dptrain.backend.cpu.compile import compiler
from dptrain.cli.options.config import Config
from dptrain.errors import ConfigError, DivergenceError
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from dptrain.runtime.types import POLICY_TYPES
from dptrain.saving import load_program
from tests.unit.program.virtual_ranks import run_on_ranks

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture
def float64():
    mixed_precision.set_global_policy("float64")


def test_the_policy_is_that_of_what_is_given_none(float64):
    assert mixed_precision.global_policy() == mixed_precision.Policy("float64")
    assert layers.Dense(2).dtype_policy.variable_dtype == layers.Dense(2).compute_dtype == "float64"
    assert layers.Dense(2, dtype="float32").dtype == "float32"
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "mse", device="cpu")
    x = np.random.default_rng(0).random((4, 3))
    kernel, _ = model.get_weights()
    assert kernel.dtype == np.float64
    np.testing.assert_allclose(model.predict(x, verbose=0), x @ kernel, rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float64", np.float64, np.dtype("float64"), mixed_precision.DTypePolicy("float64")])
def test_what_a_layer_takes_for_its_type(dtype):
    assert layers.Dense(2, dtype=dtype).dtype == "float64"


def test_a_described_policy_is_as_in_keras_configurations():
    described = {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "float64"}}
    assert layers.Dense(2, dtype=described).dtype == "float64"
    assert mixed_precision.Policy.from_config(mixed_precision.Policy("float32").get_config()).name == "float32"


@pytest.mark.parametrize("name", ["int8", "mixed_float8", "tf32"])
def test_another_policy_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"not supported: dtype policy '{name}'; expected 'float32', 'float64', "):
        mixed_precision.set_global_policy(name)
    with pytest.raises(ConfigError, match=f"not supported: dtype = '{name}' of layer Dense"):
        layers.Dense(2, dtype=name)
    assert mixed_precision.dtype_policy().name == "float32"


# Half precision

HALVES = ("bfloat16", "float16")
POLICIES = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}
X = np.random.default_rng(0).normal(size=(96, 12)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 96)


def classifier(policy, *, last=None, jit_compile=False, **options):
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16, activation="relu", dtype=None),
            layers.BatchNormalization(),
            layers.Dense(3),
            layers.Activation("softmax", dtype=last),
        ]
    )
    options = {"metrics": ["accuracy"], "device": "cpu", **options}
    optimizer = options.pop("optimizer", "adam")
    model.compile(optimizer, "sparse_categorical_crossentropy", dtype=policy, jit_compile=jit_compile, **options)
    return model


@pytest.mark.parametrize("dtype", HALVES)
def test_an_op_computes_in_float32_and_rounds_once(dtype):
    x, y = (ops.cast(array, dtype) for array in (X[:5, :4], X[5:10, :4]))
    wide = [ops.cast(tensor, "float32") for tensor in (x, y)]
    for function in (
        *(ops.add, ops.multiply, ops.divide, lambda a, b: ops.matmul(a, ops.transpose(b)), lambda a, b: ops.exp(a)),
        *(lambda a, b: ops.sum(a, 0), lambda a, b: ops.where(a > 0, b, 0.5), lambda a, b: ops.softmax(a)),
        *(lambda a, b: ops.mean(a * 300, 1), lambda a, b: ops.gelu(a), lambda a, b: ops.concatenate([a, b])),
    ):
        actual = function(x, y)
        assert actual.dtype == np.dtype(dtype)
        if function not in (ops.mean,):
            expected = ops.cast(function(*wide), dtype).numpy()
            np.testing.assert_allclose(actual.numpy().astype("f"), expected.astype("f"), rtol=2**-7)


@pytest.mark.parametrize("dtype", HALVES)
def test_types_that_meet(dtype):
    x = ops.cast(X[0], dtype)
    assert (x + 1).dtype == (2.5 * x).dtype == (x + np.arange(12)).dtype == (x**2).dtype == np.dtype(dtype)
    assert (x + X[1]).dtype == np.float32
    assert (x > 0).dtype == np.bool_
    other = ops.cast(x, {"bfloat16": "float16", "float16": "bfloat16"}[dtype])
    assert (x + other).dtype == np.float32
    assert ops.zeros((2,), dtype).dtype == ops.ones_like(x).dtype == ops.one_hot([1], 3, dtype=dtype).dtype == dtype


def test_a_long_sum_does_not_overflow_on_its_way():
    x = ops.cast(np.full(4096, 100.0), "float16")
    assert float(ops.mean(x)) == 100
    assert float(ops.std(x)) == 0
    assert float(ops.sum(x)) == np.inf  # 409,600 is no float16


@pytest.mark.parametrize(("policy", "dtype"), POLICIES.items())
def test_weights_are_float32_and_are_read_in_half_precision(policy, dtype):
    dtypes = {}

    class Scale(layers.Layer):
        def build(self, input_shape):
            self.scale = self.add_weight((12,), "ones")
            self.exact = self.add_weight((12,), "ones", autocast=False)

        def call(self, inputs):
            dtypes.update(inputs=inputs.dtype, scale=(self.scale * 1).dtype, exact=(self.exact * 1).dtype)
            return inputs * self.scale

    layer = Scale(dtype=policy)
    output = layer(X)
    assert dtypes == {"inputs": np.dtype(dtype), "scale": np.dtype(dtype), "exact": np.float32}
    assert output.dtype == dtype
    assert {weight.dtype.name for weight in layer.weights} == {layer.dtype, layer.variable_dtype} == {"float32"}
    assert layer.compute_dtype == dtype
    ops.sum(layer(X)).backward()
    assert layer.scale.value.grad.dtype == np.float32
    assert layer.scale.value.dtype == np.float32  # outside of a call


@pytest.mark.parametrize(("policy", "dtype"), POLICIES.items())
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=needs_compiler)])
def test_a_training_is_that_of_float32_but_for_rounding(policy, dtype, jit_compile):
    expected = classifier("float32", jit_compile=jit_compile).fit(X, Y, epochs=3, batch_size=20, verbose=0)
    model = classifier(policy, jit_compile=jit_compile)
    actual = model.fit(X, Y, epochs=3, batch_size=20, verbose=0)
    np.testing.assert_allclose(actual.history["loss"], expected.history["loss"], rtol=0.02)
    assert actual.history["loss"] != expected.history["loss"]
    assert {weight.dtype.name for weight in model.weights} == {"float32"}
    assert model(X[:2]).dtype == dtype
    assert model.predict(X, verbose=0).dtype == ("float32" if dtype == "bfloat16" else "float16")


@needs_compiler
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16", "float16"])
def test_compiled_steps_are_numpys_but_for_the_order_of_sums(policy):
    histories = [
        classifier(policy, jit_compile=jit_compile, optimizer="sgd").fit(X, Y, epochs=2, batch_size=32, verbose=0)
        for jit_compile in (False, True)
    ]
    losses = [history.history["loss"] for history in histories]
    np.testing.assert_allclose(*losses, rtol=4e-3)


def test_ranks_round_what_they_have_added_up():
    """Each rank's part of a gradient is a whole number; rounded before they are summed, the sum would be another."""
    w = Variable(np.ones((4, 1), np.float32), "w")

    def step(x):
        ops.sum(ops.cast(x, "bfloat16") @ ops.cast(w, "bfloat16")).backward()
        return {"gradient": w.value.grad}

    x = np.zeros((8, 4), np.float32)
    x[:, 0] = [256, 1, 0, 0, 1, 0, 0, 0]
    program = place(trace(step, {"x": ((Dim.rows(8), 4), "float32")}))
    expected = np.array([[258], [0], [0], [0]], np.float32)
    assert evaluate(trace(step, {"x": ((Dim.rows(8), 4), "float32")}), {"x": x})[0]["gradient"][0] == 258
    for shards in ([8], [4, 4], [1, 1, 6]):
        per_rank, _ = run_on_ranks(program, {"x": x}, shards, {"x": 0})
        for outputs, _ in per_rank:
            np.testing.assert_array_equal(outputs["gradient"], expected)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16", "float16"])
def test_files_keep_policies_and_every_bit(policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = classifier(policy, last="float32")
    model.fit(X, Y, epochs=1, batch_size=32, verbose=0)
    expected = model.predict(X, verbose=0)
    model.save("a.keras")
    loaded = keras.models.load_model("a.keras", device="cpu", jit_compile=False)
    assert [layer.dtype_policy.name for layer in loaded.layers] == [policy] * 3 + ["float32"]
    assert loaded.dtype_policy.name == policy
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), expected)
    assert [weight.dtype for weight in loaded.weights] == [weight.dtype for weight in model.weights]
    for variable, other in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.float64(variable.numpy()), np.float64(other.numpy()))
    for path in ("a.weights.h5", "a.safetensors"):
        model.save_weights(path)
        other = classifier(policy, last="float32")
        other.load_weights(path)
        np.testing.assert_array_equal(other.predict(X, verbose=0), expected)
    model.export("a.dpt")
    stored = load_program("a.dpt", device="cpu")
    np.testing.assert_allclose(stored(X), expected, rtol=1e-6)
    described = keras.models.model_from_json(model.to_json())
    assert [layer.dtype_policy.name for layer in described.layers] == [policy] * 3 + ["float32"]


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_an_interrupted_training_goes_on_with_the_same_bits(policy, tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    straight = classifier(policy)
    straight.fit(X, Y, epochs=4, batch_size=32, verbose=0)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        classifier(policy).fit(X, Y, epochs=4, batch_size=32, verbose=0, callbacks=[backup, Stop()])
    resumed = classifier(policy)
    resumed.fit(X, Y, epochs=4, batch_size=32, verbose=0, callbacks=[backup])
    for variable, other in zip(straight.variables, resumed.variables, strict=True):
        np.testing.assert_array_equal(np.float64(variable.numpy()), np.float64(other.numpy()))


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_weights_in_half_precision_that_are_not_finite_are_noticed(policy):
    model = classifier(policy, optimizer=keras.optimizers.SGD(1e30))
    with pytest.raises(DivergenceError):
        model.fit(X, Y, epochs=3, batch_size=16, verbose=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_losses_and_metrics_are_float32(dtype):
    """Of 600 samples 599 are right, which is no bfloat16, and a float16 to be squared overflows."""
    output = ops.cast(np.where(np.arange(600) == 5, 0.0, 1.0)[:, None], dtype)
    labels = np.ones((600, 1), np.float32)
    actual = {
        metric.name: float(metric(labels, output))
        for metric in (keras.metrics.BinaryAccuracy(), keras.metrics.MeanSquaredError(), keras.metrics.TruePositives())
    }
    expected = {"binary_accuracy": 599 / 600, "mean_squared_error": 1 / 600, "true_positives": 599}
    assert actual == pytest.approx(expected, rel=1e-6)
    assert float(keras.metrics.Mean()(output)) == pytest.approx(599 / 600, rel=1e-6)
    assert float(keras.metrics.Sum()(output)) == 599
    large = ops.cast(np.full((4, 1), 300.0), dtype)
    loss = keras.losses.MeanSquaredError()(np.zeros((4, 1), np.float32), large)
    assert loss.dtype == np.float32
    assert float(loss) == pytest.approx(90000, rel=1e-6)
    logits = ops.cast(X[:, :3], dtype)
    by_logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(Y, logits)
    exact = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(Y, ops.cast(logits, "float64"))
    assert float(by_logits) == pytest.approx(float(exact), rel=1e-6)


def test_an_accuracy_is_that_of_the_predictions():
    model = classifier("mixed_bfloat16")
    x, y = np.tile(X, (10, 1)), np.tile(Y, 10)
    model.fit(x, y, epochs=5, batch_size=480, verbose=0)
    right = np.mean(np.argmax(model.predict(x, verbose=0), 1) == y)
    assert model.evaluate(x, y, batch_size=960, verbose=0)[1] == pytest.approx(right, abs=1e-6)


def test_a_policy_without_a_name_is_the_global_one():
    keras.config.set_dtype_policy("mixed_float16")
    assert mixed_precision.DTypePolicy().name == mixed_precision.DTypePolicy(None).name == "mixed_float16"
    with pytest.raises(TypeError, match="'name' must be a string"):
        mixed_precision.DTypePolicy(123)
    for policy in (None, 12345):
        with pytest.raises(ConfigError, match="Invalid `policy` argument"):
            keras.config.set_dtype_policy(policy)


def test_the_command_line_has_every_policy_and_narrow_type():
    hints = get_type_hints(Config)
    assert set(get_args(hints["dtype"])) == set(mixed_precision.POLICIES)
    names = {name for choice in get_args(hints["comm_dtype"]) for name in get_args(choice)}
    assert names == {known.name for known in POLICY_TYPES if known.is_narrow}
