"""Trains on a generator whose batches grow and shrink. Arguments: out.npz device."""

import sys

import numpy as np

import dptrain as dp
from dptrain.comm import current

out, device = sys.argv[1:]
rng = np.random.default_rng(1)
SIZES = [6, 17, 1]
X = rng.integers(0, 256, (sum(SIZES), 12), dtype=np.uint8)
Y = (X[:, 0] // 86).astype(np.uint8)
ENDS = np.cumsum(SIZES)


class Batches(dp.utils.PyDataset):
    """Batches of which every third, if `mixed`, is of another dtype."""

    def __init__(self, mixed: bool, **options: int) -> None:
        super().__init__(**options)
        self.mixed = mixed

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int):
        stop = int(ENDS[index])
        x = X[stop - SIZES[index] : stop]
        return x.astype(np.float32) if self.mixed and index % 3 == 2 else x, Y[stop - SIZES[index] : stop]


def generator():
    while True:
        yield from Batches(False)


model = dp.Sequential(
    [dp.layers.Rescaling(1 / 255, input_shape=(12,)), dp.layers.Dense(16, "relu"), dp.layers.Dense(3, "softmax")],
    seed=4,
)
model.compile(dp.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"], device=device)
history = model.fit(
    generator(), steps_per_epoch=len(SIZES), epochs=5, shuffle=False, verbose=0, validation_data=Batches(True)
)
prediction = model.predict(Batches(True, workers=2), verbose=0)
if current().rank == 0:
    np.savez(out, prediction=prediction, **{key: np.array(values) for key, values in history.history.items()})
