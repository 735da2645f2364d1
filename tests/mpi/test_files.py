"""Files on N ranks: rank 0 reads and writes, all ranks have what it read, and its failure."""

import importlib.util
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import Finished, in_turn, mpirun

SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "files.py")
KINDS = ("", ".keras") if importlib.util.find_spec("h5py") else ("",)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a function that returns how N ranks wrote and read a kind of file, and the folder; all kinds in turn."""
    place = tmp_path_factory.mktemp("files")
    kept: dict[int, dict[str, Finished]] = {}

    def files(ranks: int, whole: str) -> tuple[Finished, Path]:
        folders = {kind: place / f"{ranks} ranks" / (kind or "weights") for kind in KINDS}
        if ranks not in kept:
            for folder in folders.values():
                folder.mkdir(parents=True)
            cases = {kind: [SCRIPT, str(folder), kind, "nothing"] for kind, folder in folders.items()}
            kept[ranks] = in_turn(ranks, cases, place / f"on {ranks}")
        return kept[ranks][whole], folders[whole]

    return files


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("whole", ["", ".keras"])
def test_rank_0_writes_and_reads_for_all(files, ranks, whole):
    if whole not in KINDS:
        pytest.skip("Keras' files need the extra 'keras-files'")
    done, folder = files(ranks, whole)
    assert (done.code, done.out, done.err) == (0, "same\n", "")
    assert [path.name for path in folder.iterdir()] == [f"model{whole}" if whole else "w.safetensors"]


@pytest.mark.parametrize(("wrong", "code", "message"), [("write", 74, "No such file"), ("read", 65, "not found")])
def test_a_failure_of_rank_0_is_everybodys(tmp_path, wrong, code, message):
    done = mpirun(3, SCRIPT, str(tmp_path), "", wrong)
    assert done.code == code
    (line,) = done.messages
    assert message in line
    assert str(tmp_path) in line
    assert "rank 0" in line
