"""fp32 residual stream: the sum over all blocks is kept in fp32 while the blocks compute in 16
bits.

What it costs: 4 bytes an element more traffic per block than a bf16 stream. What it buys: small
increments of late blocks are not rounded away. With fp32 compute it changes nothing.
"""

import torch

from accel.evidence import Evidence
from accel.technique import Model, Observation, Technique, blocks_of


class ResidualInFp32(Technique):
    key = "residual_in_fp32"
    summary = "the residual stream stays fp32 between 16-bit blocks"
    # only the 16-bit stream without it moves the loss; with fp32 compute both are equal
    loss_rtol = 1e-2
    in_sampling = True
    changes_kernels = "parity"

    def on_model(self, model: Model) -> Model:
        for block in blocks_of(model):
            setattr(block, self.key, self.enabled)
        return model

    # What would still say "on" if this did nothing? The dtype would, where the stream was rounded
    # to 16 bits on its way, so the row asks for finer bits.
    def observe(self, evidence: Evidence) -> Observation:
        wide = evidence.check_blocks(lambda call: call.residual_dtype == torch.float32)
        whole = find_unrounded(evidence)
        found = [a and b for a, b in zip(wide, whole, strict=True)]
        note = f"{evidence.format_share(found)} passed the residual on in fp32, unrounded"
        if not all(whole):
            note += f"; {whole.count(False)} got or returned one that had been rounded to 16 bits"
        return Observation(bool(found) and all(found), note)


def find_unrounded(evidence: Evidence) -> list[bool]:
    """For each block, whether the stream kept its bits on the way there and through it: what has
    bits that no 16-bit format has, and then has none, was rounded on the way."""
    found = [True] * len(evidence.blocks)
    had: dict[int, bool] = {}  # by micro-batch
    for i, calls in enumerate(evidence.blocks):
        for batch, call in enumerate(calls):
            came, went = call.fine_bits
            found[i] &= (came or not had.get(batch, False)) and (went or not came)
            had[batch] = went
    return found
