"""A copy of a model with layers, and so weights, of its own; as `keras.models.clone_model`."""

from collections.abc import Callable
from typing import Any

from dptrain.errors import ConfigError
from dptrain.layers import Input, Layer
from dptrain.layers.node import KerasTensor
from dptrain.models.files import takes_graph
from dptrain.models.graph import Graph
from dptrain.models.model import Model
from dptrain.models.sequential import Sequential
from dptrain.program import tree
from dptrain.program.dims import read
from dptrain.saving import keras_config

CloneFunction = Callable[[Layer], Layer]


def clone_model(
    model: Model,
    input_tensors: Any = None,
    clone_function: CloneFunction | None = None,
    call_function: Callable[..., Any] | None = None,
    recursive: bool = False,
) -> Any:
    """Return a model like another, with new layers and weights; compiled as it is.

    Args:
        model: a Sequential, a functional model, or one of a class with `get_config`.
        input_tensors: symbolic tensors that the copy begins with, nested as the inputs; by default new ones.
        clone_function: takes a layer and returns that of the copy; by default a new one of the same configuration.
        call_function: takes a layer of the copy and the arguments of its call, and returns the outputs; of functional
            models.
        recursive: whether models in the model are copied in the same way, instead of by `clone_function`.

    Raises:
        ConfigError: arguments that this kind of model does not take, or a layer that cannot be described.
    """
    if isinstance(model, Sequential):
        if call_function is not None:
            raise ConfigError("`call_function` argument is not supported with Sequential models.")
        return _compiled_as(model, _of_sequential(model, input_tensors, _Cloning(clone_function, None, recursive)))
    graph = model._graph
    if graph is not None and (type(model) is Model or clone_function or input_tensors is not None):
        cloning = _Cloning(clone_function, call_function, recursive)
        return _compiled_as(model, _of_graph(model, graph, input_tensors, cloning))
    if clone_function or call_function or input_tensors is not None:
        raise ConfigError(
            "Arguments `clone_function`, `call_function` and `input_tensors` are only supported for Sequential models "
            f"or Functional models. Received model of type '{type(model).__name__}'"
        )
    return keras_config.deserialize_keras_object(
        keras_config.serialize_keras_object(model), {type(model).__name__: type(model)}
    )


class _Cloning:
    """Copies layers, each once.

    Args:
        function: see `clone_model`.
        call: see there.
        recursive: see there.
    """

    def __init__(self, function: CloneFunction | None, call: Callable[..., Any] | None, recursive: bool) -> None:
        self._function, self._recursive = function or _again, recursive
        self.call: Callable[..., Any] = call or (lambda layer, *arguments, **keywords: layer(*arguments, **keywords))
        self._own_call = call
        self._made: dict[int, Layer] = {}

    def of(self, layer: Layer) -> Layer:
        """Return the copy of a layer."""
        if id(layer) not in self._made:
            if self._recursive and isinstance(layer, Sequential):
                made: Layer = clone_model(layer, None, self._function, None, True)
            elif self._recursive and isinstance(layer, Model) and layer._graph is not None:
                made = clone_model(layer, None, self._function, self._own_call, True)
            else:
                made = self._function(layer)
            self._made[id(layer)] = made
        return self._made[id(layer)]


def _again(layer: Layer) -> Layer:
    return type(layer).from_config(layer.get_config())


def _of_sequential(model: Sequential, input_tensors: Any, cloning: _Cloning) -> Sequential:
    layers: list[Any] = [cloning.of(one) for one in model.layers]
    start = model._input_layer
    if input_tensors is not None:
        given = tree.leaves(input_tensors)
        if len(given) != 1 or not isinstance(given[0], KerasTensor):
            raise ConfigError("Argument `input_tensors` must contain a single tensor, a KerasTensor.")
        layers.insert(0, _input_like(given[0], None if start is None else start.name))
    elif start is not None:
        layers.insert(0, _input_like(start.output, start.name))
    return Sequential(layers, trainable=model.trainable, name=model.name, seed=model._model_seed)


def _of_graph(model: Model, graph: Graph, input_tensors: Any, cloning: _Cloning) -> Model:
    given = input_tensors
    if given is None:
        given = tree.map_leaves(
            lambda path, one: _input_like(one, None if one.history is None else one.history.layer.name), graph.inputs
        )
    elif not all(isinstance(one, KerasTensor) for one in tree.leaves(given)):
        raise ConfigError(f"All entries in `input_tensors` must be KerasTensors. Received: {input_tensors}")

    def call(layer: Layer, *arguments: Any, **keywords: Any) -> Any:
        return cloning.call(cloning.of(layer), *arguments, **keywords)

    outputs = graph.run(given, tree.leaves(given)[0].dtype.name, call)
    kind: Any = type(model) if takes_graph(type(model)) else Model
    made: Model = kind(given, outputs, name=model.name, trainable=model.trainable)
    if made._model_seed != model._model_seed:
        made._model_seed = model._model_seed
        made._adopt(made._model_seed)
    made._set_dtype(model.dtype_policy)
    return made


def _input_like(symbol: Any, name: str | None) -> Any:
    return Input(batch_shape=read(symbol.shape), dtype=symbol.dtype.name, name=name)


def _compiled_as(model: Model, copy: Any) -> Any:
    """Return the copy, compiled as the model is, with an optimizer and metrics of its own."""
    given = model._compiled_with
    if given is not None:
        copy.compile(
            _anew(given.optimizer),
            *(tree.map_leaves(lambda path, one: _anew(one), each) for each in (given.loss, given.loss_weights)),
            *(tree.map_leaves(lambda path, one: _anew(one), each) for each in (given.metrics, given.weighted_metrics)),
            given.run_eagerly,
            given.steps_per_execution or "auto",
            comm=given.comm,
            bucket_mb=given.bucket_mb,
            device_mb=given.device_mb,
            shards_per_batch=given.shards_per_batch,
            comm_dtype=given.comm_dtype,
            shard_optimizer=given.shard_optimizer,
            shard_weights=given.shard_weights,
            stages=given.stages,
            microbatches=given.microbatches,
            **given.device,
        )
    return copy


def _anew(one: Any) -> Any:
    """Return another object of the same configuration; words, numbers and functions as they are."""
    return type(one).from_config(one.get_config()) if hasattr(one, "get_config") else one
