"""Denoisers and what surrounds them: blocks, mixers, conditioning, samplers, autoencoders. Plain nn.Modules, no Hydra."""
