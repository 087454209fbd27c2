"""Keys, and variables of a launcher, that do not go together."""

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


MAX_AUTOTUNE = "runtime.compile_mode=max-autotune-no-cudagraphs"
REDUCE_OVERHEAD = "runtime.compile_mode=reduce-overhead"
WHOLE_MODEL = "runtime.compile_scope=model"
WRONG_GRADIENTS = r"wrong gradients.*runtime\.compile_scope=model.*runtime\.cuda_graph=true"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["runtime.parallel.shard_degree=2"], "is for hsdp; leave it out with runtime.parallel"),
        (["runtime.parallel.cpu_offload=true"], "is for fsdp and hsdp"),
        (["runtime.parallel.bucket_cap_mb=0"], "must be at least 1"),
        (["runtime.parallel.timeout_minutes=0"], "must be above 0"),
        *(
            ([f"runtime.checkpoint_policy={policy}"], "or every_<n> with n from 2 on")
            for policy in ("every_1", "every_x")
        ),
        (["+runtime.parallel.nccl.DEBUG=INFO"], "set it in the environment of the command"),
        (
            ["runtime.parallel.mode=fsdp", "runtime.compile=true", "runtime.compile_scope=model"],
            "block by block",
        ),
        (["runtime.parallel.mode=ddp", "runtime.cuda_graph=true"], "never tried"),
        (["runtime=production", "deterministic=true", MAX_AUTOTUNE], "deterministic=true"),
        (["runtime=production", REDUCE_OVERHEAD], WRONG_GRADIENTS),
        *(
            (["runtime=production", REDUCE_OVERHEAD, WHOLE_MODEL, word], WRONG_GRADIENTS)
            for word in ("accumulation_steps=2", "runtime.cuda_graph=true")
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(words, sentence):
    with expect_refusal(sentence):
        compose(words)
