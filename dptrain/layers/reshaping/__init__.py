"""Changes of shape: flattened, permuted, padded, cropped, enlarged."""
