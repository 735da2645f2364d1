"""A profile of any executions, which may overlap and contain each other, against counts of single nanoseconds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.program.schedule.clock import Clock, Span
from dptrain.program.schedule.description import KernelDescription
from dptrain.program.schedule.profile import events_of, profile_of

KERNELS = [
    KernelDescription("both", "", [], {"a": 3, "b": 1}),
    KernelDescription("message", "", [], {"messages": 0}),
    KernelDescription("late", "", [], {"b": 2}),
]
SPANS = st.lists(
    st.tuples(st.integers(0, len(KERNELS) - 1), st.integers(0, 60), st.integers(0, 40)).map(
        lambda span: Span(span[0], span[1], span[1] + span[2])
    ),
    min_size=1,
    max_size=7,
)


@given(st.lists(SPANS, min_size=1, max_size=4))
def test_times_are_those_that_clocks_saw(steps):
    clock = Clock(len(steps), list(KERNELS))
    for spans in steps:
        clock.add_step(spans)
    profile = profile_of(clock)
    walls = [max(span.end for span in spans) - min(span.begin for span in spans) for spans in steps]
    idle = 0
    for spans, wall in zip(steps, walls, strict=True):
        is_busy = np.zeros(101, bool)
        for span in spans:
            is_busy[span.begin : span.end] = True
        idle += wall - int(is_busy.sum())
    assert profile.seconds == pytest.approx([wall * 1e-9 for wall in walls])
    assert profile.between == pytest.approx(idle / len(steps) * 1e-9, abs=1e-15)
    of_kernels = [sum(span.end - span.begin for spans in steps for span in spans if span.kernel == n) for n in range(3)]
    expected = {"a": 0.75 * of_kernels[0], "b": 0.25 * of_kernels[0] + of_kernels[2], "messages": of_kernels[1]}
    assert {name: profile.layers.get(name, 0) * len(steps) * 1e9 for name in expected} == pytest.approx(expected)
    assert {each.kernel.kind: each.times * len(steps) for each in profile.kernels} == {
        kernel.kind: count
        for number, kernel in enumerate(KERNELS)
        if (count := sum(span.kernel == number for spans in steps for span in spans))
    }


@given(SPANS, st.integers(-(10**9), 10**9))
def test_one_moment_is_one_time_in_the_traces_of_all_ranks(spans, ahead):
    traces = []
    for offset in (0, ahead):
        clock = Clock(1, list(KERNELS))
        clock.add_step([Span(span.kernel, span.begin + offset, span.end + offset) for span in spans])
        traces.append([event for event in events_of(clock, 0, "host", offset) if event["ph"] == "X"])
    assert traces[0] == traces[1]
    assert [(event["ts"], event["dur"]) for event in traces[0]] == [
        (span.begin / 1e3, (span.end - span.begin) / 1e3) for span in spans
    ]
