"""The configuration of a run: frozen dataclasses, filled from defaults, a file and the command line, in that order.

Everything that a user can set is a field here, with its type, its range and its help; the command line, the file
format and `config.yaml` follow from the fields.
"""

import copy
import csv
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Interval

from dptrain.cli.options.words import suggest
from dptrain.data.tasks import task_of_loss
from dptrain.errors import ConfigError
from dptrain.runtime.checked import Before, Checked, NotValidError, checked
from dptrain.runtime.defaults import DEFAULT_BUCKET_MB, DEFAULT_CACHE_BYTES, DEFAULT_MAX_BYTES, REPRODUCIBLE_SHARDS
from dptrain.runtime.output.terminal import VERBOSITY
from dptrain.runtime.text import short

# Largest integer: the limit of 32-bit counters such as MPI's.
_MAX_COUNT = 2**31 - 1


def _comma_separated(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(value, int) else value


def _names(value: object) -> object:
    return [] if _none_word(value) is None else _quoted(value)


def _quoted(value: object) -> object:
    """Return names separated by commas as a list; one with a comma stands in quotes, as in a table's header."""
    if not isinstance(value, str):
        return _comma_separated(value)
    parts = next(csv.reader([value], skipinitialspace=True), [])
    return [part.strip() for part in parts if part.strip()]


def _words(value: object) -> object:
    return [] if isinstance(value, str) and value in ("", "none") else _quoted(value)


def _none_word(value: object) -> object:
    return None if isinstance(value, str) and value.lower() in ("none", "null", "") else value


def _on_or_off(value: object) -> object:
    words = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def _moments(value: object) -> object:
    words = [str(part) for part in value] if isinstance(value, list | tuple) else _comma_separated(str(value))
    for word in words if isinstance(words, list) else []:
        if not re.fullmatch(r"epoch|none|[1-9]\d{0,8}s?", word):
            raise ValueError(f"{short(word)}: expected a number of steps, epoch, seconds such as 600s, or none")
    return words


def _fold(value: object) -> object:
    if isinstance(value, str) and _none_word(value) is not None:
        fold, _, folds = value.partition("/")
        if not (fold.isdecimal() and folds.isdecimal() and 1 <= int(fold) <= int(folds) and int(folds) >= 2):
            raise ValueError(f"{short(value)}: expected a fold and the number of folds, such as 2/5")
    return _none_word(value)


def _mesh(value: object) -> object:
    text = _none_word(value)
    if isinstance(text, str):
        axes = [re.fullmatch(r"\s*([a-z_]\w*)\s*=\s*([1-9]\d{0,5})\s*", axis) for axis in text.split(",")]
        names = [match[1] for match in axes if match is not None]
        if len(set(names)) < len(axes) or len(axes) > 2:
            raise ValueError(f"{short(value)}: expected one or two axes and their lengths, such as batch=2,model=2")
        return ",".join(f"{match[1]}={match[2]}" for match in axes if match is not None)
    return text


def _image_size(value: object) -> object:
    text = _none_word(value)
    if isinstance(text, str) and not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}", text):
        raise ValueError(f"{short(value)}: expected height and width, such as 32x32")
    return text


def _loss(value: object) -> object:
    text = _none_word(value)
    if isinstance(text, str):
        task_of_loss(text)
    return text


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _schedule(value: object) -> object:
    from dptrain.cli.options.schedule import parse_schedule

    value = _none_word(value)
    return str(parse_schedule(value)) if isinstance(value, str) else value


def _sparsity(value: object) -> object:
    text = _none_word(value)
    group = re.fullmatch(r"([1-9]\d?):([1-9]\d?)", str(text))
    if text is None or (group and int(group[1]) < int(group[2])):
        return text
    with suppress(ValueError):
        if 0 <= (part := float(str(text))) < 1:
            return part
    raise ValueError("expected a fraction of the weights, 0 to below 1, such as 0.9, or zeros per group, such as 2:4")


def _block(value: object) -> object:
    text = _none_word(value)
    if isinstance(text, str) and not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}", text):
        raise ValueError(f"{short(value)}: expected a block's inputs and outputs, such as 4x4")
    return text


def _length(value: object) -> object:
    from dptrain.cli.options.schedule import parse_length

    return str(parse_length(str(value)))


def _model_arguments(value: object) -> object:
    """Check that all values are YAML's and JSON's: numbers, words, lists of these."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("expected names with values")
    if not all(map(_is_plain, value.values())):
        raise ValueError("expected numbers, words and lists of these as values")
    return dict(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | None)


PositiveInt = Annotated[int, Interval(ge=1, le=_MAX_COUNT)]
OptionalCount = Annotated[Annotated[int, Interval(ge=0, le=_MAX_COUNT)] | None, Before(_none_word)]
OptionalPositiveInt = Annotated[PositiveInt | None, Before(_none_word)]
Rate = Annotated[float, Interval(ge=0, lt=1)]
OptionalRate = Annotated[Rate | None, Before(_none_word)]
Positive = Annotated[float, Interval(gt=0)]
Megabytes = Annotated[float, Interval(gt=0, le=1e9)]
OptionalPositive = Annotated[Positive | None, Before(_none_word)]
OptionalNonnegative = Annotated[Annotated[float, Interval(ge=0)] | None, Before(_none_word)]


# What is true of all fields of a section that do not say otherwise; see `Leaf`.
_OF_SECTION: dict[str, dict[str, Any]] = {
    "data": {"sweeps_refuse": "a sweep has one data set"},
    "model": {"decides": True, "shown_in": ("doctor", "explain")},
    "optimizer": {"decides": True, "shown_in": ("explain",)},
    "train": {"decides": True},
    "checkpoint": {"about_job": True, "sweeps_refuse": "a sweep saves the state of its runs by itself"},
    "logging": {"about_job": True, "sweeps_refuse": "runs of a sweep log to its folder"},
}
# Why runs of a sweep cannot differ in a field.
_SAME = "it is the same for all runs of a sweep"
_ONE_DEVICE = "a run of a sweep has one device"
_NO_RESULT = "it changes no result"
_ABOUT_SWEEP = "it is about the sweep, not about a run"


def _field(default: Any, text: str, flag: str | None = None, alone: str | None = None, **facts: Any) -> Any:
    """A field with its help, short flag without dashes, the value of a flag `alone`, and other `facts` of `Leaf`."""
    metadata = {"help": text, "flag": flag, "alone": alone, **facts}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class DataConfig(Checked):
    """Which samples, and how ranks share them."""

    name: str = _field(
        "strokes",
        "strokes (built in), mnist, fashion-mnist, a folder of IDX files, an .npz file, a table (.csv, .parquet), or "
        "a folder with one folder of pictures (DIR, or images:DIR) or texts (.txt) per class; or shards of any total "
        "size: a glob, range, folder or address of .parquet, .tar, .npy or .bin files",
        "data",
        shown_in=("doctor", "explain"),
    )
    dir: Annotated[str | None, Before(_none_word)] = _field(
        None, "folder with the files of a named data set", "data-dir", about_job=True, sweep_ignores=False
    )
    sharding: Literal["global", "static"] = _field(
        "global",
        "global: one copy of the data per node, one permutation; static: each rank keeps its share of the rows",
        "sharding",
        sweeps_refuse="a run has all samples",
    )
    max_bytes: Annotated[int, Interval(ge=1, lt=2**63)] = _field(
        DEFAULT_MAX_BYTES,
        "refuse larger arrays, in bytes; keep at most this much of decoded pictures in memory per node",
        about_job=True,
        sweep_ignores=False,
    )
    target: Annotated[str | None, Before(_none_word)] = _field(
        None,
        "a table's column to predict; for an .npy file, the file with the targets",
        "target",
        shown_in=("doctor", "explain"),
    )
    columns: Annotated[tuple[str, ...], Before(_names)] = _field(
        (), "a table's columns to predict from, comma-separated; default: all but the target", "columns"
    )
    drop: Annotated[tuple[str, ...], Before(_names)] = _field(
        (), "a table's columns to leave out, comma-separated", "drop"
    )
    categorical: Annotated[tuple[str, ...], Before(_names)] = _field(
        (), "a table's columns to treat as categories though they look like numbers, comma-separated", "categorical"
    )
    numbers: Annotated[tuple[str, ...], Before(_names)] = _field(
        (),
        "a table's columns to treat as numbers though they look like codes, identifiers or dates, comma-separated",
        "numbers",
    )
    dates: Annotated[tuple[str, ...], Before(_names)] = _field(
        (),
        "a table's columns of dates, as days since 1970, month, day and weekday, comma-separated; also with a format: "
        "sold=%d.%m.%Y",
        "dates",
        later=True,
    )
    text: Annotated[tuple[str, ...], Before(_names)] = _field(
        (), "a table's columns to treat as texts, by their words, comma-separated", "text"
    )
    # What a model's file may hold; ids of words are float32, exact up to 2^24.
    text_words: Annotated[int, Interval(ge=1, le=1_000_000)] = _field(
        10_000, "maximum size of the vocabulary; the most frequent words are kept", "text-words"
    )
    text_length: Annotated[int, Interval(ge=1, le=100_000)] = _field(
        200, "maximum number of words of a text that are used, from its start", "text-length"
    )
    unseen: Annotated[Literal["error", "missing", "other"] | None, Before(_none_word)] = _field(
        None,
        "categories of a table that training has not seen: error; treat as missing; or as a reserved category "
        "(default: error, or a trained model's own setting)",
        "unseen",
    )
    missing: Literal["stop", "drop", "mean", "indicator"] = _field(
        "stop",
        "at a table's missing value stop, drop its row, or use the column's mean (for texts a separate category); "
        "indicator: the mean, beside a feature that says so",
        "missing",
    )
    na: Annotated[tuple[str, ...], Before(_words)] = _field(
        ("default",),
        "words of a table that stand for a missing value, comma-separated; default means NA, N/A, NULL, NaN, None and "
        "others, see docs/data.md: default,? adds one",
        "na",
        later=True,
    )
    decimal: Literal["auto", "point", "comma"] = _field(
        "auto", "decimal mark of a table's numbers; comma: 1.234,5 is 1234.5", "decimal", later=True
    )
    rare: OptionalPositiveInt = _field(
        None, "join a table's categories of fewer rows than this into one", "rare", later=True
    )
    repair_header: bool = _field(
        False, "name columns of a table without a name, or with another's, by their place", "repair-header", later=True
    )
    auto: bool = _field(
        False,
        "decide what could be meant in two ways in a table, and say what was decided: dates, identifiers, missing "
        "values, rare categories",
        "auto",
        later=True,
    )
    test_data: Annotated[str | None, Before(_none_word)] = _field(
        None, "a table or shards to use as test part; default: a part of the table, or the last shards", "test-data"
    )
    test_split: Annotated[float, Interval(gt=0, lt=1)] = _field(
        0.2, "fraction of a table's rows, or of the pictures, to use as test part by default"
    )
    image_size: Annotated[str | None, Before(_image_size)] = _field(
        None, "such as 32x32: resize pictures to this height and width", "image-size"
    )
    bad_pictures: Literal["stop", "skip"] = _field(
        "stop", "at a file that is not a picture or is damaged, stop or skip it", "bad-pictures"
    )
    bad_shards: Literal["stop", "skip"] = _field(
        "stop", "at a shard that cannot be read, stop or leave it out", "bad-shards"
    )
    sequence_length: OptionalPositiveInt = _field(
        None, "token ids of a sample of token shards; the targets are the next ids", "sequence-length"
    )
    token_dtype: Literal["uint16", "uint32"] = _field("uint16", "type of the ids in .bin shards without a header")
    classes: OptionalPositiveInt = _field(
        None, "classes, or size of the vocabulary, of shards; default: by the first samples", "classes"
    )
    cache_bytes: Annotated[int, Interval(ge=1, lt=2**63)] = _field(
        DEFAULT_CACHE_BYTES,
        "keep at most this much of remote and converted shards on each node's disk",
        about_job=True,
        sweep_ignores=False,
    )
    cache_dir: Annotated[str | None, Before(_none_word)] = _field(
        None, "folder of these copies; default: in the cache folder of dptrain", about_job=True, sweep_ignores=False
    )
    follow_links: bool = _field(False, "follow links to pictures outside their folder", "follow-links")
    task: Annotated[Literal["multiclass", "binary", "regression"] | None, Before(_none_word)] = _field(
        None, "multiclass, binary or regression; default: inferred from the target", "task"
    )
    device_mb: Annotated[Megabytes | None, Before(_none_word)] = _field(
        None,
        "MB (10^6 bytes) of a GPU's memory for samples; larger sets are streamed; none: all that is free",
        of_compile=True,
        sweeps_refuse=_SAME,
        about_job=True,
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig(Checked):
    """The network: dense layers, behind convolutions of pictures or layers for texts, or a function's model."""

    network: Literal["auto", "dense", "convolutional", "lstm", "transformer"] = _field(
        "auto",
        "the built-in network: convolutional (default for pictures of at least 16x16), lstm (for texts), dense (for "
        "others) or transformer; dense averages the words of a text",
        "network",
    )
    augment: Literal["shift", "flip", "off"] = _field(
        "shift",
        "augmentation for the convolutional network: shift and zoom pictures by up to 10 %; flip: also mirror them; "
        "or off",
        "augment",
    )
    hidden: Annotated[tuple[PositiveInt, ...], Before(_comma_separated)] = _field(
        (128,), "units of each hidden layer, comma-separated", "hidden"
    )
    activation: Literal["relu", "tanh", "sigmoid", "linear", "softmax"] = _field(
        "relu", "activation of the hidden layers", "activation"
    )
    dropout: Rate = _field(0.0, "dropout rate after each hidden layer", "dropout")
    function: Annotated[str | None, Before(_none_word)] = _field(
        None,
        "build the model with your function, file.py:build_model or package.module:build_model; runs its code",
        "model",
        sweeps_refuse="a sweep has one function",
        later=True,
    )
    arguments: Annotated[dict[str, Any], Before(_model_arguments)] = _field(
        {},
        "an argument of that function; can be repeated",
        "model-arg",
        sweeps_refuse="name an argument of the function itself, such as units=32,64",
        later=True,
    )
    digest: Annotated[str | None, Before(_none_word)] = _field(
        None, "SHA-256 of the function's file, recorded by a run", sweeps_refuse="a sweep has one function", later=True
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """The update rule."""

    name: Literal[
        "adadelta",
        "adafactor",
        "adagrad",
        "adam",
        "adamw",
        "adamax",
        "ftrl",
        "lamb",
        "lion",
        "muon",
        "nadam",
        "rmsprop",
        "schedulefreeadamw",
        "sgd",
    ] = _field("adam", "update rule", "optimizer", shown_in=("doctor", "explain"))
    learning_rate: OptionalPositive = _field(
        None,
        "step size; the optimizer's own default if not set (sgd: 0.01, schedulefreeadamw: 0.0025, else 0.001)",
        "learning-rate",
    )
    schedule: Annotated[str | None, Before(_schedule)] = _field(
        None,
        "schedule of the learning rate over the whole training: cosine, cosine:warmup=500, linear, polynomial, "
        "exponential, "
        "step:every=2epochs,factor=0.5, cosine_restarts, constant:warmup=5%",
        "schedule",
        later=True,
    )
    beta_1: OptionalRate = _field(None, "adam and its relatives, lion: decay of the first moment; 0.9 if not set")
    beta_2: OptionalRate = _field(
        None, "adam and its relatives, lion: decay of the second moment; 0.999 if not set, lion: 0.99"
    )
    amsgrad: bool = _field(False, "adam, adamw: keep the largest second moment so far")
    rho: OptionalRate = _field(None, "rmsprop, adadelta: decay of the mean square; 0.9, adadelta: 0.95")
    initial_accumulator_value: OptionalNonnegative = _field(None, "adagrad: first sum of squares; 0.1 if not set")
    centered: bool = _field(False, "rmsprop: divide by the standard deviation instead of the root mean square")
    momentum: Rate = _field(0.0, "sgd, rmsprop: momentum", "momentum")
    nesterov: bool = _field(False, "sgd: Nesterov momentum", "nesterov")
    epsilon: OptionalPositive = _field(
        None,
        "all but sgd, lion, adafactor and ftrl: added to the divisor; 1e-7 if not set, schedulefreeadamw: 1e-8",
    )
    weight_decay: OptionalNonnegative = _field(
        None,
        "shrink parameters by this fraction, times the learning rate, in each update; adamw: 0.004 if not set",
        "weight-decay",
    )
    clipnorm: OptionalPositive = _field(None, "clip the norm of each parameter's gradient to this", "clipnorm")
    clipvalue: OptionalPositive = _field(None, "clip each element of the gradients to this absolute value", "clipvalue")
    global_clipnorm: OptionalPositive = _field(
        None, "clip the norm of all gradients together to this", "global-clipnorm"
    )
    gradient_accumulation_steps: Annotated[Annotated[int, Interval(ge=2, le=_MAX_COUNT)] | None, Before(_none_word)] = (
        _field(None, "update once every N batches, with the mean of their gradients")
    )


@dataclasses.dataclass(frozen=True)
class PruningConfig(Checked):
    """Which weights become zero during training."""

    sparsity: Annotated[float | str | None, Before(_sparsity)] = _field(
        None,
        "such as 0.9: zero this fraction of the kernels' weights, the smallest in magnitude; 2:4: two of every four "
        "inputs",
        "prune",
    )
    schedule: Literal["polynomial", "constant"] = _field(
        "polynomial",
        "increase the sparsity from 0 at pruning.begin to --prune at pruning.end, or use it from pruning.begin on",
        "prune-schedule",
    )
    begin: Annotated[str, Before(_length)] = _field("20%", "when pruning begins: steps (500), 2epochs or 25%")
    end: Annotated[str, Before(_length)] = _field("70%", "when masks become fixed, in the same units")
    frequency: OptionalPositiveInt = _field(
        None, "update the masks every N steps; default: a hundred times between begin and end"
    )
    scope: Literal["layer", "global"] = _field(
        "global", "compare magnitudes over all layers, or within each, as 2:4 always does", "prune-scope"
    )
    block: Annotated[str | None, Before(_block)] = _field(
        None, "such as 4x4: prune whole blocks of inputs and outputs", "prune-block"
    )
    regrow: OptionalRate = _field(
        None,
        "at each update replace this fraction of the weights by those with the largest gradients (RigL); 0.3 without "
        "a number",
        "regrow",
        alone="0.3",
    )
    layers: Annotated[tuple[str, ...], Before(_names)] = _field(
        (), "names of the layers to prune, comma-separated; all if not set", "prune-layers"
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig(Checked):
    """How long to train, and in which batches."""

    batch_size: PositiveInt = _field(
        128, "samples per global batch, over all ranks together", "batch-size", shown_in=("doctor", "explain")
    )
    epochs: Annotated[int, Interval(ge=0, le=_MAX_COUNT)] = _field(
        5, "passes through the data", "epochs", decides=False
    )
    steps_per_epoch: OptionalPositiveInt = _field(None, "end an epoch after this many steps", "steps-per-epoch")
    drop_last: bool = _field(False, "drop the last batch if it is not full", "drop-last")
    shuffle: bool = _field(True, "a new order of the samples every epoch")
    reproducible: bool = _field(
        False,
        "the same bits on any number of ranks; splits batches into 8 shards unless train.shards_per_batch is set",
        "reproducible",
        decides=False,
    )
    shards_per_batch: OptionalPositiveInt = _field(
        None, "split global batches into this many shards and add their sums in a fixed tree; none: one shard per rank"
    )
    on_nonfinite: Literal["stop", "skip", "ignore"] = _field(
        "stop",
        "at a non-finite loss or parameter, stop; or skip steps with non-finite gradients",
        "on-nonfinite",
        shown_in=("explain",),
    )
    skip_outliers: OptionalPositive = _field(
        None,
        "skip steps whose gradient norm exceeds its running mean by this many standard deviations",
        "skip-outliers",
        shown_in=("explain",),
    )
    validation_split: Rate = _field(
        0.0,
        "validate on this fraction of the training samples, drawn within each class; the test part is then evaluated "
        "only once, at the end",
        "validation-split",
        sweeps_refuse="all runs are compared on the same samples",
    )
    fold: Annotated[str | None, Before(_fold)] = _field(
        None,
        "2/5: validate on the second of five parts of the training samples and train on the others",
        "fold",
        sweeps_refuse="use --folds",
    )
    loss: Annotated[str | None, Before(_loss)] = _field(
        None,
        "such as mae or huber, which also sets the task; default: mse for numbers, crossentropy for classes",
        "loss",
        later=True,
    )
    class_weight: Annotated[Literal["balanced"] | None, Before(_none_word)] = _field(
        None, "balanced: give all classes the same weight in the loss, however few samples they have", "class-weight"
    )
    early_stopping: OptionalCount = _field(
        None,
        "stop after this many epochs (3 without a number) without improvement of --monitor, and restore the best "
        "weights",
        "early-stopping",
        alone="3",
        later=True,
    )
    monitor: str = _field(
        "val_loss",
        "metric of early stopping and of best.keras; NAME:max or NAME:min for a metric of unknown direction",
        "monitor",
        later=True,
    )
    digest_every: OptionalCount = _field(
        None,
        "compare the ranks' states every N steps, 0: never; 100 if not set",
        "digest-every",
        sweeps_refuse=_NO_RESULT,
        about_job=True,
        sweep_ignores=False,
        decides=False,
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Checked):
    """When to save, and where to resume."""

    every: Annotated[tuple[str, ...], Before(_moments)] = _field(
        ("epoch", "600s"),
        "when to save: every N steps, epoch, seconds (600s); several comma-separated, or none",
        "checkpoint-every",
    )
    keep: PositiveInt = _field(3, "keep this many of the last checkpoints, and the best", "keep")
    resume: Annotated[str, Before(lambda value: _none_word(value) or "never")] = _field(
        "auto", "auto: resume an unfinished run in --out; never; or the path of a checkpoint or run", "resume"
    )
    anyway: Annotated[tuple[str, ...], Before(_comma_separated)] = _field(
        (), "fields that may differ from the checkpoint's, comma-separated", "resume-anyway"
    )


Destination = Annotated[str | None, Before(_none_word)]


@dataclasses.dataclass(frozen=True)
class LoggingConfig(Checked):
    """Other tools that log settings and metrics, and a profile."""

    tensorboard: Destination = _field(
        None, "write TensorBoard's event files to OUT/tensorboard, or to a folder", "tensorboard", alone="auto"
    )
    mlflow: Destination = _field(
        None, "log to MLflow: MLFLOW_TRACKING_URI, or this URI or folder (file:mlruns)", "mlflow", alone="auto"
    )
    wandb: Destination = _field(
        None,
        "log to Weights & Biases: project dptrain, or this one; WANDB_MODE=offline needs no network",
        "wandb",
        alone="auto",
    )
    metrics_file: Destination = _field(
        None,
        "keep epoch, step, loss, speed, memory and the last checkpoint's time in OUT/metrics.prom, or in a file, for "
        "Prometheus' node exporter",
        "metrics-file",
        alone="auto",
    )
    profile: OptionalCount = _field(
        None,
        "measure the kernels, messages and copies of so many steps (20 without a number): a table, and OUT/trace.json "
        "for ui.perfetto.dev",
        "profile",
        alone="20",
        sweeps_refuse="it is about one run's steps",
    )


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    """Everything about a run."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    pruning: PruningConfig = dataclasses.field(default_factory=PruningConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    seed: Annotated[int, Interval(ge=0, lt=2**63)] = _field(
        0,
        "seed of initial weights, shuffling and dropout",
        "seed",
        sweeps_refuse="use --seeds",
        sweep_ignores=True,
        decides=True,
    )
    device: Literal["auto", "cpu", "cuda"] = _field(
        "auto",
        "where to compute; auto: a GPU if every rank can use one, else the CPU",
        "device",
        sweeps_refuse=_SAME,
        shown_in=("doctor", "explain", "predict"),
        of_device=True,
    )
    comm: Literal["host", "cuda-aware", "nccl", "auto"] = _field(
        "host",
        "how ranks send: host: MPI, through host memory; cuda-aware: MPI, from GPU memory; nccl: GPU to GPU, with the "
        "extra 'nccl'; auto: nccl if available, else cuda-aware, else host",
        "comm",
        of_compile=True,
        sweeps_refuse=_SAME,
        about_job=True,
        shown_in=("doctor",),
    )
    bucket_mb: Megabytes = _field(
        DEFAULT_BUCKET_MB,
        "send gradients in messages of this many MB (10^6 bytes) during the backward pass",
        "bucket-mb",
        of_compile=True,
        sweeps_refuse=_SAME,
        about_job=True,
        shown_in=("doctor", "explain"),
    )
    comm_dtype: Annotated[Literal["bfloat16", "float16"] | None, Before(_none_word)] = _field(
        None,
        "bfloat16 or float16: ranks round gradients to this type before they are summed, halving the bytes sent",
        "comm-dtype",
        of_compile=True,
        sweeps_refuse=_SAME,
        sweep_ignores=True,
        shown_in=("explain",),
        decides=True,
        later=True,
    )
    shard_optimizer: bool = _field(
        False,
        "each rank keeps its part of the optimizer's slots and gathers the other new weights (ZeRO-1)",
        "shard-optimizer",
        of_compile=True,
        sweeps_refuse=_ONE_DEVICE,
        sweep_ignores=True,
    )
    shard_weights: bool = _field(
        False,
        "each rank keeps its part of weights and slots, and gathers a layer's weights when it needs them (FSDP)",
        "shard-weights",
        of_compile=True,
        sweeps_refuse=_ONE_DEVICE,
        sweep_ignores=True,
    )
    mesh: Annotated[str | None, Before(_mesh)] = _field(
        None,
        "batch=2,model=2: arrange four ranks in a grid; rows are divided along batch, weights of pairs of layers "
        "along the other axis, by columns and by rows",
        "mesh",
        sweeps_refuse=_ONE_DEVICE,
        sweep_ignores=True,
    )
    stages: PositiveInt = _field(
        1,
        "split the layers into this many stages of about equal memory, each on its own rank; more ranks are replicas",
        "stages",
        of_compile=True,
        sweeps_refuse=_ONE_DEVICE,
        sweep_ignores=True,
    )
    microbatches: Annotated[PositiveInt | None, Before(_none_word)] = _field(
        None,
        "split batches into this many microbatches for the stages; none: about four per stage",
        "microbatches",
        of_compile=True,
        sweeps_refuse=_ONE_DEVICE,
        sweep_ignores=True,
    )
    share_gpu: bool = _field(
        False,
        "let several ranks use one GPU",
        "share-gpu",
        sweeps_refuse=_SAME,
        about_job=True,
        shown_in=("doctor", "predict"),
        of_device=True,
    )
    gpu_select: Literal["mask", "index"] = _field(
        "mask",
        "mask: each rank sees only its own GPU; index: leave CUDA_VISIBLE_DEVICES unchanged",
        "gpu-select",
        sweeps_refuse=_SAME,
        about_job=True,
        shown_in=("doctor", "predict"),
        of_device=True,
    )
    dtype: Literal["float32", "float64", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16"] = _field(
        "float32",
        "type of parameters and activations, or a policy of Keras'; float64 only on the CPU",
        shown_in=("doctor", "explain"),
        decides=True,
        of_device=True,
    )
    precision: Literal["float32", "tf32"] = _field(
        "float32",
        "precision of a GPU's matrix products; tf32: tensor cores, factors rounded to 10 bits of mantissa",
        "precision",
        shown_in=("doctor", "explain", "predict"),
        decides=True,
        of_device=True,
    )
    gemm: Literal["dptrain", "cublaslt", "auto"] = _field(
        "dptrain",
        "kernels for a GPU's matrix products; cublaslt needs the extra 'cublaslt'; auto: whichever was measured faster",
        "gemm",
        shown_in=("doctor", "explain", "predict"),
        decides=True,
        of_device=True,
    )
    conv: Literal["dptrain", "cudnn", "auto"] = _field(
        "dptrain",
        "kernels for a GPU's convolutions; cudnn needs the extra 'cudnn'; auto: as --gemm",
        "conv",
        shown_in=("doctor", "explain", "predict"),
        decides=True,
        later=True,
        of_device=True,
    )
    jit_compile: Annotated[Literal["auto"] | bool, Before(_on_or_off)] = _field(
        "auto",
        "auto, on or off: compile the CPU's steps; auto: if there is a C++ compiler",
        "jit-compile",
        sweeps_refuse=_SAME,
        shown_in=("doctor", "predict"),
        of_device=True,
    )
    cuda_graph: bool = _field(
        True,
        "replay a GPU's steps as CUDA graphs",
        "cuda-graph",
        sweeps_refuse=_NO_RESULT,
        about_job=True,
        shown_in=("doctor",),
        of_device=True,
    )
    run_eagerly: bool = _field(
        False,
        "run steps op by op, to debug",
        "run-eagerly",
        of_compile=True,
        sweeps_refuse="it is for debugging a single run",
    )
    steps_per_execution: Annotated[Literal["auto"] | PositiveInt, Before(_number)] = _field(
        "auto",
        "steps per call from the host; auto: as many as take a few hundredths of a second",
        of_compile=True,
        sweeps_refuse=_NO_RESULT,
        about_job=True,
    )
    stall_warning: OptionalNonnegative = _field(
        None,
        "warn after ranks have waited for another for this many seconds, 0: never; default 60",
        "stall-warning",
        sweeps_refuse=_NO_RESULT,
        about_job=True,
    )
    stall_timeout: OptionalNonnegative = _field(
        None,
        "end the job after ranks have waited for another for this many seconds, 0: never; default 300. Four times as "
        "long while a rank starts, compiles, evaluates or saves",
        "stall-timeout",
        sweeps_refuse=_NO_RESULT,
        about_job=True,
        shown_in=("predict",),
    )
    out: Annotated[str | None, Before(_none_word)] = _field(
        None, "run directory; runs/<date-time>-<name> if not set", "out", sweeps_refuse=_ABOUT_SWEEP, about_job=True
    )
    name: Annotated[str | None, Before(_none_word)] = _field(
        None,
        "name of the run; the data set's if not set",
        "name",
        sweeps_refuse=_ABOUT_SWEEP,
        about_job=True,
        sweep_ignores=False,
    )
    verbose: Annotated[
        Literal[0, 1, 2] | None,
        Before(lambda v: int(v) if isinstance(v, str) and v.isdigit() else _none_word(v)),
    ] = _field(
        None,
        "0: print nothing; 1, 2: Keras' numbers for --progress live, lines",
        "verbose",
        sweeps_refuse=_ABOUT_SWEEP,
        about_job=True,
    )
    progress: Literal["auto", "live", "lines", "none"] = _field(
        "auto",
        "progress of epochs and runs; auto: live on a terminal, also behind mpirun, else lines",
        "progress",
        sweeps_refuse=_ABOUT_SWEEP,
        about_job=True,
    )
    log_format: Literal["auto", "text", "json", "plain"] = _field(
        "auto",
        "lines of a training's output: text: time in UTC, rank, message; json: an object each; auto: text in a file, "
        "else plain",
        "log-format",
        sweeps_refuse=_ABOUT_SWEEP,
        about_job=True,
    )
    report: bool = _field(
        True,
        "write report.html, a page about the model's quality on held-out samples or about a sweep, at the end",
        "report",
        sweeps_refuse=_ABOUT_SWEEP,
        about_job=True,
    )
    fast_dev_run: bool = _field(
        False,
        "run two steps and a small evaluation, to check that everything works",
        "fast-dev-run",
        sweeps_refuse=_ABOUT_SWEEP,
        about_job=True,
        sweep_ignores=False,
    )
    debug: bool = _field(
        False,
        "show tracebacks",
        "debug",
        sweeps_refuse=_ABOUT_SWEEP,
        about_job=True,
        shown_in=("doctor", "explain", "predict"),
    )


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A settable field."""

    path: str  # dotted, such as "optimizer.learning_rate"
    flag: str | None  # short flag without dashes, or None
    help: str
    default: Any
    is_flag: bool
    is_mapping: bool
    alone: str | None  # value of the flag without one; None where it needs one
    is_gathered: bool  # a flag that is repeated adds to its list
    choices: tuple[str, ...]  # allowed words; empty for other types
    about_job: bool  # whether it changes no result, so that `runs` need not tell it
    decides: bool  # whether it must stay as it is when a training resumes
    later: bool  # whether earlier versions lack it: files leave it out while it has its default
    sweeps_refuse: str | None  # why runs of a sweep cannot differ in it
    sweep_ignores: bool  # whether a sweep goes on with another value
    of_device: bool  # whether it is a keyword of `open_backend`
    of_compile: bool  # whether it is another keyword of `Model.compile`
    shown_in: tuple[str, ...]  # commands whose help lists it: doctor, explain; predict stands for all that use a model


# Names of the sections of a configuration.
_SECTIONS = tuple(name for name, value in vars(Config()).items() if dataclasses.is_dataclass(value))


def leaves() -> Iterator[Leaf]:
    """Yield all settable fields in order."""
    yield from _leaves(Config(), "")


def _leaves(section: Any, prefix: str) -> Iterator[Leaf]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{field.name}.")
        else:
            words = get_args(field.type) if get_origin(field.type) is Literal else ()
            metadata = field.metadata
            is_flag = field.type is bool
            yield Leaf(
                prefix + field.name,
                metadata["flag"],
                metadata["help"],
                value,
                is_flag,
                isinstance(value, dict),
                "true" if is_flag else metadata["alone"],
                prefix == "data." and isinstance(value, tuple),
                words,
                **_facts(prefix, metadata),
            )


def _facts(prefix: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a field says, its section says for it, or is true of most fields."""
    facts: dict[str, Any] = dict.fromkeys(("about_job", "decides", "later", "of_device", "of_compile"), False)
    facts |= {"sweeps_refuse": None, "shown_in": (), **_OF_SECTION.get(prefix.rstrip("."), {})}
    facts |= {name: value for name, value in metadata.items() if name not in ("help", "flag", "alone")}
    return {"sweep_ignores": facts["about_job"], **facts}


def device_options(config: Config) -> dict[str, Any]:
    """Return the device's keywords of `Model.compile` and `open_backend`."""
    return {leaf.path: getattr(config, leaf.path) for leaf in leaves() if leaf.of_device}


def compile_options(config: Config) -> dict[str, Any]:
    """Return the keywords of `Model.compile`, apart from optimizer, loss and metrics."""
    tree = to_dict(config)
    options = {leaf.path.rpartition(".")[2]: value_at(tree, leaf.path) for leaf in leaves() if leaf.of_compile}
    return options | {"shards_per_batch": fixed_shards(config), **device_options(config)}


def health_options(config: Config) -> dict[str, Any]:
    """Return the keywords of `Model.fit` about a training's health checks."""
    return {name: getattr(config.train, name) for name in ("on_nonfinite", "skip_outliers", "digest_every")}


def epochs_of(config: Config) -> int:
    """Return the number of epochs to train."""
    return min(config.train.epochs, 1) if config.fast_dev_run else config.train.epochs


def fixed_shards(config: Config) -> int | None:
    """Return the number of shards of a global batch on any number of ranks; None for one a rank."""
    chosen = config.train
    if chosen.shards_per_batch is None and chosen.reproducible:
        return min(REPRODUCIBLE_SHARDS, chosen.batch_size)
    return chosen.shards_per_batch


def verbosity(config: Config) -> str | int:
    """Return `verbose` of `Model.fit`; refuse contradicting fields."""
    if config.progress == "auto":
        return "auto" if config.verbose is None else config.verbose
    number = VERBOSITY[config.progress]
    if config.verbose not in (None, number):
        raise ConfigError(
            f"verbose = {config.verbose} and progress = {config.progress!r}: set one of them (--verbose none unsets it)"
        )
    return number


def deciding(config: Config) -> dict[str, Any]:
    """Return, by path, the settings that must not change when a training resumes."""
    tree = without_later(to_dict(config), sections_only=False)
    decisive = remove_fields(tree, [leaf.path for leaf in leaves() if not leaf.decides])
    if config.train.early_stopping is None:
        decisive["train"].pop("monitor", None)  # affects only best.keras
    if config.pruning.sparsity is not None:
        decisive["pruning"] = tree["pruning"]
    if follows_training(config):
        decisive["train"]["epochs"] = config.train.epochs
    decisive["train"]["shards_per_batch"] = fixed_shards(config)
    return decisive


def remove_fields(tree: Mapping[str, Any], paths: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return a configuration tree without the fields at these paths, and without sections that have no other."""
    kept = {}
    for name, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{name}" in _SECTIONS:
            value = remove_fields(value, paths, f"{name}.")
            if not value:
                continue
        if f"{prefix}{name}" not in paths:
            kept[name] = value
    return kept


def without_later(tree: dict[str, Any], *, sections_only: bool = True) -> dict[str, Any]:
    """Return a configuration tree without unset fields of later versions, by default only those in sections."""
    defaults = to_dict(Config())
    later = [
        leaf.path for leaf in leaves() if leaf.later and value_at(tree, leaf.path) == value_at(defaults, leaf.path)
    ]
    unset = [path for path in later if "." in path or not sections_only]
    return remove_fields(tree, [*unset, *(["pruning"] if tree["pruning"] == defaults["pruning"] else [])])


def value_at(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of a configuration tree."""
    value: Any = tree
    for name in path.split("."):
        value = value[name]
    return value


def follows_training(config: Config) -> bool:
    """Whether the learning rate's or pruning's schedule depends on the number of epochs."""
    from dptrain.cli.options.schedule import parse_schedule

    schedule, pruning = config.optimizer.schedule, config.pruning
    prunes = pruning.sparsity is not None and "%" in pruning.begin + pruning.end
    return prunes or (schedule is not None and parse_schedule(schedule).follows_training)


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dictionaries of plain values."""
    tree = dataclasses.asdict(config)
    for section in ("data", "model", "pruning", "checkpoint"):
        tree[section] |= {name: list(value) for name, value in tree[section].items() if isinstance(value, tuple)}
    return tree


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML that `--config` reads."""
    import yaml  # takes as long to import as the rest of the command line

    text: str = yaml.safe_dump(to_dict(config), sort_keys=False)
    return text


def read_file(path: Path) -> dict[str, Any]:
    """Return a YAML (or JSON) configuration file as nested dictionaries, with every key checked."""
    from dptrain.runtime.storage.yaml_files import read_mapping

    tree = read_mapping(path, "--config")
    check_keys(tree, f"--config {path}")
    return tree


def check_keys(tree: Any, where: str) -> None:
    """Refuse unknown keys of a configuration, and values in place of sections."""
    _check_keys(tree, Config(), where, "")


def resolve(
    file: Mapping[str, Any], file_name: str, overrides: Mapping[str, Any], origin: str = "on the command line"
) -> Config:
    """Return the configuration from defaults, file and overrides by dotted path; messages say where: `origin`."""
    tree: dict[str, Any] = copy.deepcopy(dict(file))
    for path, value in overrides.items():
        *section, key = path.split(".")
        place = tree
        for name in section:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{file_name}: expected names and values under {name!r}")
        place[key] = value
    try:
        return checked(Config, tree)
    except NotValidError as error:
        raise ConfigError(_problem(error, file_name, overrides, origin)) from None


# Texts for errors that pydantic reports in two variants of the same meaning.
_PLAINLY = {
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be on or off",
}


def _problem(error: NotValidError, file_name: str, overrides: Mapping[str, Any], origin: str) -> str:
    paths = {leaf.path for leaf in leaves()}
    parts = [str(part) for part in error.place]
    path = next(
        (".".join(parts[:end]) for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in paths), ".".join(parts)
    )
    value = overrides.get(path, error.value)
    where = origin if path in overrides else f"in {file_name}"
    return f"{path} = {short(value)}, set {where}: {_PLAINLY.get(error.kind, str(error))}"


def _check_keys(tree: Any, section: Any, where: str, prefix: str) -> None:
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: expected keys and values{f' under {prefix[:-1]!r}' if prefix else ''}")
    names = [field.name for field in dataclasses.fields(section)]
    for key, value in tree.items():
        if key not in names:
            paths = [leaf.path for leaf in leaves()]
            raise ConfigError(f"{where}: unknown {prefix + str(key)!r}{suggest(str(key), names, paths)}")
        if dataclasses.is_dataclass(inner := getattr(section, key)):
            _check_keys(value, inner, where, f"{prefix}{key}.")
