"""The depthwise convolution over neighbouring tokens, with SiLU."""
