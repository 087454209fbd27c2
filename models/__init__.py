"""Denoisers and their parts: blocks, mixers, conditioning, samplers, autoencoders. No Hydra
here."""
