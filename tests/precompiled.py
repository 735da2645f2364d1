"""Compiling generated programs faster in tests: the headers that all of them begin with are parsed once.

Parsing them is a third of a small program's compilation. GCC takes up its parser's saved state where a text includes a
header that has one beside it, and goes on as if it had read the header; other compilers read the header.
"""

import fcntl
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from dptrain.backend.cpu import compile as compiling

HEADER = "dptrain-tests.h"


@functools.cache
def _linker(compiler: str) -> tuple[str, ...]:
    """Return the option of a linker that makes the same code in a third of the time, where it works with a compiler."""
    option = "-fuse-ld=gold"
    if not shutil.which("ld.gold"):
        return ()
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, "-shared", "-fPIC", option, "-xc++", "-", "-o", f"{folder}/empty.so"]
        done = subprocess.run(command, input=b"", capture_output=True, check=False)
    return (option,) if done.returncode == 0 else ()


def compiler_with(folder: Path) -> Callable[[str, tuple[str, ...]], bytes]:
    """Return what takes the place of `compiling._compiled`, and keeps headers in a folder that processes share."""
    plain, common = compiling._compiled, "\n".join(map(compiling._header, compiling.HEADERS))
    used: Counter[tuple[str, ...]] = Counter()

    @functools.cache
    def precompiled(command: tuple[str, ...]) -> str | None:
        """Return the folder of the headers as a command compiles them, or None where it does not."""
        at = folder / hashlib.sha256("\0".join((common, *command)).encode()).hexdigest()[:16]
        at.mkdir(parents=True, exist_ok=True)
        with open(at / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (at / "done").exists():
                (at / HEADER).write_text(common)
                arguments = [*command, "-x", "c++-header", f"{at}/{HEADER}", "-o", f"{at}/{HEADER}.gch"]
                (at / "done").write_text(str(subprocess.run(arguments, capture_output=True, check=False).returncode))
        return str(at) if (at / "done").read_text() == "0" else None

    def compiled(text: str, command: tuple[str, ...]) -> bytes:
        command = (*command, *_linker(command[0]))
        if text.startswith(common):
            used[command] += 1
            # One program takes less time than the headers.
            if used[command] > 1 and (at := precompiled(command)):
                text, command = f'#include "{HEADER}"{text[len(common) :]}', (*command, f"-I{at}")
        return plain(text, command)

    return compiled
