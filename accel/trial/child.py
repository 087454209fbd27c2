"""Tries fused kernels on blocks of a model, in a separate process that may crash or hang.

    python -m accel.trial.child <folder>

accel/trial/kernels.py starts this program, which reads job.json in the folder and writes what it
finds to found.json. The parity test runs a block forward and backward by the operators' definitions
in PyTorch, and calls each operator's kernel on the same tensors. A time is that of the whole block
as the run computes it, measured with the kernel and without it.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel.machine import time_on_gpu
from accel.stack import AccelerationStack
from accel.technique import blocks_of, find_switches
from accel.trial.parity import ComparingMode
from accel.trial.uses import name_times
from common.errors import UserError
from common.files import read_object, write_atomically
from common.workers import end_with_parent

PARITY_SAMPLES = 4
"""Number of samples in the inputs of the parity test, whatever the run's batch."""
REPEATS = 20
INPUT_SETS = 3
PATIENCE = 900.0
"""Seconds without a write to found.json, the file of findings, after which the parent process kills
this process, in the phase in which it compiles and times blocks."""
Inputs = tuple[Tensor, ...]


def switch(block: nn.Module, key: str, on: bool) -> None:
    """Switches the kernel of the runtime key `key` on or off in a block: in all of its modules that
    can use the kernel."""
    for module in find_switches(block, key):
        setattr(module, key, on)


def draw_inputs(metas: Sequence[Any], samples: int, device: torch.device, seed: int) -> Inputs:
    """Draws inputs of a block from the normal distribution. `metas` are the shapes, strides and
    dtypes that accel/trial/uses.py recorded; `samples` replaces the size of the first
    dimension."""
    generator = torch.Generator(device).manual_seed(seed)
    inputs = []
    for (_, *shape), stride, dtype in metas:
        tensor = torch.empty_strided(
            (samples, *shape), stride, dtype=getattr(torch, dtype), device=device
        )
        inputs.append(tensor.normal_(generator=generator).requires_grad_())
    return tuple(inputs)


def run_both_passes(
    block: Any,
    inputs: Inputs,
    options: Mapping[str, Any],
    autocast: AbstractContextManager[Any],
    seeds: list[Tensor] | None = None,
) -> list[Tensor]:
    """Runs a block forward with `options`, then backward from `seeds`, the gradients of the block's
    outputs. If `seeds` is None, draws them from the normal distribution. Returns the seeds, for the
    next call."""
    with autocast:
        outputs = [t for t in block(*inputs, **options) if t.requires_grad]
    if seeds is None:
        seeds = [torch.randn_like(t) for t in outputs]
    torch.autograd.grad(outputs, [*inputs, *block.parameters()], seeds, allow_unused=True)
    return seeds


class Variant:
    """A copy of a block, set up as in the run (autocast, attention, checkpointing, compile), that
    uses the kernels of the runtime keys in `on`."""

    def __init__(
        self, block: nn.Module, options: Mapping[str, Any], on: set[str], stack: AccelerationStack
    ) -> None:
        block = copy.deepcopy(block)
        for key in on:
            switch(block, key, True)
        self.options = options
        self.stack = stack
        model = nn.Module()
        model.blocks = nn.ModuleList([block])
        self.block = blocks_of(stack.on_model(model))[0]
        self.seeds: list[Tensor] | None = None

    def __call__(self, inputs: Inputs) -> None:
        self.seeds = run_both_passes(
            self.block, inputs, self.options, self.stack.autocast(), self.seeds
        )

    def warm_up(self, inputs: list[Inputs]) -> bool:
        """Runs the block until it is compiled; returns False if memory runs out."""
        try:
            self.stack.run_until_it_works(lambda: [self(tensors) for tensors in inputs])
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return False
        return True

    def measure_milliseconds(self, inputs: Inputs, captured: bool) -> float:
        """Measures the milliseconds of one call of the block, forward and backward. `captured`:
        without the time in which the host launches kernels, as in the replay of a CUDA graph."""
        if self.stack.device.type == "cuda":
            return time_on_gpu(lambda: self(inputs), head_start=captured)
        began = time.perf_counter()
        self(inputs)
        return 1e3 * (time.perf_counter() - began)


class Trial:
    """Tries the kernels of a job (accel/trial/kernels.py) on the blocks in its file, and writes
    each finding to found.json in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = read_object(folder / "job.json")
        end_with_parent(self.job["parent"])
        self.findings = self.job["found"]
        self.write("contact")
        self.device = torch.device(self.job["device"])
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        torch.use_deterministic_algorithms(self.job["deterministic"])
        self.stack = self.make_stack()
        self.stack.on_process()
        self.blocks = torch.load(self.job["file"], weights_only=False, map_location=self.device)

    def make_stack(self) -> AccelerationStack:
        return AccelerationStack(self.job["runtime"], self.device, only=self.job["runtime"])

    def write(self, doing: str, trying: str | None = None, patience: float | None = None) -> None:
        """Writes to found.json the findings so far, and `doing`, a phrase for what this process
        does next. If this process then crashes or hangs, the parent process records the finding
        `trying` as failed.

        `patience`: seconds that the parent process waits for the next write; None: its default.
        """
        state = {"doing": doing, "trying": trying, "patience": patience, "found": self.findings}
        write_atomically(self.folder / "found.json", json.dumps(state))

    def run(self) -> None:
        """Tests parity of the kernels of all requested keys, then times those that passed and could
        be slower than their definitions."""
        for key in self.job["keys"]:
            if key not in self.findings:
                self.write("its parity test", key)
                try:
                    self.findings[key] = self.check_parity(key)
                except UserError as error:  # the kernel takes no such shapes
                    self.findings[key] = {"refusal": str(error)}

        # Time the kernels on the most frequent kind of block that can use them; those with the same
        # kind of block together, because they share the block with all kernels.
        self.passed = {k for k in self.job["keys"] if self.findings[k]["refusal"] is None}
        groups = defaultdict(list)
        for key in self.job["timed"]:
            if key in self.passed and name_times(key) not in self.findings:
                uses = [i for i, block in enumerate(self.blocks) if find_switches(block, key)]
                groups[max(uses, key=lambda i: self.job["blocks"][i]["blocks"])].append(key)
        for index, keys in groups.items():
            self.measure_times(index, keys)
        self.write("nothing more")

    def check_parity(self, key: str) -> dict[str, Any]:
        """Compares the kernels of the runtime key `key` with their definitions; returns the finding
        of the comparison with the largest error relative to its bound."""
        comparing = ComparingMode()
        for block, use in zip(self.blocks, self.job["blocks"], strict=True):
            inputs = draw_inputs(use["inputs"], PARITY_SAMPLES, self.device, seed=1)
            switch(block, key, True)
            try:
                with comparing:
                    run_both_passes(block, inputs, use["options"], self.stack.autocast())
            finally:
                switch(block, key, False)
        if not comparing.comparisons:
            return {"refusal": "no operator of ours ran in a block"}
        worst = max(comparing.comparisons, key=lambda c: c.excess)
        return {
            "refusal": worst.describe_refusal(),
            "error": worst.error,
            "definition_error": worst.definition_error,
        }

    def measure_times(self, index: int, keys: list[str]) -> None:
        """Times block number `index` with all kernels that passed, and without that of each of
        `keys`. Adds a finding for each key: milliseconds per call with the kernel and without it,
        None if memory ran out."""
        self.write("being timed", name_times(keys[0]), PATIENCE)
        use = self.job["blocks"][index]
        samples = self.job["samples"]
        inputs = [
            draw_inputs(use["inputs"], samples, self.device, seed) for seed in range(INPUT_SETS)
        ]
        # Make all variants before any of them is compiled, because making one discards all compiled
        # code.
        kernels = {"on": self.passed} | {key: self.passed - {key} for key in keys}
        variants = {
            name: Variant(self.blocks[index], use["options"], on, self.make_stack())
            for name, on in kernels.items()
        }
        times: dict[str, list[float]] = {}
        for name, variant in variants.items():
            self.write("being timed", name_times(keys[0] if name == "on" else name), PATIENCE)
            if variant.warm_up(inputs):
                times[name] = []

        # Time the variants in turn, on inputs that change from call to call.
        for i in range(REPEATS):
            for name in sorted(times, reverse=bool(i % 2)):
                tensors = inputs[i % INPUT_SETS]
                times[name].append(
                    variants[name].measure_milliseconds(tensors, self.job["captured"])
                )
        ms = {name: statistics.median(values) for name, values in times.items()}
        for key in keys:
            self.findings[name_times(key)] = {
                "refusal": None,
                "on_ms": ms.get("on"),
                "off_ms": ms.get(key),
                # Times without a kernel that failed in passing are not those of the next trial.
                "passing": any(finding.get("passing") for finding in self.findings.values()),
            }


if __name__ == "__main__":
    # An error may leave the device in any state, so let it end this process; the parent process
    # starts a new one for the remaining kernels.
    Trial(Path(sys.argv[1])).run()
