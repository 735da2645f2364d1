"""`python -m dptrain train`: train one model as configured, and leave a run directory."""

import argparse
import os
import platform
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.callbacks import Callback, EpochRecorder, StopOnDivergence
from dptrain.cli.building import build_model, epochs_of, load_data, make_sampler, run_name
from dptrain.cli.config import Config, to_yaml, verbosity
from dptrain.cli.ranks import show_ranks
from dptrain.cli.run_directory import RunDirectory
from dptrain.comm import Communicator
from dptrain.data.loading import LoadedData
from dptrain.models import Sequential
from dptrain.runtime import terminal
from dptrain.runtime.failure import phase
from dptrain.train.trainer import run_to_end
from dptrain.version import __version__


def train(config: Config, comm: Communicator, parsed: argparse.Namespace) -> int:
    """Train as configured, and leave a run directory."""
    started = time.time()
    phase.enter("data")
    data = load_data(config, comm)
    phase.enter("model")
    sampler = comm.agree("configuration", lambda: make_sampler(config, data, comm))
    model = comm.agree("model", lambda: build_model(config, data))
    device = model.describe_device(comm)
    quiet = config.verbose == 0
    devices = _show_start(config, data, model, sampler.steps, device, comm, quiet)
    with ExitStack() as stack:
        run = _open_run(config, data, comm, stack)
        callbacks: list[Callback] = [] if run is None else [EpochRecorder(run.add_epoch)]
        steps = model.fit_splits_steps(
            data.train,
            data.test,
            sampler,
            epochs=epochs_of(config),
            verbose=verbosity(config),
            callbacks=[*callbacks, StopOnDivergence()],
        )
        run_to_end(steps)
        history = model.history
        assert history is not None
        phase.enter("saving")
        final = {key: values[-1] for key, values in history.history.items()}
        seconds = round(time.time() - started, 3)

        def write_results() -> list[str]:
            if run is None:
                return []
            summary = {
                "metrics": final,
                "epochs": len(history.epoch),
                "seconds": seconds,
                "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
                "world_size": comm.size,
                "devices": devices,
                "data": {"name": data.name, "train": data.train.total, "test": data.test.total},
                "parameters": model.count_params(),
                "versions": {
                    "dptrain": __version__,
                    "python": platform.python_version(),
                    "numpy": np.__version__,
                    "communicator": comm.description,
                },
            }
            architecture = [{"class": type(layer).__name__, "config": layer.config()} for layer in model.layers]
            return run.finish({one.path: one.numpy() for one in model.weights}, architecture, summary)

        files = comm.agree("saving", write_results)
        if run is not None and not quiet:
            if config.fast_dev_run and config.out is None:
                terminal.say(f"Fast dev run: everything works ({', '.join(files)} written and removed)")
            else:
                missing = "" if "curves.png" in files else " (no curves.png: pip install 'dptrain[plots]')"
                terminal.say(f"Results in {run.path}: {', '.join(files)}{missing}")
    return 0


def _open_run(config: Config, data: LoadedData, comm: Communicator, stack: ExitStack) -> RunDirectory | None:
    """Claim the run directory on rank 0, before anything is trained; a fast dev run's is removed in the end."""

    def claim() -> RunDirectory | None:
        if comm.rank != 0:
            return None
        if config.out is not None:
            path = Path(config.out)
        elif config.fast_dev_run:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dptrain-")))
        else:
            return RunDirectory.in_free_place(run_name(config, data), to_yaml(config))
        return RunDirectory(path, to_yaml(config))

    return comm.agree("output", claim)


def _show_start(
    config: Config, data: LoadedData, model: Sequential, steps: int, device: str, comm: Communicator, quiet: bool
) -> list[list[Any]]:
    """Print who computes what, on rank 0; return the table's rows: rank, host, PID, device."""
    rows = [[rank, *found] for rank, found in enumerate(comm.allgather([comm.host, os.getpid(), device]))]
    if comm.rank == 0 and not quiet:
        show_ranks(rows)
        network = " -> ".join(
            ["x".join(map(str, data.train.x.shape[1:])), *map(str, config.model.hidden), str(data.num_classes)]
        )
        terminal.say(
            f"{data.name}: {data.train.total:,} + {data.test.total:,} samples; "
            f"{network}, {model.count_params():,} parameters; {config.optimizer.name}, "
            f"global batch {config.train.batch_size}, {steps} step{'' if steps == 1 else 's'} an epoch"
        )
    return rows
