"""Turns images, and latents of other tools, into latent sets: once per data set, before any
training."""
