"""fp32 residual stream: the sum over all blocks stays fp32 while the blocks compute in 16 bits.

The technique costs memory traffic: 4 bytes per element and block more than a bf16 stream. In
return, the small increments of late blocks are not rounded away. If blocks compute in fp32, the
technique changes nothing.
"""

import torch

from accel.evidence import Evidence
from accel.technique import Model, Observation, Technique, blocks_of


class ResidualInFp32(Technique):
    key = "residual_in_fp32"
    summary = "the residual stream stays fp32 between 16-bit blocks"
    # The loss may change by up to 1 % if blocks compute in 16 bits. If they compute in fp32, the
    # loss is the same with the technique on or off.
    loss_rtol = 1e-2
    used_in = ("training", "sampling")

    def on_model(self, model: Model) -> Model:
        for block in blocks_of(model):
            setattr(block, self.key, self.enabled)
        return model

    # What would still say "on" if this did nothing? The dtype of the residual stream: an fp32
    # stream may have been rounded to 16 bits before. So look for bits that 16-bit formats lack.
    def observe(self, evidence: Evidence) -> Observation:
        wide = evidence.check_blocks(lambda call: call.residual_dtype == torch.float32)

        # Say for each block whether the stream stayed unrounded, in the block and since the block
        # before. It was rounded between two places if only at the first it has bits that no 16-bit
        # format has. `was_fine` maps the index of a micro-batch to whether its stream had such bits
        # when it left the previous block.
        whole = [True] * len(evidence.blocks)
        was_fine: dict[int, bool] = {}
        for i, calls in enumerate(evidence.blocks):
            for batch, call in enumerate(calls):
                fine_in, fine_out = call.fine_bits
                kept_before = fine_in or not was_fine.get(batch, False)
                whole[i] &= kept_before and (fine_out or not fine_in)
                was_fine[batch] = fine_out

        both = [a and b for a, b in zip(wide, whole, strict=True)]
        note = f"{evidence.format_share(both)} passed the residual on in fp32, unrounded"
        if not all(whole):
            note += f"; {whole.count(False)} got or returned one that had been rounded to 16 bits"
        return Observation(bool(both) and all(both), note)
