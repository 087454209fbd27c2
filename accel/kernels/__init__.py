"""Public ops, each defined by a pure-PyTorch reference that runs anywhere and is the oracle of any faster version."""
