"""Finds the CUDA sources: `kernels/` of a checkout, or the copy inside the wheel."""

from pathlib import Path

from dptrain.errors import DeviceError

_PACKAGE = Path(__file__).resolve().parents[2]


def kernels_dir(package: Path = _PACKAGE) -> Path:
    """Return the folder of the CUDA sources, given that of the installed package; DeviceError if missing."""
    places = (package / "_kernels", package.parent / "kernels")
    for place in places:
        if (place / "README.md").is_file():
            return place
    raise DeviceError(f"CUDA sources are neither in {places[0]} nor in {places[1]}: reinstall dptrain")
