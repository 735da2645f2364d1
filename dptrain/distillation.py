"""Knowledge distillation: a student model learns from targets and from a frozen teacher, as in Keras.

Source: G. Hinton, O. Vinyals and J. Dean, "Distilling the knowledge in a neural network", 2015; keras/src/distillation,
Keras 3.15.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from dptrain import losses, ops, saving, tree
from dptrain.errors import ConfigError
from dptrain.losses.classes import KLDivergence
from dptrain.losses.functions import kl_divergence
from dptrain.metrics.base import Mean
from dptrain.mixed_precision import policy_name
from dptrain.models import Model, Sequential
from dptrain.registry.names import not_there
from dptrain.registry.serialization import Configurable

__all__ = ["DistillationLoss", "Distiller", "FeatureDistillation", "LogitsDistillation"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("distillation", __all__)

_FINAL = "final_output"


def _map_losses(function: Callable[..., Any], nested: Any, *others: Any) -> Any:
    """Map losses, which may be None, nested like the other structures."""
    if isinstance(nested, Mapping):
        return {key: _map_losses(function, loss, *(other[key] for other in others)) for key, loss in nested.items()}
    if isinstance(nested, list | tuple):
        return [_map_losses(function, *parts) for parts in zip(nested, *others, strict=True)]
    return function(nested, *others)


def _loss_functions(nested: Any) -> Any:
    """Return losses for names, nested as these; None stays."""
    return _map_losses(lambda loss: losses.get(loss) if isinstance(loss, str) else loss, nested)


def _described(nested: Any) -> Any:
    return _map_losses(lambda loss: None if loss is None else losses.serialize(loss), nested)


def _restored(nested: Any) -> Any:
    """Return the losses that `_described` described; a description is a dictionary, too."""
    if isinstance(nested, Mapping) and "class_name" in nested:
        return losses.deserialize(nested)
    if isinstance(nested, Mapping):
        return {key: _restored(loss) for key, loss in nested.items()}
    if isinstance(nested, list | tuple):
        return [_restored(loss) for loss in nested]
    return losses.deserialize(nested) if isinstance(nested, str) else nested


class DistillationLoss(Configurable):
    """Compares the teacher's and the student's outputs or features; subclasses write `compute_loss`.

    Attributes:
        teacher_layer_name, student_layer_name: the layers whose outputs are compared; None for the models' outputs.
    """

    teacher_layer_name: str | None = None
    student_layer_name: str | None = None

    def _get_config(self) -> dict[str, Any]:
        return {}

    def compute_loss(self, teacher_outputs: Any, student_outputs: Any, **kwargs: Any) -> Any:
        """Return a scalar for (nested) outputs (rows, ...)."""
        raise NotImplementedError("Subclasses must implement compute_loss")

    def validate_outputs(self, teacher_outputs: Any, student_outputs: Any) -> None:
        """Refuse outputs that are nested differently: ConfigError."""
        tree.assert_same_structure(teacher_outputs, student_outputs)

    def validate_model_compatibility(self, teacher: Model, student: Model) -> None:
        """Refuse models that it cannot compare: ConfigError."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the loss that `get_config` described."""
        restored = {"loss": _restored(config["loss"])} if "loss" in config else {}
        return cls(**{**config, **restored})


def _sum_of_means(nested: Any, compare: Callable[..., Any], *outputs: Any) -> Any:
    """Return the sum over outputs of what `compare(loss, teacher's, student's)` gives, in the mean over rows."""
    values = _map_losses(lambda loss, *each: 0.0 if loss is None else ops.mean(compare(loss, *each)), nested, *outputs)
    parts = [value for value in tree.flatten(values) if not isinstance(value, float)]
    return sum(parts[1:], parts[0])


class FeatureDistillation(DistillationLoss):
    """Compares outputs of layers, or of the models.

    Args:
        loss: a name, a `Loss` or a function, nested like the outputs; None for an output that is not compared.
        teacher_layer_name, student_layer_name: see `DistillationLoss`.

    Raises:
        ConfigError: all losses are None.
    """

    def __init__(
        self, loss: Any = "mse", teacher_layer_name: str | None = None, student_layer_name: str | None = None
    ) -> None:
        self.loss = _loss_functions(loss)
        self.teacher_layer_name, self.student_layer_name = teacher_layer_name, student_layer_name
        if all(part is None for part in tree.flatten(self.loss)):
            raise ConfigError(
                "The `loss` argument in `FeatureDistillation` must contain at least one non-`None` value."
            )

    def _get_config(self) -> dict[str, Any]:
        names = {"teacher_layer_name": self.teacher_layer_name, "student_layer_name": self.student_layer_name}
        return {"loss": _described(self.loss), **names}

    def validate_model_compatibility(self, teacher: Model, student: Model) -> None:
        """Refuse models without these layers, or without symbolic inputs: ConfigError."""
        named = {"teacher": (teacher, self.teacher_layer_name), "student": (student, self.student_layer_name)}
        if any(name is not None for _, name in named.values()):
            without = [role for role, (model, _) in named.items() if _symbols(model, "inputs") is None]
            if without:
                raise ConfigError(
                    "FeatureDistillation with specific layer names requires Functional or Sequential models. The "
                    f"{' and '.join(without)} model(s) appear to be subclassed (no symbolic inputs/outputs). Use it "
                    "without layer names, or LogitsDistillation."
                )
        for role, (model, name) in named.items():
            if name is not None:
                try:
                    model.get_layer(name=name)
                except ConfigError as error:
                    raise ConfigError(f"In {role} model: {error}") from error

    def validate_outputs(self, teacher_outputs: Any, student_outputs: Any) -> None:
        """Refuse outputs that are nested differently from each other, or from the losses: ConfigError."""
        super().validate_outputs(teacher_outputs, student_outputs)
        try:
            tree.assert_same_structure(self.loss, teacher_outputs)
        except ValueError as error:
            raise ConfigError(f"Loss structure mismatch: {error}") from error

    def compute_loss(self, teacher_outputs: Any, student_outputs: Any, **kwargs: Any) -> Any:
        """Return the sum of the outputs' mean losses."""
        return _sum_of_means(
            self.loss, lambda loss, taught, learnt: loss(taught, learnt), teacher_outputs, student_outputs
        )


class LogitsDistillation(DistillationLoss):
    """Compares logits, divided by a temperature.

    The Kullback-Leibler divergence compares their softmax, times the temperature squared.

    Args:
        temperature: above 0; 3 to 5 is usual.
        loss: a name, a `Loss` or a function, nested like the outputs; None for an output that is not compared.

    Raises:
        ConfigError: all losses are None, or the temperature is not a number above 0.
    """

    def __init__(self, temperature: float = 3.0, loss: Any = "kl_divergence") -> None:
        self.loss = _loss_functions(loss)
        if all(part is None for part in tree.flatten(self.loss)):
            raise ConfigError("At least one loss must be non-`None`.")
        if not isinstance(temperature, int | float):
            raise ConfigError(f"temperature must be a number, got {type(temperature)}")
        if temperature <= 0.0:
            raise ConfigError("temperature must be positive.")
        self.temperature = temperature

    def _get_config(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "loss": _described(self.loss)}

    def compute_loss(self, teacher_outputs: Any, student_outputs: Any, **kwargs: Any) -> Any:
        """Return the sum of the outputs' mean losses."""

        def compare(loss: Any, taught: Any, learnt: Any) -> Any:
            taught, learnt = taught / self.temperature, learnt / self.temperature
            if isinstance(loss, KLDivergence) or loss is kl_divergence:
                return loss(ops.softmax(taught), ops.softmax(learnt)) * self.temperature**2
            return loss(taught, learnt)

        return _sum_of_means(self.loss, compare, teacher_outputs, student_outputs)


def _symbols(model: Any, name: str) -> Any:
    """Return a model's symbolic inputs or outputs; None if it has none."""
    return getattr(model, name, None)


def _check_alike(teacher: Any, student: Any) -> None:
    """Refuse models whose inputs or outputs have other shapes or types: ConfigError."""
    for role, model in (("Teacher", teacher), ("Student", student)):
        if not isinstance(model, Model):
            raise ConfigError(f"{role} must be a keras.Model, got {type(model)}")
    for name in ("inputs", "outputs"):
        pair = [_symbols(model, name) for model in (teacher, student)]
        if any(symbols is None for symbols in pair):
            continue
        if len(pair[0]) != len(pair[1]):
            raise ConfigError(f"Teacher has {len(pair[0])} {name}, student has {len(pair[1])}.")
        for symbols in zip(*pair, strict=True):
            shapes, dtypes = [tuple(symbol.shape) for symbol in symbols], [symbol.dtype for symbol in symbols]
            said = f"Teacher: {shapes[0]}, Student: {shapes[1]}."
            if len(shapes[0]) != len(shapes[1]):
                raise ConfigError(f"Teacher and student {name[:-1]} shapes have different dimensions. {said}")
            if any(a != b for a, b in zip(*shapes, strict=True) if type(a) is type(b) is int):
                raise ConfigError(
                    f"Teacher and student {name[:-1]} shapes are incompatible. {said} All dimensions must match."
                )
            if dtypes[0] != dtypes[1]:
                raise ConfigError(
                    f"Teacher and student {name[:-1]} dtypes must match. Teacher: {dtypes[0]}, Student: {dtypes[1]}."
                )


class Distiller(Model):
    """Trains `student` on targets and on what the frozen `teacher` computes.

    The loss is student_loss_weight * (loss of the targets) + (1 - student_loss_weight) * (weighted sum of the
    distillation losses). Metrics are those of the student, and "student_loss", "distillation_loss", "total_loss".

    Args:
        teacher: a trained model; distillation freezes it.
        student: the model to train, with inputs and outputs like the teacher's.
        distillation_losses: a `DistillationLoss`, or a list of them.
        distillation_loss_weights: of a list; by default all 1.
        student_loss_weight: 0 to 1.
        name, kwargs: of the model.

    Attributes:
        student: the trained model, for use alone.
        teacher: see above.

    Raises:
        ConfigError: the models do not match, or an argument is out of range.
    """

    def __init__(
        self,
        teacher: Model,
        student: Model,
        distillation_losses: Any,
        distillation_loss_weights: Sequence[float] | None = None,
        student_loss_weight: float = 0.5,
        name: str | None = "distiller",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        _check_alike(teacher, student)
        if isinstance(student_loss_weight, bool) or not isinstance(student_loss_weight, int | float):
            raise ConfigError(f"student_loss_weight must be a number, got {type(student_loss_weight)}")
        if not 0.0 <= student_loss_weight <= 1.0:
            raise ConfigError(f"student_loss_weight must be between 0.0 and 1.0, got {student_loss_weight}")
        if distillation_losses is None:
            raise ConfigError(
                "'distillation_losses' cannot be `None`. Provide a distillation loss (e.g., LogitsDistillation or "
                "FeatureDistillation) or a list of distillation losses."
            )
        alone = not isinstance(distillation_losses, list | tuple)
        self.distillation_losses = [distillation_losses] if alone else list(distillation_losses)
        weights = None if alone else distillation_loss_weights
        self.distillation_loss_weights = [1.0] * len(self.distillation_losses) if weights is None else list(weights)
        if len(self.distillation_loss_weights) != len(self.distillation_losses):
            raise ConfigError(
                f"Number of distillation_loss_weights ({len(self.distillation_loss_weights)}) must match number of "
                f"distillation_losses ({len(self.distillation_losses)})"
            )
        for loss in self.distillation_losses:
            loss.validate_model_compatibility(teacher, student)
        self.teacher, self.student, self.student_loss_weight = teacher, student, student_loss_weight
        names = [(loss.teacher_layer_name, loss.student_layer_name) for loss in self.distillation_losses]
        self._teacher_feature_extractor, self._student_feature_extractor = (
            _FeatureExtractor(model, [pair[index] for pair in names if pair[index]])
            for index, model in enumerate((teacher, student))
        )
        teacher.trainable = False
        self.student_loss_tracker = Mean(name="student_loss")
        self.distillation_loss_tracker = Mean(name="distillation_loss")
        self.total_loss_tracker = Mean(name="total_loss")

    def compile(self, optimizer: Any = "adam", loss: Any = None, metrics: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Compile with the student's loss of the targets, nested like its outputs.

        Raises:
            ConfigError: no loss, or metrics that are no list.
        """
        if loss is None:
            raise ConfigError("'loss' cannot be `None`.")
        if metrics is not None and not isinstance(metrics, list | tuple):
            raise ConfigError(f"metrics must be a list or tuple, got {type(metrics)}")
        self._student_loss = _loss_functions(loss)
        super().compile(optimizer=optimizer, loss=None, metrics=metrics, **kwargs)

    def call(self, inputs: Any, training: bool | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return the student's outputs."""
        return self.student(inputs, training=training, **kwargs)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return the loss of a batch, a scalar; sample weights are not used, as in Keras."""
        if y_pred is None:
            y_pred = self(x, training=training)
        student_loss: Any = 0.0
        if self.student_loss_weight > 0.0 and y is not None:
            student_loss = _sum_of_means(
                self._student_loss, lambda loss, target, output: loss(target, output), y, y_pred
            )
        distillation_loss: Any = 0.0
        if self.student_loss_weight < 1.0:
            distillation_loss = self._distillation_loss(x, y_pred)
        weight = self.student_loss_weight
        total = student_loss * weight + distillation_loss * (1.0 - weight)
        self.student_loss_tracker.update_state(student_loss)
        self.distillation_loss_tracker.update_state(distillation_loss)
        self.total_loss_tracker.update_state(total)
        return total

    def _distillation_loss(self, x: Any, y_pred: Any) -> Any:
        """Return the weighted sum of the distillation losses."""
        taught = self._teacher_feature_extractor(x, training=False)
        extract = self._student_feature_extractor
        learnt = extract(x, training=True) if extract.names else {_FINAL: y_pred}
        total: Any = 0.0
        for loss, weight in zip(self.distillation_losses, self.distillation_loss_weights, strict=True):
            if loss.teacher_layer_name is None:
                outputs = taught[_FINAL], y_pred
            else:
                outputs = taught[loss.teacher_layer_name], learnt[loss.student_layer_name or _FINAL]
            loss.validate_outputs(*outputs)
            value = loss.compute_loss(*outputs)
            if len(getattr(value, "shape", ())) > 0:
                raise ConfigError(
                    f"Distillation loss {type(loss).__name__} returned a non-scalar loss with shape {value.shape}. The "
                    "compute_loss method must return a scalar tensor."
                )
            total = value * weight + total
        return total

    def _get_config(self) -> dict[str, Any]:
        """Return the arguments in JSON."""
        parts = {
            name: saving.serialize_keras_object(getattr(self, name))
            for name in ("teacher", "student", "distillation_losses")
        }
        weights = {name: getattr(self, name) for name in ("distillation_loss_weights", "student_loss_weight")}
        return {"name": self.name, **parts, **weights}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return the distiller that `get_config` described, not compiled."""
        arguments = dict(config)
        with saving.custom_object_scope(custom_objects):
            for name in ("teacher", "student", "distillation_losses"):
                arguments[name] = saving.deserialize_keras_object(config[name])
        if "dtype" in arguments:
            arguments["dtype"] = policy_name(arguments["dtype"])
        return cls(**arguments)


class _FeatureExtractor:
    """A model's output and those of some of its layers, by name."""

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        self.model, self.names = model, list(dict.fromkeys(names))
        self._extractor: Any = None
        if self.names:
            output = model.layers[-1].output if isinstance(model, Sequential) else model.output
            features = {name: model.get_layer(name=name).output for name in self.names}
            self._extractor = Model(model.inputs, {_FINAL: output, **features}, name=f"{model.name}_features")

    def __call__(self, x: Any, training: bool) -> Any:
        """Return {"final_output": ..., name: ...}."""
        if self._extractor is None:
            return {_FINAL: self.model(x, training=training)}
        return self._extractor(x, training=training)
