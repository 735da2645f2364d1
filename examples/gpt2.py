"""GPT-2, trained from shards of tokens, with weights as Hugging Face's `transformers` reads and writes them.

    python examples/gpt2.py --data 'tokens/train_*.bin' --validation tokens/val.bin
    mpirun -n 4 python examples/gpt2.py --data 'tokens/train_*.bin' --accumulate 4
    python examples/gpt2.py --weights gpt2/model.safetensors --epochs 0 --prompt 464 3280

All ranks print what one would. Shards are those of llm.c and nanoGPT (`--data`; without, the bytes of this file).
`--weights` starts from `model.safetensors` of the hub's "gpt2"; `--save` writes such a file. Source: A. Radford et al.,
"Language models are unsupervised multitask learners", 2019; decay, clipping and schedule as in A. Karpathy's nanoGPT.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import safetensors.numpy

import dptrain as keras
from dptrain import layers, ops


class AddPositions(layers.Layer):
    """Add a vector for each position."""

    def __init__(self, context, width, **options):
        super().__init__(**options)
        self.table = layers.Embedding(context, width, keras.initializers.RandomNormal(stddev=0.02))

    def call(self, x):
        return x + self.table(np.arange(x.shape[1]))


def gelu(x):
    return ops.gelu(x, approximate=True)


def make_block(x, name, blocks, heads, dropout):
    """Return x after attention to earlier positions, and after a network of two layers."""
    width = x.shape[-1]
    normal, narrow = (keras.initializers.RandomNormal(stddev=0.02 / scale) for scale in (1, math.sqrt(2 * blocks)))
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_ln_1")(x)
    attention = layers.MultiHeadAttention(
        heads, width // heads, kernel_initializer=normal, dropout=dropout, name=f"{name}_attn"
    )
    x = x + layers.Dropout(dropout)(attention(y, y, use_causal_mask=True))
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_ln_2")(x)
    y = layers.Dense(4 * width, gelu, kernel_initializer=normal, name=f"{name}_c_fc")(y)
    y = layers.Dense(width, kernel_initializer=narrow, name=f"{name}_c_proj")(y)
    return x + layers.Dropout(dropout)(y)


def make_gpt2(vocabulary=50257, context=1024, width=768, blocks=12, heads=12, dropout=0.1):
    """Return the model from (rows, context) tokens to scores of the next ones, (rows, context, vocabulary)."""
    inputs = keras.Input((context,), dtype="int32")
    normal = keras.initializers.RandomNormal(stddev=0.02)
    tokens = layers.ReversibleEmbedding(vocabulary, width, embeddings_initializer=normal, name="wte")
    x = layers.Dropout(dropout)(AddPositions(context, width, name="wpe")(tokens(inputs)))
    for block in range(blocks):
        x = make_block(x, f"h_{block}", blocks, heads, dropout)
    x = layers.LayerNormalization(epsilon=1e-5, name="ln_f")(x)
    return keras.Model(inputs, tokens(x, reverse=True))


def weights_by_name(model):
    """Return Hugging Face's names, and the variables whose matrices, side by side, each of them holds."""
    names = {"wte.weight": [model.get_layer("wte").embeddings], "wpe.weight": [model.get_layer("wpe").table.embeddings]}
    for layer in model.layers:
        if isinstance(layer, layers.MultiHeadAttention):
            prefix = layer.name.replace("_", ".", 1).replace("_attn", ".attn")
            parts = (layer.query_dense, layer.key_dense, layer.value_dense)
            names[f"{prefix}.c_attn.weight"], names[f"{prefix}.c_attn.bias"] = zip(
                *(part.weights for part in parts), strict=True
            )
            names[f"{prefix}.c_proj.weight"], names[f"{prefix}.c_proj.bias"] = ([w] for w in layer.output_dense.weights)
        elif isinstance(layer, layers.Dense | layers.LayerNormalization):
            block, number, part = layer.name.split("_", 2) if layer.name.startswith("h_") else ("", "", layer.name)
            inner = f"mlp.{part}" if isinstance(layer, layers.Dense) else part
            prefix = f"{block}.{number}.{inner}" if block else part
            names[f"{prefix}.weight"], names[f"{prefix}.bias"] = ([w] for w in layer.weights)
    return names


def read(model, path):
    """Set a model's weights from a file of Hugging Face's."""
    arrays = safetensors.numpy.load_file(path)
    arrays = {name.removeprefix("transformer."): array for name, array in arrays.items()}
    for name, variables in weights_by_name(model).items():
        for variable, part in zip(variables, np.split(arrays[name], len(variables), axis=-1), strict=True):
            variable.assign(part.reshape(variable.shape))


def write(model, path):
    """Write a model's weights as Hugging Face does."""
    arrays = {}
    for name, variables in weights_by_name(model).items():
        values = [np.asarray(variable.numpy()) for variable in variables]
        if values[0].ndim > 1 and name.endswith("weight"):
            shape = (len(values[0]), -1) if len(values) > 1 else (-1, values[0].shape[-1])
        else:
            shape = (-1,)
        parts = [value.reshape(shape) for value in values]
        arrays[f"transformer.{name}"] = np.concatenate(parts, axis=-1)
    if keras.rank() == 0:
        safetensors.numpy.save_file(arrays, path, {"format": "pt"})


def make_optimizer(rate, steps, warmup, accumulate):
    """Return AdamW with warm-up, a cosine down to a tenth, clipping, and decay of matrices alone."""
    schedule = keras.optimizers.schedules.CosineDecay(0.0, steps, 0.1, warmup_target=rate, warmup_steps=warmup)
    optimizer = keras.optimizers.AdamW(
        schedule, weight_decay=0.1, beta_2=0.95, epsilon=1e-8, global_clipnorm=1.0,
        gradient_accumulation_steps=accumulate if accumulate > 1 else None,
    )  # fmt: skip
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer


def windows(tokens, length):
    """Return windows of tokens, and the tokens that follow each of theirs: two arrays (windows, length)."""
    count = (len(tokens) - 1) // length * length
    return tuple(tokens[start : start + count].astype(np.int32).reshape(-1, length) for start in (0, 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="SHARDS", nargs="+", help="paths, globs or addresses of token shards")
    parser.add_argument("--validation", metavar="FILE", help="tokens in uint16, of which losses are shown")
    parser.add_argument("--weights", metavar="FILE", help="start from a model.safetensors")
    parser.add_argument("--save", metavar="FILE", help="where to write the weights")
    for name, default in (("vocabulary", 50257), ("context", 1024), ("width", 768), ("blocks", 12), ("heads", 12)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"(default: {default})")
    parser.add_argument("--dropout", type=float, default=0.1, metavar="RATE")
    parser.add_argument("--epochs", type=int, default=1, metavar="N")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="windows, over all ranks (default: 8)")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches before an update (default: 1)")
    parser.add_argument("--learning-rate", type=float, default=6e-4, metavar="RATE")
    parser.add_argument("--warmup", type=int, default=100, metavar="N", help="updates (default: 100)")
    parser.add_argument("--prompt", type=int, nargs="+", default=[10], metavar="ID")
    parser.add_argument("--count", type=int, default=40, metavar="N", help="tokens that it writes (default: 40)")
    parser.add_argument("--dtype", default="float32", help="such as mixed_bfloat16")
    given = parser.parse_args()
    keras.utils.set_random_seed(1)
    size = (given.vocabulary, given.context, given.width, given.blocks, given.heads)
    model = make_gpt2(*size, given.dropout)
    if given.weights:
        read(model, given.weights)
    if given.data:
        data = keras.utils.ShardedDataset(given.data, given.batch_size, sequence_length=given.context, seed=1)
        batches, samples = len(data), {"x": data}
    else:
        x, y = windows(np.frombuffer(Path(__file__).read_bytes(), np.uint8), given.context)
        batches, samples = -(-len(x) // given.batch_size), {"x": x, "y": y, "batch_size": given.batch_size}
    steps = max(batches * given.epochs // given.accumulate, 1)
    optimizer = make_optimizer(given.learning_rate, steps, min(given.warmup, steps // 2), given.accumulate)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, dtype=given.dtype)
    if given.validation:
        samples["validation_data"] = windows(np.fromfile(given.validation, np.uint16), given.context)
    history = model.fit(**samples, epochs=given.epochs, verbose=0).history if given.epochs else {}
    tokens = model.generate(given.prompt, given.count, temperature=0.8, top_k=200, seed=1)
    if given.save:
        write(model, given.save)
    if keras.rank() == 0:
        for name, values in history.items():
            print(*(f"epoch {epoch}: {name} {value:.6f}" for epoch, value in enumerate(values, 1)), sep="\n")
        print("tokens", *tokens)


if __name__ == "__main__":
    main()
