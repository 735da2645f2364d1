"""Scores existing predictions."""

from dptrain.errors import ConfigError
from dptrain.layers import Identity, Input
from dptrain.models.model import Model
from dptrain.program import tree


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
