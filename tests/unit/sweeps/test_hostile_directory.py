"""The directory of a sweep in which somebody else has put links, pipes and lines of their own."""

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dptrain.errors import ConfigError, DataError, DptrainError
from dptrain.runtime.storage import locks
from dptrain.sweeps import lines
from dptrain.sweeps.directory import SweepDirectory
from dptrain.sweeps.records import Ending, Run, Status, Trial
from tests.sample import examples

PLAN = {"settings": [{"learning_rate": 0.1}], "seeds": [0, 1]}
PAUSED, DONE = Run(0, 0, 0), Run(1, 0, 1)
FILES = ("sweep.yaml", "journal.jsonl", "results.jsonl", "holder", "lock", "trials.csv", "report.html", "config.yaml")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)


@pytest.fixture
def canary(tmp_path) -> Path:
    """A folder beside the sweep, with files of the names that a sweep removes."""
    folder = tmp_path / "canary"
    folder.mkdir()
    for name in ("5-1.safetensors", "trial-9-seed-0.keras", ".a.1.tmp", "file"):
        (folder / name).write_bytes(b"alive")
    return folder


@pytest.fixture
def alive(canary):
    """Sees to it that nobody has touched the canary."""
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in canary.iterdir()}
    yield
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in canary.iterdir()} == before


@pytest.fixture
def sweep(tmp_path, canary, alive) -> Path:
    """A sweep with a paused run and one that is done, whose model was kept."""
    path = tmp_path / "sweep"
    with SweepDirectory(path, PLAN) as directory:
        directory.add_trial(Trial(0, {"learning_rate": 0.1}))
        for run, status in ((PAUSED, Status.PAUSED), (DONE, Status.DONE)):
            directory.add_epoch(run, 1, {"loss": 0.25})
            directory.add_ending(Ending(run, status, 1, 0.5, {"loss": 0.25}), b"state")
        directory.add_model(DONE, b"PK")
    return path


def put(path: Path, kind: str, canary: Path) -> None:
    """Put something else in the place of a file or folder."""
    if path.is_dir():
        path.rename(path.with_name("away"))
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(canary if path.name in ("states", "models") else canary / "file")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard link":
        os.link(canary / "file", path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_a_sweep_is_refused_at_the_start(sweep, canary, name, kind):
    put(sweep / name, kind, canary)
    before = sorted(sweep.rglob("*"))
    with pytest.raises(
        DataError, match=f"{name}: it is a (link|named pipe|folder), expected a regular file; remove it"
    ):
        SweepDirectory(sweep, PLAN)
    assert sorted(sweep.rglob("*")) == before


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["states", "models"])
def test_what_is_no_folder_of_a_sweep_is_refused_at_the_start(sweep, canary, name, kind):
    put(sweep / name, kind, canary)
    with pytest.raises(DataError, match=f"{name}: it is a (link|named pipe), expected a folder; remove it"):
        SweepDirectory(sweep, PLAN)


@pytest.mark.parametrize("name", ["journal.jsonl", "results.jsonl"])
def test_nothing_is_appended_to_a_file_with_a_second_name(sweep, tmp_path, name):
    os.link(sweep / name, tmp_path / "second")
    before = (tmp_path / "second").read_bytes()
    with pytest.raises(DataError, match=f"{name}: the file has a second name"):
        SweepDirectory(sweep, PLAN)
    assert (tmp_path / "second").read_bytes() == before


@pytest.mark.parametrize("place", [".", "states", "models"])
def test_only_what_the_sweep_has_written_is_swept(sweep, canary, place):
    """Links with names of temporary files, of states and of models, and files of other names, stay."""
    for name in (".sweep.yaml.1.tmp", ".x.tmp", "7-1.safetensors", "trial-7-seed-0.keras"):
        (sweep / place / name).symlink_to(canary / "file")
    (sweep / place / "notes.txt").write_text("mine")
    before = {path for path in sweep.rglob("*") if path.is_symlink() or path.name == "notes.txt"}
    with SweepDirectory(sweep, PLAN) as directory:
        assert directory.keep_models([]) == []
        directory.release(PAUSED)
    assert {path for path in sweep.rglob("*") if path.is_symlink() or path.name == "notes.txt"} == before
    assert not (sweep / "models" / "trial-0-seed-1.keras").exists()


def test_a_state_that_is_a_link_is_none(sweep, canary):
    state = sweep / "states" / "0-1.safetensors"
    state.rename(canary.parent / "elsewhere")
    state.symlink_to(canary.parent / "elsewhere")
    with SweepDirectory(sweep, PLAN) as directory:
        assert not directory.has_state(PAUSED)
        assert [ending.run for ending in directory.endings] == [DONE], "it is trained again"


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        *(BOMB, "[" * 5_000, "a: &a [*a]", "", "- 1", "\x00", "a: 1\na: 2", "{{}: 1}", "? 2026-01-01\n: 1"),
        *(f"a: {'9' * 5000}", '"\\ud800": 1', "a: !!python/object/apply:os.system [exit]"),
    ],
)
def test_a_plan_that_is_none_is_refused_in_one_line(sweep, text):
    (sweep / "sweep.yaml").write_text(text)
    with pytest.raises(
        (DataError, ConfigError), match=r"sweep.yaml: (not YAML|not the plan)|holds another sweep"
    ) as caught:
        SweepDirectory(sweep, PLAN)
    assert str(caught.value).isprintable()


def test_a_plan_of_any_size_is_not_read(sweep):
    os.truncate(sweep / "sweep.yaml", 1 << 40)
    with pytest.raises(DataError, match=f"sweep.yaml: {1 << 40} bytes, expected at most"):
        SweepDirectory(sweep, PLAN)
    os.truncate(sweep / "sweep.yaml", 0)
    (sweep / "sweep.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"sweep.yaml: not the plan of a sweep"):
        SweepDirectory(sweep, PLAN)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("results.jsonl", '"loss": 0.25', '"loss": 0.24'),
        ("results.jsonl", '"seed": 0', '"seed": 3'),
        ("journal.jsonl", '"learning_rate": 0.1', '"learning_rate": 0.2'),
        ("journal.jsonl", '"seconds": 0.5', '"seconds": 0.6'),
        ("journal.jsonl", '"digest": "', '"digest": "0'),
    ],
)
def test_a_changed_digit_is_noticed(sweep, name, old, new):
    text = (sweep / name).read_text()
    for number in range(text.count(old)):  # in the last line too
        parts = text.split(old)
        (sweep / name).write_text(old.join(parts[: number + 1]) + new + old.join(parts[number + 1 :]))
        with pytest.raises(DataError, match=rf"{name}, line \d: has changed: its digest does not match what was writ"):
            SweepDirectory(sweep, PLAN)


def test_lines_of_earlier_versions_have_no_digest(sweep):
    for name in ("results.jsonl", "journal.jsonl"):
        plain = [lines.decode(line) for line in (sweep / name).read_bytes().splitlines(keepends=True)]
        (sweep / name).write_text("".join(f"{json.dumps(line)}\n" for line in plain))
    with SweepDirectory(sweep, PLAN) as directory:
        assert [ending.run for ending in directory.endings] == [PAUSED, DONE]
        directory.add_epoch(PAUSED, 2, {"loss": 0.5})
        directory.add_ending(Ending(PAUSED, Status.DONE, 2, 0.5), None)
    with SweepDirectory(sweep, PLAN) as directory:
        assert [line["loss"] for line in directory.epochs()] == [0.25, 0.25, 0.5]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=6), json_values, min_size=1, max_size=5))
def test_a_line_comes_back_as_it_was(fields):
    assert lines.decode(lines.encode(fields)) == {name: value for name, value in fields.items() if name != "digest"}


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(["journal.jsonl", "results.jsonl"]))
def test_whatever_a_line_says_the_sweep_opens_or_refuses_it_in_one_line(sweep, data, name):
    """A field of a line is anything that JSON has, and the line is sealed, or of an earlier version."""
    written = [lines.decode(line) for line in (sweep / name).read_bytes().splitlines(keepends=True)]
    fields = data.draw(st.sampled_from(written))
    key = data.draw(st.sampled_from(sorted(fields)))
    fields[key] = data.draw(json_values | st.sampled_from([1e308, -1, 10**400, "../../canary/file", {"bytes": -1}]))
    seal = data.draw(st.sampled_from([lines.encode, lambda entry: f"{json.dumps(entry)}\n".encode()]))
    with tempfile.TemporaryDirectory(dir=sweep.parent) as folder:
        path = Path(folder) / "sweep"
        shutil.copytree(sweep, path)
        (path / name).write_bytes(b"".join(map(seal, written)))
        with contextlib.suppress(DptrainError):  # whose text is printable
            SweepDirectory(path, PLAN).close()
