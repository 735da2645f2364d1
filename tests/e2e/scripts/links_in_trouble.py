"""Trains on two GPUs whose messages go past the host, until rank 1 does something in the third step.
Arguments: what; how messages travel; how many stages there are, 1 where that is not said."""

import os
import signal
import sys
import time

import numpy as np

import dptrain as dp
from dptrain.backend.cuda import backend
from dptrain.backend.cuda.executable import CudaExecutable

way = sys.argv[1]


class Trouble(dp.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs=None) -> None:
        if batch == 2 and dp.rank() == 1:
            if way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if way == "asleep":
                time.sleep(60)
            if way == "raises":
                raise RuntimeError("bomb")


class Late(CudaExecutable):
    """Does not queue the third step."""

    steps = 0

    def run(self, starts=(0,)):
        Late.steps += 1
        if Late.steps == 3:
            time.sleep(60)
        super().run(starts)


if way == "late" and dp.rank() == 1:
    backend.CudaExecutable = Late
x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
stages = int(sys.argv[3]) if len(sys.argv) > 3 else 1
hidden = [dp.layers.Dense(4) for _ in range(stages - 1)]
model = dp.Sequential([dp.Input((4,)), *hidden, dp.layers.Dense(2)])
model.compile("sgd", "mse", device="cuda", comm=sys.argv[2], share_gpu=way == "share", stages=stages)
model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0, callbacks=[Trouble()])
print("trained", flush=True)
