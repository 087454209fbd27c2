"""Muon: which rows of which weights it takes, what a step computes, and what the ledger says."""

from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from common.files import read_object
from models.adapters import Lora, attach
from models.block import GeluMLP
from models.mixers.attention import Attention
from tests.harness.denoisers import make_denoiser
from tests.harness.outcomes import are_equal, assert_same_metrics
from tests.harness.steps import read_ledger, tiny_training
from tests.harness.words import slow
from training.optim.groups import make_parameter_groups
from training.optim.muon import Muon


def cut(*ends):
    """Ranges of rows that lie one after the other, from row 0 on."""
    return [*pairwise((0, *ends))]


MLP = {"1.w13": cut(160, 320), "1.w2": cut(64)}
QKV = {"0.qkv": cut(64, 128, 192), "0.out_proj": cut(64)}
SCAN = {"0.in_proj": cut(128, 256, 272, 288, 304, 320), "0.out_proj": cut(64)}
RULES = {
    "mamba": SCAN,
    "zigzag": SCAN,
    "ssd_mlp": {"0.in_proj": cut(64, 128, 144, 160, 176, 192), "0.out_proj": cut(64), **MLP},
    "mamba1": {"0.in_proj": cut(128, 256), "0.x_proj": [(4, 12), (12, 20)], "0.out_proj": cut(64)},
    "conv": {"0.in_proj": cut(96, 192), "0.out_proj": cut(64), **MLP},
    "dit": {**QKV, **MLP},
    "gelu": {**QKV, "1.fc1": cut(160), "1.fc2": cut(64)},
}
RULES["hybrid"] = (RULES["ssd_mlp"], RULES["dit"])
"""Family -> linear layer of a block -> the ranges of its rows that are matrices. AdamW has all
other rows, such as those of dt, and all other parameters. A tuple has the rules of each block."""
NODE = {"_target_": "training.optim.muon.Muon", "weight_decay": 0.1}
SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8}


def make_model(family):
    if family == "gelu":
        return make_denoiser("dit", mixer=partial(Attention, bias=True), mlp=GeluMLP)
    return make_denoiser(family)


def name_matrices(family):
    """The full names of the weights with matrices -> ranges of rows."""
    rules = RULES[family]
    return {
        f"blocks.{block}.layers.{layer}.weight": tuple(ranges)
        for block, own in enumerate(rules if isinstance(rules, tuple) else (rules, rules))
        for layer, ranges in own.items()
    }


@pytest.mark.parametrize("family", RULES)
def test_the_rule_of_every_parameter(family):
    """AdamW, which has no matrices, has two groups; adapters have no matrices."""
    model = make_model(family)
    exempt = model.no_weight_decay()
    groups = make_parameter_groups(model, NODE)
    rules = {p: group["matrices"] for group in groups for p in group["params"]}
    named = {name: rules[p] for name, p in model.named_parameters()}
    assert {name: ranges for name, ranges in named.items() if ranges} == name_matrices(family)

    groups = make_parameter_groups(model, NODE | {"_target_": "torch.optim.AdamW"})
    ordered = sorted(model.named_parameters(), key=lambda pair: pair[0] in exempt)
    assert [id(p) for group in groups for p in group["params"]] == [id(p) for _, p in ordered]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]

    attach(model, Lora(rank=2))
    assert not any(group["matrices"] for group in make_parameter_groups(model, NODE))


def orthogonalise_exactly(matrix):
    """U f(S) Vᵀ in fp64, where f applies Jordan's polynomial five times to each singular value."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm().clamp(min=1e-30)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vt


def follow_exactly(weight):
    """Returns a function that takes Muon's step of one matrix."""
    momentum = torch.zeros_like(weight)

    @torch.no_grad()
    def step():
        momentum.mul_(0.9).add_(0.1 * weight.grad)
        moved = orthogonalise_exactly(0.1 * weight.grad + 0.9 * momentum)
        weight.mul_(1 - 0.02 * 0.1).sub_(0.02 * 0.2 * max(weight.shape) ** 0.5 * moved)

    return step


@pytest.mark.parametrize("family", ["ssd_mlp", "mamba1", "dit"])
def test_steps_are_those_of_each_matrix_by_itself_and_of_adamw(family):
    """Reference: each matrix by its singular values in fp64, everything else by torch's AdamW.

    The gradients are zero in the first step, as those of blocks are, because modulations start at
    zero; and some parameters have none.
    """
    model = make_model(family)
    exempt = model.no_weight_decay()
    options = {"lr": 0.02, "adamw_lr": 0.01, "momentum": 0.9, **SETTINGS}
    optimizer = Muon(make_parameter_groups(model, NODE), **options)
    parameters = dict(model.named_parameters())
    before = deepcopy(model.state_dict())
    optimizer.step()
    assert are_equal(before, parameters)
    parts = []
    names = name_matrices(family)
    for name, start in before.items():
        if name.startswith("blocks.1.layers.0."):
            continue
        rows = torch.ones(len(start), dtype=torch.bool)
        for first, last in names.get(name, ()):
            rows[first:last] = False
            matrix = start[first:last].double().requires_grad_()
            parts.append((name, slice(first, last), matrix, follow_exactly(matrix)))
        if rows.any():
            copied = start[rows].requires_grad_()
            decay = 0.0 if name in exempt else 0.1
            other = torch.optim.AdamW([copied], lr=0.01, weight_decay=decay, fused=True, **SETTINGS)
            parts.append((name, rows, copied, other.step))

    for turn in range(4):
        for name in {part[0] for part in parts}:
            parameters[name].grad = min(turn, 1) * torch.randn_like(parameters[name])
        optimizer.step()
        for name, rows, copied, step in parts:
            copied.grad = parameters[name].grad[rows].to(copied.dtype)
            step()

    for name, rows, copied, _ in parts:
        found = parameters[name].detach()[rows]
        if copied.dtype == torch.float64:
            expected = copied.detach() - before[name][rows]
            moved = found - before[name][rows]
            assert (moved - expected).norm() < 0.02 * expected.norm(), (name, rows)
        else:
            assert torch.equal(found, copied), name


def test_the_ledger_counts_matrices_and_what_adamw_has(monkeypatch):
    """Of fp32 state, in_proj has the rows of dt besides its momentum."""
    training = tiny_training("mamba", "optim=muon")
    row = read_ledger(training)["optim"]
    assert row.active == "momentum"
    sizes = {name: p.numel() for name, p in training.model.named_parameters()}
    others = sum(size for name, size in sizes.items() if "_proj" not in name)
    assert "updates 14 matrices, 12 of them slices of fused" in row.evidence
    assert "orthogonal in 2 of 2 shapes" in row.evidence
    assert f"AdamW updates {others + 2 * 8 * 64} elements of 26 parameters" in row.evidence

    # one shape is left out
    whole = Muon.orthogonalise
    monkeypatch.setattr(Muon, "orthogonalise", lambda self, stacks: whole(self, stacks[:1]))
    row = read_ledger(training)["optim"]
    assert row.missing
    assert "orthogonal in 1 of 2 shapes" in row.evidence


WORDS = ["optim=muon", "optim.weight_decay=0.1", "save_every=1"]


@pytest.fixture(scope="module")
def single(run_ranks, tmp_path_factory):
    """A run of one process."""
    folder = tmp_path_factory.mktemp("single") / "run"
    run_ranks(folder, *WORDS, ranks=1)
    return folder


def assert_equal_runs(folder, single):
    """Compares losses and gradient norms, and AdamW's second moments of the rows of dt, which
    process 0 saves."""
    assert_same_metrics(folder, single, rtol=1e-4)
    moments = []
    for run in (folder, single):
        (file,) = run.glob("checkpoints/step-4/rank-0-of-*")
        named = sorted(load_file(file).items())
        kept = [t for name, t in named if "exp_avg_sq" in name and t.shape == (8, 64)]
        moments.append(torch.stack(kept))
    assert torch.dist(*moments) < 1e-2 * moments[1].norm() > 0.0


FSDP = "runtime.parallel.mode=fsdp"
HSDP = "runtime.parallel.mode=hsdp"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, [FSDP, "runtime.parallel.cpu_offload=true", "accumulation_steps=2"]),
        slow(3, [FSDP, "runtime.gradient_checkpointing=true"]),
        slow(4, [HSDP, "runtime.parallel.shard_degree=2"]),
        slow(2, ["runtime.parallel.mode=ddp"]),
    ],
    ids=str,
)
def test_shared_matrices_are_whole_at_their_owners(ranks, words, run_ranks, single, run_dir):
    run_ranks(run_dir, *WORDS, *words, ranks=ranks)
    assert_equal_runs(run_dir, single)
    row = read_object(run_dir / "ledger.json")["optim"]
    assert "orthogonal in 2 of 2 shapes" in row["evidence"]


@pytest.mark.slow
@pytest.mark.fault(
    "Muon on another number of processes: 2, 3, 1", "the same losses within rounding"
)
def test_a_checkpoint_of_muon_fits_any_number_of_processes(run_ranks, single, run_dir):
    """AdamW's moments of dt's rows are whole at every process, and the momentum is sharded."""
    for ranks, samples, mode in ((2, 24, "fsdp"), (3, 36, "fsdp"), (1, 48, "none")):
        words = [f"total_samples={samples}", f"runtime.parallel.mode={mode}"]
        run_ranks(run_dir, *WORDS, *words, ranks=ranks)
    assert_equal_runs(run_dir, single)
