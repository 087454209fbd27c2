"""Proofs of the planted model's kernel (tests/harness/planted_models.py) on a CPU."""

from accel.stack import AccelerationStack
from accel.trial.kernels import Contest, choose_kernels
from accel.trial.uses import Use
from tests.harness.planted_models import PlantedModel
from tests.harness.steps import EAGER
from tests.harness.words import CPU

GOOD = {"refusal": None, "error": 3e-3, "definition_error": 4e-3}
"""What a trial finds about parity if the kernel is right."""
FAST = {"refusal": None, "on_ms": 0.41, "off_ms": 2.9}
REFUSED = {"refusal": "ssd[0] is not finite"}


def plant_findings(monkeypatch, parity, times=FAST):
    """Lets every trial of the scan end with these findings."""
    found = {"fused_scan": parity, "fused_scan, timed": times}
    monkeypatch.setattr(Contest, "run_trials", lambda *arguments: found | arguments[-1])


def make_stack(value="auto", runtime=None, **more):
    return AccelerationStack(EAGER | {"fused_scan": value} | (runtime or {}), CPU, **more)


def prove_scan(value="auto", folder=None, samples=8, model=None, **more):
    """Proves the scan of a planted model; returns its value, the reason, and what the run folder
    keeps."""
    stack = make_stack(value, **more)
    model = model or PlantedModel()
    kept = choose_kernels(stack, model, model, samples, folder)
    stack.on_model(model)
    assert all(block.fused_scan is stack.values["fused_scan"] for block in model.blocks)
    outcome = next(t for t in stack.techniques if t.key == "fused_scan").proof
    return outcome.on, outcome.why, kept


def make_use(width):
    """A kind of block whose only input has `width` elements a sample."""
    return Use(PlantedModel().blocks[0], 1, [([2, width], [width, 1], "float32")], {}, "")
