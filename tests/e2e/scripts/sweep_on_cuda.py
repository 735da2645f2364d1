"""Trains runs side by side and looks at the GPU's memory. Argument: data.npz."""

import sys

import numpy as np

import dptrain as dp
from dptrain.backend.cuda.gpu import device
from dptrain.sweeps.scheduling import worker

with np.load(sys.argv[1]) as arrays:
    x, y = arrays["x_train"], arrays["y_train"].astype(np.int64)


def build(units):
    model = dp.Sequential([dp.layers.Flatten(input_shape=x.shape[1:]), dp.layers.Dense(units), dp.layers.Dense(10)])
    model.compile("adam", dp.losses.SparseCategoricalCrossentropy(from_logits=True), device="cuda")
    return model


held = []
advance = worker.Worker.advance


def look(self):
    going_on = advance(self)
    held.append({memory.source.nbytes: memory.pointer for memory in device._gpu.samples.values()})
    return going_on


worker.Worker.advance = look
result = dp.sweep(build, {"units": [3, 5]}, seeds=range(3), x=x, y=y, epochs=2, runs_per_device=3, verbose=0)
assert [run["status"] for run in result.runs] == ["done"] * 6, result.runs
# Features and labels, each at one place, as long as any run needs them.
assert {size for sizes in held for size in sizes} == {x.nbytes, y.nbytes}, held
places = {tuple(sizes.values()) for sizes in held if sizes}
assert len(places) == 1, places
assert len(device._gpu.samples) == 0
left = {memory.name: memory.nbytes for backend in device._gpu.backends for memory in backend.heap.memories}
assert left == {}, left
print("once")
