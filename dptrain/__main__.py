"""`python -m dptrain`."""

import sys

from dptrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
