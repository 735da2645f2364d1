"""From a configuration to what is trained: the data, the model, the order of the samples."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import activations, layers, optimizers
from dptrain.batches.sampling import GlobalSampler, PartSampler, Sampler, StaticSampler
from dptrain.cli.config import Config, OptimizerConfig, device_options, fixed_shards
from dptrain.cli.model_function import load_function
from dptrain.comm import Communicator
from dptrain.data.holdout import fold_rows, split_rows
from dptrain.data.loading import LoadedData, Split, load_dataset
from dptrain.errors import ConfigError
from dptrain.models import Model, Sequential
from dptrain.sweeps.space import label

# Of a classifier.
LOSS, METRICS = "sparse_categorical_crossentropy", ["accuracy"]
# What --fast-dev-run runs.
_DEV_STEPS, _DEV_EVALUATION_ROWS = 2, 256


def load_data(config: Config, comm: Communicator, *, alone: bool = False) -> LoadedData:
    """Return the configured data set, one copy a node. Collective.

    Args:
        config: of the run; a fast dev run evaluates few of the samples.
        comm: the ranks.
        alone: every rank evaluates all samples, as in a sweep, instead of its part.

    Raises:
        AgreedError: as `load_dataset`.
    """
    data = load_dataset(
        config.data.name,
        comm,
        data_dir=None if config.data.dir is None else Path(config.data.dir),
        max_bytes=config.data.max_bytes,
        sharding=config.data.sharding,
    )
    if alone:
        data = LoadedData(data.name, _alone(data.train), _alone(data.test), data.num_classes)
    return dataclasses.replace(data, test=_small(data.test)) if config.fast_dev_run else data


def _alone(split: Split) -> Split:
    return Split(split.x, split.y, split.total, (0, split.total))


def _small(split: Split) -> Split:
    start, stop = split.mine
    return dataclasses.replace(split, mine=(start, min(stop, start + _DEV_EVALUATION_ROWS)))


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the samples of a data set are for.

    Attributes:
        rows: of the training part, those that are trained on; None for all.
        validation: evaluated after epochs.
        test: evaluated once, in the end; None where the data set's test part is the validation.
    """

    rows: npt.NDArray[np.int64] | None
    validation: Split
    test: Split | None

    def trained(self, data: LoadedData) -> int:
        """Return how many samples are trained on, over all ranks."""
        return data.train.total if self.rows is None else len(self.rows)


def describe_samples(data: LoadedData, parts: Parts) -> str:
    """Return "60,000 + 10,000 samples"; with what is held out "54,000 + 6,000 for validation + 10,000 samples"."""
    held = "" if parts.test is None else f"{parts.validation.total:,} for validation + "
    return f"{parts.trained(data):,} + {held}{data.test.total:,} samples"


def parts_of(config: Config, data: LoadedData, comm: Communicator) -> Parts:
    """Return what is trained on and what validates, as configured; every rank draws the same samples.

    Args:
        config: of the run.
        data: as `load_data` returned it.
        comm: the ranks.

    Raises:
        ConfigError: settings that do not go together, or with the number of samples.
    """
    fraction, fold = config.train.validation_split, config.train.fold
    if not fraction and fold is None:
        return Parts(None, data.test, None)
    if fraction and fold is not None:
        raise ConfigError(f"train.validation_split = {fraction} and train.fold = {fold}: set one of them")
    if config.data.sharding == "static":
        raise ConfigError("--validation-split and --fold need --sharding global: static shards are a rank's own rows")
    x, y = data.train.x, data.train.y
    if fold is None:
        rows, held = split_rows(y, fraction)
    else:
        number, folds = map(int, fold.split("/"))
        rows, held = fold_rows(y, number - 1, folds, config.seed)
    validation = Split.whole(x[held], y[held], comm.rank, comm.size)
    return Parts(rows, _small(validation) if config.fast_dev_run else validation, data.test)


def build_model(config: Config, data: LoadedData) -> Model:
    """Return the configured network, compiled for the data set's samples and classes.

    Raises:
        ConfigError: the user's function fails, or its model does not fit the data or the other settings.
    """
    options = {
        "comm": config.comm,
        "bucket_mb": config.bucket_mb,
        "device_mb": config.data.device_mb,
        "run_eagerly": config.run_eagerly,
        "steps_per_execution": config.steps_per_execution,
        **device_options(config),
    }
    if config.model.function is not None:
        return own_model(config, data, options)
    model = default_network(config, data)
    model.compile(make_optimizer(config), LOSS, metrics=METRICS, **options)
    return model


def default_network(config: Config, data: LoadedData) -> Sequential:
    """Return Rescaling of integer pixels, Flatten, the configured hidden layers, and Dense with softmax."""
    shape = data.train.x.shape[1:]
    stack: list[layers.Layer] = []
    if data.train.x.dtype.kind in "ui":
        stack.append(layers.Rescaling(1 / np.iinfo(data.train.x.dtype).max, input_shape=shape))
    stack.append(layers.Flatten(input_shape=shape))
    for units in config.model.hidden:
        stack.append(layers.Dense(units, activation=config.model.activation))
        if config.model.dropout:
            stack.append(layers.Dropout(config.model.dropout))
    stack.append(layers.Dense(data.num_classes, activation="softmax"))
    model = Sequential(stack, name=run_name(config, data), seed=config.seed)
    model.build()
    return model


def describe_network(config: Config, data: LoadedData) -> str:
    """Return "28x28 -> 128 -> 10", or "28x28 -> models.py:build_model(units=64) -> 10"."""
    ends = "x".join(map(str, data.train.x.shape[1:])), str(data.num_classes)
    inside = [str(units) for units in config.model.hidden]
    if config.model.function is not None:
        inside = [f"{config.model.function}({label(config.model.arguments)})"]
    return " -> ".join([ends[0], *inside, ends[1]])


def own_model(config: Config, data: LoadedData, options: dict[str, Any]) -> Model:
    """Return the model of the user's function, compiled as configured unless the function compiles it.

    Args:
        config: names the function and its arguments.
        data: what the model is for.
        options: of `Model.compile` about device and ranks, as configured.

    Raises:
        ConfigError: the function fails or returns no new model, or its model does not fit.
    """
    function = load_function(str(config.model.function))
    known = {"input_shape": data.train.x.shape[1:], "num_classes": data.num_classes}
    model = function.build(config.seed, config.model.arguments, known)
    if model.compiled:
        recompile(model, config, options)
    else:
        _check_output(model, data, function.spec)
        model.compile(make_optimizer(config), LOSS, metrics=METRICS, **options)
    return model


def recompile(model: Model, config: Config, options: dict[str, Any]) -> None:
    """Keep optimizer, loss and metrics of a model that its function has compiled; take the rest from the configuration.

    Raises:
        ConfigError: an option says something else than the function did.
    """
    advice = f"{config.model.function} compiles its model itself: leave the option out, or the compile"
    for field in dataclasses.fields(OptimizerConfig):
        if (value := getattr(config.optimizer, field.name)) != field.default:
            raise ConfigError(f"optimizer.{field.name} = {value}: {advice}")
    usual = inspect.signature(Model.compile).parameters
    said = model.compile_arguments
    for name, configured in options.items():
        own, default = said[name], usual[name].default
        if own == default:
            said[name] = configured
        elif configured not in (own, default):
            raise ConfigError(f"{name} = {configured}: {advice} with {name}={own!r}")
    model.compile(**said)


def _check_output(model: Model, data: LoadedData, spec: str) -> None:
    """Refuse a model whose outputs the loss would misread.

    Raises:
        ConfigError: it is such a model.
    """
    shape = model.output_shape
    if shape != (None, data.num_classes):
        raise ConfigError(
            f"--model {spec}: its output has the shape {shape}, expected {(None, data.num_classes)}, one probability "
            "a class; a model with another loss is to be compiled in the function"
        )
    last = next(reversed(model.layers), None)
    if last is not None and getattr(last, "activation", None) is activations.linear:
        raise ConfigError(
            f"--model {spec}: its last layer, {last.name!r}, gives logits, expected probabilities: let it end in "
            "softmax, or compile it in the function with SparseCategoricalCrossentropy(from_logits=True)"
        )


def make_optimizer(config: Config) -> optimizers.Optimizer:
    """Return the configured optimizer, made of the fields that its constructor knows.

    Raises:
        ConfigError: a field is set that it does not know.
    """
    kind, options, arguments = optimizers.OPTIMIZERS[config.optimizer.name], vars(config.optimizer), {}
    known = {name for base in kind.__mro__[:-1] for name in inspect.signature(base).parameters}
    for field in dataclasses.fields(OptimizerConfig):
        value = options[field.name]
        if field.name == "name" or value is None:
            continue
        if field.name in known:
            arguments[field.name] = value
        elif value != field.default:
            raise ConfigError(f"optimizer.{field.name} = {value}: {config.optimizer.name} has no {field.name}")
    optimizer: optimizers.Optimizer = kind(**arguments)
    return optimizer


def make_sampler(config: Config, data: LoadedData, parts: Parts, comm: Communicator) -> Sampler:
    """Return the configured order of the training samples, and how ranks share them.

    Raises:
        ConfigError: settings that do not go together, or with the number of samples.
    """
    return _shorten(config, _sampler(config, data, parts, comm))


def _sampler(config: Config, data: LoadedData, parts: Parts, comm: Communicator) -> Sampler:
    chosen, shards = config.train, fixed_shards(config)
    common: dict[str, Any] = {
        "seed": config.seed,
        "shuffle": chosen.shuffle,
        "drop_last": chosen.drop_last,
    }
    if config.data.sharding == "static":
        if shards is not None:
            raise ConfigError(
                "--reproducible and train.shards_per_batch need --sharding global: static shards are a rank's own rows"
            )
        return StaticSampler(data.train.total, chosen.batch_size, comm.rank, comm.size, **common)
    samples = parts.trained(data)
    whole = GlobalSampler(samples, chosen.batch_size, comm.rank, comm.size, shards_per_batch=shards, **common)
    return whole if parts.rows is None else PartSampler(parts.rows, whole)


def _shorten(config: Config, sampler: Sampler) -> Sampler:
    """Let every epoch of a sampler end after the configured number of steps.

    Raises:
        ConfigError: that is beyond the end of the data.
    """
    asked = min(_DEV_STEPS, sampler.steps) if config.fast_dev_run else config.train.steps_per_epoch
    if asked is not None and asked > sampler.steps:
        raise ConfigError(f"train.steps_per_epoch = {asked}: the data gives {sampler.steps} steps at this batch size")
    sampler.steps = sampler.steps if asked is None else asked
    return sampler


def epochs_of(config: Config) -> int:
    """Return how many epochs are trained."""
    return min(config.train.epochs, 1) if config.fast_dev_run else config.train.epochs


def run_name(config: Config, data: LoadedData) -> str:
    """Return what the run is called."""
    return config.name or data.name
