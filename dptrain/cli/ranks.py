"""The table of ranks that a training, a sweep and the doctor begin with."""

from collections.abc import Sequence
from typing import Any

from dptrain.runtime import terminal


def show_ranks(rows: Sequence[Sequence[Any]]) -> None:
    """Print the table rank, host, PID, device; cells that are too long for a terminal are wrapped at words."""
    from rich.table import Table

    table = Table("rank", "host", "PID", "device")
    for row in rows:
        table.add_row(*map(str, row))
    terminal.console().print(table)
