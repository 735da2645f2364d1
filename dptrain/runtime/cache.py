"""Where dptrain keeps what it has generated, fetched or compiled."""

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """The folder for fetched, generated and compiled files: `$DPTRAIN_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("DPTRAIN_CACHE")
    # Not Path.expanduser, which raises where the user of `~user` does not exist.
    return Path(os.path.expanduser(chosen)) if chosen else Path(platformdirs.user_cache_dir("dptrain"))
