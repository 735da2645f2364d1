"""What `launch` answers to options that are not right, and how its ends are judged."""

import pytest

from dptrain.cli.commands import launch
from dptrain.cli.main import main
from dptrain.runtime.launch.job import Start
from dptrain.runtime.launch.mpirun import Launcher


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-n 2", "no command; write it after --"),
        ("-n 2 python x.py", "no command; write it after --"),
        ("-- python x.py", "the number of ranks is missing"),
        ("-n 0 -- true", "'0': expected an integer >= 1"),
        ("-n 2 --restarts -1 -- true", "--restarts"),
        ("-n 2 --grace soon -- true", "'soon': expected seconds >= 0"),
        ("-n 2 --min-ranks 3 -- true", "--min-ranks 3: expected 1 to 2"),
        ("-n 3 --hosts a:2 -- true", "3 ranks, but 2 slots on a:2"),
        ("-n 2 --hosts a:2 --hostfile x -- true", "expected only one of them"),
        (
            "-n 2 --restarts 3 -- python -m dptrain --epochs 3",
            "--restarts 3: without --out a restart would start over at",
        ),
        ("-n 2 --restarts 3 -- python -m dptrain sweep --seeds 1", "add --out DIR to the command"),
        ("-n 2 --restart 3 -- true", "unknown '--restart'; did you mean '--restarts'"),
    ],
)
def test_wrong_options_are_refused(monkeypatch, capfd, arguments, message):
    monkeypatch.setattr(launch, "find_launcher", lambda name: Launcher("MPICH", ("mpirun",)))
    assert main(["launch", *arguments.split()]) == 2
    err = capfd.readouterr().err
    assert err.startswith("dptrain: ")
    assert err.count("\n") == 1
    assert message in err


def started(**options):
    """Return what `Job` would be given for a start on four ranks."""
    return Start(Launcher("MPICH", ("mpirun",)), ("true",), 4, {}, ("127.0.0.1",), **options)


def test_ranks_of_one_machine_share_its_cores(monkeypatch):
    for name in (*launch.THREAD_VARIABLES, "MPIR_CVAR_ENABLE_HEAVY_YIELD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "usable_cores", lambda: 2)
    environment = launch._environment(started(), 1, None)
    assert environment["DPTRAIN_RESTART"] == "1"
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    assert environment["MPIR_CVAR_ENABLE_HEAVY_YIELD"] == "1"
    assert launch._environment(started(), 0, 3)["OPENBLAS_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in launch._environment(started(), 0, None)


@pytest.mark.parametrize(
    ("down", "least", "expected"),
    [
        ((), 1, {"a": 2, "b": 2}),
        (("b",), 1, {"a": 2}),
        (("b",), 3, {"a": 2, "b": 2}),  # too few: all are tried again
        (("a", "b"), 1, {"a": 2, "b": 2}),
    ],
)
@pytest.mark.parametrize("given", [{"a": 2, "b": 2}, {"a": None, "b": None}])
def test_it_goes_on_with_the_hosts_that_are_left(monkeypatch, capfd, given, down, least, expected):
    monkeypatch.setattr(launch, "_answers", lambda launcher, host: host not in down)
    start = launch._on_hosts_left(started(), given, 4, least)
    assert start.hosts == expected
    assert start.ranks == sum(expected.values())
    errors = capfd.readouterr().err
    assert ("does not answer" in errors) == bool(down)
    assert ("--min-ranks is" in errors) == (bool(down) and len(expected) == 2)


@pytest.mark.parametrize(
    ("command", "anew"),
    [
        ("python -m dptrain", True),
        ("python -u -m dptrain train --epochs 3", True),
        ("/env/bin/dptrain", True),
        ("python -m dptrain --out=runs/x", False),
        ("python -m dptrain --config runs/x/config.yaml", False),
        ("python -m dptrain doctor", False),
        ("python script.py", False),
    ],
)
def test_what_begins_at_epoch_1_when_it_is_started_again(command, anew):
    assert launch._begins_anew(command.split()) is anew


def test_a_command_that_cannot_be_run_is_told_before_mpi_starts(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(launch, "find_launcher", lambda name: Launcher("MPICH", ("mpirun",)))
    monkeypatch.setattr(launch, "Job", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    for command, code, message in (
        ("no-such-command", 127, "not found on PATH"),
        ("./no-such-command", 127, "no such file"),
        ("script.py", 127, "not found on PATH; write python script.py"),
        ("./script.py", 126, "it is not executable"),
        (str(tmp_path), 126, "it is a folder"),
    ):
        assert main(["launch", "-n", "2", "--", command]) == code
        assert capfd.readouterr().err == f"dptrain: launch: cannot run {command}: {message}\n"
