"""Models from files, and from Keras."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dptrain import comm as comms
from dptrain.comm import Communicator
from dptrain.errors import ConfigError, DataError, printable
from dptrain.layers.weight import Weight, without_values
from dptrain.models.feature_space import FeatureSpace
from dptrain.models.model import Model
from dptrain.random import keeping_model_seeds
from dptrain.registry.serialization import custom_object_scope
from dptrain.runtime.failure import phase
from dptrain.saving import (
    assets,
    ensemble_zip,
    keras_2_config,
    keras_2_h5,
    keras_config,
    keras_h5,
    keras_zip,
    model_folder,
    optimizer_variables,
)
from dptrain.saving.keras_zip import ModelFile
from dptrain.saving.reading import Loaded, Stored, fill, reading, share
from dptrain.saving.run_folder import model_file
from dptrain.saving.saveables import layers_with_stores

T = TypeVar("T")


def load_model(
    filepath: str | Path,
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    *,
    best: bool = False,
    **options: Any,
) -> Model:
    """Return the model in a `.keras` or `.h5` file, or of a run's folder; or a `FeatureSpace`. Collective.

    Training continues exactly where it stopped: weights, optimizer (iterations, learning rate, slots), loss, metrics
    and, in a file of dptrain's, the seed. NaN in weights are loaded as they are.

    Args:
        filepath: ends in `.keras`, or for Keras 2's models in `.h5` or `.hdf5`; or a folder: of `zipped=False`, of a
            run ("runs/X") or of a sweep that has kept a model.
        custom_objects: the user's classes and functions by name; see `dptrain.saving.register_keras_serializable`.
        compile: whether to compile the model as it was.
        safe_mode: must be True: dptrain never runs code from a file.
        best: of a run's folder, the best epoch's model instead of the last (not in Keras, like the options).
        options: of `Model.compile` that a file does not have, such as device="cpu".

    Raises:
        ConfigError: an argument is not supported, or h5py is not installed.
        DataError: the file is missing or damaged, or names what dptrain does not have; or the run has not finished:
            names its newest checkpoint.
        AgreedError: either of these, on all ranks, under mpirun.
    """
    if not safe_mode:
        raise ConfigError("not supported: safe_mode=False; dptrain runs no code from files")
    comm = comms.current()
    phase.enter("loading")

    def read() -> tuple[str, ModelFile] | None:
        if comm.rank != 0:
            return None
        if str(filepath).endswith((".h5", ".hdf5")):
            return str(filepath), keras_2_h5.read(Path(filepath))
        if not best and model_folder.is_model_folder(Path(filepath)):
            return str(filepath), model_folder.read(Path(filepath))
        path = model_file(Path(filepath), best=best)
        return str(path), keras_zip.read(path)

    on_rank_0 = _agreed(comm, read)
    where, file = (str(filepath), None) if on_rank_0 is None else on_rank_0
    model: Model = _model_of(comm, where, file, custom_objects, compile, options)
    return model


def load_members(
    path: Path, custom_objects: Mapping[str, Any] | None, compile: bool, options: Mapping[str, Any]
) -> list[Model]:
    """Return the models in an ensemble's file; arguments as in `load_model`. Collective."""
    comm = comms.current()
    phase.enter("loading")
    files = _agreed(comm, lambda: ensemble_zip.read(path) if comm.rank == 0 else None)
    number = comm.broadcast_fact(None if files is None else len(files))
    names = [f"{path}:{ensemble_zip.member_name(index)}" for index in range(number)]
    contents: list[ModelFile | None] = [None] * number if files is None else list(files)
    return [
        _model_of(comm, name, file, custom_objects, compile, options)
        for name, file in zip(names, contents, strict=True)
    ]


def _model_of(
    comm: Communicator,
    where: str,
    file: ModelFile | None,
    custom_objects: Mapping[str, Any] | None,
    compile: bool,
    options: Mapping[str, Any],
) -> Any:
    """Return the model of a file that rank 0 has read. Collective."""
    fact = None if file is None else [file.config, file.seed, file.weights.getbuffer().nbytes, file.preprocessing]
    config, seed, nbytes, raw = comm.broadcast_fact(fact)
    if isinstance(config, Mapping) and config.get("class_name") == FeatureSpace.__name__:
        with reading(where):
            return FeatureSpace.from_config(config["config"])

    def make() -> Model:
        fault = "its model cannot be built"  # a user's class may be at fault: the file could be read
        with (
            reading(where, fault),
            custom_object_scope(custom_objects),
            without_values(nbytes // 2),  # 2 bytes: the smallest dtype
            keeping_model_seeds(),
        ):
            model = _constructed(config, seed, config.get("compile_config") if compile else None, options)
        if raw is not None:
            from dptrain.data.preprocessing import Preprocessing  # imports pydantic, which is slow

            model._preprocessing = Preprocessing.from_dict(raw, f"{where}:preprocessing.json")
        return model

    model = _agreed(comm, make)

    def read() -> Loaded | None:
        if file is None:
            return None
        place = where if file.load is keras_2_h5.load else f"{where}:model.weights.h5"
        return file.load(file.weights, place, model, with_optimizer=compile)

    loaded = share(comm, _agreed(comm, read), keras_h5.stored_variables(model), layers_with_stores(model))
    for layer in loaded.stores:  # may load only some of its weights
        for weight in layer._own_weights:
            if isinstance(weight, Weight):
                weight.initialize(*weight.drawn_with)
    loaded.assign()
    _load_assets(comm, where, model, file)
    phase.enter("user code")
    _warn(comm, loaded.warnings, stacklevel=4)
    return model


def _load_assets(comm: Communicator, where: str, model: Model, file: ModelFile | None) -> None:
    """Let layers load the files of their `save_assets`. Collective."""
    if not assets.loading(model):
        return
    files = {} if file is None else file.assets
    sizes = comm.broadcast_fact(None if file is None else {name: len(content) for name, content in files.items()})
    shared = {}
    for name, size in sizes.items():
        content = np.empty(size, np.uint8) if file is None else np.frombuffer(files[name], np.uint8).copy()
        comm.broadcast(content)
        shared[name] = content.tobytes()
    assets.load(model, shared, where)


def model_from_json(json_string: str, custom_objects: Mapping[str, Any] | None = None) -> Model:
    """Return a new, uncompiled model from what `to_json` of dptrain or Keras returned.

    `custom_objects` are the user's classes by name; ConfigError names what dptrain does not have.
    """
    try:
        config = json.loads(json_string)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}") from error
    with custom_object_scope(custom_objects):
        return _constructed(config, None, None, {})


def _constructed(config: Any, seed: int | None, compiled: Any, options: Mapping[str, Any]) -> Model:
    """Return the model of a config.json, built if its input's shape is known."""
    config, compiled = keras_2_config.upgraded(config), keras_2_config.upgraded(compiled)
    with keras_config.sharing_layers():
        model = keras_config.read_layer(config)
    if not isinstance(model, Model):
        raise ConfigError(f"{str(config.get('class_name'))[:80]!r} is not a model")
    build_config = config.get("build_config")
    if not model.built and build_config:
        model.build_from_config(build_config)
    if seed is not None:
        model._model_seed = seed
    if model.built:
        model._adopt(model._model_seed)
    if type(model).compile_from_config is not Model.compile_from_config:  # as in Keras, which calls it
        if compiled:
            model.compile_from_config(compiled)
            if model.built:
                model._compiled_optimizer.build(model.trainable_weights)
        return model
    arguments = keras_config.compile_arguments(compiled)
    if arguments is None:
        return model
    if type(model).compile is not Model.compile:
        warnings.warn(
            "`compile()` was not called as part of model loading because the model's `compile()` method is custom. "
            "Please call it again.",
            stacklevel=2,
        )
        return model
    model.compile(**{"dtype": model.dtype_policy.name} | arguments | dict(options))
    if model.built:
        model._compiled_optimizer.build(model.trainable_weights)
    return model


def from_keras(model: Any, *, compile: bool = True, seed: int | None = None, **options: Any) -> Model:
    """Return a live Keras 3 model as a dptrain model with the same weights. Collective; rank 0's weights count.

    Args:
        model: a Keras Sequential or Functional; only its methods are called, Keras is not imported.
        compile: also take over optimizer (with its state), loss and metrics.
        seed: of shuffling and dropout, see `Model`.
        options: of `Model.compile`, such as device="cpu".

    Raises:
        ConfigError: names layers, an optimizer, a loss or metrics that dptrain does not have.
        DataError: weights that do not match the layers.
        AgreedError: either of these, on all ranks, under mpirun.
    """
    comm = comms.current()
    phase.enter("loading")

    def take() -> tuple[Model, Loaded]:
        needed = ("get_config", "get_weights", "layers", "name")
        if missing := [name for name in needed if not hasattr(model, name)]:
            raise ConfigError(f"expected a Keras model, found {type(model).__name__} without {', '.join(missing)}")
        config = model.get_config()
        if not isinstance(config, Mapping) or not isinstance(config.get("layers"), list):
            raise ConfigError(
                f"not supported: {type(model).__name__} {model.name!r}: its configuration has no list of layers"
            )
        name = "Functional" if "input_layers" in config else "Sequential"
        description = {"class_name": name, "config": config}
        compiled = model.get_compile_config() if compile and hasattr(model, "get_compile_config") else None
        with keeping_model_seeds():
            result = _constructed(description, seed, compiled, options)
        return result, _keras_weights(model, result) if result.built else Loaded()

    result, on_rank_0 = _agreed(comm, take)
    loaded = share(comm, on_rank_0 if comm.rank == 0 else None, keras_h5.stored_variables(result))
    loaded.assign()
    phase.enter("user code")
    _warn(comm, loaded.warnings)
    return result


def _keras_weights(model: Any, result: Model) -> Loaded:
    """Return the weights and the optimizer's variables of a Keras model."""
    where, weights = f"Keras model {model.name!r}", result._weights_by_path()
    arrays = [np.asarray(weight) for weight in model.get_weights()]
    if len(arrays) != len(weights):
        raise DataError(f"{where}: {len(arrays)} weights, its layers have {len(weights)} in dptrain")
    loaded = Loaded(*fill(where, weights, dict(zip(weights, map(_stored, arrays), strict=True)), skip_mismatch=False))
    variables = getattr(getattr(model, "optimizer", None), "variables", None) or []
    if result.compiled and variables:
        values, reason = optimizer_variables.read(
            where,
            result.optimizer,
            result.optimizer.variables,
            [_stored(np.asarray(variable.numpy())) for variable in variables],
        )
        loaded.values |= values
        loaded.warnings += [reason] if reason else []
    return loaded


def _stored(array: Any) -> Stored:
    return Stored(array.shape, array.dtype.name, lambda: array, "Keras")


def _agreed(comm: Communicator, action: Callable[[], T]) -> T:
    """Run an action: alone it raises its own error, with several ranks it raises on all."""
    return action() if comm.size == 1 else comm.agree("loading", action)


def _warn(comm: Communicator, lines: list[str], stacklevel: int = 3) -> None:
    for line in lines if comm.rank == 0 else ():
        warnings.warn(printable(line), stacklevel=stacklevel)
