"""Fused operators, each with its definition: the same computation in plain PyTorch.

The setting below keeps fused multiply-add on in Triton: a product and the addition that follows it
are rounded once, not twice, as in code that nvcc or Inductor compiles. The choice is explicit,
because Triton 3.9 asks for a choice, and Triton 3.10 changes the default and thereby every result.
"""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
