"""Plain attributes that are read, and whether they are what they were."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

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
