"""The launchers' command lines, and hosts."""

import pytest

from dptrain.errors import ConfigError
from dptrain.runtime.launch import mpirun
from dptrain.runtime.launch.mpirun import (
    Launcher,
    default_host_file,
    find_launcher,
    parse_hosts,
    read_hosts,
    spread,
    start_command,
)

MPICH = Launcher("MPICH", ("mpirun",))
OPEN_MPI_4 = Launcher("Open MPI", ("mpirun",), 4)
OPEN_MPI_5 = Launcher("Open MPI", ("mpirun",), 5)
SRUN = Launcher("Slurm", ("srun",))
SLURM = "srun --ntasks=4 --export=ALL --kill-on-bad-exit=0 --wait=0"
TWO = {"a": 3, "b": 1}


@pytest.mark.parametrize(
    ("launcher", "hosts", "root", "environ", "expected"),
    [
        (MPICH, {}, True, {}, "mpirun -n 4"),
        (MPICH, TWO, True, {"PATH": "/bin"}, "mpirun -hosts a:3,b:1 -n 4"),
        (OPEN_MPI_5, {}, False, {"PATH": "/bin"}, "mpirun --map-by :OVERSUBSCRIBE --bind-to none -n 4"),
        (OPEN_MPI_4, {}, True, {}, "mpirun --allow-run-as-root --oversubscribe --bind-to none -n 4"),
        (
            OPEN_MPI_5,
            TWO,
            True,
            {
                "PATH": "/bin",
                "DPTRAIN_RESTART": "0",
                "OMP_NUM_THREADS": "2",
                "OMPI_X": "1",
                "HOME": "/",
                "PYTHONPATH": ".",
            },
            "mpirun --allow-run-as-root --map-by :OVERSUBSCRIBE --bind-to none --host a:3,b:1"
            " -x DPTRAIN_RESTART -x OMP_NUM_THREADS -x PATH -x PYTHONPATH -n 4",
        ),
        (
            Launcher("Open MPI", ("mpirun", "--bind-to", "core", "--map-by", "ppr:2:node"), 5),
            {},
            False,
            {"PATH": "/bin", "SLURM_JOB_ID": "1"},
            "mpirun --bind-to core --map-by ppr:2:node -x PATH -n 4",
        ),
        (SRUN, {}, True, {"SLURM_NTASKS": "4"}, SLURM),
        (SRUN, {"a": 2, "b": 2}, False, {}, f"{SLURM} --nodes=2 --nodelist=a,b --ntasks-per-node=2"),
        (SRUN, TWO, False, {}, f"{SLURM} --nodes=2 --nodelist=a,b"),
        (
            SRUN,
            {},
            False,
            {"SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "8", "SLURM_STEP_ID": "0"},
            f"{SLURM} --cpus-per-task=8 --overcommit --overlap",
        ),
    ],
)
def test_command_lines(launcher, hosts, root, environ, expected):
    command = start_command(launcher, 4, hosts, ["python", "x y.py"], root=root, environ=environ)
    assert command == [*expected.split(), "python", "x y.py"]


def program(path, says):
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("says", "family", "version"),
    [
        ("HYDRA build details:\n    Version:     5.0.2", "MPICH", 0),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", "MPICH", 0),
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to", "Open MPI", 4),
        ("mpiexec (OpenRTE) 4.1.4", "Open MPI", 4),
        ("mpirun (Open MPI) 5.0.11", "Open MPI", 5),
        ("slurm 24.05.3", "Slurm", 0),
    ],
)
def test_launchers_are_told_by_what_they_say(tmp_path, says, family, version):
    path = program(tmp_path / "starts", says)
    assert find_launcher(f"{path} --an option") == Launcher(family, (path, "--an", "option"), version)


def test_srun_is_taken_in_a_job_without_mpirun(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "srun"
    path.write_text("#!/bin/sh\necho slurm 24.05.3\n")
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="no mpirun next to this Python or on PATH"):
        find_launcher(environ={})
    assert find_launcher(environ={"SLURM_JOB_ID": "1"}).words == (str(path),)


def test_what_is_no_launcher_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="says 'hello'; expected mpirun of MPICH or Open MPI, or srun"):
        find_launcher(program(tmp_path / "other", "hello"))
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        find_launcher("nowhere")


def test_hosts_are_written_in_lines_and_files(tmp_path):
    assert parse_hosts("a:4, b.example,10.0.0.1:2") == {"a": 4, "b.example": None, "10.0.0.1": 2}
    file = tmp_path / "hosts"
    file.write_text("# ours\na:4\nb slots=2 max_slots=3\n\nc  # spare\n")
    assert read_hosts(file) == {"a": 4, "b": 2, "c": None}
    assert default_host_file({"HYDRA_HOST_FILE": str(file)}) == file
    assert default_host_file({}) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:0", "'a:0': expected HOST, HOST:SLOTS"),
        ("a b", "'a b': expected HOST"),
        ("a,,b", "'': expected HOST"),
        ("a,a", "a appears twice"),
        ("-oProxyCommand=x", "expected HOST"),
    ],
)
def test_other_hosts_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_hosts(text)


def test_a_host_file_must_be_there_and_hold_hosts(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_hosts(tmp_path / "hosts")
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(ConfigError, match="no hosts"):
        read_hosts(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("ranks", "hosts", "expected"),
    [
        (5, {"a": None, "b": None}, {"a": 3, "b": 2}),
        (1, {"a": None, "b": None}, {"a": 1}),
        (5, {"a": 4, "b": 4}, {"a": 4, "b": 1}),
        (3, {"a": 2, "b": None}, {"a": 2, "b": 1}),
    ],
)
def test_ranks_are_spread(ranks, hosts, expected):
    assert spread(ranks, hosts) == expected


def test_too_few_slots_are_refused():
    with pytest.raises(ConfigError, match="4 ranks, but 3 slots on a:2,b:1"):
        spread(4, {"a": 2, "b": None})


def test_batch_jobs_are_known():
    assert mpirun.in_batch_job({"SLURM_JOB_ID": "1"})
    assert not mpirun.in_batch_job({"SLURM_JOB_ID": "", "HOME": "/"})


def test_whose_mpi():
    families = {
        "Open MPI v5.0.11, package: x": "Open MPI",
        "mpirun (Open MPI) 4.1.4": "Open MPI",
        "MPICH Version:      5.0.2": "MPICH",
        "Intel(R) MPI Library 2021.9 for Linux* OS": "Intel MPI",
        "MVAPICH Version: 4.0, based on MPICH": "MVAPICH",
        "": "an unknown MPI",
    }
    assert {path: mpirun.mpi_family(path) for path in families} == families
