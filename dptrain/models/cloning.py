"""Copies of a model with new layers and weights, as `keras.models.clone_model`."""

from collections.abc import Callable, Mapping
from typing import Any

from dptrain.errors import ConfigError
from dptrain.layers import Identity, Input, Layer
from dptrain.layers.node import KerasTensor
from dptrain.layers.operation_layer import OperationLayer
from dptrain.models.files import takes_graph
from dptrain.models.graph import Graph, input_dtype, is_optional
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
    """Return a copy of a model with new layers and newly drawn weights, compiled as it is, and its `preprocessing`.

    Args:
        model: a Sequential, a functional model, or a model whose class has `get_config`.
        input_tensors: symbolic inputs of the copy, nested like the model's; by default new ones.
        clone_function: maps a layer to its copy; by default a new layer with the same configuration.
        call_function: takes a layer of the copy and the arguments of its call, and returns the outputs; for functional
            models.
        recursive: copy models in the model in the same way, instead of by `clone_function`.

    Raises:
        ConfigError: arguments that this kind of model does not take, or a layer without a configuration.
    """
    if isinstance(model, Sequential):
        if call_function is not None:
            raise ConfigError("`call_function` argument is not supported with Sequential models.")
        return _compiled_as(model, _of_sequential(model, input_tensors, _Cloning(clone_function, None, recursive)))
    graph = model._whole_graph
    if graph is not None and (type(model) is Model or clone_function or input_tensors is not None):
        cloning = _Cloning(clone_function, call_function, recursive)
        return _compiled_as(model, _of_graph(model, graph, input_tensors, cloning))
    if clone_function or call_function or input_tensors is not None:
        raise ConfigError(
            "Arguments `clone_function`, `call_function` and `input_tensors` are only supported for Sequential models "
            f"or Functional models. Received model of type '{type(model).__name__}'"
        )
    copy = keras_config.deserialize_keras_object(
        keras_config.serialize_keras_object(model), {type(model).__name__: type(model)}
    )
    copy._preprocessing = model._preprocessing
    return copy


class _Cloning:
    """Copies each layer once; arguments as in `clone_model`."""

    def __init__(self, function: CloneFunction | None, call: Callable[..., Any] | None, recursive: bool) -> None:
        self._function, self._recursive = function or _reconstructed, recursive
        self.call: Callable[..., Any] = call or (lambda layer, *arguments, **keywords: layer(*arguments, **keywords))
        self._call_function = call
        self._copies: dict[int, Layer] = {}

    def of(self, layer: Layer) -> Layer:
        """Return the copy of a layer."""
        if isinstance(layer, OperationLayer):
            return layer
        if id(layer) not in self._copies:
            if self._recursive and isinstance(layer, Sequential):
                copy: Layer = clone_model(layer, None, self._function, None, True)
            elif self._recursive and isinstance(layer, Model) and layer._graph is not None:
                copy = clone_model(layer, None, self._function, self._call_function, True)
            else:
                copy = self._function(layer)
            self._copies[id(layer)] = copy
        return self._copies[id(layer)]


def _reconstructed(layer: Layer) -> Layer:
    config = layer.get_config()
    if not layer._own_policy and isinstance(config.get("dtype"), Mapping):
        del config["dtype"]  # the model sets it
    return type(layer).from_config(config)


def _of_sequential(model: Sequential, input_tensors: Any, cloning: _Cloning) -> Sequential:
    layers: list[Any] = [cloning.of(layer) for layer in model.layers]
    start = model._input_layer
    if input_tensors is not None:
        tensors = tree.leaves(input_tensors)
        if len(tensors) != 1 or not isinstance(tensors[0], KerasTensor):
            raise ConfigError("Argument `input_tensors` must contain a single tensor, a KerasTensor.")
        layers.insert(0, _input_like(tensors[0], None if start is None else start.name))
    elif start is not None:
        layers.insert(0, _input_like(start.output, start.name))
    return Sequential(layers, trainable=model.trainable, name=model.name)


def _of_graph(model: Model, graph: Graph, input_tensors: Any, cloning: _Cloning) -> Model:
    inputs = input_tensors
    if inputs is None:
        inputs = tree.map_leaves(
            lambda path, symbol: _input_like(symbol, None if symbol.history is None else symbol.history.layer.name),
            graph.inputs,
        )
    elif not all(isinstance(tensor, KerasTensor) for tensor in tree.leaves(inputs)):
        raise ConfigError(f"All entries in `input_tensors` must be KerasTensors. Received: {input_tensors}")
    elif not _are_alike(inputs, graph.inputs):
        raise ConfigError(f"`input_tensors` must have the same structure as model.input. Received: {input_tensors}")

    def call(layer: Layer, *arguments: Any, **keywords: Any) -> Any:
        return cloning.call(cloning.of(layer), *arguments, **keywords)

    outputs = graph.run(inputs, graph.dtype, call)
    kind: Any = type(model) if takes_graph(type(model)) else Model
    copy: Model = kind(inputs, outputs, name=model.name, trainable=model.trainable)
    copy._set_dtype(model.dtype_policy)
    return copy


def _are_alike(tensors: Any, inputs: Any) -> bool:
    """Return whether tensors are nested like a model's inputs; a list of one may stand for its element."""
    alone = [len(tree.leaves(each)) == 1 and not isinstance(each, Mapping) for each in (tensors, inputs)]
    if all(alone):
        return True
    paths = ([path for path, _ in tree.flatten(each)] for each in (tensors, inputs))
    return isinstance(tensors, Mapping) == isinstance(inputs, Mapping) and sorted(next(paths)) == sorted(next(paths))


def _input_like(symbol: Any, name: str | None) -> Any:
    return Input(batch_shape=read(symbol.shape), dtype=input_dtype(symbol), name=name, optional=is_optional(symbol))


def _compiled_as(model: Model, copy: Any) -> Any:
    """Compile a copy like the model, with its own optimizer and metrics, for the same raw data."""
    copy._preprocessing = model._preprocessing
    compiled = model._compiled_with
    if compiled is not None:
        arguments = compiled.arguments()
        for name in ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics"):
            arguments[name] = tree.map_leaves(lambda path, entry: _fresh_copy(entry), arguments[name])
        copy.compile(**arguments)
    return copy


def _fresh_copy(value: Any) -> Any:
    """Return another object of the same configuration; words, numbers and functions unchanged."""
    return type(value).from_config(value.get_config()) if hasattr(value, "get_config") else value


def scorer(model: Model) -> Model:
    """Return a model that returns its inputs, compiled with the losses and metrics of another."""
    for name in ("test_step", "compute_loss", "compute_metrics"):
        if getattr(type(model), name) is not getattr(Model, name):
            raise ConfigError(f"not supported: scoring predictions of a {type(model).__name__}, which overrides {name}")
    compiled = model._compiled
    if compiled is None:
        raise ConfigError("You must call `compile()` before calling `evaluate()`.")
    model._find_outputs()
    if model._outputs is None:
        raise ConfigError(f"model {model.name!r} has not been built: train it or call it on data")
    shapes = [shape for _, shape in tree.flat_shapes(model._output_shapes)]
    inputs = [Input(shape=shape) for shape in shapes]
    outputs = [Identity(name=output.name)(tensor) for output, tensor in zip(model._outputs.flat, inputs, strict=True)]
    nested = [tree.refilled(model._output_shapes, iter(each)) for each in (inputs, outputs)]
    scoring = Model(*nested, seed=model._model_seed)
    arguments = (compiled.loss, compiled.loss_weights, compiled.metrics, compiled.weighted_metrics)
    scoring.compile("sgd", *arguments, run_eagerly=compiled.run_eagerly, **compiled.device)
    return scoring
