"""Runs what `python ARGUMENTS` would in forks of a process that has imported NumPy and dptrain already.

Half of a start is imports. A fork has arguments, environment, files, folder and exit code of its own, and shares
nothing with what runs beside or after it; what dptrain does when it is imported it does when the fork imports it.
Forks have the same seed of `hash` alone: what is about that starts Python itself.

Arguments: the path of a socket. The server ends with its standard input, and removes the socket and its folder.
"""

import atexit
import ctypes
import dataclasses
import fcntl
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# What a training imports. MPI starts when it is imported, CUDA does not.
IMPORTED = [
    "dptrain.backend.cpu.backend",
    "dptrain.cli.main",
    "dptrain.cli.options.parser",
    "dptrain.cli.commands.train",
    "h5py",
]
# What it imports on its way through its files and ranks.
IMPORTED += ["dptrain.cli.options.parser", "calendar", "encodings.cp437", "filelock", "importlib.metadata", "numpy.ma"]
ON_EMULATOR = ["dptrain.backend.cuda.backend", "dptrain.backend.cuda.compile"]
# What the report of a sweep takes longer to import than a short one to train.
IN_SWEEPS = ["dptrain.cli.commands.sweep", "dptrain.sweeps.sweep", "dptrain.sweeps.reporting.report", "scipy.stats"]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        arguments: of Python.
        environment: of the process.
        folder: working directory.
        umask: of the process.
        client: PID of the process that asks; for the others it is its parent.
        numbers: the file descriptors by which the process has `files`.
        files: as they were received.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    client: int
    numbers: list[int]
    files: list[int]


def received(connection: socket.socket) -> Request | None:
    """Return what is asked, or None of who has ended before all of it was said, as a rank of a job that fails."""
    head, text, files = b"", b"", []
    with suppress(ConnectionError):
        head, files, _, _ = socket.recv_fds(connection, 8, 8)
        while len(text) < int.from_bytes(head, "little") and (piece := connection.recv(65536)):
            text += piece
    if len(head) == 8 and len(text) == int.from_bytes(head, "little"):
        return Request(*marshal.loads(text), files)
    for file in files:
        os.close(file)
    connection.close()
    return None


def import_all(names: list[str]) -> None:
    """Import modules, without those whose library is not installed, and keep the collector from looking at them."""
    for name in names:
        if name.partition(".")[0] in sys.modules or importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve(listener: socket.socket) -> Request:
    """Fork for whoever asks, as long as there is a standard input; return in the forks alone."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, socket.socket] = {}
    while True:
        ready = select.select([0, woken, listener, *running.values()], [], [])[0]
        for pid, connection in running.items():
            if 0 in ready or connection in ready:  # who asked is gone
                with suppress(ProcessLookupError):  # it leads no group yet
                    os.killpg(pid, signal.SIGKILL)
        if 0 in ready:
            place = listener.getsockname()
            os.unlink(place)
            os.rmdir(os.path.dirname(place))
            os._exit(0)
        if woken in ready:
            os.read(woken, 4096)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                with suppress(OSError), running.pop(pid) as connection:
                    connection.sendall(status.to_bytes(4, "little"))
        if listener in ready:
            connection = listener.accept()[0]
            request = received(connection)
            if request is None:
                continue
            if "sweep" in request.arguments and not sys.modules.keys() >= set(IN_SWEEPS):
                import_all(IN_SWEEPS)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for closable in (listener, connection, *running.values()):
                    closable.close()
                return request
            for file in request.files:
                os.close(file)
            running[pid] = connection


def become(request: Request) -> None:
    """Turn this fork into a process of its own."""
    os.setsid()
    os.chdir(request.folder)
    os.umask(request.umask)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in request.files]
    os.closerange(3, 100)
    for file, number in zip(above, request.numbers, strict=True):
        os.dup2(file, number)
    os.closerange(100, max(above) + 1)
    sys.modules["numpy"].random.seed()  # of the numbers that are drawn without a seed
    take_the_place_of(request.client, os.getpid())
    sys.meta_path.insert(0, Again())


def take_the_place_of(client: int, own_pid: int) -> None:
    """Let dptrain find the launcher among the ancestors of this process, where the client's are."""
    from dptrain.runtime.watch import records

    look_up, has_variable, parent = records.look_up, records._has_variable, os.getppid

    def looked_up(pid: int) -> records.Process | None:
        record = look_up(pid)
        return dataclasses.replace(record, parent=client) if record is not None and pid == own_pid else record

    records.look_up = looked_up
    # The system goes on showing the server's environment.
    records._has_variable = lambda pid, name: name in os.environ if pid == own_pid else has_variable(pid, name)
    os.getppid = lambda: client if os.getpid() == own_pid else parent()


class Again(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Puts dptrain aside until it is imported, which runs what it does then; its modules are as they were imported."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "dptrain"]
        self._modules = {name: sys.modules.pop(name) for name in names}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "dptrain" or name not in self._modules:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        dptrain = self._modules.pop("dptrain")
        self._spec = dptrain.__spec__
        sys.modules.update(self._modules)
        return dptrain

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__, module.__loader__ = self._spec, self._spec.loader
        self._spec.loader.exec_module(module)


def run(arguments: list[str]) -> None:
    """Do what `python ARGUMENTS` does."""
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")


def end(code: int) -> None:
    """End with this exit code as Python does, but leave memory to the system: to free it all takes a short run's time.

    On the emulated driver, which asks what has not been freed, and where mpi4py ends MPI, Python ends by itself.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if "EMULATOR_HOME" not in os.environ and (mpi is None or not mpi.Is_initialized() or mpi.Is_finalized()):
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            ctypes.CDLL(None).exit(code)  # C's: MPICH takes leave of its launcher there
    sys.exit(code)


if __name__ == "__main__":
    import_all([*IMPORTED, *(ON_EMULATOR if "EMULATOR_HOME" in os.environ else [])])
    from dptrain.cli.options.config import Config
    from dptrain.runtime.checked import checked

    checked(Config, {})  # imports Pydantic, and makes the checker of the settings
    gc.freeze()
    place = Path(sys.argv[1])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen(64)
    print("ready", flush=True)
    request = serve(listener)
    become(request)
    try:
        run(request.arguments)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        end(ended.code or 0)
    else:
        end(0)
