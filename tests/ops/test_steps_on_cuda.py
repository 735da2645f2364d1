"""Steps that share a CUDA graph have the bits of steps alone, and graphs are recorded once."""

import numpy as np
import pytest

from dptrain.backend.cuda.graphs import steps_in_graph
from dptrain.program.program import ROWS
from tests.ops.test_packs_on_cuda import STORED, B, Run


@pytest.fixture
def recorded(cuda_backend, monkeypatch):
    """A list that grows with every graph that is recorded."""
    captures, captured = [], cuda_backend.gpu_record.captured
    monkeypatch.setattr(
        cuda_backend.gpu_record, "captured", lambda *arguments: captures.append(0) or captured(*arguments)
    )
    return captures


def test_steps_that_share_a_graph_have_the_bits_of_steps_alone(cuda_backend, recorded):
    together = Run(cuda_backend, 1, mixing=False)
    assert steps_in_graph(together.executable.launches) == 16
    results = []
    for steps, graphs in ((7, 1), (8, 1), (15, 1), (16, 2), (17, 2)):
        together.ask(steps)
        results.append(together.bits())
        assert len(recorded) == graphs
    together.executable.close()
    alone = Run(cuda_backend, 1, mixing=False)
    for steps, bits in zip((7, 8, 15, 16, 17), results, strict=True):
        for _ in range(steps):
            alone.ask(1)
        assert alone.bits() == bits
    assert len(recorded) == 3


@pytest.mark.long
def test_steps_of_packs_share_graphs(cuda_backend, recorded):
    step_counts, backends = (34, 17, 1), [type(cuda_backend)() for _ in range(3)]
    runs = [Run(backend, seed, mixing=False) for seed, backend in enumerate(backends)]
    for run, steps in zip(runs, step_counts, strict=True):
        run.backend.joins_packs = True
        run.ask(steps)
    together = [run.bits() for run in runs]
    assert len(recorded) == 4, "a step of three runs, 16 steps of two and of one, and a step of one"
    for seed, (steps, bits) in enumerate(zip(step_counts, together, strict=True)):
        run = Run(cuda_backend, seed, mixing=False)
        for _ in range(steps):
            run.ask(1)
        assert run.bits() == bits
    for backend in backends:
        backend.close()


@pytest.mark.long
def test_other_data_for_the_same_step_take_the_same_graphs(cuda_backend, recorded):
    """In turns with the first data, whose results stay what they are."""
    run = Run(cuda_backend, 1, mixing=False)
    rng = np.random.default_rng(5)
    other = {
        "pixels": rng.integers(0, 256, (STORED, 20)).astype(np.uint8),
        "labels": rng.integers(0, 3, STORED),
        ROWS: rng.integers(0, STORED, 400),
    }
    second = cuda_backend.executable(run.program, other)
    run.ask(17)
    assert len(recorded) == 2
    losses = [float(run.executable.outputs["loss"])]
    for _ in range(2):
        second.run([B * n for n in range(17)])
        losses.append(float(second.outputs["loss"]))
        run.ask(17)
        losses.append(float(run.executable.outputs["loss"]))
    assert len(recorded) == 2
    bits = run.bits()
    run.executable.close()
    second.run([0])  # with graphs that are still there
    assert len(recorded) == 2
    second.close()
    rerun = Run(cuda_backend, 1, mixing=False)
    rerun.ask(17)
    expected = [float(rerun.executable.outputs["loss"])]
    separate = cuda_backend.executable(rerun.program, other)
    for _ in range(2):
        for n in range(17):
            separate.run([B * n])
        expected.append(float(separate.outputs["loss"]))
        rerun.ask(17)
        expected.append(float(rerun.executable.outputs["loss"]))
    assert expected == losses
    assert rerun.bits() == bits
    assert len(recorded) == 4, "the graphs of executables that are closed are gone"
