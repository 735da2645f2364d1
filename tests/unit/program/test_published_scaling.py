"""Predicted beside published scaling: networks with the published layers, machines with the published networks.

Only compute is fitted: products get the rate at which one GPU, or one node, takes the published time.
"""

from itertools import pairwise

import numpy as np
import pytest

from dptrain import ops
from dptrain.optimizers import SGD
from dptrain.program.cost.hardware import Hardware, Link
from dptrain.program.cost.parallelism import kinds_of_parallelism
from dptrain.program.cost.scaling import Scaling
from dptrain.program.dims import Dim
from dptrain.program.explain import flops
from dptrain.program.program import trace
from dptrain.program.shapes import size
from dptrain.program.tensor import Variable, of_value

BUCKET = 25_000_000


class Network:
    """A network whose weights take no memory, and its step with SGD."""

    def __init__(self, sample, rows):
        self.weights = []
        self.build()
        optimizer = SGD(0.1)
        optimizer.build(self.weights)

        def step(x):
            loss = ops.mean(ops.square(self.call(x)))
            loss.backward()
            optimizer.apply([weight.value.grad for weight in self.weights], self.weights)
            return {"loss": loss}

        self.program = trace(step, {"x": ((Dim.rows(rows), *sample), np.float32)})
        self.parameters = sum(size(weight.shape) for weight in self.weights)
        self.operations = sum(map(flops, self.program.tensors)) / rows

    def weight(self, *shape):
        variable = Variable(np.float32(0), f"{len(self.weights)}/kernel")
        variable._held = of_value(np.broadcast_to(np.float32(0), shape))
        variable._held.name, variable._held.variable = variable.path, variable
        self.weights.append(variable)
        return variable

    def efficiency(self, mode, few_ranks, many_ranks, rows, hardware):
        """Return the samples/s a rank of many ranks against few, `rows` on each."""
        slots = {weight: [] for weight in self.weights}
        chosen = next(
            parallelism for parallelism in kinds_of_parallelism(self.program, slots) if parallelism.name == mode
        )
        scaling = Scaling(self.program, chosen, slots, BUCKET)
        of_rank = [scaling.predict(ranks, ranks * rows, hardware).speed / ranks for ranks in (few_ranks, many_ranks)]
        return of_rank[1] / of_rank[0]


class ResNet50(Network):
    """K. He et al., arXiv:1512.03385, table 1, without BatchNormalization."""

    def build(self):
        self.stem, inputs, self.blocks = self.weight(7, 7, 3, 64), 64, []
        for number, (width, count) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
            for block in range(count):
                kernels = [(1, 1, inputs, width), (3, 3, width, width), (1, 1, width, 4 * width)]
                around = self.weight(1, 1, inputs, 4 * width) if block == 0 else None
                stride = 2 if number and block == 0 else 1
                self.blocks.append(([self.weight(*shape) for shape in kernels], around, stride))
                inputs = 4 * width
        self.head = self.weight(2048, 1000)

    def call(self, x):
        x = ops.relu(ops.conv(x, self.stem, strides=2, padding="same"))
        x = ops.max_pool(x, 3, 2, padding="same")
        for (first, second, third), around, stride in self.blocks:
            y = ops.relu(ops.conv(x, first, padding="same"))
            y = ops.relu(ops.conv(y, second, strides=stride, padding="same"))
            x = x if around is None else ops.conv(x, around, strides=stride, padding="same")
            x = ops.relu(ops.conv(y, third, padding="same") + x)
        return ops.mean(x, (1, 2)) @ self.head


class Vgg16(Network):
    """K. Simonyan, A. Zisserman, arXiv:1409.1556, table 1, column D: most weights are in the first dense layer."""

    def build(self):
        self.stages, inputs = [], 3
        for width, count in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
            sizes = [inputs, *[width] * count]
            self.stages.append([self.weight(3, 3, *channels) for channels in pairwise(sizes)])
            inputs = width
        self.dense = [self.weight(*widths) for widths in pairwise([7 * 7 * 512, 4096, 4096, 1000])]

    def call(self, x):
        for kernels in self.stages:
            for kernel in kernels:
                x = ops.relu(ops.conv(x, kernel, padding="same"))
            x = ops.max_pool(x, 2)
        x = ops.reshape(x, (x.shape[0], -1))
        for kernel in self.dense:
            x = ops.relu(x @ kernel)
        return x


class Gpt(Network):
    """GPT with 1.3 billion parameters: 24 blocks of width 2048, without the scores of the attention."""

    def build(self):
        width, parts = 2048, [(1, 3), (1, 1), (1, 4), (4, 1)]
        self.blocks = [[self.weight(a * width, b * width) for a, b in parts] for _ in range(24)]
        self.head = self.weight(width, 50368)

    def call(self, x):
        for qkv, projection, up, down in self.blocks:
            x = x + ops.relu(x @ qkv)[:, :2048] @ projection
            x = x + ops.relu(x @ up) @ down
        return x @ self.head


def test_resnet_50_on_256_gpus():
    """P. Goyal et al., arXiv:1706.02677: some 90 % from 8 to 256 P100, 8 a node, at 32 pictures each.

    Their section 4: the backward pass takes 120 ms, and the forward pass half of that; 100 MB of gradients; NVLink
    within a node, Ethernet with 50 Gb/s between nodes.
    """
    network = ResNet50((224, 224, 3), 32)
    assert network.parameters == pytest.approx(25.5e6, rel=0.01)
    assert network.operations == pytest.approx(3 * 2 * 4.1e9, rel=0.02)
    rates = {"float32": 32 * network.operations / 0.18}
    hardware = Hardware(rates, 732e9, 0.0, 0.0, 0.0, 8, Link(35e9, 5e-6), Link(50e9 / 8, 20e-6))
    assert network.efficiency("data parallel", 8, 256, 32, hardware) == pytest.approx(0.90, abs=0.1)
    assert network.efficiency("hierarchical all-reduce", 8, 256, 32, hardware) == pytest.approx(0.98, abs=0.02)


@pytest.mark.parametrize(("gpus", "published"), [(128, 0.79), (512, 0.68)])
def test_vgg_16_on_a_slow_network(gpus, published):
    """Horovod's README: VGG-16 on servers of four Pascal GPUs, 25 Gb/s between them; ResNet-101 reaches 90 %.

    One P100 of a DGX-1 takes 154 pictures/s at batch 64 (tensorflow.org/performance/benchmarks, May 2017). Within a
    server: PCIe.
    """
    network = Vgg16((224, 224, 3), 64)
    assert network.parameters == pytest.approx(138.3e6, rel=0.01)
    assert network.operations == pytest.approx(3 * 2 * 15.5e9, rel=0.02)
    hardware = Hardware(
        {"float32": 154 * network.operations}, 732e9, 0.0, 0.0, 0.0, 4, Link(10e9, 10e-6), Link(25e9 / 8, 20e-6)
    )
    assert network.efficiency("data parallel", 1, gpus, 64, hardware) == pytest.approx(published, abs=0.1)


def test_gpt_with_1_3_billion_parameters_on_128_gpus():
    """MosaicML's llm-foundry, scripts/train/benchmarking/README.md: FSDP on A100 with 40 GB, 1600 Gb/s between nodes.

    Model "1b", 2048 tokens a sequence: 19,271 tokens/s a GPU on 8 of them, 18,647 on 128 with 10 sequences each.
    """
    network = Gpt((2048,), 2048)
    assert network.parameters == pytest.approx(1_315_950_592, rel=0.01)
    rates = {"float32": 19_271 * network.operations}
    hardware = Hardware(rates, 1.555e12, 0.0, 0.0, 0.0, 8, Link(240e9, 2e-6), Link(200e9, 5e-6))
    predicted = network.efficiency("FSDP", 8, 128, 10 * 2048, hardware)
    assert predicted == pytest.approx(18_647 / 19_271, abs=0.05)
