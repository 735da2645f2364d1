"""Checkpoints whose seal is right, and whose state.json is not: they end in one line, and change nothing elsewhere."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from dptrain.callbacks import BackupAndRestore, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau, checkpointing
from dptrain.errors import DataError
from dptrain.optimizers import Adam
from dptrain.saving.checkpoints import Checkpoint
from dptrain.saving.manifest import Manifest, PartOf, StoredArray, StoredFile, StoredPart, described
from tests.unit.callbacks import build, toy


def train(folder: Path, epochs: int, *callbacks) -> None:
    x, y = toy(16)
    backup = BackupAndRestore(folder, delete_checkpoint=False)
    build(Adam(0.01)).fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=[*callbacks, backup])


def watchers(folder: Path) -> list:
    return [
        EarlyStopping("loss", patience=5, restore_best_weights=True),
        ReduceLROnPlateau("loss"),
        ModelCheckpoint(folder / "best.keras", "loss"),
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A checkpoint after one epoch."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, 1, *watchers(folder))
    [path] = folder.glob("0*")
    return path


@pytest.fixture
def rewrite(trained, tmp_path):
    """Return a function that changes a file of a copy of the checkpoint, and seals it again."""
    path = tmp_path / "backup" / trained.name
    shutil.copytree(trained, path)

    def change(name, content):
        (path / name).write_bytes(content)
        reseal(path, name, content)
        return path.parent

    return change


def reseal(path: Path, name: str, content: bytes) -> None:
    """Let the manifest say of a file what it holds."""
    header = 8 + int.from_bytes(content[:8], "little")
    pieces, before = [content], Manifest.parsed((path / "manifest.json").read_bytes())
    parts, files = None, dict(before.files)
    arrays = {key: array for key, array in before.arrays.items() if array.parts[0].file != name}
    if name.endswith(".safetensors"):
        arrays_read = safetensors.numpy.load(content)
        parts = {key: PartOf(key, (0,) * value.ndim, value.shape) for key, value in arrays_read.items()}
        listed = json.loads(content[8:header])
        ends = [(header + value["data_offsets"][0], header + value["data_offsets"][1]) for value in listed.values()]
        pieces = [content[:header], *(content[start:end] for start, end in ends)]
    entries = described(name, pieces, parts)
    manifest = dataclasses.replace(before, files=files | entries.files, arrays=arrays | entries.arrays)
    (path / "manifest.json").write_bytes(manifest.encoded())


def with_state(trained: Path, change) -> bytes:
    state = json.loads((trained / "state.json").read_bytes())
    change(state)
    return json.dumps(state).encode()


HUGE, COPY = 10**400, "callbacks/EarlyStopping/0/best_weights/0"
CHANGES = {
    "no position": lambda state: state.pop("position"),
    "negative epoch": lambda state: state["position"].update(epoch=-1),
    "huge step": lambda state: state["position"].update(made=HUGE),
    "a word for a step": lambda state: state["position"].update(step="x"),
    "an unknown field": lambda state: state["position"].update(other=1),
    "logs of another kind": lambda state: state["position"].update(logs=[1]),
    "a word for a rate": lambda state: state.update(rate="x"),
    "no identity": lambda state: state.update(identity=[]),
    "a callback without a state": lambda state: state.update(callbacks=[["History"]]),
    "an array that is not there": lambda state: state["callbacks"].append(["x", {"array of the checkpoint": "none"}]),
    "an array of the model": lambda state: state["callbacks"].append(["x", {"array of the checkpoint": "dense/bias"}]),
    "history of another kind": lambda state: state.update(callbacks=[["History", {"epoch": 1, "history": []}]]),
    "a word for a best value": lambda state: state.update(callbacks=[["EarlyStopping", {"best": "x"}]]),
    "a list for copies": lambda state: state.update(copies=[COPY]),
    "a number for a path": lambda state: state["copies"].update({"callbacks/x": 1}),
    "a copy of nothing": lambda state: state["copies"].update({COPY: "none"}),
    "a copy of another": lambda state: state["copies"].update({COPY: "dense/bias"}),
    "a copy that is not there": lambda state: state["copies"].update({"callbacks/x": "dense/bias"}),
    "the model's own for a copy": lambda state: state["copies"].update({"dense/kernel": "dense/kernel"}),
    "too many copies": lambda state: state["copies"].update({f"callbacks/{n}": "dense/bias" for n in range(17)}),
    "a list for a wait": lambda state: state.update(callbacks=[["ReduceLROnPlateau", {"wait": [1]}]]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_bad_state_is_the_checkpoints_fault(trained, rewrite, tmp_path, what):
    folder = rewrite("state.json", with_state(trained, CHANGES[what]))
    with pytest.raises(DataError) as caught:
        train(folder, 2, *watchers(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"[]", b"\xff", b"1", b'"a"'])
def test_what_is_no_json_object_is_no_state(rewrite, text):
    folder = rewrite("state.json", text)
    with pytest.raises(DataError, match="000001-step-2: damaged"):
        train(folder, 2)


def test_a_state_gives_a_callback_no_attribute_that_it_does_not_keep(trained, rewrite, tmp_path):
    """Else it would say where files are written."""
    elsewhere = str(tmp_path / "elsewhere.keras")
    held = {"filepath": elsewhere, "best": 1.0, "_finished": "x", "save_best_only": True}
    folder = rewrite(
        "state.json", with_state(trained, lambda state: state.update(callbacks=[["ModelCheckpoint", held]]))
    )
    keeper = ModelCheckpoint(tmp_path / "best.keras", "loss")
    train(folder, 2, keeper)
    assert not Path(elsewhere).exists()
    assert (tmp_path / "best.keras").exists()
    assert not keeper.save_best_only


def test_what_callbacks_held_fits_into_memory(trained, rewrite):
    """A file may say that it is of any size, and be sparse."""
    folder = rewrite("state.json", (trained / "state.json").read_bytes())
    (path,) = folder.glob("0*")
    manifest = Manifest.parsed((path / "manifest.json").read_bytes())
    shape = (1, 1 << 50)
    huge = StoredPart("huge", 8, (0, 0), shape, ("0" * 64,))
    files = dict(manifest.files) | {"huge": StoredFile(8 + (1 << 50), 8, hashlib.sha256(bytes(8)).hexdigest())}
    arrays = dict(manifest.arrays) | {"callbacks/0/x": StoredArray("uint8", shape, (huge,))}
    (path / "manifest.json").write_bytes(dataclasses.replace(manifest, files=files, arrays=arrays).encoded())
    (path / "huge").write_bytes(bytes(8))
    with pytest.raises(DataError, match="damaged: huge has 8 bytes"):
        train(folder, 2)
    with pytest.MonkeyPatch.context() as patch:  # no file system has room for one
        patch.setattr(checkpointing, "newest", lambda *arguments, **options: checkpoint(path))
        with pytest.raises(DataError, match=f"{1 << 50} bytes of callbacks' arrays, more than the memory"):
            train(folder, 2)


def checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint without a look at its files."""
    manifest = Manifest.parsed((path / "manifest.json").read_bytes())
    return Checkpoint(path, False, manifest, {"state.json": (path / "state.json").read_bytes()})


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_arrays_are_those_of_the_model(trained, rewrite, change):
    arrays = safetensors.numpy.load((trained / "training.safetensors").read_bytes())
    name = next(name for name in arrays if "adam" in name.lower() and arrays[name].ndim)
    value = arrays.pop(name)
    if change != "missing":
        arrays[name] = value[:1].copy() if change == "shape" else np.zeros(value.shape, np.float16)
    folder = rewrite("training.safetensors", safetensors.numpy.save(arrays))
    with pytest.raises(DataError, match=r"000001-step-2: damaged: .* is .*, expected float64"):
        train(folder, 2)
