"""Lengths as data: what stays a dim, and who asks for the number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain import ops
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim, Size, bound, greatest, least, quotient, unknown
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.program.shapes import local
from dptrain.program.tensor import Tensor


def rows(number, scale=1):
    return Dim.rows(number, scale)


def asked(n):
    return n.size.asked


def test_what_is_proportional_is_a_dim_and_asks_for_nothing():
    n = rows(7)
    dims = (2 * n, n * 2, n + n, 2 * n - n, (4 * n) // 2, sum([n, n]), n + 0, quotient(n * 6, 3), least(n, 2 * n))
    assert [type(dim) for dim in dims] == [Dim] * 9
    assert local((2 * n, 3, n + n, 4 * n // 2 - n), 5) == (10, 3, 10, 5)
    assert (n - n, n * 0, (6 * n) % 3, (6 * n) // (2 * n)) == (0, 0, 0, 3)
    assert n >= 0
    assert not n < 0
    assert n <= 2 * n
    assert n != -1
    assert str(n) == "7"
    assert hash(n) == hash(rows(7))
    assert not asked(n)


@pytest.mark.parametrize(
    "ask",
    [
        *(int, float, bool, range, np.zeros, lambda n: n + 1, lambda n: 1 - n, lambda n: n // 2, lambda n: 3 // n),
        *(lambda n: n % 2, lambda n: n == 7, lambda n: n > 3, lambda n: n < 9, lambda n: n * n, lambda n: [0] * n),
    ],
)
def test_what_needs_the_number_gets_it(ask):
    n = rows(7)
    expected, actual = ask(7), ask(n)
    if not isinstance(actual, range):
        np.testing.assert_array_equal(actual, expected)
    assert asked(n)


@given(number=st.integers(0, 50), scale=st.integers(1, 9), other=st.integers(-9, 9))
def test_bound_it_computes_as_its_number(number, scale, other):
    n, plain = rows(number, scale), number * scale
    assert (n + other, other + n, n - other, other - n) == (plain + other, other + plain, plain - other, other - plain)
    assert (n * other, other * n) == (plain * other, other * plain)
    if other:
        assert (n // other, n % other) == (plain // other, plain % other)
    assert [n < other, n <= other, n > other, n >= other, n == other] == [
        *(plain < other, plain <= other, plain > other, plain >= other, plain == other)
    ]


def test_rows_of_another_batch_are_not_added_up():
    assert type(rows(7) + rows(8)) is int
    assert rows(7) != rows(8)


def test_it_is_a_tensor_where_it_enters_a_computation():
    for tensor in (1 / rows(4), rows(4) * 0.5, 0.5 + rows(4), np.float32(2) * rows(4), rows(4) / 2):
        assert isinstance(tensor, Tensor)

    def scaled(x):
        n = x.shape[0]
        return {"a": x / n, "b": ops.sum(x) * (1 / n), "c": x * n}

    program = trace(scaled, {"x": ((rows(4), 2), np.float32)})
    assert not program.shape_specialised
    x = np.ones((6, 2), np.float32)
    outputs = evaluate(program.for_rows(6), {"x": x})[0]
    np.testing.assert_allclose(outputs["a"], x / 6, rtol=1e-6)
    np.testing.assert_allclose(outputs["b"], 2, rtol=1e-6)
    np.testing.assert_allclose(outputs["c"], x * 6, rtol=1e-6)


def test_bound_to_nothing_it_reads_as_none():
    n, m = Dim.rows(), unknown()
    assert (n, 3) == (None, 3)
    assert str((n, 2 * m)) == "(None, None)"
    assert n != 5
    assert m != unknown()
    assert [type(dim) for dim in (n * m, n + m, n // 2, m % 2, 3 // m, -m, 1 - m, m + 1)] == [Dim] * 8
    assert (n * m * 4) // m == 4 * n
    assert (m + 1 - m, m - m, (2 * m + 4) // 2 - m) == (1, 0, 2)
    for ask in (int, float, bool, range, lambda n: n > 3):
        with pytest.raises(ConfigError, match="not known outside a step"):
            ask(m)


@given(number=st.integers(1, 40), by=st.integers(1, 7), shift=st.integers(-3, 3))
def test_expressions_are_computed_when_names_are_known(number, by, shift):
    n = Dim("n")
    dims = [n * by + shift, (n + shift) // by, n % by, least(n, by), greatest(n + shift, by), n * n, by // n, -n]
    plain = [number * by + shift, (number + shift) // by, number % by, min(number, by), max(number + shift, by)]
    plain += [number * number, by // number, -number]
    assert [bound(dim, {"n": number}) for dim in dims] == plain
    size = Size(number)
    assert bound((2 * n, 3), {"n": Dim("n", size=size)}) == (2 * number, 3)


def test_a_length_that_does_not_go_is_refused_when_it_is_known():
    with pytest.raises(ConfigError, match="impossible shape"):
        bound(quotient(Dim("n") * 3, 4), {"n": 5})
