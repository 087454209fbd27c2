"""Steps that go wrong: not finite, spikes, out of memory; and loggers that are not there."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data.digits import DigitLatents
from tests.harness.words import TINY_RUN
from tests.harness.zygote import HANG
from train import train
from training import failures
from training.checkpoint.files import flatten
from training.checkpoint.load import list_complete
from training.checkpoint.save import Checkpoints, Save
from training.config.compose import compose, report_user_errors
from training.state import TrainState
from training.step import SpikeGuard, TrainStep

Run = Callable[..., dict]
LONG = ["total_samples=160", "runtime=eager", "log_every=1", "save_every=5"]
"""Twenty steps."""


def nan_at(monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> list[dict[str, torch.Tensor]]:
    """Latents become NaN in these steps; returns where the tensors after each step will be
    found."""
    original = DigitLatents.__next__
    advance = TrainState.advance
    after: list[dict[str, torch.Tensor]] = []

    def poisoned(self: DigitLatents):
        batch = original(self)
        at = int(batch.position[0]) // 8 + 1
        bad = first <= at <= last
        return batch._replace(latents=batch.latents * float("nan")) if bad else batch

    def remembered(self: TrainState, samples: int) -> None:
        advance(self, samples)
        kept = {k: v for k, v in self.state_dict().items() if k in ("model", "ema", "optimizer")}
        after.append(
            {name: leaf.clone() for name, leaf in flatten(kept) if isinstance(leaf, torch.Tensor)}
        )

    monkeypatch.setattr(DigitLatents, "__next__", poisoned)
    monkeypatch.setattr(TrainState, "advance", remembered)
    return after


@pytest.mark.fault(
    "a NaN in one batch",
    "that step is skipped on the device: weights, averages, moments bit-identical",
)
@pytest.mark.parametrize("fused", [True, False])
def test_one_bad_batch(fused: bool, run: Run, monkeypatch: pytest.MonkeyPatch):
    after = nan_at(monkeypatch, 7, 7)
    summary = run(*LONG, f"runtime.fused_adamw={fused}")
    assert (summary["steps"], summary["skipped_steps"]) == (20, 1)
    assert all(torch.equal(after[5][name], after[6][name]) for name in after[5])
    assert not all(torch.equal(after[6][name], after[7][name]) for name in after[6])
    assert math.isfinite(after[-1]["model.pos_embed"].sum())


@pytest.mark.fault("NaN in a burst of batches", "stops at guards.max_skipped_in_row with a dump")
def test_a_burst_stops_the_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sentence counts what is lost since step 5, though that save ends only once somebody waits
    for it."""
    awaited = threading.Event()
    commit = Save.commit
    wait = Checkpoints.wait

    def commit_when_awaited(self: Save, files: dict) -> None:
        awaited.wait(HANG)
        commit(self, files)

    def tell_and_wait(self: Checkpoints) -> None:
        if self.thread is not None:
            awaited.set()
        wait(self)

    monkeypatch.setattr(Save, "commit", commit_when_awaited)
    monkeypatch.setattr(Checkpoints, "wait", tell_and_wait)
    nan_at(monkeypatch, 7, 99)
    sentence = (
        r"step 10: the last 4 steps were skipped.*step-10\.json has the batch.*"
        r"goes on from step-5; 40 samples after it are lost\."
    )
    with pytest.raises(ValueError, match=sentence):
        run(*LONG, "guards.max_skipped_in_row=4")
    dump = json.loads((tmp_path / "run" / "dumps" / "step-10.json").read_text())
    assert [sample["position"] for sample in dump["samples"]] == list(range(72, 80))
    assert {sample["loss"] for sample in dump["samples"]} == {"nan"}
    assert all(0.0 < sample["t"] < 1.0 for sample in dump["samples"])
    assert dump["blocks"]["blocks.0"]["gradient_norm"] == "nan"
    assert dump["blocks"]["blocks.0"]["parameter_norm"] > 0
    assert [f.name for f in list_complete(tmp_path / "run" / "checkpoints")][-1] == "step-5"


@pytest.mark.fault("NaN in a burst of batches", "stops at guards.max_skipped_in_row with a dump")
@pytest.mark.parametrize("log_every", [0, pytest.param(6, marks=pytest.mark.slow)])
def test_a_burst_is_noticed_whatever_is_logged(
    log_every: int, run: Run, monkeypatch: pytest.MonkeyPatch
):
    nan_at(monkeypatch, 7, 10)
    # a good step ends the row
    summary = run(*LONG, "guards.max_skipped_in_row=5", f"log_every={log_every}")
    assert summary["skipped_steps"] == 4
    with pytest.raises(ValueError, match="step 10: the last 4 steps"):
        run(*LONG, "guards.max_skipped_in_row=4", f"log_every={log_every}", folder="second")


def test_a_skipped_step_enters_no_mean(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One NaN in a window of five leaves the mean of the other four; a window of skipped steps
    alone has no mean."""
    run(*LONG, folder="whole")
    one_by_one = [line["loss"] for line in lines_of(tmp_path / "whole")]
    nan_at(monkeypatch, 5, 5)
    run(*LONG, "log_every=5", "total_samples=40", folder="one")
    (line,) = lines_of(tmp_path / "one")
    assert line["loss"] == pytest.approx(sum(one_by_one[:4]) / 4)
    assert (line["skipped"], line["grad_norm"], line["not_finite"]) == (1, None, 1)
    run(*LONG, "total_samples=40", folder="each")
    assert [line["loss"] is None for line in lines_of(tmp_path / "each")] == [False] * 4 + [True]


def lines_of(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl, which must be strict JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [
        json.loads(line, parse_constant=refuse)
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.fault(
    "a spike of the gradient norm (guards.spike_sigmas)",
    "that step is skipped, the next one is not",
)
def test_a_spike_is_skipped(run: Run, monkeypatch: pytest.MonkeyPatch):
    after = nan_at(monkeypatch, 0, 0)
    losses = TrainStep.losses

    def spiking(self: TrainStep, batch, held_out=False):
        loss, t = losses(self, batch, held_out)
        return (loss * 1e4 if int(batch.position[0]) == 8 * 14 else loss), t

    monkeypatch.setattr(TrainStep, "losses", spiking)
    summary = run(*LONG, "guards.spike_sigmas=6", "guards.spike_window=8")
    assert summary["skipped_steps"] == 1
    assert all(torch.equal(after[13][name], after[14][name]) for name in after[13])
    assert not all(torch.equal(after[14][name], after[15][name]) for name in after[14])


def test_the_window_takes_finite_norms_only():
    """One NaN does not blind the guard, one spike does not either, and a lasting change of level is
    followed."""
    guard = SpikeGuard(4.0, 16, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    normal = [1.0 + 0.1 * torch.randn((), generator=draw) for _ in range(40)]
    assert all(bool(guard.passes(norm)) for norm in normal[:20])
    for bad in (float("nan"), float("inf"), 1e6):
        assert not guard.passes(torch.tensor(bad))
    assert torch.isfinite(guard.norms).all()
    assert guard.norms.max() < 2
    assert all(bool(guard.passes(norm)) for norm in normal[20:])
    assert not guard.passes(torch.tensor(3.0))
    assert any(bool(guard.passes(torch.tensor(3.0))) for _ in range(32))


def test_before_its_window_is_full_nothing_is_a_spike():
    guard = SpikeGuard(1.0, 8, torch.device("cpu"))
    assert all(bool(guard.passes(torch.tensor(10.0**i))) for i in range(8))
    other = SpikeGuard(1.0, 8, torch.device("cpu"))
    other.load_state_dict({k: v.clone() for k, v in guard.state_dict().items()})
    assert torch.equal(other.norms, guard.norms)
    other.load_state_dict({})  # of a run without a guard
    assert other.count == 0


@pytest.mark.fault(
    "out of memory in the forward pass, the backward pass, the optimizer",
    "one sentence: where, the measured peak, the keys that would help most, with the bytes that "
    "were counted for this run; what is saved loads",
)
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
def test_out_of_memory(
    place: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    losses = TrainStep.losses
    optimizer_step = TrainStep.update_parameters

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            raise error

    def failing_losses(self: TrainStep, batch, held_out=False):
        loss, t = losses(self, batch, held_out)
        if int(batch.position[0]) < 8 * 11:
            return loss, t
        if place == "forward":
            raise error
        return Fails.apply(loss), t

    def failing_step(self: TrainStep, *arguments):
        failing_step.calls += 1
        if failing_step.calls > 14:  # three of them in warm-up
            raise error
        return optimizer_step(self, *arguments)

    failing_step.calls = 0
    if place == "optimizer":
        monkeypatch.setattr(TrainStep, "update_parameters", failing_step)
    else:
        monkeypatch.setattr(TrainStep, "losses", failing_losses)
    # The process that counts runs in one of the three.
    saves = {"words": ["optim=adamw_8bit"], "bytes": 3.5 * 2**30}
    canned = {"forward": (-9, None), "optimizer": (0, {"savings": [saves]})}
    if place in canned:
        monkeypatch.setattr(failures, "run_apart", lambda *_: canned[place])
    with pytest.raises(SystemExit) as stopped, report_user_errors():
        run(*LONG)
    said = capsys.readouterr().err
    assert stopped.value.code == 1
    where = {
        "forward": "the forward pass",
        "backward": "the backward pass",
        "optimizer": "the optimizer",
    }[place]
    assert f"out of memory in {where} at step " in said
    assert "GiB were taken at the peak" in said
    helps = {
        "forward": "What helps most was not counted, for the process that counts it gave no answer",
        "backward": (
            "What helps most, as counted: runtime.gradient_checkpointing=true "
            "runtime.checkpoint_policy=blocks (saves 0.00"
        ),
        "optimizer": "What helps most, as counted: optim=adamw_8bit (saves 3.5 GiB); the same",
    }
    assert helps[place] in said
    assert "goes on from" in said
    assert "Traceback" not in said


@pytest.mark.fault("out of memory in warm-up", "the same sentence; no folder is left")
def test_out_of_memory_at_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def failing(*_: object, **__: object):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: 7 "
            "bytes"
        )

    monkeypatch.setattr(TrainStep, "losses", failing)
    monkeypatch.setattr(failures, "run_apart", lambda *_: (0, {"savings": []}))
    with pytest.raises(
        ValueError,
        match=r"out of memory in .* at step 0: .* of .* GiB were taken .* use a smaller model",
    ):
        run(*LONG)
    assert not (tmp_path / "run").exists()


class Wandb(types.ModuleType):
    """W&B as far as we use it, down from one of three moments on."""

    def __init__(self, down: str) -> None:
        super().__init__("wandb")
        self.down = down
        self.logged = []
        self.summary = {}
        self.Settings = dict

    def init(self, mode: str, settings: dict, **_: object) -> Wandb:
        self.settings = settings
        if self.down == "start" and mode == "online":
            raise ConnectionError("no route to host")
        return self

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def Image(self, file: str) -> str:  # noqa: N802  # W&B's name
        return file

    def log(self, metrics: dict) -> None:
        if self.down == "middle" and metrics["samples"] > 80:
            raise ConnectionError("broken pipe")
        self.logged.append(metrics)

    def teardown(self) -> None:
        pass

    def finish(self) -> None:
        if self.down == "end":
            raise ConnectionError("broken pipe")
        if self.down == "hangs at the end":
            time.sleep(min(600.0, self.settings["finish_timeout"]))
            if self.settings["finish_timeout_raises"]:
                raise TimeoutError("Timed out finishing run.")


@pytest.mark.fault(
    "W&B down at the start, in the middle, at the end, or hanging",
    "one warning; the run and metrics.jsonl are complete",
)
@pytest.mark.parametrize("down", ["start", "middle", "end", "hangs at the end"])
def test_wandb_down(down: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = Wandb(down)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    if down == "hangs at the end":
        monkeypatch.setattr("training.loggers.FINISH_SECONDS", 0.5)
    words = {"start": "cannot be reached", "hangs at the end": "Timed out"}
    with pytest.warns(UserWarning, match=words.get(down, "broken pipe")):
        summary = run(*LONG, "logger=wandb")
    assert summary["steps"] == 20
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert len(fake.logged) == (10 if down == "middle" else 20)


@pytest.mark.slow
@pytest.mark.fault(
    "W&B itself at a port where nobody listens", "one warning, logged offline; the run is complete"
)
def test_wandb_at_a_dead_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.warns(UserWarning, match="W&B cannot be reached"):
        train(compose([*TINY_RUN, *LONG, "logger=wandb", f"run_dir={tmp_path / 'run'}"]))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 20
    assert list((tmp_path / "run").glob("wandb/offline-run-*"))
