"""Tries fused kernels on one block of a model, in a separate process that may crash or hang.

    python -m accel.trial.child <folder>

accel/trial/proof.py writes job.json and blocks.pt into the folder, starts this program and reads
the findings from found.json. The parity test runs a block forward and backward by the operators'
definitions in PyTorch, and calls each operator's kernel on the same tensors. A time is that of the
whole block as the run computes it, measured with the kernel and without it.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel.evidence import BlockEvidence, BlockProbe
from accel.machine import time_on_gpu
from accel.stack import AccelerationStack
from accel.technique import blocks_of, find_switches
from accel.trial.parity import ComparingMode
from accel.trial.proof import TIME_KEYS, make_outcome
from common.files import write_atomically
from common.text import shorten_error

PARITY_SAMPLES = 4
"""Number of samples in the inputs of the parity test, whatever the run's batch."""
REPEATS = 20
INPUT_SETS = 3
COMPILE_TIMEOUT_SECONDS = 900.0
"""Seconds without a write to found.json, the file of findings, after which the parent process kills
this process, in the phase in which it compiles and times a block."""
Inputs = tuple[Tensor, ...]


def switch(block: nn.Module, key: str, on: bool) -> None:
    """Switches the kernel of the runtime key `key` on or off in a block: in all of its modules that
    can use the kernel."""
    for module in find_switches(block, key):
        setattr(module, key, on)


def draw_inputs(metas: Sequence[Any], samples: int, device: torch.device, seed: int) -> Inputs:
    """Draws inputs of a block from the normal distribution. `metas` are the shapes, strides and
    dtypes that accel/trial/proof.py recorded; `samples` replaces the size of the first
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
        self.saved_bytes = 0

    def __call__(self, inputs: Inputs) -> None:
        self.seeds = run_both_passes(
            self.block, inputs, self.options, self.stack.autocast(), self.seeds
        )

    def warm_up(self, inputs: list[Inputs]) -> bool:
        """Runs the block until it is compiled, and sets `saved_bytes`, the bytes that it saves for
        the backward pass; returns False if memory runs out."""
        notes: list[BlockEvidence] = []
        try:
            self.stack.run_until_it_works(lambda: [self(tensors) for tensors in inputs])
            with self.stack.autocast():
                BlockProbe(self.block, notes)(*inputs[0], **self.options)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return False
        self.saved_bytes = notes[-1].saved_bytes
        return True

    def measure_milliseconds(self, inputs: Inputs, replayed: bool) -> float:
        """Measures the milliseconds of one call of the block, forward and backward. `replayed`:
        without the time in which the host launches kernels, as in the replay of a CUDA graph."""
        if self.stack.device.type == "cuda":
            return time_on_gpu(lambda: self(inputs), head_start=replayed)
        began = time.perf_counter()
        self(inputs)
        return 1e3 * (time.perf_counter() - began)


class Trial:
    """Tries the kernels that job.json in `folder` requests on the blocks in blocks.pt, and writes
    each finding to found.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = json.loads((folder / "job.json").read_text())
        self.findings = self.job["found"]
        self.write("contact")
        self.device = torch.device(self.job["device"])
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        torch.use_deterministic_algorithms(self.job["deterministic"])
        self.stack = self.make_stack()
        self.stack.on_process()
        self.blocks = torch.load(folder / "blocks.pt", weights_only=False, map_location=self.device)

    def make_stack(self) -> AccelerationStack:
        return AccelerationStack(self.job["runtime"], self.device, only=self.job["runtime"])

    def write(self, doing: str, key: str | None = None, patience: float | None = None) -> None:
        """Writes to found.json the findings so far, and `doing`, a phrase for what this process
        does next. If this process then crashes or hangs, the parent process records the kernel of
        `key` as failed.

        `patience`: seconds that the parent process waits for the next write; None: its default.
        """
        self.doing = doing
        self.key = key
        content = {"doing": doing, "key": key, "patience": patience, "found": self.findings}
        write_atomically(self.folder / "found.json", json.dumps(content))

    def run(self) -> None:
        """Tests parity of the kernels of all requested keys, then times those that passed."""
        for key in self.job["keys"]:
            if key not in self.findings:
                self.write("its parity test", key)
                self.findings[key] = self.check_parity(key)
        for key in self.job["timed"]:
            if self.findings[key]["refusal"] is None and "times" not in self.findings[key]:
                self.write("being timed", key, COMPILE_TIMEOUT_SECONDS)
                self.findings[key] |= self.measure_times(key)
        self.write("nothing more")

    def check_parity(self, key: str) -> dict[str, Any]:
        """Compares the kernels of the runtime key `key` with their definitions; returns the finding
        of the comparison with the largest error relative to its bound."""
        comparing = ComparingMode()
        for block, use in zip(self.blocks, self.job["blocks"], strict=True):
            inputs = draw_inputs(use["inputs"], PARITY_SAMPLES, self.device, seed=1)
            switch(block, key, True)
            with comparing:
                run_both_passes(block, inputs, use["options"], self.stack.autocast())
            switch(block, key, False)
        if not comparing.comparisons:
            return make_outcome("no operator of ours ran in a block")
        worst = max(comparing.comparisons, key=lambda c: c.excess)
        return make_outcome(worst.describe_refusal(), worst.error, worst.definition_error)

    def measure_times(self, key: str) -> dict[str, Any]:
        """Measures the most frequent kind of block that can use the kernel of `key`, with the
        kernel and without it; all other kernels that passed are on in both cases. Returns entries
        for the finding: milliseconds per call, and megabytes per sample that the block saves for
        the backward pass, each with the kernel ("on") and without it ("off")."""
        block_indices = [i for i, block in enumerate(self.blocks) if find_switches(block, key)]
        most_frequent = max(block_indices, key=lambda i: self.job["blocks"][i]["blocks"])
        use = self.job["blocks"][most_frequent]
        samples = self.job["samples"]
        inputs = [
            draw_inputs(use["inputs"], samples, self.device, seed) for seed in range(INPUT_SETS)
        ]

        others = {k for k, finding in self.findings.items() if finding["refusal"] is None} - {key}
        kernels = {"on": others | {key}, "off": others}
        variants = {
            name: Variant(self.blocks[most_frequent], use["options"], on, self.make_stack())
            for name, on in kernels.items()
        }
        ready = {name: variant for name, variant in variants.items() if variant.warm_up(inputs)}
        launched = race(ready, inputs, replayed=False)
        replayed = race(ready, inputs, replayed=True) if self.device.type == "cuda" else launched
        saved = {name: variant.saved_bytes / (1e6 * samples) for name, variant in variants.items()}
        return {TIME_KEYS[False]: launched, TIME_KEYS[True]: replayed, "kept_mb": saved}


def race(
    variants: dict[str, Variant], inputs: list[Inputs], replayed: bool
) -> dict[str, float | None]:
    """Times the block with the kernel ("on") and without it ("off") alternately, on inputs that
    change from call to call. Returns the median milliseconds of each; None for a variant that is
    absent because its memory ran out."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(REPEATS):
        for name in sorted(times, reverse=bool(i % 2)):
            times[name].append(
                variants[name].measure_milliseconds(inputs[i % len(inputs)], replayed)
            )
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {name: medians.get(name) for name in ("on", "off")}


def main() -> int:
    trial = Trial(Path(sys.argv[1]))
    try:
        trial.run()
    except Exception as error:
        # The error may have left the device in any state, so record the error and end this process;
        # the parent process starts a new one for the remaining keys.
        refused = make_outcome(f"{trial.doing} failed: {shorten_error(error)}")
        earlier = trial.findings.get(trial.key, refused)
        passing = not isinstance(error, ValueError)
        trial.findings[trial.key] = earlier | {"refusal": refused["refusal"], "passing": passing}
        trial.write("the rest")
        raise
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
