"""`python -m dptrain`."""

import sys

from dptrain.runtime import signals

signals.catch_early()  # before what takes long to import: a scheduler may send SIGUSR1 at any time

from dptrain.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
