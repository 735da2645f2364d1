"""Layers before a network: images, features, categories, texts, sounds."""
