"""Put in front of PYTHONPATH, this makes PyCUDA look as if it were not installed: `--device auto` is the CPU."""

import sys

sys.modules["pycuda"] = None  # type: ignore[assignment]
