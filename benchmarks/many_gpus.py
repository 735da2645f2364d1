"""Messages between many H100, predicted before and after they learned what NCCL wants; nothing is measured.

Prints steps as `explain --ranks` predicts them, with each improvement alone left out, and the bytes of gradients that a
GPU sends through its network adapter.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import dptrain as dp
from dptrain.cli.commands.scaling import _of_gpus, of_model
from dptrain.cli.options.scaling_options import ScalingOptions, Stated

# Without each improvement, as fields of `Hardware`.
WITHOUT = {
    "half precision all-to-all": {"sums_halves": "all-to-all"},
    "one stream for all axes": {"axes_apart": False},
    "ordinary priority": {"urgent": False},
    "gathers at a step's end": {"late": False},
}
MODES = ("data parallel", "ZeRO-1", "FSDP", "tensor parallel")
ROWS = 1024  # of each GPU
# Of a node, bytes/s.
NETWORKS = {"400 Gb/s a GPU": Stated(400e9, None), "200 Gb/s a node": Stated(25e9, None)}


def model(width: int, depth: int, comm_dtype: str | None) -> dp.Sequential:
    """Return a compiled perceptron."""
    layers = [dp.layers.Dense(width, "relu") for _ in range(depth)]
    perceptron = dp.Sequential([dp.layers.Input((784,)), *layers, dp.layers.Dense(10, "softmax")])
    perceptron.compile(
        "adam", "sparse_categorical_crossentropy", device="cuda", precision="tf32", comm_dtype=comm_dtype
    )
    return perceptron


def table(network: Stated | None, gpus: int, width: int, depth: int) -> list[str]:
    """Return rows: milliseconds of a step in each mode, with and without the improvements."""
    hardware, _ = _of_gpus(ScalingOptions([gpus], False, 8, "H100", network, None, None, None), "tf32")
    lines = ["| gradients as | mode | before | " + " | ".join(f"but {name}" for name in WITHOUT) + " | after |"]
    lines.append("|---|---|" + "---|" * (len(WITHOUT) + 2))
    everything = {name: value for fields in WITHOUT.values() for name, value in fields.items()}
    for comm_dtype in (None, "bfloat16"):
        scalings = of_model(model(width, depth, comm_dtype), ROWS, bucket_mb=25)
        for scaling in scalings:
            if scaling.parallelism.name in MODES:
                machines = [replace(hardware, **fields) for fields in (everything, *WITHOUT.values(), {})]
                steps = [1e3 * scaling.predict(gpus, gpus * ROWS, machine).seconds for machine in machines]
                cells = " | ".join(f"{step:.2f}" for step in steps)
                lines.append(f"| {comm_dtype or 'float32'} | {scaling.parallelism.name} | {cells} |")
    return lines


def bytes_per_adapter(nodes: int, node: int, megabytes: float) -> list[str]:
    """Return rows: MB that a GPU sends to other nodes for so many MB of float32 gradients, summed over all GPUs."""
    other, n = (nodes - 1) / nodes, megabytes / 4  # 10^6 elements
    ways = {
        "float32, by a ring over the nodes' adapters": 2 * 4 * other * n / node,
        "halves all-to-all, before": 2 * 2 * other * n,
        "halves node first, sums between nodes in float32, after": (4 + 2) * other * n / node,
    }
    return [f"| {way} | {sent:.1f} |" for way, sent in ways.items()]


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    steps = f"784-{arguments.width}x{arguments.depth}-10 with Adam, TF32, {ROWS} rows a GPU: milliseconds of a step"
    lines = [f"{steps}, predicted.", ""]
    for place, gpus, networks in (("One node of 8", 8, ["NVLink alone"]), ("16 nodes of 8", 128, list(NETWORKS))):
        for network in networks:
            stated = NETWORKS.get(network)
            lines += [f"{place}, {network}:", "", *table(stated, gpus, arguments.width, arguments.depth), ""]
    heads = "an all-reduce of 128 MB of float32 gradients, 16 nodes of 8", "MB a GPU sends to other nodes"
    lines += [f"| {' | '.join(heads)} |", "|---|---|", *bytes_per_adapter(16, 8, 128)]
    text = "\n".join(lines) + "\n"
    if arguments.output:
        arguments.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
