"""Our operators, each beside its definition in PyTorch.

Triton compiles the kernels with fused multiply-add: a product and the sum it goes into round once,
as in CUDA's own compiler and in Inductor. Triton 3.9 wants that said, and 3.10 changes the default,
which would change every result.
"""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
