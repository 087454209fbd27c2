"""Tries fused kernels on one block of a model, in a process of its own, which may crash or hang without harm.

    python -m accel.trial <folder>      accel/proof.py writes the folder, starts this, and reads found.json

Contact and parity: the block runs forward and backward on definitions; at each call of one of our operators its kernel
gets the same tensors. Time: the whole block as the run would run it, with a kernel and without.

Parity is a bound on the error of each output, the gradients among them: at most twice the error that the definition
itself makes in the run's dtype, both measured against the definition in the next wider dtype.
"""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel.evidence import BlockEvidence, BlockProbe
from accel.kernels.operator import OPERATORS, Operator
from accel.precision import Precision
from accel.stack import AccelerationStack
from accel.technique import first_line

SAMPLES = 4
"""Of a batch, in the parity test."""
REPEATS, INPUT_SETS = 20, 3
FLOOR = 2e-5
"""What an output may be off, relative to its norm, where the definition is as good as exact: sums in another order."""
COMPILING = 900.0
"""Seconds that compiling a block may take."""
HEAD_START = 100_000_000
"""Clock cycles that the GPU waits if the run replays a graph: all is launched by then, so launching costs nothing."""
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
FRESH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
Inputs = tuple[Tensor, ...]


class Comparison(NamedTuple):
    """One output of a kernel beside the definition's; errors are norms over the norm of the answer."""

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
        errors = f"has an error of {self.error:.0e}, its definition one of {self.definition_error:.0e}"
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
        with torch.no_grad(), torch.amp.autocast(args[0].device.type, enabled=False):
            comparisons, own = compared(name, OPERATORS[name], args)
        self.comparisons += comparisons
        return own


def compared(name: str, operator: Operator, arguments: Sequence[Any]) -> tuple[list[Comparison], Any]:
    """Compares each output of an operator's kernel with its definition; returns the definition's outputs too."""
    with exact_products():
        exact = as_tuple(operator.definition(*(wider(a, arguments) for a in arguments)))
    result = operator.definition(*arguments)
    kernel = []
    for _ in range(2):
        with Poison():
            kernel.append(as_tuple(operator.kernel(*arguments)))
        synchronise(arguments[0].device)
    found = []
    for i, (right, own, first, second) in enumerate(zip(exact, as_tuple(result), *kernel, strict=True)):
        fault = None
        if first.shape != own.shape or first.dtype != own.dtype:
            fault = f"has shape {list(first.shape)} and {first.dtype}, not {list(own.shape)} and {own.dtype}"
        elif not first.isfinite().all():
            fault = "is not finite, or has elements that no program wrote"
        elif not torch.equal(first, second):
            fault = "differs between two equal calls"
        errors = (0.0, 0.0) if fault else (relative(first, right), relative(own, right))
        found.append(Comparison(f"{name}[{i}]", *errors, fault))
    return found, result


@contextmanager
def exact_products() -> Iterator[None]:
    """No TF32 inside."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def wider(argument: Any, arguments: Sequence[Any]) -> Any:
    """`argument` in fp32 among 16-bit arguments, in fp64 among fp32 ones."""
    if not isinstance(argument, Tensor) or not argument.is_floating_point():
        return argument
    narrow = any(isinstance(a, Tensor) and a.dtype.itemsize == 2 for a in arguments)
    return argument.to(WIDER[argument.dtype]) if argument.dtype.itemsize == 2 or not narrow else argument


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def relative(tensor: Tensor, right: Tensor) -> float:
    """Norm of the error over the norm of the answer; the error's where the answer is zero."""
    error, size = (tensor.double() - right.double()).norm().item(), right.double().norm().item()
    return error / size if size else error


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def switches(block: nn.Module, key: str) -> list[nn.Module]:
    return [module for module in block.modules() if hasattr(module, key)]


def switch(block: nn.Module, key: str, on: bool) -> None:
    for module in switches(block, key):
        setattr(module, key, on)


def random_inputs(metas: Sequence[Any], samples: int, device: torch.device, seed: int) -> Inputs:
    """Normal values in the recorded shapes, strides and dtypes, with `samples` in the first dimension."""
    generator = torch.Generator(device).manual_seed(seed)
    inputs = []
    for (_, *shape), stride, dtype in metas:
        tensor = torch.empty_strided((samples, *shape), stride, dtype=getattr(torch, dtype), device=device)
        inputs.append(tensor.normal_(generator=generator).requires_grad_())
    return tuple(inputs)


def forward_and_backward(
    block: Any, inputs: Inputs, autocast: AbstractContextManager[Any], seeds: list[Tensor] | None = None
) -> list[Tensor]:
    """Runs a block both ways from `seeds`, the gradients of its outputs; returns them, drawn if there were none."""
    with autocast:
        outputs = [t for t in block(*inputs) if t.requires_grad]
    if seeds is None:
        seeds = [torch.randn_like(t) for t in outputs]
    wanted = [*inputs, *block.parameters()]
    torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
    return seeds


class Holder(nn.Module):
    """A model of one block, for the techniques to act on."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])


class Variant:
    """One block as the run would run it: its autocast, attention, checkpointing and compile; some kernels on."""

    def __init__(self, block: nn.Module, on: set[str], runtime: dict[str, Any], device: torch.device) -> None:
        block = copy.deepcopy(block)
        for key in on:
            switch(block, key, True)
        self.stack = AccelerationStack(runtime, device, only=[k for k in runtime if k != "precision"])
        self.block = self.stack.on_model(Holder(block)).blocks[0]
        self.autocast = Precision(runtime["precision"], device).autocast
        self.device, self.captured = device, bool(runtime["cuda_graph"])
        self.seeds: list[Tensor] | None = None
        self.kept = 0

    def __call__(self, inputs: Inputs) -> None:
        self.seeds = forward_and_backward(self.block, inputs, self.autocast(), self.seeds)

    def warm_up(self, inputs: list[Inputs]) -> bool:
        """Compiles and counts the bytes kept for backward; False if memory runs out."""
        notes: list[BlockEvidence] = []
        try:
            self.stack.run_until_it_works(lambda: [self(some) for some in inputs])
            with self.autocast():
                BlockProbe(self.block, notes)(*inputs[0])
        except torch.OutOfMemoryError:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return False
        self.kept = notes[-1].saved_bytes
        return True

    def milliseconds(self, inputs: Inputs) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            self(inputs)
            return 1e3 * (time.perf_counter() - start)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.captured:
            torch.cuda._sleep(HEAD_START)
        start.record()
        self(inputs)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


class Trial:
    """What a folder asks for: job.json and the blocks; what is found goes to found.json after each part."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.job = folder, json.loads((folder / "job.json").read_text())
        self.device, self.found = torch.device(self.job["device"]), self.job["found"]
        self.write("contact")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.use_deterministic_algorithms(self.job["deterministic"])
        AccelerationStack(self.job["runtime"], self.device, only=self.job["runtime"]).on_process()
        files = [folder / f"block-{i}.pt" for i in range(len(self.job["blocks"]))]
        self.blocks = [torch.load(file, weights_only=False, map_location=self.device) for file in files]

    def write(self, doing: str, key: str | None = None, patience: float | None = None) -> None:
        """What was found so far, and what comes now: the parent gives up on `key` if it takes too long or dies."""
        content = {"doing": doing, "key": key, "patience": patience, "found": self.found}
        (self.folder / "found.tmp").write_text(json.dumps(content))
        os.replace(self.folder / "found.tmp", self.folder / "found.json")

    def run(self) -> None:
        for key in self.job["keys"]:
            if key not in self.found:
                self.write("its parity test", key)
                self.found[key] = self.parity(key)
        for key in self.job["timed"]:
            if self.found[key]["refusal"] is None and "times" not in self.found[key]:
                self.write("being timed", key, COMPILING)
                self.found[key] |= self.timed(key)
        self.write("nothing more")

    def parity(self, key: str) -> dict[str, Any]:
        """The comparison that comes nearest to its bound, or goes beyond it most."""
        comparing = Comparing()
        autocast = Precision(self.job["runtime"]["precision"], self.device).autocast
        for block, use in zip(self.blocks, self.job["blocks"], strict=True):
            inputs = random_inputs(use["inputs"], min(SAMPLES, self.job["samples"]), self.device, seed=1)
            switch(block, key, True)
            with comparing:
                forward_and_backward(block, inputs, autocast())
            switch(block, key, False)
        if not comparing.comparisons:
            return {"refusal": "no operator of ours ran in a block", "error": 0.0, "definition_error": 0.0}
        worst = max(comparing.comparisons, key=lambda c: c.excess)
        return {"refusal": worst.refusal(), "error": worst.error, "definition_error": worst.definition_error}

    def timed(self, key: str) -> dict[str, Any]:
        """Milliseconds, and megabytes kept a sample, of the commonest block that uses `key`, with it and without it."""
        users = [(use["blocks"], i) for i, use in enumerate(self.job["blocks"]) if switches(self.blocks[i], key)]
        i = max(users)[1]
        use, samples, runtime = self.job["blocks"][i], self.job["samples"], self.job["runtime"]
        inputs = [random_inputs(use["inputs"], samples, self.device, seed) for seed in range(INPUT_SETS)]
        others = {k for k, found in self.found.items() if found["refusal"] is None} - {key}
        kernels = {"on": others | {key}, "off": others}
        variants = {name: Variant(self.blocks[i], on, runtime, self.device) for name, on in kernels.items()}
        times = raced(variants, inputs)
        return {"times": times, "kept_mb": {name: v.kept / (1e6 * samples) for name, v in variants.items()}}


def raced(variants: dict[str, Variant], inputs: list[Inputs]) -> dict[str, float | None]:
    """Median milliseconds of each, taken in turn on rotating inputs; None where memory runs out."""
    taken: dict[str, list[float]] = {name: [] for name, variant in variants.items() if variant.warm_up(inputs)}
    for i in range(REPEATS):
        for name in sorted(taken, reverse=bool(i % 2)):
            taken[name].append(variants[name].milliseconds(inputs[i % len(inputs)]))
    return {name: statistics.median(taken[name]) if name in taken else None for name in variants}


def main() -> int:
    trial = Trial(Path(sys.argv[1]))
    try:
        trial.run()
    except Exception as error:  # the next process goes on with the rest: this one's device may be in any state
        state = json.loads((trial.folder / "found.json").read_text())
        earlier = trial.found.get(state["key"], {"error": 0.0, "definition_error": 0.0})
        why = f"{state['doing']} failed: {first_line(error)}"
        trial.found[state["key"]] = earlier | {"refusal": why, "passing": not isinstance(error, ValueError)}
        trial.write("the rest")
        raise
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
