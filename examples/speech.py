"""Recognition of spoken commands by a GRU on mel spectrograms, as in Keras' examples for "Speech Commands" (P. Warden,
2018), with `import dptrain as keras`, on synthetic words.

    python examples/speech.py
    python examples/speech.py --wav speech_commands/    # a folder of .wav files for each word, one second at 16 kHz
    mpirun -n 2 python examples/speech.py

The numbers are the same on any number of ranks. A word is two or three vowels, each the sum of two formants; speakers
differ in pitch, speed and loudness, and there is noise.
"""

import argparse

import numpy as np

import dptrain as keras
from dptrain import layers

# Hz of the first two formants; G. E. Peterson and H. L. Barney, "Control methods used in a study of the vowels", 1952.
FORMANTS = {"i": (270, 2290), "e": (530, 1840), "a": (730, 1090), "u": (300, 870)}
WORDS = {"up": "au", "down": "au-i", "yes": "ie", "no": "ea", "go": "ua"}


def spoken(count, rate, seed):
    """Return sounds (count, rate), a second each, float32 of -1 to 1, and their words' numbers."""
    rng = np.random.default_rng(seed)
    labels, words = rng.integers(0, len(WORDS), count), list(WORDS.values())
    sounds = rng.normal(0, 0.03, (count, rate))
    for sound, label in zip(sounds, labels, strict=True):
        pitch, length = rng.uniform(0.85, 1.2), int(rate * rng.uniform(0.12, 0.2))
        start = int(rng.integers(0, rate - len(words[label]) * length))
        time = np.arange(length) / rate
        for vowel in words[label]:
            for formant in FORMANTS.get(vowel, ()):  # "-" is silence
                tone = np.sin(2 * np.pi * (pitch * formant * time + rng.random()))
                sound[start : start + length] += 0.3 * rng.uniform(0.5, 1) * np.hanning(length) * tone
            start += length
    return sounds.clip(-1, 1).astype(np.float32), labels


def main() -> None:
    """Train on commands, and print how many others are understood."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--wav", help="a folder with a folder of .wav files for each word")
    parser.add_argument("--samples", type=int, default=600, help="of made words")
    parser.add_argument("--rate", type=int, default=8000, help="samples a second of made words; of files 16000")
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    rate, words = options.rate, list(WORDS)
    if options.wav is None:
        data, held_out = (
            dict(zip("xy", spoken(count, rate, seed), strict=True))
            for seed, count in enumerate((options.samples, options.samples // 4))
        )
        data["batch_size"] = options.batch_size
    else:
        rate = 16000
        train, rest = keras.utils.audio_dataset_from_directory(
            options.wav,
            batch_size=options.batch_size,
            sampling_rate=rate,
            output_sequence_length=rate,
            seed=0,
            validation_split=0.2,
            subset="both",
            verbose=False,
        )
        words = train.class_names
        data, held_out = ({"x": part.map(lambda sounds, label: (sounds[..., 0], label))} for part in (train, rest))

    window = 2 ** int(np.log2(rate / 20))  # about 50 ms
    model = keras.Sequential(
        [
            keras.Input((rate,)),
            layers.MelSpectrogram(window, window // 2, sampling_rate=rate, num_mel_bins=24, max_freq=rate / 2),
            layers.Permute((2, 1)),
            layers.LayerNormalization(),
            layers.Conv1D(options.units, 3, activation="relu"),
            layers.GRU(options.units),
            layers.Dense(len(words), activation="softmax"),
        ],
        seed=1,
    )
    model.compile(
        keras.optimizers.Adam(0.003),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        device=options.device,
        dtype=options.dtype,
    )
    history = model.fit(**data, epochs=options.epochs, verbose=0).history
    loss, accuracy = model.evaluate(**held_out, verbose=0)
    if keras.rank() == 0:
        for epoch, (train_loss, train_accuracy) in enumerate(zip(history["loss"], history["accuracy"], strict=True), 1):
            print(f"epoch {epoch}: loss {train_loss:.6f} accuracy {train_accuracy:.4f}")
        print(f"other speakers: loss {loss:.6f} accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
