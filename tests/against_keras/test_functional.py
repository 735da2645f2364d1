"""Random acyclic models of both: branches, shared layers, merges, several inputs and outputs, losses and metrics."""

import numpy as np
import pytest

import dptrain as dp

# Of Keras' own copies of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SEEDS = range(24)
ROWS = 22  # batches of 8, 8 and 6
UNARY = (
    lambda L, n: L.Dense(n, "tanh"),
    lambda L, n: L.Dense(n, "relu", kernel_regularizer="l2"),
    lambda L, n: L.BatchNormalization(momentum=0.8),
    lambda L, n: L.LayerNormalization(),
    lambda L, n: L.LeakyReLU(),
    lambda L, n: L.Rescaling(0.5, 0.1),
    lambda L, n: L.Dense(n, use_bias=False),
)
MERGES = ("Add", "Multiply", "Average", "Maximum", "Subtract", "Concatenate", "Dot")
OPS = (
    lambda k, a, b: a + b * 0.5,
    lambda k, a, b: k.ops.tanh(a) - b,
    lambda k, a, b: k.ops.concatenate([a, b], axis=-1),
    lambda k, a, b: k.ops.maximum(a, b),
)
LOSSES = (  # loss, last activation, metrics, targets of n values
    ("mse", None, ["mae"], lambda rng, n: rng.standard_normal((ROWS, n))),
    ("binary_crossentropy", "sigmoid", ["accuracy"], lambda rng, n: rng.integers(0, 2, (ROWS, n)) * 1.0),
    ("sparse_categorical_crossentropy", "softmax", ["accuracy"], lambda rng, n: rng.integers(0, n, ROWS)),
    ("huber", None, [], lambda rng, n: rng.standard_normal((ROWS, n))),
)


def make(k, seed):
    """Return a model of module k, dptrain or Keras; x, y; and what to compile it with. The same choices for both."""
    rng = np.random.default_rng(seed)
    L, widths = k.layers, {}
    inputs = [k.Input((int(rng.integers(2, 5)),), name=f"in_{number}") for number in range(rng.integers(1, 4))]
    tensors = list(inputs)
    widths = {id(tensor): int(tensor.shape[-1]) for tensor in tensors}
    shared = {}  # layers with weights by the width that they take

    def add(tensor, width):
        tensors.append(tensor)
        widths[id(tensor)] = width

    def pick():
        return tensors[min(int(rng.integers(0, len(tensors)) + rng.integers(0, 2)), len(tensors) - 1)]

    def like(tensor):
        """Return a tensor of the same width, made with a layer of its own if there is none."""
        candidates = [candidate for candidate in tensors if widths[id(candidate)] == widths[id(tensor)]]
        choice = candidates[int(rng.integers(0, len(candidates)))]
        return L.Dense(widths[id(tensor)], "sigmoid")(pick()) if choice is tensor else choice

    for _ in range(rng.integers(3, 9)):
        tensor, kind = pick(), int(rng.integers(0, 10))
        width = widths[id(tensor)]
        if kind < 4:
            layer, n = UNARY[int(rng.integers(0, len(UNARY)))](L, width + 1), width
            n = width + 1 if isinstance(layer, L.Dense) else width
            add(layer(tensor), n)
            if isinstance(layer, L.Dense):
                shared[width] = (layer, n)
        elif kind < 6 and width in shared:
            layer, n = shared[width]
            add(layer(tensor), n)
        elif kind < 8:
            name, partner = MERGES[int(rng.integers(0, len(MERGES)))], like(tensor)
            layer = L.Dot(axes=1) if name == "Dot" else getattr(L, name)()
            add(layer([tensor, partner]), {"Dot": 1, "Concatenate": 2 * width}.get(name, width))
        else:
            op_index = int(rng.integers(0, len(OPS)))
            add(OPS[op_index](k, tensor, like(tensor)), 2 * width if op_index == 2 else width)
    outputs, y, losses, metrics = [], [], [], []
    for number in range(rng.integers(1, 4)):
        loss, activation, measured, targets = LOSSES[int(rng.integers(0, len(LOSSES)))]
        n = int(rng.integers(2, 4))
        outputs.append(L.Dense(n, activation, name=f"{'zax'[number]}_out")(tensors[-1 - number % len(tensors)]))
        y.append(targets(rng, n))
        losses.append(loss)
        metrics.append(measured)
    x = [rng.standard_normal((ROWS, int(tensor.shape[-1]))) for tensor in inputs]
    names = [f"{'zax'[number]}_out" for number in range(len(outputs))]
    weights = [float(weight) for weight in rng.uniform(0.5, 2, len(outputs)).round(2)]
    if len(outputs) == 1:
        return k.Model(inputs, outputs[0]), x, y[0], {"loss": losses[0], "metrics": metrics[0]}
    compiled = {"loss": losses, "loss_weights": weights, "metrics": metrics}
    if rng.integers(0, 2):
        compiled = {key: dict(zip(names, entries, strict=True)) for key, entries in compiled.items()}
    if rng.integers(0, 2):  # nested as dictionaries
        if not isinstance(compiled["loss"], dict):
            compiled = {key: dict(zip(names, entries, strict=True)) for key, entries in compiled.items()}
        return k.Model(inputs, dict(zip(names, outputs, strict=True))), x, dict(zip(names, y, strict=True)), compiled
    return k.Model(inputs, outputs), x, y, compiled


def leaves(outputs):
    if isinstance(outputs, dict):
        return [np.asarray(outputs[key]) for key in sorted(outputs)]
    return [np.asarray(output) for output in (outputs if isinstance(outputs, list | tuple) else [outputs])]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-11), ("float32", 2e-5)])
def test_random_models(keras, seed, dtype, rtol):
    before = keras.config.floatx()
    keras.config.set_floatx(dtype)
    try:
        compare(keras, seed, dtype, rtol)
    finally:
        keras.config.set_floatx(before)


def compare(keras, seed, dtype, rtol):
    keras.utils.set_random_seed(seed)
    theirs, x, y, compiled = make(keras, seed)
    ours, *_ = make(dp, seed)
    ours.compile(dp.optimizers.SGD(0.1), **compiled, dtype=dtype, jit_compile=bool(seed % 4 == 0))
    theirs.compile(keras.optimizers.SGD(0.1), **compiled, run_eagerly=True)
    assert [type(layer).__name__ for layer in ours.layers if type(layer).__module__.startswith("dptrain")] == [
        type(layer).__name__ for layer in theirs.layers if isinstance(layer, keras.layers.Layer)
    ]
    kinds = [
        [("/".join(weight.path.split("/")[-1:]), tuple(weight.shape), weight.trainable) for weight in model.weights]
        for model in (ours, theirs)
    ]
    assert kinds[0] == kinds[1]
    assert ours.output_names == theirs.output_names
    assert ours.input_names == [tensor.name for tensor in theirs.inputs]
    ours.set_weights(theirs.get_weights())

    x = [array.astype(dtype) for array in x]
    for mine, other in zip(leaves(ours.predict(x, verbose=0)), leaves(theirs.predict(x, verbose=0)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=rtol)
    options = {"batch_size": 8, "verbose": 0, "shuffle": False, "epochs": 2}
    history = ours.fit(x, y, validation_data=(x, y), **options).history
    expected = theirs.fit(x, y, validation_data=(x, y), **options).history
    assert sorted(history) == list(expected)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=10 * rtol, err_msg=key)
    for place, (mine, other) in enumerate(zip(ours.get_weights(), theirs.get_weights(), strict=True)):
        np.testing.assert_allclose(mine, other, rtol=10 * rtol, atol=10 * rtol, err_msg=kinds[0][place][0])
    arguments = {"batch_size": 8, "verbose": 0}
    np.testing.assert_allclose(ours.evaluate(x, y, **arguments), theirs.evaluate(x, y, **arguments), rtol=10 * rtol)
    metrics = ours.evaluate(x, y, return_dict=True, **arguments)
    assert set(metrics) == set(theirs.evaluate(x, y, return_dict=True, **arguments))
    np.testing.assert_allclose(
        ours.train_on_batch(x, y), theirs.train_on_batch(x, y), rtol=20 * rtol, err_msg="train_on_batch"
    )
