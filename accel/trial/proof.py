"""Tests fused kernels on the run's own device before the run launches them, and chooses between
each kernel and its definition, the same computation in PyTorch.

A separate process (accel/trial/child.py) tries each kernel on the model's blocks: first it compares
the kernel's results with the definition's (parity), then it times both. A cache keeps the results,
called findings, and the run folder keeps the choice, so that a resumed run computes with the same
kernels.
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
from accel.techniques.fused_kernels import Proof
from common.files import ROOT, find_cache_folder, hash_content, write_to_cache
from common.text import shorten_error
from common.workers import run_watched

TRIAL_TIMEOUT_SECONDS = 120.0
"""Seconds without a write to found.json, the file of findings, after which the run kills the
trial's process as hanging. While the process compiles and times a block, it requests a longer
limit."""
MAX_SLOWDOWN = 1.03
"""A kernel is chosen if a block with it takes at most this multiple of the block's time without it.
The number is above 1, so a kernel may be a little slower, because it saves fewer bytes for the
backward pass."""
TIME_KEYS = {False: "times", True: "replayed"}
"""Whether the run captures its step as a CUDA graph -> key in a finding for the times that decide
in such a run: "times" with the host's launches of kernels, "replayed" without them."""
KERNELS_FILE = "kernels.json"
"""Name of the file in a run folder that holds the run's choice between kernels and definitions."""


class Use(NamedTuple):
    """Blocks of a model that are equal in structure: `block` is one of them, `blocks` their number,
    `kind` the hash of their modules and of the shapes of parameters and inputs."""

    block: nn.Module
    blocks: int
    inputs: list[Any]
    """(shape, strides, dtype) of each input of `block`, from a run on two samples."""
    options: dict[str, Any]
    """Keyword arguments of `block`, which are no tensors."""
    kind: str


@dataclass(frozen=True)
class Question:
    """The kernels that a run requests, and the settings with which the run computes the blocks that
    use them."""

    requested: Mapping[str, bool | str]
    """Runtime key -> True (use the kernel if its results agree with the definition's) or "auto"
    (only if it is also fast enough)."""
    runtime: Mapping[str, Any]
    """Runtime key -> value, for the techniques that change how a block computes."""
    samples: int
    """Number of samples in a micro-batch of this process."""
    device: torch.device
    deterministic: bool = False
    """Whether the run must be deterministic. A kernel is then chosen if it passes its parity test,
    never by its time, which differs each time the run starts."""
    captured: bool = False
    """Whether the run replays its step as a CUDA graph."""
    change_times_only: Collection[str] = ()
    """Keys of `runtime` that affect only a kernel's time. The parity test runs each operator alone,
    so these keys cannot change its result; a trial that measures no time stays valid if they
    change."""

    @property
    def timed_keys(self) -> list[str]:
        """Runtime keys of the kernels that must also be fast enough to be chosen: those with the
        value "auto"; none in a deterministic run."""
        if self.deterministic:
            return []
        return [key for key, value in self.requested.items() if value == AUTO]


def prove(
    question: Question, model: nn.Module, forward: Callable[[], object], folder: Path | None = None
) -> tuple[dict[str, Proof], dict[str, Any]]:
    """Tries the kernels that `question` requests, or reads the findings of an earlier trial.
    Returns a mapping, runtime key -> decision, and a dict to write to `KERNELS_FILE` in the run
    folder ({} if the blocks cannot be tried).

    `forward()` runs the model once on two samples. Call this on every rank, before anything wraps
    the model: all ranks get the same decisions. `folder` is the run folder. If the folder holds an
    earlier choice, this choice stays; but if the machine or the model's shapes have changed, the
    chosen kernels must pass their parity test again.
    """
    uses = record_uses(model, forward)
    if isinstance(uses, str):
        return {key: Proof(False, uses) for key in question.requested}, {}

    # Every rank takes over from rank 0 the earlier choice and the findings in the run folder, and
    # the findings in the cache. The ranks use these findings only if all ranks have the same facts
    # (GPU, versions, blocks, …); otherwise all ranks run the trials.
    facts = collect_facts(question, uses)
    name = hash_content(facts, sort_keys=True)
    cache = find_cache_folder("kernels") / f"{name}.json"
    earlier = read_findings(folder / KERNELS_FILE) if folder else {}
    ranks = gather_objects((facts, earlier, read_findings(cache)))
    alike = all(rank_facts == facts for rank_facts, *_ in ranks)
    _, earlier, cached = ranks[0]
    known = {}
    for record in (cached, earlier) if alike else ():
        known |= record["found"] if record.get("facts") == facts else {}
    asked = question.requested
    chosen = {k: on for k, on in earlier.get("chosen", {}).items() if asked.get(k) == AUTO}

    # Do not try a kernel that this run decided earlier not to use. A kernel that it decided to use
    # must pass its parity test, but is not timed again.
    keys = [key for key in asked if chosen.get(key, True)]
    timed = [key for key in question.timed_keys if key not in chosen]
    if not find_unanswered(known, keys, timed):
        findings = known
    else:
        findings = merge_findings(gather_objects(run_trials(question, uses, keys, timed, known)))
        passing = any(finding.get("passing") for finding in findings.values())
        if is_first_rank() and not chosen and not passing:
            write_to_cache(cache, {"facts": facts, "found": findings})
    proofs = decide(question, findings, chosen)
    choices = {key: proof.on for key, proof in proofs.items() if asked[key] == AUTO}
    return proofs, {"facts": facts, "chosen": choices, "found": findings}


def decide(
    question: Question, findings: Mapping[str, Any], chosen: Mapping[str, bool]
) -> dict[str, Proof]:
    """Returns a mapping: runtime key -> decision whether to use the kernel. The run's earlier
    decision (`chosen`) stays, unless the kernel now fails its parity test."""
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
    """Decides whether to use a kernel by the finding of its trial (None: there was no trial).
    `timed`: the kernel must pass its parity test and also be fast enough; `captured`: the time that
    decides is that in a CUDA graph."""
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
    """Collects everything on which a trial's findings depend; the hash of these facts is the name
    of the cache file. Parity depends on GPU, driver, versions, the kernels' code, the kinds of
    blocks, and the runtime keys that change results; times depend also on further runtime keys, on
    the other kernels, and on the numbers of samples and blocks. `question.captured` is left out,
    because a trial measures times both with a CUDA graph and without."""
    from torch.utils import collect_env

    sources = sorted((ROOT / "accel").rglob("*.py"))
    timed = question.timed_keys
    left_out = () if timed else question.change_times_only
    facts: dict[str, Any] = {
        "gpu": question.device.type,
        "torch": torch.__version__,
        "kernels": hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest(),
        "asked": timed and question.requested,
        "runtime": {key: value for key, value in question.runtime.items() if key not in left_out},
        "samples": timed and question.samples,
        "deterministic": question.deterministic,
        "blocks": [[use.kind, timed and use.blocks] for use in uses],
    }
    if question.device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(question.device)
        facts["driver"] = collect_env.get_nvidia_driver_version(collect_env.run)
    for package in ("triton", "mamba-ssm"):
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    return json.loads(json.dumps(facts))


def record_uses(model: nn.Module, forward: Callable[[], object]) -> list[Use] | str:
    """Runs the model once by `forward()`. Returns one entry for each kind of block, with shapes,
    strides and dtypes of the block's inputs; if the blocks cannot be tried, a sentence that says
    why."""
    calls: list[Any] = []
    hooks = [
        block.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
        for block in blocks_of(model)
    ]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()

    uses: dict[str, Use] = {}
    for block, tensors, options in calls:
        if not all(
            isinstance(t, Tensor) and t.is_floating_point() and len(t) == 2 for t in tensors
        ):
            return (
                "it cannot be tried: a block has an input that is no floating-point tensor with "
                "one row a sample"
            )
        metas = [[list(t.shape), t.stride(), str(t.dtype).removeprefix("torch.")] for t in tensors]
        kind = hash_kind(block, [*metas, options])
        number = uses[kind].blocks + 1 if kind in uses else 1
        uses[kind] = Use(block, number, metas, options, kind)
    return list(uses.values())


def hash_kind(block: nn.Module, metas: list[Any]) -> str:
    """Hashes the classes of a block's modules, the modules' attributes that are tuples, the names,
    shapes and dtypes of the block's tensors, and what it gets: shapes, strides and dtypes of its
    inputs, and options (`metas`). A trial tries only one of the blocks with the same hash."""
    modules = []
    for module in block.modules():
        tuples = {name: value for name, value in vars(module).items() if isinstance(value, tuple)}
        modules.append([f"{type(module).__module__}.{type(module).__qualname__}", tuples])
    tensors = [[name, list(t.shape), str(t.dtype)] for name, t in block.state_dict().items()]
    return hashlib.sha256(json.dumps([modules, tensors, metas], default=str).encode()).hexdigest()


def run_trials(
    question: Question, uses: list[Use], keys: list[str], timed: list[str], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Tries the kernels of the runtime keys `keys` in separate processes. Returns a mapping:
    runtime key -> finding. `timed` are the keys whose kernels the trials also time; `known` are
    findings that need no trial.

    If a process crashes or hangs, the function refuses the kernel that the process was trying, and
    starts a new process for the remaining kernels. Rank 0 prints a message while it waits.
    """
    began = time.monotonic()
    findings = {**known}
    announces = find_unanswered(findings, keys, timed) and is_first_rank()
    if announces:
        print(f"Trying {', '.join(keys)} in a separate process …", file=sys.stderr, flush=True)
    # Return PyTorch's cached memory to the driver, because the trial's process needs memory of the
    # same GPU.
    if question.device.type == "cuda":
        torch.cuda.empty_cache()
    job = {
        "device": str(question.device),
        "keys": keys,
        "timed": timed,
        "samples": question.samples,
        "deterministic": question.deterministic,
        "runtime": question.runtime,
        "blocks": [use._replace(block=None)._asdict() for use in uses],
    }
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

            # If the process ended while it tried the kernel of a key, record that kernel as failed.
            # If it ended before it tried any kernel, record all missing ones as failed.
            if failed_key or find_unanswered(findings, keys, timed) == missing:
                why = f"the process that tried it {end} in {state.get('doing', 'its start')}"
                for key in [failed_key] if failed_key else missing:
                    findings[key] = findings.get(key, {}) | make_failure(why)
    if announces:
        print(f"… took {time.monotonic() - began:.0f} s.", file=sys.stderr, flush=True)
    return findings


def find_unanswered(findings: Mapping[str, Any], keys: list[str], timed: list[str]) -> list[str]:
    """Finds those of the runtime keys `keys` for whose kernel `findings` lack the parity test, or
    lack the time if the key is in `timed` and the kernel has passed that test."""
    return [
        key
        for key in keys
        if key not in findings
        or (findings[key]["refusal"] is None and key in timed and "times" not in findings[key])
    ]


def make_outcome(
    refusal: str | None, error: float = 0.0, definition_error: float = 0.0
) -> dict[str, Any]:
    """Makes the finding of one kernel's parity test. `refusal`: why the kernel fails the test, None
    if it passed; `error`: the kernel's relative error; `definition_error`: that of its
    definition."""
    return {"refusal": refusal, "error": error, "definition_error": definition_error}


def make_failure(why: str) -> dict[str, Any]:
    """Makes the finding of a kernel that failed for the reason `why`. Findings with such a failure
    are not cached, because the next trial may succeed."""
    return make_outcome(why) | {"passing": True}


def watch_trial(folder: Path) -> tuple[dict[str, Any], str]:
    """Runs one process of accel/trial/child.py. Returns the last content of found.json that the
    process wrote, and how the process ended, as the end of a sentence.

    Kills the process if it writes nothing for `TRIAL_TIMEOUT_SECONDS`, or for the longer time that
    the process has requested in found.json.
    """
    file = folder / "found.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "accel.trial.child", str(folder)]
    end = run_watched(
        command,
        file,
        folder / "log",
        lambda: read_findings(file).get("patience") or TRIAL_TIMEOUT_SECONDS,
    )
    return read_findings(file), end


def merge_findings(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the findings of all ranks into one finding for each key: a refusal if any rank refused
    the kernel, the largest errors and the longest times."""
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
    """Reads a file with findings, such as found.json or `KERNELS_FILE`; returns {} if it is absent
    or damaged."""
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        content = json.loads(file.read_text())
        for result in content["found"].values():
            for captured in TIME_KEYS:
                judge(result, "times" in result, captured)
        if all(type(on) is bool for on in content.get("chosen", {}).values()):
            return content
    return {}
