"""Mixers: modules (B, L, D) -> (B, L, D) over the tokens of a grid; every mixer fits every
block."""
