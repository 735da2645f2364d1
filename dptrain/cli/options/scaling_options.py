"""Options of `explain --ranks`, without slow imports."""

import argparse
import re
from dataclasses import dataclass

from dptrain.errors import ConfigError

# The GPUs whose peaks are known, see `backend/cuda/cost/roofline.py`.
GPU_NAMES = ("A100", "H100", "H200")
# Ranks at most, so that tables keep to their columns.
_MOST = 65536
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_WHOLE, _NUMBER = r"[0-9]{1,9}", r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_RATE = re.compile(rf"({_NUMBER})([KMGT]?)(b|B)(?:,({_NUMBER})us)?")
# Options that need --ranks.
_OWN = ("node_gpus", "gpu", "network", "link", "gflops", "memory_bandwidth", "scaling")


@dataclass(frozen=True)
class Stated:
    """A link as typed: bytes/s, and seconds a message, or None."""

    bandwidth: float
    latency: float | None


@dataclass(frozen=True)
class ScalingOptions:
    """Options of `explain --ranks`; None where it has to find out."""

    ranks: list[int]  # powers of two
    weak: bool  # the global batch grows with the ranks
    node: int | None  # ranks of a node
    gpu: str | None  # one of `GPU_NAMES`
    network: Stated | None  # of a node
    link: Stated | None  # between ranks of a node
    flops: float | None  # operations/s of products on a rank
    bandwidth: float | None  # bytes/s of a rank's memory


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group(
        "will it scale", "predict a training step on more ranks, instead of showing its ops"
    )
    group.add_argument("--ranks", metavar="A-B", help="powers of two of ranks, such as 1-1024")
    group.add_argument(
        "--node-gpus", metavar="N", help="ranks of a node, GPUs unless --device cpu (default: 8; CPU: its cores)"
    )
    group.add_argument("--gpu", metavar="|".join(GPU_NAMES), help="the GPU to predict for (default: H100)")
    network = "bits or bytes/s of a node, and latency: 200Gb or 25GB,5us (default: 200Gb,5us; CPU: 10Gb,30us)"
    group.add_argument("--network", metavar="RATE", help=network)
    link = "between ranks of a node: 360GB,2us (default: NVLink's; on CPUs measured under mpirun, or 5GB,5us)"
    group.add_argument("--link", metavar="RATE", help=link)
    group.add_argument(
        "--gflops", metavar="N", help="that matrix products reach (default: 70 %% of a GPU's peak; CPU: measured)"
    )
    memory = "bytes/s of a rank's memory (default: the GPU's; CPU: measured)"
    group.add_argument("--memory-bandwidth", metavar="RATE", help=memory)
    scaling = "strong: one global batch for all; weak: --batch-size is that of each rank (default: strong)"
    group.add_argument("--scaling", metavar="strong|weak", help=scaling)


def read_options(parsed: argparse.Namespace) -> ScalingOptions | None:
    """Return the options, None without `--ranks`."""
    if parsed.ranks is None:
        for name in _OWN:
            if getattr(parsed, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} {getattr(parsed, name)}: needs --ranks; add it, such as --ranks 1-64")
        return None
    if parsed.kernels or parsed.code or parsed.step != "train":
        raise ConfigError("--ranks predicts training steps: leave out --kernels, --code and --step")
    gpu = None if parsed.gpu is None else parsed.gpu.upper()
    if gpu is not None and gpu not in GPU_NAMES:
        raise ConfigError(f"--gpu {parsed.gpu}: expected {', '.join(GPU_NAMES[:-1])} or {GPU_NAMES[-1]}")
    if parsed.scaling not in (None, "strong", "weak"):
        raise ConfigError(f"--scaling {parsed.scaling}: expected strong or weak")
    flops = None if parsed.gflops is None else 1e9 * _positive("--gflops", parsed.gflops)
    memory = _rate("--memory-bandwidth", parsed.memory_bandwidth)
    return ScalingOptions(
        _ranks(parsed.ranks),
        parsed.scaling == "weak",
        None if parsed.node_gpus is None else _whole("--node-gpus", parsed.node_gpus),
        gpu,
        _rate("--network", parsed.network),
        _rate("--link", parsed.link),
        flops,
        None if memory is None else memory.bandwidth,
    )


def _ranks(text: str) -> list[int]:
    first, dash, last = text.partition("-")
    if not all(re.fullmatch(_WHOLE, word) and int(word) >= 1 for word in (first, *([last] if dash else []))):
        raise ConfigError(f"--ranks {text}: expected a range of integers >= 1, such as 1-1024")
    low, high = int(first), int(last or first)
    if high > _MOST:
        raise ConfigError(f"--ranks {text}: expected {_MOST} ranks at most")
    if low > high:
        raise ConfigError(f"--ranks {text}: expected the smaller number first, {high}-{low}")
    powers = [1 << n for n in range(high.bit_length()) if low <= 1 << n <= high]
    if not powers:
        nearest = 1 << low.bit_length() - 1
        raise ConfigError(f"--ranks {text}: expected a range with a power of two in it, such as {nearest}-{high}")
    return powers


def _whole(option: str, text: str) -> int:
    if not re.fullmatch(_WHOLE, text) or int(text) < 1:
        raise ConfigError(f"{option} {text}: expected an integer >= 1")
    return int(text)


def _positive(option: str, text: str) -> float:
    if not re.fullmatch(_NUMBER, text) or float(text) <= 0:
        raise ConfigError(f"{option} {text}: expected a number > 0")
    return float(text)


def _rate(option: str, text: str | None) -> Stated | None:
    """Parse a rate in bits ("200Gb") or bytes ("25GB") a second and its latency, into bytes and seconds."""
    if text is None:
        return None
    match = _RATE.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{option} {text}: expected bits or bytes per second, such as 200Gb, 25GB or 25GB,5us")
    nbytes = float(match[1]) * _UNITS[match[2]] / (8 if match[3] == "b" else 1)
    return Stated(nbytes, None if match[4] is None else 1e-6 * float(match[4]))
