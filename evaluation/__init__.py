"""How good samples are: distances between sets of images, in several feature spaces."""
