"""Reads sets of latents: the manifest, the shards, and loaders with one common base class."""
