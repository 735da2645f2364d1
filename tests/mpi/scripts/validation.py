"""A signal to one rank in a validation of which ranks have different numbers of batches. Arguments: folder signal|none.

Without a signal it goes on, compares with an uninterrupted training, and says so.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import dptrain as dp

folder, way = Path(sys.argv[1]), sys.argv[2]
rng = np.random.default_rng(0)
x, y = rng.standard_normal((1537, 6)), rng.integers(0, 3, 1537)  # on three ranks 3, 2 and 2 batches


def train(*callbacks):
    model = dp.Sequential([dp.layers.Dense(4, "tanh", input_shape=(6,)), dp.layers.Dense(3, "softmax")], seed=1)
    options = {"metrics": ["accuracy"], "jit_compile": False, "steps_per_execution": 1}
    model.compile("adam", "sparse_categorical_crossentropy", **options)
    data = {"validation_data": (x, y), "batch_size": 8}
    model.fit(x[:53], y[:53], **data, epochs=3, verbose=0, callbacks=list(callbacks))
    return model


class Signalled(dp.callbacks.Callback):
    """Sends the signal when the second validation begins."""

    begun = ended = 0

    def on_test_begin(self, logs=None):
        self.begun += 1
        if way == "signal" and self.begun == 2 and dp.rank() == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_test_end(self, logs=None):
        self.ended += 1

    def _release(self):
        sys.stdout.write(f"rank {dp.rank()}: {self.begun} begun, {self.ended} ended\n")  # one write, one line
        sys.stdout.flush()


model = train(dp.callbacks.BackupAndRestore(folder / "backup"), Signalled())
expected = train()
assert model.history.history == expected.history.history
assert [weight.tobytes() for weight in model.get_weights()] == [weight.tobytes() for weight in expected.get_weights()]
