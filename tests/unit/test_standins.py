"""The stand-in for cuBLASLt's bindings has the names, argument orders and numbers of the real ones."""

import importlib
import importlib.util
import inspect
import sys
from enum import IntEnum

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
    for word, thing in vars(ours).items():
        if inspect.isclass(thing) and issubclass(thing, IntEnum) and thing is not IntEnum:
            for member in thing:
                assert int(getattr(real, word)[member.name]) == member, f"{word}.{member.name}"
                compared += 1
        elif inspect.isfunction(thing) and thing.__module__ == ours.__name__ and not word.startswith("_"):
            wanted = [part.split()[-1] for part in _arguments(getattr(real, word))]
            assert list(inspect.signature(thing).parameters) == wanted, word
            compared += 1
    assert compared >= 2
    if name.endswith("Lt"):
        assert ours.matmul_heuristic_result_dtype == real.matmul_heuristic_result_dtype
        assert issubclass(real.cuBLASLtError, Exception)
        for kind in ("desc", "preference"):
            attributes = getattr(ours, f"Matmul{kind.capitalize()}Attribute")
            table = f"get_matmul_{kind}_attribute_dtype"
            for one in attributes:
                assert np.dtype(getattr(ours, table)(one)) == np.dtype(getattr(real, table)(int(one))), one


def _arguments(function) -> list[str]:
    """The arguments that the first line of a compiled function's docstring names."""
    line = function.__doc__.splitlines()[0]
    inside = line[line.index("(") + 1 : line.rindex(")")]
    return [part for part in inside.split(", ") if part]
