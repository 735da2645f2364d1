"""Programs in files that anybody may have written: nothing of them reaches a compiler but numbers and known words."""

import copy
import itertools
import math

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.cpu.codegen import generate
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cuda.compose import Composition
from dptrain.errors import ConfigError, DataError, DeviceError
from dptrain.program.codegen.fuse import fuse
from dptrain.saving import state
from dptrain.saving.program import attribute_of, decode
from tests.unit.ops.cases import CASES

MARKER = "__planted__"
HOSTILE = [
    f"0ULL,0,0,0,0); (void)::system({MARKER!r}); (void)(0",
    [MARKER],
    {"rows": MARKER},
    {"rows": 1, MARKER: 2},
    [[0, MARKER, 1]],
    10**30,
    -(10**30),
    [10**30],
    -1,
    [-7, 10**9],
    math.nan,
    -math.inf,
    1e308,
    True,
    None,
    [[]],
    [[[1, 2, 3]]],
    "float32, float32",
    "object",
]


def document(name: str, case) -> dict:
    """Return what a file says of a program with one op, whose inputs are its own."""
    arrays = [make(np.random.default_rng(7)) for make in case.inputs]
    nodes = [
        {"input": f"x{n}", "shape": list(array.shape), "dtype": array.dtype.name}
        for n, array in enumerate(map(np.asarray, arrays))
    ]
    attributes = {key: attribute_of(value) for key, value in case.attributes.items()}
    nodes.append({"op": name, "inputs": list(range(len(arrays))), "attributes": attributes})
    return {"nodes": nodes, "results": {"y": len(arrays)}, "updates": {}, "dtype": "float32", "inputs": "x0"}


def read(contents: dict):
    return decode(state.pack({}, contents, "dptrain program 1"), "file")


def changed(program_document: dict):
    """Yield the document with each hostile value in each attribute and in what is said of each input."""
    for at, node in enumerate(program_document["nodes"]):
        places = [("attributes", key) for key in node["attributes"]] if "op" in node else [("shape",), ("dtype",)]
        for place, value in itertools.product(places, HOSTILE):
            hostile = copy.deepcopy(program_document)
            inner = hostile["nodes"][at]
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            yield place[-1], value, hostile


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_op_takes_nothing_else_than_its_schema_says(name, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("something was compiled"))
    for case in CASES[name]:
        program_document = document(name, case)
        read(program_document)  # as it is, it is one
        for key, value, hostile in changed(program_document):
            try:
                program = read(hostile).program(2)
            except DataError:
                continue
            assert MARKER not in repr(value), (key, value)
            try:
                texts = [generate(fuse(program)).source, Composition(program, alone=True).source()]
            except (ConfigError, DeviceError):  # such as a type that a GPU has not
                continue
            assert not any(MARKER in text or "1000000000000000000000000" in text for text in texts), (key, value)


def test_a_planted_call_is_not_compiled(tmp_path):
    """The seed of random bits was once written into C++ as it stood."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    canary = tmp_path / "canary"
    program_document = document("random_bits", CASES["random_bits"][0])
    program_document["nodes"][-1]["attributes"]["seed"] = f'0ULL,0,0,0,0); (void)::system("touch {canary}"); (void)(0'
    path = tmp_path / "program"
    path.write_bytes(state.pack({}, program_document, "dptrain program 1"))
    with pytest.raises(DataError, match=r"seed = .* of op 'random_bits': expected an integer from 0"):
        dp.saving.load_program(path, device="cpu")(np.zeros((2, 3)))
    assert not canary.exists()


def test_a_slice_beyond_its_input_is_refused():
    """Compiled code would read what lies behind the array."""
    program_document = document("getitem", CASES["getitem"][0])
    rank = len(program_document["nodes"][0]["shape"])
    program_document["nodes"][-1]["attributes"]["key"] = [[1000, 2000, 1]] * rank
    with pytest.raises(DataError, match="'getitem' returns shape"):
        read(program_document)
