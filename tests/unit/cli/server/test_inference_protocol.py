"""Requests and answers of the Open Inference Protocol with every option together, read back by what the options say."""

import itertools
import json

import numpy as np
import pytest

from dptrain.cli.server.inference_protocol import answer, read_request
from dptrain.cli.server.tensors import TensorSpec, datatype_of, from_bytes, from_json, to_bytes
from dptrain.errors import DataError

INPUTS = [TensorSpec("a", "FP32", (2,)), TensorSpec("b", "INT64", ()), TensorSpec("c", "BYTES", (None,))]
ARRAYS = {"a": np.float32([[0.5, -1], [2, 3e-7]]), "b": np.array([2**62, -5]), "c": np.array([["x"], ["äö"]], object)}
OUTPUTS = {"y": np.float32([[0.1], [7]]), "z": np.array([1, 2], np.int32), "w": np.array([[True], [False]])}
ABSENT = object()
CHOICES = (ABSENT, True, False)


def texts(array) -> bytes:
    return b"".join(len(text.encode()).to_bytes(4, "little") + text.encode() for text in array.ravel().tolist())


def body(in_bytes, order, all_binary, wanted) -> tuple[bytes, str | None]:
    """Return a request's body and its header, with these inputs as bytes."""
    entries, contents = [], []
    for name in order:
        array = ARRAYS[name]
        entry = {"name": name, "shape": list(array.shape), "datatype": datatype_of(array.dtype)}
        if name in in_bytes:
            contents.append(texts(array) if array.dtype == object else to_bytes(array))
            entry["parameters"] = {"binary_data_size": len(contents[-1])}
        else:
            entry["data"] = array.tolist() if name == "a" else array.ravel().tolist()
        entries.append(entry)
    head = {"id": "7", "inputs": entries}
    if all_binary is not ABSENT:
        head["parameters"] = {"binary_data_output": all_binary}
    if wanted is not None:
        head["outputs"] = [
            {"name": name} | ({} if is_binary is ABSENT else {"parameters": {"binary_data": is_binary}})
            for name, is_binary in wanted.items()
        ]
    text = json.dumps(head).encode()
    return b"".join([text, *contents]), str(len(text)) if contents else None


def request(content: bytes, length: str | None):
    return read_request(content, length, INPUTS, list(OUTPUTS), 9)


@pytest.mark.parametrize("order", list(itertools.permutations(ARRAYS)))
def test_inputs_as_bytes_and_as_json_in_any_order(order):
    for count in range(4):
        for in_bytes in itertools.combinations(ARRAYS, count):
            read = request(*body(in_bytes, order, ABSENT, None))
            assert (read.id, read.rows) == ("7", 2)
            for spec, array in zip(INPUTS, read.arrays, strict=True):
                assert array.dtype == ARRAYS[spec.name].dtype
                np.testing.assert_array_equal(array, ARRAYS[spec.name])


@pytest.mark.parametrize("all_binary", CHOICES, ids=["absent", "true", "false"])
def test_outputs_are_those_asked_for_as_they_are_asked_for(all_binary):
    asked = [None, {}]
    for count in (1, 2, 3):
        for names in itertools.combinations(OUTPUTS, count):
            asked += [dict(zip(names, each, strict=True)) for each in itertools.product(CHOICES, repeat=count)]
    for wanted in asked:
        content, length = answer(request(*body((), ARRAYS, all_binary, wanted)), "model", "v1", OUTPUTS)
        head = json.loads(content if length is None else content[:length])
        rest = memoryview(b"" if length is None else content[length:])
        assert (head["id"], head["model_name"], head["model_version"]) == ("7", "model", "v1")
        expected = [name for name in OUTPUTS if not wanted or name in wanted]
        assert [entry["name"] for entry in head["outputs"]] == expected
        for entry in head["outputs"]:
            name, shape = entry["name"], tuple(entry["shape"])
            chosen = (wanted or {}).get(name, ABSENT)
            is_binary = chosen if chosen is not ABSENT else all_binary is True
            assert ("data" in entry) != is_binary, (wanted, name)
            if is_binary:
                size = entry["parameters"]["binary_data_size"]
                array, rest = from_bytes(rest[:size], entry["datatype"], shape), rest[size:]
            else:
                array = from_json(entry["data"], entry["datatype"], shape)
            np.testing.assert_array_equal(array, OUTPUTS[name])
        assert not rest


@pytest.mark.parametrize("in_bytes", [("a",), ("a", "c"), tuple(ARRAYS)])
def test_bytes_too_few_or_too_many_are_refused(in_bytes):
    content, length = body(in_bytes, ARRAYS, ABSENT, None)
    for changed in (content[:-1], content + b"\0"):
        with pytest.raises(DataError):
            request(changed, length)
