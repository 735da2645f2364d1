"""Attention layers: their options, and softmax of scores in plain NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dptrain import layers, ops
from dptrain.program.tensor import Array
from tests.options.check import Call, Options, set_weights

OPTIONS: dict[str, Sequence[Any]] = {
    "layer": ["MultiHeadAttention", "GroupQueryAttention"],
    "axes": [None, (1,), (2,), (1, 2), (2, 1)],
    "heads": [1, 2, 6],
    "shared_by": [1, 2, 3],
    "key_dim": [1, 3, 8],
    "value_dim": [None, 2, 8],
    "output_shape": [None, 3],
    "use_bias": [True, False],
    "use_gate": [False, True],
    "sliding_window": [None, None, 2],
    "flash_attention": [None, False],
    "return_attention_scores": [False, True],
    "use_causal_mask": [False, True],
    "query_mask": [False, True],
    "value_mask": [False, True],
    "key_mask": [False, True],
    "attention_mask": [None, "rows", "heads"],
    "key": [False, True],
    "targets": [1, 4, 29],
    "sources": [1, 5, 33],
    "features": [2, 8],
}
GROUPS = [
    ("value_mask", "key_mask", "attention_mask", "use_causal_mask", "return_attention_scores"),
    ("layer", "query_mask", "use_causal_mask", "return_attention_scores"),
    ("sliding_window", "use_causal_mask", "return_attention_scores"),
]
OPTIONS_WITHOUT_HEADS: dict[str, Sequence[Any]] = {
    "layer": ["Attention", "AdditiveAttention"],
    "use_scale": [False, True],
    "score_mode": ["dot", "concat"],
    "features": [1, 4, 8],
    **{
        name: OPTIONS[name]
        for name in ("return_attention_scores", "use_causal_mask", "query_mask", "value_mask", "key")
    },
    **{name: OPTIONS[name] for name in ("targets", "sources", "value_dim")},
}
OPTIONS_OF_OP: dict[str, Sequence[Any]] = {
    "heads": [1, 2, 6],
    "shared_by": [1, 2, 3],
    "length": [1, 3, 8],
    "value_length": [1, 4, 8],
    "targets": OPTIONS["targets"],
    "sources": OPTIONS["sources"],
    "bias": [None, "rows", "all rows"],
    "mask": [None, "rows", "heads", "sources"],
    "scale": [None, 0.3],
    "is_causal": [False, True],
    "flash_attention": [None, False],
    "attn_logits_soft_cap": [None, None, 1.5],
}
GROUPS_OF_OP = [
    ("mask", "is_causal", "bias", "attn_logits_soft_cap"),
    ("is_causal", "flash_attention", "targets", "sources"),
]


def draw(options: Options, rng: np.random.Generator, rows: int, dtype: str) -> Call:
    """Return a call of attention by heads with options drawn together."""
    grouped = options["layer"] == "GroupQueryAttention"
    names = ["use_bias", "use_gate", "sliding_window", "flash_attention"]
    own = {name: options[name] for name in names} | {"dtype": dtype}
    if grouped:
        groups = options["heads"] // options["shared_by"]
        layer = layers.GroupQueryAttention(options["key_dim"], options["heads"], groups, **own)
    else:
        own |= {name: options[name] for name in ("value_dim", "output_shape")} | {"attention_axes": options["axes"]}
        layer = layers.MultiHeadAttention(options["heads"], options["key_dim"], **own)
    targets, sources, features = options["targets"], options["sources"], options["features"]
    free = options["axes"] is not None
    shapes = (
        {"query": (targets, 3, features), "value": (sources, 3, features + 1 - grouped)}
        if free
        else {"query": (targets, features), "value": (sources, features + 1 - grouped)}
    )
    if free and 1 not in options["axes"]:
        shapes["value"] = (targets, sources, features + 1 - grouped)
    if options["key"]:
        shapes["key"] = (*shapes["value"][:-1], features + 2)
    layer.build(*((None, *shape) for shape in shapes.values()))
    set_weights(layer, rng)
    inputs = {name: rng.normal(size=(rows, *shape)).astype(dtype) for name, shape in shapes.items()}
    inputs |= _masks(options, shapes, rows, rng)
    flags = {name: options[name] for name in ("return_attention_scores", "use_causal_mask")}

    def call(tensors: Any) -> list[Any]:
        outputs = layer(**tensors, **flags)
        return _seen(options, list(outputs) if flags["return_attention_scores"] else [outputs], tensors, ops)

    def reference(values: Any, weights: Sequence[Array]) -> list[Array]:
        outputs = attend(options, values, list(weights))
        return _seen(options, outputs[: 1 + flags["return_attention_scores"]], values, np)

    return Call(options, inputs, layer.trainable_weights, call, reference)


def draw_without_heads(options: Options, rng: np.random.Generator, rows: int, dtype: str) -> Call:
    """Return a call of attention without projections with options drawn together."""
    options = options | {"axes": None, "key_mask": False, "attention_mask": None}
    own = {"use_scale": options["use_scale"], "dtype": dtype}
    if options["layer"] == "Attention":
        own["score_mode"] = options["score_mode"]
    layer = getattr(layers, options["layer"])(**own)
    features = options["features"]
    shapes = {"query": (options["targets"], features), "value": (options["sources"], features)}
    if options["key"]:
        shapes |= {"value": (options["sources"], options["value_dim"] or features), "key": shapes["value"]}
    layer.build([(None, *shape) for shape in shapes.values()])
    set_weights(layer, rng)
    inputs = {name: rng.normal(size=(rows, *shape)).astype(dtype) for name, shape in shapes.items()}
    inputs |= _masks(options, shapes, rows, rng)
    flags = {name: options[name] for name in ("return_attention_scores", "use_causal_mask")}

    def call(tensors: Any) -> list[Any]:
        masks = [tensors.get("query_mask"), tensors.get("value_mask")]
        given = None if masks == [None, None] else masks
        outputs = layer([tensors[name] for name in shapes], mask=given, **flags)
        return list(outputs) if flags["return_attention_scores"] else [outputs]

    def reference(values: Any, weights: Sequence[Array]) -> list[Array]:
        query, value = values["query"], values["value"]
        key = values.get("key", value)
        scale = weights[0] if options["use_scale"] else 1.0
        sums = query[:, :, None] + key[:, None]
        if options["layer"] == "AdditiveAttention":
            scores = (scale * np.tanh(sums)).sum(-1)
        elif options["score_mode"] == "dot":
            scores = scale * (query @ np.swapaxes(key, -2, -1))
        else:
            scores = weights[-1] * np.tanh(scale * sums).sum(-1)
        kept = np.ones(scores.shape, bool)
        if options["value_mask"]:
            kept &= values["value_mask"][:, None]
        if options["use_causal_mask"]:
            kept &= np.tri(*scores.shape[1:], dtype=bool)
        softmax = _softmax(scores, kept, (-1,))
        y = softmax @ value
        y = np.where(values["query_mask"][..., None], y, 0) if options["query_mask"] else y
        return [y, softmax][: 1 + flags["return_attention_scores"]]

    return Call(options, inputs, layer.trainable_weights, call, reference)


def draw_op(options: Options, rng: np.random.Generator, rows: int, dtype: str) -> Call:
    """Return a call of `ops.dot_product_attention` with options drawn together; some targets may see no source."""
    heads, targets, sources = options["heads"], options["targets"], options["sources"]
    groups, length = heads // options["shared_by"], options["length"]
    shapes = {"query": (targets, heads, length), "key": (sources, groups, length)}
    shapes |= {"value": (sources, groups, options["value_length"])}
    if options["bias"] is not None:
        shapes["bias"] = (heads if options["bias"] == "rows" else 1, targets, sources)
    inputs = {name: rng.normal(size=(rows, *shape)).astype(dtype) for name, shape in shapes.items()}
    if options["mask"] is not None:
        shape = {"rows": (1, targets, sources), "heads": (heads, targets, sources), "sources": (1, 1, sources)}
        inputs["mask"] = rng.random((rows, *shape[options["mask"]])) < 0.5
    flags = {name: options[name] for name in ("scale", "is_causal", "flash_attention", "attn_logits_soft_cap")}

    def reference(values: Any, weights: Sequence[Array]) -> list[Array]:
        query, key, value = (np.moveaxis(values[name], 2, 1) for name in ("query", "key", "value"))
        key, value = (np.repeat(tensor, options["shared_by"], 1) for tensor in (key, value))
        scores = query @ np.swapaxes(key, -1, -2) * (options["scale"] or 1 / np.sqrt(length))
        cap = options["attn_logits_soft_cap"]
        scores = (scores if cap is None else cap * np.tanh(scores / cap)) + values.get("bias", 0)
        kept = np.broadcast_to(values.get("mask", True), scores.shape)
        if options["is_causal"]:
            kept = kept & np.tri(targets, sources, dtype=bool)
        is_seeing = kept.any(-1, keepdims=True)  # else all sources count alike
        softmax = np.where(is_seeing, _softmax(scores, kept, (-1,)), 1 / sources)
        return [np.moveaxis(softmax @ value, 1, 2)]

    return Call(options, inputs, [], lambda tensors: [ops.dot_product_attention(**tensors, **flags)], reference)


def allowed_of_op(options: Options) -> Options:
    """Return options that the op takes together."""
    options["shared_by"] = options["shared_by"] if options["heads"] % options["shared_by"] == 0 else 1
    return options


def allowed(options: Options) -> Options:
    """Return options that layers take together, with a source for each target."""
    if options["layer"] == "GroupQueryAttention":
        options |= {"axes": None, "value_dim": None, "output_shape": None}
        options["shared_by"] = options["shared_by"] if options["heads"] % options["shared_by"] == 0 else 1
    if options["axes"] is not None:  # masks of rows are (rows, steps), and there are no steps
        names = ("query_mask", "value_mask", "key_mask", "use_causal_mask")
        options |= dict.fromkeys(names, False) | {"sliding_window": None, "flash_attention": None}
        options |= {"targets": min(options["targets"], 4), "sources": min(options["sources"], 5)}
        if options["attention_mask"] == "heads":
            options["attention_mask"] = "rows"
    if options["sliding_window"] is not None:
        options |= {"sources": options["targets"], "value_mask": False, "key_mask": False, "attention_mask": None}
    return options


def attend(options: Options, values: Any, weights: list[Array]) -> list[Array]:
    """Return the output of attention by heads, and the softmax of its scores."""
    left = iter(weights)

    def dense(x: Array) -> Array:
        y = np.einsum("...f,fhd->...hd", x, next(left))
        return y + next(left) if options["use_bias"] else y

    query, key = dense(values["query"]), dense(values.get("key", values["value"]))
    gate = 1 / (1 + np.exp(-dense(values["query"]))) if options["use_gate"] else 1
    value = dense(values["value"])
    if options["layer"] == "GroupQueryAttention":
        key, value = (np.repeat(heads, options["shared_by"], -2) for heads in (key, value))
    axes = list(options["axes"] or [1])
    free = [axis for axis in range(1, query.ndim - 2) if axis not in axes]
    order = [0, *free, query.ndim - 2, *axes, query.ndim - 1]  # rows, free axes, heads, attended axes, features
    q, k, v = (np.transpose(heads, order) for heads in (query, key, value))
    lead, targets, sources = q.shape[: 2 + len(free)], q.shape[2 + len(free) : -1], k.shape[2 + len(free) : -1]
    q, k, v = (heads.reshape(*lead, -1, heads.shape[-1]) for heads in (q, k, v))
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    softmax = _softmax(scores, _kept(options, values, scores), (-1,))
    y = (softmax @ v).reshape(*lead, *targets, v.shape[-1])
    y = np.transpose(y, np.argsort(order)) * gate
    y = np.einsum("...hd,hdm->...m", y, next(left))
    y = y + next(left) if options["use_bias"] else y
    return [y, softmax.reshape(*lead, *targets, *sources)]


def _kept(options: Options, values: Any, scores: Array) -> Array:
    """Return which sources take part, for (rows, free axes, heads, targets, sources)."""
    kept = np.ones(scores.shape, bool)
    for name, key in (
        ("query_mask", np.s_[:, None, :, None]),
        ("value_mask", np.s_[:, None, None]),
        ("key_mask", np.s_[:, None, None]),
    ):
        if options[name]:
            kept &= values[name][key]
    if options["attention_mask"] is not None:
        mask = values["attention_mask"]
        mask = mask.reshape(len(mask), -1, *scores.shape[-2:])
        kept &= mask.reshape(len(mask), *(1,) * (scores.ndim - 4), *mask.shape[1:])
    if options["use_causal_mask"]:
        kept &= np.tri(*scores.shape[-2:], dtype=bool)
    if options.get("sliding_window") is not None:
        target, source = np.indices(scores.shape[-2:])
        kept &= np.abs(target - source) < options["sliding_window"]
    return kept


def _softmax(scores: Array, kept: Array, axes: tuple[int, ...]) -> Array:
    powers = np.where(kept | ~kept.any(axes, keepdims=True), np.exp(scores - scores.real.max(axes, keepdims=True)), 0)
    return powers / powers.sum(axes, keepdims=True)


def _masks(options: Options, shapes: Any, rows: int, rng: np.random.Generator) -> dict[str, Array]:
    """Return the masks that were drawn; the first source is never masked."""
    masks = {}
    for name, of in (("query_mask", "query"), ("value_mask", "value"), ("key_mask", "value")):
        if options[name]:
            masks[name] = rng.random((rows, shapes[of][0])) < 0.6
            masks[name][:, 0] |= of == "value"
    if options["attention_mask"] is not None:
        axes = options["axes"] or (1,)
        heads = [options["heads"]] if options["attention_mask"] == "heads" else []
        lengths = [shapes[of][axis - 1] for of in ("query", "value") for axis in axes]
        mask = rng.random((rows, *heads, *lengths)) < 0.6
        mask[(..., *(0,) * len(axes))] = True
        masks["attention_mask"] = mask
    return masks


def _seen(options: Options, outputs: list[Any], values: Any, module: Any) -> list[Any]:
    """Leave out targets that are masked: what they see is not said."""
    if not options["query_mask"]:
        return outputs
    y, *scores = outputs
    mask = values["query_mask"]
    return [module.where(mask[..., None], y, 0), *(module.where(mask[:, None, :, None], s, 0) for s in scores)]
