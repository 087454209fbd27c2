"""fp32 residual stream: the sum over all blocks stays fp32 while the blocks compute in 16 bits.

What it costs: 4 bytes an element more traffic per block than a bf16 stream. What it buys: rounding
does not lose small increments of late blocks. With fp32 compute it changes nothing.
"""

import torch

from accel.evidence import Evidence
from accel.technique import Model, Observation, Technique, blocks_of


class ResidualInFp32(Technique):
    key = "residual_in_fp32"
    summary = "the residual stream stays fp32 between 16-bit blocks"
    # It changes the loss only in 16 bits; in fp32 on and off are equal.
    loss_rtol = 1e-2
    in_sampling = True
    changes_kernels = "parity"

    def on_model(self, model: Model) -> Model:
        for block in blocks_of(model):
            setattr(block, self.key, self.enabled)
        return model

    # What would still say "on" if this did nothing? The dtype would, even if the stream had been
    # rounded to 16 bits before, so the row looks for bits that 16-bit formats lack.
    def observe(self, evidence: Evidence) -> Observation:
        wide = evidence.check_blocks(lambda call: call.residual_dtype == torch.float32)
        whole = find_unrounded(evidence)
        both = [a and b for a, b in zip(wide, whole, strict=True)]
        note = f"{evidence.format_share(both)} passed the residual on in fp32, unrounded"
        if not all(whole):
            note += f"; {whole.count(False)} got or returned one that had been rounded to 16 bits"
        return Observation(bool(both) and all(both), note)


def find_unrounded(evidence: Evidence) -> list[bool]:
    """Returns for each block whether the stream was not rounded before it or in it.

    A stream that first has bits which no 16-bit format has, and then has none, was rounded in
    between.
    """
    unrounded = [True] * len(evidence.blocks)
    # Micro-batch -> whether the stream had fine bits after the block before.
    was_fine: dict[int, bool] = {}
    for i, calls in enumerate(evidence.blocks):
        for batch, call in enumerate(calls):
            fine_in, fine_out = call.fine_bits
            kept_before = fine_in or not was_fine.get(batch, False)
            unrounded[i] &= kept_before and (fine_out or not fine_in)
            was_fine[batch] = fine_out
    return unrounded
