"""Compares the kernels of our operators with their definitions, at the calls that a real block
makes.

Parity is a bound on the error of each output, those of backward operators (the gradients) among
them: at most twice the error that the definition itself makes in the run's dtype, both measured
against the definition in the next wider dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from accel.kernels.operator import OPERATORS, Operator
from common.libraries import disable_tf32

ERROR_FLOOR = 2e-5
"""What an output may be off, relative to its norm, where the definition is as good as exact: sums
in another order."""
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Comparison(NamedTuple):
    """One output of a kernel beside the definition's; errors are norms over the norm of the
    answer."""

    output: str
    error: float
    definition_error: float
    fault: str | None = None

    @property
    def excess(self) -> float:
        """The error over its bound; a kernel is refused above 1."""
        return math.inf if self.fault else self.error / (2.0 * self.definition_error + ERROR_FLOOR)

    def describe_refusal(self) -> str | None:
        """What is wrong with the kernel, as a sentence; None if nothing is."""
        if self.excess <= 1.0:
            return None
        errors = (
            f"has an error of {self.error:.0e}, its definition one of {self.definition_error:.0e}"
        )
        return f"{self.output} {self.fault or errors}"


class Poison(TorchDispatchMode):
    """Fills fresh memory with NaN, so that an element that no program writes is seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ALLOCATIONS and result.is_floating_point():
            result.fill_(float("nan"))
        return result


class ComparingMode(TorchDispatchMode):
    """Computes our operators by definition, and compares the kernel of each on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.comparisons: list[Comparison] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "fastlatent":
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        operator = OPERATORS[name]
        if operator.kernel is None:
            with self:
                return operator.definition(*args)
        with torch.no_grad(), torch.amp.autocast(args[0].device.type, enabled=False):
            infos = [argument.alias_info for argument in func._schema.arguments]
            written = [i for i, info in enumerate(infos) if info is not None and info.is_write]
            comparisons, own = compare_operator(name, operator, args, written)
        self.comparisons += comparisons
        return own


def compare_operator(
    name: str, operator: Operator, arguments: Sequence[Any], written: Sequence[int]
) -> tuple[list[Comparison], Any]:
    """Compares each output of an operator's kernel with its definition, and then each argument that
    is `written`; returns the definition's outputs too."""
    assert operator.kernel is not None

    def outputs(results: Any, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        results = results if isinstance(results, tuple) else (results,)
        return *results, *(arguments[i].clone() for i in written)

    # The kernel twice, for two equal calls give equal bits, unless the operator says otherwise; as
    # outside of a mode, for one may use autograd.
    calls = []
    for _ in range(2):
        for i in written:
            arguments[i].fill_(math.nan)
        with enable_reentrant_dispatch(), Poison():
            calls.append(outputs(operator.kernel(*arguments), arguments))
        if arguments[0].is_cuda:
            torch.cuda.synchronize(arguments[0].device)

    if not operator.repeatable:
        calls[1] = calls[0]

    with disable_tf32():
        wide = widen(arguments)
        exact = outputs(operator.definition(*wide), wide)
    result = operator.definition(*arguments)
    pairs = zip(*calls, outputs(result, arguments), exact, strict=True)
    return [compare_output(f"{name}[{i}]", *pair) for i, pair in enumerate(pairs)], result


def compare_output(
    name: str, kernel: Tensor, again: Tensor, own: Tensor, right: Tensor
) -> Comparison:
    """Compares what two calls of a kernel gave with the definition's answer and the right one."""
    fault = None
    if kernel.shape != own.shape or kernel.dtype != own.dtype:
        ours = f"{list(kernel.shape)} and {kernel.dtype}"
        fault = f"has shape {ours}, not {list(own.shape)} and {own.dtype}"
    elif not kernel.isfinite().all():
        fault = "is not finite, or has elements that no program wrote"
    elif not torch.equal(kernel, again):
        fault = "differs between two equal calls"
    if fault:
        return Comparison(name, 0.0, 0.0, fault)
    return Comparison(name, relative_error(kernel, right), relative_error(own, right))


def widen(arguments: Sequence[Any]) -> list[Any]:
    """Arguments with 16 bits in fp32; where there are none, those in fp32 in fp64."""
    floats = [a for a in arguments if isinstance(a, Tensor) and a.is_floating_point()]
    least = min(tensor.dtype.itemsize for tensor in floats)
    widened = {id(t): t.to(WIDER[t.dtype]) for t in floats if t.dtype.itemsize == least}
    return [widened.get(id(argument), argument) for argument in arguments]


def relative_error(tensor: Tensor, right: Tensor) -> float:
    """Norm of the error over the norm of the answer; the error's where the answer is zero."""
    error = (tensor.double() - right.double()).norm().item()
    size = right.double().norm().item()
    return error / size if size else error
