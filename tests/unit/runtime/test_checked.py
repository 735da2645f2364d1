"""Settings checked by the annotations of dataclasses."""

import dataclasses
import os
from typing import Annotated

import pytest
from annotated_types import Interval

from dptrain.runtime.checked import Before, Checked, NotValidError, checked


def halved(value: object) -> object:
    if value == "odd":
        raise ValueError("expected something even")
    return int(value) // 2 if isinstance(value, str) else value


@dataclasses.dataclass(frozen=True)
class Inner(Checked):
    rate: Annotated[float, Interval(ge=0, lt=1)] = 0.5


@dataclasses.dataclass(frozen=True)
class Outer(Checked):
    inner: Inner = dataclasses.field(default_factory=Inner)
    pairs: Annotated[int, Before(halved)] = 3


def test_fields_that_are_not_set_have_their_defaults():
    assert checked(Outer, {"inner": {"rate": "0.25"}}) == Outer(Inner(0.25), 3)


def test_a_function_reads_what_users_write():
    assert checked(Outer, {"pairs": "8"}).pairs == 4


@pytest.mark.parametrize(
    ("tree", "place", "message"),
    [
        ({"inner": {"rate": 1}}, ("inner", "rate"), "must be less than 1"),
        ({"inner": {"rate": float("nan")}}, ("inner", "rate"), "must be a finite number"),
        ({"inner": {"speed": 1}}, ("inner", "speed"), "Unexpected keyword argument"),
        ({"pairs": "odd"}, ("pairs",), "expected something even"),
    ],
)
def test_what_does_not_fit_is_refused(tree, place, message):
    with pytest.raises(NotValidError) as refused:
        checked(Outer, tree)
    assert (refused.value.place, str(refused.value)) == (place, message)


@pytest.mark.parametrize("before", [None, "one"])
def test_the_environment_stays_as_it_is(monkeypatch, before):
    name = "PYDANTIC_DISABLE_PLUGINS"
    if before is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, before)
    checked(Outer, {})
    assert os.environ.get(name) == before
