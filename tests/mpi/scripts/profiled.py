"""Trains with a profile on several ranks, and says what it has."""

import json
import sys

import numpy as np

import dptrain as dp

path = sys.argv[1]
model = dp.Sequential([dp.Input((5,)), dp.layers.Dense(70, "relu", name="first"), dp.layers.Dense(3, name="dense")])
model.compile("adam", dp.losses.SparseCategoricalCrossentropy(from_logits=True))
x = np.random.default_rng(0).normal(size=(49, 5)).astype("f4")
profiler = dp.callbacks.Profiler(3, path)
model.fit(x, np.arange(49) % 3, batch_size=8, verbose=0, callbacks=[profiler])
layers = list(profiler.profile.layers)
if dp.rank() == 0:
    print(json.dumps(layers))
