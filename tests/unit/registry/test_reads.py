"""Plain attributes that are read, and whether they are what they were."""

import copy
import functools
import threading
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from dptrain.registry.reads import Readable, Reads, noting


class Thing(Readable):
    of_class = 1.5

    def __init__(self, value) -> None:
        self.value, self.other, self.calls = value, 7, 0

    @property
    def twice(self):
        return self.value * 2

    def use(self) -> None:
        self.calls += 1
        assert self.twice is not None


def read(thing: Thing, *names: str) -> Reads:
    reads = Reads()
    with noting(reads):
        for name in names:
            getattr(thing, name)
    return reads


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1.0, 2.0),
        (1, 1.0),
        (0.0, -0.0),
        (True, 1),
        ("a", "b"),
        (None, 0.5),
        (max, min),
        ([1, {"a": 2.0}], [1, {"a": 3.0}]),
        ({"a": (1, 2)}, {"b": (1, 2)}),
        (np.float32(1), np.float32(2)),
        (np.zeros(3), np.ones(3)),
        (np.zeros(3), np.zeros(4)),
    ],
)
def test_another_value_is_told_from_the_same(before, after):
    thing = Thing(before)
    reads = read(thing, "value")
    thing.value = copy.deepcopy(before)
    assert reads.hold
    thing.value = after
    owner, name, _, now = reads.changed()
    assert (owner, name, now is after) == (thing, "value", True)


def test_a_nan_is_the_same():
    thing = Thing(float("nan"))
    reads = read(thing, "value")
    thing.value = float("nan")
    assert reads.hold


def test_what_is_changed_in_place_and_what_a_property_reads():
    thing = Thing([1.0, [2.0]])
    reads = read(thing, "twice")
    assert reads.hold
    thing.value[1].append(3.0)
    assert reads.changed()[1] == "value"


@dataclass
class Inner:
    beta: float = 1.0
    rates: list[float] = field(default_factory=lambda: [0.5])


@dataclass(slots=True)
class Settings:
    beta: float = 1.0
    inner: Inner = field(default_factory=Inner)
    logger: object = None


class AttributeDict(dict):
    """A dictionary with attributes, as settings often are."""


class Name(NamedTuple):
    beta: float


def set_item(values, key, item):
    values[key] = item


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (SimpleNamespace(beta=1.0), lambda value: setattr(value, "beta", 2.0)),
        (Settings(), lambda value: setattr(value, "beta", 2.0)),
        (Settings(logger=object()), lambda value: set_item(value.inner.rates, 0, 0.25)),
        (Settings(logger=[object()]), lambda value: setattr(value.inner, "beta", 2.0)),
        ({"settings": [Inner()]}, lambda value: setattr(value["settings"][0], "beta", 2.0)),
        (OrderedDict(beta=1.0), lambda value: set_item(value, "beta", 2.0)),
        (AttributeDict(beta=1.0), lambda value: set_item(value, "beta", 2.0)),
        (AttributeDict(alpha=1.0), lambda value: setattr(value, "beta", 2.0)),
        ({"a": Name(1.0)}, lambda value: set_item(value, "a", Name(2.0))),
        (deque([1.0]), lambda value: value.append(2.0)),
        ([np.zeros(2)], lambda value: set_item(value[0], 1, 1.0)),
        (SimpleNamespace(weights=np.zeros(2)), lambda value: set_item(value.weights, 1, 1.0)),
        (functools.partial(max, 1.0, key=Inner(beta=1.0)), lambda value: setattr(value.keywords["key"], "beta", 2.0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_settings_hold(value, change):
    thing = Thing(value)
    reads = read(thing, "value")
    assert reads.hold
    change(value)
    assert reads.changed()[1] == "value"


def test_what_contains_itself_and_what_is_large():
    values, node = [1.0], SimpleNamespace(beta=1.0)
    values.append(values)
    node.children = [SimpleNamespace(beta=2.0, parent=node) for _ in range(3)]
    for value, change in (
        (values, lambda: set_item(values, 0, 2.0)),
        (node, lambda: setattr(node.children[2], "beta", 3.0)),
    ):
        reads = read(Thing(value), "value")
        assert reads.hold
        change()
        assert not reads.hold
    deep = SimpleNamespace(inner=None)
    for _ in range(10_000):
        deep = SimpleNamespace(inner=deep)
    assert read(Thing(deep), "value").hold


def test_what_was_not_read_or_is_no_plain_value_does_not_count():
    thing = Thing(object())
    reads = read(thing, "value", "of_class")
    thing.value, thing.other = object(), 8
    assert reads.hold
    thing.of_class = 2.5
    assert reads.changed()[1:] == ("of_class", 1.5, 2.5)


def test_what_the_code_itself_changes_does_not_count():
    thing, reads = Thing(1), Reads()
    with noting(reads):
        thing.use()
    thing.calls = 100
    assert reads.hold
    thing.value = 2
    assert not reads.hold


def test_classes_are_as_before_when_nobody_notes():
    assert "__getattribute__" not in vars(Readable)
    with noting(Reads()), noting(Reads()):
        assert "__getattribute__" in vars(Readable)
    assert "__getattribute__" not in vars(Readable)


def test_each_thread_notes_what_it_reads_itself_while_others_ask():
    things, started = [Thing(number) for number in range(4)], threading.Barrier(4)

    def work(thing: Thing) -> Reads:
        reads = Reads()
        started.wait()
        for number in range(200):
            with noting(reads):
                setattr(thing, f"value_{number}", number)
                getattr(thing, f"value_{number}")
                assert thing.value is not None
            assert reads.hold
        return reads

    with ThreadPoolExecutor(4) as pool:
        references = list(pool.map(work, things))
    things[1].value = 9
    assert [reference.hold for reference in references] == [True, False, True, True]
