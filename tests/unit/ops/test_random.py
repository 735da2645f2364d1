"""Random numbers of rows: the same on any number of ranks, others at every draw."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.ops import random
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.random import Purpose, stream
from tests.unit.program.virtual_ranks import run_on_ranks

ROWS = 11


@pytest.mark.parametrize("shards", [[11], [4, 4, 3], [0, 11], [5, 0, 1, 2, 3]], ids=str)
def test_the_same_on_any_number_of_ranks(shards):
    seed = random.SeedGenerator(7)

    def step(x):
        n = x.shape[0]
        noise = random.normal((n, 3), seed=seed)
        return {
            "noise": noise,
            "twice": random.uniform((2 * n, 2, 2), seed=seed),
            "dropped": random.dropout(x, 0.4, seed=seed),
            "whole": random.uniform((4,), seed=seed),
            "sum": ops.sum(noise),
        }

    seed.count.assign(5)
    program = trace(step, {"x": ((Dim.rows(ROWS), 3), "float64")})
    values = {"x": np.arange(ROWS * 3.0).reshape(ROWS, 3)}
    single_rank, state = evaluate(program, values)
    assert state == {seed.count: 5 + 4}
    per_rank, _ = run_on_ranks(place(program), values, shards, {"x": 0})
    for name in ("noise", "twice", "dropped"):
        np.testing.assert_array_equal(np.concatenate([outputs[name] for outputs, _ in per_rank]), single_rank[name])
    for outputs, updates in per_rank:
        np.testing.assert_array_equal(outputs["whole"], single_rank["whole"])
        np.testing.assert_allclose(outputs["sum"], single_rank["sum"], rtol=1e-5)
        assert updates == state


def test_every_draw_is_another():
    seed = random.SeedGenerator(0)
    first, second = (random.uniform((5, 3), seed=seed).numpy() for _ in range(2))
    assert not np.any(first == second)
    same_seed = random.SeedGenerator(0)
    np.testing.assert_array_equal(random.uniform((5, 3), seed=same_seed).numpy(), first)
    other = random.SeedGenerator(0, number=1)
    assert not np.any(random.uniform((5, 3), seed=other).numpy() == first)


def test_distributions():
    seed = random.SeedGenerator(1)
    uniform = random.uniform((200, 100), -1, 3, seed=seed).numpy()
    assert -1 <= uniform.min() < uniform.max() < 3
    assert abs(uniform.mean() - 1) < 0.03
    normal = random.normal((200, 100), 2, 0.5, "float64", seed=seed).numpy()
    assert abs(normal.mean() - 2) < 0.02
    assert abs(normal.std() - 0.5) < 0.02
    assert np.isfinite(normal).all()
    dropped = random.dropout(np.ones((200, 100)), 0.25, seed=seed).numpy()
    assert set(np.unique(dropped)) == {0, 1 / 0.75}
    assert abs(np.mean(dropped == 0) - 0.25) < 0.02


def test_dropout_has_the_bits_of_earlier_versions():
    """32 bits for each element, in blocks of eight that each row begins; kept from 0.3 of 2^32 on."""
    seed = random.SeedGenerator(9, purpose=Purpose.DROPOUT, number=4)
    seed.count.assign(6)
    bits = stream(9, Purpose.DROPOUT, 6, 4).bit_generator.random_raw(5 * 2 * 4)
    draws = bits.astype("<u8").view("<u4").reshape(5, 16)[:, :11]
    expected = (draws >= 0.3 * 2**32) * np.float32(1 / 0.7)
    np.testing.assert_array_equal(random.dropout(np.ones((5, 11), np.float32), 0.3, seed=seed).numpy(), expected)


def test_refused():
    seed = random.SeedGenerator(0)
    with pytest.raises(ConfigError, match=r"rate = 2: expected a number in \[0, 1\]"):
        random.dropout(np.ones(3), 2, seed=seed)
    with pytest.raises(ConfigError, match="rows of the batch must come first"):
        seed.bits((3, Dim.rows(4)))
    with pytest.raises(ConfigError, match="Received: seed=-1"):
        random.SeedGenerator(-1)


def test_parts_of_a_concatenation_draw_for_their_own_rows():
    """A rank's rows of such a tensor are not next to each other on one rank."""
    seed = random.SeedGenerator(3)

    def function(x):
        joined = ops.concatenate([x, 2 * x])
        noisy = joined + random.normal(joined.shape, seed=seed) + random.uniform(joined.shape, seed=7)
        return {"sum": ops.sum(noisy * noisy, axis=0), "dropped": ops.sum(random.dropout(joined, 0.5, seed=seed))}

    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    placed = place(trace(function, {"x": ((Dim.rows(8), 3), np.float32)}))
    single_rank, state = evaluate(placed, {"x": x})
    per_rank, _ = run_on_ranks(placed, {"x": x}, [3, 0, 5], {"x": 0})
    for outputs, updates in per_rank:
        for name, value in single_rank.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-6)
        assert updates == state


@pytest.mark.parametrize("alpha", [0.05, 0.4, 1.0, 4.0])
def test_gamma_and_beta(alpha):
    """Mean and variance are those of the distributions, to five standard errors."""
    number = 20_000
    draws = random.gamma((number,), alpha, "float64", seed=1).numpy()
    assert draws.min() >= 0
    assert draws.mean() == pytest.approx(alpha, abs=5 * (alpha / number) ** 0.5)
    fourth = 3 * alpha**2 + 6 * alpha
    assert draws.var() == pytest.approx(alpha, abs=5 * ((fourth - alpha**2) / number) ** 0.5)
    betas = random.beta((number,), alpha, 2 * alpha, "float64", seed=2).numpy()
    variance = 2 / 9 / (3 * alpha + 1)
    assert betas.mean() == pytest.approx(1 / 3, abs=5 * (variance / number) ** 0.5)
    assert betas.var() == pytest.approx(variance, rel=0.1)
    parts = random.dirichlet((number, 3), alpha, "float64", seed=3).numpy()
    np.testing.assert_allclose(parts.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(parts.mean(0), 1 / 3, atol=5 * (variance / number) ** 0.5)


def test_beta_of_tiny_shapes_is_0_or_1():
    """Where both numbers of the gamma distribution are below the least one."""
    draws = random.beta((1000,), 1e-6, 1e-6, seed=1).numpy()
    assert set(draws) == {0, 1}
    assert 400 < draws.sum() < 600


def test_gamma_of_tensors():
    shapes = np.array([0.5, 5, 50])
    draws = random.gamma((4000, 3), shapes, seed=5).numpy()
    np.testing.assert_allclose(draws.mean(0), shapes, rtol=0.1)


@pytest.mark.parametrize("shards", [[11], [4, 4, 3], [0, 11], [5, 0, 1, 2, 3]], ids=str)
def test_a_permutation_of_the_global_batch(shards):
    seed = random.SeedGenerator(7)

    def step(x):
        return dict(zip(("places", "order"), seed.permutation(x.shape[0]), strict=True))

    program = trace(step, {"x": ((Dim.rows(ROWS),), "float64")})
    assert program.shape_specialised
    values = {"x": np.zeros(ROWS)}
    single_rank, state = evaluate(program, values)
    assert single_rank["places"].tolist() == list(range(ROWS))
    assert sorted(single_rank["order"]) == list(range(ROWS))
    assert state == {seed.count: 1}
    second, _ = evaluate(program, values, state)
    assert sorted(second["order"]) == list(range(ROWS))
    assert second["order"].tolist() != single_rank["order"].tolist()
    per_rank, _ = run_on_ranks(place(program), values, shards, {"x": 0})
    for name in single_rank:
        np.testing.assert_array_equal(np.concatenate([outputs[name] for outputs, _ in per_rank]), single_rank[name])


@pytest.mark.parametrize("shards", [[11], [4, 0, 7]], ids=str)
def test_rows_side_by_side_in_a_random_order(shards):
    values = {"x": np.arange(float(sum(shards)))}

    def step(x):
        both = ops.concatenate([x, x + 100])
        numbers, order = seed.permutation(both.shape[0])
        shuffled = random.shuffle(both, seed=random.SeedGenerator(3))
        weights = np.sin(np.arange(2 * sum(shards)))
        products = [ops.sum(weights * part) for part in (ops.take(both, order, 0), numbers, order, shuffled)]
        return {str(number): product for number, product in enumerate(products)} | {"order": order}

    seed = random.SeedGenerator(7)
    program = trace(step, {"x": ((Dim.rows(sum(shards)),), "float64")})
    single_rank, _ = evaluate(program, values)
    assert sorted(single_rank["order"]) == list(range(2 * sum(shards)))
    for outputs, _ in run_on_ranks(place(program), values, shards, {"x": 0})[0]:
        for name, value in outputs.items():
            np.testing.assert_allclose(value, single_rank[name], rtol=1e-13, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("draw", "mean", "deviation"),
    [
        (lambda dtype: random.uniform((4000,), dtype=dtype, seed=1), 0.5, 12**-0.5),
        (lambda dtype: random.normal((4000,), 1.0, 2.0, dtype=dtype, seed=1), 1.0, 2.0),
        (lambda dtype: random.truncated_normal((4000,), 1.0, 2.0, dtype=dtype, seed=1), 1.0, 2 * 0.8796),
        (lambda dtype: random.gamma((4000,), 0.5, dtype=dtype, seed=1), 0.5, 0.5**0.5),
        (lambda dtype: random.beta((4000,), 0.5, 0.5, dtype=dtype, seed=1), 0.5, 8**-0.5),
        (lambda dtype: random.dirichlet((2000, 2), 0.5, dtype=dtype, seed=1), 0.5, 8**-0.5),
        (lambda dtype: random.binomial((4000,), 9, 0.25, dtype=dtype, seed=1), 2.25, (9 * 3 / 16) ** 0.5),
        (lambda dtype: random.binomial((4000,), 1000, 0.25, dtype=dtype, seed=1), 250, (1000 * 3 / 16) ** 0.5),
    ],
    ids=["uniform", "normal", "truncated_normal", "gamma", "beta", "dirichlet", "binomial", "many trials"],
)
def test_mean_and_deviation_in_every_type(draw, mean, deviation, dtype):
    draws = draw(dtype)
    assert draws.dtype.name == dtype
    values = draws.numpy().astype(np.float64)
    assert values.mean() == pytest.approx(mean, abs=4 * deviation / len(values) ** 0.5 + 2e-3 * mean)
    assert values.std() == pytest.approx(deviation, rel=0.06)


def test_truncated_numbers_are_within_two_deviations():
    draws = random.truncated_normal((4000,), 3.0, 2.0, seed=3).numpy()
    assert (draws.min() > -1, draws.max() < 7, draws.min() < 0) == (True, True, True)


def test_binomials_of_counts_and_probabilities_of_their_own():
    counts, probabilities = np.array([0, 1, 5, 300]), np.array([0.5, 1.0, 0.0, 1.0])
    draws = random.binomial((50, 4), counts, probabilities, seed=2).numpy()
    np.testing.assert_array_equal(draws, np.broadcast_to([0, 1, 0, 300], (50, 4)))


def test_classes_come_as_often_as_their_probabilities_say():
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]]) + 1e-30)
    draws = random.categorical(logits, 5000, seed=4)
    assert (draws.shape, draws.dtype.name) == ((2, 5000), "int32")
    shares = [np.bincount(row, minlength=3) / 5000 for row in draws.numpy()]
    np.testing.assert_allclose(shares, [[0.7, 0.2, 0.1], [0, 0.5, 0.5]], atol=0.03)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_shuffled_axis(axis):
    x = np.arange(24).reshape(4, 6)
    shuffled = random.shuffle(x, axis, seed=5).numpy()
    traced = trace(
        lambda y: {"y": random.shuffle(np.arange(24).reshape(4, 6) + 0 * y[0, 0], axis, seed=5)},
        {"y": ((4, 6), "int64")},
    )
    assert not np.array_equal(shuffled, x)
    np.testing.assert_array_equal(np.sort(shuffled, axis), x)
    np.testing.assert_array_equal(evaluate(traced, {"y": x})[0]["y"], shuffled)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: random.randint((2,), 0, 3, "float32"), "requires an integer `dtype`. Received: dtype=float32"),
        (lambda: random.categorical(np.zeros(3), 2), r"logits of shape \(3,\)"),
        (lambda: random.shuffle(np.zeros(3), 1), "axis"),
    ],
)
def test_draws_that_are_refused(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
