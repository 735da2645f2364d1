"""`--schedule`: what a text means, as numbers, and what is refused."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.cli.options.schedule import SCHEDULES, Length, Schedule, parse_schedule
from dptrain.errors import ConfigError
from tests.sample import examples

LENGTHS = (
    st.builds(Length, st.integers(0, 10**9).map(float))
    | st.builds(Length, st.floats(0, 100).map(lambda number: round(number, 3)), st.just("%"))
    | st.builds(Length, st.integers(1, 10**4).map(lambda number: number / 4), st.just("epochs"))
)
PARTS = st.floats(1e-6, 1).map(lambda number: float(f"{number:.6g}"))


def values(key, kind):
    if kind is Length:
        return LENGTHS
    return PARTS.map(lambda part: 1 + round(part, 6)) if key == "t_mul" else PARTS


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    keys = draw(st.lists(st.sampled_from(sorted(SCHEDULES[name])), unique=True))
    return Schedule(name, {key: draw(values(key, SCHEDULES[name][key][0])) for key in keys})


@given(schedules(), st.sampled_from(",:"))
def test_what_is_written_is_read_again(schedule, separator):
    assert parse_schedule(str(schedule).replace(",", separator)) == schedule


def made_of(schedule, epoch, epochs):
    """Return its rate as a function of the step; None where the training is too short."""
    try:
        rate_schedule = schedule.make(0.25, epoch, epochs)
    except ConfigError:
        return None
    return (
        (lambda step: rate_schedule) if isinstance(rate_schedule, float) else (lambda step: float(rate_schedule(step)))
    )


@settings(max_examples=examples(40), deadline=None)
@given(schedules(), st.integers(1, 500), st.integers(0, 50))
def test_every_schedule_stays_between_nothing_and_the_learning_rate(schedule, epoch, epochs):
    rate, lengths = made_of(schedule, epoch, epochs), [x for x in schedule.values.values() if isinstance(x, Length)]
    assert rate is not None or lengths or epoch * epochs <= 3
    for step in (0, 1, epoch, epoch * epochs):
        assert rate is None or 0 <= rate(step) <= 0.25 * (1 + 1e-12)


# 100 steps an epoch, 10 epochs, highest rate 1: text, step, rate.
@pytest.mark.parametrize(
    ("text", "step", "rate"),
    [
        ("constant", 999, 1),
        ("constant:warmup=10", 5, 0.5),
        ("constant:warmup=10", 999, 1),
        ("cosine", 0, 1),
        ("cosine", 500, 0.5),
        ("cosine", 1000, 0),
        ("cosine:warmup=500", 250, 0.5),
        ("cosine:warmup=500", 500, 1),
        ("cosine:warmup=500", 625, (1 + math.cos(math.pi / 4)) / 2),
        ("cosine:warmup=50%,start=0.2", 0, 0.2),
        ("cosine:steps=2epochs:alpha=0.1", 700, 0.1),
        ("cosine_restarts", 100, 1),
        ("cosine-restarts:first=10%,m_mul=0.5", 100, 0.5),
        ("linear", 250, 0.75),
        ("linear:alpha=0.5,steps=200", 100, 0.75),
        ("polynomial", 500, 0.25),
        ("polynomial:power=3", 500, 0.125),
        ("exponential", 500, 0.1),
        ("exponential:alpha=0.25,steps=1epoch", 50, 0.5),
        ("step", 299, 1),
        ("step", 300, 0.1),
        ("step:every=2epochs,factor=0.5", 450, 0.25),
    ],
)
def test_numbers(text, step, rate):
    rate_schedule = parse_schedule(text).make(1.0, 100, 10)
    assert (rate_schedule if isinstance(rate_schedule, float) else float(rate_schedule(step))) == pytest.approx(
        rate, abs=1e-12
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin", "unknown schedule 'cosin'; did you mean 'cosine'"),
        ("onecycle", "unknown schedule 'onecycle'; known: constant, cosine, "),
        ("linear:warmup=5", "linear has no 'warmup'; only constant and cosine have it"),
        ("cosine:warmpu=5", "cosine has no 'warmpu'; did you mean 'warmup'?"),
        ("cosine:500", "'500' has no '='; expected such as cosine:warmup=500"),
        ("cosine:warmup=5,warmup=6", "warmup appears twice"),
        ("cosine:warmup=half", "warmup = half: expected steps (500), 2epochs or 5%"),
        ("cosine:warmup=1.5", "warmup = 1.5: expected whole steps"),
        ("cosine:warmup=101%", "or up to 100%"),
        ("cosine:alpha=2", "alpha = 2: expected a number 0 to 1"),
        ("cosine:alpha=nan", "alpha = nan: expected a number 0 to 1"),
        ("exponential:alpha=0", "alpha = 0: expected a number above 0, at most 1"),
        ("", "unknown schedule ''"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_schedule(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosine:warmup=10", "cosine:warmup=10: the training has 10 steps, no more than its warmup"),
        ("step:every=1%", "step:every=1%: every is less than a step; the training has 10 steps"),
    ],
)
def test_a_training_that_is_too_short(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_schedule(text).make(1.0, 5, 2)


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("cosine", True),
        ("step", True),
        ("cosine:steps=90,warmup=10%", True),
        ("cosine:steps=90,warmup=10", False),
        ("step:every=2epochs", False),
        ("constant", False),
    ],
)
def test_which_schedules_follow_the_length_of_the_training(text, follows):
    assert parse_schedule(text).follows_training is follows
