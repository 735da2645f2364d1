"""Functions of single elements, and over axes, made of the basic ones: Keras has them in `ops.numpy`."""
