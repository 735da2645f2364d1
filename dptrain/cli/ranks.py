"""The table of ranks that a training, a sweep and the doctor print first."""

from collections.abc import Sequence
from typing import Any

from dptrain.runtime.output import terminal


def show_ranks(rows: Sequence[Sequence[Any]]) -> None:
    """Print the table rank, host, PID, device; long cells wrap at words on a terminal."""
    from rich.table import Table

    table = Table("rank", "host", "PID", "device")
    for row in rows:
        table.add_row(*map(str, row))
    terminal.console().print(table)
