"""Trains with eight shards a batch; rank 0 saves what came out. Arguments: out.npz compiled|numpy|fit."""

import sys

import numpy as np

import dptrain as dp
from dptrain.comm import current
from dptrain.data.loading import Split

out, how = sys.argv[1], sys.argv[2]
comm, rng = current(), np.random.default_rng(0)
x, y = rng.standard_normal((203, 7), np.float32), rng.integers(0, 3, 203)
model = dp.Sequential(
    [
        dp.layers.Dense(600, "relu", kernel_regularizer="l2", input_shape=(7,)),
        dp.layers.Dropout(0.3),
        dp.layers.Dense(3, "softmax"),
    ],
    seed=1,
)
options = {"metrics": ["accuracy"], "jit_compile": how != "numpy", "shards_per_batch": 8}
model.compile(dp.optimizers.Adam(0.01, global_clipnorm=0.5), "sparse_categorical_crossentropy", **options)
model.build()
if how == "fit":
    test = x[:77], y[:77]

    def batches():
        for begin, end in ((0, 40), (40, 43), (43, 130), (130, 131), (131, 203)):  # some leave shards empty
            yield x[begin:end], y[begin:end]

    options = {"epochs": 2, "verbose": 0}
    history = model.fit(x, y, batch_size=40, validation_data=test, validation_batch_size=30, **options).history
    generated = model.fit(batches(), validation_data=test, shuffle=False, steps_per_epoch=5, verbose=0).history
    scores = [model.evaluate(*test, verbose=0), model.evaluate(batches(), verbose=0, steps=3)]
    scores += [model.train_on_batch(x[:9], y[:9]), model.train_on_batch(x[:3], y[:3])]
    if comm.rank == 0:
        kept = {f"{name} of batches": values for name, values in generated.items()}
        np.savez(out, *model.get_weights(), **history, **kept, scores=scores)
    sys.exit()
data, test = Split(x, y), Split(x[:77], y[:77])
history = model.fit(data, validation_data=test, batch_size=40, epochs=3, verbose=0).history
if comm.rank == 0:
    np.savez(out, *model.get_weights(), **history)
