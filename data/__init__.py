"""Latent sets: manifest, shards, and loaders behind one protocol."""
