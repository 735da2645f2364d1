"""An ensemble whose members the ranks share out. Arguments: out.json, and a number of the member that fails, or -1."""

import json
import sys

import numpy as np

import dptrain as dp
from dptrain import comm

rng = np.random.default_rng(5)
x, y = rng.normal(size=(70, 6)).astype(np.float32), rng.integers(0, 3, 70)
failing = int(sys.argv[2])


class Fail(dp.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise ValueError("no epochs")


def build():
    model = dp.Sequential([dp.layers.Dense(4, "tanh"), dp.layers.Dropout(0.2), dp.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


ensemble = dp.Ensemble(build, seeds=4)
callbacks = [[Fail()] if number == failing else [] for number in range(4)]
histories = [
    ensemble.fit(x, y, batch_size=16, epochs=2, callbacks=callbacks, verbose=2),
    # Goes on where it was, whoever trains a member.
    ensemble.fit(x, y, batch_size=16, epochs=4, initial_epoch=2, verbose=0),
]
facts = {
    "history": [
        [[history_of_member.epoch, history_of_member.history] for history_of_member in history.members]
        for history in histories
    ],
    "weights": [[w.tolist() for w in member.get_weights()] for member in ensemble.members],
    "iterations": [int(member.optimizer.iterations) for member in ensemble.members],
}
comm.current().require_same("the ranks have different members", facts)
facts["scores"] = ensemble.evaluate(x, y, verbose=0)
together = ensemble.members[1].fit(x, y, batch_size=16, epochs=1, verbose=0)  # an ordinary model, on all ranks
facts["together"] = together.history["loss"][-1]
if dp.rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(facts, file)
