"""`python -m dptrain`."""

import gc
import sys
from collections.abc import Sequence

from dptrain.runtime import signals

signals.catch_early()  # for the script `dptrain`

from dptrain.cli import main as cli  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    gc.disable()  # until all is imported: imports leave no garbage, and collecting takes a tenth of a start
    code = cli.main(argv)
    # Python ends itself by SIGINT in place of the code if Ctrl-C left an `exec` of text, such as a dataclass's, and no
    # other `exec` followed (Py_RunMain's `unhandled_keyboard_interrupt`).
    exec("")
    return code


if __name__ == "__main__":
    sys.exit(main())
