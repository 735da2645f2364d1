"""The CPU backend: programs as compiled C++ where there is a compiler, else as NumPy calls."""
