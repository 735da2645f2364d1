"""A model's files: what `save`, `save_weights` and `load_weights` do."""

from dptrain.layers import Layer


class Files(Layer):
    """What of a model goes into files and comes back."""
