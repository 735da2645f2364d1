"""Kills an Open MPI mpirun that deadlocks.

Where a rank leaves before MPI_Init while another is in it, a thread of mpirun (prterun of Open MPI 5.0) may block on a
lock of its own: all ranks end, but mpirun never does. So the first ranks of each node start a guard, a shell in its own
session that sleeps until its rank has ended, and then checks for seconds whether all threads of the launcher wait for
locks. A launcher that works waits in poll instead.
"""

import os
from contextlib import suppress

from dptrain.runtime.launch import children
from dptrain.runtime.launch.launcher import LaunchInfo
from dptrain.runtime.watch import records
from dptrain.runtime.watch.exit_notification import FREE

# More than one on a node: a rank that fails before it imports dptrain has none.
_RANKS = 2
# Seconds between looks at a launcher's threads, and how many in a row find all of them waiting for locks.
_BETWEEN, _LOOKS = 0.5, 10
# Arguments: the launcher's PID and start time, looks, seconds between them. Descriptor 3: a pipe whose other end closes
# with the rank.
_GUARD = """
guard() {
    trap '' HUP INT QUIT TERM USR1 USR2
    read -r word <&3
    looks=0
    while read -r about <"/proc/$1/stat"; do
        fields=${about##*) }
        started=$(set -- $fields; echo "${20}")
        [ "$started" = "$2" ] || exit
        case $fields in [ZX]*) exit ;; esac
        looks=$((looks + 1))
        for task in /proc/"$1"/task/*; do
            where=
            read -r where <"$task/wchan"
            case $where in *futex*) ;; *) looks=0 ;; esac
        done
        if [ "$looks" -ge "$3" ]; then
            echo "dptrain: warning: mpirun (PID $1) did not exit after its ranks had ended: killed" >>"/proc/$1/fd/2"
            kill -KILL "$1"
            exit
        fi
        sleep "$4"
    done
}
guard "$@" </dev/null >/dev/null 2>&1 &
"""
_SHELL = "/bin/sh"


def start(launch: LaunchInfo) -> int | None:
    """Start this rank's guard, if it has one; return the descriptor that a fork of the rank must close."""
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "")
    if launch.launcher != "Open MPI" or not local.isdecimal() or int(local) >= _RANKS:
        return None
    with suppress(OSError, IndexError, NotImplementedError):  # no /proc, no shell, no sessions
        for pid, name in children.ancestors():
            if children.is_launcher(name):
                return guard(pid)
    return None


def guard(launcher: int, looks: int = _LOOKS, between: float = _BETWEEN) -> int | None:
    """Start a guard that kills the launcher after `looks` in a row, `between` seconds apart; None if it has ended."""
    process = records.look_up(launcher)
    if process is None:
        return None
    words = [str(launcher), str(process.started), str(looks), str(between)]
    reading, writing = os.pipe()
    try:
        # The launcher waits until the rank's output is closed everywhere.
        nowhere = os.open(os.devnull, os.O_RDWR)
        try:
            child = os.posix_spawn(
                _SHELL,
                ["dptrain-launcher-guard", "-c", _GUARD, "dptrain-launcher-guard", *words],
                {"PATH": os.environ.get("PATH", os.defpath)},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, reading, FREE),  # above all numbers that are used below
                    *((os.POSIX_SPAWN_DUP2, nowhere, descriptor) for descriptor in range(3)),
                    (os.POSIX_SPAWN_DUP2, FREE, 3),
                    (os.POSIX_SPAWN_CLOSE, FREE),
                ],
                setsid=True,  # launchers kill the groups of their ranks
            )
        finally:
            os.close(nowhere)
        os.waitpid(
            child, 0
        )  # the shell leaves the guard to itself, and is no child that a rank's own wait() would find
    except (OSError, NotImplementedError):
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return writing
