"""Passes: what they change in a program, and that they change nothing that comes out."""

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda.compose import Composition
from dptrain.program.body import body_of, has_body, with_steps
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.lowering import Product, lowering_of
from dptrain.program.passes import (
    rewritten,
    with_half_factors,
    with_long_products,
    with_precision,
    without_repeats,
)
from dptrain.program.program import trace
from dptrain.program.sharding.mesh import ALL_REDUCE, PlacedProgram
from dptrain.program.sharding.placement import place
from dptrain.program.steps import with_halves_in_loops, with_steps_changed, without_ranks
from dptrain.program.tensor import Variable

B = Dim.rows(8)
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def placed(dtype="float32"):
    """Return the step of a layer, in which exp(x) is written twice."""
    w = Variable(np.ones((3, 4)), "w", dtype=dtype)

    def step(x):
        loss = ops.mean(ops.exp(x) @ w) + ops.sum(ops.exp(x) * 2)
        loss.backward()
        w.assign(w - w.value.grad)
        return {"loss": loss}

    return place(trace(step, {"x": ((B, 3), dtype)}))


def test_precision_is_that_of_products_and_convolutions():
    """Factors of half precision have one of their own."""

    def step(x, images):
        half = ops.cast(images, "bfloat16")
        return {
            "product": x @ ops.transpose(x),
            "convolution": ops.conv(images, images),
            "halves": ops.conv(half, half),
            "wide": ops.conv(images, ops.cast(images, "float64")),
            "pooled": ops.max_pool(images, 2),
        }

    program = trace(step, {"x": ((B, 3), "float32"), "images": ((3, 3, 3, 3), "float32")})
    outputs = with_precision(program, "float32", "tf32").outputs
    outputs["halves"] = outputs["halves"].inputs[0]
    chosen = {"product": "float32", "convolution": "float32", "halves": "tf32", "wide": None, "pooled": None}
    assert {name: tensor.attributes.get("precision") for name, tensor in outputs.items()} == chosen
    of_halves = with_precision(program, "float32", "half").outputs["halves"].inputs[0]
    assert of_halves.attributes["precision"] == "half"
    assert (of_halves.dtype.name, {tensor.dtype.name for tensor in of_halves.inputs}) == ("float32", {"bfloat16"})


def names(program):
    return [tensor.op.name for tensor in program.tensors if tensor.op is not None]


@pytest.mark.parametrize("shape", [(4, B, 3), (B, 4, 3), (2, 5, 4, 3), (0, B, 3), (1, B, 3)])
def test_sums_of_products_are_products_of_all_rows(shape):
    def step(x, y):
        axes = tuple(range(x.ndim - 2))
        transposed = ops.transpose(x, (*axes, x.ndim - 1, x.ndim - 2))
        product = transposed @ y
        return {"sum": ops.sum(transposed @ (y + 1), axes), "read twice": ops.sum(product, axes), "product": product}

    program = trace(step, {"x": (shape, "float64"), "y": ((*shape[:-1], 2), "float64")})
    changed = with_long_products(program)
    assert names(changed).count("reduce_sum") == 1
    rng, rows = np.random.default_rng(0), [int(n) for n in shape]
    values = {"x": rng.normal(size=rows), "y": rng.normal(size=(*rows[:-1], 2))}
    for name, value in evaluate(program, values)[0].items():
        np.testing.assert_allclose(evaluate(changed, values)[0][name], value, rtol=1e-12, atol=1e-12)


def test_products_whose_factors_lie_otherwise_are_summed():
    def step(x, y, one):
        return {"rows": ops.sum(x @ y, 0), "spread": ops.sum(ops.transpose(x, (0, 2, 1)) @ one, 0)}

    shapes = {"x": ((4, 3, 5), "float32"), "y": ((4, 5, 3), "float32"), "one": ((1, 3, 2), "float32")}
    assert names(with_long_products(trace(step, shapes))).count("reduce_sum") == 2


def results(program):
    outputs, updates = evaluate(program, {"x": X})
    return [*outputs.values(), *updates.values()]


@pytest.mark.parametrize(
    "change", [without_ranks, without_repeats, lambda program: without_ranks(without_repeats(program))]
)
def test_what_comes_out_stays(change):
    before, after = placed(), change(placed())
    for expected, actual in zip(results(before), results(after), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert isinstance(after, PlacedProgram)
    assert set(after.tensors) <= after.placements.keys()


def test_without_ranks_nothing_is_reduced():
    program = placed()
    assert ALL_REDUCE in [tensor.op for tensor in program.tensors]
    assert names(without_ranks(program)) == [name for name in names(program) if name != "all_reduce"]


def test_equal_ops_are_computed_once():
    program = placed()
    assert names(program).count("exp") > 1
    assert names(without_repeats(program)).count("exp") == 1


def test_what_differs_is_no_repeat():
    def step(x, y):
        return {
            "inputs": ops.exp(x) + ops.exp(y),
            "attributes": ops.elu(x, 0.5) + ops.elu(x, 2),
            "types": ops.cast(ops.cast(x, "int32"), "float64") + ops.cast(ops.cast(x, "int8"), "float64"),
            "numbers": (x + 1) * (x + 2),
        }

    program = trace(step, {"x": ((B,), "float32"), "y": ((B,), "float32")})
    op_names = names(without_repeats(program))
    assert op_names.count("exp") == 2
    assert op_names.count("elu") == 2
    assert op_names.count("cast_to") + op_names.count("round_to") == 4
    assert op_names.count("add") == names(program).count("add")


def test_the_sign_of_zero_differs():
    """Of an attribute; the slopes of 0.0 and -0.0 were taken for one."""
    program = trace(lambda x: {"y": 1 / ops.leaky_relu(x, 0.0) - 1 / ops.leaky_relu(x, -0.0)}, {"x": ((2,), "float32")})
    assert names(without_repeats(program)).count("leaky_relu") == 2


def test_a_product_says_its_precision():
    program = placed()
    assert with_precision(program, "float32") is program
    products = [
        tensor for tensor in with_precision(program, "tf32").tensors if tensor.op and tensor.op.name == "batch_matmul"
    ]
    assert products
    assert {product.attributes["precision"] for product in products} == {"tf32"}


def test_products_of_half_precision():
    """Factors behind views are seen, and those that have been computed since they were rounded are not."""
    w = Variable(np.ones((4, 4), np.float32), "w")

    def step(x):
        half, weights = ops.cast(x, "bfloat16"), ops.cast(w, "float16")
        wide = ops.cast(ops.transpose(half), "float32")
        return {
            "halves": half @ ops.cast(ops.cast(weights, "float32"), "bfloat16"),
            "views": ops.transpose(wide)[1:5] @ ops.cast(ops.cast(w, "bfloat16"), "float32"),
            "two types": ops.transpose(wide)[1:5] @ ops.cast(weights, "float32"),
            "one": ops.cast(half, "float32") @ w,
            "computed": ops.relu(ops.cast(half, "float32")) @ ops.cast(weights, "float32"),
        }

    program = trace(step, {"x": ((6, 4), "float32")})

    def precisions(*chosen):
        changed = with_precision(program, *chosen)
        outputs = {name: tensor if name != "halves" else tensor.inputs[0] for name, tensor in changed.outputs.items()}
        return {name: tensor.attributes["precision"] for name, tensor in outputs.items()}

    unchanged = {"one": "float32", "computed": "float32"}
    assert precisions("float32", "half") == {"halves": "half", "views": "half", "two types": "tf32"} | unchanged
    assert precisions("float32", "tf32") == {"halves": "tf32", "views": "tf32", "two types": "tf32"} | unchanged
    assert set(precisions("tf32", "tf32").values()) == {"tf32"}
    views = with_precision(program, "float32", "half").outputs["views"]
    assert [tensor.dtype for tensor in views.inputs] == ["bfloat16", "bfloat16"]
    assert (views.dtype, views.inputs[0].shape) == ("float32", (4, 4))
    source = Composition(program).source()
    assert all(f"{name}<" in source for name in ("product", "product_tf32", "product_half"))
    without = Composition(program, of_halves="float32").source()
    assert "product_tf32<" not in without
    assert "product_half<" not in without


def test_a_product_reads_the_halves_beneath_float32_copies():
    """Through views of a copy; of two types, computed ones and whole numbers it reads what it read."""

    def step(x):
        half, other = ops.cast(x, "bfloat16"), ops.cast(x, "float16")
        wide = ops.cast(half, "float32")
        return {
            "halves": half @ ops.transpose(half),
            "views": wide[1:5] @ ops.transpose(wide),
            "types": half @ ops.transpose(other),
            "one": wide @ ops.transpose(x),
            "computed": (wide + 1) @ ops.transpose(wide),
            "whole": ops.cast(half, "int32") @ ops.transpose(wide),
        }

    program = trace(step, {"x": ((6, 4), "float32")})
    changed = rewritten(program, with_half_factors)
    products = {
        name: next(tensor for tensor in _lineage(output) if _is_product(tensor))
        for name, output in changed.outputs.items()
    }
    read = {name: {factor.dtype.name for factor in product.inputs} for name, product in products.items()}
    assert read.pop("halves") == read.pop("views") == {"bfloat16"}
    assert read == {"types": {"float32"}, "one": {"float32"}, "computed": {"float32"}, "whole": {"int32", "float32"}}
    assert {product.dtype.name for product in products.values()} == {"float32"}
    assert rewritten(changed, with_half_factors).tensors == changed.tensors


def _lineage(tensor):
    """Return a tensor, what it is made of first, and so on."""
    return [tensor, *(_lineage(tensor.inputs[0]) if tensor.inputs else [])]


def _is_product(tensor):
    return isinstance(lowering_of(tensor), Product)


def test_a_product_of_another_type_keeps_its_own():
    changed = with_precision(placed("float64"), "tf32")
    assert not any("precision" in tensor.attributes for tensor in changed.tensors)


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_generated_products_have_the_precision_of_the_pass(precision):
    source = Composition(placed(), precision=precision).source()
    assert ("product_tf32<" in source) == (precision == "tf32")


def loops_of_halves(nested):
    """Return a loop over halves and its gradients; its step is `nested` in a second loop or not."""

    def step(xs, w, h):
        sources = [xs, w]
        xs, w = ops.cast(xs, "float16"), ops.cast(w, "float16")

        def cell(h, x):
            # The copies of w depend on no carry: they are made before the loop.
            h = ops.tanh(ops.cast(h, "float16") @ w + x @ ops.transpose(w))
            return ops.cast(h, "float32"), (h, ops.cast(h, "float32"), ops.cast(ops.transpose(h), "float32"))

        def outer(h, x):
            h, (ys, *others) = ops.scan(cell, h, ops.stack([x, x * 2]))
            return h, (ys[1], others[0][0], others[1][1])

        h, (ys, copies, transposed) = ops.scan(outer if nested else cell, h, xs)
        loss = ops.sum(ops.cast(ys, "float32")) + ops.sum(copies * copies) + ops.sum(h)
        dxs, dw = gradients(loss, sources)
        return {"h": h, "ys": ys, "copies": copies, "transposed": transposed, "dw": dw, "dxs": dxs}

    shapes = {"xs": ((4, B, 3), "float32"), "w": ((3, 3), "float32"), "h": ((B, 3), "float32")}
    return trace(step, shapes), {name: tuple(map(int, shape)) for name, (shape, _) in shapes.items()}


@pytest.mark.parametrize("nested", [False, True])
def test_loops_read_and_stack_halves_instead_of_copies(nested):
    program, shapes = loops_of_halves(nested)
    changed = with_halves_in_loops(program)

    def copies_between(program):
        """Return types of what loops read beside carries, and stack, that are no gradients' sums."""
        loops = {tensor.node for tensor in with_steps(program.tensors) if has_body(tensor)}
        assert len(loops) >= 2 + nested
        bodies = [body_of(loop) for loop in loops]
        return {part.dtype.name for body in bodies for part in (*body.captures, *body.slices, *body.stacked)}

    assert "float32" in copies_between(program)
    products = [tensor for tensor in with_steps(with_precisions(changed).tensors) if tensor.attributes.get("precision")]
    assert len(products) >= 5
    assert {(x.dtype.name, tensor.attributes["precision"]) for tensor in products for x in tensor.inputs} == {
        ("float16", "half")
    }
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    expected, actual = (evaluate(version, values)[0] for version in (program, changed))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert (value.dtype, actual[name].dtype) == (program.outputs[name].dtype,) * 2
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def with_precisions(program):
    return with_steps_changed(program, lambda step: with_precision(with_long_products(step), "float32", "half"))


def test_loops_without_halves_stay_as_they_are():
    def step(xs, w):
        def cell(h, x):
            inner, _ = ops.scan(lambda h, y: (h + y, None), h, x)
            return ops.tanh(inner @ w), None

        return {"h": ops.scan(cell, ops.zeros((8, 3)), ops.stack([xs, xs], 1))[0]}

    program = trace(step, {"xs": ((4, 8, 3), "float32"), "w": ((3, 3), "float32")})
    bodies = [
        [body_of(tensor) for tensor in with_steps(version.tensors) if has_body(tensor)]
        for version in (program, with_halves_in_loops(program))
    ]
    assert len(bodies[0]) == 2
    assert [*map(id, bodies[0])] == [*map(id, bodies[1])]
    straight = trace(lambda x: {"y": ops.cast(ops.cast(x, "float16"), "float32")}, {"x": ((3,), "float32")})
    assert with_halves_in_loops(straight) is straight
