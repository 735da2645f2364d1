"""Texts of a GPT and of a recurrent model: `generation.py OUT DEVICE [WAY]`, written by rank 0 as JSON.

Ways: "whole"; "shards" keeps a part of the weights on each rank; "different" lets ranks ask for different numbers.
"""

import json
import sys
from pathlib import Path

import numpy as np

import dptrain as dp
from dptrain import layers

TOKENS, LENGTH = 13, 12


def gpt():
    tokens = dp.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(TOKENS, 8)(tokens)
    x = x + layers.GroupQueryAttention(4, 4, 2)(x, x, use_causal_mask=True)
    return dp.Model(tokens, layers.Dense(TOKENS)(layers.LayerNormalization()(x)))


def recurrent():
    tokens = dp.Input((None,), dtype="int32")
    x = layers.GRU(6, return_sequences=True)(layers.Embedding(TOKENS, 8)(tokens))
    return dp.Model(tokens, layers.Dense(TOKENS)(x))


def main(out: str, device: str, way: str = "whole") -> None:
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5], [2, 2]]
    texts = []
    for model in (gpt(), recurrent()):
        rng = np.random.default_rng(0)
        for weight in model.weights:
            weight.assign(rng.normal(0, 0.5, weight.shape))
        model.compile(device=device, shard_weights=way == "shards")
        count = 5 + (way == "different" and dp.rank())
        texts.append(model.generate(prompts, count, temperature=0))
        texts.append(model.generate(prompts, count, top_k=5, top_p=0.9, seed=3, stop=2))
        texts.append(model.generate(prompts, count, 0.8, batch_size=3))
        texts.append([model.generate([7, 7], count, temperature=0)])
        texts.append([np.array(list(model.generate([7, 7], count, seed=4, stream=True)))])
    if dp.rank() == 0:
        Path(out).write_text(json.dumps([[text.tolist() for text in written] for written in texts]))


if __name__ == "__main__":
    main(*sys.argv[1:])
