"""Proves fused kernels on the run's own device before the run launches them, and chooses between
them and definitions.

A spawned process (accel/trial.py) tries each kernel on the model's blocks: parity with its
definition, then time. What it finds is kept in a cache, and the choice in the run folder, so that a
resumed run computes what it did before.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel.sharding import world_size
from accel.technique import blocks_of
from common.files import cache_folder
from common.processes import environment
from common.text import first_line

PATIENCE = 120.0
"""Seconds without a result after which a trial counts as hanging; compiling a block has more."""
SLOWER = 1.03
"""A kernel is chosen unless it takes more than this share of its definition's time: it keeps less
for backward."""
TIMES = {False: "times", True: "replayed"}
"""Whether the run captures its step as a CUDA graph -> where a trial keeps the times that then
count."""
CHANGE_TIMES_ONLY = {"attention", "cudnn_benchmark", "gradient_checkpointing", "checkpoint_policy"}
CHANGE_TIMES_ONLY |= {"compile", "compile_scope", "compile_mode"}
"""Runtime keys that parity, which compares one operator at a time, does not depend on."""
FILE = "kernels.json"
"""Of a run folder."""


@dataclass(frozen=True)
class Proof:
    """Whether a kernel is used, and why or why not, as a sentence."""

    on: bool
    why: str


@dataclass(frozen=True)
class Question:
    """Which kernels a run asks for, by runtime key, and how it runs the blocks that use them."""

    asked: Mapping[str, bool | str]
    """Key -> True (parity decides) or "auto" (parity, then time)."""
    runtime: Mapping[str, Any]
    """Effective values of the techniques that act on a block, and their options."""
    samples: int
    """In a micro-batch of this process."""
    device: torch.device
    deterministic: bool = False
    """Parity alone decides: times differ from start to start."""


def prove(
    question: Question, model: nn.Module, forward: Callable[[], object], folder: Path | None = None
) -> tuple[dict[str, Proof], dict[str, Any]]:
    """Proves what `question` asks for `model`, or remembers it; returns the proofs by key, and what
    `folder` must keep.

    `forward()` runs the model once on two samples. Call this before anything wraps the model, in
    every process of a
    run: all come to one answer. `folder` is the run's: a choice that it holds stays, and is proved
    again where the machine or the shapes have changed.
    """
    uses = recorded(model, forward)
    if isinstance(uses, str):
        return {key: Proof(False, uses) for key in question.asked}, {}
    facts = facts_of(question, uses)
    everyone = gathered((facts, read(folder / FILE) if folder else {}, read(cache_file(facts))))
    _, earlier, cached = everyone[0]
    alike = all(theirs == facts for theirs, *_ in everyone)
    chosen = {
        key: on
        for key, on in earlier.get("chosen", {}).items()
        if question.asked.get(key) == "auto"
    }
    keys = [key for key in question.asked if chosen.get(key, True)]
    timed = [
        k
        for k in keys
        if question.asked[k] == "auto" and k not in chosen and not question.deterministic
    ]
    if alike and earlier.get("facts") == facts:
        found = earlier["found"]
    elif alike and cached.get("facts") == facts and not unanswered(cached["found"], keys, timed):
        found = cached["found"]
    else:
        began = time.monotonic()
        if is_first() and keys:
            print(
                f"Trying {', '.join(keys)} on this device, in a process of its own …",
                file=sys.stderr,
                flush=True,
            )
        found = merged(gathered(tried(question, uses, keys, timed)))
        if is_first() and keys:
            print(f"… took {time.monotonic() - began:.0f} s.", file=sys.stderr, flush=True)
        if (
            is_first()
            and not chosen
            and not any(result.get("passing") for result in found.values())
        ):
            remember(facts, found)
    captured = bool(question.runtime.get("cuda_graph"))
    proofs = {key: judged(found.get(key), key in timed, captured) for key in question.asked}
    for key, on in chosen.items():
        why = (
            f"this run has chosen before: {proofs[key].why}"
            if key in found
            else "this run has chosen so before"
        )
        proofs[key] = Proof(on and proofs[key].on, why)
    kept = {key: proof.on for key, proof in proofs.items() if question.asked[key] == "auto"}
    return proofs, {"facts": facts, "chosen": kept, "found": found}


def judged(result: Mapping[str, Any] | None, timed: bool, captured: bool = False) -> Proof:
    """The decision on one kernel from what its trial found; `captured` if the run replays a CUDA
    graph."""
    if result is None:
        return Proof(False, "it was not tried")
    if result["refusal"] is not None:
        return Proof(False, result["refusal"])
    why = f"error {result['error']:.0e} (definition {result['definition_error']:.0e})"
    if not timed:
        return Proof(True, why)
    times = result[TIMES[captured]]
    on = times["on"]
    off = times["off"]
    if on is None:
        return Proof(
            off is None,
            f"{why}, memory ran out with it" + (" and without it" if off is None else ""),
        )
    if off is None:
        return Proof(True, f"{why}, {on:.3g} ms a block; memory ran out without it")
    kept = "keeps {on:.3g} of {off:.3g} MB a sample".format(**result["kept_mb"])
    return Proof(on <= SLOWER * off, f"{why}, {on:.3g} ms a block against {off:.3g} ms, {kept}")


class Use(NamedTuple):
    """Blocks of one kind: one of them, how many there are, and what they get."""

    block: nn.Module
    blocks: int
    inputs: list[Any]
    """(shape, stride, dtype) of each."""
    kind: str


def recorded(model: nn.Module, forward: Callable[[], object]) -> list[Use] | str:
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
        metas = [
            [list(t.shape), list(t.stride()), str(t.dtype).removeprefix("torch.")] for t in got
        ]
        kind = described(block, metas)
        uses[kind] = Use(block, uses[kind].blocks + 1 if kind in uses else 1, metas, kind)
    return list(uses.values())


def described(block: nn.Module, metas: list[Any]) -> str:
    """What makes two blocks of one kind: their modules, tensors, grids and inputs."""
    modules = [
        [
            f"{type(m).__module__}.{type(m).__qualname__}",
            {k: v for k, v in vars(m).items() if isinstance(v, tuple)},
        ]
        for m in block.modules()
    ]
    tensors = [[name, list(t.shape), str(t.dtype)] for name, t in block.state_dict().items()]
    return hashlib.sha256(json.dumps([modules, tensors, metas], default=str).encode()).hexdigest()


def facts_of(question: Question, uses: list[Use]) -> dict[str, Any]:
    """All that a trial's findings depend on: not on `cuda_graph`, for it takes times with one and
    without."""
    from torch.utils import collect_env

    cuda = question.device.type == "cuda"
    here = Path(__file__).parent
    sources = [here / f"{name}.py" for name in ("proof", "trial", "parity")] + sorted(
        here.glob("kernels/*.py")
    )
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    timed = "auto" in question.asked.values() and not question.deterministic
    left_out = {"cuda_graph"} if timed else CHANGE_TIMES_ONLY | {"cuda_graph"}
    facts = {
        "gpu": torch.cuda.get_device_name(question.device) if cuda else question.device.type,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) if cuda else None,
        "torch": torch.__version__,
        "triton": triton,
        "kernels": hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest(),
        "asked": dict(question.asked),
        "runtime": {key: value for key, value in question.runtime.items() if key not in left_out},
        "samples": question.samples,
        "deterministic": question.deterministic,
        "blocks": [[use.kind, use.blocks] for use in uses],
    }
    return json.loads(json.dumps(facts))


def tried(question: Question, uses: list[Use], keys: list[str], timed: list[str]) -> dict[str, Any]:
    """What processes of their own found about `keys`; one that crashes or hangs costs the key that
    it was at."""
    if question.device.type == "cuda":
        torch.cuda.empty_cache()  # the trial takes its memory from the same device
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fastlatent-trial-") as name:
        folder = Path(name)
        try:
            for i, use in enumerate(uses):
                torch.save(use.block, folder / f"block-{i}.pt")
        except Exception as error:
            return {
                key: failed(f"its block cannot be sent to another process: {first_line(error)}")
                for key in keys
            }
        while missing := unanswered(found, keys, timed):
            job = {
                "device": str(question.device),
                "keys": keys,
                "timed": timed,
                "samples": question.samples,
                "deterministic": question.deterministic,
                "runtime": dict(question.runtime),
                "blocks": [{"blocks": use.blocks, "inputs": use.inputs} for use in uses],
                "found": found,
            }
            (folder / "job.json").write_text(json.dumps(job))
            state, end = attended(folder)
            found = state.get("found", found)
            # it got nowhere, or stuck somewhere
            if unanswered(found, keys, timed) == missing or state.get("key"):
                for key in [state["key"]] if state.get("key") else missing:
                    where = state.get("doing", "its start")
                    found[key] = found.get(key, {}) | failed(
                        f"the process that tried it {end} in {where}"
                    )
    return found


def unanswered(found: Mapping[str, Any], keys: list[str], timed: list[str]) -> list[str]:
    """Keys that a trial still has to answer."""
    tested = {
        key for key, result in found.items() if result["refusal"] is not None or key not in timed
    }
    return [key for key in keys if key not in tested and "times" not in found.get(key, {})]


def failed(why: str) -> dict[str, Any]:
    """A result that the next run does not take over: it may pass."""
    return {"refusal": why, "passing": True, "error": 0.0, "definition_error": 0.0}


def attended(folder: Path) -> tuple[dict[str, Any], str]:
    """Runs one trial; returns what it wrote last, and how it ended. It is killed after `PATIENCE`
    without news."""
    file = folder / "found.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "accel.trial", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    state: dict[str, Any] = {}
    hung = False
    since = time.monotonic()
    seen = None
    try:
        while process.poll() is None and not hung:
            time.sleep(0.05)
            if file.exists() and (stamp := file.stat().st_mtime_ns) != seen:
                seen = stamp
                since = time.monotonic()
                state = read(file)
            hung = time.monotonic() - since > (state.get("patience") or PATIENCE)
    finally:
        process.kill()
        code = process.wait()
    state = read(file)
    if hung:
        return state, f"did not answer for {state.get('patience') or PATIENCE:.0f} s"
    lines = (folder / "log").read_text(errors="replace").strip().splitlines()
    name = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    return state, f"ended with {name}" + (f" ({lines[-1].strip()})" if lines else "")


def merged(founds: list[dict[str, Any]]) -> dict[str, Any]:
    """One finding of those of all processes: any refusal, the largest errors and the longest
    times."""
    one = {}
    for key, result in founds[0].items():
        results = [found[key] for found in founds]
        refused = next((r for r in results if r["refusal"] is not None), None)
        one[key] = dict(refused or result)
        for name in ("error", "definition_error"):
            one[key][name] = max(r[name] for r in results)
        if refused is None and "times" in result:
            for kind in TIMES.values():
                taken = {name: [r[kind][name] for r in results] for name in ("on", "off")}
                one[key][kind] = {
                    name: None if None in all_ else max(all_) for name, all_ in taken.items()
                }
    return one


def gathered(item: Any) -> list[Any]:
    """The items of all processes, in order."""
    if world_size() == 1:
        return [item]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, item)
    return found


def is_first() -> bool:
    return world_size() == 1 or dist.get_rank() == 0


def cache_file(facts: Mapping[str, Any]) -> Path:
    """Where the findings of these facts are kept."""
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder("kernels") / f"{name}.json"


def read(file: Path) -> dict[str, Any]:
    """The content of a file of ours; nothing where there is none, or it is damaged."""
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        content = json.loads(file.read_text())
        for result in content["found"].values():
            for captured in TIMES:
                judged(result, "times" in result, captured)
        if all(type(on) is bool for on in content.get("chosen", {}).values()):
            return content
    return {}


def remember(facts: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Writes the cache; a folder that cannot be written costs the next run another trial, and a
    warning."""
    file = cache_file(facts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}.tmp")
        own.write_text(json.dumps({"facts": facts, "found": found}, indent=1) + "\n")
        own.replace(file)
    except OSError as error:
        warnings.warn(
            f"{file} cannot be written ({error.strerror}), so the next run tries again.",
            stacklevel=2,
        )
