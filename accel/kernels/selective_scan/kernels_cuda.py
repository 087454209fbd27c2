"""Calls mamba-ssm's CUDA kernel of the selective scan, `selective_scan_fn`, if that package is
installed (https://github.com/state-spaces/mamba). The kernel takes tensors with channels before
tokens, (B, E, L).

Its backward kernel adds up the gradients of A, B, C, D and the bias with atomic additions, so the
order of the additions, and with it the last bits of these gradients, varies from call to call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import UserError


def launch_forward(*inputs: Tensor) -> Tensor:
    """Calls mamba-ssm's forward kernel with the inputs of `selective_scan`; returns y (B, L, E).
    Raises UserError if mamba-ssm is not installed."""
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"The kernel of the selective scan is mamba-ssm's, which cannot be imported ({error}); "
            "pip install mamba-ssm, or use runtime.fused_scan=false."
        ) from error

    # The kernel requires one dtype for all inputs with a token dimension (x, dt, B_in, C_out), and
    # fp32 for the other inputs, so cast them.
    x, dt, dt_bias, A_log, B_in, C_out, D = inputs
    x, dt, B_in, C_out = (t.mT.to(x.dtype) for t in (x, dt, B_in, C_out))
    A = -A_log.float().exp()
    y = selective_scan_fn(x, dt, A, B_in, C_out, D.float(), None, dt_bias.float(), True)
    return y.mT.contiguous()


def launch_backward(dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of the seven inputs of `launch_forward`; runs the forward kernel again
    for this. Raises UserError if deterministic algorithms are on, because the kernel's atomic
    additions vary from call to call."""
    if torch.are_deterministic_algorithms_enabled():
        raise UserError(
            "deterministic=true cannot use mamba-ssm's kernel, whose backward pass adds in any "
            "order; use runtime.fused_scan=false."
        )
    leaves = [t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        grads = torch.autograd.grad(launch_forward(*leaves), leaves, dy)
    return tuple(g.contiguous() for g in grads)
