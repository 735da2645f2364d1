"""Addition as a translation of digits, as in Keras' example "Sequence to sequence learning for performing number
addition" (S. Stokowiec, 2017), with `import dptrain as keras`.

    python examples/addition.py
    mpirun -n 2 python examples/addition.py

Both print the same numbers, and some sums that the model computes. An encoder reads "37+5 " backwards; its last state,
repeated for each digit, is the decoder's input. Source: W. Zaremba and I. Sutskever, "Learning to execute", 2014.
"""

import argparse

import numpy as np

import dptrain as keras
from dptrain import layers

LETTERS = "0123456789+ "


def encoded(texts, length):
    """Return texts as vectors with a 1 for each letter, (count, length, letters)."""
    places = np.array([[LETTERS.index(letter) for letter in text.ljust(length)] for text in texts])
    return np.eye(len(LETTERS), dtype=np.float32)[places]


def main() -> None:
    """Train on sums, and print how others come out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--units", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 10**options.digits, (options.samples, 2))
    questions = [f"{a}+{b}" for a, b in pairs]
    answers = [str(a + b) for a, b in pairs]
    x, y = encoded(questions, 2 * options.digits + 1), encoded(answers, options.digits + 1)
    held_out = options.samples // 10

    model = keras.Sequential(
        [
            keras.Input(x.shape[1:]),
            layers.LSTM(options.units, go_backwards=True),
            layers.RepeatVector(options.digits + 1),
            layers.LSTM(options.units, return_sequences=True),
            layers.Dense(len(LETTERS), activation="softmax"),
        ],
        seed=1,
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        "categorical_crossentropy",
        metrics=["accuracy"],
        device=options.device,
        dtype=options.dtype,
    )
    history = model.fit(
        x[held_out:], y[held_out:], batch_size=options.batch_size, epochs=options.epochs, verbose=0
    ).history
    loss, accuracy = model.evaluate(x[:held_out], y[:held_out], verbose=0)
    written = model.predict(x[:held_out], verbose=0).argmax(-1)
    if keras.rank() == 0:
        for epoch, (train_loss, train_accuracy) in enumerate(zip(history["loss"], history["accuracy"], strict=True), 1):
            print(f"epoch {epoch}: loss {train_loss:.6f} accuracy {train_accuracy:.4f}")
        sums = ["".join(LETTERS[place] for place in row).strip() for row in written]
        right = np.mean([mine == answer for mine, answer in zip(sums, answers, strict=False)])
        print(f"other sums: loss {loss:.6f} accuracy {accuracy:.4f}, {right:.1%} right in all digits")
        for question, answer in list(zip(questions, sums, strict=False))[:5]:
            print(f"{question} = {answer}")


if __name__ == "__main__":
    main()
