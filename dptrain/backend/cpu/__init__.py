"""The CPU backend: NumPy, with inner loops compiled by Numba where that is installed."""
