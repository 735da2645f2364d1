"""`remat`: the gradient computes again what the function has computed on the way."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops, random
from dptrain.backend.cpu.compiled import CompiledExecutable, lowered, planned
from dptrain.backend.cuda.compose import Composition
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests.unit.program.virtual_ranks import run_on_ranks

ROWS, WIDTH, BLOCKS = 16, 8, 6
X = np.random.default_rng(1).normal(size=(ROWS, WIDTH))


def weights(dtype):
    rng = np.random.default_rng(0)
    return [Variable((rng.normal(size=(WIDTH, WIDTH)) / 3).astype(dtype), f"w{number}") for number in range(BLOCKS)]


def training(wrap, dtype="float64"):
    """Return the program of a loss and its gradients: blocks of several ops one after the other."""
    kernels = weights(dtype)

    def block(x, kernel, add):
        x = ops.tanh(x @ kernel) * ops.sigmoid(x)
        return {"y": ops.softmax(x) + x + add, "nothing": None}

    def step(x):
        for kernel in kernels:
            kernel._gradient = None
        y = x
        for number, kernel in enumerate(kernels):
            y = wrap(block)(y, kernel, add=number)["y"]
        loss = ops.mean(y * y)
        loss.backward()
        return {"loss": loss, **{kernel.name: kernel._gradient for kernel in kernels}}

    return trace(step, {"x": ((Dim.rows(ROWS), WIDTH), dtype)})


def test_gradients_are_the_same():
    plain, rematerialized = (evaluate(training(wrap), {"x": X})[0] for wrap in (lambda f: f, dp.remat))
    for name, value in plain.items():
        np.testing.assert_allclose(rematerialized[name], value, rtol=1e-12, atol=1e-15)
    program = place(training(dp.remat))
    compiled = CompiledExecutable(program, HostMemory(), {"x": X})
    compiled.run()
    of_ranks = run_on_ranks(program, {"x": X}, [9, 0, 7], {"x": 0})[0]
    for outputs in (compiled.outputs, *(outputs for outputs, _ in of_ranks)):
        for name, value in plain.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-11, atol=1e-14)


def test_it_takes_less_memory():
    sizes = []
    for wrap in (lambda f: f, dp.remat):
        program = place(training(wrap, "float32"))
        sizes.append((planned(*lowered(program), 1000)[1].size, Composition(program, 1000).plan.size))
    for plain, rematerialized in zip(*sizes, strict=True):
        assert rematerialized < 0.75 * plain


def test_random_numbers_and_what_is_assigned():
    """The same numbers are drawn again, and a variable is assigned once."""
    seed, count = random.SeedGenerator(3), Variable(np.float64(0), "count", trainable=False)
    kernel = Variable(np.ones(WIDTH), "kernel")

    @dp.remat
    def noisy(x):
        count.assign_add(ops.sum(x))
        return x * random.uniform(x.shape, seed=seed, dtype="float64") * kernel

    def step(x):
        kernel._gradient = None
        y = noisy(noisy(x))
        ops.sum(y).backward()
        return {"y": y, "gradient": kernel._gradient}

    outputs, updates = evaluate(trace(step, {"x": ((ROWS, WIDTH), np.float64)}), {"x": X})
    np.testing.assert_allclose(outputs["gradient"], 2 * outputs["y"].sum(0), rtol=1e-12)
    assert updates[count] == pytest.approx(X.sum() + (outputs["y"] / evaluate_draw(outputs, X)).sum(), rel=1e-9)


def evaluate_draw(outputs, x):
    """Return the second draw, by the first one's."""
    seed = random.SeedGenerator(3)
    first, second = (random.uniform(x.shape, seed=seed, dtype="float64").numpy() for _ in range(2))
    np.testing.assert_allclose(outputs["y"], x * first * second, rtol=1e-12)
    return second


def test_steps_of_a_loop():
    """A loop then stacks what its steps begin with, and no more."""
    kernel = Variable(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)) / 3, "kernel")
    stacks, results = [], []
    for wrap in (lambda f: f, dp.remat):

        def step(x, wrap=wrap):
            kernel._gradient = None
            cell = wrap(lambda h, part: ops.tanh(ops.sigmoid(h @ kernel) * ops.exp(-h * part) + part @ kernel))
            h = ops.scan(lambda h, part: (cell(h, part), None), x[0], x)[0]
            ops.sum(h * h).backward()
            return {"h": h, "gradient": kernel._gradient}

        program = trace(step, {"x": ((5, 4, WIDTH), np.float64)})
        stacks.append(
            sum(tensor.op is not None and tensor.op.name == "scan" and tensor.ndim == 3 for tensor in program.tensors)
        )
        results.append(evaluate(program, {"x": np.stack([X[:4]] * 5)})[0])
    assert stacks[1] < stacks[0]
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-11, atol=1e-14)


def test_layers_train_as_others():
    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = [layers.Dense(WIDTH, "gelu"), layers.BatchNormalization(), layers.Dropout(0.3, seed=5)]
            self.again = False

        def build(self, shape):
            for layer in self.inner:
                layer.build(shape)

        def run(self, x):
            for layer in self.inner:
                x = layer(x)
            return x

        def call(self, x, training=False):
            return (dp.remat(self.run) if self.again else self.run)(x)

    losses = []
    for recomputes in (False, True):
        dp.utils.set_random_seed(1)
        block = Block()
        block.again = recomputes
        model = dp.Sequential([layers.Input((WIDTH,)), block, layers.Dense(1)])
        model.compile("sgd", "mse")
        history = model.fit(X.astype(np.float32), X[:, :1], batch_size=4, epochs=3, verbose=0, shuffle=False)
        losses.append([*history.history["loss"], float(model.evaluate(X.astype(np.float32), X[:, :1], verbose=0))])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_masks_go_in_and_come_out():
    x = np.random.default_rng(0).integers(0, 3, (6, 5))
    losses = []
    for wrap in (lambda f: f, dp.remat):
        dp.utils.set_random_seed(1)
        inner = layers.LSTM(3, return_sequences=True)

        class Wrapped(layers.Layer):
            supports_masking = True

            def build(self, shape, inner=inner):
                self.inner = inner
                inner.build(shape)

            def call(self, x, wrap=wrap):
                return wrap(lambda x: self.inner(x))(x)

        model = dp.Sequential([layers.Input((5,)), layers.Embedding(3, 4, mask_zero=True), Wrapped(), layers.GRU(2)])
        model.compile("sgd", "mse")
        losses.append(model.fit(x, np.ones((6, 2)), batch_size=3, epochs=3, verbose=0, shuffle=False).history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_outside_of_a_trace_the_function_is_called():
    assert dp.remat(lambda x, factor: x * factor)(np.float32(2), factor=3) == 6
    y = dp.remat(lambda: ops.ones(2))()
    assert y.shape == (2,)
