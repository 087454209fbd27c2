"""Denoisers and what surrounds them: blocks, mixers, conditioning, samplers, autoencoders. No Hydra
here."""
