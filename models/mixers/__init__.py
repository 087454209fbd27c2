"""Mixers: modules (B, L, D) -> (B, L, D) over the tokens of a grid; any of them fits into any
block."""
