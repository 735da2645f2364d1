"""WAV files: integers and floating-point numbers, plain and extensible; damaged ones."""

import io
import struct
import wave

import numpy as np
import pytest

from dptrain.data.readers.wave import decoded_wave
from dptrain.errors import DataError

SOUND = np.sin(np.arange(40) / 3)[:, None] * [0.5, -1]
GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")


def encoded(samples, encoding, bits):
    """Return samples of -1 to 1 as bytes."""
    if encoding == 3:
        return samples.astype(f"<f{bits // 8}").tobytes()
    scaled = np.round(samples * (2.0 ** (bits - 1) - 1)).astype("<i4")
    if bits == 8:
        return (scaled + 128).astype(np.uint8).tobytes()
    return scaled.view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes()


def chunk(name, content):
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def file_of(data, encoding, bits, channels=2, *, extensible=False, frame=None, extra=b"", tail=GUID_TAIL):
    """Return a WAV file of a data chunk."""
    frame = channels * bits // 8 if frame is None else frame
    layout = struct.pack("<HHIIHH", 0xFFFE if extensible else encoding, channels, 8000, 8000 * frame, frame, bits)
    if extensible:
        layout += struct.pack("<HHIH", 22, bits, 3, encoding) + tail
    content = b"WAVE" + chunk(b"fmt ", layout) + extra + chunk(b"data", data)
    return b"RIFF" + struct.pack("<I", len(content)) + content


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("encoding", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
def test_encodings(encoding, bits, extensible):
    content = file_of(encoded(SOUND, encoding, bits), encoding, bits, extensible=extensible)
    decoded = decoded_wave(content, "a.wav", 8000)
    assert decoded.dtype == np.float32
    np.testing.assert_allclose(decoded, SOUND, atol=1e-7 if encoding == 3 else 2.0 ** (2 - min(bits, 24)))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_files_of_the_standard_library(width):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((2, width, 8000, len(SOUND), "NONE", ""))
        file.writeframes(encoded(SOUND, 1, 8 * width))
    np.testing.assert_allclose(decoded_wave(buffer.getvalue(), "a.wav"), SOUND, atol=2.0 ** (2 - 8 * min(width, 3)))


def test_other_chunks_are_skipped():
    content = file_of(encoded(SOUND, 1, 16), 1, 16, extra=chunk(b"LIST", b"odd"))
    np.testing.assert_allclose(decoded_wave(content + chunk(b"id3 ", b"later")[:9], "a.wav"), SOUND, atol=1e-4)


@pytest.mark.parametrize("cut", [1, 2, 79, 159])
def test_a_truncated_file_is_refused(cut):
    content = file_of(encoded(SOUND, 1, 16), 1, 16)
    with pytest.raises(
        DataError, match=f"a.wav: not a whole WAV file: chunk 'data' declares 160 bytes, .* {160 - cut} "
    ):
        decoded_wave(content[:-cut], "a.wav")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "first bytes \\(none\\)"),
        (b"ID3 no sound", "first bytes 494433206e6f"),
        (file_of(b"", 1, 16)[:30], "chunk 'fmt ' declares 16 bytes, the file has 10"),
        (file_of(b"", 1, 16)[:36], "no chunk 'data'"),
        (file_of(b"", 1, 16)[:12], "no chunk 'fmt '"),
        (file_of(b"", 1, 16)[:12] + chunk(b"data", b"12"), "chunk 'data' before chunk 'fmt '"),
        (file_of(b"", 1, 16)[:12] + chunk(b"fmt ", b"12"), "2 bytes in chunk 'fmt '"),
        (file_of(b"", 7, 8), r"encoding 7 \(mu-law\); expected 1 \(PCM\) or 3"),
        (file_of(b"", 2, 16, extensible=True), r"encoding 2 \(ADPCM\)"),
        (file_of(b"", 1, 16, extensible=True, tail=b"x" * 14), "unknown subformat 0100787878"),
        (file_of(b"", 0xFFFE, 16), "16 bytes in chunk 'fmt ', expected 40 for WAVE_FORMAT_EXTENSIBLE"),
        (file_of(b"", 3, 16), "16 bits, 2 channels, .* expected 32 or 64 bits"),
        (file_of(b"", 1, 48), "expected 8 or 16 or 24 or 32 bits"),
        (file_of(b"", 1, 0), "0 bits"),
        (file_of(b"", 1, 16, channels=0), "0 channels"),
        (file_of(b"", 1, 24, frame=8), "8 bytes for a sample of all channels"),
        (file_of(b"", 1, 16), "8000 samples a second; sampling_rate=16000"),
    ],
)
def test_what_cannot_be_read(content, message):
    with pytest.raises(DataError, match=f"a.wav: .*{message}"):
        decoded_wave(content, "a.wav", 16000)


def test_no_samples():
    assert decoded_wave(file_of(b"", 1, 16), "a.wav").shape == (0, 2)
    assert decoded_wave(file_of(b"12345", 1, 16), "a.wav").shape == (1, 2)  # no whole second sample
