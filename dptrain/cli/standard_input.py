"""`--data -`: samples from standard input, as from a file of the kind that their first bytes show."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dptrain.comm import Communicator
from dptrain.data.sources import format_bytes
from dptrain.errors import ConfigError, DataError, DptrainError

_NAME = "standard input"
_ENDINGS = {b"\x93NUMPY": ".npy", b"PK\x03\x04": ".npz", b"PAR1": ".parquet", b"\x1f\x8b": ".csv.gz"}


@contextmanager
def standard_input(name: str, comm: Communicator, max_bytes: int) -> Iterator[str]:
    """Yield the path of a file with what standard input holds if `name` is "-", else the name as it is.

    Raises:
        ConfigError: there are several ranks, of which one alone has a standard input.
        DataError: it is empty, or larger than `max_bytes`; or as the block, which names it instead of the file.
    """
    if name != "-":
        yield name
        return
    if comm.size > 1:
        raise ConfigError(f"--data -: one process reads standard input, not {comm.size} ranks; name a file")
    content = sys.stdin.buffer.read(max_bytes + 1)
    if not content:
        raise DataError(f"{_NAME}: empty; expected a table, or the content of an .npy or .npz file")
    if len(content) > max_bytes:
        raise DataError(f"{_NAME}: more than max_bytes = {format_bytes(max_bytes)}; raise --data.max_bytes")
    ending = next((ending for magic, ending in _ENDINGS.items() if content.startswith(magic)), ".csv")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"stdin{ending}")
        path.write_bytes(content)
        try:
            yield str(path)
        except DptrainError as error:
            error.args = tuple(
                argument.replace(str(path), _NAME) if isinstance(argument, str) else argument for argument in error.args
            )
            raise
