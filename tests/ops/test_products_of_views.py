"""Products whose factors and results are views of others, in every order: reshapes, transposes and slices."""

import itertools

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from tests.tolerances import assert_near

# They leave two or three axes; "reshape" gives a matrix the shape of its transpose.
VIEWS = {
    "reshape": lambda x: ops.reshape(x, (*x.shape[:-2], x.shape[-1], x.shape[-2])),
    "fold": lambda x: ops.reshape(x, (-1, x.shape[-1]) if x.ndim > 2 else (x.shape[0] // 2, 2, x.shape[-1])),
    "transpose": lambda x: ops.transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)),
    "slice": lambda x: x[..., ::2],
}
# The longest around one product each, since each is a kernel to compile; `test_policy.py` has all of three.
CHAINS = [chain for length in (1, 2) for chain in itertools.product(VIEWS, repeat=length)]
CHAINS += list(itertools.permutations(("reshape", "transpose", "slice")))


def viewed(x, chain):
    """Return a view of a view; a fold for which the rows are not even is left out."""
    for name in chain:
        if name != "fold" or x.ndim > 2 or x.shape[0] % 2 == 0:
            x = VIEWS[name](x)
    return x


def step_of(chains):
    """Return a step that computes products of views, views of these, and gradients in all factors."""

    def step(*inputs):
        x, y, left, right = inputs
        outputs = {}
        for number, chain in enumerate(chains):
            for of, batch in (("x", x), ("y", y)):
                factor = viewed(batch, chain)
                if (number + (of == "y")) % 2:
                    outputs[f"{of} {chain} first"] = viewed(factor @ right[: factor.shape[-1]], chain)
                else:
                    outputs[f"{of} {chain} second"] = viewed(left[:, : factor.shape[-2]] @ factor, chain)
        total = sum(ops.sum(output * output) for output in outputs.values())
        return outputs | {f"gradient {n}": gradient for n, gradient in enumerate(gradients(total, inputs))}

    return step


@pytest.mark.long
@pytest.mark.parametrize("part", range(2))
def test_views_around_products(cuda_backend, part):
    rng = np.random.default_rng(part)
    shapes = {"x": (4, 6, 8), "y": (12, 8), "left": (8, 192), "right": (192, 8)}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    specs = {name: (shape, "float32") for name, shape in shapes.items()}
    step = step_of(CHAINS[part::2])
    executable = cuda_backend.executable(trace(step, specs), values)
    executable.run()
    exact = trace(step, {name: (shape, "float64") for name, (shape, _) in specs.items()})
    expected, _ = evaluate(exact, values)
    wrong = []
    for name, value in expected.items():
        assert executable.outputs[name].shape == value.shape
        try:
            assert_near(executable.outputs[name], value, "float32", np.abs(value).max(initial=1))
        except AssertionError:
            wrong.append(name)
    assert not wrong


NETWORKS = {
    "permuted and flat": lambda: [layers.Permute((2, 1)), layers.Flatten(), layers.Dense(4)],
    "normalized": lambda: [layers.LayerNormalization(), layers.Permute((2, 1)), layers.Dense(4)],
    "normalized in between": lambda: [layers.Permute((2, 1)), layers.LayerNormalization(), layers.Dense(4, "tanh")],
    "permuted twice": lambda: [
        *(layers.Dense(5), layers.Permute((2, 1)), layers.LayerNormalization(), layers.Dense(3)),
        *(layers.Permute((2, 1)), layers.Reshape((5, 3)), layers.Dense(2)),
    ],
    "reshaped": lambda: [layers.Reshape((5, 6)), layers.Permute((2, 1)), layers.Reshape((5, 6)), layers.Dense(4)],
}


def networks_step(networks):
    """Return a step that gives what networks predict, and gradients."""

    def step(x):
        outputs = {name: network(x) for name, network in networks.items()}
        weights = [variable.value for network in networks.values() for variable in network.trainable_variables]
        total = sum(ops.sum(output * output) for output in outputs.values())
        return outputs | {f"gradient {n}": gradient for n, gradient in enumerate(gradients(total, [x, *weights]))}

    return step


@pytest.mark.long
def test_networks_that_permute(cuda_backend):
    dp.utils.set_random_seed(1)
    networks = {name: dp.Sequential([layers.Input((6, 5)), *make()]) for name, make in NETWORKS.items()}
    program = trace(networks_step(networks), {"x": ((Dim.rows(7), 6, 5), "float32")})
    x = np.random.default_rng(0).normal(size=(7, 6, 5)).astype(np.float32)
    executable = cuda_backend.executable(program, {"x": x})
    executable.run()
    expected, _ = evaluate(program, {"x": x})
    for name, value in expected.items():
        np.testing.assert_allclose(executable.outputs[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
