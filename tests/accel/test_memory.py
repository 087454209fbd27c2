"""Small optimizer states, bf16 weights and offload: what they compute, exact resume, their ledger
rows."""

import sys
from functools import partial

import pytest
import torch
from torch import nn

from accel import composite_optimizer as members
from accel.techniques import offload_optimizer
from common.config.compose import compose
from tests.harness.outcomes import are_equal, read_outcome
from tests.harness.refusals import expect_refusal
from tests.harness.sets import measure_kept_bytes
from tests.harness.steps import read_ledger, tiny_training
from training.preflight.memory import count_lasting_bytes

pytestmark = pytest.mark.usefixtures("quick_compiler", "any_precision", "techniques_of_a_gpu")
FORMS = {
    "optim=adamw_8bit": "8bit",
    "optim=adamw_4bit": "4bit",
    "optim=adamw_fp8": "fp8",
    "optim=adafactor": "factored",
    "optim=muon": "momentum",
    "optim=sgd": "momentum",
}
LIBRARIES = {
    "optim=adamw_8bit": "bitsandbytes",
    "optim=adamw_4bit": "torchao",
    "optim=adamw_fp8": "torchao",
}
WAYS = [
    *FORMS,
    "runtime.weights=bf16 runtime.fused_adamw=true",
    "runtime.offload_optimizer=true runtime.fused_adamw=true",
    "optim=muon runtime.weights=bf16 runtime.offload_optimizer=true accumulation_steps=2 "
    "runtime.gradient_checkpointing=true",
    "optim=adamw_8bit runtime.weights=bf16 runtime.offload_optimizer=true "
    "runtime.offload_activations=true runtime.gradient_checkpointing=true runtime.compile=true "
    "accumulation_steps=2",
]
LONGER = {*FORMS, "runtime.offload_optimizer=true runtime.fused_adamw=true"} - {"optim=adamw_fp8"}
SHORT = ["model=dit_s", "runtime=eager", "save_every=2"]


training_of = partial(tiny_training, "dit")


def split_way(way):
    """The words of a way; skips the test if the library of its optimizer is not here."""
    words = way.split()
    if words[0] in LIBRARIES:
        pytest.importorskip(LIBRARIES[words[0]])
    return words


@pytest.fixture(scope="module")
def plain_losses():
    training = training_of()
    return [training.take_step().loss.item() for _ in range(4)]


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[pytest.mark.slow] * (w in LONGER)) for w in WAYS]
)
def test_a_resumed_run_ends_bit_for_bit_the_same(way, run, tmp_path):
    common = [*SHORT, *split_way(way), "deterministic=true", "total_samples=32"]
    whole = tmp_path / "whole"
    run(*common, "keep_checkpoints=9", folder="whole")
    run(*common, f"resume={whole / 'checkpoints' / 'step-2'}", folder="resumed")
    assert read_outcome(tmp_path / "resumed").state == read_outcome(whole).state


def test_a_measure_may_be_switched_on_and_off_from_one_start_to_the_next(run, capsys):
    """The state has the same names and numbers with and without a measure; what only one has starts
    at zero."""
    both = ["runtime.weights=bf16", "runtime.offload_optimizer=true"]
    for start, words in enumerate(([], both, []), start=1):
        assert run(*SHORT, *words, f"total_samples={16 * start}")["samples"] == 16 * start
        output = capsys.readouterr().out
        assert ("since then" in output and "weights was" in output) is (start > 1)


@pytest.mark.parametrize("way", WAYS)
def test_each_is_counted_learns_and_leaves_a_skipped_step_alone(way, plain_losses):
    """Warming up leaves no trace. The losses of four steps are near AdamW's: within rounding, or
    not far away for other optimizers. Then a step without finite gradients changes no bit."""
    words = split_way(way)
    training = training_of(*words)
    before = copy_weights(training)
    rows = read_ledger(training)
    assert not [row for row in rows.values() if row.missing]
    assert not any(value.any() for value in read_state(training).values())
    assert are_equal(copy_weights(training), before)
    form = FORMS.get(words[0], "fp32")
    assert rows["optim"].active == form

    losses = [training.take_step().loss.item() for _ in range(4)]
    near = "adamw" in words[0] or form == "fp32"
    assert losses == pytest.approx(plain_losses, rel=1e-2 if near else 0.5)

    before = [copy_weights(training), read_state(training)]
    compute_losses = training.step.objective.compute_losses
    training.step.objective.compute_losses = lambda *a, **k: tuple(
        t * float("nan") for t in compute_losses(*a, **k)[:2]
    )
    assert training.take_step().skipped == 1
    assert are_equal(copy_weights(training), before[0])
    assert are_equal(read_state(training), before[1])


def copy_weights(training):
    return {name: p.detach().clone() for name, p in training.model.named_parameters()}


def read_state(training):
    """Copies of the optimizer's state, by parameter and name."""
    state = training.state.optimizer.state_dict()["state"]
    return {
        f"{i} {name}": torch.as_tensor(value).clone()
        for i, entries in state.items()
        for name, value in entries.items()
    }


def test_the_bytes_are_those_of_the_tensors():
    """Counted by hand: two 8-bit moments, and two fp32 scales for each 256 parameters; a small
    tensor has two fp32 moments."""
    pytest.importorskip("bitsandbytes")
    training = training_of("optim=adamw_8bit", "runtime.weights=bf16")
    training.take_step()
    counts = [p.numel() for p in training.model.parameters()]
    large = [n for n in counts if n >= 4096]
    small = sum(counts) - sum(large)
    lasting = count_lasting_bytes(training)
    assert lasting.optimizer == sum(2 * n + 8 * -(-n // 256) for n in large) + 8 * small
    linear = sum(m.weight.numel() for m in training.model.modules() if isinstance(m, nn.Linear))
    assert lasting.weights == 4 * sum(counts) - 2 * linear


def test_offloaded_bytes_are_off_the_device():
    training = training_of(offload_optimizer=True, offload_activations=True)
    plain = training_of()
    training.take_step()
    plain.take_step()
    counts = [p.numel() for p in plain.model.parameters()]
    moved = 8 * sum(n for n in counts if n >= offload_optimizer.MIN_OFFLOADED_ELEMENTS)
    lasting = count_lasting_bytes(training)
    on_device = count_lasting_bytes(plain)
    assert lasting == on_device._replace(optimizer=on_device.optimizer - moved, on_host=moved)
    assert measure_kept_bytes(training, 4) < 0.1 * measure_kept_bytes(plain, 4)


# Sabotage: what is done in part is missing in the ledger.


def test_states_kept_in_fp32(monkeypatch):
    optim = pytest.importorskip("bitsandbytes").optim
    init = optim.AdamW8bit.__init__
    monkeypatch.setattr(
        optim.AdamW8bit, "__init__", lambda self, *a, **k: init(self, *a, **k, min_8bit_size=20_000)
    )
    row = read_ledger(training_of("optim=adamw_8bit"))["optim"]
    assert row.active == "mixed"
    assert row.missing


# How the parameters are dealt to optimizers.


def test_parts_are_updated_as_the_whole_is(monkeypatch):
    """AdamW is elementwise, so its parts end bit for bit where the whole does; 8-bit blocks do not
    cross parameters."""
    expected = training_of()
    monkeypatch.setattr(members, "PART_ELEMENTS", 5000)
    monkeypatch.setattr("accel.techniques.weights.PART_ELEMENTS", 5000)
    training = training_of(offload_optimizer=True)
    assert len(training.state.optimizer.members) > 5
    for _ in range(3):
        expected.take_step()
        training.take_step()
    assert are_equal(copy_weights(training), copy_weights(expected))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("optim=adamw_8bit runtime.cuda_graph=true", "AdamW8bit decides on the host; use optim="),
        ("runtime.offload_optimizer=true runtime.cuda_graph=true", "never tried in a captured one"),
        ("runtime.weights=bf16 runtime.parallel.mode=fsdp", "shards parameters of one dtype"),
        (
            "optim=adamw_8bit runtime.parallel.mode=hsdp",
            "use optim=adamw, or runtime.parallel.mode",
        ),
        ("runtime.offload_optimizer=true runtime.parallel.mode=hsdp", "parallel.cpu_offload=true"),
        (
            "runtime.offload_activations=true runtime.gradient_checkpointing=true "
            "runtime.checkpoint_policy=selective",
            "cannot move the results that runtime.checkpoint_policy=selective keeps; use .*=blocks",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(words, sentence):
    with expect_refusal(sentence):
        compose(words.split())


def test_a_missing_library_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with expect_refusal(r"adamw_8bit.* needs .*pip install bitsandbytes"):
        training_of("optim=adamw_8bit")


def test_a_state_of_another_kind_is_refused():
    training = training_of("optim=sgd", weights="bf16")
    other = training_of(weights="bf16")
    training.take_step()
    other.take_step()
    with expect_refusal("has no momentum_buffer for parameter 0"):
        training.state.optimizer.load_state_dict(other.state.optimizer.state_dict())
