"""Losses whose rows meet, for Keras and dptrain alike; as a program, dptrain's numbers on the ranks that run it."""

import sys

import numpy as np

VIEW = 3
RNG = np.random.default_rng(7)
# Batches of 7, 5 and 2 rows: shards are uneven, and on three ranks one of them is empty.
BATCHES = [
    (RNG.standard_normal((rows, 2 * VIEW + 1)), RNG.integers(0, 3, (rows, 1)).astype("float64")) for rows in (7, 5, 2)
]
START = [RNG.standard_normal((2 * VIEW + 1, 2 * VIEW)) / 2, RNG.standard_normal(2 * VIEW) / 4]


def unit(ops, x):
    return x / ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True) + 1e-9)


def info_nce(ops, y, z):
    """Each row's second view among those of all rows."""
    logits = ops.matmul(unit(ops, z[:, :VIEW]), ops.transpose(unit(ops, z[:, VIEW:]))) / 0.2
    return ops.sparse_categorical_crossentropy(ops.arange(ops.shape(z)[0]), logits, from_logits=True)


def clip(ops, y, z):
    """From either tower to the other."""
    a, b = (unit(ops, part) for part in ops.split(z, 2, axis=1))
    logits = 3.0 * ops.einsum("id,jd->ij", a, b)
    targets = ops.one_hot(ops.arange(ops.shape(z)[0]), ops.shape(z)[0], dtype="float64")
    both = [ops.categorical_crossentropy(targets, part, from_logits=True) for part in (logits, ops.transpose(logits))]
    return (both[0] + both[1]) / 2


def sim_clr(ops, y, z):
    """Views as halves of 2n rows."""
    n = ops.shape(z)[0]
    both = unit(ops, ops.concatenate([z[:, :VIEW], z[:, VIEW:]], axis=0))
    logits = ops.matmul(both, ops.transpose(both)) / 0.5 - 1e9 * ops.eye(2 * n, dtype="float64")
    partners = ops.concatenate([ops.arange(n) + n, ops.arange(n)], axis=0)
    losses = ops.sparse_categorical_crossentropy(partners, logits, from_logits=True)
    return (losses[:n] + losses[n:]) / 2


def barlow_twins(ops, y, z):
    """Correlations of the views' features over the batch."""
    n = ops.shape(z)[0]
    a, b = ((part - ops.mean(part, axis=0)) / (ops.std(part, axis=0) + 1e-3) for part in (z[:, :VIEW], z[:, VIEW:]))
    correlation = ops.matmul(ops.transpose(a), b) / ops.cast(n, "float64")
    diagonal = ops.eye(VIEW, dtype="float64")
    weights = diagonal + 0.05 * (1 - diagonal)
    return ops.sum(weights * ops.square(correlation - diagonal))


def distances(ops, z):
    return ops.sum(ops.square(ops.expand_dims(z, 0) - ops.expand_dims(z, 1)), axis=-1)


def hardest_triplets(ops, y, z):
    """The farthest row of the same label and the nearest of another."""
    far, y = distances(ops, z), ops.reshape(y, (-1,))
    same = ops.equal(ops.expand_dims(y, 0), ops.expand_dims(y, 1))
    positive = ops.max(ops.where(same, far, ops.zeros_like(far)), axis=1)
    negative = ops.min(ops.where(same, ops.full_like(far, 1e6), far), axis=1)
    return ops.relu(positive - negative + 1.0)


def supervised(ops, y, z):
    """SupCon: the mean over all other rows of the same label."""
    n, z = ops.shape(z)[0], unit(ops, z)
    itself = ops.eye(n, dtype="float64")
    logits = ops.matmul(z, ops.transpose(z)) / 0.5 - 1e9 * itself
    same = ops.cast(ops.equal(ops.reshape(y, (-1, 1)), ops.reshape(y, (1, -1))), "float64") - itself
    counted = ops.maximum(ops.sum(same, axis=1), 1.0)
    return -ops.sum(same * ops.log_softmax(logits, axis=-1), axis=1) / counted


LOSSES = {
    function.__name__: function for function in (info_nce, clip, sim_clr, barlow_twins, hardest_triplets, supervised)
}


def build(k):
    """Return a model of two towers, which read all features and give a view each, with its first weights."""
    x = k.Input((2 * VIEW + 1,))
    views = [k.layers.Dense(VIEW, "tanh", name=name)(x) for name in ("first", "second")]
    model = k.Model(x, k.layers.Concatenate()(views))
    kernel, bias = START
    model.set_weights([kernel[:, :VIEW], bias[:VIEW], kernel[:, VIEW:], bias[VIEW:]])
    return model


def trained(k, name, **options):
    """Return the losses of a training on all batches, the evaluation of the first, and the weights after it."""
    model = build(k)
    model.compile(k.optimizers.SGD(0.1, momentum=0.9), lambda y, z: LOSSES[name](k.ops, y, z), **options)
    losses = [model.train_on_batch(x, y) for _ in range(2) for x, y in BATCHES]
    values = {"losses": losses, "evaluated": model.evaluate(*BATCHES[0], batch_size=4, verbose=0)}
    values |= {"predicted": model.predict(BATCHES[0][0], batch_size=4, verbose=0)}
    weights = {f"weight {number}": weight for number, weight in enumerate(model.get_weights())}
    return {f"{name} {key}": np.asarray(value, "float64") for key, value in (values | weights).items()}


if __name__ == "__main__":
    import dptrain as dp

    dp.config.set_floatx("float64")
    results = {key: value for name in LOSSES for key, value in trained(dp, name, device="cpu").items()}
    if dp.rank() == 0:
        np.savez(sys.argv[1], **results)
