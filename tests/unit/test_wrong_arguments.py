"""Every public function of utilities, data sets and preprocessing, and every layer's `from_config`, with wrong values.

Whatever is passed, the result is an error in one line with the exit code of a configuration or of data, or none.
"""

import inspect
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dptrain as dp
from dptrain import datasets, layers, utils
from dptrain.errors import DptrainError, ExitCode
from dptrain.layers.base import Layer
from dptrain.runtime.failure import describe

WRONG = [None, -1, 0, 2, 10**400, float("nan"), float("inf"), "x", b"x", [], {}, object(), True, [None], np.zeros(0)]
_WAYS_OUT = (ExitCode.CONFIG, ExitCode.DATA, ExitCode.IO)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# What is no function of arguments: state of the process, user code, packages that may be missing.
OTHER = {
    "CustomObjectScope", "FeatureSpace", "Progbar", "PyDataset", "Sequence", "bounding_boxes", "custom_object_scope",
    "enable_op_determinism", "model_to_dot", "plot_model", "rank", "register_keras_serializable", "world_size",
    "clear_session", "default_seed", "disable_interactive_logging", "enable_interactive_logging",
    "get_registered_name", "get_registered_object", "get_source_inputs", "is_interactive_logging_enabled",
    "get_custom_objects",
}  # fmt: skip


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Return good arguments of each function that needs any."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setattr("dptrain.data.catalog._download", lambda *_: iter([b""]))
    pillow = pytest.importorskip("PIL.Image")
    for name in "ab":
        (tmp_path / "files" / name).mkdir(parents=True)
        (tmp_path / "files" / name / "1.txt").write_text("text")
        pillow.new("RGB", (4, 4)).save(tmp_path / "files" / name / "1.png")
        with wave.open(str(tmp_path / "files" / name / "1.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes(20))
    (tmp_path / "file.csv").write_text("1")
    image, folder = np.zeros((4, 4, 3)), {"directory": tmp_path / "files", "verbose": False}
    return {
        "text_dataset_from_directory": folder,
        "audio_dataset_from_directory": folder,
        "image_dataset_from_directory": folder | {"image_size": (4, 4)},
        "timeseries_dataset_from_array": {"data": np.arange(20.0), "targets": np.arange(20.0), "sequence_length": 3},
        "pad_sequences": {"sequences": [[1], [2, 3]]},
        "to_categorical": {"x": [0, 1]},
        "normalize": {"x": [[1.0, 2.0]]},
        "split_dataset": {"dataset": np.arange(10.0), "left_size": 0.5},
        "array_to_img": {"x": image},
        "img_to_array": {"img": pillow.new("RGB", (4, 4))},
        "load_img": {"path": tmp_path / "files" / "a" / "1.png"},
        "save_img": {"path": tmp_path / "out.png", "x": image},
        "get_file": {"fname": "file.csv", "origin": tmp_path / "file.csv", "cache_dir": tmp_path / "cache"},
        "smart_resize": {"x": image, "size": (2, 2)},
        "pack_x_y_sample_weight": {"x": image},
    }


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(utils, name) for name in utils.__all__ if name not in OTHER},
    "smart_resize": dp.preprocessing.image.smart_resize,
    **{
        f"datasets.{module}.{name}": getattr(getattr(datasets, module), name)
        for module in datasets.__all__
        for name in ("load_data", "get_word_index")
        if name in getattr(getattr(datasets, module), "__all__", ())
    },
}


def check(call: Callable[[], Any]) -> str:
    """Return what is wrong about a call's error; "" for none, and for no error."""
    try:
        result = call()
        if isinstance(result, utils.PyDataset):
            list(result)
    except DptrainError as error:
        line = describe(error)
        return "" if error.exit_code in _WAYS_OUT and "\n" not in line and len(line) < 2000 else line
    except Warning:
        return ""  # NumPy's, of NaN as an integer, say, which is no error for users
    except Exception as error:
        return describe(error)
    return ""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_of_every_function(good, name, capsys):
    function, arguments, faults = FUNCTIONS[name], good.get(name, {}), []
    seed = utils.default_seed()
    for parameter in inspect.signature(function).parameters.values():
        for value in WRONG if parameter.kind not in VARIADIC else []:
            passed = arguments | {parameter.name: value}
            required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
            if set(required) <= passed.keys() and (fault := check(lambda passed=passed: function(**passed))):
                faults.append(f"{parameter.name}={value!r:.30}: {fault}")
    utils.set_random_seed(seed)
    assert faults == []


# Arguments of constructors that have no default.
NEEDED: dict[str, Any] = {
    **dict.fromkeys(("units", "filters", "kernel_size", "num_heads", "key_dim", "output_dim", "num_bins", "n"), 2),
    **dict.fromkeys(("rate", "factor", "stddev", "scale", "max_value", "height_factor", "width_factor"), 0.5),
    **dict.fromkeys(("input_dim", "num_tokens", "sequence_length", "height", "width", "axes"), 3),
    **{"dims": (1,), "target_shape": (2,), "value_range": (0, 1), "equation": "ab,bc->ac", "output_shape": (2,)},
    **{"num_query_heads": 2, "num_key_value_heads": 2, "head_dim": 2, "function": "relu", "activation": "relu"},
    **{"bin_boundaries": [1.0], "mean": 0.0, "bits": 4, "shape": (3,), "layers": [], "output_size": 2},
    **{"max_number": 3},
}


def built(cls: type[Layer]) -> Layer:
    parameters = list(inspect.signature(cls).parameters.values())
    needed = {p.name: NEEDED.get(p.name) for p in parameters if p.default is p.empty and p.kind not in VARIADIC}
    special = {"layer": layers.LSTM(2), "cell": layers.LSTMCell(2), "cells": [layers.LSTMCell(2)]}
    extra = {"bin_boundaries": [1.0]} if cls is layers.Discretization else {}
    extra |= {"num_tokens": 3} if cls is layers.CategoryEncoding else {}
    extra |= {"factor": 4} if cls is layers.RandomPosterization else {}
    return cls(**{name: special.get(name, value) for name, value in needed.items()} | extra)


LAYERS = [
    name
    for name in layers.__all__
    if inspect.isclass(cls := getattr(layers, name)) and issubclass(cls, Layer) and not inspect.isabstract(cls)
]


@pytest.mark.parametrize("name", LAYERS)
def test_every_value_of_every_layers_configuration(name):
    cls, faults = getattr(layers, name), []
    if cls is Layer or name == "InputLayer":
        config = {"name": "a"} if cls is Layer else {"shape": (3,), "name": "a"}
    else:
        config = built(cls).get_config()
    for key in config:
        for value in WRONG[:-1]:  # no configuration holds arrays
            if fault := check(lambda key=key, value=value: cls.from_config({**config, key: value})):
                faults.append(f"{key}={value!r:.30}: {fault}")
    assert faults == []
