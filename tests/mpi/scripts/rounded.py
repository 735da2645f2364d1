"""Trains with gradients that travel in float16, which some of them do not fit into; prints what becomes of it."""

import json

import numpy as np

import dptrain as dp
from dptrain.comm import current
from dptrain.errors import AgreedError

x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
y = x.sum(1, keepdims=True)


def train(optimizer, targets, **options):
    """Return what ends a training, else its weights and the optimizer's scale."""
    dp.utils.set_random_seed(1)
    model = dp.Sequential([dp.layers.Dense(1, input_shape=(4,))])
    model.compile(optimizer, "mse", **options)
    try:
        model.fit(x, targets, batch_size=8, epochs=2, verbose=0)
    except AgreedError as error:
        return [int(error.exit_code), str(error)]
    scale = getattr(optimizer, "dynamic_scale", None)
    return ["done", bool(np.isfinite(model.get_weights()[0]).all()), None if scale is None else float(scale)]


def scaled():
    """Return an optimizer whose scaled gradients float16 does not hold."""
    return dp.optimizers.LossScaleOptimizer(dp.optimizers.SGD(0.01), initial_scale=2.0**24)


facts = {
    "large": train(dp.optimizers.SGD(1e-9), y * 1e6, comm_dtype="float16"),
    "large, exact": train(dp.optimizers.SGD(1e-9), y * 1e6),
    "large, bfloat16": train(dp.optimizers.SGD(1e-9), y * 1e6, comm_dtype="bfloat16"),
    "scaled": train(scaled(), y, comm_dtype="float16"),
    "scaled, exact": train(scaled(), y),
}
assert len({json.dumps(facts_of_rank) for facts_of_rank in current().allgather(facts)}) == 1
if current().rank == 0:
    print(json.dumps(facts))
