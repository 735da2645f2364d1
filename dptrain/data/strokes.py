"""The built-in data set: ten classes of glyphs made of lines and arcs, drawn with a shaky hand.

Every image is computed from (seed, split, index). Pixels only see additions, multiplications, comparisons and square
roots, which IEEE 754 rounds in one way, and stroke points lie on a grid: all machines draw the same images.

Shapes: B images of one chunk, S segments of a glyph, P points of a polyline, Y and X pixels.
"""

import math
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import DataError

VERSION = 1
"""Part of the cache's file name: raise it whenever an image changes."""

SIDE = 28
CLASS_NAMES = ("ring", "cup", "hook", "wave", "fork", "zigzag", "cross", "gate", "wedge", "loop")

_CHUNK = 96
"""Images drawn together: the three float32 buffers of one chunk stay within the cache of one core."""

_UNIFORMS = 64
"""Random numbers in [0, 1) that one image consumes, used or not, so that image i depends on i alone."""

_GRID = 1024.0
"""Points lie on multiples of 1/1024 pixel: the last digits of sine and cosine differ between machines."""

Polyline = list[tuple[float, float]]


def _arc(cx: float, cy: float, rx: float, ry: float, begin: float, end: float, segments: int) -> Polyline:
    """Points on an ellipse; angles in degrees, clockwise from the right (y grows downward)."""
    angles = [math.radians(begin + (end - begin) * i / segments) for i in range(segments + 1)]
    return [(cx + rx * math.cos(a), cy + ry * math.sin(a)) for a in angles]


# One line a style variant; the classes share parts on purpose: an open ring is a cup, a gate that closes is a wedge.
_GLYPHS: tuple[tuple[list[Polyline], ...], ...] = (
    (  # ring
        [_arc(0, 0, 0.75, 0.9, 0, 360, 12)],
        [_arc(0, 0, 0.5, 0.95, 20, 380, 12)],
        [_arc(0, 0, 0.85, 0.7, -100, 240, 12)],
        [_arc(0, 0, 0.7, 0.85, -60, 270, 12)],
    ),
    (  # cup
        [_arc(0.1, 0, 0.8, 0.9, 50, 310, 11)],
        [_arc(0.2, 0, 0.9, 0.85, 75, 285, 10)],
        [_arc(0.0, 0, 0.6, 0.95, 35, 320, 11)],
        [[(0.6, -0.85), (-0.5, -0.6), (-0.7, 0), (-0.5, 0.6), (0.6, 0.85)]],
    ),
    (  # hook
        [[(0.4, -0.9), *_arc(0.0, 0.45, 0.4, 0.45, 0, 170, 6)]],
        [[(0.2, -0.9), (0.2, 0.3), *_arc(-0.2, 0.35, 0.4, 0.5, 0, 130, 5)]],
        [[(-0.4, -0.9), (0.5, -0.9), (0.4, 0.2), *_arc(0.0, 0.4, 0.4, 0.5, 0, 150, 5)]],
        [[(0.35, -0.95), (0.3, 0.5), (0.0, 0.9), (-0.5, 0.75)]],
    ),
    (  # wave
        [_arc(-0.1, -0.45, 0.6, 0.45, -150, 90, 6) + _arc(-0.1, 0.45, 0.7, 0.45, -90, 150, 6)],
        [[(-0.5, -0.85), (0.5, -0.8), (0.0, -0.15), *_arc(-0.05, 0.4, 0.6, 0.5, -80, 140, 6)]],
        [_arc(-0.3, -0.45, 0.8, 0.42, -100, 80, 5) + _arc(-0.3, 0.45, 0.8, 0.45, -80, 100, 5)],
        [[(-0.4, -0.9), (0.5, -0.5), (-0.2, -0.05), (0.6, 0.4), (-0.5, 0.9)]],
    ),
    (  # fork
        [[(-0.7, -0.9), (0, 0), (0.7, -0.9)], [(0, 0), (0, 0.95)]],
        [[(-0.6, -0.9), (-0.5, -0.1), (0, 0.1), (0.5, -0.1), (0.6, -0.9)], [(0, 0.1), (0, 0.95)]],
        [[(-0.6, -0.8), (0.1, 0.1)], [(0.7, -0.9), (-0.3, 0.95)]],
        [[(-0.5, -0.9), (-0.5, 0.0), (0.55, 0.0)], [(0.45, -0.9), (0.45, 0.95)]],
    ),
    (  # zigzag
        [[(-0.7, -0.8), (0.7, -0.8), (-0.7, 0.8), (0.7, 0.8)]],
        [[(-0.6, -0.75), (0.6, -0.85), (-0.1, 0.0), (-0.6, 0.85), (0.7, 0.75)]],
        [[*_arc(0, -0.4, 0.6, 0.5, -170, 30, 6), (-0.65, 0.85), (0.7, 0.85)]],
        [[*_arc(0, -0.4, 0.55, 0.5, -160, 50, 5), (-0.5, 0.8), (-0.1, 0.6), (0.7, 0.9)]],
    ),
    (  # cross
        [[(-0.8, 0), (0.8, 0)], [(0, -0.9), (0, 0.9)]],
        [[(-0.7, -0.8), (0.7, 0.8)], [(0.7, -0.8), (-0.7, 0.8)]],
        [[(-0.6, -0.35), (0.6, -0.35)], [(0, -0.95), (0, 0.95)]],
        [[(-0.75, 0.1), (0.75, -0.2)], [(0.1, -0.9), (-0.1, 0.6), (0.3, 0.9)]],
    ),
    (  # gate
        [[(-0.65, 0.9), (-0.65, -0.8), (0.65, -0.8), (0.65, 0.9)]],
        [[(-0.6, 0.9), *_arc(0, -0.2, 0.6, 0.7, 180, 360, 6), (0.6, 0.9)]],
        [[(-0.6, -0.9), (-0.6, 0.9)], [(-0.6, -0.1), *_arc(0, 0.1, 0.55, 0.5, 220, 360, 4), (0.55, 0.9)]],
        [[(-0.65, 0.9), (-0.4, -0.9), (0.45, -0.85), (0.6, 0.9)], [(-0.55, 0.1), (0.55, 0.1)]],
    ),
    (  # wedge
        [[(-0.75, 0.8), (0, -0.9), (0.75, 0.8), (-0.75, 0.8)]],
        [[(-0.7, 0.9), (0, -0.9), (0.7, 0.9)], [(-0.4, 0.2), (0.4, 0.2)]],
        [[(-0.8, 0.7), (0.1, -0.85), (0.7, 0.75), (-0.7, 0.6)]],
        [[(-0.7, 0.9), (0.05, -0.9), (0.7, 0.9)]],
    ),
    (  # loop
        [[*_arc(0, -0.4, 0.5, 0.5, 0, 360, 9), (0.45, 0.95)]],
        [[*_arc(-0.05, -0.4, 0.55, 0.45, 10, 370, 9), (0.4, 0.3), (-0.1, 0.95)]],
        [[(-0.5, 0.95), (-0.5, -0.85), *_arc(-0.1, -0.4, 0.65, 0.45, -90, 90, 6), (-0.5, 0.05)]],
        [[*_arc(0, -0.35, 0.5, 0.55, -40, 290, 9), (0.5, -0.7), (0.4, 0.95)]],
    ),
)
_STYLES = len(_GLYPHS[0])


def _pad_glyphs() -> NDArray[np.float64]:
    """All glyphs as segments, (class, style, S, begin or end, x or y); short ones repeat their last segment."""
    glyphs = [[[pair for line in style for pair in pairwise(line)] for style in styles] for styles in _GLYPHS]
    longest = max(len(segments) for styles in glyphs for segments in styles)
    return np.array([[s + [s[-1]] * (longest - len(s)) for s in styles] for styles in glyphs], np.float64)


_SEGMENTS = _pad_glyphs()


@cache
def _normal_of_byte() -> NDArray[np.float32]:
    """The 256 middle quantiles of the normal distribution: noise from random bytes, the same on every machine."""
    from statistics import NormalDist

    return np.array([NormalDist().inv_cdf((byte + 0.5) / 256) for byte in range(256)], np.float32)


def generate(
    n_train: int = 60000, n_test: int = 10000, seed: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """Draw x_train, y_train, x_test and y_test, all uint8; a smaller set of a seed is a prefix of a larger one."""
    if min(n_train, n_test, seed) < 0:
        raise DataError(f"strokes: n_train {n_train}, n_test {n_test}, seed {seed}; expected integers >= 0")
    return (*_draw_split(n_train, seed, 0), *_draw_split(n_test, seed, 1))


def _draw_split(n: int, seed: int, split: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    shape_seed, noise_seed = np.random.SeedSequence([seed, split]).spawn(2)
    shape_rng = np.random.Generator(np.random.Philox(shape_seed))
    noise_bits = np.random.Philox(noise_seed)
    pen = _Pen()
    x = np.empty((n, SIDE, SIDE), np.uint8)
    y = np.empty(n, np.uint8)
    for begin in range(0, n, _CHUNK):
        count = min(_CHUNK, n - begin)
        # Both generators hand out a fixed amount an image, so that chunks of any size give the same images.
        u_BK = shape_rng.random((count, _UNIFORMS))
        words = noise_bits.random_raw(count * SIDE * SIDE // 8)
        bytes_BYX = words.astype("<u8").view(np.uint8).reshape(count, SIDE, SIDE)
        y[begin : begin + count] = _draw_chunk(_Uniforms(u_BK), bytes_BYX, pen, x[begin : begin + count])
    return x, y


class _Uniforms:
    def __init__(self, u_BK: NDArray[np.float64]) -> None:
        self._u_BK = u_BK
        self._next = 0

    def take(self, low: float, high: float, *shape: int) -> NDArray[np.float64]:
        """(B, *shape) numbers in [low, high)."""
        count = math.prod(shape)
        u = self._u_BK[:, self._next : self._next + count]
        assert u.shape[1] == count, "raise _UNIFORMS"
        self._next += count
        return low + (high - low) * u.reshape(-1, *shape)


def _draw_chunk(
    u: _Uniforms, noise_BYX: NDArray[np.uint8], pen: "_Pen", out_BYX: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Draw one chunk into `out_BYX` and return its labels (B,)."""
    B = len(out_BYX)
    label_B = u.take(0, len(_GLYPHS)).astype(np.int64)
    style_B = u.take(0, _STYLES).astype(np.int64)
    ends = _SEGMENTS[label_B, style_B].reshape(B, -1, 2)  # (B, 2 S, xy)
    ends = _shake(ends, u)

    # A stray stroke in one image of four; elsewhere it has no length and lies on the glyph.
    stray = u.take(-1.2, 1.2, 1, 2) + np.concatenate([np.zeros((B, 1, 2)), u.take(-0.7, 0.7, 1, 2)], axis=1)
    has_stray_B = u.take(0, 1) < 0.25
    stray = np.where(has_stray_B[:, None, None], stray, ends[:, :1])
    ends = np.concatenate([ends, stray], axis=1)

    ends = _place(ends, u)
    radius_B = u.take(0.45, 1.5)
    ink_B = u.take(150, 255)
    noise_B = u.take(2, 26)
    distance_YXB = pen.distance(ends.reshape(B, -1, 2, 2).astype(np.float32))
    np.subtract((radius_B + 0.5).astype(np.float32), distance_YXB, out=distance_YXB)
    np.clip(distance_YXB, 0.0, 1.0, out=distance_YXB)
    distance_YXB *= ink_B.astype(np.float32)
    image_BYX = np.ascontiguousarray(distance_YXB.transpose(2, 0, 1))
    image_BYX += _normal_of_byte()[noise_BYX] * noise_B.astype(np.float32)[:, None, None]
    np.clip(image_BYX, 0.0, 255.0, out=image_BYX)
    np.rint(image_BYX, out=image_BYX)
    out_BYX[...] = image_BYX
    return label_B


def _shake(ends: NDArray[np.float64], u: _Uniforms) -> NDArray[np.float64]:
    """Bend the glyphs by a smooth map and move their corners; (B, 2 S, xy) in and out."""
    x, y = ends[..., 0], ends[..., 1]
    # Waves of low frequency move every point; nearby points, among them the two copies of a corner, move together.
    a = u.take(-0.16, 0.16, 2, 3)
    terms = np.stack([x * x - 0.4, x * y, y * y - 0.4], axis=-1)
    bent = ends + np.einsum("bpt,bct->bpc", terms, a)
    amplitude = u.take(-0.09, 0.09, 2, 2)
    frequency = u.take(1.5, 4.0, 2, 2)
    phase = u.take(0, 2 * math.pi, 2, 2)
    along = np.stack([y, x], axis=-1)  # each coordinate moves with the other one
    wave = np.sin(along[..., None] * frequency[:, None] + phase[:, None])
    result: NDArray[np.float64] = bent + np.einsum("bpct,bct->bpc", wave, amplitude)
    return result


def _place(ends: NDArray[np.float64], u: _Uniforms) -> NDArray[np.float64]:
    """Turn, shear, scale and shift into pixels, (B, 2 S, xy) in and out; rounded to the grid."""
    angle = u.take(-0.5, 0.5) * u.take(0.3, 1.0)
    shear = u.take(-0.35, 0.35)
    size = u.take(6.5, 10.5)
    stretch = u.take(0.75, 1.2)
    shift = u.take(-2.2, 2.2, 1, 2)
    cos, sin = np.cos(angle), np.sin(angle)
    x, y = ends[..., 0], ends[..., 1]
    x = (x * stretch[:, None]) + shear[:, None] * y
    rotated = np.stack([cos[:, None] * x - sin[:, None] * y, sin[:, None] * x + cos[:, None] * y], axis=-1)
    pixels = rotated * size[:, None, None] + shift + (SIDE - 1) / 2
    result: NDArray[np.float64] = np.rint(pixels * _GRID) / _GRID
    return result


class _Pen:
    """Distances from all pixels to the strokes of a chunk, in buffers that all chunks share."""

    def __init__(self) -> None:
        self._buffers: NDArray[np.float32] = np.empty((3, SIDE * SIDE * _CHUNK), np.float32)
        self._pixel = np.arange(SIDE, dtype=np.float32)[:, None]

    def distance(self, ends_BSEC: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the distance in pixels to the nearest segment, (Y, X, B), valid until the next call."""
        B = len(ends_BSEC)
        size = SIDE * SIDE * B
        nearest, along, across = (buffer[:size].reshape(SIDE, SIDE, B) for buffer in self._buffers)
        begin, end = np.moveaxis(ends_BSEC, 0, -1).transpose(1, 2, 0, 3).copy()  # each (xy, S, B)
        middle = (begin + end) * np.float32(0.5)
        length = np.sqrt(((end - begin) ** 2).sum(axis=0))
        # A segment without length is a dot: any direction will do.
        dx, dy = (end - begin) / np.maximum(length, np.float32(1e-6))
        dx = np.where(length > 0, dx, np.float32(1.0))
        half = length * np.float32(0.5)
        nearest.fill(np.inf)
        pixel = self._pixel
        for s in range(ends_BSEC.shape[1]):
            x, y = pixel - middle[0, s], pixel - middle[1, s]  # (X, B), (Y, B)
            # Coordinates along and across the segment; beyond its ends the former counts from the end.
            np.add((y * dy[s])[:, None], (x * dx[s])[None], out=along)
            np.abs(along, out=along)
            along -= half[s]
            np.maximum(along, 0.0, out=along)
            along *= along
            np.subtract((y * dx[s])[:, None], (x * dy[s])[None], out=across)
            across *= across
            along += across
            np.minimum(nearest, along, out=nearest)
        result: NDArray[np.float32] = np.sqrt(nearest, out=nearest)
        return result
