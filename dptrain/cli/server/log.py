"""Lines for standard error, written by a thread: a reader that stands still, as of a full pipe, holds up no request."""

import queue
import threading
from datetime import UTC, datetime

from dptrain.runtime.output.streams import write_error

_MOST_LINES = 10_000
_END_SECONDS = 1.0


class Log:
    """Writes lines, each with its time; drops those beyond 10,000 that wait, and says how many."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def add(self, text: str) -> None:
        """Write a line, at some time."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        try:
            self._lines.put_nowait(f"{at} {text}\n")
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Write what is left, if somebody reads it."""
        try:
            self._lines.put(None, timeout=_END_SECONDS)
        except queue.Full:
            return
        self._thread.join(_END_SECONDS)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            lost, self._lost = self._lost, 0
            write_error(line + (f"({lost:,} lines are lost: nobody read them in time)\n" if lost else ""))
