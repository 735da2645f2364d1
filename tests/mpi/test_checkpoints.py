"""Checkpoints move between meshes to the bit, survive kills, and are refused in one line where they are damaged."""

import errno
import hashlib
import json
import os
import random
import re
import shutil

import numpy as np
import pytest

from dptrain.saving import checkpoints
from dptrain.saving.manifest import sealed
from tests.conftest import ROOT
from tests.launching import mpirun, python
from tests.sample import sample, taken

SCRIPT = str(ROOT / "tests/mpi/scripts/checkpoints.py")
FORMS = (
    "--shard-weights",
    "",
    "batch=2,model=2",
    "--shard-optimizer",
    "--stages=2",
    "batch=1,model=4",
    "batch=2,model=2 --shard-weights",
)


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """The folder of a training on four ranks that went on from form to form, each with the last one's bits."""
    folder = tmp_path_factory.mktemp("moved")
    done = mpirun(4, SCRIPT, str(folder / "checkpoints"), str(folder / "out.npz"), "2", *taken(FORMS, 2), timeout=120)
    assert (done.code, done.err) == (0, "")
    return folder


def train_on(folder, ranks, epochs, form, **options):
    arguments = [str(folder / "checkpoints"), str(folder / "out.npz"), str(epochs), form]
    return python(ranks, SCRIPT, *arguments, timeout=120, **options)


@pytest.fixture
def copied(moved, tmp_path):
    """A copy of it, and the names of its checkpoints, the newest first."""
    shutil.copytree(moved, tmp_path / "copy")
    names = sorted((path.name for path in (tmp_path / "copy/checkpoints").glob("0*")), reverse=True)
    assert len(names) == 2
    return tmp_path / "copy", names


@pytest.mark.long
def test_a_training_moves_between_meshes(moved, copied, tmp_path):
    """On other numbers of ranks, too, and it ends with what one rank ends with that was never stopped."""
    folder, (newest, _) = copied
    arrays = checkpoints.read(folder / "checkpoints" / newest)
    assert arrays.manifest.mesh == {"batch": 2, "model": 2}
    assert {name for name in arrays.manifest.files if name.startswith("shard")} == {
        f"shard-{rank}-of-4.safetensors" for rank in range(4)
    }
    for name in ("dense/kernel", "callbacks/Stopping/0/best_weights/0"):
        kernel = arrays.manifest.arrays[name]
        assert (kernel.shape, len(kernel.parts)) == ((12, 17), 4)
    done = train_on(folder, 3, 16, "--shard-weights")
    assert (done.code, done.err) == (0, "")
    (tmp_path / "alone").mkdir()
    done = train_on(tmp_path / "alone", 0, 16, "")
    assert (done.code, done.err) == (0, "")
    with np.load(folder / "out.npz") as together, np.load(tmp_path / "alone/out.npz") as alone:
        for path, array in alone.items():
            np.testing.assert_allclose(
                together[path], array, rtol=1e-12, atol=1e-12 * np.abs(array).max(), err_msg=path
            )


@pytest.mark.long
def test_a_reproducible_training_moves_to_the_bit(tmp_path):
    for name, *launches in (
        ("moved", (4, 2, "batch=2,model=2 --shard-weights"), (3, 4, "--shard-weights"), (0, 6, "")),
        ("alone", (0, 6, "")),
    ):
        (tmp_path / name).mkdir()
        for ranks, epochs, form in launches:
            done = train_on(tmp_path / name, ranks, epochs, form, DPTRAIN_REPRODUCIBLE="1")
            assert (done.code, done.err) == (0, "")
    with np.load(tmp_path / "moved/out.npz") as moved, np.load(tmp_path / "alone/out.npz") as alone:
        assert [path for path, array in alone.items() if array.tobytes() != moved[path].tobytes()] == []


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def without_copies(path):
    """Let a checkpoint not tell copies of weights from other arrays, as those of earlier versions."""
    state, document = json.loads((path / "state.json").read_bytes()), json.loads((path / "manifest.json").read_bytes())
    assert len(state.pop("copies")) == 10
    content = json.dumps(state).encode()
    (path / "state.json").write_bytes(content)
    document["files"]["state.json"] = [len(content), len(content), hashlib.sha256(content).hexdigest()]
    (path / "manifest.json").write_bytes(sealed(document))


def test_a_damaged_shard_is_named_and_the_checkpoint_before_taken(copied):
    """Whichever version has written that."""
    folder, (newest, before) = copied
    flip(folder / "checkpoints" / newest / "shard-2-of-4.safetensors", -3)
    without_copies(folder / "checkpoints" / before)
    with np.load(folder / "out.npz") as arrays:
        best = {path: array.tobytes() for path, array in arrays.items() if path.startswith("best/")}
    done = train_on(folder, 0, 16, "", PYTHONWARNINGS="default")
    assert done.code == 0, done.err
    assert f"{newest}: damaged: shard-2-of-4.safetensors differs from what was written, from byte " in done.err
    assert f"; resuming from {before}" in done.err
    with np.load(folder / "out.npz") as arrays:
        assert {path: arrays[path].tobytes() for path in best} == best


def outside(path):
    """Let the manifest name a file outside of the folder."""
    place = path.with_name("manifest.json")
    document = json.loads(place.read_bytes())
    document["files"]["../../out.npz"] = document["files"].pop(path.name)
    place.write_bytes(sealed(document))


@pytest.mark.parametrize(
    ("damage", "said"),
    sample(
        [
            (lambda path: path.unlink(), "damaged: shard-2-of-4.safetensors is missing"),
            (lambda path: path.write_bytes(path.read_bytes()[:-9]), "damaged: shard-2-of-4.safetensors has "),
            (lambda path: flip(path, -1), "damaged: shard-2-of-4.safetensors differs from what was written"),
            (outside, "'../../out.npz' is not the name of a file in it"),
        ],
        4,
        first=2,
    ),
)
def test_without_a_good_checkpoint_all_ranks_end_in_one_line(copied, damage, said):
    folder, (newest, before) = copied
    shutil.rmtree(folder / "checkpoints" / before)
    damage(folder / "checkpoints" / newest / "shard-2-of-4.safetensors")
    content = (folder / "out.npz").read_bytes()
    done = train_on(folder, 2, 16, "--shard-weights")
    assert done.code == 65, done.err
    (line,) = done.messages
    assert line.startswith("dptrain: ")
    assert f"no checkpoint can be used: {folder}/checkpoints/{newest}: " in line
    assert said in line
    assert (folder / "out.npz").read_bytes() == content


@pytest.mark.parametrize("error", sample(["EFBIG", "ENOSPC", "EIO"], 3))
def test_a_shard_that_cannot_be_written_is_told_with_its_rank_and_error(tmp_path, error):
    """Not with what that did to the other ranks' shards."""
    done = train_on(tmp_path, 3, 2, "--shard-weights", PLANTED=f"1 write 2 {error}")
    assert done.code == 74, done.err
    (line,) = done.messages
    words = os.strerror(getattr(errno, error))
    assert re.match(
        rf"dptrain: {tmp_path}/checkpoints/\d+-step-\d+: {words}.* \(rank 1, host \S+, pid \d+; no error", line
    )
    assert "there is no checkpoint yet; choose another `backup_dir`" in line
    assert not list((tmp_path / "checkpoints").glob(".*")), "no half of one is left"


@pytest.mark.slow
@pytest.mark.long
def test_killed_trainings_go_on_on_other_meshes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from mesh_kills import disturbed, undisturbed

    # On three ranks in a save of sharded slots, then at a step with sharded weights; one rank goes on.
    kills, difference = disturbed(random.Random(395), undisturbed(), 2)
    assert [(kill.kind, kill.hit) for kill in kills] == [("a save", True), ("a step", True)]
    assert difference <= 1e-12
