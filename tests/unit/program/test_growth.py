"""Compilation grows linearly with the layers: counted in calls of functions, which are the same on every machine."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

import dptrain as dp
from dptrain.backend.cpu.codegen import generate
from dptrain.backend.cpu.compiled import planned
from dptrain.backend.cuda.compose import Composition
from dptrain.models.explaining import program_of
from dptrain.program.codegen.fuse import fuse
from dptrain.program.steps import without_ranks
from dptrain.program.structure import structure_of
from tests.sample import sample


def _model(count: int) -> dp.Sequential:
    hidden = [dp.layers.Dense(8, "relu") for _ in range(count)]
    model = dp.Sequential([dp.layers.Input((8,)), *hidden, dp.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cpu")
    return model


def _for_a_cpu(model: dp.Sequential) -> None:
    program = without_ranks(program_of(model))
    structure_of(program)
    fused = fuse(program)
    planned(fused, generate(fused), 32)


def _for_a_gpu(model: dp.Sequential) -> None:
    Composition(program_of(model), 32).sources()


def _calls(work: Callable[[], object]) -> int:
    """Return how many functions and generators of Python are entered."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.long
@pytest.mark.parametrize("compiles", sample([_for_a_cpu, _for_a_gpu], 2))
def test_twice_the_layers_take_twice_the_time(compiles: Callable[[dp.Sequential], None]) -> None:
    compiles(_model(3))  # what is done once in a process
    small, large = (_calls(lambda model=model: compiles(model)) for model in (_model(20), _model(40)))  # type: ignore[misc]
    assert large < 2.1 * small, f"{small:,} calls for 20 layers, {large:,} for 40"
