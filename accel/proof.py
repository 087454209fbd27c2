"""Proves fused kernels on the run's own device before the run launches them, and chooses between
each kernel and its definition.

A spawned process (accel/trial.py) tries each kernel on the model's blocks: parity with its
definition, then time. A cache keeps the findings, and the run folder keeps the choice, so that a
resumed run computes as before.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accel.ledger import AUTO
from accel.sharding import gather_objects, is_first_rank
from accel.technique import blocks_of
from common.files import find_cache_folder, write_to_cache
from common.text import shorten_error
from common.workers import run_watched

TRIAL_TIMEOUT_SECONDS = 120.0
"""Seconds without news after which a trial counts as hanging; a trial that compiles asks for
more."""
MAX_SLOWDOWN = 1.03
"""A kernel may take this multiple of its definition's time and still be chosen, because it saves
less for backward."""
TIME_KEYS = {False: "times", True: "replayed"}
"""Whether the run captures its step as a CUDA graph -> key of the times in a finding that then
count."""
KERNELS_FILE = "kernels.json"
"""File of a run folder that holds the choice of kernels."""


@dataclass(frozen=True)
class Proof:
    """The decision whether to use a kernel, and the reason as a sentence."""

    on: bool
    why: str


class Use(NamedTuple):
    """Blocks of one kind: one example, their number, and their inputs."""

    block: nn.Module
    blocks: int
    inputs: list[Any]
    """(shape, stride, dtype) of each input."""
    kind: str


@dataclass(frozen=True)
class Question:
    """The kernels that a run requests, and how the run computes the blocks that use them."""

    requested: Mapping[str, bool | str]
    """Runtime key -> True (parity decides) or "auto" (parity, then time)."""
    runtime: Mapping[str, Any]
    """Values and options of the techniques that act on a block."""
    samples: int
    """Samples in a micro-batch of this process."""
    device: torch.device
    deterministic: bool = False
    """Whether parity alone decides, because times differ from start to start."""
    captured: bool = False
    """Whether the run replays its step as a CUDA graph."""
    change_times_only: Collection[str] = ()
    """Keys of `runtime` that do not change parity, which compares one operator at a time."""

    @property
    def timed_keys(self) -> list[str]:
        """Keys about which time decides."""
        if self.deterministic:
            return []
        return [key for key, value in self.requested.items() if value == AUTO]


def prove(
    question: Question, model: nn.Module, forward: Callable[[], object], folder: Path | None = None
) -> tuple[dict[str, Proof], dict[str, Any]]:
    """Proves the kernels that `question` requests, or reads earlier findings; returns the proofs by
    key, and the content for `KERNELS_FILE`.

    `forward()` runs the model once on two samples. Call this before anything wraps the model, on
    every rank: all ranks get one answer. `folder` is the run's: a choice in it stays, and is proved
    again if the machine or the shapes have changed.
    """
    uses = record_uses(model, forward)
    if isinstance(uses, str):
        return {key: Proof(False, uses) for key in question.requested}, {}

    # Rank 0's files count, if all ranks ask the same.
    facts = collect_facts(question, uses)
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    cache = find_cache_folder("kernels") / f"{name}.json"
    earlier = read_findings(folder / KERNELS_FILE) if folder else {}
    ranks = gather_objects((facts, earlier, read_findings(cache)))
    alike = all(rank_facts == facts for rank_facts, *_ in ranks)
    _, earlier, cached = ranks[0]
    choices = earlier.get("chosen", {})
    chosen = {key: choices[key] for key in choices if question.requested.get(key) == AUTO}

    # A kernel that this run chose not to use needs no proof; one that it uses shows parity again.
    keys = [key for key in question.requested if chosen.get(key, True)]
    timed = [key for key in question.timed_keys if key not in chosen]
    cache_fits = alike and cached.get("facts") == facts
    if alike and earlier.get("facts") == facts:
        findings = earlier["found"]
    elif cache_fits and not find_unanswered(cached["found"], keys, timed):
        findings = cached["found"]
    else:
        findings = merge_findings(gather_objects(run_trials(question, uses, keys, timed)))
        passing = any(finding.get("passing") for finding in findings.values())
        if is_first_rank() and not chosen and not passing:
            write_to_cache(cache, {"facts": facts, "found": findings})
    proofs = decide(question, findings, chosen)
    choices = {key: proof.on for key, proof in proofs.items() if question.requested[key] == AUTO}
    return proofs, {"facts": facts, "chosen": choices, "found": findings}


def decide(
    question: Question, findings: Mapping[str, Any], chosen: Mapping[str, bool]
) -> dict[str, Proof]:
    """Decides on each requested kernel; an earlier choice of the run stays, unless parity now
    fails."""
    proofs = {}
    for key in question.requested:
        timed = key in question.timed_keys and key not in chosen
        proof = judge(findings.get(key), timed, question.captured)
        if key in chosen:
            again = f"before: {proof.why}" if key in findings else "so before"
            proof = Proof(chosen[key] and proof.on, f"this run has chosen {again}")
        proofs[key] = proof
    return proofs


def judge(finding: Mapping[str, Any] | None, timed: bool, captured: bool = False) -> Proof:
    """Decides on one kernel by the finding of its trial; `captured`: the run replays a CUDA
    graph."""
    if finding is None:
        return Proof(False, "it was not tried")
    if finding["refusal"] is not None:
        return Proof(False, finding["refusal"])
    why = f"error {finding['error']:.0e} (definition {finding['definition_error']:.0e})"
    if not timed:
        return Proof(True, why)

    on = finding[TIME_KEYS[captured]]["on"]
    off = finding[TIME_KEYS[captured]]["off"]
    if on is None:
        both = " and without it" if off is None else ""
        return Proof(off is None, f"{why}, memory ran out with it{both}")
    if off is None:
        return Proof(True, f"{why}, {on:.3g} ms a block; memory ran out without it")
    kept = "keeps {on:.3g} of {off:.3g} MB a sample".format(**finding["kept_mb"])
    return Proof(
        on <= MAX_SLOWDOWN * off, f"{why}, {on:.3g} ms a block against {off:.3g} ms, {kept}"
    )


def collect_facts(question: Question, uses: list[Use]) -> dict[str, Any]:
    """Collects all facts on which a trial's findings depend. `captured` is not one: a trial takes
    times with a CUDA graph and without."""
    from torch.utils import collect_env

    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), *sorted(here.glob("kernels/*.py"))]
    left_out = () if question.timed_keys else question.change_times_only
    facts: dict[str, Any] = {
        "gpu": question.device.type,
        "torch": torch.__version__,
        "kernels": hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest(),
        "asked": question.requested,
        "runtime": {key: value for key, value in question.runtime.items() if key not in left_out},
        "samples": question.samples,
        "deterministic": question.deterministic,
        "blocks": [[use.kind, use.blocks] for use in uses],
    }
    if question.device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(question.device)
        facts["driver"] = collect_env.get_nvidia_driver_version(collect_env.run)
    for package in ("triton", "mamba-ssm"):
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    return json.loads(json.dumps(facts))


def record_uses(model: nn.Module, forward: Callable[[], object]) -> list[Use] | str:
    """Runs the model and records its blocks by kind, with shapes, strides and dtypes of their
    inputs; returns a sentence if they cannot be tried."""
    inputs: dict[nn.Module, Any] = {}
    hooks = [block.register_forward_pre_hook(inputs.__setitem__) for block in blocks_of(model)]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()

    uses: dict[str, Use] = {}
    for block, tensors in inputs.items():
        if not all(
            isinstance(t, Tensor) and t.is_floating_point() and len(t) == 2 for t in tensors
        ):
            return (
                "it cannot be tried: a block has an input that is no floating-point tensor with "
                "one row a sample"
            )
        metas = [[list(t.shape), t.stride(), str(t.dtype).removeprefix("torch.")] for t in tensors]
        kind = hash_kind(block, metas)
        number = uses[kind].blocks + 1 if kind in uses else 1
        uses[kind] = Use(block, number, metas, kind)
    return list(uses.values())


def hash_kind(block: nn.Module, metas: list[Any]) -> str:
    """Hashes what defines the kind of a block: its modules, tensors, grids and inputs."""
    modules = []
    for module in block.modules():
        grids = {name: value for name, value in vars(module).items() if isinstance(value, tuple)}
        modules.append([f"{type(module).__module__}.{type(module).__qualname__}", grids])
    tensors = [[name, list(t.shape), str(t.dtype)] for name, t in block.state_dict().items()]
    return hashlib.sha256(json.dumps([modules, tensors, metas], default=str).encode()).hexdigest()


def run_trials(
    question: Question, uses: list[Use], keys: list[str], timed: list[str]
) -> dict[str, Any]:
    """Tries `keys` in spawned processes and returns the findings.

    If a process crashes or hangs, the key that it was trying fails, and a new process tries the
    rest. Rank 0 announces the wait.
    """
    began = time.monotonic()
    announces = keys and is_first_rank()
    if announces:
        print(f"Trying {', '.join(keys)} in a separate process …", file=sys.stderr, flush=True)
    # The trial takes its memory from the same device.
    if question.device.type == "cuda":
        torch.cuda.empty_cache()
    job = {
        "device": str(question.device),
        "keys": keys,
        "timed": timed,
        "samples": question.samples,
        "deterministic": question.deterministic,
        "runtime": question.runtime,
        "blocks": [{"blocks": use.blocks, "inputs": use.inputs} for use in uses],
    }
    findings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fastlatent-trial-") as name:
        folder = Path(name)
        try:
            torch.save([use.block for use in uses], folder / "blocks.pt")
        except Exception as error:
            why = f"its block cannot be sent to another process: {shorten_error(error)}"
            return {key: make_failure(why) for key in keys}

        while missing := find_unanswered(findings, keys, timed):
            (folder / "job.json").write_text(json.dumps(job | {"found": findings}))
            state, end = watch_trial(folder)
            findings = state.get("found", findings)
            failed_key = state.get("key")

            # The process ended while it tried a key, or before it tried any.
            if failed_key or find_unanswered(findings, keys, timed) == missing:
                why = f"the process that tried it {end} in {state.get('doing', 'its start')}"
                for key in [failed_key] if failed_key else missing:
                    findings[key] = findings.get(key, {}) | make_failure(why)
    if announces:
        print(f"… took {time.monotonic() - began:.0f} s.", file=sys.stderr, flush=True)
    return findings


def find_unanswered(findings: Mapping[str, Any], keys: list[str], timed: list[str]) -> list[str]:
    """Finds the keys that a trial must still answer."""
    return [
        key
        for key in keys
        if key not in findings
        or (findings[key]["refusal"] is None and key in timed and "times" not in findings[key])
    ]


def make_outcome(
    refusal: str | None, error: float = 0.0, definition_error: float = 0.0
) -> dict[str, Any]:
    """Makes the finding of a parity test of one kernel; errors are relative."""
    return {"refusal": refusal, "error": error, "definition_error": definition_error}


def make_failure(why: str) -> dict[str, Any]:
    """Makes a finding that the cache does not keep, because the next try may succeed."""
    return make_outcome(why) | {"passing": True}


def watch_trial(folder: Path) -> tuple[dict[str, Any], str]:
    """Runs one trial; returns the state that it wrote last, and how it ended.

    Kills it after `TRIAL_TIMEOUT_SECONDS` without news, or the longer time for which it asked.
    """
    file = folder / "found.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "accel.trial", str(folder)]
    end = run_watched(
        command,
        file,
        folder / "log",
        lambda: read_findings(file).get("patience") or TRIAL_TIMEOUT_SECONDS,
    )
    return read_findings(file), end


def merge_findings(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the findings of all ranks: any refusal, the largest errors and the longest times."""
    merged = {}
    for key, first in ranks[0].items():
        findings = [rank[key] for rank in ranks]
        refused = [finding for finding in findings if finding["refusal"] is not None]
        merged[key] = dict(refused[0] if refused else first)
        for name in ("error", "definition_error"):
            merged[key][name] = max(finding[name] for finding in findings)

        for kind in TIME_KEYS.values():
            if refused or kind not in first:
                continue
            for name in ("on", "off"):
                times = [finding[kind][name] for finding in findings]
                merged[key][kind] = merged[key][kind] | {
                    name: None if None in times else max(times)
                }
    return merged


def read_findings(file: Path) -> dict[str, Any]:
    """Reads a file of findings; returns {} if it is absent or damaged."""
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        content = json.loads(file.read_text())
        for result in content["found"].values():
            for captured in TIME_KEYS:
                judge(result, "times" in result, captured)
        if all(type(on) is bool for on in content.get("chosen", {}).values()):
            return content
    return {}
