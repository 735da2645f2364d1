"""What Keras' guides do, in scripts of our own: only their import line is another."""
