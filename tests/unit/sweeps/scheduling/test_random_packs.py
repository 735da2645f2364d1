"""Runs that a CPU's threads train beside each other have their bits alone, whatever becomes of the others."""

import functools
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dptrain as dp
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.comm import SoloCommunicator
from dptrain.runtime.python_lock import released
from dptrain.sweeps.records import Run, Segment, Status
from dptrain.sweeps.scheduling.messages import Tag, to_ending
from dptrain.sweeps.scheduling.training import Recipe
from dptrain.sweeps.scheduling.worker import Worker
from tests.sample import examples

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

RNG = np.random.default_rng(8)
X, Y = RNG.normal(size=(90, 6)).astype(np.float32), RNG.integers(0, 3, 90)
EPOCHS = 3


class Noted(dp.callbacks.Callback):
    """Notes the weights after every epoch, and lets something happen after one of them."""

    def __init__(self, noted, fate="done", at=0):
        super().__init__()
        self.noted, self.fate, self.at = noted, fate, at

    def on_epoch_end(self, epoch, logs=None):
        self.noted[epoch + 1] = b"".join(weight.tobytes() for weight in self.model.get_weights()), dict(logs)
        if epoch + 1 == self.at:
            if self.fate == "failed":
                raise RuntimeError("as planned")
            if self.fate == "diverged":
                self.model.set_weights([weight * np.float32(np.nan) for weight in self.model.get_weights()])
            self.model.stop_training = self.fate == "stopped"


def build(units, rate, seed):
    layers = [dp.layers.Dense(units, "tanh", input_shape=(6,)), dp.layers.Dropout(0.2), dp.layers.Dense(3, "softmax")]
    model = dp.Sequential(layers, seed=seed)
    model.compile(dp.optimizers.Adam(rate), "sparse_categorical_crossentropy", jit_compile=True, device="cpu")
    return model


def fit(model, epochs, callbacks):
    return model._fit_in_steps(X, Y, batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks)


@functools.cache
def alone(units, rate, seed):
    """Return weights and logs by epoch."""
    noted = {}
    for _ in fit(build(units, rate, seed), EPOCHS, [Noted(noted)]):
        pass
    return noted


class Planned(Recipe):
    """Trains what the setting says."""

    def __init__(self):
        self.noted = {}

    def build(self, setting, seed, run=None):
        if setting["fate"] == "unbuilt":
            raise ValueError("no such model")
        return build(setting["units"], setting["rate"], seed)

    def train(self, model, setting, callbacks, run):
        noted = Noted(self.noted.setdefault(setting["number"], {}), setting["fate"], setting["at"])
        return fit(model, setting["epochs"], [noted, *callbacks])


RUNS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2),
        "units": st.sampled_from([3, 5]),
        "rate": st.sampled_from([0.01, 0.1]),
        "epochs": st.integers(1, EPOCHS),
        "fate": st.sampled_from(["done", "done", "waits", "stopped", "failed", "diverged", "unbuilt"]),
        "at": st.integers(1, EPOCHS),
    }
)


@pytest.mark.long
@settings(max_examples=examples(12), deadline=None)
@given(st.lists(RUNS, min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 3), st.integers(0, 999))
def test_a_run_has_the_bits_of_the_run_alone(runs, places, threads, order):
    """Runs of mixed lengths stop, fail, diverge or wait; others take their places; threads come in any order."""
    recipe, ranks, chance = Planned(), SoloCommunicator(), random.Random(order)
    plan = {number: run | {"number": number} for number, run in enumerate(runs)}
    waiting = [
        (Segment(Run(number, 0, entry["seed"]), 0, entry["at"] if entry["fate"] == "waits" else None), b"")
        for number, entry in plan.items()
    ]
    endings, running = {}, 0
    with pytest.MonkeyPatch.context() as patch:
        execute = CompiledExecutable.run

        def late(self, starts=(0,)):
            execute(self, starts)
            with released():
                time.sleep(chance.choice([0, 0, 0.0005]))

        patch.setattr(CompiledExecutable, "run", late)
        worker = Worker(ranks, recipe, threads)
        try:
            while waiting or running:
                while waiting and running < places:
                    segment, state = waiting.pop(chance.randrange(len(waiting)))
                    worker.start(segment, plan[segment.run.number], state)
                    running += 1
                chance.shuffle(worker._trainings)
                worker.advance()
                for mail in ranks.received():
                    if mail.fact["kind"] == Tag.ENDING:
                        ending, running = to_ending(mail.fact["ending"]), running - 1
                        endings[ending.run.number] = ending
                        if ending.status is Status.PAUSED:
                            waiting.append((Segment(ending.run, ending.epochs, None), mail.content))
        finally:
            worker.close()
    for number, planned_run in plan.items():
        ended, epochs, fate = endings[number], planned_run["epochs"], planned_run["fate"]
        if fate == "unbuilt":
            assert (ended.status, ended.epochs) == (Status.FAILED, 0)
            continue
        cut = fate in ("stopped", "failed", "diverged") and planned_run["at"] <= epochs
        cut = cut and (fate, planned_run["at"]) != ("diverged", epochs)  # nobody trains with those weights
        trained = planned_run["at"] if cut else epochs
        status = {"failed": Status.FAILED, "diverged": Status.DIVERGED}.get(fate, Status.DONE) if cut else Status.DONE
        assert ended.status is status, ended.reason
        expected = alone(planned_run["units"], planned_run["rate"], planned_run["seed"])
        assert recipe.noted[number] == {epoch: expected[epoch] for epoch in range(1, trained + 1)}
        if status is Status.DONE:
            assert ended.metrics == expected[trained][1]
