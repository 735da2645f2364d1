"""Lines with loops and branches, for `draw.py`."""

import re
from typing import TYPE_CHECKING

from dptrain.program.dims import Dim

if TYPE_CHECKING:
    from tests.programs.draw import Drawing


def loop(d: "Drawing") -> None:
    """Steps over a tensor, or over several of a shape: forwards, backwards, none, one, in one another."""
    parts = _parts(d)
    of_step, dtype = d.pool[parts].tensor.shape[1:], d.pool[parts].tensor.dtype.name
    like = f"ops.sum({parts}, 0)"
    begins = [f"ops.zeros_like({like})", f"ops.tanh({like})", f"ops.ones_like({like})"]
    bodies = [
        *("(ops.tanh(c + x), c * x)", "(x, c)", "(0.5 * c + x, ops.sum(c))", "(c, x * c)", "(ops.sin(c) * x, x + 1)"),
        *("(ops.maximum(c, x), ops.where(c > x, c, 0.5))", "(ops.sigmoid(c - x), ops.stack([c, x]))"),
        f"(ops.scan(lambda a, b: (ops.cos(a) + b, None), c, ops.stack([x, c]), reverse={d.chance(0.5)})[0], x)",
        "(ops.fori_loop(1, 4, lambda n, a: 0.5 * a + x * ops.cast(n, x.dtype), c), c)",
        "(remat(lambda a, b: ops.tanh(ops.sin(a) * b) + b)(c, x), c)",
        "(ops.cond(ops.sum(x) > 0, lambda: c + x, lambda: c * 0.5), c)",
        "ops.switch(ops.cast(ops.sum(c), 'int32'), [lambda: (c, x), lambda: (ops.sin(c) * x, c), lambda: (x, x * x)])",
        "(ops.cond(ops.sum(c) < 1, lambda: ops.fori_loop(0, 3, lambda n, a: a * c + x, c), lambda: x), c)",
        "(ops.map(lambda a: ops.sin(a) + c, ops.stack([c, x]))[1], x)",
        "(ops.while_loop(lambda n, a: n < 2, lambda n, a: (n + 1, ops.tanh(a + x)), (0, c))[1], c)",
        f"(ops.stop_gradient(ops.fori_loop(0, {_count(d)}, lambda n, a: 0.5 * a + ops.sin(x), c)), x)",
    ]
    if of_step and not isinstance(of_step[-1], Dim) and of_step[-1]:
        w = d.leaf("variable", [int(of_step[-1])], dtype, "normal")
        begins += [f"{w} + ops.zeros_like({like})"]
        bodies += [f"(ops.tanh(c * {w} + x), ops.sum(c, -1))", f"(x * {w}, c + {w})", f"(c + {w} * {w}, x)"]
        bodies += [f"(ops.cond(ops.sum(x) > 0.5, lambda: c * {w} + x, lambda: c - ops.sin({w})), c)"]
        bits = f"ops.cast(seeds.bits((x.shape[0], {int(of_step[-1])})), x.dtype) * 2.0 ** (-32)"
        bodies += [f"(ops.tanh(c) + {bits}, x * c)"] * 2 if len(of_step) == 2 else []
    if len(of_step) == 2 and not isinstance(of_step[1], Dim) and 0 < of_step[1] < 40:
        w, u = (d.leaf("variable", [int(of_step[1])] * 2, dtype, "normal") for _ in range(2))
        bodies += [f"(ops.tanh(x @ {w} + c @ {u}), c)", f"(ops.sigmoid(c @ {u}) * x, x @ {w} @ {u})"] * 2
        bodies += [f"(remat(lambda a, b: ops.tanh(a @ {w}) * ops.sigmoid(b @ {u}) + a)(c, x), x)"]
    begin, body, options = d.choose(begins), d.choose(bodies), f"reverse={d.chance(0.4)}"
    number = len(d.lines)
    if dtype == "float32" and d.chance(0.08):
        half = f"'{d.choose(['bfloat16', 'float16'])}'"
        if d.chance(
            0.7
        ):  # weights in half precision, made before the loop or in each step, and copies that are stacked
            body = re.sub(r"(?<=@ )(\w+)|\b(\w+)(?= @ )", rf"ops.cast(\g<0>, {half})", body)
            body = f"(lambda r: (r[0], ops.cast(r[1], 'float32')))({body})"
        call = f"lambda c, x: {body}, ops.cast({begin}, {half}), ops.cast({parts}, {half}), {options}"
        d.line(f"ops.cast(ops.scan({call})[{d.choose([0, 1])}], 'float32')")
    else:
        d.line(f"ops.scan(lambda c, x: {body}, {begin}, {parts}, {options})", (f"t{number}", f"u{number}"))
    if d.chance(0.3):
        d.line(f"remat(lambda x: ops.tanh(ops.exp(-x * x) + {parts}[:1] * x))({parts})")


def _parts(d: "Drawing") -> str:
    """Return the name of a tensor whose first axis steps may go along."""
    x = d.pick(lambda candidate: candidate.tensor.dtype.kind == "f" and 0 < candidate.tensor.ndim < 4)
    length = x.tensor.shape[0]
    if isinstance(length, Dim) or length > 5 or d.chance(0.3):
        return d.line(f"ops.stack([{', '.join([x.name, f'-{x.name}', f'0.5 * {x.name}'][: d.choose([1, 2, 3])])}])")
    return d.line(f"{x.name}[:{d.choose([0, 1, 2])}]") if d.chance(0.2) else x.name


def several(d: "Drawing") -> None:
    """Carries of several shapes and types, which may change places and placement, and values that nobody reads."""
    parts = _parts(d)
    like = f"ops.sum({parts}, 0)"
    bodies = [  # of two carries like a slice, a number and a whole number
        "((ops.tanh(b + x), a, n + ops.sum(x), k), (b * x, n))",
        "((x, a * 0.5, n * 0.5, k + 1), (a, ops.sum(x * b)))",
        "((a + x * ops.cast(k, x.dtype), b, n, k + 1), (x, ops.cast(k, 'float32')))",
        "((a * n, b + x, ops.tanh(n + ops.sum(a)), 2 * k), (x * n, a - b))",
        "((a, ops.where(a > b, b, x), ops.mean(ops.sin(x)), k - 1), (a * b, n * ops.ones_like(x)))",
        "((ops.sin(b), ops.cos(a) + x * n, n * 0.5, k), (ops.stack([a, b]), ops.sum(b)))",
    ]
    begins = [f"ops.zeros_like({like})", f"ops.tanh({like})", like, f"ops.ones_like({like})"]
    number = d.choose([f"ops.sum({like})", f"ops.zeros_like(ops.sum({like}))", f"ops.tanh(ops.mean(ops.sin({like})))"])
    values = ["r[0][0]", "r[0][1]", "r[0][2]", "r[0][3]", "r[1][0]", "r[1][1]"]
    read = [values[place] for place in sorted(d.rng.permutation(len(values))[: d.choose([1, 2, 3])])]
    names = tuple(f"t{len(d.lines)}{'_' * place}" for place in range(len(read)))
    call = f"lambda c, x: (lambda a, b, n, k: {d.choose(bodies)})(*c)"
    call += f", ({d.choose(begins)}, {d.choose(begins)}, {number}, np.array({d.choose([0, 1, 3])})), {parts}"
    read_values = f"({', '.join(read)},)" if len(read) > 1 else read[0]
    d.line(f"(lambda r: {read_values})(ops.scan({call}, reverse={d.chance(0.4)}))", names)


def aliases(d: "Drawing") -> None:
    """Next carries and stacked results with repetition: equal, exchanged, captures, slices, constants, summands."""
    parts = _parts(d)
    like = f"ops.sum({parts}, 0)"
    capture = d.line(f"ops.tanh({like})")
    begins = [f"ops.zeros_like({like})", f"ops.sin({like})", like, capture]
    numbers = [f"ops.sum({like})", f"ops.mean(ops.sin({like}))", f"ops.sum({capture})"]
    computed = ["ops.tanh(a + x)", "a * x", "a + b", "b - 0.5 * m", f"ops.sin(m) * {capture}", "ops.maximum(a, b) + n"]
    p, q = d.choose(computed), d.choose(computed)
    tensors = ["a", "b", "m", "p", "p", "q", "x", capture, "0.5 * ops.ones_like(x)", "0.5 * a", "p + b"]
    following = ", ".join(d.choose(tensors) for _ in range(3)) + f", {d.choose(['n', '0.25', 'ops.sum(p)', '0.5 * n'])}"
    stacked = ", ".join(d.choose([*tensors, "n", "0.25"]) for _ in range(2))
    carries = ", ".join(d.choose(begins) for _ in range(3)) + f", {d.choose(numbers)}"
    values = ["r[0][0]", "r[0][1]", "r[0][2]", "r[0][3]", "r[1][0]", "r[1][1]"]
    read = [values[index] for index in sorted(d.rng.permutation(len(values))[: d.choose([2, 3, 6])])]
    names = tuple(f"t{len(d.lines)}{'_' * index}" for index in range(len(read)))
    step = f"lambda c, x: (lambda a, b, m, n: (lambda p, q: (({following}), ({stacked})))({p}, {q}))(*c)"
    call = f"ops.scan({step}, ({carries}), {parts}, reverse={d.chance(0.4)})"
    d.line(f"(lambda r: ({', '.join(read)},))({call})", names)
    following = d.choose([following, "b, a, a, n", "p, p, b, 0.25", f"{capture}, m, {capture}, n"])
    body = re.sub(r"\bx\b", capture, f"lambda a, b, m, n: (lambda p, q: ({following}))({p}, {q})")
    again = d.choose(
        [
            f"ops.fori_loop(0, 3, lambda k, c: ({body})(*c), ({carries}))",
            f"ops.while_loop(lambda a, b, m, n: ops.sum(a * b) < 9, {body}, ({carries}), {d.choose([1, 2, 3])})",
        ]
    )
    if d.chance(0.4):
        first = f"lambda k, *c: (k + 1, *({body})(*c)), (0, {carries})"
        again = f"tuple(map(ops.stop_gradient, ops.while_loop(lambda k, *c: k < {_count(d)}, {first})[1:]))"
    d.line(again, tuple(f"u{len(d.lines)}{'_' * index}" for index in range(4)))


def branch(d: "Drawing") -> None:
    """What a number that is not known chooses: values, of which not all are read, weights, random numbers, steps."""
    known = d.float()
    x, shape = known.name, known.tensor.shape
    bodies = [f"ops.tanh({x}) * 2, ops.sum({x})", f"{x} - ops.sum({x}), ops.sum({x} * {x})", f"{x}, 0.5 * ops.sum({x})"]
    bodies += [
        f"ops.scan(lambda a, b: (ops.sin(a) + b, a), {x}, ops.stack([{x}, -{x}]))[0], ops.sum(ops.exp(-{x} * {x}))"
    ]
    bodies += [f"ops.cond(ops.sum(ops.sin({x})) > 0, lambda: {x} * {x}, lambda: ops.cos({x})), ops.sum({x}) - 1"]
    if shape and not isinstance(shape[-1], Dim) and 0 < shape[-1] < 40:
        width = int(shape[-1])
        w = d.leaf("variable", [width], known.tensor.dtype.name, "normal")
        bodies += [f"{x} * {w}, ops.sum({w} * {w})", f"ops.sin({w}) + {x}, ops.sum({x})"]
        if len(shape) == 2:
            u = d.leaf("variable", [width, width], known.tensor.dtype.name, "normal")
            bodies += [f"ops.tanh({x} @ {u}), ops.sum({u})", f"{x} @ ({u} @ {u}), ops.sum({x} @ {u})"]
            bits = f"ops.cast(seeds.bits(({x}.shape[0], {width})), {x}.dtype) * 2.0 ** (-32)"
            bodies += [f"{x} * {bits}, ops.sum({x})"]
    chooses = [f"ops.sum({x}) > 0", f"ops.sum({x}) < 1", f"ops.sum(ops.sin({x})) > 0.25"]
    read = d.choose(["[0]", "[0]", "[1]", ""])
    names = (f"t{len(d.lines)}", f"u{len(d.lines)}") if not read else ()
    if d.chance(0.2) and all(shape):  # where the other makes no numbers
        d.line(f"ops.cond(ops.min({x}) > 0, lambda: ops.sqrt({x}) + ops.log({x}), lambda: {x} * 0.5)")
    elif d.chance(0.6):
        first, second = d.choose(bodies), d.choose(bodies)
        d.line(f"ops.cond({d.choose(chooses)}, lambda: ({first}), lambda: ({second})){read}", names)
    else:
        index = d.leaf("input", [], "int64", "below 5")
        branches = ", ".join(f"lambda: ({d.choose(bodies)})" for _ in range(d.choose([2, 3, 4])))
        d.line(f"ops.switch({index} - 1, [{branches}]){read}", names)


def _count(d: "Drawing") -> str:
    """Return the name of a number below 4 that is not known while a step is traced."""
    return d.leaf("input", [], "int64", "below 4")


def while_loop(d: "Drawing") -> None:
    """Steps up to a number, as long as a condition holds."""
    if d.chance(0.6):
        unbounded(d)
        return
    x = d.float().name
    goes_on = d.choose(
        [f"ops.sum(ops.absolute(a)) < {d.choose([3, 30, 300])}", f"ops.sum(a * a) + n < {d.choose([2, 9])}"]
    )
    step = d.choose([f"1.5 * a + {x}", f"ops.tanh(a) + {x}", "2 * a + 0.25"])
    call = f"lambda n, a: {goes_on}, lambda n, a: (n + 1, {step}), (0, ops.sin({x})), {d.choose([0, 1, 2, 3, 6])}"
    d.line(f"ops.while_loop({call})[{d.choose([1, 1, 0])}]")


def unbounded(d: "Drawing") -> None:
    """A loop of unknown length, of up to three steps, whose carries may change placement."""
    known = d.float()
    x, shape, dtype, count = known.name, known.tensor.shape, known.tensor.dtype.name, _count(d)
    steps = [f"0.5 * a + {x}", "ops.tanh(a) + b", "a * ops.cast(n, a.dtype)", f"ops.sin(a) - {x}", "b"]
    totals = ["b + 1", "0.5 * b", "a"]
    begins = [f"ops.cos({x})", f"{x}", f"ops.zeros_like({x})"]
    nested = f"ops.scan(lambda c, p: (ops.sin(c) + p, None), a, ops.stack([{x}, b]))[0]"
    steps += [nested, f"ops.fori_loop(0, {count} - n, lambda i, c: c * 0.5 + a, b)"]
    steps += [f"ops.cond(n > 1, lambda: a * 2, lambda: a - {x})"]
    if shape and not isinstance(shape[-1], Dim) and shape[-1]:
        w = d.leaf("variable", [int(shape[-1])], dtype, "normal")
        steps += [f"ops.tanh(a * {w})", f"a + {w} * {w}"]
        if len(shape) == 2 and shape[-1] < 40:
            u = d.leaf("variable", [int(shape[-1])] * 2, dtype, "normal")
            steps += [f"ops.tanh(a @ {u} + {x})"] * 2
            bits = f"ops.cast(seeds.bits(({x}.shape[0], {int(shape[-1])})), {x}.dtype) * 2.0 ** (-32)"
            steps += [f"a * 0.5 + {bits}"]
    goes_on = f"n < {count}"
    if d.device != "cuda":  # where ranks may communicate in it
        sums = [f"ops.sum(a * a) < {d.choose([3, 30, 300])}", "ops.any(a < 0.5)", "ops.sum(b) < 9"]
        goes_on = d.choose([goes_on, f"ops.logical_and({goes_on}, {d.choose(sums)})"])
        totals += [f"b + ops.sum({x})", "b + ops.mean(a)" if all(shape) else "b"]
    body = f"lambda n, a, b: (n + 1, {d.choose(steps)}, {d.choose(totals)})"
    loop = f"ops.while_loop(lambda n, a, b: {goes_on}, {body}, (0, {d.choose(begins)}, {d.choose(begins)}))"
    d.line(f"ops.stop_gradient({loop}[{d.choose([1, 1, 2])}])" if d.chance(0.85) else f"ops.cast({loop}[0], 'int32')")


def mapped(d: "Drawing") -> None:
    """Each part by itself, and all parts up to each one."""
    parts = _parts(d)
    each = d.choose(
        ["ops.sin(x) * x", "ops.sum(x)", "(ops.map(lambda a: a * x, ops.stack([x, -x])), x)[0]", "x * x - 1"]
    )
    reverse = d.chance(0.5)
    joined = f"(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (ops.tanh({parts}), {parts}), reverse={reverse})[1]"
    axis = int(d.rng.integers(d.pool[parts].tensor.ndim))
    d.line(
        d.choose(
            [
                f"ops.map(lambda x: {each}, {parts})",
                f"ops.vectorized_map(lambda x: {each}, {parts})",
                f"ops.associative_scan{joined}",
                f"ops.associative_scan({d.choose(['ops.add', 'ops.maximum'])}, {parts}, {reverse}, {axis})",
            ]
        )
    )
