"""An axis counted from the end is the same axis, in each argument of each op that takes one."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.tree import leaves
from tests.unit.models.operation_cases import CASES, SAMPLES

AXES = {"axis", "axes", "axis1", "axis2", "axisa", "axisb", "axisc", "source", "destination", "spatial_dims"}
ROOMS = {"": ops, "image": ops.image, "linalg": ops.linalg, "nn": ops.nn, "numpy": ops.numpy}
# Their axes are those of the result, which has more of them than the first argument.
INSERTING = {"expand_dims", "geomspace", "linspace", "logspace", "multi_hot", "one_hot", "stack"}
# A number of axes.
COUNTING = {"tensordot"}
RNG = np.random.default_rng(3)
X, TARGETS = RNG.normal(size=(2, 3, 4)), RNG.dirichlet(np.ones(3), (2, 4)).transpose(0, 2, 1)
# What has no case with an axis.
OTHERS: dict[str, Callable[[Any], Any]] = {
    "argpartition": lambda o: o.argpartition(X, 1, axis=1),
    "associative_scan": lambda o: o.associative_scan(lambda a, b: a + b, X, axis=1),
    "categorical_crossentropy": lambda o: o.categorical_crossentropy(TARGETS, TARGETS[::-1] + 0.01, axis=1),
    "cross": lambda o: o.cross(X, X.transpose(1, 0, 2) + 1, axisa=1, axisb=0, axisc=1),
    "cross over one axis": lambda o: o.cross(X, X + 1, axis=1),
    "geomspace": lambda o: o.geomspace(X[0] ** 2 + 1, X[1] ** 2 + 1, 5, axis=1),
    "linspace": lambda o: o.linspace(X[0], X[1], 5, axis=1),
    "logspace": lambda o: o.logspace(X[0], X[1], 5, axis=1),
    "multi_hot": lambda o: o.multi_hot(np.array([[0, 2], [1, 1], [3, 0]]), 4, axis=2),
    "scale_and_translate": lambda o: o.image.scale_and_translate(X, (2, 5, 2), [2.0, 0.5], [0.5, 0], (1, 2), "cubic"),
    "scale_and_translate in another order": lambda o: o.image.scale_and_translate(
        X, (3, 3, 8), [2.0, 1.5], [0.5, 0], (2, 0), "linear"
    ),
    "sparse_categorical_crossentropy": lambda o: o.sparse_categorical_crossentropy(
        np.array([[0, 1, 2, 1], [2, 2, 0, 0]]), TARGETS, axis=1
    ),
    "unique": lambda o: o.unique(np.array([[1, 2, 1], [3, 3, 3]]), axis=1),
    "softmax over all": lambda o: o.softmax(X, axis=(0, 2)),
    "flip of two": lambda o: o.flip(X, axis=(0, 2)),
}


def with_axes() -> set[str]:
    """Return the ops that have an argument of such a name."""
    names = set()
    for room in ROOMS.values():
        for name, function in vars(room).items():
            is_public = inspect.isfunction(function) and not name.startswith("_")
            if is_public and AXES & inspect.signature(function).parameters.keys():
                names.add(name)
    return names


class Recording:
    """Ops that note the calls in which an axis is named."""

    def __init__(self, room: Any, calls: list[tuple[str, Callable[..., Any], dict[str, Any]]]) -> None:
        self._room, self._calls = room, calls

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._room, name)
        if inspect.ismodule(function):
            return Recording(function, self._calls)
        if not inspect.isfunction(function):
            return function

        def call(*arguments: Any, **keywords: Any) -> Any:
            bound = inspect.signature(function).bind(*arguments, **keywords).arguments
            if AXES & bound.keys():
                self._calls.append((name, function, bound | bound.pop("kwargs", {})))
            return function(*arguments, **keywords)

        return call


def calls() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    recorded: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []
    for case in CASES.values():
        case(Recording(ops, recorded), SimpleNamespace(**SAMPLES))
    for other in OTHERS.values():
        other(Recording(ops, recorded))
    return iter(recorded)


def rank_of(name: str, arguments: Mapping[str, Any]) -> int:
    """Return the number of axes that an axis counts."""
    first = next(iter(arguments.values()))
    if name in ("associative_scan", "categorical_crossentropy", "sparse_categorical_crossentropy"):
        first = list(arguments.values())[1]
    first = first[0] if isinstance(first, list | tuple) else first
    return np.ndim(first) + (np.size(arguments["axis"]) if name in INSERTING else 0)


def turned(axis: Any, rank: int) -> Any:
    """Return axes counted from the other end."""
    if isinstance(axis, list | tuple):
        return type(axis)(turned(each, rank) for each in axis)
    return axis - rank if axis >= 0 else axis + rank


CALLS = [call for call in calls() if call[0] not in COUNTING]


def test_each_op_with_an_axis_is_called_with_one():
    assert with_axes() - COUNTING - {"op"} == {name for name, *_ in CALLS}


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:Mean of empty", "ignore:Degrees")
@pytest.mark.parametrize("name", sorted({name for name, *_ in CALLS}))
def test_an_axis_from_the_end_is_the_same_axis(name):
    for _, function, arguments in (call for call in CALLS if call[0] == name):
        expected = [np.asarray(leaf) for leaf in leaves(function(**arguments))]
        for argument in AXES & arguments.keys():
            if arguments[argument] is None:
                continue
            changed = arguments | {argument: turned(arguments[argument], rank_of(name, arguments))}
            results = [np.asarray(leaf) for leaf in leaves(function(**changed))]
            for result, value in zip(results, expected, strict=True):
                np.testing.assert_array_equal(result, value, err_msg=f"{argument} = {changed[argument]}")
