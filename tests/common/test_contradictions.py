"""Keys that contradict the variables of a launcher; those that contradict each other are in
tests/assets/mistakes.yaml."""

import pytest

from common.config.compose import compose
from common.environment import refuse_contradictions
from tests.harness.refusals import expect_refusal


@pytest.mark.parametrize(
    ("variable", "precision", "sentence"),
    [
        ("MIXED_PRECISION=bf16", "fp32", "precision=fp32.*--mixed_precision no"),
        ("MIXED_PRECISION=bf16", "fp8", "--mixed_precision fp8"),
        ("USE_FSDP=true", "fp32", "use runtime.parallel.mode"),
        ("DYNAMO_BACKEND=INDUCTOR", "fp32", "runtime.compile=false"),
        ("MIXED_PRECISION=no", "fp32", None),
        ("MIXED_PRECISION=fp8", "fp8", None),
    ],
)
def test_what_accelerate_says_otherwise_is_refused(variable, precision, sentence, monkeypatch):
    name, _, value = variable.partition("=")
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    cfg = compose([f"runtime.precision={precision}"]).cfg
    if sentence is None:
        refuse_contradictions(cfg)
        return
    with expect_refusal(sentence):
        refuse_contradictions(cfg)
