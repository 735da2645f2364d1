"""Ranks of an mpirun that are forks of a process which has imported dptrain: `hostile.py --ranks` starts many of them.

What mpirun starts is the client of the tests' fork server, which hands its files, environment and place among the
processes to a fork and ends as that does.
"""

import contextlib
import os
import resource
import runpy
import select
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tests import fork_server  # noqa: E402


@dataclass
class Usage:
    """What forks took: processor seconds together, and the peak bytes of the largest."""

    seconds: float = 0.0
    memory: int = 0

    def add(self, taken: resource.struct_rusage) -> None:
        """Count a process that has ended."""
        self.seconds += taken.ru_utime + taken.ru_stime
        self.memory = max(self.memory, taken.ru_maxrss * 1024)


class ForkedRanks:
    """Forks this process for each rank that mpirun starts by `command`."""

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen(64)
        client = str(ROOT / "tests" / "fork_client.py")
        self.command = [sys.executable, "-I", "-S", client, str(folder / "socket"), "rank"]

    def serve(self, launcher: int, limit: float, act: Callable[[], int]) -> tuple[bool, Usage]:
        """Let ranks do `act`, whose result is the exit code, until the launcher, a pidfd, ends.

        Return whether it has ended after `limit` seconds, and what the ranks took.
        """
        end, usage = time.monotonic() + limit, Usage()
        running: dict[int, tuple[int, socket.socket]] = {}  # PID and client by pidfd
        while (left := end - time.monotonic()) > 0:
            clients = {client: pid for pid, client in running.values()}
            ready = select.select([launcher, self._listener, *running, *clients], [], [], left)[0]
            for client in [client for client in clients if client in ready]:  # mpirun has killed it
                self._kill(clients[client])
            for descriptor in [descriptor for descriptor in running if descriptor in ready]:
                self._reap(descriptor, *running.pop(descriptor), usage)
            if self._listener in ready:
                client = self._listener.accept()[0]
                request = fork_server.received(client)
                pid = os.fork()
                if not pid:
                    self._become(request, act)
                for file in request.files:
                    os.close(file)
                running[os.pidfd_open(pid)] = pid, client
            if launcher in ready:
                break
        for descriptor, (pid, client) in running.items():
            self._kill(pid)
            self._reap(descriptor, pid, client, usage)
        return left > 0, usage

    def _kill(self, pid: int) -> None:
        for kill in (os.killpg, os.kill):  # it leads no group yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def _reap(self, descriptor: int, pid: int, client: socket.socket, usage: Usage) -> None:
        _, status, taken = os.wait4(pid, 0)
        usage.add(taken)
        os.close(descriptor)
        with contextlib.suppress(OSError), client:
            client.sendall(status.to_bytes(4, "little"))

    def _become(self, request: fork_server.Request, act: Callable[[], int]) -> NoReturn:
        """In the fork: do `act` as a process of its own."""
        code = 1
        try:
            weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # folders that are the parent's to remove
            signal.set_wakeup_fd(-1)
            try:
                fork_server.become(request)
                code = act()
            except SystemExit as ended:
                if not isinstance(ended.code, int | None):
                    print(ended.code, file=sys.stderr)
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:  # as Python ends
                sys.excepthook(*sys.exc_info())
            fork_server.end(code)
        finally:  # nothing of the parent's may go on here
            os._exit(code)


def run_module(name: str, arguments: list[str]) -> int:
    """Do what `python -P -m NAME ARGUMENTS` does; SystemExit has its exit code."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0
