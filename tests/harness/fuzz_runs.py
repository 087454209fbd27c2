"""Subjects of the fuzzer: a checkpoint that a run goes on from, and the folder of a finished
run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from accel.ledger import Ledger
from accel.proof import KERNELS_FILE as KERNELS
from accel.proof import Question, prove
from evaluation.evaluator import PROTOCOL_FILE, TrainingDistances
from sampling.load import load_run
from scripts.report.__main__ import ReportConfig, report
from tests.harness.planted_models import GOOD
from tests.harness.fuzz import ODD, Say, as_json, mutate_bytes, mutate_tree
from tests.harness.fuzz_sets import mutate_header, mutate_payload, mutate_tensors
from tests.harness.words import CPU, TINY_RUN
from tests.scripts.test_report import FIGURES, PROTOCOL
from train import train
from training.assemble import Training, assemble, describe_run, restore
from training.checkpoint.load import find_weights_file, load, verify
from training.checkpoint.save import Checkpoints
from training.config.compose import Composed, compose
from training.metrics import format_summary
from training.run import Run
from training.step import StepOutput
from training.weights.pretrained import build_autoencoder, load_pretrained, read_description

WORDS = [
    *TINY_RUN,
    "runtime=eager",
    "runtime.device=cpu",
    "model=dit_xs",
    "guards.spike_sigmas=6",
    "fd_every=2",
]
WORDS += [
    "guards.spike_window=8",
    "save_every=1",
    "keep_checkpoints=2",
    "sample_every=2",
    "eval_every=2",
]
WORDS += ["fd.count=8", "fd.reference_count=8", "fd.features=[random]", "sampling.steps=1"]
WORDS += [
    "data=synthetic",
    "data.channels=1",
    "data.height=8",
    "data.width=8",
    "data.count=64",
    "data.num_classes=3",
]


QUESTION = Question({"fused_scan": "auto", "fused_conv": True}, {}, 8, CPU)


def tried(question: Question, uses: Any, keys: list[str], timed: list[str]) -> dict[str, Any]:
    """What a GPU would have found of kernels."""
    return {key: GOOD if key in timed else {k: GOOD[k] for k in list(GOOD)[:3]} for key in keys}


def forward(training: Training) -> tuple[torch.nn.Module, Callable[[], Any]]:
    x = torch.zeros(2, 1, 8, 8)
    t = torch.zeros(2)
    labels = torch.zeros(2, dtype=torch.int64)
    return training.model, lambda: training.model(x, t, labels)


READERS = {
    "config.yaml": ["report", "sampling", "the same command"],
    "environment.json": ["report", "more samples"],
    "ledger.json": ["report"],
    "summary.json": ["report", "the same command", "more samples"],
    "metrics.jsonl": ["report", "more samples"],
    "evaluation/final.json": ["report"],
    PROTOCOL_FILE: ["distances", "report"],
    KERNELS: ["kernels"],
}
"""What reads a file of a run folder."""


class Good(NamedTuple):
    """A finished run, its files by name, and the parts of the process that goes on with it."""

    files: dict[str, bytes]
    composed: Composed
    training: Training
    described: dict[str, Any]
    distances: TrainingDistances


@cache
def good_run() -> Good:
    """Made before a case is forked: it takes longer than a case may."""
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train(compose([*WORDS, f"run_dir={folder}/run"]))
        files = {
            str(f.relative_to(f"{folder}/run")): f.read_bytes()
            for f in Path(folder).rglob("*.*")
            if f.is_file()
        }
    weights = {"weights": {"file": "x", "sha256": "x", "kind": "ema", "step": 2}}
    files["evaluation/final.json"] = as_json({"features": FIGURES, "protocol": PROTOCOL | weights})
    composed = compose(WORDS)
    training = assemble(composed.cfg, CPU)
    ledger = training.warm_up()
    spec = training.loader.spec
    with patch("accel.proof.run_trials", tried):
        files[KERNELS] = as_json(prove(QUESTION, *forward(training))[1])
    distances = TrainingDistances(training, build_autoencoder(spec, CPU))
    return Good(files, composed, training, describe_run(composed, spec, ledger), distances)


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def mutate(rng: Random, name: str, content: bytes) -> tuple[bytes, str]:
    """Changes a file: its tree if it is JSON, a tensor or the header of safetensors, or its
    bytes."""
    if name.endswith(".safetensors"):
        return rng.choice((mutate_payload, mutate_header, mutate_tensors))(rng, content)
    if not name.endswith((".json", ".jsonl")) or rng.random() < 0.15:
        return mutate_bytes(rng, content)
    lines = content.splitlines() if name.endswith(".jsonl") else [content]
    number = rng.randrange(len(lines))
    tree = json.loads(lines[number])
    words = [mutate_tree(rng, tree) for _ in range(rng.choice((1, 1, 2, 3)))]
    if rng.random() < 0.05:
        tree = rng.choice(ODD)
        words = ["another value"]
    lines[number] = as_json(tree)
    return b"\n".join(lines) + b"\n", "; ".join(words)


def checkpoint(rng: Random, folder: Path, say: Say) -> None:
    """A file of a checkpoint, whose hashes are made right again mostly; what loads must train and
    be saved."""
    good = good_run()
    place = "checkpoints/step-2/"
    files = {
        name.removeprefix(place): text
        for name, text in good.files.items()
        if name.startswith(place)
    }
    name = rng.choice((*files, *["state.json"] * 4, *["rank-0-of-1.safetensors"] * 2))
    files[name], words = mutate(rng, name, files[name])
    say(f"{name}: {words}")
    if name != "manifest.json" and rng.random() < 0.9:
        told = {
            name: {"bytes": len(t), "sha256": hashlib.sha256(t).hexdigest()}
            for name, t in files.items()
        }
        del told["manifest.json"]
        files["manifest.json"] = as_json({"format": 2, "files": told})
    write(folder / place, files)
    kind = rng.choice(("load", "load", "load", "resume", "weights"))
    state = good.training.state
    say(kind)
    if kind == "weights":
        file = find_weights_file(str(folder), "weights")
        load_pretrained(file, CPU)
        read_description(file)
        return
    saved = Checkpoints(folder / "checkpoints")
    if kind == "load":
        load(verify(folder / place), state, good.described)
    elif restore(good.composed.cfg, state, saved, good.described) == "starting from scratch":
        raise AssertionError("a checkpoint is passed over without a word")
    good.training.step.schedule(state.samples)
    batches = good.training.take_batches()
    with torch.no_grad():  # a fork beside a GPU has no autograd
        for batch in batches:
            good.training.step.losses(batch)
    for parameter in good.training.step.parameters:
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    state.advance(good.composed.cfg.batch_size)
    state.meter.update(StepOutput(*torch.zeros(len(StepOutput._fields))))
    state.meter.report(0.0)
    saved.save(state, good.described)


def run_folder(rng: Random, folder: Path, say: Say) -> None:
    """A file of a finished run, and whatever reads such files."""
    good = good_run()
    run = folder / "run"
    files = dict(good.files)
    name = rng.choice(list(READERS))
    files[name], words = mutate(rng, name, files[name])
    write(run, files)
    readers: dict[str, Callable[[], Any]] = {
        "report": lambda: report(ReportConfig(str(run), rng.choice((None, str(folder / "other"))))),
        "sampling": lambda: load_run(run, device="cpu").sample([1], steps=1),
        "the same command": lambda: go_on(run, good, 16),
        "more samples": lambda: go_on(run, good, 24),
        "kernels": lambda: prove(QUESTION, *forward(good.training), run),
        "distances": lambda: good.distances.record(run),
    }
    reader = rng.choice(READERS[name])
    say(f"{name}: {words}; {reader}")
    write(folder / "other", good.files if reader == "report" else {})
    with (
        patch("accel.proof.run_trials", tried),
        patch.dict("os.environ", XDG_CACHE_HOME=str(folder)),
    ):
        readers[reader]()


def go_on(folder: Path, good: Good, total: int) -> None:
    """What a run does with its folder before the first step and after the last one."""
    cfg = dataclasses.replace(
        good.composed.cfg, run_dir=str(folder), total_samples=total, rehearsal="fastrun"
    )
    run = Run(good.composed._replace(cfg=cfg))
    if run.finished:
        format_summary(run.show_finished())
        return
    run.show_rehearsal()
    run.continue_records(dataclasses.replace(good.training.state, step=2))
    run.append_metrics({"step": 3, "loss": 1.0})
    format_summary(run.summarise(good.training.state, Ledger()))
    run.close()
