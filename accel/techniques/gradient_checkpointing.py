"""Gradient checkpointing by block: the forward pass saves only a block's inputs, and the backward
pass computes the block again.

`checkpoint_policy`: "blocks" recomputes every block; "every_<n>" recomputes the first block and
each n-th after it, which saves about 1/n of the memory that "blocks" saves, at 1/n of its cost;
"selective" recomputes every block, but saves the results of its matrix products, attention and
scan.

"blocks" costs one more forward pass, at most a third of the step; "selective" costs only the cheap
part of a forward pass. The activations that stay in memory until the backward pass are then only
the blocks' inputs, with "selective" the inputs and the saved results. Speed and memory on a GPU are
not measured yet. Reference: Chen et al. 2016, https://arxiv.org/abs/1604.06174; selective:
Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from accel.evidence import BlockEvidence, Evidence, probe_blocks
from accel.saved_tensors import COUNTERS
from accel.technique import Model, Observation, Planning, Saving, Technique, blocks_of

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
ATTENTION_PREFIXES = ("_scaled_dot_product", "flex_attention")
"""Prefixes of the names of attention operations. The policy "selective" saves the results of these
operations, of matrix products (`PRODUCTS`) and of scans (`SCAN_PREFIXES`)."""
SCAN_PREFIXES = ("fastlatent::ssd", "fastlatent::selective_scan")
BEHAVIOURS = {"blocks": "recompute", "selective": "recompute all but products"}
EVERY_PREFIX = "every_"
"""Prefix of the policies that recompute one block in n; the number n follows the prefix."""


class CheckpointBlocks(Technique):
    key = "gradient_checkpointing"
    summary = "recomputes blocks; `checkpoint_policy`: `blocks`, `every_<n>`, `selective`"
    options: ClassVar = {"checkpoint_policy": "blocks"}
    examples = tuple(
        {"gradient_checkpointing": True, "checkpoint_policy": policy}
        for policy in (*BEHAVIOURS, f"{EVERY_PREFIX}2")
    )
    loss_rtol = 0.0
    used_in = ("training",)
    keeps_parity = True
    planning = Planning(
        savings=(
            Saving(examples[1], "recomputes cheap operations", 30),
            Saving(examples[0], "one more forward pass", 40),
        ),
        find_period=lambda technique: technique.period,
    )
    checkpoint_policy: str
    blocks: nn.ModuleList | None = None
    uncompiled: Sequence[list[BlockEvidence]] = ()
    """For each block the evidence of its calls in an uncompiled step, if the policy is "selective"
    and the run compiles blocks: a compiled block has no cache to inspect. Otherwise empty."""

    @property
    def period(self) -> int:
        """Number of blocks after which the pattern of recomputed blocks repeats."""
        _, every, n = self.checkpoint_policy.partition(EVERY_PREFIX)
        return int(n) if every and self.enabled else 1

    def on_model(self, model: Model) -> Model:
        if self.enabled:
            # Since version 2.14, PyTorch warns that other hooks on saved tensors do not see the
            # caches of selective checkpointing. Ignore this warning, because our counters inspect
            # the caches directly.
            warnings.filterwarnings(
                "ignore", message="A saved_tensors_hooks context", category=FutureWarning
            )
            self.blocks = blocks_of(model)
            selective = self.checkpoint_policy == "selective"
            options = {"context_fn": make_contexts} if selective else {}
            for block in list(self.blocks)[:: self.period]:
                block.forward = make_recomputed(block.forward, **options)
        return model

    def compare(self, run: Callable[[], object], evidence: Evidence) -> None:
        hidden = evidence.compiled_calls and not evidence.blocks_uncompiled
        if self.blocks and self.checkpoint_policy == "selective" and hidden:
            calls: list[list[BlockEvidence]] = []
            self.uncompiled = calls
            with torch.compiler.set_stance("force_eager"), probe_blocks(self.blocks, calls):
                run()

    # What would still say "on" if this did nothing? The wrapped `forward` of a block: it may save
    # all tensors nevertheless. So compare the bytes that each block saves with the bytes of its
    # inputs; with "selective" inspect also the caches, which must hold results of the intended
    # operations only.
    def observe(self, evidence: Evidence) -> Observation:
        calls = evidence.block_calls
        if not calls:
            return Observation(False, "no block ran")
        obeys = evidence.check_blocks(lambda call: call.recomputes)
        with_caches = self.uncompiled or evidence.blocks
        policy = self.checkpoint_policy if self.enabled else "blocks"
        if self.period > 1:
            obeys = [recomputes == (i % self.period == 0) for i, recomputes in enumerate(obeys)]
        elif policy == "selective":
            pairs = zip(evidence.blocks, with_caches, strict=True)
            obeys = [keeps_products(*pair) for pair in pairs]

        # Write the note for the ledger: how many blocks obey the policy, how many MiB a call saved,
        # and with "selective" the operations whose results were saved.
        kept = sorted(call.saved_bytes / 2**20 for call in calls)
        does = BEHAVIOURS.get(policy, f"do as asked (one in {self.period} recomputes)")
        note = f"{evidence.format_share(obeys)} {does}; each kept {kept[0]:.2f} to "
        note += f"{kept[-1]:.2f} MiB for backward and took in {calls[-1].input_bytes / 2**20:.2f}"
        if policy == "selective":
            names = {name for calls in with_caches for call in calls for name in call.cached_ops}
            note += f"; caches hold results of {', '.join(sorted(names)) or 'nothing'}"
            note += " (in an uncompiled step)" * bool(self.uncompiled)
        return Observation(all(obeys), note)


def make_contexts() -> tuple[Any, Any]:
    """Makes the two contexts of the policy "selective": one for a block's forward pass, one for its
    recomputation."""
    first, again = create_selective_checkpoint_contexts(decide)
    if COUNTERS and not torch.compiler.is_compiling():
        COUNTERS[-1].caches.append(first.storage)
    return first, again


def decide(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Decides for one operation whether the policy "selective" saves its result or recomputes it;
    PyTorch calls this for each operation."""
    kept = is_kept(op.name())
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(op: str) -> bool:
    """Returns whether the policy "selective" saves the results of the operation called `op`, such
    as "aten::mm"."""
    name = op.rpartition("::")[2].split(".")[0]
    return op.startswith(SCAN_PREFIXES) or name in PRODUCTS or name.startswith(ATTENTION_PREFIXES)


def keeps_products(calls: list[BlockEvidence], uncompiled: list[BlockEvidence]) -> bool:
    """Returns whether a block's caches hold only results that "selective" should save, and whether
    the number of bytes that the block's calls save differs by at most a quarter from that of
    uncompiled calls.

    The numbers may differ, because a compiler does not save the last result, which is the block's
    output (7 % of the bytes in our models).
    """
    return bool(uncompiled) and all(
        other.cached_ops
        and all(map(is_kept, other.cached_ops))
        and 0.75 <= call.saved_bytes / max(1, other.saved_bytes) <= 1.25
        for call, other in zip(calls, uncompiled, strict=True)
    )


def make_recomputed(forward: Callable, **options: Any) -> Callable:
    """Wraps a block's forward pass: the wrapper saves only the block's inputs, and the backward
    pass runs the forward pass again."""

    # Use a closure, because compile(fullgraph=True) fails if `forward` is a functools.partial.
    def forward_recomputed(*inputs: torch.Tensor, **more: Any) -> Any:
        # Let the recomputation restore the state that the random generator had in the first pass,
        # except while a CUDA graph is captured without a compiler: the state cannot be read then,
        # and our blocks draw no random numbers from generators.
        keep = torch.compiler.is_compiling() or not (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        )
        settings = {"use_reentrant": False, "preserve_rng_state": keep, **options}
        return checkpoint(forward, *inputs, **settings, **more)

    return forward_recomputed
