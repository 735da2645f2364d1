"""Memory of this process."""

import sys


def most_resident_bytes() -> int:
    """Return the most memory that this process has had resident so far; 0 where the system does not tell."""
    try:
        import resource  # not on every operating system
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
