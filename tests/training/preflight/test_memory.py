"""A run compares what it needs with what is there, before its first step."""

import copy
import json
import re
import subprocess
import sys

import pytest
import torch

from common.config.compose import compose
from common.files import ROOT
from common.memory import Room
from scripts.plan.memory import forecast
from scripts.plan.question import Question
from scripts.sample import SampleConfig, sample_run
from tests.harness.captions import plan_captions
from tests.harness.outcomes import are_equal
from tests.harness.refusals import expect_refusal
from tests.harness.sets import draw_random_samples, save_latent_set
from tests.harness.steps import tiny_training
from tests.harness.words import CPU
from training.assemble import assemble
from training.preflight.memory import count_lasting_bytes, count_step
from training.run import RUNNING_FILE
from training.step import TrainStep

SHAPE = ["data=synthetic", "data.height=16", "data.width=16", "runtime=eager"]


def limit_memory(monkeypatch, free):
    """Makes all later checks find this many bytes of memory."""
    monkeypatch.setattr("accel.device_memory.find_room", lambda processes: Room(free, "memory.max"))


@pytest.mark.fault(
    "a run that needs more memory than is there",
    "one sentence before the first step, with what fits; no folder is left",
)
def test_a_step_that_does_not_fit_is_refused_and_the_advice_fits(run, run_dir, monkeypatch):
    limit_memory(monkeypatch, 100 * 2**20)
    words = ["model=dit_xs", *SHAPE, "batch_size=256", "total_samples=256"]
    refusal = r"batch_size=256: a step needs .* \(memory\.max\): .*steps=(\d+) fits"
    with expect_refusal(refusal) as refused:
        run(*words)
    assert not run_dir.exists()
    steps = re.search(refusal, str(refused.value))[1]
    assert run(*words, f"accumulation_steps={steps}")["steps"] == 1


def test_looking_changes_nothing(monkeypatch):
    """Also where the model or the objective draws numbers."""
    training = tiny_training("dit")
    compute = TrainStep.compute_losses
    monkeypatch.setattr(
        TrainStep, "compute_losses", lambda *given: (torch.rand(()), compute(*given))[1]
    )
    before = copy.deepcopy(training.state.state_dict())
    count_step(training)
    after = training.state.state_dict()
    assert after["loader"] == before["loader"]
    assert are_equal(after["rng"], before["rng"])
    assert all(parameter.grad is None for parameter in training.step.parameters)


PLANNED = [
    "model=dit_xs",
    "model=mamba_xs",
    "model=conv_xs runtime.gradient_checkpointing=true",
    "model=dit_xs accumulation_steps=2 optim=muon",
    "model=mamba_xs optim=sgd ema.snapshots=8 runtime.gradient_checkpointing=true "
    "runtime.checkpoint_policy=selective",
]


@pytest.mark.parametrize("words", PLANNED)
def test_the_look_and_the_plan_agree(words):
    cfg = compose([*SHAPE, "model.depth=6", "batch_size=512", *words.split()]).cfg
    training = assemble(cfg, CPU)
    parts, each, samples, *_ = count_step(training)
    del parts["a copy of the weights"], parts["workers"]
    held = count_lasting_bytes(training)
    needed = held.weights + held.averages + sum(parts.values()) + each * samples
    plan = forecast(Question(cfg, training.loader.spec, gpu=False))
    assert needed == pytest.approx(plan.needs.total, rel=0.05)


LATENTS = "data=synthetic data.height=32 data.width=32"
EAGER = f"{LATENTS} runtime=eager"
STORED = "data.path={latents} runtime=eager model=dit_xs batch_size=128"
FULL_SIZE = "model.dim=192 model.depth=12 model.head_dim=64"
MEASURED = [
    f"{EAGER} model=dit_xs batch_size=128",
    f"{EAGER} model=ssd_mlp_xs batch_size=96",
    f"{EAGER} model=mamba_xs batch_size=32",
    f"{EAGER} model=zigzag_xs batch_size=32",
    f"{EAGER} model=conv_xs batch_size=128",
    f"{EAGER} model=dit_xs batch_size=256 accumulation_steps=4",
    f"{EAGER} model=dit_xs batch_size=128 runtime.gradient_checkpointing=true save_every=1",
    f"{LATENTS} model=dit_xs batch_size=128 runtime=production",
    f"{EAGER} model=dit_b batch_size=8 save_every=1",
    f"{STORED} data=resident model.conditioning=text",
    f"{EAGER} model=pretrained init_from={{base}} adapter=lora batch_size=128",
    f"{STORED} data=webdataset data.window=8 data.streams=4",
]


@pytest.mark.slow
@pytest.mark.parametrize("words", MEASURED)
def test_what_is_foreseen_is_what_is_held(words, run, tmp_path):
    folder = tmp_path / "set"
    if "{latents}" in words:
        samples = draw_random_samples(256, 0, (3, 32, 32))
        save_latent_set(folder, [("train", samples)], plan_captions([["a photo"]] * 256))
    if "{base}" in words:
        run(*f"{EAGER} model=dit_xs {FULL_SIZE} batch_size=1 save_every=1".split())
    samples = 2 * int(re.search(r"batch_size=(\d+)", words)[1])
    words = f"save_every=0 eval_every=0 sample_every=0 total_samples={samples} {words}"
    words = words.format(latents=folder, base=tmp_path / "run").split()
    command = [sys.executable, "-m", "tests.harness.memory_worker", *words]
    command += [f"run_dir={tmp_path / 'measured'}", "runtime.on_unavailable=degrade"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["foreseen"] == pytest.approx(found["held"], rel=0.15), found


def test_images_and_samples_that_do_not_fit_are_refused(job, run, run_dir, monkeypatch):
    run("save_every=1")
    limit_memory(monkeypatch, 2**20)
    with expect_refusal(r"batch_size=4096: a batch needs .*; (batch_size=\d+|no batch) fits"):
        job("resolution=64", "batch_size=4096")
    with expect_refusal("batch_size=8192: a batch needs .* 8192 samples"):
        sample_run(SampleConfig(run_dir=str(run_dir), batch_size=8192, device="cpu"))


@pytest.mark.fault(
    "a process killed by Linux because it took too much memory", "the next start says so, once"
)
def test_a_start_after_a_kill_says_so_once(run, run_dir, capsys):
    run()
    (run_dir / RUNNING_FILE).touch()
    for times in (1, 0):
        run("total_samples=24")
        said = capsys.readouterr().out
        assert said.count("a word after step 2; Linux's out-of-memory killer does that") == times
