"""Layers are cut into stages by their memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain import layers
from dptrain.errors import ConfigError
from dptrain.models.explaining import program_of
from dptrain.program.pipeline.stage_assignment import balanced, cut_into_stages, layers_of
from tests.unit.program.pipeline.test_subgraphs import ROWS, model


def test_layers_are_cut_by_their_memory():
    network = model(layers.Dense(60), layers.Dense(6), layers.Dense(6))
    program, slots = program_of(network, ROWS), {}
    for slot, weight in network.optimizer._all_slots:
        slots.setdefault(weight, []).append(slot)
    assert [layer[0]._path.split("/")[0] for layer in layers_of(program, network.weights)] == [
        layer.name for layer in network.layers
    ]
    stages = cut_into_stages(program, network.weights, slots, 2, 4, 4)
    assert [stages[layer.kernel] for layer in network.layers] == [0, 1, 1, 1]
    with pytest.raises(
        ConfigError, match="stages = 5: the model has 4 layers with weights; expected at least one per stage"
    ):
        cut_into_stages(program, network.weights, slots, 5, 4, 4)


@given(weighs=st.lists(st.integers(1, 100), min_size=1, max_size=8), data=st.data())
def test_balanced_parts(weighs, data):
    parts = data.draw(st.integers(1, len(weighs)))

    def cost(first, end, stage):
        return sum(weighs[first:end])

    stages = balanced(len(weighs), parts, cost)
    assert stages == sorted(stages)
    assert set(stages) == set(range(parts))
    heaviest = max(sum(w for w, part in zip(weighs, stages, strict=True) if part == n) for n in range(parts))
    assert heaviest <= sum(weighs) / parts + max(weighs)


def test_the_first_stages_have_more_microbatches_under_way():
    assert balanced(4, 2, lambda first, end, stage: (end - first) * (2 - stage)) == [0, 1, 1, 1]
