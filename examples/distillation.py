"""Knowledge distillation: a small model learns from labels and from the softened predictions of a larger one, with its
own `compute_loss`, as in Keras' example of that name (K. Borup, 2020), with `import dptrain as keras`.

    python examples/distillation.py
    mpirun -n 2 python examples/distillation.py

Both print the same losses. `--data-dir DIR` uses MNIST from DIR instead of the built-in strokes. Source: G. Hinton, O.
Vinyals and J. Dean, "Distilling the knowledge in a neural network", 2015.
"""

import argparse

import numpy as np

import dptrain as keras
from dptrain import layers, ops


def make_network(width, name):
    """Return a model from (rows, 28, 28, 1) images to ten logits."""
    return keras.Sequential(
        [
            keras.Input(shape=(28, 28, 1)),
            layers.Conv2D(width, (3, 3), strides=(2, 2), padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.MaxPooling2D(pool_size=(2, 2), strides=(1, 1), padding="same"),
            layers.Conv2D(2 * width, (3, 3), strides=(2, 2), padding="same"),
            layers.Flatten(),
            layers.Dense(10),
        ],
        name=name,
    )


class Distiller(keras.Model):
    """A student that is trained beside a teacher, whose weights stay as they are."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.teacher.trainable = False
        self.built = True  # because its models are

    def compile(self, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3, **options):
        """Configure the distiller.

        Args:
            student_loss_fn: of the labels and the student's logits.
            distillation_loss_fn: of both models' softened predictions.
            alpha: weight of the student's loss, 1 - alpha that of the other.
            temperature: by which logits are divided; the larger, the softer.
            options: optimizer, metrics and others of `Model.compile`.
        """
        super().compile(**options)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        teacher_predictions = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_predictions / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        )
        # Gradients of softened predictions are smaller by the square of the temperature.
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss * self.temperature**2


def main() -> None:
    """Train a teacher, a student of it and the same network alone; print losses and accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", metavar="DIR", help="of MNIST's four files")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="float32, or float64 on the CPU")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=4000, help="to train on; a quarter of them to test on")
    parser.add_argument("--width", type=int, default=16, help="filters of the teacher; the student has a quarter")
    arguments = parser.parse_args()

    if arguments.data_dir is None:
        train, test = keras.datasets.load("strokes")
    else:
        train, test = keras.datasets.mnist.load_data(arguments.data_dir)
    (x, y), (x_test, y_test) = (
        (np.reshape(images[:count], (-1, 28, 28, 1)).astype("float32") / 255, labels[:count])
        for (images, labels), count in ((train, arguments.images), (test, arguments.images // 4))
    )
    keras.utils.set_random_seed(1)
    teacher = make_network(arguments.width, "teacher")
    student = make_network(arguments.width // 4, "student")
    alone = keras.models.clone_model(student)
    alone.set_weights(student.get_weights())

    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"device": arguments.device, "dtype": arguments.dtype}
    fit = {"batch_size": 64, "epochs": arguments.epochs, "verbose": 0}
    for model in (teacher, alone):
        model.compile("adam", cross_entropy, metrics=[keras.metrics.SparseCategoricalAccuracy()], **options)
        model.fit(x, y, **fit)
    distiller = Distiller(student, teacher)
    distiller.compile(
        cross_entropy,
        keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=10,
        optimizer="adam",
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        **options,
    )
    history = distiller.fit(x, y, **fit).history
    models = {"teacher": teacher, "student of it": distiller, "the same network alone": alone}
    accuracies = {name: model.evaluate(x_test, y_test, verbose=0)[1] for name, model in models.items()}
    if keras.rank() == 0:
        for epoch, loss in enumerate(history["loss"], 1):
            print(f"epoch {epoch}: loss {loss:.5f}")
        for name, accuracy in accuracies.items():
            print(f"{name}: {accuracy:.3f}")


if __name__ == "__main__":
    main()
