"""Trains on a folder of pictures. Arguments: folder out.npz, and options of the data set as JSON."""

import json
import sys
import warnings

import numpy as np

import dptrain as dp

warnings.filterwarnings("default", "skipped: ")  # else an error, as all warnings in tests
folder, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
common = {"image_size": (6, 8), "batch_size": 7, "seed": 3, "verbose": False, **options}
if options.get("reproducible"):
    dp.utils.enable_op_determinism(4)
common.pop("reproducible", None)
train, held = dp.utils.image_dataset_from_directory(folder, subset="both", validation_split=0.25, **common)
model = dp.Sequential(
    [
        dp.layers.Input((6, 8, 3)),
        dp.layers.Rescaling(1 / 255),
        dp.layers.RandomFlip(),
        dp.layers.Conv2D(4, 3, activation="relu"),
        dp.layers.GlobalAveragePooling2D(),
        dp.layers.Dense(3, "softmax"),
    ],
    seed=1,
)
model.compile(dp.optimizers.Adam(0.01), "sparse_categorical_crossentropy", dtype="float64", jit_compile=False)
history = model.fit(train, validation_data=held, epochs=2, verbose=0).history
more = model.fit(train, epochs=2, steps_per_epoch=2, verbose=0).history["loss"]
if dp.rank() == 0:
    weights = {f"w{number}": array for number, array in enumerate(model.get_weights())}
    np.savez(out, loss=history["loss"], val_loss=history["val_loss"], more=more, **weights)
