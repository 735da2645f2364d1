"""The order in which ops and messages between GPUs are queued, without a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest

from dptrain.backend.cuda.transfers.schedule import linked_steps
from dptrain.program.tensor import placeholder


class Message:
    """A message that notes nothing but its name."""

    def __init__(self, name):
        self.name = name

    def begin(self):
        return f"begin {self.name}"

    def finish(self):
        return f"finish {self.name}"

    def gather(self):
        return f"gather {self.name}"

    def arrive(self):
        return f"arrive {self.name}"


def part(launches, ready=()):
    return SimpleNamespace(launches=launches, ready=list(ready))


def said(launches):
    """Return launches as words."""
    return [launch if isinstance(launch, str) else launch() for launch in launches]


first_weights, last_weights = (placeholder((3,), np.float32, name) for name in ("first", "last"))


@pytest.fixture
def step():
    """Return a step of two layers: launches, messages, what launches read and what messages send."""
    names = ("forward 1", "forward 2", "backward 2", "backward 1", "update 1", "update 2")
    launches = ["".join(name) for name in names]
    stages = [
        [part(launches[:3], [0]), part(launches[3:4], [1])],
        [part(launches[4:], [2, 3])],
        [part([])],
    ]
    messages = [Message(name) for name in ("gradient 2", "gradient 1", "weights 2", "weights 1")]
    reads = {id(launches[0]): {first_weights}, id(launches[1]): {last_weights}, id(launches[2]): {last_weights}}
    return stages, messages, reads, [set()] * 4


def steps_of(step, late, **changed):
    stages, messages, reads, parts = step
    return linked_steps(stages, messages, changed.get("reads", reads), changed.get("parts", parts), late, lambda x: x)


def test_messages_travel_beside_the_backward_pass(step):
    steps = steps_of(step, {})
    expected = ["forward 1", "forward 2", "backward 2", "begin gradient 2", "backward 1", "begin gradient 1"]
    expected += ["finish gradient 2", "finish gradient 1", "update 1", "update 2", "begin weights 2", "begin weights 1"]
    expected += ["finish weights 2", "finish weights 1"]
    assert said(steps.first) == said(steps.further) == expected
    assert steps.end == []


def test_late_gathers_travel_beside_the_next_forward_pass(step):
    """The first layer's weights leave first, and each layer waits for its own."""
    steps = steps_of(step, {3: [first_weights], 2: [last_weights]})
    assert said(steps.first)[-4:] == ["update 1", "update 2", "finish weights 2", "finish weights 1"]
    assert said(steps.further)[:6] == [
        *("gather weights 1", "gather weights 2", "arrive weights 1", "forward 1", "arrive weights 2", "forward 2")
    ]
    rest = [word for word in said(steps.further) if not word.startswith(("gather", "arrive"))]
    assert rest == said(steps.first)
    assert said(steps.end) == ["gather weights 1", "gather weights 2", "arrive weights 1", "arrive weights 2"]


def test_a_message_that_sends_a_weight_waits_for_it(step):
    parts = [{first_weights}, set(), set(), set()]
    steps = steps_of(step, {3: [first_weights]}, reads={}, parts=parts)
    words = said(steps.further)
    assert words.index("arrive weights 1") == words.index("begin gradient 2") - 1


def test_values_that_nothing_reads_arrive_before_the_next_ones_are_kept(step):
    words = said(steps_of(step, {2: [last_weights]}, reads={}).further)
    assert words.index("arrive weights 2") == words.index("finish weights 2") - 1
