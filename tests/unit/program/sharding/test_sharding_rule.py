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
    shape = OPS[name].shape(*(one.shape for one in arrays), **case.attributes)
    dtype = np.dtype(OPS[name].dtype(*(one.dtype for one in arrays), **case.attributes))
    return Tensor(OPS[name], [constant(one) for one in arrays], case.attributes, shape, dtype)


def resized(made, lengths):
    """Return the same op of operands with other lengths of its letters, whose values are among the operands'."""
    named, rng = made.op.sharding_rule(made), np.random.default_rng(8)

    def shape(letters, old):
        return tuple(lengths.get(letter, n) for letter, n in zip(letters, old, strict=True))

    shapes = [shape(letters, one.shape) for letters, one in zip(named.inputs, made.inputs, strict=True)]
    inputs = [
        constant(rng.choice(one.numpy().reshape(-1), new) if one.numpy().size else np.zeros(new, one.dtype))
        for one, new in zip(made.inputs, shapes, strict=True)
    ]
    out = shape(named.output, made.shape)
    return Tensor(made.op, inputs, attributes_of_part(made, shapes, out), out, made.dtype)


def assert_parts_make_the_whole(made, letter, ends):
    """Compare an op with the same in parts that end at these places of a letter's axis."""
    named = made.op.sharding_rule(made)
    arrays = [one.numpy() for one in made.inputs]
    whole = computed(made, arrays, made.shape)
    parts = []
    for start, stop in zip((0, *ends[:-1]), ends, strict=True):
        own = [
            np.take(array, range(start, stop), letters.index(letter)) if letter in letters else array
            for array, letters in zip(arrays, named.inputs, strict=True)
        ]
        out = tuple(stop - start if one == letter else n for one, n in zip(named.output, made.shape, strict=True))
        parts.append(computed(made, own, out, start))
    if letter in named.output:
        joined = np.concatenate(parts, named.output.index(letter))
    else:
        joined = {"sum": np.sum, "max": np.max}[made.op.partial_reduce](parts, axis=0)
    np.testing.assert_allclose(joined, whole, rtol=1e-12, atol=1e-12, err_msg=f"{made.op.name}: {named}, {letter}")


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_parts_along_a_letter_make_the_whole(data):
    name, case = data.draw(st.sampled_from(ALL))
    made = made_of(name, case)
    named = made.op.sharding_rule(made)
    letters = sorted({letter for one in (*named.inputs, named.output) for letter in one if letter.islower()})
    made = resized(made, {letter: data.draw(st.integers(0, 6), label=f"length of {letter}") for letter in letters})
    named = made.op.sharding_rule(made)
    for shape, one in zip([*(x.shape for x in made.inputs), made.shape], (*named.inputs, named.output), strict=True):
        for letter, n in zip(one, shape, strict=True):
            if letter.islower():
                cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=1, max_size=2), label=f"cuts of {letter}"))
                assert_parts_make_the_whole(made, letter, (*cuts, n))


@pytest.mark.parametrize("name", OPS)
def test_each_letter_of_every_op(name):
    for case in (*CASES[name], *MORE.get(name, ())):
        made = made_of(name, case)
        named = made.op.sharding_rule(made)
        for letters, tensor in zip((*named.inputs, named.output), (*made.inputs, made), strict=True):
            for letter, n in zip(letters, tensor.shape, strict=True):
                if letter.islower():
                    assert_parts_make_the_whole(made, letter, (n // 3, n // 3, n))


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
        ("ab", "expected those of each operand's axes and of the output's, such as 'mk,kn->mn'"),
        ("a b->ab", "expected those of each"),
        (3, "expected those of each"),
        ("a,b->ab", "2 operands; expected 1"),
        ("aa->a", "'a' names two axes of one tensor"),
        ("a->aa", "'a' names two axes of one tensor"),
        ("a->ab", "no operand has the output's 'b'"),
    ],
)
def test_letters_are_checked_when_a_record_is_made(letters, fault):
    def cube(x, *, out):
        np.power(x, 3, out=out)

    with pytest.raises(ConfigError, match=f"op 'cube': letters = {letters!r}: {fault}"):
        Op(cube, broadcast_shape, letters, first_dtype)
    made = Op(cube, broadcast_shape, "aXX->a1", first_dtype)
    x = constant(np.zeros((2, 3)))
    with pytest.raises(ConfigError, match=r"'aXX->a1' for shapes \(2, 3\), \(2, 3\): expected one an axis"):
        made.sharding_rule(Tensor(made, [x], {}, (2, 3), x.dtype))


def test_functions_of_letters_are_checked_when_they_are_used():
    def cube(x, *, out):
        np.power(x, 3, out=out)

    x = constant(np.zeros((2, 3)))
    for letters, fault in (("aa->aa", "'a' names two axes"), (None, "expected those of each operand's axes")):
        made = Op(cube, broadcast_shape, lambda shapes, out, attributes, given=letters: given, first_dtype)
        with pytest.raises(ConfigError, match=f"op 'cube': letters = {letters!r}: {fault}"):
            made.sharding_rule(Tensor(made, [x], {}, (2, 3), x.dtype))
    assert Op(cube, broadcast_shape, elementwise, first_dtype).sharding_rule(
        Tensor(OPS["relu"], [x], {}, (2, 3), x.dtype)
    ).inputs == ("ab",)
