"""Exit notification: tells launchers when a rank ends in the middle of a job with exit code 0 (C's `_exit(0)`).

`python -m dptrain launch`: the rank writes `JOINED` and `LEFT` to a pipe that its supervisor reads.

MPICH's mpirun would end the other ranks and exit with 0, or name a rank that it has itself ended. A guard keeps the
connection to mpirun open beyond the rank's end, so that the others can name the rank, and aborts the job if all have
exited with 0. A rank that exits with an error is left to mpirun.
"""

import os
import socket
from contextlib import suppress

from dptrain.errors import ExitCode
from dptrain.runtime.launch.launcher import LaunchInfo, launcher_can_abort
from dptrain.runtime.launch.supervisor import DEPARTURE, JOINED, LEFT

# Seconds for the other ranks, which know more, to name the rank, and for mpirun to forward the line.
_TURN, _PASS_ON = 2.5, 0.3
_SHELL = "/bin/sh"
# Arguments: the rank's PID, the line to print. Descriptors: 3 the connection to mpirun, 4 the pipe. The shell that is
# started ends at once: the guard is no child that a rank's own wait() would find.
_GUARD = f"""
guard() {{
    trap '' HUP INT QUIT TERM USR1 USR2
    read -r word <&4 && exit
    looks=0 about=
    while read -r about <"/proc/$1/stat"; do
        case ${{about##*) }} in [ZX]*) break ;; esac
        looks=$((looks + 1))
        [ $looks -gt 40 ] && exit  # it is another program now (exec)
        sleep 0.05
    done
    status=${{about##* }}  # as wait() has it; unknown where mpirun was faster than this look
    [ "${{status:-0}}" -lt 256 ] || exit
    sleep {_TURN}
    [ "${{status:-0}}" -eq 0 ] || exit
    echo "$2" >&5
    sleep {_PASS_ON}
    printf 'cmd=abort exitcode={int(ExitCode.STUCK)}\\n' >&3
}}
guard "$@" </dev/null 5>&2 >/dev/null 2>&1 &
"""


class ExitNotifier:
    """Notifies the supervisor, or MPICH's mpirun, that this rank joins or leaves the others."""

    def __init__(self, launch: LaunchInfo) -> None:
        self._launch = launch
        self._pid = os.getpid()
        self._guard: int | None = None
        text = os.environ.get(DEPARTURE, "")
        self._supervisor = int(text) if text.isdecimal() else None
        if self._supervisor is not None:
            try:
                os.set_inheritable(self._supervisor, False)  # not for the rank's own children
            except OSError:
                self._supervisor = None

    def begin(self) -> None:
        """Notify that this rank begins to meet the others."""
        self._tell(JOINED)
        if self._guard is None and launcher_can_abort():
            with suppress(OSError):
                self._guard = self._start_guard(int(os.environ["PMI_FD"]))

    def end(self) -> None:
        """Notify that all ranks have left each other, or that this one's exit code will say enough."""
        self._tell(LEFT)
        if self._guard is not None:
            with suppress(OSError):
                os.write(self._guard, b"left\n")
            self.close()

    def close(self) -> None:
        """Close the guard's pipe; a fork must, or it would hold it open beyond the rank's end."""
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None

    def _tell(self, word: bytes) -> None:
        if self._supervisor is not None and os.getpid() == self._pid:
            with suppress(OSError):
                os.write(self._supervisor, word)

    def _start_guard(self, to_mpirun: int) -> int:
        """Start the guard; return the descriptor whose closing it waits for."""
        identity = f"rank {self._launch.rank}/{self._launch.size} host {socket.gethostname()} pid {self._pid}"
        line = f"dptrain: {identity}: exited with code 0 in the middle of the job (C's _exit?)"
        reading, writing = os.pipe()
        try:
            child = os.posix_spawn(
                _SHELL,
                ["dptrain-guard", "-c", _GUARD, "dptrain-guard", str(self._pid), line],
                {"PATH": os.environ.get("PATH", os.defpath)},
                file_actions=[
                    # Above all numbers that are used below.
                    (os.POSIX_SPAWN_DUP2, reading, FREE),
                    (os.POSIX_SPAWN_DUP2, to_mpirun, 3),
                    (os.POSIX_SPAWN_DUP2, FREE, 4),
                    (os.POSIX_SPAWN_CLOSE, FREE),
                ],
            )
            os.waitpid(child, 0)
        except OSError:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        return writing


# An unused descriptor number.
FREE = 200
