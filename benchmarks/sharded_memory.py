"""Peak memory of a rank, in bytes a parameter: data parallel, ZeRO-1, FSDP and a pipeline.

    mpirun -n 4 python benchmarks/sharded_memory.py [--units 1536] [--layers 8] [--optimizer adam] [--checkpoints DIR]

What the process takes before, Python and a small model that has been trained, is taken away; memory that ranks share
counts for each of them. Linux alone says it (/proc).
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dptrain as dp
from dptrain.comm import current

OPTIMIZERS = {
    **{name: {"class_name": name, "config": {}} for name in ("adam", "adamw", "rmsprop", "adagrad")},
    "momentum": {"class_name": "sgd", "config": {"momentum": 0.9}},
    "clipped adam": {"class_name": "adam", "config": {"global_clipnorm": 1.0}},
}
FORMS = {
    "data parallel": {},
    "ZeRO-1": {"shard_optimizer": True},
    "FSDP": {"shard_weights": True},
    "pipeline": {"stages": current().size},
}


def model(units: int, count: int, form: str, optimizer: str) -> dp.Sequential:
    network = dp.Sequential([dp.Input((units,)), *(dp.layers.Dense(units, use_bias=False) for _ in range(count))])
    chosen = dp.optimizers.get(OPTIMIZERS[optimizer])
    network.compile(chosen, "mse", jit_compile=True, **FORMS[form])
    return network


def peak() -> int:
    """Return the most bytes that this process has had in memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def train(network: dp.Sequential, units: int, checkpoints: str | None = None) -> None:
    rows = np.zeros((16, units), np.float32)
    callbacks = []
    if checkpoints:
        callbacks.append(dp.callbacks.BackupAndRestore(checkpoints, delete_checkpoint=False))
        callbacks.append(dp.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True))
    network.fit(rows, rows, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--form", choices=FORMS, default="data parallel", help="one a process: a peak stays")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument(
        "--checkpoints", metavar="FOLDER", help="then train once more, save there, and keep the best weights"
    )
    options = parser.parse_args()
    train(model(8, current().size, options.form, options.optimizer), 8)
    before = peak()
    network = model(options.units, options.layers, options.form, options.optimizer)
    facts = {"form": options.form, "optimizer": options.optimizer, "ranks": current().size}
    facts |= {"parameters": network.count_params()}
    ways = {"bytes_a_parameter": None} | ({"with_checkpoints": options.checkpoints} if options.checkpoints else {})
    for name, folder in ways.items():
        train(network, options.units, folder)
        most = max(current().allgather(peak() - before))
        facts[name] = round(most / network.count_params(), 2)
    if current().rank == 0:
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
