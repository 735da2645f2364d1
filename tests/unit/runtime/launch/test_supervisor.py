"""The process beside each rank: it hears `launch` however the network cuts its lines, and loses no signal."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dptrain.runtime.launch import supervisor

# A command that ends by any signal, and within a minute.
COMMAND = ("sleep", "60")


@contextlib.contextmanager
def supervised() -> Iterator[tuple[socket.socket, subprocess.Popen]]:
    """Start a command as rank 0; give what `launch` has: the connection, after "hello", and the supervisor."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        arguments = ["127.0.0.1", str(server.getsockname()[1]), "RANK", "", supervisor.LOG_FORMATS[0], "", *COMMAND]
        environment = {"PATH": "/usr/bin:/bin", "RANK": "0", supervisor.TOKEN: "t"}
        with subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, *arguments], env=environment
        ) as process:
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(30)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    assert line_from(connection).split()[:3] == ["hello", "t", "0"]
                    yield connection, process
            finally:
                process.kill()


def line_from(connection: socket.socket) -> str:
    """Return the next line, or what comes before the end."""
    text = b""
    while not text.endswith(b"\n") and (more := connection.recv(1)):
        text += more
    return text.decode().strip()


def say(connection: socket.socket, text: bytes, size: int) -> None:
    """Send a text in pieces, each of which the supervisor reads alone."""
    for start in range(0, len(text), size):
        connection.sendall(text[start : start + size])
        time.sleep(0.02)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_what_launch_says_is_heard_however_it_is_cut(size):
    with supervised() as (connection, process):
        say(connection, b"what is new\nsignal 15\n", size)
        assert line_from(connection) == "exit -15"
        say(connection, b"leave\n", size)
        assert process.wait(30) == 0


@pytest.mark.parametrize("size", [1, 100])
def test_a_killed_command_is_gone(size):
    with supervised() as (connection, process):
        say(connection, b"kill\n", size)
        assert process.wait(30) == 0
        assert line_from(connection) == ""


LATE = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import supervisor

for number in supervisor.STOPPING:
    signal.signal(number, lambda *_: None)
fork = os.fork

def slow():
    child = fork()
    if not child:
        time.sleep(0.3)
    return child

os.fork = slow
outputs = supervisor._Outputs(0, "", supervisor.LOG_FORMATS[0], False)
child = supervisor._Supervisor(0, None, outputs)._fork(["sleep", "20"])
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


def test_a_signal_before_the_command_has_begun_ends_it():
    folder = supervisor.__file__.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", LATE, folder], check=True, timeout=60)
