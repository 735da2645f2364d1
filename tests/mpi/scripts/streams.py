"""Trains on a mix of token shards and a set of Parquet files. Arguments: folder out.json what steps...

"whole" trains to the end, "copy" does and copies the backup behind each of these steps, "resume" goes on from each
copy. Backups are beside out.json; rank 0 writes the digest of the weights and the history of each training.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np

import dptrain as dp
from dptrain.comm import current

folder, out, what, steps = Path(sys.argv[1]), sys.argv[2], sys.argv[3], list(map(int, sys.argv[4:]))
backups = Path(out).parent
dp.utils.enable_op_determinism(8)


def copied(source: Path, target: Path) -> None:
    """Copy a folder in which a thread replaces files."""
    while True:
        try:
            shutil.copytree(source, target)
            return
        except (shutil.Error, FileNotFoundError):
            shutil.rmtree(target, ignore_errors=True)


class Copies(dp.callbacks.Callback):
    """Copies the backup before the step behind each of some steps begins, as a crash there would leave it."""

    step = 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.step in steps and current().rank == 0:
            copied(backups / "backup", backups / f"backup{self.step}")
        self.step += 1


def data():
    options = {"sequence_length": 6, "seed": 5, "shards_per_block": 2, "cache_dir": folder / "cache"}
    first, second = (dp.utils.ShardedDataset(str(folder / name), 10, **options) for name in ("a", "b"))
    kept = second.filter(lambda x, y: x[:, 0] % 7 != 3).map(lambda x, y: ((x + 1) % 50, y))
    return dp.utils.ShardedDataset.mix([first, kept], [2, 1], seed=5)


def train(*callbacks) -> list[str]:
    dp.utils.set_random_seed(1)
    model = dp.Sequential(
        [dp.layers.Input((6,), dtype="int32"), dp.layers.Embedding(50, 8), dp.layers.Dense(50, activation="softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(data(), epochs=3, verbose=0, callbacks=list(callbacks)).history
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(weight).tobytes() for weight in model.get_weights()))
    return [digest.hexdigest(), json.dumps(history)]


def backup(name: str) -> dp.callbacks.Callback:
    return dp.callbacks.BackupAndRestore(backups / name, save_freq=1)


if what == "resume":
    results = {str(step): train(backup(f"backup{step}")) for step in steps}
else:
    results = {what: train(*([backup("backup"), Copies()] if what == "copy" else []))}
if current().rank == 0:
    Path(out).write_text(json.dumps(results))
