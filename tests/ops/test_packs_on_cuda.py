"""Packs on the CUDA backend: runs of one program that are executed together have the bits of runs alone."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.ops.indexing import add_rows, take_rows
from dptrain.ops.random import SeedGenerator, dropout
from dptrain.program.dims import Dim
from dptrain.program.program import ROWS, trace
from dptrain.program.tensor import Variable
from dptrain.random import Purpose
from tests.sample import sample

B, STORED, INPUTS, HIDDEN = 6, 40, 20, 9


def training(seed, rows=B, hidden=HIDDEN, mixing=True):
    """Return a step with numbers, seed and weights of its own, and the data that it reads."""
    rng = np.random.default_rng(seed)
    rate, momentum, dropped, decay = 0.1 * rng.random(4) + 0.05
    shapes = {"w": (INPUTS, hidden), "b": (hidden,), "v": (hidden, 3)}
    weights = [Variable(rng.normal(0, 0.3, shape).astype(np.float32), name) for name, shape in shapes.items()]
    speeds = [
        Variable(np.zeros(weight.shape, np.float32), f"{weight.name}/speed", trainable=False) for weight in weights
    ]
    seeds = SeedGenerator(seed, "seeds", purpose=Purpose.DROPOUT)
    total = Variable(np.array(0.0), "total", trainable=False)

    def step(pixels, labels, rows):
        x, y = ops.cast(take_rows(pixels, rows), "float32") * (1 / 255), take_rows(labels, rows)
        if mixing:  # which makes a program one for this number of rows
            places, order = seeds.permutation(x.shape[0])
            x = 0.75 * x + 0.25 * take_rows(add_rows(x, places, length=int(x.shape[0])), order)
        w, b, v = weights
        scores = dropout(ops.relu(x @ w + b), dropped, seed=seeds) @ v
        loss = ops.mean(-ops.sum(ops.one_hot(y, 3) * ops.log_softmax(scores), axis=-1)) + decay * ops.sum(v * v)
        loss.backward()
        total.assign_add(ops.cast(loss, "float64"))
        for weight, speed in zip(weights, speeds, strict=True):
            speed.assign(momentum * speed - rate * weight.value.grad)
            weight.assign(weight + speed.value)
        return {"loss": loss}

    specs = {"pixels": ((STORED, INPUTS), "uint8"), "labels": ((STORED,), "int64"), ROWS: ((Dim.rows(rows),), "int64")}
    data = {"pixels": rng.integers(0, 256, (STORED, INPUTS)).astype(np.uint8), "labels": rng.integers(0, 3, STORED)}
    return trace(step, specs), data | {ROWS: rng.integers(0, STORED, 400)}


class Run:
    """A training on a backend of its own.

    Attributes:
        done: its steps.
    """

    def __init__(self, backend, seed, **sizes):
        self.backend, self.seed, self.done = backend, seed, 0
        self.program, data = training(seed, **sizes)
        self.executable = backend.executable(self.program, data)

    def ask(self, steps):
        """Let the next steps wait for those of others."""
        self.executable.run([B * n for n in range(self.done, self.done + steps)])
        self.done += steps

    def bits(self):
        """Return all that the run has left."""
        state = [variable.numpy().tobytes() for variable in self.program.state]
        return [*state, *(value.tobytes() for value in self.executable.outputs.values())]


def alone(cuda_backend, seed, steps):
    """Return the bits of a run that nothing is beside."""
    run = Run(cuda_backend, seed)
    run.ask(steps)
    bits = run.bits()
    run.executable.close()
    return bits


@pytest.mark.parametrize("places", sample([2, 1, 5, 16], 4))
def test_a_run_in_a_pack_has_the_bits_of_the_run_alone(cuda_backend, another, places):
    """In packs of changing members: runs ask for different numbers of steps, pause, end, and leave their place."""
    rng = np.random.default_rng(places)
    free = [another() for _ in range(places)]
    runs, seeds, checked = [], iter(range(1000)), 0
    for _ in range(8):
        while free:
            runs.append(Run(free.pop(), next(seeds)))
        for run in runs:
            if rng.random() < 0.8:
                run.ask(int(rng.choice([1, 3, 3, 4])))
        for run in runs:
            run.backend.launch_waiting()
        for run in [run for run in runs if run.done and rng.random() < 0.3]:
            assert run.bits() == alone(cuda_backend, run.seed, run.done)
            checked += 1
            run.executable.close()
            runs.remove(run)
            free.append(run.backend)
    for run in runs:
        if run.done:
            assert run.bits() == alone(cuda_backend, run.seed, run.done)
            checked += 1
    assert checked >= places


def test_what_is_read_early_is_there(another):
    """A run that is asked for its state does not wait for the others, nor they for it."""
    first, second = Run(another(), 1), Run(another(), 2)
    first.ask(3)
    second.ask(2)
    early = second.bits()
    assert early == second.bits()
    first.ask(1)
    first.ask(1)  # which follows the one before, on the same state
    second.ask(3)
    together = first.bits(), second.bits()
    assert early != together[1]
    for run, bits in zip((Run(another(), 1), Run(another(), 2)), together, strict=True):
        run.ask(5)
        assert run.bits() == bits


@pytest.mark.long
def test_who_shares_a_pack(another):
    """Seeds, rates and weights may differ; the number of rows and shapes may not."""

    def executable(seed, **options):
        return Run(another(), seed, mixing=False, **options).executable

    usual = [executable(seed) for seed in (1, 2)]
    others = [executable(1, rows=B + 1), executable(1, hidden=HIDDEN + 1)]
    assert usual[0].source == usual[1].source
    assert usual[0].pack_key == usual[1].pack_key
    assert len({run.pack_key for run in (*usual, *others)}) == 3
    assert others[0].source == usual[0].source, "the number of rows is an argument"
