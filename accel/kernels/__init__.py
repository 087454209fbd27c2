"""Fused operators, each with its definition in PyTorch.

The setting below keeps fused multiply-add on: a product and the following addition round once, as
in CUDA's compiler and in Inductor. Triton 3.9 asks for an explicit choice, and 3.10 changes the
default, which would change every result.
"""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
