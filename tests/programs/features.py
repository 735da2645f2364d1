"""What is in a case of those situations that random programs must reach."""

import re
from collections.abc import Iterator
from itertools import pairwise, permutations

import numpy as np

from dptrain.backend.cpu.convolutions import implementation_of
from dptrain.program.body import Body, body_of, has_body, is_number, steps_of, with_steps
from dptrain.program.dims import Dim
from dptrain.program.gradient import topological
from dptrain.program.lowering import ConvolutionLowering, HostCall, RandomBits, lowering_of
from dptrain.program.program import Program
from dptrain.program.sharding.messages import stages
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import OPS, Node, Tensor
from dptrain.runtime.types import is_narrow
from tests.programs.case import Case
from tests.programs.memory import WAYS

_VIEWS = {"reshape_to": "reshape", "transpose_to": "transpose", "getitem": "slice"}
_ORDERS = [f"{a}, then {b}" for a, b in permutations(_VIEWS.values(), 2)]
_PASSED = ("another carry", "another carry's", "a sum with another carry", "a capture", "a constant")
_LOOPS = frozenset(
    {f"loop {what}" for what in ("in a loop", "backwards", "of no step", "of one step", "of several carries")}
    | {f"loop {what}" for what in ("with captures", "with a whole number", "with random numbers", "in half precision")}
    | {f"branch {what}" for what in ("in a loop", "with a loop", "in a branch", "with random numbers", "with captures")}
    | {f"{what} with a value that nobody reads" for what in ("loop", "branch")}
    | {"loop of unknown length", "loop of unknown length in a loop", "loop that stays a summand"}
    | {f"{kind} whose next carry is {what}" for kind in ("loop", "loop of unknown length") for what in _PASSED}
    | {f"loop whose next carry is {what}" for what in ("a slice", "stacked")}
    | {f"loop that stacks {what}" for what in ("a carry", "a capture", "a slice", "a tensor twice")}
    | {"gradient of a loop", "gradient of a branch"}
    | {f"line with {name}" for name in ("cond", "switch", "while_loop", "vectorized_map", "associative_scan", "remat")}
)
# Which a CPU alone has.
TILED = frozenset(
    f"{op} of many channels {implementation}"
    for op in ("conv2d", "conv2d_input")
    for implementation in ("in tiles", "as patches")
)
# All that `features` may return.
WANTED = frozenset(
    {f"{place} a product: {order}" for place in ("before", "behind") for order in _ORDERS}
    | {"strided slice", "slice backwards", "dilation of height", "dilation of width", "batch by one matrix"}
    | {"gradient of a convolution with strides", *TILED}
    | {"width of a multiple of 8", "512 terms and more", "more than 64 rows with more than 32 columns"}
    | {f"{count} {unit}" for count in ("0", "1", "more than 1024") for unit in ("rows", "steps")}
    | {
        "rows that meet",
        "several rows for each of the batch",
        "flag from a number",
        "whole number from a fraction",
        "number from a flag",
    }
    | {"NaN and infinities", "several float64 tensors in one message", "several variables taken by row"}
    | {"alone, pack, alone", "2 ranks", "3 ranks", "a rank without rows", "gradient", "update", "random numbers"}
    | {f"in memory {way}" for way in WAYS}
    | _LOOPS
    | {f"op {name}" for name, op in OPS.items() if not isinstance(op.lowering, HostCall)}  # of which no code is made
)


def features(case: Case) -> set[str]:
    """Return what is in a case, of `WANTED`."""
    program = case.trace()
    names = {f"op {tensor.op.name}" for tensor in program.tensors if tensor.op is not None}
    for tensor in program.tensors:
        names |= set(_of_tensor(tensor))
    names |= {f"{name} rows" for name in _amount(case.rows)} | {f"{name} steps" for name in _amount(case.steps)}
    if any(isinstance(n, Dim) and n.scale > 1 for tensor in program.tensors for n in tensor.shape):
        names.add("several rows for each of the batch")
    if any("special" in text for text in case.leaves.values()):
        names.add("NaN and infinities")
    tables = {tensor.inputs[0].variable for tensor in program.tensors if tensor.op is OPS["take_rows"]} - {None}
    if len(tables) > 1:
        names.add("several variables taken by row")
    if case.shards:
        names |= {f"{len(case.shards)} ranks"} | ({"a rank without rows"} if 0 in case.shards and case.rows else set())
        placed = place(program)
        messages = [message for stage in stages(placed) for message in stage.messages]
        if any(sum(tensor.dtype == np.float64 for tensor in message) > 1 for message in messages):
            names.add("several float64 tensors in one message")
        if placed.shape_specialised and not program.shape_specialised:
            names.add("rows that meet")
    names |= {f"in memory {way}" for way in case.memory.values()}
    names |= {"alone, pack, alone"} if case.pack else set()
    names |= {"gradient"} if any("gradients" in line for line in case.lines) else set()
    names |= {"update"} if case.updates else set()
    names |= {"random numbers"} if any("seed" in line for line in case.lines) else set()
    names |= set(_behind_products(program)) | set(_of_loops(program))
    calls = {call for line in case.lines for call in re.findall(r"\w+(?=\()", line)}
    names |= {f"line with {call}" for call in calls}
    if case.shards and any(has_body(tensor) and placed.placements[tensor].partial for tensor in placed.tensors):
        names.add("loop that stays a summand")
    return names & WANTED


def _amount(count: int) -> list[str]:
    return [name for name, holds in (("0", count == 0), ("1", count == 1), ("more than 1024", count > 1024)) if holds]


def _of_tensor(tensor: Tensor) -> Iterator[str]:
    """Yield what a tensor is."""
    if tensor.op is None:
        return
    name, shapes = tensor.op.name, [read.shape for read in tensor.inputs]
    if name == "getitem" and all(tensor.shape):
        steps = [part[2] for part in tensor.attributes["key"] if isinstance(part, tuple)]
        yield from ["strided slice"] if any(step > 1 for step in steps) else []
    if name == "take_rows" and tensor.inputs[1].value is not None and np.all(np.diff(tensor.inputs[1].numpy()) < 0):
        yield "slice backwards"
    if name == "conv2d":
        height, width = tensor.attributes["dilation"]
        yield from ["dilation of height"] if height > 1 and shapes[1][0] > 1 else []
        yield from ["dilation of width"] if width > 1 and shapes[1][1] > 1 else []
    if name in ("conv2d", "conv2d_input") and shapes[1][:2] == (3, 3) and min(shapes[1][2:]) >= 32:
        assert isinstance(tensor.op.lowering, ConvolutionLowering)
        tiled = implementation_of(tensor) == "winograd"
        yield f"{name} of many channels {'in tiles' if tiled else 'as patches'}"
    if name == "conv2d_input" and max(tensor.attributes["strides"]) > 1:
        yield "gradient of a convolution with strides"
    if name == "batch_matmul":
        rows, width, terms = tensor.shape[-2], tensor.shape[-1], shapes[0][-1]
        yield from ["batch by one matrix"] if len(shapes[0]) > 2 and np.prod(shapes[1][:-2]) == 1 else []
        yield from ["width of a multiple of 8"] if width and width % 8 == 0 else []
        yield from ["512 terms and more"] if terms >= 512 else []
        yield from ["more than 64 rows with more than 32 columns"] if rows > 64 and width > 32 else []
        for read in tensor.inputs:
            yield from _orders("before", _chain(read))
    if name in ("cast_to", "round_to"):
        kinds = tensor.inputs[0].dtype.kind, tensor.dtype.kind
        yield from ["flag from a number"] if kinds[0] != "b" and kinds[1] == "b" else []
        yield from ["whole number from a fraction"] if kinds[0] == "f" and kinds[1] in "iu" else []
        yield from ["number from a flag"] if kinds[0] == "b" and kinds[1] != "b" else []


def _chain(tensor: Tensor) -> list[Tensor]:
    """Return the views that a tensor is, the outermost first, and what they are views of."""
    views = [tensor]
    while views[-1].op is not None and views[-1].op.name in _VIEWS:
        views.append(views[-1].inputs[0])
    return views


def _orders(where: str, chain: list[Tensor]) -> Iterator[str]:
    kinds = [_VIEWS[view.op.name] for view in reversed(chain[:-1]) if view.op is not None]
    for first, second in pairwise(kinds):
        yield f"{where} a product: {first}, then {second}"


def _of_loops(program: Program) -> Iterator[str]:
    """Yield what the loops are."""
    read = {tensor for tensor in with_steps(program.tensors) for tensor in tensor.inputs} | set(program.results)
    values: dict[Node, set[int]] = {}
    for tensor in with_steps(program.tensors):
        if not has_body(tensor):
            continue
        body, length = body_of(tensor), steps_of(tensor)
        yield from ["loop backwards"] if tensor.attributes.get("reverse") else []
        yield from ["loop of unknown length"] if length is None else []
        yield from [f"loop of {'no' if length == 0 else 'one'} step"] if length in (0, 1) else []
        yield from ["loop of several carries"] if len(body.carries) > 1 else []
        yield from ["loop with captures"] if body.captures else []
        yield from ["loop with a whole number"] if any(carry.dtype.kind in "iu" for carry in body.carries) else []
        yield from ["gradient of a loop"] if any(carry.name == "gradient" for carry in body.carries) else []
        if all((carry.name or "").startswith("carry") for carry in body.carries):  # no gradient
            yield from _of_results(body, "loop" if length is not None else "loop of unknown length")
        inside = topological(body.results)
        nested = {"branch" if body_of(tensor).guarded else "loop" for tensor in inside if has_body(tensor)}
        if body.guarded:
            yield from (f"branch {'in a branch' if kind == 'branch' else 'with a loop'}" for kind in nested)
            draws = any(isinstance(lowering_of(x), RandomBits) for x in inside)
            yield from ["branch with random numbers"] if draws else []
            yield from ["branch with captures"] if len(body.captures) > 1 else []
            yield from ["gradient of a branch"] if body.slices else []
            values.setdefault(tensor.node, set()).update([tensor.index] if tensor in read else [])
            continue
        yield from ["branch in a loop"] if "branch" in nested else []
        yield from ["loop in a loop"] if "loop" in nested else []
        unknown = any(has_body(inner) and steps_of(inner) is None for inner in inside)
        yield from ["loop of unknown length in a loop"] if unknown else []
        yield from ["loop with random numbers"] if any(isinstance(lowering_of(x), RandomBits) for x in inside) else []
        yield from ["loop in half precision"] if any(is_narrow(carry.dtype) for carry in body.carries) else []
        values.setdefault(tensor.node, set()).update([tensor.index] if tensor in read else [])
    for node, indices in values.items():
        kind = "branch" if body_of(node).guarded else "loop"
        yield from [f"{kind} with a value that nobody reads"] if len(indices) < len(body_of(node).results) else []


def _of_results(body: Body, kind: str) -> Iterator[str]:
    """Yield which tensors a step passes on, more than once or as they are."""
    following, captures, slices = list(map(id, body.following)), set(map(id, body.captures)), set(map(id, body.slices))
    for carry, new in zip(body.carries, body.following, strict=True):
        others = {id(other) for other in body.carries if other is not carry}
        summed = new.op is OPS["add"] and any(id(term) in others for term in new.inputs)
        same = {
            "another carry": id(new) in others,
            "another carry's": following.count(id(new)) > 1,
            "a sum with another carry": summed,
            "a capture": id(new) in captures,
            "a slice": id(new) in slices,
            "a constant": is_number(new),
            "stacked": any(new is stacked for stacked in body.stacked),
        }
        yield from (f"{kind} whose next carry is {what}" for what, holds in same.items() if holds)
    for number, stacked in enumerate(body.stacked):
        sources = {"a carry": set(map(id, body.carries)), "a capture": captures, "a slice": slices}
        sources["a tensor twice"] = set(map(id, body.stacked[:number]))
        yield from (f"{kind} that stacks {what}" for what, tensors in sources.items() if id(stacked) in tensors)


def _behind_products(program: Program) -> Iterator[str]:
    for tensor in program.tensors:
        chain = _chain(tensor)
        if chain[-1].op is OPS["batch_matmul"]:
            yield from _orders("behind", chain)
