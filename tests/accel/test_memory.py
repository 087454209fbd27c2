"""Small optimizer states, bf16 weights and offload: what they compute, exact resume, what the
ledger sees."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import composite_optimizer as members
from accel import saved_tensors
from accel.composite_optimizer import (
    COMPENSATION,
    Members,
    collect_state,
    iterate_innermost,
    split_parts,
)
from accel.evidence import Evidence
from accel.techniques import offload_optimizer
from accel.techniques.compilation import Compile
from accel.techniques.gradient_checkpointing import CheckpointBlocks
from accel.techniques.offload_activations import OffloadActivations
from accel.techniques.offload_optimizer import HostState, OffloadOptimizer
from accel.techniques.weights import NarrowLinear, RoundedUpdate, Weights, round_stochastically
from tests.harness.outcomes import read_outcome
from tests.harness.sets import kept_at
from tests.harness.steps import allow_any_precision, tiny_training
from tests.harness.words import CPU, TINY_RUN
from train import train
from training.checkpoint.load import list_complete
from training.config.compose import compose
from training.failures import count_lasting_bytes

OPTIMIZERS = {
    "adamw_8bit": "8bit",
    "adamw_4bit": "4bit",
    "adamw_fp8": "fp8",
    "adafactor": "factored",
    "muon": "momentum",
    "sgd": "momentum",
}
NEEDS = {"adamw_8bit": "bitsandbytes", "adamw_4bit": "torchao", "adamw_fp8": "torchao"}
WAYS = [
    *([f"optim={name}"] for name in OPTIMIZERS),
    ["runtime.weights=bf16"],
    ["runtime.weights=bf16", "runtime.rounding=kahan", "runtime.fused_adamw=true"],
    ["runtime.offload_optimizer=true", "runtime.fused_adamw=true"],
    [
        "runtime.weights=bf16",
        "optim=adamw_8bit",
        "runtime.offload_optimizer=true",
        "runtime.offload_activations=true",
    ],
]
SELECTIVE = ("gradient_checkpointing=true", "checkpoint_policy=selective")
LONGER = ("optim=adamw_4bit", "optim=adafactor", "optim=sgd", "runtime.offload_optimizer=true")


def named(words: list[str]) -> str:
    return "-".join(word.rpartition(".")[2] for word in words)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """Offload on a machine whose memory is the host's copies all the same."""
    for kind in (OffloadOptimizer, OffloadActivations):
        monkeypatch.setattr(kind, "unavailable", lambda self: None)
    monkeypatch.setattr(saved_tensors, "LEAST_MOVED", 1024)


@pytest.fixture(autouse=True)
def libraries(request):
    if hasattr(request.node, "callspec"):
        for name, package in NEEDS.items():
            if f"optim={name}" in request.node.callspec.params.get("words", []):
                pytest.importorskip(package)


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    training = training_of()
    return [training.take_step().loss.item() for _ in range(4)]


def training_of(*words: str, **how):
    return tiny_training("dit", *words, **how)


def warmed(training):
    ledger = training.warm_up()
    return {row.key: row for row in ledger}


@pytest.mark.parametrize(
    "words", [pytest.param(w, marks=[pytest.mark.slow] * (w[0] in LONGER)) for w in WAYS], ids=named
)
def test_a_resumed_run_ends_bit_for_bit_the_same(words, tmp_path):
    common = [
        *TINY_RUN,
        "model=dit_s",
        "runtime=eager",
        "deterministic=true",
        "total_samples=32",
        "save_every=2",
    ]
    train(compose([*common, *words, f"run_dir={tmp_path / 'whole'}", "keep_checkpoints=9"]))
    middle = list_complete(tmp_path / "whole" / "checkpoints")[0]
    train(compose([*common, *words, f"run_dir={tmp_path / 'resumed'}", f"resume={middle}"]))
    assert middle.name == "step-2"
    assert read_outcome(tmp_path / "resumed").state == read_outcome(tmp_path / "whole").state


def test_a_measure_may_be_switched_on_and_off_from_one_start_to_the_next(tmp_path, capsys):
    """The state has the same names and numbers with and without; what only one has starts at
    zero."""
    common = [
        *TINY_RUN,
        "model=dit_s",
        "runtime=eager",
        "save_every=2",
        f"run_dir={tmp_path / 'run'}",
    ]
    kahan = ["runtime.weights=bf16", "runtime.rounding=kahan", "runtime.offload_optimizer=true"]
    for end, words in enumerate(([], kahan, [], ["runtime.weights=bf16"]), start=1):
        summary = train(compose([*common, *words, f"total_samples={16 * end}"]))
        assert summary["samples"] == 16 * end
        said = capsys.readouterr().out
        assert ("since then" in said and "weights was" in said) == (end > 1)


@pytest.mark.parametrize("words", WAYS, ids=named)
def test_each_is_counted_learns_and_leaves_a_skipped_step_alone(words, plain_losses):
    """Warming up leaves no trace; four steps are AdamW's but for rounding, or other optimizers' and
    not far away; then a step without finite gradients changes no bit."""
    training = training_of(*words)
    before = [p.detach().clone() for p in training.model.parameters()]
    rows = warmed(training)
    assert not [row for row in rows.values() if row.missing]
    state = training.state.optimizer.state_dict()["state"]
    assert not any(
        t.any()
        for entries in state.values()
        for t in entries.values()
        if isinstance(t, torch.Tensor)
    )
    assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
    form = next(
        (OPTIMIZERS[w.removeprefix("optim=")] for w in words if w.startswith("optim=")), "fp32"
    )
    assert rows["optim"].requested == rows["optim"].active == form
    assert ("the host reads one flag" in rows["optim"].evidence) == (
        "runtime.fused_adamw=true" not in words
    )

    found = [training.take_step().loss.item() for _ in range(4)]
    assert found[0] == pytest.approx(plain_losses[0], rel=1e-3)
    assert found == pytest.approx(
        plain_losses, rel=1e-2 if "adamw" in named(words) or form == "fp32" else 0.5
    )

    kept = copy.deepcopy(
        [list(training.model.parameters()), training.state.optimizer.state_dict()["state"]]
    )
    losses = training.step.objective.losses
    training.step.objective.losses = lambda *a, **k: tuple(
        t * float("nan") for t in losses(*a, **k)
    )
    assert training.take_step().skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(kept[0], training.model.parameters(), strict=True))
    for i, entries in training.state.optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(kept[1][i][name])), (i, name)


def test_the_bytes_are_those_of_the_tensors():
    """By hand: AdamW 8 bytes a parameter, 8-bit moments 2 and two fp32 scales for 256, those of
    small ones 8."""
    pytest.importorskip("bitsandbytes")
    training = training_of("optim=adamw_8bit", "runtime.weights=bf16")
    training.take_step()
    large = [p.numel() for p in training.model.parameters() if p.numel() >= 4096]
    small = [p.numel() for p in training.model.parameters() if p.numel() < 4096]
    found = count_lasting_bytes(training)
    assert found.optimizer == sum(2 * n + 8 * -(-n // 256) for n in large) + 8 * sum(small)
    linear = sum(m.weight.numel() for m in training.model.modules() if isinstance(m, nn.Linear))
    assert found.weights == 4 * (sum(large) + sum(small)) - 2 * linear
    assert found.averages == 4 * (sum(large) + sum(small))


def test_offloaded_bytes_are_off_the_device():
    training = training_of(offload_optimizer=True, offload_activations=True)
    plain = training_of()
    for one in (training, plain):
        one.take_step()
    large = sum(p.numel() for p in plain.model.parameters() if p.numel() >= offload_optimizer.MIN_OFFLOADED_ELEMENTS)
    assert count_lasting_bytes(training).on_host == 8 * large
    assert count_lasting_bytes(training).on_device == count_lasting_bytes(plain).on_device - 8 * large
    assert kept_at(training, 4) < 0.1 * kept_at(plain, 4)


class TestSabotage:
    """What is only half done is missing in the ledger."""

    def test_states_kept_in_fp32(self, monkeypatch):
        optim = pytest.importorskip("bitsandbytes").optim
        own = optim.AdamW8bit.__init__
        monkeypatch.setattr(
            optim.AdamW8bit,
            "__init__",
            lambda self, *a, **k: own(self, *a, **k, min_8bit_size=20_000),
        )
        row = warmed(training_of("optim=adamw_8bit"))["optim"]
        assert (row.requested, row.active, row.missing) == ("8bit", "mixed", True)
        assert "fp32)" in row.evidence

    def test_a_layer_left_in_fp32(self, monkeypatch):
        on_model = Weights.on_model

        def forgetful(self, model):
            model = on_model(self, model)
            model.blocks[1].layers[0].qkv.weight.data = (
                model.blocks[1].layers[0].qkv.weight.data.float()
            )
            return model

        monkeypatch.setattr(Weights, "on_model", forgetful)
        row = warmed(training_of(weights="bf16"))["weights"]
        assert (row.active, row.missing) == ("mixed", True)

    def test_weights_that_are_not_rounded_by_us(self, monkeypatch):
        monkeypatch.setattr(Weights, "on_optimizer", lambda self, make: make)
        assert warmed(training_of(weights="bf16"))["weights"].missing

    def test_a_state_that_stays_on_the_device(self, monkeypatch):
        monkeypatch.setattr(HostState, "around", lambda self, member: nullcontext())
        assert warmed(training_of(offload_optimizer=True))["offload_optimizer"].missing

    def test_one_tensor_of_the_state_on_another_device(self):
        training = training_of(offload_optimizer=True)
        assert warmed(training)["offload_optimizer"].active is True
        technique = next(t for t in training.stack.techniques if isinstance(t, OffloadOptimizer))
        parameter = training.model.head.weight
        optimizer = next(o for o in iterate_innermost(training.state.optimizer) if parameter in o.state)
        optimizer.state[parameter]["exp_avg"] = torch.empty(parameter.shape, device="meta").expand(
            64, -1, -1
        )
        assert technique.observe(Evidence()).active is False

    def test_activations_that_stay_on_the_device(self, monkeypatch):
        monkeypatch.setattr(OffloadActivations, "to_host", lambda self, tensor: tensor.detach())
        row = warmed(training_of(offload_activations=True))["offload_activations"]
        assert (row.active, row.missing) == (False, True)

    def test_large_activations_that_stay_on_the_device(self, monkeypatch):
        pack = OffloadActivations.pack
        monkeypatch.setattr(
            OffloadActivations,
            "pack",
            lambda self, t: t.detach() if t.nbytes > 2**15 else pack(self, t),
        )
        assert warmed(training_of(offload_activations=True))["offload_activations"].missing

    def test_activations_that_other_hooks_keep(self):
        training = training_of(offload_activations=True)
        block = training.model.blocks[1]
        forward = block.forward

        def hooked(*inputs):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                return forward(*inputs)

        block.forward = hooked
        row = warmed(training)["offload_activations"]
        assert row.missing
        assert (
            f"{len(training.model.blocks) - 1} of {len(training.model.blocks)} blocks"
            in row.evidence
        )

    def test_activations_in_a_cache_that_no_hook_sees(self):
        """The configuration refuses the pair; the ledger would tell."""
        training = training_of(offload_activations=True)
        selective = CheckpointBlocks(True, CPU, checkpoint_policy="selective")
        selective.on_model(training.model)
        assert warmed(training)["offload_activations"].missing

    @pytest.mark.parametrize(
        "rounded",
        [
            lambda wide, bits: wide.bfloat16(),
            lambda wide, bits: (wide.view(torch.int32) & -0x10000).view(torch.float32).bfloat16(),
        ],
        ids=["nearest", "down"],
    )
    def test_weights_that_are_not_rounded_at_random(self, rounded, monkeypatch):
        monkeypatch.setattr("accel.techniques.weights.round_stochastically", rounded)
        row = warmed(training_of(weights="bf16"))["weights"]
        assert (row.active, row.missing) == ("mixed", True)

    def test_rests_that_are_not_kept(self, monkeypatch):
        compensated = RoundedUpdate.compensated

        def forgetful(self, updated):
            compensated(self, updated)
            for parameter, _ in updated:
                self.state[parameter][COMPENSATION].zero_()

        monkeypatch.setattr(RoundedUpdate, "compensated", forgetful)
        assert warmed(training_of(weights="bf16", rounding="kahan"))["weights"].missing

    def test_rests_that_are_not_used(self, monkeypatch):
        monkeypatch.setattr(
            RoundedUpdate, "widened", lambda self, parameter: parameter.detach().float()
        )
        assert warmed(training_of(weights="bf16", rounding="kahan"))["weights"].missing


def test_parts_are_updated_as_the_whole_is(monkeypatch):
    """AdamW is elementwise, so its parts end bit for bit where the whole does; 8-bit blocks do not
    cross parameters."""
    expected = training_of()
    monkeypatch.setattr(members, "PART_ELEMENTS", 5000)
    monkeypatch.setattr("accel.techniques.weights.PART_ELEMENTS", 5000)
    found = training_of(offload_optimizer=True)
    assert len(found.state.optimizer.members) > 5
    for _ in range(3):
        expected.take_step()
        found.take_step()
    pairs = zip(expected.model.parameters(), found.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert sum(
        len(g["params"]) for part in split_parts(expected.state.optimizer.param_groups) for g in part
    ) == len(list(expected.model.parameters()))


def test_muon_takes_the_matrices_and_adamw_the_rest():
    training = training_of("optim=muon")
    training.take_step()
    optimizer = training.state.optimizer
    assert isinstance(optimizer, Members)
    for parameter in training.model.parameters():
        names = set(collect_state(optimizer, parameter))
        assert names == (
            {"momentum_buffer"} if parameter.ndim == 2 else {"step", "exp_avg", "exp_avg_sq"}
        )
    assert optimizer.members[0].defaults["adjust_lr_fn"] == "match_rms_adamw"


class TestRounding:
    def test_stochastic_rounding_is_right_on_average(self):
        value = torch.tensor([1.0 + 2.0**-7 * 0.3, -3.0e-5, 7.77e7]).repeat(20_000, 1)
        bits = torch.randint(
            0, 2**16, value.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0)
        )
        rounded = round_stochastically(value, bits).double()
        ulp = 2.0 ** (value[0].double().abs().log2().floor() - 7)
        assert ((rounded.mean(0) - value[0].double()).abs() < 0.02 * ulp).all()
        assert ((rounded - value).abs() < ulp).all()
        assert len(rounded[:, 0].unique()) == 2

    @pytest.mark.parametrize("bits", [0, 1, 2**16 - 1])
    def test_what_bf16_holds_stays(self, bits):
        exact = torch.tensor(
            [0.0, -0.0, 1.0, -2.5, 3.0e38, float("inf"), -float("inf"), float("nan"), 1e-40]
        )
        exact = exact.bfloat16().float()
        rounded = round_stochastically(exact, torch.full_like(exact, bits, dtype=torch.int32))
        assert torch.equal(rounded.float().nan_to_num(7.0), exact.nan_to_num(7.0))

    @pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
    def test_small_updates_are_not_lost(self, rounding):
        """1,000 steps of 1e-4 on weights of 1: plain bf16 would not move; both roundings arrive
        near 0.9."""
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        groups = [{"params": [weight], "weight_decay": 0.0}]
        optimizer = RoundedUpdate(groups, lambda g: torch.optim.SGD(g, lr=1e-4), rounding)
        for step in range(1000):
            optimizer.position.fill_(step)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert weight.dtype is torch.bfloat16
        kept = collect_state(optimizer, weight).get("compensation", torch.zeros(1))
        assert (weight.double() + kept.double()).mean().item() == pytest.approx(0.9, abs=1e-3)
        plain = torch.ones(1, dtype=torch.bfloat16)
        assert all(plain.sub_(1e-4).item() == 1.0 for _ in range(10))

    def test_the_bits_follow_from_seed_and_position_alone(self):
        def after(seed, position):
            weight = nn.Parameter(torch.linspace(-1, 1, 9000).bfloat16())
            optimizer = RoundedUpdate(
                [{"params": [weight]}], lambda g: torch.optim.SGD(g, lr=1e-3), "stochastic"
            )
            optimizer.seed = seed
            optimizer.position.fill_(position)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            return weight.detach()

        assert torch.equal(after(1, 64), after(1, 64))
        assert not torch.equal(after(1, 64), after(1, 128))
        assert not torch.equal(after(1, 64), after(2, 64))

    def test_products_without_autocast_are_of_the_inputs_dtype(self):
        layer = nn.Linear(8, 4)
        layer.__class__ = NarrowLinear
        layer.weight.data = layer.weight.data.bfloat16()
        x = torch.randn(3, 8)
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight.float(), layer.bias))
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype is torch.bfloat16

    def test_averages_stay_fp32_and_survive_an_evaluation(self):
        training = training_of(weights="bf16")
        for _ in range(2):
            training.take_step()
        ema = training.state.ema
        before = [
            t.clone() for t in (*ema.averages, *(p.detach() for p in training.model.parameters()))
        ]
        with training.state.averaged():
            assert torch.equal(
                training.model.head.weight, ema.state_dict()["head.weight"].bfloat16()
            )
        after = [*ema.averages, *(p.detach() for p in training.model.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert {average.dtype for average in ema.averages} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp8", marks=pytest.mark.slow)])
def test_all_of_it_together(precision, monkeypatch):
    """With checkpointing, compiled blocks, accumulation and clipping."""
    pytest.importorskip("bitsandbytes")
    if precision == "fp8":
        pytest.importorskip("torchao")
    allow_any_precision(monkeypatch)
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    how = {"gradient_checkpointing": True, "compile": True, "precision": precision}
    words = ["accumulation_steps=2", "max_grad_norm=0.5"]
    plain = tiny_training("mamba", *words, precision=precision)
    small = {"weights": "bf16", "offload_optimizer": True, "offload_activations": True}
    training = tiny_training("mamba", *words, "optim=adamw_8bit", **how, **small)
    rows = warmed(training)
    assert not [(row.key, row.evidence) for row in rows.values() if row.missing]
    for _ in range(3):
        torch.testing.assert_close(
            training.take_step().loss, plain.take_step().loss, rtol=3e-2, atol=0.0
        )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["optim=adamw_8bit", "runtime.cuda_graph=true"],
            r"AdamW8bit decides on the host; use optim=adamw",
        ),
        (["optim=muon", "runtime.cuda_graph=true"], r"use optim=adamw"),
        (
            ["runtime.offload_optimizer=true", "runtime.cuda_graph=true"],
            "never tried in a captured one",
        ),
        (["runtime.weights=bf16", "runtime.parallel.mode=fsdp"], "shards parameters of one dtype"),
        (
            ["optim=adafactor", "runtime.parallel.mode=fsdp"],
            r"use optim=adamw, or runtime.parallel.mode=ddp",
        ),
        (
            ["optim=muon", "runtime.parallel.mode=hsdp"],
            r"use optim=adamw, or runtime.parallel.mode=ddp",
        ),
        (
            ["runtime.offload_optimizer=true", "runtime.parallel.mode=hsdp"],
            r"parallel.cpu_offload=true",
        ),
        (
            [f"runtime.{word}" for word in ("offload_activations=true", *SELECTIVE)],
            "cannot move the results that runtime.checkpoint_policy=selective keeps; use .*=blocks",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        compose(words)


@pytest.mark.parametrize(("name", "package"), NEEDS.items())
def test_a_missing_library_is_one_sentence(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, f"{package}.optim", None)
    with pytest.raises(
        ValueError, match=rf"{name}.* needs the package {package} .*pip install {package}"
    ):
        training_of(f"optim={name}")


def test_a_state_of_another_kind_is_refused():
    training = training_of("optim=muon")
    other = training_of()
    for one in (training, other):
        one.take_step()
    with pytest.raises(ValueError, match="has no momentum_buffer for parameter 0"):
        training.state.optimizer.load_state_dict(other.state.optimizer.state_dict())


def test_on_a_cpu_offload_is_refused_with_the_reason(monkeypatch, tmp_path: Path):
    monkeypatch.undo()
    for kind in (OffloadOptimizer, OffloadActivations):
        assert "on cpu" in (kind(True, CPU).unavailable() or "")
