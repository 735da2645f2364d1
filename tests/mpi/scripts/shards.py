"""Trains with eight shards a batch; rank 0 saves what came out. Arguments: out.npz compiled|numpy|fit [FORM...].

Without a form nothing is sharded. A form is "--shard-weights", "--shard-optimizer", a mesh or both; a model is trained
in each, which must end with the bits of the first.
"""

import sys

import numpy as np

import dptrain as dp
from dptrain.cli.options.mesh import arranged, lay_out
from dptrain.comm import current
from dptrain.data.loading import Split
from dptrain.distribution import set_distribution

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((203, 7), np.float32), RNG.integers(0, 3, 203)
TEST = X[:77], Y[:77]


def build(how, form):
    """Return a model, compiled."""
    dp.utils.clear_session()
    model = dp.Sequential(
        [
            dp.layers.Dense(600, "relu", kernel_regularizer="l2", input_shape=(7,)),
            dp.layers.Dropout(0.3),
            dp.layers.Dense(3, "softmax"),
        ],
        seed=1,
    )
    flags = form.split()
    mesh = next((flag for flag in flags if "=" in flag), None)
    if mesh is not None:
        arranged(mesh, current())
    options = {flag[2:].replace("-", "_"): True for flag in flags if flag.startswith("--")}
    options |= {"metrics": ["accuracy"], "jit_compile": how != "numpy", "shards_per_batch": 8}
    model.compile(dp.optimizers.Adam(0.01, global_clipnorm=0.5), "sparse_categorical_crossentropy", **options)
    model.build()
    if mesh is not None:
        lay_out(model)
    return model


def batches():
    for begin, end in ((0, 40), (40, 43), (43, 130), (130, 131), (131, 203)):  # some leave shards empty
        yield X[begin:end], Y[begin:end]


def trained(how, form):
    """Return weights, losses and scores of a model by name. Collective."""
    model = build(how, form)
    if how == "fit":
        options = {"epochs": 2, "verbose": 0}
        logs = model.fit(X, Y, batch_size=40, validation_data=TEST, validation_batch_size=30, **options).history
        generated = model.fit(batches(), validation_data=TEST, shuffle=False, steps_per_epoch=5, verbose=0).history
        scores = [model.evaluate(*TEST, verbose=0), model.evaluate(batches(), verbose=0, steps=3)]
        scores += [model.train_on_batch(X[:9], Y[:9]), model.train_on_batch(X[:2], Y[:2])]
        scores += [model.evaluate(X[:2], Y[:2], verbose=0), model.test_on_batch(X[:2], Y[:2])]  # less than ranks
        logs["few"] = model.fit(X[:2], Y[:2], batch_size=40, validation_data=(X[:1], Y[:1]), verbose=0).history["loss"]
        logs |= {f"{name} of batches": values for name, values in generated.items()} | {"scores": scores}
    else:
        data, test = Split(X, Y), Split(*TEST)
        logs = model.fit(data, validation_data=test, batch_size=40, epochs=3, verbose=0).history
    logs |= {f"weight {number}": weight for number, weight in enumerate(model.get_weights())}
    set_distribution(None)
    return {name: np.asarray(values) for name, values in logs.items()}


if __name__ == "__main__":
    out, how, *forms = sys.argv[1:]
    first, *others = [trained(how, form) for form in forms or [""]]
    for form, arrays in zip(forms[1:], others, strict=True):
        for name, array in arrays.items():
            assert array.tobytes() == first[name].tobytes(), f"{form}: {name}"
    if current().rank == 0:
        np.savez(out, **first)
