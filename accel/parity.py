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
from torch.utils._python_dispatch import TorchDispatchMode

from accel.kernels.operator import OPERATORS, Operator
from common.exact_products import exact_products

FLOOR = 2e-5
"""What an output may be off, relative to its norm, where the definition is as good as exact: sums
in another order."""
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
FRESH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


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
        return math.inf if self.fault else self.error / (2.0 * self.definition_error + FLOOR)

    def refusal(self) -> str | None:
        if self.fault is None and self.excess <= 1.0:
            return None
        errors = (
            f"has an error of {self.error:.0e}, its definition one of {self.definition_error:.0e}"
        )
        return f"{self.output} {self.fault or errors}"


class Poison(TorchDispatchMode):
    """Fills fresh memory with NaN, so that an element that no program writes is seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in FRESH and result.is_floating_point():
            result.fill_(float("nan"))
        return result


class Comparing(TorchDispatchMode):
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
            comparisons, own = compared(name, operator, args, written_by(func))
        self.comparisons += comparisons
        return own


def written_by(func: Any) -> list[int]:
    """Which arguments an operator writes to."""
    arguments = enumerate(func._schema.arguments)
    return [
        i
        for i, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def compared(
    name: str, operator: Operator, arguments: Sequence[Any], written: Sequence[int] = ()
) -> tuple[list[Comparison], Any]:
    """Compares each output of an operator's kernel with its definition, and then each argument that
    is `written`; returns the definition's outputs too."""
    assert operator.kernel is not None

    def outputs(results: Any, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        return *as_tuple(results), *(arguments[i].clone() for i in written)

    kernel = []
    for _ in range(2):
        for i in written:
            arguments[i].fill_(float("nan"))
        with Poison():
            kernel.append(outputs(operator.kernel(*arguments), arguments))
        if arguments[0].is_cuda:
            torch.cuda.synchronize(arguments[0].device)
    with exact_products():
        wide = [wider(a, arguments) for a in arguments]
        exact = outputs(operator.definition(*wide), wide)
    result = operator.definition(*arguments)
    found = []
    for i, (right, own, first, second) in enumerate(
        zip(exact, outputs(result, arguments), *kernel, strict=True)
    ):
        fault = None
        if first.shape != own.shape or first.dtype != own.dtype:
            fault = (
                f"has shape {list(first.shape)} and {first.dtype}, not {list(own.shape)} and "
                f"{own.dtype}"
            )
        elif not first.isfinite().all():
            fault = "is not finite, or has elements that no program wrote"
        elif not torch.equal(first, second):
            fault = "differs between two equal calls"
        errors = (0.0, 0.0) if fault else (relative(first, right), relative(own, right))
        found.append(Comparison(f"{name}[{i}]", *errors, fault))
    return found, result


def wider(argument: Any, arguments: Sequence[Any]) -> Any:
    """`argument` in fp32 among 16-bit arguments, in fp64 among fp32 ones."""
    if not isinstance(argument, Tensor) or not argument.is_floating_point():
        return argument
    narrow = any(isinstance(a, Tensor) and a.dtype.itemsize == 2 for a in arguments)
    return (
        argument.to(WIDER[argument.dtype])
        if argument.dtype.itemsize == 2 or not narrow
        else argument
    )


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def relative(tensor: Tensor, right: Tensor) -> float:
    """Norm of the error over the norm of the answer; the error's where the answer is zero."""
    error = (tensor.double() - right.double()).norm().item()
    size = right.double().norm().item()
    return error / size if size else error
