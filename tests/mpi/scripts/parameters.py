"""Calls `compile` and `fit` with one parameter changed on the last rank, or between a save and a resume.

Arguments: "ranks" or "resume", a folder, names of cases. Prints each case's outcome as JSON. `CASES` says for each
parameter what it is otherwise and what it is changed to, beside which other arguments.
"""

import json
import os
import sys
from contextlib import suppress
from typing import Any

import numpy as np

import dptrain as dp
from dptrain.comm import current
from dptrain.errors import DptrainError

draw = np.random.default_rng(0)
x, more_x = draw.normal(size=(2, 48, 4)).astype(np.float32)
y, more_y = draw.integers(0, 2, (2, 48))
held_out = {"validation_data": (more_x, more_y)}
fp16 = {"dtype": "mixed_float16"}

# By method and parameter: usual value, another one, and other arguments of `compile` and of `fit` beside both.
CASES: dict[str, dict[str, list[tuple[Any, Any, dict[str, Any], dict[str, Any]]]]] = {
    "fit": {
        "x": [(x, more_x, {}, {})],
        "y": [(y, more_y, {}, {})],
        "batch_size": [(8, 16, {}, {}), (None, 16, {}, {})],
        "epochs": [(2, 3, {}, {})],
        "verbose": [(0, 2, {}, {})],
        "callbacks": [([], ["stop"], {}, {}), (["stop"], ["stop sooner"], {}, {})],
        "validation_split": [(0.25, 0.5, {}, {}), (0.0, 0.25, {}, {})],
        "validation_data": [((x, y), (more_x, more_y), {}, {}), (None, (x, y), {}, {})],
        "shuffle": [(True, False, {}, {}), (True, "batch", {}, {})],
        "class_weight": [(None, {0: 1.0, 1: 2.0}, {}, {}), ({0: 1.0, 1: 3.0}, {0: 1.0, 1: 2.0}, {}, {})],
        "sample_weight": [(None, np.full(48, 2.0), {}, {}), (np.ones(48), np.full(48, 2.0), {}, {})],
        "initial_epoch": [(0, 1, {}, {})],
        "steps_per_epoch": [(None, 2, {}, {}), (3, 2, {}, {})],
        "validation_steps": [(None, 1, {}, held_out)],
        "validation_batch_size": [(None, 4, {}, held_out)],
        "validation_freq": [(1, 2, {}, held_out), ([1, 2], [2], {}, held_out)],
        "drop_last": [(False, True, {}, {"batch_size": 10})],
        "on_nonfinite": [("stop", "ignore", {}, {}), ("stop", "skip", {}, {})],
        "skip_outliers": [(None, 8.0, {}, {}), (8.0, 9.0, {}, {})],
        "digest_every": [(100, 50, {}, {}), (None, 50, {}, {})],
    },
    "compile": {
        "optimizer": [("sgd", "adam", {}, {}), ("slow sgd", "fast sgd", {}, {})],
        "loss": [("sparse_categorical_crossentropy", "loss without a class", {}, {})],
        "loss_weights": [([1.0], [2.0], {}, {})],
        "metrics": [(None, ["accuracy"], {}, {}), (["accuracy"], ["sparse_top_k_categorical_accuracy"], {}, {})],
        "weighted_metrics": [(None, ["accuracy"], {}, {})],
        "run_eagerly": [(False, True, {}, {})],
        "steps_per_execution": [("auto", 2, {}, {}), (1, 2, {}, {})],
        "jit_compile": [("auto", False, {}, {})],
        "auto_scale_loss": [(True, False, fp16, {})],
        "device": [("auto", "cpu", {}, {})],
        "dtype": [(None, "mixed_bfloat16", {}, {})],
        "share_gpu": [(False, True, {}, {})],
        "comm": [("host", "nccl", {}, {})],
        "bucket_mb": [(25.0, 10.0, {}, {})],
        "device_mb": [(None, 1.0, {}, {})],
        "gpu_select": [("mask", "index", {}, {})],
        "precision": [("float32", "tf32", {}, {})],
        "gemm": [("dptrain", "cublas", {}, {})],
        "conv": [("dptrain", "cudnn", {}, {})],
        "cuda_graph": [(True, False, {}, {})],
        "shards_per_batch": [(None, 4, {}, {}), (2, 4, {}, {})],
        "comm_dtype": [(None, "bfloat16", {}, {})],
        "shard_optimizer": [(False, True, {}, {})],
        "shard_weights": [(False, True, {}, {})],
        "stages": [(1, 2, {}, {})],
        "microbatches": [(None, 2, {"stages": 2}, {})],
    },
}


def names() -> list[str]:
    """Return "METHOD PARAMETER NUMBER" of all cases."""
    return [
        f"{method} {parameter} {number}"
        for method, parameters in CASES.items()
        for parameter, cases in parameters.items()
        for number in range(len(cases))
    ]


def settled(value: Any) -> Any:
    """Return new objects for names of what a model cannot share with another."""
    if not isinstance(value, list | str):
        return value
    if isinstance(value, list) and value[:1] in (["stop"], ["stop sooner"]):
        return [dp.callbacks.EarlyStopping("loss", patience=1 if value == ["stop"] else 0)]
    if value == "loss without a class":
        return dp.losses.SparseCategoricalCrossentropy(ignore_class=1)
    if isinstance(value, str) and value.endswith(" sgd"):
        return dp.optimizers.SGD(0.01 if value == "slow sgd" else 0.02)
    return value


def train(name: str, changed: bool, folder: str, stops: bool = False) -> None:
    """Train as a case says, with the other value or the usual one."""
    method, parameter, number = name.split()
    usual, other, of_compile, of_fit = CASES[method][parameter][int(number)]
    compiling = {"optimizer": "sgd", "loss": "sparse_categorical_crossentropy", **of_compile}
    fitting = {"x": x, "y": y, "batch_size": 8, "epochs": 2, "verbose": 0, **of_fit}
    (compiling if method == "compile" else fitting)[parameter] = settled(other if changed else usual)
    layers = [dp.layers.Input((4,)), dp.layers.Dense(4, "relu"), dp.layers.Dense(2, "softmax")]
    model = dp.Sequential(layers, seed=1)
    model.compile(**compiling)
    callbacks = list(fitting.pop("callbacks", []))
    if folder:
        path = os.path.join(folder, name.replace(" ", "-"))
        callbacks.append(dp.callbacks.BackupAndRestore(path, delete_checkpoint=False))
    if stops:
        callbacks.append(dp.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: [0][epoch]))
    model.fit(**fitting, callbacks=callbacks)


def outcome(action) -> list[Any]:
    """Return the exit code and message of an error, or 0."""
    try:
        action()
    except DptrainError as error:
        return [int(error.exit_code), str(error)]
    return [0, ""]


def main(way: str, folder: str, *chosen: str) -> None:
    comm = current()
    for name in chosen or names():
        if way == "ranks":
            print_on_0(comm, name, outcome(lambda name=name: train(name, comm.rank == comm.size - 1, "")))
            continue
        with suppress(IndexError):
            train(name, False, folder, stops=True)
        print_on_0(comm, name, outcome(lambda name=name: train(name, True, folder)))


def print_on_0(comm, name: str, found: list[Any]) -> None:
    if comm.rank == 0:
        print(json.dumps([name, *found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
