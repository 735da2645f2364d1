"""Generation of tokens by models that see earlier ones."""
