"""Trains with sample weights; rank 0 saves the weights and the logs of every epoch. Arguments: out.npz JSON."""

import json
import sys

import numpy as np
from dptrain.model import Architecture
from dptrain.train.allreduce import AllReduce
from dptrain.train.replica import Replica

from dptrain import losses, metrics
from dptrain.backend.cpu.backend import NumpyBackend
from dptrain.batches.feed import ResidentFeed
from dptrain.batches.sampling import GlobalSampler
from dptrain.comm import current
from dptrain.layers import Dense
from dptrain.optimizers import SGD

out, options = sys.argv[1], json.loads(sys.argv[2])
comm, rng = current(), np.random.default_rng(3)
x, labels = rng.standard_normal((53, 6)), rng.integers(0, 4, 53)
loss = losses.deserialize(options["loss"])
y = labels if loss.takes_labels else np.eye(4)[labels]
weights = rng.random(53) * (rng.random(53) < 0.8) if options["weighted"] else None
measured = ["accuracy"] if loss.takes_labels else ["accuracy", "mae", metrics.Precision(0.3), metrics.Recall(0.3)]

replica = Replica(
    NumpyBackend(np.dtype(options["dtype"])), Architecture([Dense(9, "tanh"), Dense(4, "softmax")], (6,)), 1
)
replica.compile(loss, SGD(0.3), measured, measured)
# The last batch of an epoch has five samples, less than a batch of eight has on three ranks each.
sampler = GlobalSampler(len(x), 8, comm.rank, comm.size, seed=3)
replica.reserve(sampler.capacity)
feed = ResidentFeed(replica.backend, replica.as_stored(x, y, weights))
exchange = AllReduce(replica.backend, comm, replica.reduction, 1.0)
logs = []
for epoch in range(6):
    plan = [sampler.shards(step) for step in range(sampler.steps)]
    feed.start(sampler.order(epoch), [shard for shards in plan for shard in shards])
    replica.reset_totals()
    for shards in plan:
        replica.forward_backward(feed, shards, exchange.on_gradients_ready)
        exchange.finish()
        replica.update()
    logs.append(replica.logs())
assert all(other == logs for other in comm.allgather(logs))
if comm.rank == 0:
    params = replica.backend.download(replica.params)
    np.savez(out, params=params, keys=list(logs[0]), logs=[list(one.values()) for one in logs])
