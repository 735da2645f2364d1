"""The records of a node's ranks, their file, and what is left of jobs that were killed."""

import mmap
import os
import re
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dptrain.errors import OutputError
from dptrain.runtime.failure import Phase
from dptrain.runtime.watch import records
from dptrain.runtime.watch.records import Collective, Record, RecordTable, State
from tests.sample import examples


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FOLDER", str(tmp_path))
    return tmp_path


def test_what_one_process_writes_another_reads(folder):
    ours, theirs = (RecordTable(str(folder / "job"), 3).records[1] for _ in range(2))
    assert theirs.state == State.ABSENT
    ours.claim(17, 99)
    assert (theirs.pid, theirs.started, theirs.state, theirs.position) == (17, 99, State.STARTED, 0)
    with ours.collective(Collective.ALL_REDUCE, 8, np.dtype(np.float32).char):
        assert (theirs.position, theirs.call) == (1, "an all-reduce of 8 float32")
    assert theirs.position == 2
    with ours.collective(Collective.ALL_GATHER):
        assert theirs.call == "an all-gather"
    with ours.collective(Collective.REDUCE_SCATTER, 8, np.dtype(np.float32).char, [5, 3], 2):
        assert (theirs.kind, theirs.group) == (Collective.REDUCE_SCATTER, 2)
        assert theirs.call == f"a reduce-scatter of 8 float32 in parts with the checksum {zlib.crc32(b'[5, 3]'):08x}"
    phase = Phase("training")
    phase.epoch = 2
    phase.show(*ours.phase_memory)
    phase.step = 7
    assert theirs.phase == ("training", 2, 7)
    phase.enter("a name that is longer than the record has room for it")
    assert theirs.phase == ("a name that is longer than the record has room f", 0, 0)
    ours.place, ours.segments = "fit.py:3 in fit", ["one", "two"]
    assert (theirs.place, theirs.segments) == ("fit.py:3 in fit", ["one", "two"])


def test_a_place_in_utf_8_is_cut_without_harm():
    record = Record()
    record.place = "ä" * 100
    assert record.place.startswith("ä" * 60)


def test_the_file_of_somebody_else_is_refused(folder, monkeypatch):
    (folder / "target").touch()
    (folder / "link").symlink_to(folder / "target")
    with pytest.raises(OSError, match="link"):
        RecordTable(str(folder / "link"), 1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user"):
        RecordTable(str(folder / "target"), 1)


def test_a_file_that_others_may_open_is_refused(folder):
    (folder / "open").touch()
    (folder / "open").chmod(0o666)
    with pytest.raises(PermissionError, match="others may open it"):
        RecordTable(str(folder / "open"), 1)
    assert (folder / "open").stat().st_size == 0


def test_a_drawn_file_is_new_and_a_record_moves_there(folder):
    before, after = RecordTable("", 2), records.new_table((17, 99), 2)
    assert records.new_table((17, 99), 2).path != after.path
    assert (before.path, before.identity) == ("", "")
    record = before.records[1]
    record.claim(3, 5)
    with record.collective(Collective.ALL_GATHER):
        after.adopt(1, record)
        theirs = RecordTable(after.path, 2, 0)
        assert theirs.identity == after.identity
        assert (theirs.records[1].pid, theirs.records[1].position) == (3, 1)
    assert theirs.records[1].position == 2, "who holds the record follows"
    after.remove()
    with pytest.raises(FileNotFoundError):
        RecordTable(after.path, 2, 0)


def test_processes():
    own_record = records.look_up(os.getpid())
    assert own_record is not None
    assert own_record.parent == os.getppid()
    assert records.is_alive(own_record, own_record.started)
    assert not records.is_alive(own_record, own_record.started + 1), "another process of that number"
    for command, expected_state in (
        ("exit 3", "it exited with code 3"),
        ("kill -9 $$", "it was killed by SIGKILL (out of memory?)"),
    ):
        child = subprocess.Popen(["sh", "-c", command])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        gone_record = records.look_up(child.pid)
        assert gone_record is not None
        assert not records.is_alive(gone_record, gone_record.started), "ended, but not yet collected"
        assert records.end_of(gone_record) == expected_state
        child.wait()
        assert records.look_up(child.pid) is None
    assert records.end_of(own_record) == records.end_of(None) == ""


def test_the_ranks_of_a_job_find_the_same_file_through_scripts_between(folder):
    """This process is the launcher: it has not the variable that it gives the others."""
    program = (
        "from dptrain.runtime.watch import records; print(records.path_of_job(records.launcher_of_job('PMI_RANK')))"
    )
    environment = {**os.environ, "PMI_RANK": "1"}
    direct = [sys.executable, "-c", program]
    files = {
        os.path.basename(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
        for command in (direct, ["sh", "-c", '"$@"; true', "sh", *direct])
    }
    own_record = records.look_up(os.getpid())
    assert own_record is not None
    assert len(files) == 1
    name = files.pop().strip()
    assert os.path.basename(records.path_of_job((os.getpid(), own_record.started))) == name
    *_, pid, started, secret = name.split("-")
    assert (int(pid), int(started)) == (os.getpid(), own_record.started)
    assert re.fullmatch("[0-9a-f]{32}", secret), "what the process table shows does not tell the name"


def test_the_secret_of_another_users_launcher_is_none(monkeypatch):
    def refused(path):
        raise PermissionError(path)

    monkeypatch.setattr(records.Path, "read_bytes", refused)
    assert records.path_of_job((17, 99)).endswith("-17-99-0")


def test_ranks_are_found_before_they_import_dptrain(folder):
    """Those that this process starts with the variable; it is their launcher."""
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, "OTHER_RANK": "7"})
    other = subprocess.Popen(["sleep", "60"])
    try:
        ranks = records.ranks_of(os.getpid(), "OTHER_RANK")
    finally:
        for process in (child, other):
            process.kill()
            process.wait()
    assert ranks in ({7: child.pid}, {}), "none where the system does not list children"
    assert records.ranks_of(os.getpid(), "OTHER_RANK") == {}


def leave_behind(folder, pid, started, *segments):
    """Plant what a job of a launcher has left."""
    path = folder / f"{records._prefix()}-{pid}-{started}-5ec7e7"
    record = RecordTable(str(path), 2).records[1]
    record.claim(2**22 + 1, 5)  # no such process
    record.segments = list(segments)
    return path


def test_what_a_killed_job_has_left_is_swept_and_nothing_else(folder):
    own_record = records.look_up(os.getpid())
    assert own_record is not None
    for name in ("mpich_dead", "mpich_used", "mpich_running", "mpich_of_nobody"):
        (folder / name).write_bytes(b"x" * 4096)
    (folder / "of_another_library").touch()
    names = ("mpich_dead", "mpich_used", "../outside", "of_another_library")
    dead = leave_behind(folder, os.getpid(), own_record.started - 1, *names)
    running = leave_behind(folder, os.getpid(), own_record.started, "mpich_running")
    (folder.parent / "outside").write_text("")
    with (folder / "mpich_used").open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert "mpich_used" in records.segments()
        records.sweep()
        left = {path.name for path in folder.iterdir()}
    others = {"of_another_library", "mpich_of_nobody"}
    assert left == {"mpich_used", "mpich_running", running.name, *others}, "what is mapped stays"
    assert not dead.exists()
    assert (folder.parent / "outside").exists()


def test_a_launcher_that_nobody_collects_is_dead(folder):
    """As in a container whose first process is no init."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = records.look_up(child.pid)
    assert zombie is not None
    path = leave_behind(folder, child.pid, zombie.started)
    records.sweep()
    child.wait()
    assert not path.exists()


def test_what_mpi_makes_as_it_starts_is_known_before_it_is_mapped(folder):
    (folder / "mpich_before").touch()
    before = records.new_segments(frozenset())
    time_before = records.changed()
    for name in ("mpich_new", "of_another_library"):
        (folder / name).touch()
    (folder / "mpich_link").symlink_to(folder / "mpich_new")
    assert before == {"mpich_before"}
    assert records.new_segments(before) == {"mpich_new"}
    assert records.changed() >= time_before > 0


def test_a_job_that_runs_on_without_its_launcher_is_left_alone(folder):
    own_record = records.look_up(os.getpid())
    assert own_record is not None
    path = leave_behind(folder, 2**22 + 2, 3)
    RecordTable(str(path), 2).records[0].claim(os.getpid(), own_record.started)
    records.sweep()
    assert path.exists()


def hostile_files(path):
    """Yield what somebody else may put where a job's records are expected; each replaces the one before."""
    os.mkfifo(path)
    yield "a named pipe"
    path.unlink()
    path.symlink_to(path.parent / "mpich_target")
    yield "a link"
    path.unlink()
    path.touch(0o600)
    os.truncate(path, 40 << 30)
    yield "a sparse file of 40 GB"
    path.unlink()
    record = Record()
    record.claim(2**22 + 2, 3)
    record.segments = ["mpich_target"]
    path.write_bytes(bytes(record._bytes))
    path.chmod(0o666)
    yield "records that anybody can have written"
    path.unlink()
    path.mkdir()
    yield "a folder"


def test_files_that_others_may_have_written_are_left_alone(folder, monkeypatch):
    monkeypatch.setattr(records, "left_alone", [])
    (folder / "mpich_target").touch()
    path = folder / f"{records._prefix()}-{2**22 + 2}-3"
    for number, kind in enumerate(hostile_files(path), 1):
        records.sweep()
        assert os.path.lexists(path), kind
        assert (folder / "mpich_target").exists(), kind
        assert len(records.left_alone) == number, kind
        assert records.left_alone[-1].startswith(f"{path}: left alone ("), kind


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(50), deadline=None)
@given(st.binary(max_size=2100))
def test_random_bytes_are_no_trouble(folder, content):
    records._mapped, usual = set, records._mapped  # which looks at all processes of this machine
    path = folder / f"{records._prefix()}-{2**22 + 2}-3"
    path.write_bytes(content)
    path.chmod(0o600)
    (folder / "kept").touch()
    try:
        records.sweep()
    finally:
        records._mapped = usual
    assert (folder / "kept").exists()


def test_too_little_shared_memory_is_said_before_mpi_dies_of_it():
    records.require_room(1)
    with pytest.raises(OutputError, match=r"MB free, and MPI needs about .*: remove the files of killed jobs"):
        records.require_room(10**12)
