"""The text of generated kernels: what it depends on."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.generate import _RESERVED, names_of
from dptrain.comm import SoloCommunicator
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from dptrain.program.tensor import Variable
from tests.ops.test_programs_on_cuda import mlp

CASES = {
    "momentum": lambda a, b: (dp.optimizers.SGD(a, momentum=b, clipnorm=1 + a, weight_decay=b), "mse", b),
    "adam": lambda a, b: (dp.optimizers.AdamW(a, beta_1=b, epsilon=a / 100), dp.losses.Huber(1 + a), b),
    "schedule": lambda a, b: (dp.optimizers.SGD(dp.optimizers.schedules.CosineDecay(a, int(100 * b))), "mae", a),
}


def composition(case, seed, a, b):
    """Return the kernels of a training step with these numbers."""
    dp.utils.set_random_seed(seed)
    optimizer, loss, rate = CASES[case](a, b)
    layers = dp.layers
    model = dp.Sequential(
        [
            layers.Dense(5, "relu", input_shape=(6,), kernel_regularizer=dp.regularizers.L2(a)),
            layers.Dropout(rate),
            layers.LeakyReLU(b),
            layers.Dense(3),
        ]
    )
    model.compile(optimizer, loss)
    model.fit(np.zeros((8, 6), np.float32), np.ones((8, 3), np.float32), batch_size=8, verbose=0)
    (placed,) = model._open_trainer(SoloCommunicator()).programs._placed.values()
    return Composition(placed)


def numbers_of(generated):
    """Return what each run has its own of, by name."""
    functions = [function for stage in generated.stages for kernel in stage for function in kernel.functions]
    return {name: value for function in functions for name, value in function.numbers.items()}


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", CASES)
def test_seeds_and_rates_are_no_part_of_it(case):
    """So that runs that differ in them alone share kernels, and packs."""
    generated, other = composition(case, 1, 0.25, 0.5), composition(case, 2, 0.01, 0.3)
    assert generated.source() == other.source()
    numbers, others = numbers_of(generated), numbers_of(other)
    assert numbers.keys() == others.keys() <= set(generated.fields)
    assert numbers != others
    assert any(value == np.float32(0.25) for value in numbers.values()), "0.25 is a number of the run"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_training_in_half_precision_keeps_its_matrices_in_two_bytes(dtype):
    """Weights and activations as products read them, and what products round; no float32 copy of either."""
    program, _ = mlp(np.random.default_rng(0), compute=dtype)
    generated = Composition(program)
    functions = [function for stage in generated.stages for kernel in stage for function in kernel.functions]
    products = [function for function in functions if function.nest is not None and function.nest.frame == "product"]
    assert len(products) == 5
    for product in products:
        assert f"product_half<dp_{dtype}, " in "\n".join(product.body)
        factors = [read for read, places in product.reads.items() if None in places]
        assert {read.dtype.name for read in factors} == {dtype}
    matrices = [
        tensor
        for tensor in generated.stored - generated.targets.keys()
        if generated.sizes.count(tensor.shape) > generated.sizes.rows
    ]
    assert {matrix.dtype.name for matrix in matrices} == {dtype}
    assert generated.plan.size < Composition(program, of_halves="tf32").plan.size


def test_no_tensor_has_a_name_that_the_generator_gives():
    words = ["total", "sum", "parts", "best_1", "i", "k3", "chunk", "for", "B", "shared", "conv2d", "Product", "true"]
    words += ["m", "phase", "pixels", "patches", "Patches", "2nd", "0 x", "/"]
    tensors = [Variable(np.zeros(1, np.float32), word).value for word in words for _ in range(2)]
    names = names_of(tensors, dict(zip(tensors, [word for word in words for _ in range(2)], strict=True)))
    assert len(set(names.values())) == len(tensors)
    assert all(name.isidentifier() for name in names.values())
    assert not [name for name in names.values() if _RESERVED.fullmatch(name) or name in ("Product", "Patches")]


def test_pointers_to_one_place_do_not_claim_to_differ():
    weight = Variable(np.ones(5, np.float32), "weight")
    swapped = [Variable(np.ones(5, np.float32), name) for name in ("one", "other")]

    def step(x):
        weight.assign(weight * 0.5 + x)
        first, other = (variable.value for variable in swapped)
        swapped[0].assign(other)
        swapped[1].assign(first)
        return {}

    generated = Composition(trace(step, {"x": ((5,), "float32")}))
    functions = [function for stage in generated.stages for kernel in stage for function in kernel.functions]
    signatures = [{name: kind for kind, name in function.signature} for function in functions]
    (in_place,) = [signature for signature in signatures if "new_weight" in signature]
    assert (in_place["weight"], in_place["new_weight"]) == ("const float *", "float *")
    assert in_place["x"] == "const float *__restrict__ "
    places = {id(tensor): variable for variable, tensor in generated.program.state.items()}
    places |= {id(tensor): variable for tensor, variable in generated.targets.items()}
    for signature, function in zip(signatures, functions, strict=True):
        used = [places.get(id(pointer), pointer) for pointer in function.pointers]
        for place, name in zip(used, function.pointers.values(), strict=True):
            shared = sum(other is place for other in used) > 1
            assert ("__restrict__" in signature[name]) is not shared, name


def test_updates_do_not_share_a_launch_with_products_where_another_comes_later():
    program, _ = mlp(np.random.default_rng(0), 784, 512, 100, 128)
    launches = [kernel for stage in Composition(program).stages for kernel in stage]
    updates = [[function.name for function in kernel.functions if "new_" in function.name] for kernel in launches]
    assert len(launches) == 7, "not one launch more"
    assert {"map_new_w1", "map_new_w2", "columns_new_b1", "columns_new_b2"} <= set(updates[-1])
    assert all(function.nest.frame != "product" for function in launches[-1].functions)
    assert launches[-1].threads == 256


def test_lanes_share_the_passes_over_a_row():
    """The greatest, then the sum, then the row: no lane goes over the whole row by itself."""
    program = trace(lambda x: {"y": ops.softmax(x * 2)}, {"x": ((Dim.rows(32), 10), "float32")})
    source = Composition(program).source()
    assert [source.count(f"warp_join<{reduction}>(") for reduction in ("Greatest", "Sum")] == [1, 1]
    assert source.count("c += WARP") == 3
    assert "< 10; ++" not in source
