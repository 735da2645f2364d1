"""Trains the GAN of tests/unit/models/test_gan.py; rank 0 saves what came out. Arguments: out.npz."""

import json
import sys

import numpy as np

from dptrain.comm import current
from tests.unit.models.test_gan import build, images

gan = build(dtype="float64")
history = gan.fit(images(), batch_size=8, epochs=2, verbose=0).history
if current().rank == 0:
    weights = gan.discriminator.get_weights() + gan.generator.get_weights()
    np.savez(sys.argv[1], *weights, history=json.dumps(history))
