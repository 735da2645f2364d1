"""`python -m dptrain train`: trains one model and leaves a run directory."""

import argparse
import os
import platform
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.batches.inputs import Samples
from dptrain.callbacks import Callback, EpochRecorder
from dptrain.callbacks.checkpointing import Checkpointing
from dptrain.callbacks.history import History
from dptrain.cli import predictions
from dptrain.cli.best import (
    BestModel,
    best_model,
    directions,
    early_stopping,
    final_metrics,
    monitored,
    restored_epoch,
    say_why_unsaved,
)
from dptrain.cli.building import (
    Splits,
    build_model,
    describe_network,
    describe_samples,
    fed,
    fit_arguments,
    load_data,
    run_name,
    schedule_steps,
    splits_of,
    steps_of,
)
from dptrain.cli.classes import held_out_outputs, of_classes
from dptrain.cli.curves import can_draw
from dptrain.cli.options.config import Config, TrainConfig, deciding, to_yaml, verbosity
from dptrain.cli.options.loggers import loggers
from dptrain.cli.options.mesh import lay_out
from dptrain.cli.options.pruning import refuse_unused, settled
from dptrain.cli.ranks import show_ranks
from dptrain.cli.reporting.page import installed
from dptrain.cli.reporting.quality import held_out_of
from dptrain.cli.reporting.report import Run, is_signalled, is_wanted, try_report_of
from dptrain.cli.run_directory import RunDirectory
from dptrain.cli.run_records import read_config
from dptrain.cli.streams import StreamSplit
from dptrain.comm import Communicator
from dptrain.data.loading import LoadedData
from dptrain.errors import DataError, OutputError, PreemptedError
from dptrain.models import Model
from dptrain.runtime import signals
from dptrain.runtime.extras import pip_install
from dptrain.runtime.failure import phase
from dptrain.runtime.memory import most_resident_bytes
from dptrain.runtime.output import terminal
from dptrain.runtime.storage.files import FILE, open_directory
from dptrain.saving import keras_zip
from dptrain.saving.run_folder import BEST, CHECKPOINTS, CONFIG, CURVES, MODEL, REPORT, SUMMARY, WEIGHTS
from dptrain.saving.weights import encode_safetensors
from dptrain.sweeps.reporting import formatting
from dptrain.train.trainer import run_to_end
from dptrain.version import __version__


def train(config: Config, comm: Communicator, parsed: argparse.Namespace) -> int:
    """Train as configured, and leave a run directory."""
    started, began = time.time(), time.monotonic()
    if comm.broadcast_fact(comm.rank == 0 and _has_ended(config)):
        if comm.rank == 0 and config.verbose != 0:
            terminal.say(f"The run in {config.out} had already finished when the job failed; nothing is left to do")
        return 0
    phase.enter("data")
    data = load_data(config, comm)
    phase.enter("model")
    splits = comm.agree("configuration", lambda: splits_of(config, data))
    steps = comm.agree("configuration", lambda: steps_of(config, splits, comm))
    model = comm.agree("model", lambda: _build(config, data, splits, steps))
    device = model._describe_device(comm)
    quiet = config.verbose == 0
    devices = _show_start(config, data, splits, model, steps, device, comm, quiet)
    with ExitStack() as stack:
        run = _open_run(config, data, comm, stack)
        callbacks: list[Callback] = [] if run is None else [EpochRecorder(run.add_epoch, run.keep_epochs)]
        folder = comm.broadcast_fact(None if run is None else str(run.path))
        keeper = _keeper(config, folder, comm.agree("data", lambda: _facts(config, data, comm)))
        first = settled(config, schedule_steps(config, steps))
        best = best_model(config, model, folder, first)
        stopping = early_stopping(config, first=first, verbose=0 if quiet else 1)
        callbacks += [callback for callback in (best, stopping) if callback is not None]
        named = comm.broadcast_fact(None if run is None else run.path.resolve().name)
        callbacks += comm.agree("logging", lambda: loggers(config, folder, named))
        if keeper is None:
            signals.release_early()
        callbacks += [] if keeper is None else [keeper]
        history = _fit(model, config, splits, steps, callbacks, keeper)
        tested, outputs = _evaluate(model, config, splits)
        phase.enter("saving")
        final = final_metrics(history.history, history.epoch, stopping)
        restored = restored_epoch(history.epoch, stopping)
        summary = {
            "metrics": final,
            "directions": directions(model, final),
            **({"test": tested} if tested else {}),
            **_by_class(model, splits, outputs),
            **({} if best is None or best.best_epoch is None else {"best": best.summary()}),
            "epochs": len(history.epoch),
            **({} if restored is None else {"restored": restored}),
            "seconds": round(time.monotonic() - began, 3),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
            "world_size": comm.size,
            "devices": devices,
            **_of_job(config, data, splits, model, comm),
        }
        with model._readable_on(0):
            files = comm.agree("saving", lambda: [] if run is None else run.finish(_model_files(model), summary))
        files += _report(config, data, splits, model, comm, run, summary, outputs)
        if not quiet and comm.rank == 0:
            _show_results(config, best, len(history.epoch), tested, run, files)
    return 0


def _by_class(model: Model, splits: Splits, outputs: Any) -> dict[str, Any]:
    scores = of_classes(predictions.meaning(model), held_out_of(splits).selected().y, outputs)
    return {} if scores is None else {"classes": scores}


def _of_job(config: Config, data: LoadedData, splits: Splits, model: Model, comm: Communicator) -> dict[str, Any]:
    """Return a summary's entries about memory, kernels, data and versions. Collective."""
    memory = comm.allgather(most_resident_bytes())
    chosen = model._open_device(comm).chosen
    return {
        **({"memory": memory} if all(memory) else {}),
        **({"kernels": dict(chosen)} if chosen else {}),
        "data": _sizes(data, splits),
        "parameters": model.count_params(),
        "versions": _versions(comm),
    }


def _model_files(model: Model) -> dict[str, bytes]:
    files = {} if keras_zip.why_not_saved(model) else {MODEL: keras_zip.encode(model)}
    return files | {WEIGHTS: encode_safetensors(model)}


def _report(
    config: Config,
    data: LoadedData,
    splits: Splits,
    model: Model,
    comm: Communicator,
    run: RunDirectory | None,
    summary: dict[str, Any],
    outputs: Any,
) -> list[str]:
    """Write report.html if it is wanted, and return its name if it is written. Collective."""
    if not is_wanted(config, comm):
        return []
    record = Run("", {}, []) if run is None else Run.of(run.path, summary, run.epochs)
    content = try_report_of(model, config, data, splits, comm, record, outputs)
    return comm.agree("saving", lambda: [run.add_report(content)] if run is not None and content else [])


def _fit(
    model: Model, config: Config, splits: Splits, steps: int, callbacks: list[Callback], keeper: Checkpointing | None
) -> History:
    """Train and return the history; a PreemptedError says how to go on."""
    try:
        run_to_end(
            model._fit_in_steps(**fit_arguments(config, splits, steps), callbacks=callbacks, verbose=verbosity(config))
        )
    except PreemptedError as error:
        advice = f"start again with --out {keeper.path.parent} to continue" if keeper else ""
        raise PreemptedError(error.where, error.exit_code, f"{error}; {advice}", []) from None
    assert model.history is not None
    return model.history


def _evaluate(model: Model, config: Config, splits: Splits) -> tuple[dict[str, float], Any]:
    """Return the metrics of a test part, and a classifier's outputs for the held-out samples. Collective."""
    tested: dict[str, float] = {}
    if splits.test is not None:
        logs = model.evaluate(fed(splits.test), verbose=0, return_dict=True)
        assert isinstance(logs, dict)
        tested = logs
    if isinstance(splits.train, StreamSplit):  # of which a rank has samples of its own
        return tested, None
    return tested, held_out_outputs(model, held_out_of(splits), config.train.batch_size)


def _sizes(data: LoadedData, splits: Splits) -> dict[str, Any]:
    validation = {"validation": len(splits.validation)} if splits.test else {}
    return {"name": data.name, "train": len(splits.train), **validation, "test": len(data.test)}


def _versions(comm: Communicator) -> dict[str, str]:
    return {
        "dptrain": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "communicator": comm.description,
    }


def _show_results(
    config: Config,
    best: BestModel | None,
    epochs: int,
    tested: dict[str, float],
    run: RunDirectory | None,
    files: list[str],
) -> None:
    """Print the best epoch, the test metrics, and the files that the run wrote."""
    if best is not None and best.best_epoch is not None:
        where = f"epoch {best.best_epoch} of {epochs}"
        terminal.say(f"best {best.monitor}: {formatting.number(best.best)} in {where}, kept as {BEST}")
    if tested:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in tested.items())
        terminal.say(f"test part, evaluated once: {shown}")
    if run is None:
        return
    if config.fast_dev_run and config.out is None:
        terminal.say(f"Fast dev run: everything works ({', '.join(files)} written and removed)")
    else:
        terminal.say(f"Results in {run.path}: {', '.join(sorted(files))}{_missing(config, run.path, files)}")


def _missing(config: Config, path: Path, files: list[str]) -> str:
    """Return which pictures and pages lack a package or came too late, and how to get them."""
    if is_signalled() and config.report and REPORT not in files and installed():
        return f" (no {REPORT}, as a signal came: python -m dptrain report {path} writes it)"
    lacks_page = config.report and not config.fast_dev_run and not installed()
    if CURVES not in files and not can_draw():
        names = f"{CURVES} and {REPORT}" if lacks_page else CURVES
        return f" (no {names}: {pip_install('report' if lacks_page else 'plots')})"
    return f" (no {REPORT}: {pip_install('report')})" if lacks_page else ""


def _build(config: Config, data: LoadedData, splits: Splits, steps: int) -> Model:
    """Return the model, after checking that its logs will have the monitored metric."""
    refuse_unused(config)
    model = build_model(config, data, splits.train.rows, schedule_steps(config, steps))
    monitored(config, model)
    if config.mesh is not None:
        lay_out(model)
    return model


def _has_ended(config: Config) -> bool:
    """Whether a job that `launch` restarted finds its run completed; other starts with its --out are refused."""
    if config.out is None or os.environ.get("DPTRAIN_RESTART", "0") == "0":
        return False
    try:
        with open_directory(Path(config.out)) as folder:
            return folder.kind(SUMMARY) == FILE and folder.holds(CONFIG, [to_yaml(config).encode()])
    except (OSError, DataError):
        return False


def _open_run(config: Config, data: LoadedData, comm: Communicator, stack: ExitStack) -> RunDirectory | None:
    """Claim the run directory on rank 0 before training; a fast dev run's is removed in the end."""

    def claim() -> RunDirectory | None:
        if comm.rank != 0:
            return None
        if config.out is not None:
            path = Path(config.out)
        elif config.fast_dev_run:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dptrain-")))
        else:
            return stack.enter_context(RunDirectory.in_free_place(run_name(config, data), to_yaml(config)))
        source = config.checkpoint.resume
        inside = source != "never" and Path(source).resolve().is_relative_to(path.resolve())
        # Two steps are not the rest of a run: they would end it.
        resumes = not config.fast_dev_run and (source == "auto" or inside)
        run = stack.enter_context(RunDirectory(path, to_yaml(config), resumes=resumes))
        if run.continues and not any(run.checkpoints.glob("*")):
            _refuse_another(config, run.path)
            run.keep_epochs([])
        return run

    return comm.agree("output", claim)


def _refuse_another(config: Config, path: Path) -> None:
    if deciding(read_config(path)) != deciding(config):
        raise OutputError(f"{path} holds an unfinished run with other settings; choose another --out")


def _facts(config: Config, data: LoadedData, comm: Communicator) -> dict[str, Any]:
    """Return what must not change when the training resumes."""
    train = data.train
    shown = train.stream.describe_order() if isinstance(train, StreamSplit) else Samples(train.x, train.y).facts
    facts = {**deciding(config), "data": shown}
    if config.data.sharding == "static":
        facts["world_size"] = comm.size
    return facts


def _keeper(config: Config, folder: str | None, facts: dict[str, Any]) -> Checkpointing | None:
    settings = config.checkpoint
    source = None if settings.resume in ("auto", "never") else Path(settings.resume)
    words = [word for word in settings.every if word != "none"]
    if folder is None or config.fast_dev_run or not (words or source):
        return None
    keeper = Checkpointing(
        Path(folder) / CHECKPOINTS,
        epochs="epoch" in words,
        steps=min((int(word) for word in words if word.isdecimal()), default=None),
        seconds=min((float(word[:-1]) for word in words if word.endswith("s")), default=None),
        keep=settings.keep,
        source=source,
        resumes=settings.resume != "never",
        owns=True,
        facts=facts,
        advice="choose another --out, or have fewer checkpoints (--keep, --checkpoint-every none)",
    )
    keeper.resume_anyway = settings.anyway
    return keeper


def _describe_sharding(config: Config) -> str:
    """Describe what ranks share beside the batch, for the end of a line; None if nothing."""
    parts = {
        f"; mesh {config.mesh}": config.mesh is not None,
        f"; {config.stages} stages": config.stages > 1,
        "; weights and slots sharded (FSDP)": config.shard_weights,
        "; slots sharded (ZeRO-1)": config.shard_optimizer and not config.shard_weights,
    }
    return "".join(text for text, holds in parts.items() if holds)


def _show_start(
    config: Config,
    data: LoadedData,
    splits: Splits,
    model: Model,
    steps: int,
    device: str,
    comm: Communicator,
    quiet: bool,
) -> list[list[Any]]:
    """Print who computes what on rank 0; return rows of rank, host, PID, device."""
    rows = [[rank, *cells] for rank, cells in enumerate(comm.allgather([comm.host, os.getpid(), device]))]
    if comm.rank == 0 and not quiet:
        show_ranks(rows)
        network = describe_network(config, data)
        for note in data.notes:
            terminal.say(note)
        terminal.say(
            f"{data.name}: {describe_samples(data, splits)}; "
            f"{network}, {model.count_params():,} parameters; {model._compiled_optimizer.name}, "
            f"global batch {config.train.batch_size}, {steps} step{'' if steps == 1 else 's'} an epoch"
            f"{_describe_sharding(config)}"
        )
        if steps == 1 and not config.fast_dev_run and config.train.batch_size == TrainConfig.batch_size:
            terminal.say(
                "An epoch is a single step over all samples; a smaller --batch-size gives more steps, and trains faster"
            )
        say_why_unsaved(model)
    return rows
