"""The vector ops that optimizers are made of, the way of the gradients through them, and a rule of a user's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain import optimizers
from dptrain.backend.base import Backend, Buffer
from dptrain.initializers import Zeros
from dptrain.optimizers import OPTIMIZERS, Optimizer, Update, Updater
from dptrain.params import ParamLayout, ParamSpec
from tests.ops.conftest import poisoned
from tests.ops.test_ops import FLAT_SIZES, SEEDS, draw, relaxed
from tests.tolerances import assert_near

SIZES = st.sampled_from([1, 2, 31, 255, 256, 257, 1000])
BINARY = {"multiply": np.multiply, "divide": np.divide, "maximum": np.maximum, "minimum": np.minimum}
UNARY = {"absolute": np.absolute, "sign": np.sign}


def near(ops: Backend, actual: Buffer, reference: np.ndarray) -> None:
    assert_near(ops.download(actual), reference, ops.dtype, scale=float(np.abs(reference).max()))


def written(ops: Backend, values: list[float] | np.ndarray) -> Buffer:
    buffer = ops.empty((len(values),))
    ops.write(buffer, np.asarray(values, ops.dtype))
    return buffer


@relaxed
@given(P=SIZES, seed=SEEDS, a=st.sampled_from([0.0, 1.0, -0.3]), b=st.sampled_from([1.0, 0.0, 1e-3]))
def test_axpby(ops, P, seed, a, b):
    x, x64 = draw(ops, seed, P)
    y, y64 = draw(ops, seed + 1, P)
    out = poisoned(ops, (P,))
    ops.axpby(a, x, b, y, out)
    near(ops, out, a * x64 + b * y64)
    for operand in (x, y):
        first, second = ops.empty((P,)), ops.empty((P,))
        ops.copy(x, first)
        ops.copy(y, second)
        target = first if operand is x else second
        ops.axpby(a, first, b, second, target)
        near(ops, target, a * x64 + b * y64)
    ops.axpby(a, x, b, x, x)
    near(ops, x, (a + b) * x64)


@pytest.mark.parametrize("P", FLAT_SIZES)
def test_axpby_of_large_buffers(ops, P):
    x, x64 = draw(ops, 1, P)
    y, y64 = draw(ops, 2, P)
    ops.axpby(0.5, x, -2.0, y, y)
    near(ops, y, 0.5 * x64 - 2 * y64)


@relaxed
@given(P=SIZES, seed=SEEDS)
@pytest.mark.parametrize("op", BINARY)
def test_ops_of_two_buffers(ops, op, P, seed):
    a, a64 = draw(ops, seed, P)
    b, b64 = draw(ops, seed + 1, P)
    out = poisoned(ops, (P,))
    getattr(ops, op)(a, b, out)
    near(ops, out, BINARY[op](a64, b64))
    getattr(ops, op)(a, b[:1], out)
    near(ops, out, BINARY[op](a64, b64[0]))
    getattr(ops, op)(a, b, b)
    near(ops, b, BINARY[op](a64, b64))
    getattr(ops, op)(a, out, a)
    near(ops, a, BINARY[op](a64, BINARY[op](a64, b64[0])))


@relaxed
@given(P=SIZES, seed=SEEDS)
def test_ops_of_one_buffer(ops, P, seed):
    x, x64 = draw(ops, seed, P)
    for op, reference in UNARY.items():
        out = poisoned(ops, (P,))
        getattr(ops, op)(x, out)
        near(ops, out, reference(x64))
    out = poisoned(ops, (P,))
    ops.clip(x, -0.5, 0.25, out)
    assert_near(ops.download(out), np.clip(x64, -0.5, 0.25), ops.dtype)
    ops.multiply(x, x, x)
    ops.sqrt(x, out)
    near(ops, out, np.abs(x64))
    ops.sqrt(x, x)
    near(ops, x, np.abs(x64))


def test_values_at_the_edges(ops):
    """What is no number stays none; zeros have no sign; limits themselves are not changed."""
    inf, nan = np.inf, np.nan
    x, y = written(ops, [nan, 1, -inf, 0, 2, -3]), written(ops, [1, nan, 0, -0.0, inf, -3])
    out = ops.empty((6,))
    found = {}
    for op in ("maximum", "minimum", "divide"):
        getattr(ops, op)(x, y, out)
        found[op] = ops.download(out)
    for op in ("sign", "absolute", "sqrt"):
        getattr(ops, op)(x, out)
        found[op] = ops.download(out)
    ops.clip(x, -3, 2, out)
    np.testing.assert_array_equal(found["maximum"], [nan, nan, 0, 0, inf, -3])
    np.testing.assert_array_equal(found["minimum"], [nan, nan, -inf, 0, 2, -3])
    np.testing.assert_array_equal(found["divide"], [nan, nan, -inf, nan, 0, 1])
    np.testing.assert_array_equal(found["sign"], [nan, 1, -1, 0, 1, -1])
    np.testing.assert_array_equal(found["absolute"], [nan, 1, inf, 0, 2, 3])
    np.testing.assert_array_equal(found["sqrt"], np.sqrt(np.array([nan, 1, nan, 0, 2, nan], ops.dtype)))
    np.testing.assert_array_equal(ops.download(out), [nan, 1, -3, 0, 2, -3])


def test_clip_divisors(ops):
    squares = ops.zeros((7,), np.float64)
    ops.write(squares, np.array([0.0, 16.0, 15.9, 64.0, np.inf, np.nan, 1e60]))
    divisors = poisoned(ops, (7,))
    ops.clip_divisors(squares, written(ops, [8.0]), 0.5, divisors)  # norms of 0, 0.5, just below, 1, ...
    np.testing.assert_allclose(ops.download(divisors), [8, 8, 8, 16, np.nan, np.nan, 2e30], rtol=1e-6)


class Lion(Optimizer):
    """Steps of one size, in the direction of a mean's sign: X. Chen and others, arXiv:2302.06675."""

    slots = ("momentum",)
    scratch = 1

    def __init__(self, learning_rate: float = 0.001, beta_1: float = 0.9, beta_2: float = 0.99, **options) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1, self.beta_2 = beta_1, beta_2

    def update_step(self, update: Update) -> None:
        ops, (direction,), m = update.ops, update.scratch, update.slots["momentum"]
        ops.axpby(self.beta_1, m, 1 - self.beta_1, update.grads, direction)
        ops.sign(direction, direction)
        ops.axpby(-update.learning_rate, direction, 1, update.params, update.params)
        ops.axpby(self.beta_2, m, 1 - self.beta_2, update.grads, m)


class Nadam(Optimizer):
    """Adam with Nesterov's momentum, without a schedule of it: T. Dozat, ICLR 2016 workshop."""

    slots = ("momentum", "velocity")

    def update_step(self, update: Update) -> None:
        ops, g, t = update.ops, update.grads, update.iteration
        m, v = update.slots["momentum"], update.slots["velocity"]
        ops.axpby(0.1, g, 0.9, m, m)
        ops.multiply(g, g, g)
        ops.axpby(0.001, g, 0.999, v, v)
        ops.affine(v, 1 / (1 - 0.999**t), 0, g)
        ops.sqrt(g, g)
        ops.affine(g, 1, 1e-7, g)
        ops.divide(m, g, g)
        ops.axpby(-update.learning_rate / (1 - 0.9**t), g, 1, update.params, update.params)


LAYOUT = ParamLayout(
    [
        ("a/kernel", ParamSpec("kernel", (13, 7), Zeros())),
        ("a/bias", ParamSpec("bias", (7,), Zeros())),
        ("b/kernel", ParamSpec("kernel", (7, 64), Zeros())),
        ("b/bias", ParamSpec("bias", (64,), Zeros())),
    ]
)


def steps(ops: Backend, optimizer: Optimizer, count: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Return parameters as the optimizer left them, and the same as one on NumPy float64 leaves them."""
    from dptrain.backend.cpu.backend import NumpyBackend

    results = []
    for one in (ops, NumpyBackend(np.float64)):
        p, _ = padded(one, 0)
        slots = {name: one.zeros((LAYOUT.size,)) for name in optimizer.all_slots}
        scratch = [poisoned(one, (LAYOUT.size,)) for _ in range(optimizer.scratch)]
        updater = Updater(one, optimizer, LAYOUT.entries, slots, scratch)
        for step in range(count):
            with one.step_scope():
                updater.apply(p, padded(one, 1 + step, 10 * step)[0], written(one, [5.0 + step]))
        results.append(one.download(p))
        inside = np.zeros(LAYOUT.size, bool)
        for entry in LAYOUT.entries:
            entry.view(inside)[...] = True
        assert not results[-1][~inside].any(), "gaps stay zero"
    return results[0], results[1]


def padded(ops: Backend, seed: int, scale: float = 1.0) -> tuple[Buffer, np.ndarray]:
    """Return a flat buffer of random parameters with zeros between them."""
    host, rng = np.zeros(LAYOUT.size), np.random.default_rng(seed)
    for entry in LAYOUT.entries:
        entry.view(host)[...] = (rng.standard_normal(entry.shape) * scale).astype(np.float32)
    return written(ops, host), host


OWN = {
    "sgd": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "rmsprop": [{}, {"momentum": 0.9}, {"centered": True}, {"momentum": 0.5, "centered": True}],
    "adam": [{}, {"amsgrad": True}],
    "adamw": [{}],
}
COMMON = [
    {},
    {"weight_decay": 0.1},
    {"clipnorm": 1.5},
    {"clipvalue": 0.3},
    {"global_clipnorm": 2.0, "weight_decay": 0.1},
    {"global_clipnorm": 2.0, "gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 3},
]


@pytest.mark.parametrize("common", COMMON, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates(ops, name, common):
    for own in OWN[name]:
        optimizer = OPTIMIZERS[name](0.01, **own, **common)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        assert_near(*steps(ops, optimizer), ops.dtype)


@pytest.mark.parametrize("optimizer", [Lion(0.01), Lion(0.01, clipnorm=0.5), Nadam(0.01), Nadam(0.01, clipvalue=0.5)])
def test_updates_of_a_users_own(ops, optimizer):
    assert_near(*steps(ops, optimizer), ops.dtype)


def test_lion_by_hand(ops):
    p, g = ops.zeros((LAYOUT.size,)), ops.zeros((LAYOUT.size,))
    ops.fill(g[:3], 4.0)
    ops.fill(g[1:2], -0.5)
    optimizer = Lion(0.125)
    slots = {"momentum": ops.zeros((LAYOUT.size,))}
    Updater(ops, optimizer, LAYOUT.entries, slots, [ops.empty((LAYOUT.size,))]).apply(p, g, written(ops, [2.0]))
    assert ops.download(p)[:4].tolist() == [-0.125, 0.125, -0.125, 0.0]
    assert_near(ops.download(slots["momentum"])[:4], [0.02, -0.0025, 0.02, 0.0], ops.dtype)


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_clipping_hides_no_divergence(ops, clip, bad):
    """An infinite element may be clipped to a finite one where it is clipped alone, as in Keras."""
    p, host = ops.zeros((LAYOUT.size,)), np.zeros(LAYOUT.size)
    host[3], host[-1] = bad, 1
    optimizer = optimizers.SGD(0.5, **{clip: 1.0})
    Updater(ops, optimizer, LAYOUT.entries, {}, []).apply(p, written(ops, host), written(ops, [1.0]))
    found = ops.download(p)
    if clip == "clipvalue" and bad == np.inf:
        assert found[3] == -0.5
    else:
        assert np.isnan(found[3])
    assert np.isnan(found[-1]) if clip == "global_clipnorm" else found[-1] == -0.5
