"""Small color pictures of generated shapes, for `resnet.py` and `unet.py`, with CIFAR's size and number of channels;
each picture comes with the mask of its shape."""

import numpy as np

NAMES = ("disc", "square", "ring", "cross", "stripes")
SIDE = 32


def draw(count, seed):
    """Return pictures (count, 32, 32, 3) and masks of the shapes (count, 32, 32, 1), uint8, and labels (count,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(NAMES), count)
    center = rng.uniform(11, 21, (2, count, 1, 1))
    radius = rng.uniform(6, 10, (count, 1, 1))
    angle = rng.uniform(0, np.pi / 2, (count, 1, 1))
    down, across = np.mgrid[:SIDE, :SIDE][:, None] - center
    y, x = (
        (np.cos(angle) * down - np.sin(angle) * across) / radius,
        (np.sin(angle) * down + np.cos(angle) * across) / radius,
    )
    far, square = np.hypot(x, y), np.maximum(abs(x), abs(y))
    masks = np.select(
        [labels[:, None, None] == label for label in range(len(NAMES))],
        [
            far < 1,
            square < 0.9,
            (far < 1) & (far > 0.55),
            (square < 1) & (np.minimum(abs(x), abs(y)) < 0.3),
            (square < 1) & (np.floor(2.5 * y) % 2 == 0),
        ],
    )[..., None]
    colours = rng.uniform(0, 255, (2, count, 1, 1, 3))
    colours[1] = (colours[0] + 128) % 256  # far from the background's
    pictures = np.where(masks, colours[1], colours[0]) + rng.normal(0, 25, (count, SIDE, SIDE, 3))
    return pictures.clip(0, 255).astype(np.uint8), masks.astype(np.uint8), labels
