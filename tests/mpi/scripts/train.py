"""What a user's own script looks like; rank 0 saves the weights and the history. Arguments: data.npz out.npz JSON."""

import json
import sys
import warnings

import numpy as np

import dptrain as dp

data, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
(x, y), (x_test, y_test) = dp.datasets.load(data)
x, y = x[: options.get("samples", len(x))], y[: options.get("samples", len(y))]
dp.utils.set_random_seed(3)
penalty, bound = options.get("regularizer"), options.get("constraint")
first = dp.layers.Dense(16, "relu", kernel_regularizer=penalty, kernel_constraint=bound)
if options.get("batch_normalization"):
    # A bias would be taken away again by the mean: all its gradient is rounding.
    first = dp.layers.Dense(16, use_bias=False)
if options.get("lora"):
    first = dp.layers.Dense(16, "relu", lora_rank=3, lora_alpha=6)
stack = [dp.layers.Rescaling(1 / 255, input_shape=(28, 28)), dp.layers.Flatten(), first]
if options.get("batch_normalization"):
    stack += [dp.layers.BatchNormalization(momentum=0.9), dp.layers.Activation("gelu"), dp.layers.BatchNormalization()]
if options.get("dropout"):
    stack.append(dp.layers.Dropout(options["dropout"]))
model = dp.Sequential([*stack, dp.layers.Dense(10, "softmax")], options.get("trainable", True))
model.compile(
    options.get("optimizer", "adam"),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
    dtype=options["dtype"],
    comm_dtype=options.get("comm_dtype"),
)
warnings.filterwarnings("ignore", "The model does not have any trainable weights")
if options.get("frozen"):
    model.layers[2].trainable = False
history = model.fit(
    x,
    y,
    batch_size=options.get("batch_size", 64),
    epochs=options.get("epochs", 3),
    validation_data=(x_test, y_test),
    drop_last=options.get("drop_last", False),
    verbose=0,
)
prediction = model.predict(x_test[:37], verbose=0)
score = model.evaluate(x_test, y_test, verbose=0)

from dptrain.comm import current  # noqa: E402 - after fit, as a script would

weights = model._named_weights()
digests = current().allgather(
    [float(sum(w.astype(np.float64).sum() for w in weights.values())), float(prediction.sum())]
)
assert all(digest == digests[0] for digest in digests), digests
if current().rank == 0:
    np.savez(out, **weights, prediction=prediction, score=score, history=json.dumps(history.history))
