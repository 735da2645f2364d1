"""Lets one rank call something else than the others. Arguments: its call, the others' call, its number.

After "later" all have trained before; after "again" they have differed before, and caught that.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

import dptrain as dp
from dptrain.comm import current
from dptrain.errors import AgreedError

odd_call, others, odd = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
x = np.random.default_rng(0).integers(0, 256, (64, 4), np.uint8)
y = (x[:, 0] // 128).astype(np.int64)
model = dp.Sequential([dp.layers.Dense(2, "softmax", input_shape=(4,))])
model.compile("sgd", "sparse_categorical_crossentropy")


class Peek(dp.callbacks.Callback):
    """Evaluates in the middle of a training, on one rank."""

    def on_epoch_end(self, epoch: int, logs=None) -> None:
        if rank == odd:
            self.model.evaluate(x, y, verbose=0)


def compiled(method: str, layer: str | None = None, **options) -> None:
    """Compile in another way, and call a method."""
    if layer is not None:
        model.layers[0]._keep_dtype(layer)
    model.compile("sgd", "sparse_categorical_crossentropy", **options)
    calls[method]()


calls = {
    "fit": lambda: model.fit(x, y, verbose=0),
    "fit and peek": lambda: model.fit(x, y, verbose=0, epochs=3, callbacks=[Peek()]),
    "evaluate": lambda: model.evaluate(x, y, verbose=0),
    "predict": lambda: model.predict(x, verbose=0),
    "train_on_batch": lambda: model.train_on_batch(x, y),
    "save": lambda: model.save_weights(Path(os.environ["TMPDIR"]) / "w.safetensors"),
    "barrier": lambda: current().barrier(),
    "broadcast": lambda: current().broadcast(np.zeros(3)),
    "agree": lambda: current().agree("lunch", lambda: None),
    "allreduce": lambda: current().allreduce_sum(np.zeros(3)),
    "fit in bfloat16": lambda: compiled("fit", dtype="mixed_bfloat16"),
    "train_on_batch in float16": lambda: compiled("train_on_batch", dtype="mixed_float16"),
    "evaluate a layer in float16": lambda: compiled("evaluate", "float16"),
    "fit with a bucket": lambda: compiled("fit", bucket_mb=1),
}
if sys.argv[4:] == ["later"]:
    model.fit(x, y, verbose=0)
elif sys.argv[4:] == ["again"]:
    with suppress(AgreedError):
        calls["predict" if rank == odd else "train_on_batch"]()
calls[odd_call if rank == odd else others]()
calls["fit"]()
