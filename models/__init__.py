"""Denoisers and their parts (blocks, mixers, conditioning), samplers and autoencoders. Nothing here
imports Hydra."""
