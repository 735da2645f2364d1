"""The stand-ins for libraries have the names, argument orders and numbers of the real ones."""

import ast
import importlib
import importlib.util
import inspect
import math
import re
import sys
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "tests" / "standins" / "nvmath"
PARTS = {"nvmath": "__init__.py", "nvmath.bindings.cublas": "bindings/cublas.py"}
PARTS["nvmath.bindings.cublasLt"] = "bindings/cublasLt.py"


def stand_in(name: str):
    spec = importlib.util.spec_from_file_location(f"standin_{name.replace('.', '_')}", FOLDER / PARTS[name])
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PARTS)
def test_stand_in(name):
    pytest.importorskip("nvmath", reason="nvmath-python is not installed: pip install 'nvmath-python[cu12]'")
    real, ours = importlib.import_module(name), stand_in(name)
    compared = 0
    for word, value in vars(ours).items():
        if inspect.isclass(value) and issubclass(value, IntEnum) and value is not IntEnum:
            for member in value:
                assert int(getattr(real, word)[member.name]) == member, f"{word}.{member.name}"
                compared += 1
        elif inspect.isfunction(value) and value.__module__ == ours.__name__ and not word.startswith("_"):
            expected = [part.split()[-1] for part in _arguments(getattr(real, word))]
            assert list(inspect.signature(value).parameters) == expected, word
            compared += 1
    assert compared >= 2
    if name.endswith("Lt"):
        assert ours.matmul_heuristic_result_dtype == real.matmul_heuristic_result_dtype
        assert issubclass(real.cuBLASLtError, Exception)
        for kind in ("desc", "preference"):
            attributes = getattr(ours, f"Matmul{kind.capitalize()}Attribute")
            table = f"get_matmul_{kind}_attribute_dtype"
            for attribute in attributes:
                assert np.dtype(getattr(ours, table)(attribute)) == np.dtype(getattr(real, table)(int(attribute))), (
                    attribute
                )


def test_stand_in_of_nccl():
    """Beside the source of nccl4py, which would load the library if it were imported."""
    spec = importlib.util.find_spec("nccl")
    if spec is None:
        pytest.skip("nccl4py is not installed: pip install --no-deps nccl4py")
    folder = Path(spec.submodule_search_locations[0]) / "core"
    real = {}
    for name in ("utils", "group", "typing", "communicator"):
        real |= _said_in(folder / f"{name}.py")
    ours = _said_in(ROOT / "tests" / "standins" / "nccl" / "core" / "__init__.py")
    ours = {name: signature for name, signature in ours.items() if "_" not in (name[0], name.partition(".")[2][:1])}
    for name in ("UniqueId.folder", *(name for name in ours if name.startswith("Result."))):  # of the compiled part
        ours.pop(name)
    assert {name: real.get(name) for name in ours} == ours
    assert len(ours) >= 20
    called = set(re.findall(r"_made\.(\w+)", (ROOT / "dptrain" / "comm" / "nccl.py").read_text()))
    assert {f"Communicator.{name}" for name in called} <= real.keys()


def test_stand_in_of_cudnn():
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed: pip install nvidia-cudnn-frontend")
    real = importlib.import_module("cudnn")
    ours = _said_in(ROOT / "tests" / "standins" / "cudnn" / "__init__.py")
    numbers = {name: value for name, value in ours.items() if "." in name and isinstance(value, int)}
    assert len(numbers) >= 16
    for name, number in numbers.items():
        kind, member = name.split(".")
        assert int(getattr(real, kind).__members__[member]) == number, name
    for name in ("create_handle", "destroy_handle", "set_stream"):
        assert list(inspect.signature(getattr(real, name)).parameters) == ours[name][0]
    for name in ("tensor", "execute", "validate", "create_execution_plans", "deselect_numeric_notes"):
        parameters = inspect.signature(getattr(real.pygraph, name)).parameters
        assert set(ours[f"pygraph.{name}"][0]) <= parameters.keys(), name
    for name in ("set_output", "set_data_type", "set_dim", "set_stride", "set_uid"):
        assert list(inspect.signature(getattr(real.Tensor, name)).parameters) == ours[f"Tensor.{name}"][0], name
    # What a graph is built of it knows without the library; an unknown word would be refused.
    kinds = real.data_type
    graph = real.pygraph(
        **{"name": "x", "io_data_type": kinds.HALF},
        **{"intermediate_data_type": kinds.FLOAT, "compute_data_type": kinds.FLOAT, "handle": None},
    )
    shapes = {"image": (2, 4, 8, 8), "filter": (6, 4, 3, 3), "places": (2, 6, 8, 8)}
    image, kernel, places = (
        graph.tensor(
            dim=list(shape),
            stride=[math.prod(shape[1:]), 1, shape[3] * shape[1], shape[1]],
            data_type=kinds.HALF,
            name=name,
            uid=n,
        )
        for n, (name, shape) in enumerate(shapes.items(), 1)
    )
    options = {"pre_padding": [1, 1], "post_padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
    options |= {"compute_data_type": kinds.FLOAT}
    output = graph.conv_fprop(image=image, weight=kernel, name="y", **options)
    assert output.set_output(True).set_data_type(kinds.FLOAT).set_uid(9).set_dim([2, 6, 8, 8]) is output
    graph.conv_dgrad(loss=places, filter=kernel, name="dx", **options)
    graph.conv_wgrad(image=image, loss=places, name="dw", **options)
    with pytest.raises(TypeError):
        graph.conv_wgrad(image=image, places=places, name="other", **options)


def _said_in(path: Path) -> dict[str, object]:
    """Return the arguments of the functions and methods of a source, and the numbers in its classes, by name."""
    members: dict[str, object] = {}
    for node in ast.parse(path.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for statement in inside:
            if isinstance(statement, ast.FunctionDef):
                arguments = statement.args
                names = (
                    [argument.arg for argument in arguments.args],
                    [argument.arg for argument in arguments.kwonlyargs],
                    len(arguments.defaults),
                )
                members[prefix + statement.name] = names
            elif prefix and isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
                members[prefix + statement.targets[0].id] = statement.value.value
    return members


def _arguments(function) -> list[str]:
    """The arguments that the first line of a compiled function's docstring names."""
    line = function.__doc__.splitlines()[0]
    inside = line[line.index("(") + 1 : line.rindex(")")]
    return [part for part in inside.split(", ") if part]
