"""Measures samples: distances between sets of images, in several feature spaces."""
