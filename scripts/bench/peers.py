"""What other packages offer in the place of our operators, for `bench kernels`, where they are
installed.

Each is called as its users call it, on our inputs; what a package leaves out (gate and modulation,
the second direction) is PyTorch around it. Where it cannot do the same, it is let off: its scan
counts each token's own pair in both directions, since leaving one out would cost it another pass.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.text import first_line


def add_norm_by_layer_norm_fn(module: Any) -> Callable[..., Any]:
    return with_gate_and_modulation(partial(by_keywords, module.layer_norm_fn, is_rms_norm=True))


def add_norm_by_rms_norm(module: Any) -> Callable[..., Any]:
    return with_gate_and_modulation(partial(by_keywords, module.rms_norm))


def by_keywords(
    function: Callable[..., Any], x: Tensor, residual: Tensor, weight: Tensor, **more: bool
) -> Any:
    """mamba-ssm and fla call the same arguments the same."""
    return function(
        x, weight, None, residual=residual, eps=1e-6, prenorm=True, residual_in_fp32=True, **more
    )


def add_norm_by_liger(module: Any) -> Callable[..., Any]:
    # It keeps the residual in the dtype of the branch, so the branch must be fp32 for an fp32
    # stream.
    return with_gate_and_modulation(
        lambda x, residual, weight: module.LigerFusedAddRMSNormFunction.apply(
            x.float(), residual, weight, 1e-6
        )
    )


def with_gate_and_modulation(add_and_norm: Callable[..., Any]) -> Callable[..., Any]:
    def add_norm(
        branch: Tensor, gate: Tensor, residual: Tensor, scale: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight = torch.ones(branch.shape[-1], device=branch.device)
        h, z = add_and_norm(gate.unsqueeze(1) * branch, residual, weight)
        return h.to(branch.dtype) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1), z

    return add_norm


def flipped_pair(scan: Callable[..., Tensor]) -> Callable[..., Any]:
    """A causal scan twice, once on everything reversed: what the published bidirectional models
    do."""

    def both(
        x: Tensor,
        dt: Tensor,
        dt_bias: Tensor,
        A_log: Tensor,
        B_in: Tensor,
        C_out: Tensor,
        D: Tensor,
    ) -> tuple[Tensor]:
        A = -A_log.exp()
        ahead = scan(x, dt[:, :, 0], dt_bias[0], A[0], B_in[:, :, 0], C_out[:, :, 0], D)
        x_turned, dt_turned, B_turned, C_turned = (
            t.flip(1) for t in (x, dt[:, :, 1], B_in[:, :, 1], C_out[:, :, 1])
        )
        behind = scan(x_turned, dt_turned, dt_bias[1], A[1], B_turned, C_turned, None)
        return (ahead + behind.flip(1),)

    return both


def ssd_by_mamba(module: Any) -> Callable[..., Any]:
    return flipped_pair(
        lambda x, dt, dt_bias, A, B_in, C_out, D: module.mamba_chunk_scan_combined(
            x,
            dt,
            A,
            B_in.unsqueeze(2),
            C_out.unsqueeze(2),
            256,
            D=D,
            dt_bias=dt_bias,
            dt_softplus=True,
        )
    )


def ssd_by_simple_gla(module: Any) -> Callable[..., Any]:
    def scan(
        x: Tensor,
        dt: Tensor,
        dt_bias: Tensor,
        A: Tensor,
        B_in: Tensor,
        C_out: Tensor,
        D: Tensor | None,
    ) -> Tensor:
        step = F.softplus(dt.float() + dt_bias)
        heads = x.shape[2]
        queries, keys = (t.unsqueeze(2).expand(-1, -1, heads, -1) for t in (C_out, B_in))
        v = (x * step.unsqueeze(-1)).to(x.dtype)
        y, _ = module.chunk_simple_gla(queries, keys, v, g=step * A, scale=1.0)
        return y if D is None else y + (D.unsqueeze(-1) * x).to(x.dtype)

    return flipped_pair(scan)


class Peer(NamedTuple):
    """A package's way to one of our operators."""

    package: str
    module: str
    operator: str
    build: Callable[[Any], Callable[..., Any]]
    """From the imported module to a function of our operator's inputs."""


PEERS = (
    Peer("mamba-ssm", "mamba_ssm.ops.triton.layer_norm", "add_norm", add_norm_by_layer_norm_fn),
    Peer("fla", "fla.modules.layernorm", "add_norm", add_norm_by_rms_norm),
    Peer("Liger", "liger_kernel.ops.fused_add_rms_norm", "add_norm", add_norm_by_liger),
    Peer("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "bidirectional_ssd", ssd_by_mamba),
    Peer("fla", "fla.ops.simple_gla", "bidirectional_ssd", ssd_by_simple_gla),
)


def found() -> tuple[dict[str, dict[str, Callable[..., Any]]], dict[str, str]]:
    """Operator -> package -> function, for what can be imported; and why the rest cannot."""
    functions: dict[str, dict[str, Callable[..., Any]]] = defaultdict(dict)
    absent = {}
    for package, module, operator, build in PEERS:
        try:
            functions[operator][package] = build(importlib.import_module(module))
        except Exception as error:  # a package may fail to import in ways of its own
            absent[f"{operator} of {package}"] = f"{type(error).__name__}: {first_line(error)}"
    return dict(functions), absent
