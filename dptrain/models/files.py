"""A model's files: what `save`, `save_weights` and `load_weights` do."""


class Files:
    """What of a model goes into files and comes back."""
