"""Compares the kernels of our operators with their definitions in PyTorch, in the calls that a real
block makes.

A kernel has parity if the error of each output, gradients included, is at most twice the error that
the definition makes in the run's dtype. Both errors are differences from the exact answer, which
the definition computes in the next wider dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from accel.kernels.registry import OPERATORS, Operator
from common.libraries import disable_tf32

ERROR_FLOOR = 2e-5
"""Relative error that a kernel's output may have in addition to twice the error of its definition.
Summing in another order alone changes a result this much, even if the definition is nearly
exact."""
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Comparison(NamedTuple):
    """The comparison of one output of a kernel with the output of its definition. Both errors are
    relative to the norm of the exact answer."""

    output: str
    error: float
    definition_error: float
    fault: str | None = None

    @property
    def excess(self) -> float:
        """The kernel's error divided by the largest permitted error; the kernel fails if this is
        above 1. Infinite if the output has a `fault`, such as a wrong shape."""
        return math.inf if self.fault else self.error / (2.0 * self.definition_error + ERROR_FLOOR)

    def describe_refusal(self) -> str | None:
        """Returns a sentence that says why the kernel fails; None if it passes."""
        if self.excess <= 1.0:
            return None
        errors = (
            f"has an error of {self.error:.0e}, its definition one of {self.definition_error:.0e}"
        )
        return f"{self.output} {self.fault or errors}"


class Poison(TorchDispatchMode):
    """Fills newly allocated floating-point tensors with NaN, so that elements which a kernel never
    writes show as NaN."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ALLOCATIONS and result.is_floating_point():
            result.fill_(float("nan"))
        return result


class ComparingMode(TorchDispatchMode):
    """Inside the context, each call of one of our operators returns the result of its definition,
    and also runs the operator's kernel and adds a comparison of both results to `comparisons`."""

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
            comparisons, result = compare_operator(name, operator, args, written)
        self.comparisons += comparisons
        return result


def compare_operator(
    name: str, operator: Operator, arguments: Sequence[Any], written: Sequence[int]
) -> tuple[list[Comparison], Any]:
    """Compares what a kernel computes with what its definition computes: the outputs, and the
    arguments that both write in place, whose indices are `written`. Returns a comparison for each
    output and each of these arguments, and the definition's result."""
    assert operator.kernel is not None

    def list_outputs(results: Any, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        results = results if isinstance(results, tuple) else (results,)
        return *results, *(arguments[i].clone() for i in written)

    # Call the kernel twice with the same inputs: unless the operator is declared not repeatable,
    # both results must be equal bit for bit. Allow dispatch to re-enter, because this code runs
    # inside a dispatch mode and a kernel may use autograd.
    calls = []
    for _ in range(2):
        for i in written:
            arguments[i].fill_(math.nan)
        with enable_reentrant_dispatch(), Poison():
            calls.append(list_outputs(operator.kernel(*arguments), arguments))
        if arguments[0].is_cuda:
            torch.cuda.synchronize(arguments[0].device)

    if not operator.repeatable:
        calls[1] = calls[0]

    with disable_tf32():
        wide = widen(arguments)
        exact = list_outputs(operator.definition(*wide), wide)
    result = operator.definition(*arguments)
    pairs = zip(*calls, list_outputs(result, arguments), exact, strict=True)
    return [compare_output(f"{name}[{i}]", *pair) for i, pair in enumerate(pairs)], result


def compare_output(
    name: str, kernel: Tensor, again: Tensor, definition: Tensor, exact: Tensor
) -> Comparison:
    """Compares one output of a kernel with the same output of its definition, and with the exact
    answer. `kernel` and `again` are the kernel's output from two calls with equal inputs."""
    fault = None
    if kernel.shape != definition.shape or kernel.dtype != definition.dtype:
        expected = f"{list(definition.shape)} and {definition.dtype}"
        fault = f"has shape {list(kernel.shape)} and {kernel.dtype}, not {expected}"
    elif not kernel.isfinite().all():
        fault = "is not finite, or has elements that no program wrote"
    elif not torch.equal(kernel, again):
        fault = "differs between two equal calls"
    if fault:
        return Comparison(name, 0.0, 0.0, fault)
    return Comparison(name, relative_error(kernel, exact), relative_error(definition, exact))


def widen(arguments: Sequence[Any]) -> list[Any]:
    """Casts 16-bit arguments to fp32; if there are none, casts fp32 arguments to fp64."""
    floats = [a for a in arguments if isinstance(a, Tensor) and a.is_floating_point()]
    narrowest = min(tensor.dtype.itemsize for tensor in floats)
    widened = {id(t): t.to(WIDER[t.dtype]) for t in floats if t.dtype.itemsize == narrowest}
    return [widened.get(id(argument), argument) for argument in arguments]


def relative_error(tensor: Tensor, exact: Tensor) -> float:
    """Returns the norm of the error divided by the norm of the exact answer; the norm of the error
    alone if the exact answer is zero."""
    error = (tensor.double() - exact.double()).norm().item()
    size = exact.double().norm().item()
    return error / size if size else error
