"""Proofs of the planted model's kernel (tests/harness/planted_models.py) on a CPU."""

from accel.stack import AccelerationStack
from accel.trial import proof
from accel.trial.choice import choose_kernels
from tests.harness.planted_models import PlantedModel
from tests.harness.steps import EAGER
from tests.harness.words import CPU

GOOD = {
    "refusal": None,
    "error": 3e-3,
    "definition_error": 4e-3,
    "times": {"on": 0.41, "off": 2.9},
    "replayed": {"on": 0.4, "off": 0.3},
    "kept_mb": {"on": 1.9, "off": 15.0},
}
"""Findings of a trial whose kernel is right and fast."""
REFUSED = GOOD | {"refusal": "ssd[0] is not finite"}


def plant_findings(monkeypatch, findings):
    """Lets every trial of the scan end with these findings."""
    monkeypatch.setattr(proof, "run_trials", lambda *_: {"fused_scan": dict(findings)})


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
