"""Objectives as a user would write them."""

from training.objective import FlowMatching

EXTRA_TERM = [
    "extensions=[tests]",
    "objective._target_=tests.harness.planted_objectives.WithExtraTerm",
]
"""Overrides that train with an extra term."""


class WithExtraTerm(FlowMatching):
    """Adds the mean square of the predicted velocity, times 2, as the extra term `size`."""

    def compute_losses(self, model, batch, **options):
        outputs = []

        def keep_output(*inputs, **more):
            outputs.append(model(*inputs, **more))
            return outputs[-1]

        losses = super().compute_losses(keep_output, batch, **options)
        size = 2.0 * outputs[0][0].float().square().mean(dim=(1, 2, 3))
        return losses._replace(extra={"size": size})


class PlainTuple(FlowMatching):
    """Returns loss and time only, as a short objective of your own may."""

    def compute_losses(self, model, batch, **options):  # pyright: ignore[reportIncompatibleMethodOverride]
        losses = super().compute_losses(model, batch, **options)
        return losses.flow, losses.t
