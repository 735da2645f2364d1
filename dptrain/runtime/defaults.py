"""Defaults shown in the command line's help, importable without the code that uses them."""

DEFAULT_MAX_BYTES = 1_000_000_000
"""The largest array that is read unless the user raises the bound: 20 times MNIST, far below a decompression bomb."""

DEFAULT_CACHE_BYTES = 10_000_000_000
"""Copies of remote and converted shards on a node's disk."""

DEFAULT_CACHE_BYTES = 10_000_000_000
"""Copies of remote and converted shards on a node's disk."""

# Enough for eight ranks, and few enough that a shard of the usual batch of 128 still has 16 samples.
REPRODUCIBLE_SHARDS = 8
"""Shards of a global batch where the bits are to be the same on any number of ranks."""

# As PyTorch DDP's: small enough that the first bucket is on its way while most of a wide model's backward pass is still
# to come, large enough that no message is about latency.
DEFAULT_BUCKET_MB = 25.0
"""10^6 bytes of gradients that travel as one message."""
