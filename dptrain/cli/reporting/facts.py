"""What was trained on what, in plain words, and what it took: from a run's configuration, data and summary."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dptrain.cli.building import Splits, describe_network
from dptrain.cli.options.config import Config
from dptrain.cli.run_records import is_number, is_whole, numbers_of
from dptrain.data.loading import LoadedData
from dptrain.data.sources import format_bytes
from dptrain.runtime.text import counted
from dptrain.sweeps.reporting import formatting

# Names of columns and classes that are listed.
_MOST_NAMES = 12


@dataclass(frozen=True)
class Outcome:
    """A run's end, as its summary.json has it: what is not of the expected type is left out.

    Attributes:
        metrics, test: final metrics; those of the test part, evaluated once, if it is not the validation part.
        epochs, seconds, world_size: of the training.
        restored: the epoch, from 1, whose weights early stopping restored; None for the last epoch's.
        best: epoch, name and value of the monitored metric of best.keras.
        devices: rank, host, PID and device.
        memory: most resident bytes by rank.
        parameters: of the model.
        versions: by name.
    """

    metrics: Mapping[str, float]
    test: Mapping[str, float]
    epochs: int
    seconds: float | None
    world_size: int
    restored: int | None
    best: tuple[int, str, float] | None
    devices: Sequence[tuple[str, str]]
    memory: Sequence[int]
    parameters: int | None
    started: str
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> "Outcome":
        """Return the outcome in a summary."""
        best, devices, memory = summary.get("best"), summary.get("devices"), summary.get("memory")
        rows = [row for row in _listed(devices) if isinstance(row, list | tuple) and len(row) == 4]
        has_best = isinstance(best, dict) and isinstance(best.get("monitor"), str) and is_whole(best.get("epoch"))
        versions = summary.get("versions")
        return cls(
            metrics=numbers_of(summary.get("metrics")),
            test=numbers_of(summary.get("test")),
            epochs=_count(summary.get("epochs")) or 0,
            seconds=float(summary["seconds"]) if is_number(summary.get("seconds")) else None,
            world_size=_count(summary.get("world_size")) or 1,
            restored=_count(summary.get("restored")),
            best=(best["epoch"], best["monitor"], best["value"])
            if isinstance(best, dict) and has_best and is_number(best.get("value"))
            else None,
            devices=[(str(host), str(device)) for _, host, _, device in rows],
            memory=[entry for entry in _listed(memory) if is_whole(entry)],
            parameters=_count(summary.get("parameters")),
            started=str(summary.get("started", "")),
            versions={str(name): str(version) for name, version in versions.items()}
            if isinstance(versions, dict)
            else {},
        )


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _count(value: Any) -> int | None:
    return value if is_whole(value) else None


def sentences(config: Config, data: LoadedData, splits: Splits, outcome: Outcome) -> list[str]:
    """Return what was trained on what, and how the held-out samples were used."""
    return [_aim(data), _samples(data, splits), _training(config, data, outcome), _weights(config, outcome)]


def _aim(data: LoadedData) -> str:
    preprocessing = data.preprocessing
    source = data.name
    if preprocessing is not None and preprocessing.kind == "table":
        names = [column.name for column in preprocessing.columns]
        source = f"{counted(len(names), 'column')} of {data.name} ({formatting.listed(names, _MOST_NAMES)})"
    elif preprocessing is not None and preprocessing.kind == "pictures":
        source = f"the pictures in {data.name}"
    target = getattr(preprocessing, "target", None)
    if data.task == "regression":
        what = f"the number {target}" if target else counted(data.outputs, "number")
        return f"The model was trained on {source} to predict {what}."
    classes = list(preprocessing.class_names) if preprocessing is not None else []
    listed = f": {formatting.listed(classes, _MOST_NAMES)}" if classes else ""
    about = f" of {target}" if target else ""
    return f"The model was trained on {source} to tell {max(data.num_classes, 2):,} classes{about} apart{listed}."


def _samples(data: LoadedData, splits: Splits) -> str:
    text = f"It learned from {counted_samples(len(splits.train))}"
    if splits.test is None:
        return f"{text}; {counted_samples(len(splits.validation))} were held out, to validate on after each epoch."
    return (
        f"{text}; {counted_samples(len(splits.validation))} were set apart to validate on after each epoch, and "
        f"{counted_samples(len(data.test))} (the test part) were held out until the end."
    )


def counted_samples(count: int) -> str:
    """Return "1 sample" or "54,000 samples"."""
    return f"{count:,} {'sample' if count == 1 else 'samples'}"


def _training(config: Config, data: LoadedData, outcome: Outcome) -> str:
    size = "" if outcome.parameters is None else f", with {outcome.parameters:,} parameters"
    rate = config.optimizer.learning_rate
    optimizer = config.optimizer.name + ("" if rate is None else f" at a learning rate of {formatting.number(rate)}")
    return (
        f"The network is {describe_network(config, data)}{size}. It was trained for {counted(outcome.epochs, 'epoch')} "
        f"with {optimizer} in batches of {config.train.batch_size:,}."
    )


def _weights(config: Config, outcome: Outcome) -> str:
    kept = ""
    if outcome.best is not None:
        epoch, monitor, value = outcome.best
        kept = f" best.keras holds those of epoch {epoch}, the best by {monitor} ({formatting.number(value)})."
    if outcome.restored is None:
        return f"This page shows the weights of the last epoch, in model.keras.{kept}"
    chosen = config.train.monitor.partition(":")[0]
    return (
        f"This page shows the weights of epoch {outcome.restored}, which early stopping restored as the best by "
        f"{chosen}."
    )


def caution(config: Config, splits: Splits, outcome: Outcome) -> str:
    """Return why the figures may flatter the model; empty if nothing was chosen by the held-out samples."""
    if splits.test is None and outcome.restored is not None:
        return (
            "The epoch was chosen by these same samples, so expect slightly worse figures on new ones. With "
            "--validation-split 0.1 other samples choose it."
        )
    return ""


def costs(outcome: Outcome, epochs: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return time, speed, memory and devices: rows of a table."""
    rows = []
    if outcome.started:
        rows.append(("started", outcome.started))
    if outcome.seconds is not None:
        rows.append(("time, from start to saved model", f"{outcome.seconds:,.1f} s"))
    speeds = [epoch["samples_per_second"] for epoch in epochs if "samples_per_second" in epoch]
    if speeds:
        rows.append(("samples a second, median of the epochs", f"{statistics.median(speeds):,.0f}"))
    if epoch_seconds := [epoch["seconds"] for epoch in epochs if "seconds" in epoch]:
        rows.append(("seconds an epoch, median", f"{statistics.median(epoch_seconds):,.3g}"))
    rows.append(("ranks", str(outcome.world_size)))
    for rank, (host, device) in enumerate(outcome.devices):
        used = f"; at most {format_bytes(outcome.memory[rank])} of memory" if rank < len(outcome.memory) else ""
        rows.append((f"rank {rank}", f"{host}, {device}{used}"))
    return [*rows, *((name, version) for name, version in outcome.versions.items())]
