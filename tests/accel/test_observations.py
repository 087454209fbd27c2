"""A technique reads from the evidence of a step whether it is on; here the evidence is made up."""

from collections import Counter

import pytest
import torch
from torch import nn

from accel.evidence import Evidence
from accel.ledger import UNUSED
from accel.techniques.cuda_graph import CudaGraph
from accel.techniques.cudnn_benchmark import CudnnBenchmark
from accel.techniques.fused_kernels import FusedAddNorm
from accel.techniques.gradient_checkpointing import CheckpointBlocks
from accel.techniques.parallel import DataParallel
from accel.techniques.precision import Precision
from accel.techniques.tf32 import Tf32, rounds_to_tf32
from tests.harness.steps import (
    VARIANTS,
    find_technique,
    key_of,
    make_call,
    name_variant,
    tiny_training,
)
from tests.harness.words import CPU, CUDA


@pytest.mark.parametrize(("saved", "on"), [(93, True), (200, False), (10, False)])
def test_a_compiler_that_goes_its_own_way_is_seen_in_what_is_kept(saved, on):
    """The uncompiled step keeps 100 bytes and is as it should be."""
    technique = CheckpointBlocks(True, CPU, checkpoint_policy="selective")
    call = make_call(cached_ops=frozenset({"aten::mm"}), saved_bytes=100)
    technique.uncompiled = [[call]]
    compiled = make_call(cached_ops=call.cached_ops, saved_bytes=saved)
    assert technique.observe(Evidence(blocks=[[compiled]])).active is on


@pytest.mark.parametrize(
    ("called", "launches", "active"), [(2, 2, True), (2, 0, False), (1, 1, False)]
)
def test_a_fused_kernel_is_believed_only_when_every_block_launched_it(called, launches, active):
    """An operator is also called where it runs its definition."""
    technique = FusedAddNorm(True, CPU)
    technique.switches = [nn.Identity()] * 2
    op = Counter({"fastlatent::add_norm": 1})
    calls = [[make_call(ops=op if i < called else Counter())] for i in range(2)]
    ops = {"add_norm_kernel": launches, "fastlatent::add_norm_backward": 2}
    evidence = Evidence(blocks=calls, ops=Counter(ops))
    assert technique.observe(evidence).active is active


@pytest.mark.parametrize(
    ("mode", "collective"), [("ddp", "c10d::allreduce_"), ("fsdp", "c10d::_reduce_scatter_base_")]
)
def test_gradients_are_summed_only_where_a_collective_ran(mode, collective):
    technique = DataParallel(mode, CPU)
    assert technique.observe(Evidence(ops=Counter({"c10d::_allgather_base_": 3}))).active is False
    assert technique.observe(Evidence(ops=Counter({collective: 1}))).active == mode


@pytest.mark.parametrize(
    ("rounded", "products", "convolutions", "active"),
    [
        ((True, True), 0, 0, UNUSED),
        ((True, False), 3, 0, True),
        # The convolution keeps fp32.
        ((True, False), 3, 1, False),
        ((False, True), 0, 1, True),
        ((False, True), 3, 1, False),
    ],
)
def test_tf32_is_what_a_product_shows(rounded, products, convolutions, active, monkeypatch):
    monkeypatch.setattr("accel.techniques.tf32.rounds_to_tf32", lambda device: rounded)
    ran = Counter({("aten::mm", "float"): products, ("aten::convolution", "float"): convolutions})
    assert Tf32(True, CUDA).observe(Evidence(products=ran)).active == active


def test_a_product_in_fp32_does_not_round():
    assert rounds_to_tf32(CPU) == (False, False)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [True, False])
def test_tf32_is_measured(value):
    technique = Tf32(value, CUDA)
    technique.on_process()
    assert rounds_to_tf32(technique.device) == (value, value)


def test_the_autotuner_is_on_where_it_changes_the_kernels(monkeypatch):
    kernels = {True: {"gemm", "implicit_gemm"}, False: {"gemm", "winograd"}}
    monkeypatch.setattr(
        "accel.techniques.cudnn_benchmark.observe_kernels",
        lambda *_: kernels[torch.backends.cudnn.benchmark],
    )
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    evidence = Evidence(ops=Counter({"aten::cudnn_convolution": 2}))
    tuned = CudnnBenchmark(True, CUDA)
    tuned.compare(lambda: None, evidence)
    assert tuned.observe(evidence).active is True
    assert torch.backends.cudnn.benchmark
    kernels[False] = kernels[True]
    tuned.compare(lambda: None, evidence)
    assert tuned.observe(evidence).active == UNUSED
    assert tuned.observe(Evidence()).active == UNUSED


def test_a_graph_needs_the_fused_optimizer(monkeypatch):
    monkeypatch.setattr(CudaGraph, "find_obstacle", lambda self: None)
    training = tiny_training(cuda_graph=True, fused_adamw=False)
    # The step is not captured.
    assert training.step.update == training.step.take_step
    assert "decides on the host" in training.stack.techniques[-1].observe(Evidence()).evidence


@pytest.mark.parametrize(
    ("branch", "alone", "beside_bf16"),
    [(torch.bfloat16, "bf16", "bf16"), (torch.float32, "fp32", "mixed")],
)
def test_products_that_are_kernels_of_inductor_are_judged_by_what_the_blocks_return(
    branch, alone, beside_bf16
):
    call = make_call(branch_dtype=branch)
    evidence = Evidence(ops=Counter({"triton_tem_fused_mm_1": 8}), blocks=[[call], [call]])
    assert Precision("bf16", CPU).observe(evidence).active == alone
    # A library computes some of the products.
    evidence.products["aten::mm", "BFloat16"] = 2
    assert Precision("bf16", CPU).observe(evidence).active == beside_bf16


@pytest.mark.parametrize("variant", VARIANTS, ids=name_variant)
def test_evidence_of_nothing_is_no_evidence(variant):
    key = key_of(variant)
    if key in ("tf32", "cudnn_benchmark", "empty_cache_at_eval"):
        pytest.skip("the technique reads a flag of the process, not evidence")
    assert find_technique(key)(variant[key], CPU).observe(Evidence()).active in (False, UNUSED)
