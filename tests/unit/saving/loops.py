"""Models with loops in their predictions, which exported files hold as loops."""

from typing import Any

import numpy as np

import dptrain as dp
from dptrain import layers, ops, random
from dptrain.ops.loops import remat

RNG = np.random.default_rng(8)
STEPS, WIDTH = 6, 3
X = RNG.normal(size=(5, STEPS, WIDTH)).astype(np.float32)


class Own(layers.Layer):
    """A function of a batch of sequences, and of them with the steps first."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.seed, self.total = random.SeedGenerator(3), self.add_weight((WIDTH,), "ones", trainable=False, name="w")

    def call(self, x: Any) -> Any:
        return self.function(self, x, ops.transpose(x, (1, 0, 2)))


def several_values(layer: Any, x: Any, steps: Any) -> Any:
    """Carries change places, and what is stacked is read as well."""
    (a, b), (c, d) = ops.scan(lambda c, xt: ((c[1] + xt, ops.tanh(c[0])), (c[0], xt * c[1])), (x[:, 0], x[:, 1]), steps)
    return a + ops.sum(c, 0) * b + ops.max(d, 0)


def nested(layer: Any, x: Any, steps: Any) -> Any:
    def step(carry: Any, xt: Any) -> Any:
        inner, stacked = ops.scan(
            lambda a, b: (a * 0.5 + b, a * carry), carry, ops.stack([xt, carry, layer.total + xt])
        )
        return ops.tanh(inner), ops.fori_loop(0, 3, lambda n, a: a + ops.sum(stacked, 0) * ops.cast(n, a.dtype), inner)

    return ops.sum(ops.scan(step, x[:, 0], steps, reverse=True)[1], 0)


def counted(layer: Any, x: Any, steps: Any) -> Any:
    """A step assigns a variable."""

    def step(xt: Any) -> Any:
        layer.total.assign(layer.total * 0.5 + ops.sum(xt, 0))
        return xt * layer.total

    return ops.sum(ops.map(step, steps), 0)


def branches(layer: Any, x: Any, steps: Any) -> Any:
    """Each step takes a branch; a branch has a loop, and another branch."""

    def step(carry: Any, xt: Any) -> Any:
        def grows() -> Any:
            total, stacked = ops.scan(lambda a, b: (a * layer.total + b, ops.tanh(a)), carry, ops.stack([xt, carry]))
            return ops.cond(ops.max(total) > 1, lambda: total * 0.5, lambda: ops.sqrt(ops.absolute(total))), stacked[1]

        index = ops.cast(2 * ops.max(xt), "int32")
        chosen = ops.switch(index, [lambda: (carry - xt, xt), grows, lambda: (ops.sin(carry), xt * layer.total)])
        return chosen[0], chosen[1] + chosen[0]

    last, stacked = ops.scan(step, x[:, 0], steps)
    return ops.cond(ops.sum(x) > 0, lambda: last + stacked[0], lambda: ops.sum(ops.exp(stacked), 0) - last)


def gradient_of_a_branch(layer: Any, x: Any, steps: Any) -> Any:
    with dp.GradientTape() as tape:
        tape.watch(x)
        energy = ops.sum(ops.cond(ops.max(x) > 9, lambda: ops.sqrt(x), lambda: ops.sin(x * layer.total)))
    return tape.gradient(energy, x)


def gradient(layer: Any, x: Any, steps: Any) -> Any:
    """A loop backwards, with carries that begin as zeros."""
    with dp.GradientTape() as tape:
        tape.watch(x)
        energy = ops.sum(ops.scan(lambda c, xt: (ops.tanh(c * layer.total + xt), None), x[:, 0], steps)[0])
    return tape.gradient(energy, x)


LOOPS = {
    "several values": several_values,
    "nested": nested,
    "reversed": lambda layer, x, steps: ops.scan(lambda c, xt: (ops.tanh(c - xt), c), x[:, 0], steps, reverse=True)[1][
        1
    ],
    "none": lambda layer, x, steps: ops.scan(lambda c, xt: (c + xt, None), x[:, 0], steps[:0])[0] + 1,
    "single": lambda layer, x, steps: remat(lambda a: ops.tanh(a) * layer.total)(x),
    "without slices": lambda layer, x, steps: ops.scan(lambda c, _: (ops.sin(c + x), None), x, length=4)[0],
    "while": lambda layer, x, steps: ops.while_loop(
        lambda a: ops.max(a) < 9, lambda a: a * 2 + 0.1, (x[:, 0],), maximum_iterations=7
    )[0],
    "unbounded": lambda layer, x, steps: ops.while_loop(
        lambda n, a: ops.max(a) < 9, lambda n, a: (n + 1, a * 2 + layer.total), (0, x[:, 0])
    )[1],
    "of rows": lambda layer, x, steps: ops.scan(
        lambda c, xt: (c + xt / x.shape[0], ops.mean(c, 0)), ops.ones((x.shape[0], WIDTH), x.dtype), steps
    )[0],
    "random": lambda layer, x, steps: ops.sum(
        ops.map(lambda xt: xt * random.uniform(xt.shape, seed=layer.seed), steps), 0
    ),
    "on the host": lambda layer, x, steps: ops.sum(
        ops.map(lambda xt: xt @ ops.linalg.inv(ops.eye(WIDTH) + ops.transpose(xt) @ xt), steps), 0
    ),
    "counted": counted,
    "gradient": gradient,
    "branches": branches,
    "gradient of a branch": gradient_of_a_branch,
}
RECURRENT = {
    "LSTM": lambda: [layers.LSTM(4)],
    "GRU": lambda: [layers.GRU(4, return_sequences=True), layers.GRU(3, go_backwards=True)],
    "Bidirectional": lambda: [layers.Bidirectional(layers.LSTM(4, return_sequences=True)), layers.Dense(2)],
    "masks": lambda: [layers.Masking(), layers.LSTM(4, return_sequences=True), layers.SimpleRNN(3)],
}


def sequential(stack: list[Any], steps: int = STEPS) -> dp.Model:
    return dp.Sequential([layers.Input((steps, WIDTH)), *stack], seed=2)
