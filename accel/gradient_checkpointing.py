"""Gradient checkpointing per block: keep a block's inputs, recompute the rest in the backward pass.

`checkpoint_policy`: "blocks" recomputes every block; "every_2" every second one, for half the saving at half the cost;
"selective" recomputes every block but its matrix products, its attention and its scan, whose results are kept.

What it costs: "blocks" one more forward pass, at most a third of the step; "selective" only the cheap part of it. What
it buys: activation memory of the blocks' inputs alone ("selective": and the products' results). Speed and memory on a
GPU: not measured yet.
Reference: Chen et al. 2016, https://arxiv.org/abs/1604.06174; selective: Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accel.evidence import BlockProbe, Evidence
from accel.technique import Model, Observation, Technique, blocks_of

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
ATTENTION = ("_scaled_dot_product", "flex_attention")
""""selective" keeps the results of these products, of ops whose names start so, and of the scan."""
SCAN = "fastlatent::ssd"
DOES = {"blocks": "recompute", "every_2": "recompute or keep in turn", "selective": "recompute all but products"}


class CheckpointBlocks(Technique):
    key = "gradient_checkpointing"
    summary = "recomputes blocks; `checkpoint_policy`: `blocks`, `every_2`, `selective`"
    options = ("checkpoint_policy",)
    examples = tuple(
        {"gradient_checkpointing": True, "checkpoint_policy": policy} for policy in ("blocks", "every_2", "selective")
    )
    loss_rtol = 0.0

    def __init__(self, value: bool | str, device: torch.device, checkpoint_policy: bool | str = "blocks") -> None:
        super().__init__(value, device, checkpoint_policy=checkpoint_policy)
        self.policy = checkpoint_policy
        self.decisions: Counter[bool] = Counter()
        """What "selective" decided for the ops of the latest block: True is kept."""

    def on_model(self, model: Model) -> Model:
        if self.enabled:
            wrap = self.selectively_recomputed if self.policy == "selective" else recomputed
            for block in list(blocks_of(model))[:: 2 if self.policy == "every_2" else 1]:
                block.forward = wrap(block.forward)
        return model

    def selectively_recomputed(self, forward: Callable) -> Callable:
        decide, decisions = self.decide, self.decisions

        def contexts():
            decisions.clear()
            first, again = create_selective_checkpoint_contexts(decide)
            if BlockProbe.listening and not torch.compiler.is_compiling():
                BlockProbe.listening[-1].append(first.storage)  # hooks on saved tensors cannot see it
            return first, again

        def forward_recomputed(*inputs):
            keep = keeps_generator()
            return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=keep, context_fn=contexts)

        return forward_recomputed

    def decide(self, _context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name = op.name().rpartition("::")[2].split(".")[0]
        kept = op.name().startswith(SCAN) or name in PRODUCTS or name.startswith(ATTENTION)
        self.decisions[kept] += 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def observe(self, evidence: Evidence) -> Observation:
        calls = [call for calls in evidence.blocks for call in calls]
        if not calls:
            return Observation(False, "no block ran")
        found = evidence.where(lambda call: call.recomputes)
        policy = self.policy if self.enabled else "blocks"
        if policy == "every_2":
            found = [one == (i % 2 == 0) for i, one in enumerate(found)]
        elif policy == "selective":
            found = evidence.where(lambda call: call.cached) if any(call.cached for call in calls) else alike(evidence)
        kept = sorted(call.saved_bytes / 2**20 for call in calls)
        note = (
            f"{evidence.share(found)} {DOES[str(policy)]}; each kept {kept[0]:.2f} to {kept[-1]:.2f} MiB for backward "
        )
        note += f"and took in {calls[-1].input_bytes / 2**20:.2f}"
        if policy == "selective":
            note += f"; of a block's results {self.decisions[True]} were to be kept, {self.decisions[False]} not"
            found.append(min(self.decisions[True], self.decisions[False]) > 0)
        return Observation(all(found), note)


def alike(evidence: Evidence) -> list[bool]:
    """For each compiled block, whether it keeps as much as most of its like: a compiled one has no cache to look at."""
    kept: dict[Any, list[int]] = defaultdict(list)
    for calls in evidence.blocks:
        for call in calls:
            kept[call.unlike].append(call.saved_bytes)
    most = {unlike: Counter(sizes).most_common(1)[0][0] for unlike, sizes in kept.items()}
    return evidence.where(lambda call: call.saved_bytes == most[call.unlike])


def recomputed(forward: Callable) -> Callable:
    # Our own closure, not functools.partial: a partial in place of `forward` breaks compile(fullgraph=True).
    def forward_recomputed(*inputs):
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=keeps_generator())

    return forward_recomputed


def keeps_generator() -> bool:
    """Whether recomputation starts from the generator's state of the first pass.

    Always, but while a CUDA graph is being captured: there it cannot be read. Our blocks draw nothing from generators.
    """
    return torch.compiler.is_compiling() or not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
