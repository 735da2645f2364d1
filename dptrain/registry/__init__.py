"""Objects by name: looking names up, and Keras' JSON descriptions of objects."""
