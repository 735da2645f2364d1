"""Sums in one fixed tree."""

import itertools

import numpy as np
import pytest

from dptrain.comm.node_sum import TreeSum


class Named(str):
    """What stands for a summand; a sum names both of its sides."""

    def __add__(self, other):
        return Named(f"({self!s}{other!s})")


def test_the_tree():
    def of(count):
        tree = TreeSum()
        for number in range(count):
            tree.add([np.array([Named(number)], object)])
        return tree.total()[0][0]

    assert [of(n) for n in (1, 2, 3, 4, 7)] == ["0", "(01)", "((01)2)", "((01)(23))", "(((01)(23))((45)6))"]
    assert of(8) == "(((01)(23))((45)(67)))"


def summed(numbers, first=0):
    tree = TreeSum(first)
    for number in numbers:
        tree.add([np.array([Named(f"{number} ")], object)])
    return tree


@pytest.mark.parametrize("count", range(1, 18))
def test_ranks_that_sum_their_parts_first_make_the_same_tree(count):
    """Wherever the summands are cut: each rank sends the complete subtrees of its own."""
    expected = summed(range(count)).total()[0][0]
    for first, second in itertools.combinations_with_replacement(range(count + 1), 2):
        whole = TreeSum()
        for start, stop in itertools.pairwise([0, first, second, count]):
            for size, subtree in summed(range(start, stop), start).subtrees:
                assert size & (size - 1) == 0
                whole.add(subtree, size)
        assert whole.total()[0][0] == expected
