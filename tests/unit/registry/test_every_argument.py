"""Each argument of each class with a configuration: changed alone, it is in the configuration and comes back."""

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

import dptrain as dp
from dptrain import constraints, distillation, initializers, layers, losses, metrics, optimizers, regularizers
from dptrain.optimizers import schedules
from dptrain.registry.serialization import plain

ROOMS = (constraints, distillation, initializers, losses, metrics, optimizers, regularizers, schedules)
Config = dict[str, Any]
BASES = (optimizers.OptimizerMap, schedules.LearningRateSchedule)


def dense(name: str) -> dp.Sequential:
    return dp.Sequential([dp.Input((4,)), layers.Dense(3, name="hidden"), layers.Dense(2)], name=name)


# What constructors require.
REQUIRED: dict[str, Config] = {
    "CosineDecay": {"initial_learning_rate": 0.5, "decay_steps": 10},
    "CosineDecayRestarts": {"initial_learning_rate": 0.5, "first_decay_steps": 10},
    "Distiller": {
        "teacher": dense("teacher"),
        "student": dense("student"),
        "distillation_losses": [distillation.LogitsDistillation(), distillation.FeatureDistillation()],
    },
    "ExponentialDecay": {"initial_learning_rate": 0.5, "decay_steps": 10, "decay_rate": 0.5},
    "InverseTimeDecay": {"initial_learning_rate": 0.5, "decay_steps": 10, "decay_rate": 0.5},
    "PiecewiseConstantDecay": {"boundaries": [1, 2], "values": [0.5, 0.25, 0.125]},
    "PolynomialDecay": {"initial_learning_rate": 0.5, "decay_steps": 10},
    "IoU": {"num_classes": 3, "target_class_ids": [0]},
    "MeanIoU": {"num_classes": 3},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "LossFunctionWrapper": {"fn": losses.mean_squared_error},
    "MeanMetricWrapper": {"fn": losses.mean_squared_error},
    "LossScaleOptimizer": {"inner_optimizer": optimizers.SGD()},
    "MultiOptimizer": {"optimizer_map": optimizers.OptimizerMap(optimizers.SGD(), {"bias": optimizers.Adam()})},
    **{
        name: {least: 0.5}
        for name, least in (
            ("PrecisionAtRecall", "recall"),
            ("RecallAtPrecision", "precision"),
            ("SensitivityAtSpecificity", "specificity"),
            ("SpecificityAtSensitivity", "sensitivity"),
        )
    },
}
# Other values of arguments that are words, None or lists by default.
VALUES: dict[str, Any] = {
    "distillation_loss_weights": [0.2, 0.7],
    "loss": "mae",
    "teacher_layer_name": "hidden",
    "student_layer_name": "hidden",
    "reduction": "sum",
    "axis": [0, 1],
    "thresholds": 0.25,
    "threshold": 0.75,
    "top_k": 2,
    "class_id": 1,
    "ignore_class": 1,
    "seed": 5,
    "name": "another",
    "dtype": "float64",
    "distribution": "uniform",
    "weight_decay": 0.01,
    "clipnorm": 0.5,
    "clipvalue": 0.5,
    "global_clipnorm": 0.5,
    "ema_overwrite_frequency": 3,
    "gradient_accumulation_steps": 3,
    "loss_scale_factor": 2.0,
    "warmup_target": 0.75,
    "curve": "PR",
    "summation_method": "majoring",
    "average": "macro",
    "label_weights": [0.5, 0.25],
    "num_labels": 2,
    "target_class_ids": [1],
    "boundaries": [1, 3],
    "values": [0.5, 0.25, 0.0625],
    "class_aggregation": "variance_weighted_average",
    "window": "hamming",
    "side": "imag",
    "scaling": "spectrum",
    "mode": "columns",
}
OF_CLASSES: dict[tuple[str, str], Any] = {
    ("VarianceScaling", "mode"): "fan_out",
    ("Circle", "margin"): 0.75,
    ("AUC", "num_labels"): None,
}
# Needs another layer or shape; each is in the tests of its class.
UNCHANGED = ("input_axes", "output_axes", "exclude_layers", "num_labels")
# As in Keras, a loss's configuration has no type.
LOST = {("dtype", cls) for cls in vars(losses).values() if isinstance(cls, type) and issubclass(cls, losses.Loss)}


def classes() -> Iterator[type]:
    seen = set()
    for room in ROOMS:
        for name in room.__all__:
            cls = vars(room).get(name, None)
            is_made = isinstance(cls, type) and hasattr(cls, "get_config") and not inspect.isabstract(cls)
            if is_made and cls not in (*seen, *BASES):
                seen.add(cls)
                yield cls


def described(instance: Any) -> Any:
    return json.loads(json.dumps(plain(instance.get_config())))


def other(cls: type, name: str, value: Any) -> Any:
    """Return another value of an argument; its own where none is known."""
    if (cls.__name__, name) in OF_CLASSES:
        return OF_CLASSES[cls.__name__, name]
    if name in VALUES and (value is None or isinstance(value, str | list | tuple) or value is inspect.Parameter.empty):
        return VALUES[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else value * 0.5 or 0.25
    return value


@pytest.mark.parametrize("cls", list(classes()), ids=lambda cls: cls.__name__)
def test_an_argument_that_is_changed_comes_back(cls):
    required = REQUIRED.get(cls.__name__, {})
    before = described(cls(**required))
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or (name, cls) in LOST:
            continue
        value = required.get(name, parameter.default)
        changed = other(cls, name, value)
        if changed is value or changed == value:
            assert name in required or name in UNCHANGED, f"give {name!r} another value"
            continue
        config = described(cls(**required | {name: changed}))
        assert config != before, f"{name} = {changed!r} is not in the configuration"
        assert described(cls.from_config(config)) == config, name
