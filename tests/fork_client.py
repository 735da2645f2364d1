"""Has a fork server run what `python ARGUMENTS` would, and ends as that does. Arguments: socket ARGUMENTS.

It is run by `python -I -S` and imports next to nothing: it starts once for each process.
"""

import _socket
import array
import marshal
import os
import resource
import signal
import sys

place, *arguments = sys.argv[1:]
umask = os.umask(0)
os.umask(umask)
# Standard input, output and error, and MPICH's way to its launcher.
files = [0, 1, 2]
if os.environ.get("PMI_FD", "").isdigit():
    files.append(int(os.environ["PMI_FD"]))
request = marshal.dumps((arguments, dict(os.environ), os.getcwd(), umask, os.getpid(), files))
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect(place)
server.sendmsg(
    [len(request).to_bytes(8, "little")],
    [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", files))],
)
server.sendall(request)
answer = b""
while len(answer) < 4 and (piece := server.recv(4 - len(answer))):
    answer += piece
if len(answer) < 4:
    sys.exit("the fork server is gone")
code = os.waitstatus_to_exitcode(int.from_bytes(answer, "little"))
if code < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
