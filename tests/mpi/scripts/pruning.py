"""Trains sparse models in every form; rank 0 saves what came out. Arguments: out.npz [FORM...].

A form is as of meshes.py, or "whole", or "different": rank 1 prunes to another sparsity.
"""

import sys

import numpy as np

import dptrain as dp
from dptrain import layers, pruning
from dptrain.cli.options.mesh import arranged, lay_out
from dptrain.comm import current
from dptrain.distribution import set_distribution

RNG = np.random.default_rng(0)
ROWS, CLASSES = RNG.normal(size=(100, 12)), RNG.integers(0, 3, 100)
CASES = {
    "polynomial": {"pruning_schedule": pruning.PolynomialDecay(0.0, 0.75, 1, 9, frequency=2)},
    "regrowth": {"pruning_schedule": pruning.ConstantSparsity(0.5, 0, frequency=3), "regrowth": 0.3},
    "global": {"pruning_schedule": pruning.ConstantSparsity(0.75, 2), "global_unstructured": True},
    "2:4": {"pruning_schedule": pruning.ConstantSparsity(0.5, 2), "sparsity_m_by_n": (2, 4)},
}


def trained(case, flags):
    """Return weights, masks and logs."""
    dp.utils.set_random_seed(5)
    sharded = {flag[2:].replace("-", "_"): True for flag in flags if flag.startswith("--")}
    mesh = next((flag for flag in flags if "=" in flag), None)
    if mesh is not None:
        arranged(mesh, current())
    model = dp.Sequential(
        [dp.Input((12,)), layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dense(8), layers.Dense(3)]
    )
    loss = dp.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = flags == ["whole"] and case in ("regrowth", "global")
    model.compile(dp.optimizers.Adam(0.01), loss, dtype="float64", jit_compile=compiled, **sharded)
    how = CASES[case]
    if flags == ["different"] and current().rank == 1:
        how = how | {"pruning_schedule": pruning.PolynomialDecay(0.0, 0.5, 1, 9, frequency=2)}
    pruning.prune_low_magnitude(model, **how)
    if mesh is not None:
        lay_out(model)
    history = model.fit(ROWS, CLASSES, batch_size=30, epochs=3, verbose=0, digest_every=2).history
    arrays = {f"{case}/{number}": weight for number, weight in enumerate(model.get_weights())}
    arrays |= {f"{case}/{mask.path}": mask.numpy() for mask in model.optimizer._masks.values()}
    arrays |= {f"{case}/{key}": np.array(values) for key, values in history.items()}
    set_distribution(None)
    return arrays


if __name__ == "__main__":
    out, *forms = sys.argv[1:]
    arrays = {}
    for form in forms or [""]:
        for case in CASES:
            arrays |= {f"{form}|{key}": array for key, array in trained(case, form.split()).items()}
    if current().rank == 0:
        np.savez(out, **arrays)
