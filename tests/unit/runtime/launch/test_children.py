"""Whether a process is a rank, or was started by one."""

import os
import subprocess
import sys

import pytest

from dptrain.runtime.launch import children
from dptrain.runtime.launch.children import VARIABLE, ancestors, mark, parent_rank
from dptrain.runtime.launch.launcher import LaunchInfo, detect_launch

MPICH = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("line", "child"),
    [
        ([(20, "python"), (4711, "python"), (5, "hydra_pmi_proxy")], True),
        ([(20, "sh"), (21, "hydra_pmi_proxy"), (22, "mpirun"), (4711, "python")], False),  # a rank of a job of its own
        ([(20, "prterun"), (4711, "python")], False),
        ([(20, "slurmstepd"), (1, "init")], False),  # on another host
        ([(1, "init")], True),  # the rank has ended
    ],
)
def test_who_has_a_rank_among_its_ancestors_is_its_child(monkeypatch, line, child):
    children._descends.cache_clear()
    monkeypatch.setattr(children, "ancestors", lambda: iter(line))
    environment = {**MPICH, VARIABLE: "4711"}
    assert parent_rank(environment) == (4711 if child else None)
    assert detect_launch(environment) == (None if child else LaunchInfo("MPICH", 4, 2, 4))
    children._descends.cache_clear()


def test_a_rank_is_not_its_own_child():
    environment = dict(MPICH)
    mark(environment)
    assert environment[VARIABLE] == str(os.getpid())
    assert parent_rank(environment) is None
    assert parent_rank({VARIABLE: ""}) is parent_rank({VARIABLE: "x"}) is parent_rank({}) is None


def test_without_a_process_table_only_the_parent_is_known(monkeypatch):
    def unknown():
        raise FileNotFoundError

    children._descends.cache_clear()
    monkeypatch.setattr(children, "ancestors", unknown)
    assert parent_rank({VARIABLE: str(os.getppid())}) == os.getppid()
    assert parent_rank({VARIABLE: str(os.getpid() + 1)}) is None
    children._descends.cache_clear()


def test_ancestors_have_names():
    program = "from dptrain.runtime.launch.children import ancestors; print(next(iter(ancestors())))"
    process = subprocess.run(["sh", "-c", f'{sys.executable} -c "{program}"; true'], capture_output=True, text=True)
    assert process.stdout.endswith("'sh')\n")
    assert [pid for pid, _ in ancestors()][-1] == 1
