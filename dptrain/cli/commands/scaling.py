"""`python -m dptrain explain --ranks 1-1024`: predicts how a training step scales (`docs/scaling.md`)."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from dptrain.backend.cpu.backend import CpuBackend
from dptrain.cli.measuring import Rates, measured
from dptrain.cli.options.config import Config
from dptrain.cli.options.scaling_options import ScalingOptions, Stated
from dptrain.comm import Communicator
from dptrain.errors import ConfigError
from dptrain.models import Model
from dptrain.models.explaining import traced_program
from dptrain.program.cost.cost_model import StepPrediction
from dptrain.program.cost.hardware import Hardware, Link
from dptrain.program.cost.parallelism import kinds_of_parallelism
from dptrain.program.cost.scaling import Scaling
from dptrain.program.explain import COLUMNS
from dptrain.program.passes import with_precision
from dptrain.program.shapes import size
from dptrain.runtime.cores import limit_threads
from dptrain.runtime.launch.launcher import usable_cores

# The part of a GPU's arithmetic peak, and of NVLink's, that large products and messages reach.
_REACHED_BY_PRODUCTS, _REACHED_BY_LINKS = 0.7, 0.8
# Minimal seconds of a small product, which fills only a part of a GPU.
_LEAST = 4e-6
# Seconds of a step on a CPU beside its ops.
_STEP = 1e-5
# Defaults of rates that are neither given nor measured.
_NVLINK_LATENCY, _CPU_LINK = 2e-6, Link(5e9, 5e-6)
_NETWORKS = {"cuda": Link(25e9, 5e-6), "cpu": Link(1.25e9, 30e-6)}
# More ranks are worth it down to this efficiency, and gain nothing if twice as many are not so much faster.
_WORTH, _GAIN = 0.5, 1.05
# Modes that differ by less are equal: the first of them is the simplest.
_ALIKE = 1.05
# The part of a step in which a GPU is idle from which packs are recommended.
_IDLE = 0.5
_ABOUT = {
    "data parallel": "every rank holds everything; gradients are all-reduced in one ring",
    "hierarchical all-reduce": "the same, within each node first, then between nodes, as --comm host does",
    "ZeRO-1": "slots are sharded; each rank updates its part of the weights and gathers the rest",
    "FSDP": "weights, gradients and slots are sharded; weights are gathered where a layer needs them",
    "tensor parallel": "pairs of kernels are sharded over a node's ranks (mesh: batch x model)",
    "pipeline": "layers are cut into stages over a node's ranks (mesh: batch x stages), 1F1B",
}
_NODE_FIRST = "every rank holds everything; gradients are all-reduced, within each node first"
_HEADS = ("ranks", "mesh", "step", "compute", "eff.", "sent", "weights", "gradients", "slots", "activations", "memory ")
_LEGEND = (
    "* the best mode for that many ranks; ! more memory than a rank has. step: time of one update; compute: the part "
    "of it that a rank computes, the rest is waiting; eff.: efficiency, samples/s per rank against one rank alone; "
    "sent: buffers of a step's messages; weights to activations: memory of a rank; memory: their sum."
)


def with_device(config: Config, options: ScalingOptions) -> Config:
    """Return the configuration with the prediction's device: GPUs if options are about them and none is chosen."""
    if config.device == "cpu" and options.gpu is not None:
        raise ConfigError(f"--gpu {options.gpu}: needs --device cuda")
    about_gpus = options.gpu is not None or options.node is not None
    return replace(config, device="cuda") if config.device == "auto" and about_gpus else config


def hardware_of(config: Config, options: ScalingOptions, comm: Communicator) -> tuple[Hardware, str]:
    """Return the machine to predict for, and where its numbers come from; measures a CPU's missing ones. Collective."""
    if config.device == "cuda":
        return _of_gpus(options, config.precision)
    stated = options.flops is not None and options.bandwidth is not None
    threads = 1 if stated else limit_threads(comm.local_size)
    if stated:
        rates = Rates(options.flops or 0.0, options.bandwidth or 0.0, None)
    else:
        rates = measured(CpuBackend(threads=threads, jit_compile=config.jit_compile), comm)
    rates = replace(rates, flops=options.flops or rates.flops, bandwidth=options.bandwidth or rates.bandwidth)
    cores = usable_cores()
    hardware = cpu_hardware(
        rates,
        options.node or cores,
        cores / threads,
        link=_link(options.link, rates.link or _CPU_LINK),
        network=_link(options.network, _NETWORKS["cpu"]),
    )
    return hardware, f"{_plural(threads, 'thread')} of a CPU, {'stated' if stated else 'measured here'}"


def cpu_hardware(
    rates: Rates, node: int, cores: float, link: Link = _CPU_LINK, network: Link = _NETWORKS["cpu"]
) -> Hardware:
    """Return a machine of CPUs: a node has `node` ranks and `cores` that compute at full speed."""
    flops = {"float32": rates.flops}
    return Hardware(flops, rates.bandwidth, 0.0, 0.0, _STEP, node, link, network, None, cores, False, hierarchical=True)


def _of_gpus(options: ScalingOptions, precision: str) -> tuple[Hardware, str]:
    from dptrain.backend.cuda.cost.roofline import GPUS, GRAPH_SECONDS, NODE_SECONDS

    gpu = next(candidate for candidate in GPUS if candidate.name == (options.gpu or "H100"))
    names = {"FP32": "float32", "TF32": "tf32", "half": "half"}
    rates = {names[unit]: options.flops or _REACHED_BY_PRODUCTS * peak for unit, peak in gpu.peaks.items()}
    hardware = Hardware(
        rates,
        options.bandwidth or gpu.bandwidth,
        NODE_SECONDS,
        _LEAST,
        GRAPH_SECONDS,
        options.node or 8,
        _link(options.link, Link(_REACHED_BY_LINKS * gpu.link, _NVLINK_LATENCY)),
        _link(options.network, _NETWORKS["cuda"]),
        gpu.memory,
    )
    return hardware, f"{gpu.name}, SXM, by its data sheet"


def _link(stated: Stated | None, default: Link) -> Link:
    if stated is None:
        return default
    return Link(stated.bandwidth, default.latency if stated.latency is None else stated.latency)


def of_model(
    model: Model, batch_size: int, *, dtype: str | None = None, bucket_mb: float | None = None
) -> list[Scaling]:
    """Return a compiled model's training step in all parallel modes; `bucket_mb` is 10^6 bytes a message."""
    program = traced_program(model, batch_size, dtype=dtype)
    if model._device_options.get("device") == "cuda":
        program = with_precision(program, model._device_options.get("precision", "float32"), "half")
    slots = {weight: list(model.optimizer._slots_of(weight).values()) for weight in model.trainable_weights}
    nbytes = None if bucket_mb is None else int(1e6 * bucket_mb)
    comm_dtype = model._compile_arguments.get("comm_dtype")
    kinds = kinds_of_parallelism(program, slots)
    return [
        Scaling(program, parallelism, slots, nbytes, None if parallelism.scheme == "pipeline" else comm_dtype)
        for parallelism in kinds
    ]


def report(
    model: Model, config: Config, options: ScalingOptions, hardware: Hardware, source: str, dtype: str | None
) -> str:
    """Return advice and tables for all modes; `source` says where the machine's numbers come from."""
    batch = config.train.batch_size
    scalings = of_model(model, batch, dtype=dtype, bucket_mb=config.bucket_mb)
    if hardware.hierarchical:  # as data parallelism is
        scalings = [scaling for scaling in scalings if scaling.parallelism.scheme != "hierarchical"]

    def rows(ranks: int) -> int:
        return batch * ranks if options.weak else batch

    alone = scalings[0].predict(1, rows(1), hardware)
    predictions = [[scaling.predict(ranks, rows(ranks), hardware) for scaling in scalings] for ranks in options.ranks]
    best = [_best(of_ranks, hardware) for of_ranks in predictions]
    parameters = sum(size(weight.shape) for weight in model.trainable_weights)
    kind = f"weak scaling, {batch} rows a rank" if options.weak else f"strong scaling, global batch {batch}"
    lines = []
    for text in _advice([prediction for prediction in best if prediction is not None], alone, scalings[0], hardware):
        lines += _filled(text)
    lines += [
        "",
        *_filled(f"will it scale: train step of {model.name!r}, {parameters:,} trained parameters, {kind}"),
        *_filled("predicted from operations, bytes and messages of the placed program, not measured (docs/scaling.md)"),
        *_filled(f"machine: {source}; {_shown(hardware)}"),
    ]
    for of_mode in zip(*predictions, strict=True):
        name = of_mode[0].mode
        source = _NODE_FIRST if hardware.hierarchical and name == "data parallel" else _ABOUT[name]
        lines += ["", f"{name}: {source}", *_table(of_mode, alone, best, hardware)]
    lines += ["", *_filled(_LEGEND)]
    return "\n".join(lines)


def _best(of_ranks: Sequence[StepPrediction], hardware: Hardware) -> StepPrediction | None:
    """Return the fastest mode that fits into memory, the first among equals; None if none fits."""
    fitting = [prediction for prediction in of_ranks if _fits(prediction, hardware)]
    least = min((prediction.seconds for prediction in fitting), default=0.0)
    return next((prediction for prediction in fitting if prediction.seconds <= _ALIKE * least), None)


def _fits(prediction: StepPrediction, hardware: Hardware) -> bool:
    return hardware.memory is None or prediction.memory.total <= hardware.memory


def _advice(best: Sequence[StepPrediction], alone: StepPrediction, plain: Scaling, hardware: Hardware) -> Iterator[str]:
    """Yield advice, given each number of ranks' best mode, one rank's, and the data-parallel step."""
    if not best:
        yield f"No mode fits into {_bytes(hardware.memory or 0)} per rank: use a smaller model or batch, or more ranks."
        return
    if not _fits(alone, hardware):
        needed, most = _bytes(alone.memory.total), _bytes(hardware.memory or 0)
        yield f"One rank would need {needed} and has {most}: use {best[0].ranks} at least, with {best[0].mode}."
    worth = [prediction for prediction in best if prediction.efficiency(alone) >= _WORTH]
    chosen = worth[-1] if worth else best[0]
    if worth:
        times, part = _digits(chosen.speed / alone.speed), chosen.efficiency(alone)
        gain = f"{times} times the speed of one rank, {part:.0%} efficiency"
        upto = "one rank" if chosen.ranks == 1 else f"up to {chosen.ranks} ranks"
        yield f"Use {upto}: {chosen.mode}, {_time(chosen.seconds)} per step ({gain})."
    else:
        yield f"No number of ranks in this range reaches {_WORTH:.0%} of one rank's samples/s per rank."
    modes_of: dict[str, list[int]] = {}
    for prediction in best:
        modes_of.setdefault(prediction.mode, []).append(prediction.ranks)
    fastest = "; ".join(f"{mode} on {', '.join(map(str, ranks))}" for mode, ranks in modes_of.items())
    yield f"Fastest mode, the simplest where they differ by less than {_ALIKE - 1:.0%}: {fastest}."
    for fewer, more in pairwise(best):
        if more.speed < _GAIN * fewer.speed:
            steps = f"{_time(fewer.seconds)} per step on {fewer.ranks}, {_time(more.seconds)} on {more.ranks}"
            yield f"More than {_plural(fewer.ranks, 'rank')} for one training gain nothing: {steps}."
            break
    group, widest = (alone if _fits(alone, hardware) else best[0]), best[-1]
    runs = widest.ranks // group.ranks
    speed = runs * group.speed * hardware.busy(group.ranks) / hardware.busy(widest.ranks)
    if runs > 1 and speed > _GAIN * widest.speed:
        yield (
            f"Independent runs use them better: a sweep of {runs} runs (seeds, settings), each on "
            f"{_plural(group.ranks, 'rank')}, trains {_digits(speed / widest.speed)} times the samples/s of one run on "
            f"{widest.ranks}."
        )
    if (idle := plain.idle(alone.rows, hardware)) > _IDLE:
        yield f"This step leaves a GPU idle for {idle:.0%} of the time: several runs on each, in packs, use it better."
    if any(prediction.mode.startswith("hierarchical") for prediction in best):
        same = plain.predict(chosen.ranks, chosen.rows, hardware)
        yield (
            "With --comm host dptrain reduces within nodes first; NCCL chooses its own algorithm, and with a single "
            f"ring a step takes up to {_time(same.seconds)} on {_plural(same.ranks, 'rank')}."
        )


def _table(
    of_mode: Sequence[StepPrediction], alone: StepPrediction, best: Sequence[StepPrediction | None], hardware: Hardware
) -> list[str]:
    rows: list[tuple[str, ...]] = [_HEADS]
    for prediction, first in zip(of_mode, best, strict=True):
        mark = "*" if prediction is first else "" if _fits(prediction, hardware) else "!"
        sizes = (
            prediction.memory.weights,
            prediction.memory.gradients,
            prediction.memory.slots,
            prediction.memory.activations,
        )
        numbers = (
            _time(prediction.seconds),
            _time(prediction.compute),
            f"{prediction.efficiency(alone):.1%}",
            _bytes(prediction.sent),
        )
        rows.append(
            (
                str(prediction.ranks),
                prediction.mesh,
                *numbers,
                *map(_bytes, sizes),
                f"{_bytes(prediction.memory.total)}{mark or ' '}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shown(hardware: Hardware) -> str:
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in hardware.rates.items())
    memory = "" if hardware.memory is None else f", {_bytes(hardware.memory)} a rank"
    links = [
        f"{name} {_bytes(link.bandwidth)}/s, {1e6 * link.latency:.3g} us"
        for name, link in (("link", hardware.link), ("network of a node", hardware.network))
    ]
    return (
        f"products reach {rates} Gflop/s, memory {_bytes(hardware.bandwidth)}/s{memory}; "
        f"{_plural(hardware.node, 'rank')} a node; {'; '.join(links)}"
    )


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds / 1e-6)} us"


def _bytes(nbytes: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= factor:
            return f"{_digits(nbytes / factor)}{unit}"
    return f"{nbytes:.0f}B"


def _digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_long_words=False)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
