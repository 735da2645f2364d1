"""Trains a sweep in packs whose members change, then each of its runs alone; prints what differs, and packs' sizes."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

import dptrain as dp
from dptrain.backend.cuda.executable import CudaExecutable
from dptrain.sweeps.scheduling import capacity, worker
from dptrain.sweeps.scheduling.round_robin import RoundRobin

rng = np.random.default_rng(0)
x, y = rng.normal(size=(50, 6)).astype(np.float32), rng.integers(0, 3, 50)
sizes: Counter[int] = Counter()
execute = CudaExecutable.execute


def noted(self, pack):
    sizes[len(pack)] += 1
    execute(self, pack)


CudaExecutable.execute = noted


def build(learning_rate, dropout):
    layers = [dp.layers.Dense(5, "tanh", input_shape=(6,)), dp.layers.Dropout(dropout), dp.layers.Dense(3, "softmax")]
    model = dp.Sequential(layers)
    others = {".*/bias": dp.optimizers.ScheduleFreeAdamW(learning_rate)}
    chosen = dp.optimizers.OptimizerMap(dp.optimizers.Adam(learning_rate), others)
    model.compile(dp.optimizers.MultiOptimizer(chosen), "sparse_categorical_crossentropy", device="cuda")
    return model


def trained(**options):
    """Return the logs of all epochs and how each run ended, and the sizes of packs."""
    sizes.clear()
    # Runs of one and of three epochs, some of which diverge, in fewer places than there are runs.
    space = {"learning_rate": [1e-3, 1e-2, 1e38], "dropout": [0.2, 0.6], "epochs": [1, 3]}
    with tempfile.TemporaryDirectory() as folder:
        result = dp.sweep(
            build, space, seeds=[5], x=x, y=y, batch_size=16, validation_data=(x, y), out=folder, verbose=0, **options
        )
        logs = (Path(folder) / "results.jsonl").read_text().splitlines()
    return sorted(logs), [run["status"] for run in result.runs], dict(sizes)


facts = {
    "packs": trained(runs_per_device=5),
    "two packs": trained(runs_per_device=5, packing=2),
    "alone": trained(runs_per_device=1),
    "streams": trained(runs_per_device=5, packing=False),
}
logs, statuses, _ = facts["packs"]
differing = {
    name: [pair for pair in zip(logs, facts[name][0], strict=True) if pair[0] != pair[1]]
    + [pair for pair in zip(statuses, facts[name][1], strict=True) if pair[0] != pair[1]]
    for name in ("two packs", "alone", "streams")
}
sizes_found = {name: nbytes for name, (*_, nbytes) in facts.items()}
# Measured: two runs at once are faster than one, four are not, and two packs of one run each are faster still.
speeds, chosen = iter([10.0, 20.0, 21.0, 40.0]), []
capacity._steps_per_second = lambda schedule, trainings: next(speeds)
worker.RoundRobin = lambda threads, packs: chosen.append(packs) or RoundRobin(threads, packs)
sizes_found["measured"] = trained()[-1]
print(json.dumps({"chosen": chosen, "differing": differing, "sizes": sizes_found, "statuses": statuses}))
