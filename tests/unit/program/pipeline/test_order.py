"""In which order stages go on with microbatches, and what they hand to each other."""

from itertools import pairwise

from dptrain.models.explaining import program_of
from dptrain.program.pipeline.order import Task, one_forward_one_backward
from dptrain.program.pipeline.send_recv import channels_of
from dptrain.program.pipeline.subgraphs import Subgraph
from tests.unit.program.pipeline.test_subgraphs import ROWS, perceptron


def test_a_stage_has_no_more_microbatches_under_way_than_stages_are_behind_it():
    """Two subgraphs a stage, one on the last: the order of 1F1B."""
    stages, microbatches = 3, 6
    program = program_of(perceptron(), ROWS)
    forward = [Subgraph(stage, stage, program) for stage in range(stages)]
    backward = [Subgraph(stage, 2 * (stages - 1) - stage, program) for stage in range(stages - 1)]
    for stage, (subgraph, next_subgraph) in enumerate(pairwise(forward)):
        subgraph.sends, next_subgraph.receives = {f"forward {stage}": [stage + 1]}, {f"forward {stage}": stage}
    for stage, subgraph in enumerate(backward):
        after = backward[stage + 1] if stage + 1 < len(backward) else forward[-1]
        after.sends, subgraph.receives = {f"backward {stage}": [stage]}, {f"backward {stage}": stage + 1}
    times = dict.fromkeys(forward[:-1], 1) | {forward[-1]: 3} | dict.fromkeys(backward, 2)
    tasks = one_forward_one_backward([*forward, *backward], microbatches, stages, times)
    order = [
        "".join("F" if task.subgraph in forward else "B" for task in tasks if task.subgraph.stage == n)
        for n in range(3)
    ]
    assert order == ["FFFBFBFBFBBB", "FFBFBFBFBFBB", "FFFFFF"]
    assert tasks[-1].tick + 2 == (microbatches + stages - 1) * 3
    channels = {(channel.source, channel.target): channel for channel in channels_of(tasks)}
    assert list(channels) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    for channel in channels.values():
        assert [item.microbatch for item in channel.items] == list(range(microbatches))
        assert channel.slots <= stages
        pairs = zip(channel.items, channel.items[channel.slots :], strict=False)
        assert all(old.receiver.tick < new.sender.tick for old, new in pairs)
    assert channels[0, 1].slots > 1


def test_what_is_given_first_is_taken_first_though_it_is_needed_last():
    program = program_of(perceptron(), ROWS)
    first, second = Subgraph(0, 0, program), Subgraph(0, 1, program)
    first.sends, second.sends = {"late": [1]}, {"soon": [1]}
    taker, last = Subgraph(1, 2, program), Subgraph(1, 3, program)
    taker.receives, last.receives = {"soon": 0}, {"late": 0}
    tasks = [Task(tick, 0, subgraph) for tick, subgraph in enumerate([first, second, taker, last])]
    (channel,) = channels_of(tasks)
    assert [(item.name, item.receiver.subgraph) for item in channel.items] == [("late", taker), ("soon", taker)]
    assert channel.slots == 2  # nothing is taken before all is given
