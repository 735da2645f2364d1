"""A trained model behind HTTP: `python -m dptrain serve RUN`."""
