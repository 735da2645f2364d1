"""Letters of ops say what NumPy says: what is computed in parts along one and joined is the whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.errors import ConfigError
from dptrain.ops.common import broadcast_shape, elementwise, first_dtype
from dptrain.program.dims import Dim
from dptrain.program.op import Op
from dptrain.program.sharding.sharding_rule import names
from dptrain.program.tensor import OPS, Tensor, constant
from tests.sample import examples
from tests.unit.ops.cases import CASES, Case, normal
from tests.unit.program.parts import attributes_of_part, computed

MORE = {
    "add": [Case(normal(2, 3), normal(2, 3)), Case(normal(2, 1, 4), normal(3, 1)), Case(normal(), normal(2))],
    "reshape_to": [
        Case(normal(4, 6), shape=(4, 2, 3)),
        Case(normal(2, 3, 4), shape=(6, 4)),
        Case(normal(3, 4), shape=(1, 3, 1, 4)),
        Case(normal(2, 3, 2), shape=(2, 6)),
        Case(normal(0, 3, 5), shape=(0, 5, 3)),
    ],
    "broadcast_along": [Case(normal(3, 1), shape=(2, 3, 4)), Case(normal(1, 2), shape=(1, 2))],
    "full": [Case(shape=(3, 2, 4), value=1.5, dtype="float64")],
    "getitem": [Case(normal(4, 5, 6), key=((0, 4, 1), 2, (1, 6, 2))), Case(normal(4, 5), key=((0, 3, 1), (0, 5, 1)))],
    "put": [Case(normal(2, 4), key=((1, 3, 1), 0, (0, 4, 1)), shape=(4, 2, 4))],
    "transpose_to": [Case(normal(2, 3, 4), axes=(2, 0, 1))],
    "take_rows": [Case(normal(4, 3, 2), lambda rng: rng.integers(0, 4, (5, 2)))],
    "batch_matmul": [Case(normal(2, 1, 3, 4), normal(5, 4, 2)), Case(normal(3, 4), normal(2, 4, 5))],
}
ALL = [(name, case) for name in OPS for case in (*CASES[name], *MORE.get(name, ()))]


def made_of(name, case):
    """Return what an op makes of a case's inputs, with how it is made."""
    arrays = [make(np.random.default_rng(7)) for make in case.inputs]
    shape = OPS[name].shape(*(array.shape for array in arrays), **case.attributes)
    dtype = np.dtype(OPS[name].dtype(*(array.dtype for array in arrays), **case.attributes))
    return Tensor(OPS[name], [constant(array) for array in arrays], case.attributes, shape, dtype)


def resized(tensor, lengths):
    """Return the same op of operands with other lengths of its letters, whose values are among the operands'."""
    rule, rng = tensor.op.sharding_rule(tensor), np.random.default_rng(8)

    def shape(letters, old):
        return tuple(lengths.get(letter, n) for letter, n in zip(letters, old, strict=True))

    shapes = [shape(letters, operand.shape) for letters, operand in zip(rule.inputs, tensor.inputs, strict=True)]
    inputs = [
        constant(rng.choice(operand.numpy().reshape(-1), new) if operand.numpy().size else np.zeros(new, operand.dtype))
        for operand, new in zip(tensor.inputs, shapes, strict=True)
    ]
    out = shape(rule.output, tensor.shape)
    return Tensor(tensor.op, inputs, attributes_of_part(tensor, shapes, out), out, tensor.dtype)


def assert_parts_make_the_whole(tensor, letter, ends):
    """Compare an op with the same in parts that end at these places of a letter's axis."""
    rule = tensor.op.sharding_rule(tensor)
    arrays = [operand.numpy() for operand in tensor.inputs]
    expected = computed(tensor, arrays, tensor.shape)
    parts = []
    for start, stop in zip((0, *ends[:-1]), ends, strict=True):
        slices = [
            np.take(array, range(start, stop), letters.index(letter)) if letter in letters else array
            for array, letters in zip(arrays, rule.inputs, strict=True)
        ]
        out = tuple(
            stop - start if axis_letter == letter else n
            for axis_letter, n in zip(rule.output, tensor.shape, strict=True)
        )
        parts.append(computed(tensor, slices, out, start))
    if letter in rule.output:
        joined = np.concatenate(parts, rule.output.index(letter))
    else:
        joined = {"sum": np.sum, "max": np.max}[tensor.op.partial_reduce](parts, axis=0)
    np.testing.assert_allclose(joined, expected, rtol=1e-12, atol=1e-12, err_msg=f"{tensor.op.name}: {rule}, {letter}")


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_parts_along_a_letter_make_the_whole(data):
    name, case = data.draw(st.sampled_from(ALL))
    tensor = made_of(name, case)
    rule = tensor.op.sharding_rule(tensor)
    letters = sorted(
        {letter for tensor_letters in (*rule.inputs, rule.output) for letter in tensor_letters if letter.islower()}
    )
    tensor = resized(tensor, {letter: data.draw(st.integers(0, 6), label=f"length of {letter}") for letter in letters})
    rule = tensor.op.sharding_rule(tensor)
    for shape, tensor_letters in zip(
        [*(x.shape for x in tensor.inputs), tensor.shape], (*rule.inputs, rule.output), strict=True
    ):
        for letter, n in zip(tensor_letters, shape, strict=True):
            if letter.islower():
                cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=1, max_size=2), label=f"cuts of {letter}"))
                assert_parts_make_the_whole(tensor, letter, (*cuts, n))


@pytest.mark.parametrize("name", OPS)
def test_each_letter_of_every_op(name):
    for case in (*CASES[name], *MORE.get(name, ())):
        output = made_of(name, case)
        rule = output.op.sharding_rule(output)
        for letters, tensor in zip((*rule.inputs, rule.output), (*output.inputs, output), strict=True):
            for letter, n in zip(letters, tensor.shape, strict=True):
                if letter.islower():
                    assert_parts_make_the_whole(output, letter, (n // 3, n // 3, n))


def letters_of(name, *shapes, **attributes):
    inputs = [Tensor(None, (), {}, shape, np.dtype(np.float64)) for shape in shapes]
    shape = OPS[name].shape(*shapes, **attributes)
    return str(OPS[name].sharding_rule(Tensor(OPS[name], inputs, attributes, shape, np.dtype(np.float64))))


def test_letters_of_some_ops():
    n = Dim.rows(6)
    assert letters_of("batch_matmul", (2, 3), (3, 4)) == "xy,yz->xz"
    assert letters_of("batch_matmul", (5, 1, 2, 3), (4, 3, 2)) == "a1xy,byz->abxz"
    assert letters_of("add", (3, 1), (3, 4)) == "a1,ab->ab"
    assert letters_of("add", (Dim.rows(1), 4), (4,)) == "ab,b->ab"
    assert letters_of("add", (1, 4), (Dim.rows(1), 4)) == "1b,ab->ab"
    assert letters_of("reduce_sum", (2, 3, 4), axes=(0, 2), keepdims=True) == "abc->1b1"
    assert letters_of("argmax_along", (2, 3, 4), axis=1) == "aXb->ab"
    assert letters_of("reshape_to", (4, n, 3), shape=(4, n * 3)) == "abX->ab"
    assert letters_of("reshape_to", (n, 3), shape=(6, 3)) == "Xa->Xa"  # rows, of which nothing says that they are any
    assert letters_of("getitem", (2 * n, 3), key=((n, 2 * n, 1), (0, 2, 1))) == "aX->aX"
    assert letters_of("getitem", (n, 3), key=((0, 6, 1), (0, 3, 1))) == "Xb->Xb"
    assert letters_of("put", (n, 3), key=((0, n, 1), (0, 3, 1)), shape=(2 * n, 3)) == "ab->ab"
    assert letters_of("concatenate_along", (n, 3), (2 * n, 3), axis=0) == "ab,ab->ab"
    assert letters_of("concatenate_along", (n, 3), (1, 3), axis=0) == "Xb,Xb->Xb"


def test_more_axes_than_letters_must_be_whole():
    assert names(25) == "abcdefghijklmnopqrstuvwXX"


@pytest.mark.parametrize(
    ("letters", "fault"),
    [
        ("ab", "expected a letter for each axis of the operands and of the output, such as 'mk,kn->mn'"),
        ("a b->ab", "expected a letter for each"),
        (3, "expected a letter for each"),
        ("a,b->ab", "2 operands; expected 1"),
        ("aa->a", "'a' names two axes of one tensor"),
        ("a->aa", "'a' names two axes of one tensor"),
        ("a->ab", "no operand has the output's letter 'b'"),
    ],
)
def test_letters_are_checked_when_a_record_is_made(letters, fault):
    def cube(x, *, out):
        np.power(x, 3, out=out)

    with pytest.raises(ConfigError, match=f"op 'cube': letters = {letters!r}: {fault}"):
        Op(cube, broadcast_shape, letters, first_dtype)
    op = Op(cube, broadcast_shape, "aXX->a1", first_dtype)
    x = constant(np.zeros((2, 3)))
    with pytest.raises(ConfigError, match=r"'aXX->a1' for shapes \(2, 3\), \(2, 3\): expected one letter per axis"):
        op.sharding_rule(Tensor(op, [x], {}, (2, 3), x.dtype))


def test_functions_of_letters_are_checked_when_they_are_used():
    def cube(x, *, out):
        np.power(x, 3, out=out)

    x = constant(np.zeros((2, 3)))
    for letters, fault in (("aa->aa", "'a' names two axes"), (None, "expected a letter for each axis")):
        op = Op(cube, broadcast_shape, lambda shapes, out, attributes, rule=letters: rule, first_dtype)
        with pytest.raises(ConfigError, match=f"op 'cube': letters = {letters!r}: {fault}"):
            op.sharding_rule(Tensor(op, [x], {}, (2, 3), x.dtype))
    assert Op(cube, broadcast_shape, elementwise, first_dtype).sharding_rule(
        Tensor(OPS["relu"], [x], {}, (2, 3), x.dtype)
    ).inputs == ("ab",)
