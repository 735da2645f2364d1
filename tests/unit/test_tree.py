"""Keras' functions of nested data."""

from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain import tree
from dptrain.errors import ConfigError

Pair = namedtuple("Pair", "left right")
NESTED = {"b": [1, (2, None)], "a": Pair(3, deque([4]))}


def test_dictionaries_are_gone_through_by_key_and_none_is_a_leaf():
    assert tree.flatten(NESTED) == [3, 4, 1, 2, None]
    assert tree.flatten(OrderedDict(b=1, a=2)) == [1, 2]
    assert tree.flatten(5) == [5]
    assert tree.flatten_with_path(NESTED)[1:3] == [(("a", 1, 0), 4), (("b", 0), 1)]


def test_containers_stay_what_they_are():
    negated = tree.map_structure(lambda leaf: leaf and -leaf, NESTED)
    assert negated == {"b": [-1, (-2, None)], "a": Pair(-3, deque([-4]))}
    assert list(negated) == ["b", "a"]
    assert type(tree.map_structure(str, defaultdict(int, a=1))) is defaultdict
    assert tree.map_structure(str, [None, 1], none_is_leaf=False) == [None, "1"]


def test_several_structures_are_mapped_together():
    assert tree.map_structure(lambda x, y: x + y, [1, {"a": 2}], [10, {"a": 20}]) == [11, {"a": 22}]
    assert tree.map_structure_up_to([0, 0], sum, [[1, 2], (3, 4)]) == [3, 7]


@pytest.mark.parametrize("other", [[1], (1, 2), [1, [2]], {"a": 1}, 1])
def test_what_is_nested_otherwise_is_refused(other):
    with pytest.raises(ConfigError, match="don't have the same nested structure"):
        tree.map_structure(max, [1, 2], other)
    with pytest.raises(ValueError, match="same nested structure"):
        tree.assert_same_structure(other, [1, 2])


def test_paths_do_not_ask_for_the_container():
    tree.assert_same_paths([1, (2, 3)], (4, [5, 6]))
    with pytest.raises(ConfigError, match=r"missing in `b`: \{\(1,\)\}"):
        tree.assert_same_paths([1, 2], [1])


def test_traversals():
    visited = []
    tree.traverse(visited.append, [(1, 2), 3])
    assert visited == [[(1, 2), 3], (1, 2), 1, 2, 3]
    visited.clear()
    tree.traverse(visited.append, [(1, 2), 3], top_down=False)
    assert visited == [1, 2, (1, 2), 3, [(1, 2), 3]]
    assert tree.traverse(lambda node: "pair" if isinstance(node, tuple) else None, [(1, 2), 3]) == ["pair", 3]
    assert tree.traverse(lambda node: tree.MAP_TO_NONE if node == 3 else None, [1, 3]) == [1, None]
    assert tree.lists_to_tuples([[1, 2], {"a": [3]}]) == ((1, 2), {"a": (3,)})


def test_shapes_are_leaves():
    assert tree.map_shape_structure(len, {"a": (None, 3), "b": [(2,), (1, 2, 3)]}) == {"a": 2, "b": [1, 3]}


nested = st.recursive(
    st.none() | st.integers(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)


@given(nested)
def test_what_is_flattened_comes_back(structure):
    leaves = tree.flatten(structure)
    assert tree.pack_sequence_as(structure, leaves) == structure
    assert [leaf for _, leaf in tree.flatten_with_path(structure)] == leaves
    tree.assert_same_structure(structure, tree.map_structure(str, structure))
    with pytest.raises(ConfigError, match="leaves, but flat_sequence has"):
        tree.pack_sequence_as(structure, [*leaves, 1])
