"""What the launcher's environment says."""

import os
import socket
import subprocess
import sys

import pytest

from dptrain.errors import AgreedError
from dptrain.runtime.launch import launcher
from dptrain.runtime.launch.launcher import (
    LaunchInfo,
    abort_by_launcher,
    detect_launch,
    launcher_can_abort,
    prepare_blas_before_numpy,
    rank_variable,
    refuse_other_launchers,
)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "4"}, LaunchInfo("MPICH", 4, 2, 4)),
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, LaunchInfo("MPICH", 4, 2, 1)),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}, LaunchInfo("Open MPI", 3, 0, 1)),
        # sbatch's own shell has SLURM_NTASKS, but only a step started by srun is a rank
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, LaunchInfo("Slurm", 8, 5, 1)),
        ({"PMI_SIZE": "x", "PMI_RANK": "0"}, None),
    ],
)
def test_detect_launch(environment, expected):
    assert detect_launch(environment) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, "PMI_RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK"),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
    ],
)
def test_by_which_variable_a_process_knows_its_rank(environment, expected):
    assert rank_variable(environment) == expected


def test_mpichs_launcher_is_asked_to_end_the_job_over_the_socket_that_it_gives_each_rank(monkeypatch, tmp_path):
    ours, theirs = socket.socketpair()
    environment = {"PMI_SIZE": "2", "PMI_RANK": "0", "HYDI_CONTROL_FD": "7", "PMI_FD": str(ours.fileno())}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with ours, theirs, open(tmp_path / "file", "w", encoding="utf-8") as file:
        assert launcher_can_abort()
        abort_by_launcher(77)
        assert theirs.recv(100) == b"cmd=abort exitcode=77\n"
        for wrong in ("", "x", "99999", str(file.fileno())):
            assert not launcher_can_abort({**environment, "PMI_FD": wrong})
        assert not launcher_can_abort({"PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": str(ours.fileno())}), "Slurm's PMI-2"


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    "more", [{}, {"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, {"LOCAL_RANK": ""}]
)
def test_launchers_without_mpi_are_refused(monkeypatch, more):
    monkeypatch.setattr(launcher, "_TURN_SECONDS", 0)
    with pytest.raises(AgreedError, match=r"WORLD_SIZE = 4, but no MPI .* mpirun -n 4 instead") as caught:
        refuse_other_launchers(TORCHRUN | more)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "environment",
    [
        {},
        TORCHRUN | MPICH,
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
        TORCHRUN | {"WORLD_SIZE": "x"},
        TORCHRUN | {"MASTER_ADDR": ""},
        {"WORLD_SIZE": "4"},
    ],
)
def test_other_environments_are_not(environment):
    refuse_other_launchers(environment)


def test_threads_are_shared_before_numpy_is_loaded():
    code = "import os, dptrain; print(os.environ.get('OPENBLAS_NUM_THREADS'), os.environ.get('OMP_NUM_THREADS'))"
    clean = {key: value for key, value in os.environ.items() if key not in launcher.THREAD_VARIABLES}
    ranks = {"PMI_SIZE": "64", "PMI_RANK": "0", "MPI_LOCALNRANKS": "64"}

    def run(**more: str) -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=clean | more, capture_output=True, text=True, check=True, timeout=60).stdout

    assert run().split() == ["None", "None"]
    assert run(**ranks).split() == ["1", "1"]
    assert run(**ranks, OMP_NUM_THREADS="3").split() == ["None", "3"]


def test_idle_blas_threads_do_not_spin_unless_the_user_says_so():
    code = "import os, dptrain; print(os.environ['OPENBLAS_THREAD_TIMEOUT'])"
    for environment, expected in (({}, "10"), ({"OPENBLAS_THREAD_TIMEOUT": "20"}, "20")):
        clean = {key: value for key, value in os.environ.items() if key != "OPENBLAS_THREAD_TIMEOUT"}
        command = [sys.executable, "-c", code]
        process = subprocess.run(
            command, env=clean | environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert process.stdout.strip() == expected


def test_nothing_changes_once_numpy_is_loaded():
    import numpy as np  # noqa: F401

    environment = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}
    prepare_blas_before_numpy(environment)
    assert "OPENBLAS_NUM_THREADS" not in environment


@pytest.mark.parametrize(
    ("machine", "mask", "ranks", "share"), [(16, 16, 4, 4), (16, 4, 4, 4), (16, 2, 8, 2), (2, 2, 4, 1), (8, 8, 3, 2)]
)
def test_share_of_cores(monkeypatch, machine, mask, ranks, share):
    monkeypatch.setattr(launcher, "core_affinity", lambda: frozenset(range(mask)))
    monkeypatch.setattr(launcher, "usable_cores", lambda: mask)
    monkeypatch.setattr("os.cpu_count", lambda: machine)
    assert launcher.share_of_cores(ranks) == share
