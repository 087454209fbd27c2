"""The sum with a gated branch, its norm, and modulation: what stands between two layers."""
