"""Reads WAV files: RIFF with PCM or floating-point samples, also as WAVE_FORMAT_EXTENSIBLE.

Source: Microsoft, "Multiple channel audio data and WAVE files", 2007.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dptrain.errors import DataError, printable

Array = npt.NDArray[Any]
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_BITS = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}
_NAMES = {2: "ADPCM", 6: "A-law", 7: "mu-law", 0x11: "IMA ADPCM", 0x31: "GSM", 0x50: "MPEG", 0x55: "MP3"}
# A subformat is a GUID: the format's number, then these bytes.
_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")


class WaveFormat(NamedTuple):
    """The format chunk: the samples' encoding (1 PCM, 3 floating point), channels, frames a second, bytes a sample."""

    encoding: int
    channels: int
    rate: int
    width: int


def decoded_wave(content: bytes, path: Any, sampling_rate: int | None = None) -> Array:
    """Return the samples of a .wav file: (samples, channels), float32, of -1 to 1 for integers.

    Raises:
        DataError: no WAV file, a truncated one, another encoding than PCM and floating point, or another rate than
            `sampling_rate`, unless None.
    """
    name = printable(str(path))
    layout, data = _read(content, name)
    if sampling_rate is not None and layout.rate != sampling_rate:
        raise DataError(
            f"{name}: {layout.rate} samples a second; sampling_rate={sampling_rate}, and sounds are not resampled"
        )
    data = data[: len(data) - len(data) % (layout.width * layout.channels)]
    return _samples(data, layout).reshape(-1, layout.channels)


def _read(content: bytes, name: str) -> tuple[WaveFormat, bytes]:
    """Return the format and the data chunk."""
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise DataError(
            f"{name}: not a WAV file: first bytes {content[:12].hex() or '(none)'}, expected RIFF, a size and WAVE"
        )
    layout = None
    for chunk, data in _chunks(content, name):
        if chunk == b"fmt ":
            layout = _format(data, name)
        elif chunk == b"data":
            if layout is None:
                raise DataError(f"{name}: not a WAV file: chunk 'data' before chunk 'fmt '")
            return layout, data
    raise DataError(f"{name}: not a WAV file: no chunk {'data' if layout else 'fmt '!r}")


def _chunks(content: bytes, name: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the name and content of each chunk; refuse one that is cut."""
    begin = 12
    while begin + 8 <= len(content):
        chunk, size = struct.unpack_from("<4sI", content, begin)
        data = content[begin + 8 : begin + 8 + size]
        if len(data) < size:
            label = chunk.decode("ascii", "replace")
            raise DataError(
                f"{name}: not a whole WAV file: chunk {label!r} declares {size} bytes, the file has {len(data)} of "
                "them; copy or record it again"
            )
        yield chunk, data
        begin += 8 + size + size % 2  # chunks begin at even bytes


def _format(data: bytes, name: str) -> WaveFormat:
    """Check and return the format chunk."""
    if len(data) < 16:
        raise DataError(f"{name}: not a WAV file: {len(data)} bytes in chunk 'fmt ', expected 16 or more")
    encoding, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", data)
    if encoding == _EXTENSIBLE:
        if len(data) < 40:
            raise DataError(f"{name}: {len(data)} bytes in chunk 'fmt ', expected 40 for WAVE_FORMAT_EXTENSIBLE")
        if data[26:40] != _GUID_TAIL:
            raise DataError(f"{name}: unknown subformat {data[24:40].hex()}; expected PCM or floating point")
        (encoding,) = struct.unpack_from("<H", data, 24)
    if encoding not in _BITS:
        label = _NAMES.get(encoding, "unknown")
        raise DataError(f"{name}: encoding {encoding} ({label}); expected 1 (PCM) or 3 (floating point)")
    width = -(-bits // 8)  # fewer bits than a sample's bytes hold are its upper ones
    if channels < 1 or 8 * width not in _BITS[encoding] or frame != width * channels:
        expected = " or ".join(str(width) for width in _BITS[encoding])
        raise DataError(
            f"{name}: {bits} bits, {channels} channels, {frame} bytes for a sample of all channels; expected "
            f"{expected} bits, and their bytes times the channels"
        )
    return WaveFormat(encoding, channels, rate, width)


def _samples(data: bytes, layout: WaveFormat) -> Array:
    """Return all channels' samples in turn, float32."""
    width = layout.width
    if layout.encoding == _FLOAT:
        return np.frombuffer(data, f"<f{width}").astype(np.float32)
    if width == 1:  # without a sign
        return np.frombuffer(data, np.uint8).astype(np.float32) / 128 - 1
    if width == 3:
        whole = np.zeros((len(data) // 3, 4), np.uint8)
        whole[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return (whole.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
    return (np.frombuffer(data, f"<i{width}") / 2.0 ** (8 * width - 1)).astype(np.float32)
