"""The state of a run: what warm-up and restoring leave of it."""

import pytest
import torch
from torch import Tensor

from common.distributed.ranks import Ranks
from common.trees import flatten
from tests.harness.outcomes import are_equal
from tests.harness.steps import tiny_training


def copy_tensors(state):
    """Parameters, averages, moments and generators."""
    return [
        leaf.clone() for leaf in flatten(state.state_dict()).values() if isinstance(leaf, Tensor)
    ]


def test_warm_up_leaves_no_trace():
    training = tiny_training(fused_adamw=True)
    state = training.state
    training.take_step()
    before = copy_tensors(state)
    position = training.loader.state_dict()
    samples = state.samples
    with state.preserve():
        training.stack.warm_up(lambda: (torch.rand(3), training.take_step()), training.model.blocks)
        assert state.samples != samples
    assert are_equal(copy_tensors(state), before)
    assert (training.loader.state_dict(), state.samples) == (position, samples)


@pytest.mark.parametrize(("optimizer", "words"), [("AdamW", []), ("SGD", ["~optim.betas"])])
def test_state_is_restored_in_place_where_a_graph_may_hold_on_to_it(optimizer, words):
    """Also the state before the first step; and what follows is the same, bit for bit."""
    words = [f"optim._target_=torch.optim.{optimizer}", *words]
    training = tiny_training("mamba", *words)
    reference = tiny_training("mamba", *words)

    def list_moments():
        entries = training.step.optimizer.state.values()
        return [tensor for entry in entries for tensor in entry.values()]

    with training.state.preserve():
        training.take_step()
        moments = list_moments()
    training.take_step()
    if optimizer != "SGD":
        assert all(a is b for a, b in zip(moments, list_moments(), strict=True))
    reference.take_step()
    assert are_equal(training.model.parameters(), reference.model.parameters())


@pytest.mark.usefixtures("any_precision")
def test_the_loss_scale_is_part_of_the_state():
    training = tiny_training(precision="fp16")
    other = tiny_training(precision="fp16")
    training.step.scaler.scale.fill_(256.0)
    training.step.scaler.good_steps.fill_(7)
    other.state.load_state_dict(training.state.state_dict())
    assert (other.step.scaler.scale, other.step.scaler.good_steps) == (256.0, 7)


def test_what_any_process_skipped_is_known_to_all():
    """Two processes read other blocks; the first writes the metrics and the checkpoint."""

    class Two(Ranks):
        def all_reduce(self, values, how="mean"):
            return torch.ones_like(values)

        def gather_objects(self, item, group=None):
            return [item, {"b.tar (samples 0–3 of train)": 4}]

    training = tiny_training()
    training.ranks = Two(0, 2)
    training.loader.skipped = {"a.tar (samples 0–7 of train)": 8}
    assert training.note_skipped_data() == {"skipped_data": 12}
    assert len(training.state.state_dict()["counters"]["skipped_data"]) == 2
