"""Sums in one fixed tree."""

import numpy as np

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
