"""The table of ranks that a training, a sweep and the doctor print first; of one rank a line."""

from collections.abc import Sequence
from typing import Any

from dptrain.runtime.output import terminal


def show_ranks(rows: Sequence[Sequence[Any]]) -> None:
    """Print the table rank, host, PID, device; long cells wrap at words on a terminal. Of one rank, print a line."""
    if len(rows) == 1:
        _, host, process, device = rows[0]
        terminal.say(f"on {host}, PID {process}: {device}")
        return
    table = terminal.table("rank", "host", "PID", "device")
    for row in rows:
        table.add_row(*map(str, row))
    terminal.show_table(table)
