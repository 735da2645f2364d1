"""The emulated CUDA driver and its tests; README.md says what it models."""
