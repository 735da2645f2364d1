"""In which order stages go on with microbatches, and what they hand to each other."""

from itertools import pairwise

from dptrain.models.explaining import program_of
from dptrain.program.pipeline.order import Turn, one_forward_one_backward
from dptrain.program.pipeline.send_recv import links_of
from dptrain.program.pipeline.subgraphs import Piece
from tests.unit.program.pipeline.test_subgraphs import ROWS, perceptron


def test_a_stage_has_no_more_microbatches_under_way_than_stages_are_behind_it():
    """Two pieces a stage, one on the last: the order of 1F1B."""
    stages, microbatches = 3, 6
    program = program_of(perceptron(), ROWS)
    forward = [Piece(stage, stage, program) for stage in range(stages)]
    backward = [Piece(stage, 2 * (stages - 1) - stage, program) for stage in range(stages - 1)]
    for stage, (one, next_one) in enumerate(pairwise(forward)):
        one.gives, next_one.gets = {f"forward {stage}": [stage + 1]}, {f"forward {stage}": stage}
    for stage, one in enumerate(backward):
        after = backward[stage + 1] if stage + 1 < len(backward) else forward[-1]
        after.gives, one.gets = {f"backward {stage}": [stage]}, {f"backward {stage}": stage + 1}
    times = dict.fromkeys(forward[:-1], 1) | {forward[-1]: 3} | dict.fromkeys(backward, 2)
    turns = one_forward_one_backward([*forward, *backward], microbatches, stages, times)
    order = ["".join("F" if one.piece in forward else "B" for one in turns if one.piece.stage == n) for n in range(3)]
    assert order == ["FFFBFBFBFBBB", "FFBFBFBFBFBB", "FFFFFF"]
    assert turns[-1].tick + 2 == (microbatches + stages - 1) * 3
    links = {(one.source, one.target): one for one in links_of(turns)}
    assert list(links) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    for link in links.values():
        assert [one.microbatch for one in link.items] == list(range(microbatches))
        assert link.slots <= stages
        again = zip(link.items, link.items[link.slots :], strict=False)
        assert all(old.taker.tick < new.giver.tick for old, new in again)
    assert links[0, 1].slots > 1


def test_what_is_given_first_is_taken_first_though_it_is_needed_last():
    program = program_of(perceptron(), ROWS)
    first, second = Piece(0, 0, program), Piece(0, 1, program)
    first.gives, second.gives = {"late": [1]}, {"soon": [1]}
    taker, last = Piece(1, 2, program), Piece(1, 3, program)
    taker.gets, last.gets = {"soon": 0}, {"late": 0}
    turns = [Turn(tick, 0, one) for tick, one in enumerate([first, second, taker, last])]
    (link,) = links_of(turns)
    assert [(one.name, one.taker.piece) for one in link.items] == [("late", taker), ("soon", taker)]
    assert link.slots == 2  # nothing is taken before all is given
