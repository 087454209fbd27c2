"""What a run settles before its first step: how long it is, the fastest keys, and whether a step
fits the memory."""
