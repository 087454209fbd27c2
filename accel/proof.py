"""Proves fused kernels on the run's own device before the run launches them, and chooses between
them and definitions.

A spawned process (accel/trial.py) tries each kernel on the model's blocks: parity with its
definition, then time. What it finds is kept in a cache, and the choice in the run folder, so that a
resumed run computes what it did before.
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
"""Seconds without a result after which a trial counts as hanging; compiling a block has more."""
MAX_SLOWDOWN = 1.03
"""A kernel is chosen unless it takes more than this share of its definition's time: it keeps less
for backward."""
TIMES_KEYS = {False: "times", True: "replayed"}
"""Whether the run captures its step as a CUDA graph -> where a trial keeps the times that then
count."""
KERNELS_FILE = "kernels.json"
"""The file of a run folder that holds its choice."""


@dataclass(frozen=True)
class Proof:
    """Whether a kernel is used, and why or why not, as a sentence."""

    on: bool
    why: str


class Use(NamedTuple):
    """Blocks of one kind: one of them, how many there are, and what they get."""

    block: nn.Module
    blocks: int
    inputs: list[Any]
    """(shape, stride, dtype) of each."""
    kind: str


@dataclass(frozen=True)
class Question:
    """Which kernels a run asks for, by runtime key, and how it runs the blocks that use them."""

    requested: Mapping[str, bool | str]
    """Key -> True (parity decides) or "auto" (parity, then time)."""
    runtime: Mapping[str, Any]
    """Effective values of the techniques that act on a block, and their options."""
    samples: int
    """Samples in a micro-batch of this process."""
    device: torch.device
    deterministic: bool = False
    """Parity alone decides: times differ from start to start."""
    captured: bool = False
    """The run replays its step as a CUDA graph."""
    change_times_only: Collection[str] = ()
    """Keys of `runtime` that parity, which compares one operator at a time, does not depend on."""

    @property
    def timed_keys(self) -> list[str]:
        """The keys that time decides about."""
        asked = [key for key, value in self.requested.items() if value == AUTO]
        return [] if self.deterministic else asked


def prove(
    question: Question, model: nn.Module, forward: Callable[[], object], folder: Path | None = None
) -> tuple[dict[str, Proof], dict[str, Any]]:
    """Proves what `question` asks for `model`, or remembers it; returns the proofs by key, and what
    `folder` must keep.

    `forward()` runs the model once on two samples. Call this before anything wraps the model, in
    every process of a run: all come to one answer. `folder` is the run's: a choice that it holds
    stays, and is proved again where the machine or the shapes have changed.
    """
    uses = record_uses(model, forward)
    if isinstance(uses, str):
        return {key: Proof(False, uses) for key in question.requested}, {}

    # The first process's memory counts, if all processes ask the same.
    facts = collect_facts(question, uses)
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    cache = find_cache_folder("kernels") / f"{name}.json"
    everyone = gather_objects(
        (facts, read_findings(folder / KERNELS_FILE) if folder else {}, read_findings(cache))
    )
    alike = all(theirs == facts for theirs, *_ in everyone)
    _, earlier, cached = everyone[0]
    before = earlier.get("chosen", {})
    chosen = {key: before[key] for key in before if question.requested.get(key) == AUTO}

    # What this run chose not to use needs no proof; of what it uses parity is shown again.
    keys = [key for key in question.requested if chosen.get(key, True)]
    timed = [key for key in question.timed_keys if key not in chosen]
    if alike and earlier.get("facts") == facts:
        found = earlier["found"]
    elif (
        alike and cached.get("facts") == facts and not find_unanswered(cached["found"], keys, timed)
    ):
        found = cached["found"]
    else:
        found = merge_findings(gather_objects(run_trials(question, uses, keys, timed)))
        passing = any(result.get("passing") for result in found.values())
        if is_first_rank() and not chosen and not passing:
            write_to_cache(cache, {"facts": facts, "found": found})
    proofs = decide(question, found, chosen)
    kept = {key: proof.on for key, proof in proofs.items() if question.requested[key] == AUTO}
    return proofs, {"facts": facts, "chosen": kept, "found": found}


def decide(
    question: Question, found: Mapping[str, Any], chosen: Mapping[str, bool]
) -> dict[str, Proof]:
    """The decision on each kernel that is asked for; what the run has chosen before stays so."""
    proofs = {}
    for key in question.requested:
        timed = key in question.timed_keys and key not in chosen
        proof = judge(found.get(key), timed, question.captured)
        if key in chosen:
            again = f"before: {proof.why}" if key in found else "so before"
            proof = Proof(chosen[key] and proof.on, f"this run has chosen {again}")
        proofs[key] = proof
    return proofs


def judge(result: Mapping[str, Any] | None, timed: bool, captured: bool = False) -> Proof:
    """The decision on one kernel from what its trial found; `captured` if the run replays a CUDA
    graph."""
    if result is None:
        return Proof(False, "it was not tried")
    if result["refusal"] is not None:
        return Proof(False, result["refusal"])
    why = f"error {result['error']:.0e} (definition {result['definition_error']:.0e})"
    if not timed:
        return Proof(True, why)

    on = result[TIMES_KEYS[captured]]["on"]
    off = result[TIMES_KEYS[captured]]["off"]
    if on is None:
        both = " and without it" if off is None else ""
        return Proof(off is None, f"{why}, memory ran out with it{both}")
    if off is None:
        return Proof(True, f"{why}, {on:.3g} ms a block; memory ran out without it")
    kept = "keeps {on:.3g} of {off:.3g} MB a sample".format(**result["kept_mb"])
    return Proof(
        on <= MAX_SLOWDOWN * off, f"{why}, {on:.3g} ms a block against {off:.3g} ms, {kept}"
    )


def collect_facts(question: Question, uses: list[Use]) -> dict[str, Any]:
    """All that a trial's findings depend on. A CUDA graph is none of it: a trial takes times with
    one and without."""
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
    """The blocks of a model by kind, with the shapes, strides and dtypes of what they get; or why
    they have none."""
    inputs: dict[nn.Module, Any] = {}
    hooks = [block.register_forward_pre_hook(inputs.__setitem__) for block in blocks_of(model)]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()

    uses: dict[str, Use] = {}
    for block, got in inputs.items():
        if not all(isinstance(t, Tensor) and t.is_floating_point() and len(t) == 2 for t in got):
            return (
                "it cannot be tried, for a block takes something else than tensors of floating "
                "point by sample"
            )
        metas = [[list(t.shape), t.stride(), str(t.dtype).removeprefix("torch.")] for t in got]
        kind = hash_kind(block, metas)
        number = uses[kind].blocks + 1 if kind in uses else 1
        uses[kind] = Use(block, number, metas, kind)
    return list(uses.values())


def hash_kind(block: nn.Module, metas: list[Any]) -> str:
    """What makes two blocks of one kind: their modules, tensors, grids and inputs."""
    modules = []
    for module in block.modules():
        grids = {name: value for name, value in vars(module).items() if isinstance(value, tuple)}
        modules.append([f"{type(module).__module__}.{type(module).__qualname__}", grids])
    tensors = [[name, list(t.shape), str(t.dtype)] for name, t in block.state_dict().items()]
    return hashlib.sha256(json.dumps([modules, tensors, metas], default=str).encode()).hexdigest()


def run_trials(
    question: Question, uses: list[Use], keys: list[str], timed: list[str]
) -> dict[str, Any]:
    """What processes of their own found about `keys`; one that crashes or hangs costs the key that
    it was at. The first process of a run says that it takes a while."""
    began = time.monotonic()
    says = keys and is_first_rank()
    if says:
        words = f"Trying {', '.join(keys)} on this device, in a process of its own …"
        print(words, file=sys.stderr, flush=True)
    if question.device.type == "cuda":
        torch.cuda.empty_cache()  # the trial takes its memory from the same device
    job = {
        "device": str(question.device),
        "keys": keys,
        "timed": timed,
        "samples": question.samples,
        "deterministic": question.deterministic,
        "runtime": question.runtime,
        "blocks": [{"blocks": use.blocks, "inputs": use.inputs} for use in uses],
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fastlatent-trial-") as name:
        folder = Path(name)
        try:
            torch.save([use.block for use in uses], folder / "blocks.pt")
        except Exception as error:
            why = f"its block cannot be sent to another process: {shorten_error(error)}"
            return {key: make_failure(why) for key in keys}

        while missing := find_unanswered(found, keys, timed):
            (folder / "job.json").write_text(json.dumps(job | {"found": found}))
            state, end = watch_trial(folder)
            found = state.get("found", found)
            at = state.get("key")
            # The process stuck somewhere, or got nowhere.
            if at or find_unanswered(found, keys, timed) == missing:
                why = f"the process that tried it {end} in {state.get('doing', 'its start')}"
                for key in [at] if at else missing:
                    found[key] = found.get(key, {}) | make_failure(why)
    if says:
        print(f"… took {time.monotonic() - began:.0f} s.", file=sys.stderr, flush=True)
    return found


def find_unanswered(found: Mapping[str, Any], keys: list[str], timed: list[str]) -> list[str]:
    """Keys that a trial still has to answer."""
    return [
        key
        for key in keys
        if key not in found
        or (found[key]["refusal"] is None and key in timed and "times" not in found[key])
    ]


def make_outcome(
    refusal: str | None, error: float = 0.0, definition_error: float = 0.0
) -> dict[str, Any]:
    """What a trial found about one kernel."""
    return {"refusal": refusal, "error": error, "definition_error": definition_error}


def make_failure(why: str) -> dict[str, Any]:
    """A result that the next run does not take over: it may pass."""
    return make_outcome(why) | {"passing": True}


def watch_trial(folder: Path) -> tuple[dict[str, Any], str]:
    """Runs one trial; returns what it wrote last, and how it ended. It is killed after `PATIENCE`
    without news."""
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


def merge_findings(founds: list[dict[str, Any]]) -> dict[str, Any]:
    """One finding of those of all processes: any refusal, the largest errors and the longest
    times."""
    one = {}
    for key, result in founds[0].items():
        results = [found[key] for found in founds]
        refused = [r for r in results if r["refusal"] is not None]
        one[key] = dict(refused[0] if refused else result)
        for name in ("error", "definition_error"):
            one[key][name] = max(r[name] for r in results)
        for kind in TIMES_KEYS.values():
            if refused or kind not in result:
                continue
            for name in ("on", "off"):
                taken = [r[kind][name] for r in results]
                one[key][kind] = one[key][kind] | {name: None if None in taken else max(taken)}
    return one


def read_findings(file: Path) -> dict[str, Any]:
    """The content of a file of ours; nothing where there is none, or it is damaged."""
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        content = json.loads(file.read_text())
        for result in content["found"].values():
            for captured in TIMES_KEYS:
                judge(result, "times" in result, captured)
        if all(type(on) is bool for on in content.get("chosen", {}).values()):
            return content
    return {}
