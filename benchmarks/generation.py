"""Milliseconds per generated token, from caches and from the whole window computed anew.

    python benchmarks/generation.py

Both for GPTs of three sizes and for texts of three lengths: a token's time is the difference between generations of 33
tokens and of one, divided by 32; a window's is that of `predict` on all positions. Of each the least of REPEATS, which
alternate, as other work on the machine only adds to a time.
"""

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import make_gpt

REPEATS, TOKENS = 9, 32
# (length, vocabulary, blocks, heads, width)
SIZES = [(128, 65, 2, 4, 64), (256, 65, 4, 4, 256), (1024, 8192, 4, 4, 256)]
WAYS = {"greedy": {"temperature": 0}, "top-k and top-p": {"top_k": 40, "top_p": 0.9, "seed": 1}}


def seconds(action):
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(model, length, options):
    """Return milliseconds per token by the length of the text before it."""
    prompts = [np.arange(count) % 60 for count in (1, length // 2, length - TOKENS - 1)]
    times = {len(prompt): ([], []) for prompt in prompts}
    for repeat in range(REPEATS + 1):
        for prompt in prompts:
            short, long = times[len(prompt)]
            for count, kept in ((1, short), (TOKENS + 1, long)):
                elapsed = seconds(lambda prompt=prompt, count=count: model.generate(prompt, count, **options))
                kept += [elapsed] if repeat else []  # the first compiles
    return {count: 1e3 * (min(long) - min(short)) / TOKENS for count, (short, long) in times.items()}


def least(model, window):
    """Return milliseconds of a prediction."""
    return 1e3 * min(seconds(lambda: model.predict(window, verbose=0)) for _ in range(REPEATS))


def main():
    print("| GPT: positions, vocabulary, blocks, width | tokens | window, ms | token after 1, half, almost all, ms |")
    print("|---|---|---|---|")
    for length, vocabulary, blocks, heads, width in SIZES:
        model = make_gpt(length, vocabulary, blocks, heads, width, 0.1)
        model.compile(device="cpu")
        window = np.zeros((1, length), np.int32)
        model.predict(window, verbose=0)
        for way, options in WAYS.items():
            before, tokens = least(model, window), measure(model, length, options)
            whole = min(before, least(model, window))
            cells = ", ".join(f"{token:.2f} ({whole / token:.0f}x)" for token in tokens.values())
            print(f"| {length}, {vocabulary}, {blocks}, {width} | {way} | {whole:.1f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
