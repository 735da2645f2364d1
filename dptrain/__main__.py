"""`python -m dptrain`."""

import gc
import sys
from collections.abc import Sequence

from dptrain.runtime import signals

signals.catch_early()  # before what takes long to import: a scheduler may send SIGUSR1 at any time

from dptrain.cli import main as cli  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line in a process of its own, and return its exit code."""
    gc.disable()  # until all is imported: imports leave no garbage, and looking for it takes a tenth of a start
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
