"""Builds what a configuration trains: data, model, order of the samples."""

import dataclasses
import inspect
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain import activations, layers, optimizers
from dptrain.batches.inputs import Samples, training_sampler
from dptrain.cli.loading import load_configured
from dptrain.cli.options import network
from dptrain.cli.options.config import Config, OptimizerConfig, compile_options, epochs_of, fixed_shards, health_options
from dptrain.cli.options.model_function import load_function
from dptrain.cli.options.pruning import prune
from dptrain.cli.options.schedule import parse_schedule
from dptrain.cli.streams import StreamSplit, is_stream, load_stream
from dptrain.comm import Communicator
from dptrain.data.holdout import fold_rows, require_classes, split_rows
from dptrain.data.loading import LoadedData, Split
from dptrain.data.moments import moments
from dptrain.data.tasks import LOSSES, Task, requested_task
from dptrain.errors import ConfigError
from dptrain.layers.weight import Weight
from dptrain.losses.base import Loss
from dptrain.losses.classes import Huber
from dptrain.metrics.means import RootMeanSquaredError
from dptrain.metrics.scores import R2Score
from dptrain.models import Model, Sequential
from dptrain.sweeps.space import label

# Steps of --fast-dev-run.
_DEV_STEPS, _DEV_EVALUATION_ROWS = 2, 256
# Steps of a training that is not to be trained to its end: longer than any warmup.
_ENDLESS = 10**12
# Power of the targets' unit in each loss.
_POWERS = {"mse": 2, "mean_squared_error": 2, "mae": 1, "mean_absolute_error": 1, "huber": 2}
_OUTPUTS: dict[Task, str] = {
    "multiclass": "one probability per class",
    "binary": "the probability of label 1",
    "regression": "one number per target",
}


def load_data(config: Config, comm: Communicator) -> LoadedData:
    """Return the configured data set, one copy a node. Collective."""
    task = comm.agree("configuration", lambda: requested_task(config.data.task, config.train.loss))
    if comm.broadcast_fact(comm.rank == 0 and is_stream(config.data)):
        chosen = config.train
        data = load_stream(
            config.data, comm, task, batch_size=chosen.batch_size, seed=config.seed, shuffle=chosen.shuffle
        )
    else:
        data = load_configured(config.data, comm, task)
    return dataclasses.replace(data, test=data.test.first(_DEV_EVALUATION_ROWS)) if config.fast_dev_run else data


@dataclasses.dataclass(frozen=True)
class Splits:
    """The parts of a data set; `test` is None where the data set's test part serves as validation."""

    train: Split
    validation: Split
    test: Split | None


def describe_samples(data: LoadedData, splits: Splits) -> str:
    """Return "60,000 + 10,000 samples", or "54,000 + 6,000 for validation + 10,000 samples"."""
    held_out = "" if splits.test is None else f"{len(splits.validation):,} for validation + "
    return f"{len(splits.train):,} + {held_out}{len(data.test):,} samples"


def splits_of(config: Config, data: LoadedData) -> Splits:
    """Return the configured training and validation samples, the same on all ranks."""
    fraction, fold = config.train.validation_split, config.train.fold
    if not fraction and fold is None:
        return Splits(data.train, data.test, None)
    if isinstance(data.train, StreamSplit):
        raise ConfigError(
            "--validation-split and --fold: not supported for streams of shards; --test-data names shards to validate "
            "on"
        )
    if fraction and fold is not None:
        raise ConfigError(f"train.validation_split = {fraction} and train.fold = {fold}: set one of them")
    if config.data.sharding == "static":
        raise ConfigError(
            "--validation-split and --fold need --sharding global: with static sharding each rank has only its own rows"
        )
    x, y = data.train.x, data.train.y
    if fold is None:
        rows, held_out = split_rows(y, fraction)
    else:
        number, folds = map(int, fold.split("/"))
        rows, held_out = fold_rows(y, number - 1, folds, config.seed)
    if data.preprocessing is not None and data.preprocessing.class_names:
        require_classes(y[rows], data.preprocessing.class_names, f"{data.name} without its validation part")
    if config.fast_dev_run:
        held_out = held_out[:_DEV_EVALUATION_ROWS]
    return Splits(Split(x, y, rows), Split(x[held_out], y[held_out]), data.test)


def build_model(
    config: Config, data: LoadedData, rows: npt.NDArray[np.int64] | None = None, epoch_steps: int | None = None
) -> Model:
    """Return the configured network, compiled for the data set.

    `rows` of the training part, None for all, standardise numbers. `epoch_steps` is for the schedule; None where
    nothing is trained to its end.
    """
    options = compile_options(config)
    if config.model.function is not None:
        model = user_model(config, data, options, epoch_steps)
    else:
        model = default_network(config, data)
        compile_model(model, config, data, options, epoch_steps)
    prune(model, config, epoch_steps)
    model._preprocessing = data.preprocessing
    standardize(model, data, rows)
    return model


def default_network(config: Config, data: LoadedData) -> Sequential:
    """Return the input layers, the configured hidden layers and the head."""
    is_convolutional = network.is_convolutional(config.model, data)
    first = (
        network.convolutional_layers(config.model, data)
        if is_convolutional
        else network.input_layers(data, config.model.network)
    )
    stack = [*first, *hidden_layers(config), *output_layers(data)]
    model = Sequential(stack, name=run_name(config, data), seed=config.seed)
    model.build()
    return model


def hidden_layers(config: Config) -> list[layers.Layer]:
    """Return the configured hidden layers."""
    stack: list[layers.Layer] = []
    for units in config.model.hidden:
        stack.append(layers.Dense(units, activation=config.model.activation))
        if config.model.dropout:
            stack.append(layers.Dropout(config.model.dropout))
    return stack


def output_layers(data: LoadedData) -> list[layers.Layer]:
    """Return the head: class probabilities, the probability of label 1, or numbers in the target's units."""
    if data.task == "regression":
        return [layers.Dense(data.outputs), layers.Normalization(invert=True)]
    return [layers.Dense(data.outputs, activation="sigmoid" if data.task == "binary" else "softmax")]


def standardize(model: Model, data: LoadedData, rows: npt.NDArray[np.int64] | None = None) -> None:
    """Adapt untouched `Normalization` layers to `rows` of the training part, None for all.

    Those of the inputs take x's number columns, inverting ones the targets.
    """
    x, y = data.train.x, data.train.y.reshape(len(data.train.y), -1)
    is_number = np.ones(x.shape[-1], bool)
    if data.preprocessing is not None and data.preprocessing.columns:
        is_number = data.preprocessing.is_number
    for layer in model._flatten_layers():
        if not isinstance(layer, layers.Normalization) or layer.input_mean is not None or not layer.built:
            continue
        fits = layer.adapt_mean.shape == (y.shape[1:] if layer.invert else is_number.shape)
        if not (fits and (data.task == "regression" if layer.invert else x.ndim == 2)):
            continue
        initial = [
            isinstance(weight, Weight) and weight.is_initial for weight in (layer.adapt_mean, layer.adapt_variance)
        ]
        layer.follows_data = layer.follows_data or all(initial)
        if not layer.follows_data:
            continue
        if data.train.total is not None:
            raise ConfigError(
                "--sharding static: not supported for tables, whose numbers are standardized over all rows; leave it "
                "out"
            )
        mean, variance = moments(y if layer.invert else x[:, : len(is_number)], rows)
        if not layer.invert:
            mean, variance = np.where(is_number, mean, 0), np.where(is_number, variance, 1)
        layer._set_moments(mean, np.where(variance > 0, variance, 1))  # a column that is constant there becomes 0


def compile_model(
    model: Model, config: Config, data: LoadedData, options: dict[str, Any], epoch_steps: int | None = None
) -> None:
    """Compile a model as configured; `options` are keywords of `Model.compile` about device and ranks."""
    loss = config.train.loss or LOSSES[data.task][0]
    requested_task(data.task, loss)
    model_loss, weight = (loss, None) if data.task != "regression" else _of_standard_targets(loss, data)
    optimizer = make_optimizer(config, epoch_steps)
    model.compile(optimizer, model_loss, loss_weights=weight, metrics=_metrics(data.task), **options)


def _metrics(task: Task) -> list[Any]:
    if task == "regression":
        return ["mae", RootMeanSquaredError(name="rmse"), R2Score(name="r2")]
    return ["accuracy"] if task == "multiclass" else ["accuracy", "auc"]


def _of_standard_targets(loss: str, data: LoadedData) -> tuple[str | Loss, float | None]:
    """Return the loss and weight that equal a regression's loss of standardised targets."""
    # The squared error of (y - mean) / deviation is that of y over the variance, and so on: Keras' own losses express
    # it, so that files are Keras'. Relative losses and log_cosh, which has no scale, are unchanged. The deviation is
    # that of the whole training part, the same for all folds.
    power = _POWERS.get(loss)
    if power is None or data.train.total is not None:  # a rank's own rows are not representative
        return loss, None
    _, variance = moments(data.train.y.reshape(len(data.train.y), -1), None)
    deviation = float(np.sqrt(variance.mean()))
    if not 0 < deviation < np.inf:
        return loss, None
    return Huber(delta=deviation) if loss == "huber" else loss, deviation**-power


def describe_network(config: Config, data: LoadedData) -> str:
    """Return "28x28 -> 128 -> 10", or "28x28 -> models.py:build_model(units=64) -> 10"."""
    ends = "x".join(map(str, data.train.x.shape[1:])), str(data.outputs)
    inside = [str(units) for units in config.model.hidden]
    if config.model.function is not None:
        inside = [f"{config.model.function}({label(config.model.arguments)})"]
    elif network.is_convolutional(config.model, data):
        shape = data.train.x.shape[1:]
        inside = [f"convolutions {', '.join(map(str, network.filters(shape)))}", *inside]
    elif kind := network.text_network(config.model, data):
        inside = [{"dense": "mean of words"}.get(kind, kind), *inside]
    return " -> ".join([ends[0], *inside, ends[1]])


def user_model(config: Config, data: LoadedData, options: dict[str, Any], epoch_steps: int | None) -> Model:
    """Return the model of the user's function, compiled as configured unless the function compiles it."""
    function = load_function(str(config.model.function))
    offered = {"input_shape": data.train.x.shape[1:], "num_classes": data.outputs}
    offered |= {"task": data.task, "preprocessing": data.preprocessing}
    model = function.build(config.seed, config.model.arguments, offered)
    if model.compiled:
        recompile(model, config, options)
    else:
        _check_output(model, data, function.spec)
        compile_model(model, config, data, options, epoch_steps)
    return model


def recompile(model: Model, config: Config, options: dict[str, Any]) -> None:
    """Keep the optimizer, loss and metrics that a model was compiled with; take the rest from the configuration."""
    advice = f"{config.model.function} compiles its model itself: remove the option or the compile"
    for field in dataclasses.fields(OptimizerConfig):
        if (value := getattr(config.optimizer, field.name)) != field.default:
            raise ConfigError(f"optimizer.{field.name} = {value}: {advice}")
    if config.train.loss is not None:
        raise ConfigError(f"train.loss = {config.train.loss}: {advice}")
    usual = inspect.signature(Model.compile).parameters
    arguments = model._compile_arguments
    for name, configured in options.items():
        compiled_value, default = arguments[name], usual[name].default
        if compiled_value == default:
            arguments[name] = configured
        elif configured not in (compiled_value, default):
            raise ConfigError(f"{name} = {configured}: {advice} with {name}={compiled_value!r}")
    model.compile(**arguments)


def _check_output(model: Model, data: LoadedData, spec: str) -> None:
    """Refuse a model whose outputs the loss would misread."""
    shape = model._output_shape
    # Of token shards each step has a target.
    expected = (None, *(data.train.y.shape[1:] if data.task == "multiclass" else ()), data.outputs)
    if shape != expected:
        raise ConfigError(
            f"--model {spec}: its output has shape {shape}, expected {expected}, "
            f"{_OUTPUTS[data.task]}; to use another loss, compile the model in the function"
        )
    last = next(reversed(model.layers), None)
    activation = getattr(last, "activation", None)
    if last is not None and data.outputs == 1 and activation is activations.get("softmax"):
        raise ConfigError(
            f"--model {spec}: its last layer, {last.name!r}, is a softmax of one number, which is always 1: end it "
            f"with {'sigmoid' if data.task == 'binary' else 'a linear layer'}"
        )
    if data.task != "regression" and last is not None and activation is activations.linear:
        raise ConfigError(
            f"--model {spec}: its last layer, {last.name!r}, outputs logits, expected probabilities: end it with "
            f"{'sigmoid' if data.task == 'binary' else 'softmax'}, or compile it in the function with from_logits=True"
        )


def make_optimizer(config: Config, epoch_steps: int | None = None) -> optimizers.Optimizer:
    """Return the configured optimizer; refuse fields that its constructor does not have."""
    kind, options, arguments = optimizers.OPTIMIZERS[config.optimizer.name], vars(config.optimizer), {}
    parameters = {name for base in kind.__mro__[:-1] for name in inspect.signature(base).parameters}
    for field in dataclasses.fields(OptimizerConfig):
        value = options[field.name]
        if field.name in ("name", "schedule") or value == field.default:  # optimizers have their own
            continue
        if field.name in parameters:
            arguments[field.name] = value
        else:
            raise ConfigError(f"optimizer.{field.name} = {value}: {config.optimizer.name} has no {field.name}")
    if config.optimizer.schedule is not None:
        rate = arguments.get("learning_rate", inspect.signature(kind).parameters["learning_rate"].default)
        length = (_ENDLESS, 1) if epoch_steps is None else (epoch_steps, epochs_of(config))
        arguments["learning_rate"] = parse_schedule(config.optimizer.schedule).make(rate, *length)
    optimizer: optimizers.Optimizer = kind(**arguments)
    return optimizer


def fit_arguments(config: Config, splits: Splits, steps: int) -> dict[str, Any]:
    """Return the configured arguments of `Model.fit`, except callbacks and verbosity."""
    chosen, steps_per_epoch = config.train, config.train.steps_per_epoch
    return {
        **({} if chosen.class_weight is None else {"class_weight": balanced_weights(splits.train)}),
        "x": fed(splits.train),
        "batch_size": None if isinstance(splits.train, StreamSplit) else chosen.batch_size,
        "epochs": epochs_of(config),
        "validation_data": fed(splits.validation),
        "shuffle": chosen.shuffle,
        "drop_last": chosen.drop_last,
        "steps_per_epoch": steps if steps_per_epoch is not None or config.fast_dev_run else None,
        **health_options(config),
    }


def fed(split: Split) -> Any:
    """Return what `Model.fit` and `evaluate` take: the split, or the batches of a stream."""
    return split.stream if isinstance(split, StreamSplit) else split


def balanced_weights(train: Split) -> dict[int, float]:
    """Return class weights, inverse to the number of training samples and 1 on average."""
    if isinstance(train, StreamSplit):
        raise ConfigError("--class-weight balanced: not supported for streams of shards; leave it out")
    if train.total is not None:
        raise ConfigError(
            "--class-weight balanced: --sharding static keeps only a rank's own rows; leave one of them out"
        )
    y = train.y if train.rows is None else train.y[train.rows]
    if y.dtype.kind not in "iub" and not np.isin(y, (0, 1)).all():
        raise ConfigError("--class-weight balanced: the targets are numbers, not classes; leave it out")
    labels, counts = np.unique(y, return_counts=True)
    return {int(label): len(y) / (len(labels) * int(count)) for label, count in zip(labels, counts, strict=True)}


def steps_of(config: Config, splits: Splits, comm: Communicator) -> int:
    """Return the steps of an epoch; None if unknown."""
    chosen, train = config.train, splits.train
    shards, samples = fixed_shards(config), min(chosen.batch_size, len(train))
    if chosen.shards_per_batch is not None and chosen.shards_per_batch > max(samples, 1):
        raise ConfigError(
            f"train.shards_per_batch = {shards}: a global batch has {samples} samples; use at most {samples}"
        )
    if isinstance(train, StreamSplit):
        return _stream_steps(config, len(train.stream))
    common: dict[str, Any] = {"seed": config.seed, "shuffle": chosen.shuffle, "drop_last": chosen.drop_last}
    epoch_samples = Samples(train.x, train.y, split=train)
    steps = training_sampler(epoch_samples, chosen.batch_size, comm, shards=shards, **common).steps
    if chosen.steps_per_epoch is not None and chosen.steps_per_epoch > steps:
        raise ConfigError(
            f"train.steps_per_epoch = {chosen.steps_per_epoch}: the data gives {steps} steps at this batch size"
        )
    return min(steps, _DEV_STEPS) if config.fast_dev_run else chosen.steps_per_epoch or steps


def _stream_steps(config: Config, batches: int) -> int:
    if config.train.drop_last:
        raise ConfigError("--drop-last: not supported for streams of shards; leave it out")
    steps = config.train.steps_per_epoch or batches
    return min(steps, _DEV_STEPS) if config.fast_dev_run else steps


def schedule_steps(config: Config, steps: int) -> int | None:
    """Return the steps of an epoch for the schedule; None in a fast dev run, too short for most schedules."""
    return None if config.fast_dev_run else steps


def run_name(config: Config, data: LoadedData) -> str:
    """Return the run's name."""
    return config.name or data.name
