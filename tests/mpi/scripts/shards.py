"""Trains with eight shards a batch; rank 0 saves what came out. Arguments: out.npz jit_compile."""

import sys

import numpy as np

import dptrain as dp
from dptrain.batches.sampling import GlobalSampler
from dptrain.comm import current
from dptrain.data.loading import Split
from dptrain.train.trainer import run_to_end

out, jit_compile = sys.argv[1], sys.argv[2] == "compiled"
comm, rng = current(), np.random.default_rng(0)
x, y = rng.standard_normal((203, 7), np.float32), rng.integers(0, 3, 203)
model = dp.Sequential(
    [
        dp.layers.Dense(9, "relu", kernel_regularizer="l2", input_shape=(7,)),
        dp.layers.Dropout(0.3),
        dp.layers.Dense(3, "softmax"),
    ],
    seed=1,
)
optimizer = dp.optimizers.Adam(0.01, global_clipnorm=0.5)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=jit_compile)
model.build()
sampler = GlobalSampler(203, 40, comm.rank, comm.size, seed=4, shards_per_batch=8)
run_to_end(model.fit_splits_steps(Split.whole(x, y, comm.rank, comm.size), None, sampler, epochs=3, verbose=0))
history = model.history.history
if comm.rank == 0:
    np.savez(out, *model.get_weights(), loss=history["loss"], accuracy=history["accuracy"])
