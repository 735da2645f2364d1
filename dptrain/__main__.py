"""`python -m dptrain`."""

import sys

from dptrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
