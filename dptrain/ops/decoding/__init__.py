"""Tokens one after the other: a traced model as a step with caches, and the choice of the next token."""

from dptrain.ops.decoding.decoder import Decoder as Decoder
from dptrain.ops.decoding.decoder import State as State
from dptrain.ops.decoding.sampling import most_probable as most_probable
from dptrain.ops.decoding.sampling import sampled as sampled
