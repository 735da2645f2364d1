"""What loops carry, read and stack, and where that lies: random loops beside eager ones, and bugs that are noticed."""

from dataclasses import replace

import numpy as np
import pytest

from dptrain import ops
from dptrain.program.body import body_of, has_body, with_steps
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients, topological
from dptrain.program.program import ROWS, trace
from dptrain.program.schedule.loops import BUFFERS, Address, Repeat, repeat_of
from dptrain.program.tensor import differentiable
from tests.programs.draw import program as drawn
from tests.sample import sample
from tests.unit.program.schedule.interpreted_loops import MemoryOfLoops

LINES, WIDTH = 3, 2
COMPUTED = [
    lambda p, q: ops.tanh(p + q),
    lambda p, q: p * q,
    lambda p, q: ops.sin(p) - 0.5 * q,
    lambda p, q: ops.maximum(p, q),
    lambda p, q: ops.scan(lambda c, x: (ops.cos(c) + x, c * x), p, ops.stack([q, p]), reverse=True)[1][0],
    lambda p, q: ops.scan(lambda c, x: (x, c), p, ops.stack([q, p, q]))[0],
    lambda p, q: ops.fori_loop(0, 3, lambda n, c: (c[1], 0.5 * c[0] + q), (p, q))[0],
    lambda p, q: ops.cond(ops.sum(p) > 0, lambda: p * q, lambda: p - q),
]


class RandomLoop:
    """A loop whose next carries and stacked values are drawn among carries, slices, captures and what is computed."""

    def __init__(self, seed):
        rng = self._rng = np.random.default_rng(seed)
        self.carries, self.slices = int(rng.integers(1, 4)), int(rng.integers(0, 3))
        self.length, self.reverse = int(rng.choice([1, 2, 3, 4])), bool(rng.random() < 0.5)
        self.is_while = not self.slices and rng.random() < 0.6
        self.recipe = [tuple(map(int, rng.integers(0, 100, 3))) for _ in range(int(rng.integers(1, 4)))]
        self.following = list(map(int, rng.integers(0, 100, self.carries)))
        if rng.random() < 0.3:  # carries that change places
            self.following = list(map(int, rng.permutation(self.carries)))
        self.stacked = list(map(int, rng.integers(0, 100, int(rng.integers(1, 4)))))
        if rng.random() < 0.4:  # a next carry, too
            self.stacked[0] = self.following[0]
        self.begins = list(map(int, rng.integers(0, 5, self.carries)))
        read = rng.permutation(self.carries + len(self.stacked))
        self.read = sorted(map(int, read[: int(rng.integers(1, len(read) + 1))]))
        self.inputs = {name: rng.normal(size=(4, LINES, WIDTH)) for name in ("x", "z")}
        self.inputs |= {name: rng.normal(size=(LINES, WIDTH)) for name in ("y", "w")}
        self.inputs["n"] = np.array(rng.integers(0, 4))

    def __call__(self, x, z, y, w, n):
        captures = [y, ops.sin(w)]

        def step(carries, parts):
            pool = [*carries, *(parts or ()), *captures]
            for op, p, q in self.recipe:
                pool.append(COMPUTED[op % len(COMPUTED)](pool[p % len(pool)], pool[q % len(pool)]))
            choose = [pool[index % len(pool)] for index in (*self.following, *self.stacked)]
            return tuple(choose[: self.carries]), tuple(choose[self.carries :])

        chosen = ops.cond(ops.sum(y) > 0, lambda: ops.sin(y), lambda: y * w)
        firsts = tuple([y, ops.zeros_like(y), w * 0.5, ops.tanh(y), chosen][begin] for begin in self.begins)
        if self.is_while:
            last = ops.while_loop(lambda k, *c: k < n, lambda k, *c: (k + 1, *step(c, ())[0]), (0, *firsts))[1:]
            values = [*map(ops.stop_gradient, last)]
        else:
            parts = (x[: self.length], z[: self.length])[: self.slices]
            options = {"length": None if parts else self.length, "reverse": self.reverse}
            last, stacks = ops.scan(step, firsts, parts or None, **options)
            values = [*last, *stacks]
        outputs = {str(index): values[index] for index in self.read if index < len(values)} or {"0": values[0]}
        loss = ops.sum(ops.stack([ops.sum(ops.sin(value)) for value in outputs.values()]))
        grads = gradients(loss, [x, z, y, w]) if not self.is_while else []
        named = zip(("d x", "d z", "d y", "d w"), grads, strict=False)
        return outputs | {name: grad for name, grad in named if grad is not None}

    def eagerly(self):
        """Return what Python's own loops compute."""
        leaves = {name: differentiable(array) for name, array in self.inputs.items()}
        return {name: np.asarray(tensor.numpy()) for name, tensor in self(**leaves).items()}

    def trace(self):
        """Return the program."""
        return trace(self, {name: (array.shape, array.dtype) for name, array in self.inputs.items()})


def interpret(program, inputs, memory):
    """Return a program's outputs, by memory as addresses say."""
    leaves = {tensor: np.asarray(inputs[name], tensor.dtype) for name, tensor in program.inputs.items()}
    leaves |= {tensor: variable.numpy() for variable, tensor in program.state.items()}
    with np.errstate(all="ignore"):
        values = memory.values(program.outputs.values(), leaves)
    return {name: values[tensor] for name, tensor in program.outputs.items()}


def assert_equal(outputs, expected):
    """Compare what depends on inputs; gradients of what a loop does not need are zeros there, and none eagerly."""
    for name, value in outputs.items():
        wanted = expected[name] if name in expected or not name.startswith("d ") else np.zeros_like(value)
        np.testing.assert_allclose(value, wanted, rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("seed", sample(range(120), 3))
def test_random_loops(seed):
    loop = RandomLoop(seed)
    program, expected = loop.trace(), loop.eagerly()
    assert_equal(evaluate(program, loop.inputs)[0], expected)
    for shares in (False, True):
        memory = MemoryOfLoops(LINES, shares=shares, rng=np.random.default_rng(seed))
        assert_equal(interpret(program, loop.inputs, memory), expected)
        assert_loops_equal(program, loop.inputs, memory)


def test_random_loops_are_of_all_kinds():
    """Those that no search may lose."""
    seen, sums, repeats = set(), 0, []
    for seed in range(40):
        repeats += [repeat_of(tensor) for tensor in with_steps(RandomLoop(seed).trace().tensors) if has_body(tensor)]
    for repeat in repeats:
        leaves = {carry.leaf for carry in repeat.carries}
        seen |= {"while"} if repeat.length is None else {f"reverse {repeat.reverse}"}
        seen |= {"branch"} if repeat.guard is not None else set()
        seen |= {"exchanged" for carry in repeat.carries if carry.result in leaves - {carry.leaf}}
        seen |= {"slice" for carry in repeat.carries for part in repeat.slices if carry.result is part.leaf}
        seen |= {"capture" for carry in repeat.carries for part in repeat.captures if carry.result is part.leaf}
        seen |= {"stacked" for carry in repeat.carries for stack in repeat.stacks if carry.result is stack.result}
        seen |= {"nested" for tensor in topological(repeat.body.results) if has_body(tensor)}
        sums += repeat.body.sums
    kinds = {"while", "branch", "reverse True", "reverse False", "exchanged", "slice", "capture", "stacked", "nested"}
    assert (seen, sums > 0) == (kinds, True)


@pytest.mark.parametrize("seed", sample(range(60), 6))
def test_loops_of_random_programs(seed):
    case = drawn(seed)
    values = {name: value[: case.rows] if name == ROWS else value for name, value in case.values().items()}
    assert_loops_equal(case.trace(), values, MemoryOfLoops(case.rows, shares=bool(seed % 2)))


def assert_loops_equal(program, values, memory):
    """Compare all values of loops with those of the reference executor, given what it has computed for them."""
    loops = [tensor for tensor in program.tensors if has_body(tensor)]
    operands = dict.fromkeys(operand for tensor in loops for operand in tensor.inputs)
    named = {str(index): tensor for index, tensor in enumerate((*loops, *operands))}
    outputs, _ = evaluate(replace(program, outputs=named, updates={}, derived=None), values)
    leaves = {tensor: outputs[name] for name, tensor in named.items() if tensor in operands}
    with np.errstate(all="ignore"):
        results = memory.values(loops, leaves)
    for name, tensor in named.items():
        np.testing.assert_array_equal(results[tensor], outputs[name], err_msg=str(tensor))


def test_what_a_loop_carries_by_hand():
    def step(x, y):
        def add(carries, part):
            a, b = carries
            return (b, a + part), (part * y, b)

        (_, last), (_, before) = ops.scan(add, (y, ops.zeros_like(y)), x, reverse=True)
        return {"last": last, "before": before}

    program = trace(step, {"x": ((5, 2), np.float64), "y": ((2,), np.float64)})
    (loop, *_) = (tensor for tensor in program.tensors if has_body(tensor))
    repeat, body = repeat_of(loop), body_of(loop)
    assert (repeat.length, repeat.reverse, repeat.guard) == (5, True, None)
    assert [(carry.leaf, carry.result) for carry in repeat.carries] == list(
        zip(body.carries, body.following, strict=True)
    )
    assert [carry.input for carry in repeat.carries] == [0, 1]
    assert [part.input for part in repeat.slices] == [2]
    assert repeat.captures == ()
    assert [stack.value for stack in repeat.stacks] == [2]
    assert list(repeat.steps(lambda _: False)) == [0, 1, 2, 3, 4]
    assert list(map(repeat.position, range(5))) == [4, 3, 2, 1, 0]
    assert [eval(repeat.position_in_c("n", "5"), {"n": n}) for n in range(5)] == [4, 3, 2, 1, 0]
    assert repeat.counters(3) == {"slice": 1, "before": 2, "now": 1, "next": 0}
    assert repeat.counters_in_c("n", "5", lambda counter: f"{counter}_0") == [
        "const int slice_0 = 5 - 1 - n;",
        "const int now_0 = n % 2, next_0 = 1 - now_0;",
    ]
    assert repeat.last_buffer == 5 % BUFFERS
    assert repeat.reads() == [Address("buffers", 0, "now"), Address("buffers", 1, "now"), Address("input", 2, "slice")]
    assert repeat.writes({1, 2}) == {
        0: Address("buffers", 0, "next"),
        1: Address("buffers", 1, "next"),
        2: Address("value", 2, "slice"),
    }
    assert repeat.writes({1}).keys() == {0, 1}
    stacked = {1: 2}
    assert repeat.reads(stacked)[1] == Address("value", 2, "before", first=1)
    assert repeat.writes({2}, stacked)[1] == Address("value", 2, "slice")


class Forwards(Repeat):
    """A reversed loop takes the first slice first."""

    def position(self, step):
        return step


class OneBuffer(Repeat):
    """A step writes a carry where it reads it."""

    def counters(self, step):
        return super().counters(step) | {"next": step % BUFFERS}


class FirstBuffer(Repeat):
    """The last carries lie in the first buffer."""

    last_buffer = 0


class NextSlice(Repeat):
    """What is stacked in a step is read as the carry of that step."""

    def reads(self, stacked=None):
        return [
            replace(at, counter="slice") if at.counter == "before" else replace(at) for at in super().reads(stacked)
        ]


class InBuffer(Repeat):
    """A carry that is stacked is read from its buffer."""

    def reads(self, stacked=None):
        return super().reads()


class NoGuard(Repeat):
    """A branch is always taken."""

    guard = None


class WithoutEnd(Repeat):
    """A loop of unknown length has a step more."""

    def steps(self, goes_on):
        return super().steps(lambda step: step == 0 or goes_on(step - 1))


def exchanged(repeat, attribute):
    """Return a loop whose operands of a kind are one another's."""
    entries = getattr(repeat, attribute)
    inputs = [entry.input for entry in entries]
    return replace(
        repeat,
        **{
            attribute: tuple(
                replace(entry, input=index) for entry, index in zip(entries, inputs[1:] + inputs[:1], strict=True)
            )
        },
    )


def changed(bug):
    """Return what derives a loop with a bug."""

    def derive(node):
        repeat = repeat_of(node)
        if isinstance(bug, type):
            return bug(**{name: getattr(repeat, name) for name in Repeat.__dataclass_fields__})
        return bug(repeat)

    return derive


BUGS = {
    **{bug.__doc__: bug for bug in (Forwards, OneBuffer, FirstBuffer, NextSlice, InBuffer, NoGuard, WithoutEnd)},
    "Carries begin with one another's inputs.": lambda repeat: exchanged(repeat, "carries"),
    "Slices are of one another's inputs.": lambda repeat: (
        replace(
            repeat,
            slices=tuple(
                replace(part, input=other.input) for part, other in zip(repeat.slices, repeat.slices[::-1], strict=True)
            ),
        )
        if len({part.leaf.shape for part in repeat.slices}) == 1
        else repeat
    ),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_noticed(bug):
    for seed in range(60):
        loop = RandomLoop(seed)
        memory = MemoryOfLoops(LINES, changed(bug), shares=True)
        try:
            assert_equal(interpret(loop.trace(), loop.inputs, memory), loop.eagerly())
            assert_loops_equal(loop.trace(), loop.inputs, memory)
        except (AssertionError, IndexError, ValueError):
            return
    pytest.fail("no random loop notices it")
