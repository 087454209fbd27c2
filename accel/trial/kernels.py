"""Chooses between each fused kernel that a stack requests and its definition, the same computation
in PyTorch, by trying both on the run's own device and blocks.

A separate process (accel/trial/child.py) first compares the kernels' results with those of their
definitions (parity). Then it times blocks with each kernel that could be slower, and without it.
The run folder keeps the choice, so that a resumed run computes with the same kernels.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.ledger import AUTO
from accel.sharding import gather_objects, is_first_rank
from accel.stack import AccelerationStack
from accel.technique import find_switches
from accel.techniques.compilation import Compile
from accel.techniques.cuda_graph import CudaGraph
from accel.techniques.fused_kernels import FusedKernel, Proof
from accel.trial.contest import Facts, Finding, describe_machine, settle
from accel.trial.uses import Use, name_times, record_uses
from common.environment import get_device_name, match_card
from common.files import ROOT, read_object
from common.text import shorten_error
from common.workers import ask_child, read_found

MAX_SLOWDOWN = 1.03
"""A kernel is chosen if a block with it takes at most this multiple of the block's time without it.
The number is above 1, so a kernel may be a little slower, because it saves fewer bytes for the
backward pass."""
MIN_BUSY_ELEMENTS = 2**24
"""Number of elements of a micro-batch's largest input of a block from which on a block takes the
GPU longer than the host needs to launch its kernels, so that the factors in gains.json hold."""
LEAST_RATIO = 2.0
"""Smallest ratio of bytes in gains.json with which a kernel counts as never slower than its
definition on a GPU for which no time was measured."""
PARITY_SECONDS = 25.0
TIMING_SECONDS = {"eager": 1.0, "compiled": 10.0}
"""Seconds that a trial of parity took on an H100's host (docs/LOG.md), and about those that each
timed block takes besides, by the way in which the model runs."""
FIGURES = {"error", "definition_error", "on_ms", "off_ms"}
KERNELS_FILE = "kernels.json"
"""Name of the file in a run folder that holds the run's choice between kernels and definitions."""


def choose_kernels(
    stack: AccelerationStack,
    model: nn.Module,
    forward: Callable[[], object],
    samples: int,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Decides which fused kernels this run uses on its device. Returns the choice, to write to
    `KERNELS_FILE` in the run's `folder`; {} if no kernel was requested, or if the blocks cannot be
    tried. Its keys: `chosen`, runtime key -> whether to use the kernel, for the value "auto";
    `found`, the findings; `words` and `tried`, see `contest.make_ledger_row`.

    `forward()` runs the unchanged model on two samples; `samples` is the number of samples in a
    micro-batch. Call this on every rank, before `on_model`. A choice in `folder` stays; but if the
    machine or the model's shapes have changed, the chosen kernels must pass their parity test
    again. Raises UserError if a kernel that was requested with `true` fails its parity test, under
    on_unavailable=error; otherwise the kernel stays off.
    """
    kernels = {
        t.key: t for t in stack.techniques if isinstance(t, FusedKernel) and t.asks_for_proof(model)
    }
    if not kernels:
        return {}

    # Blocks that cannot be tried get no kernels.
    with stack.autocast(), torch.no_grad():
        uses = record_uses(model, forward)
    if isinstance(uses, str):
        proofs = {key: Proof(False, uses) for key in kernels}
        choice = {}
    else:
        proofs, choice = Contest(
            stack, {key: t.value for key, t in kernels.items()}, uses, samples
        ).decide(folder)
    for key, technique in kernels.items():
        technique.settle(proofs[key])
    stack.refuse(
        [
            f"runtime.{key}=true ({proof.why})"
            for key, proof in proofs.items()
            if stack.requested[key] is True and not proof.on
        ]
    )
    return choice


class Contest:
    """The contest between the kernels that are `requested`, runtime key -> True or "auto", and
    their definitions, in the blocks `uses` of a run that computes `samples` samples at a time."""

    def __init__(
        self,
        stack: AccelerationStack,
        requested: Mapping[str, bool | str],
        uses: list[Use],
        samples: int,
    ) -> None:
        self.stack = stack
        self.uses = uses
        self.samples = samples
        self.requested = requested
        self.captured = bool(stack.values.get(CudaGraph.key))
        self.mode = "compiled" if stack.values.get(Compile.key) else "eager"
        # Techniques, except kernels, that change what a block computes, or how long it takes.
        self.acting = [
            t
            for t in stack.techniques
            if not isinstance(t, FusedKernel) and (t.keeps_parity or "sampling" in t.used_in)
        ]
        self.gains = {} if stack.deterministic else self.explain_gains()

    def explain_gains(self) -> dict[str, str]:
        """Returns runtime key -> phrase that says why a kernel is never slower than its definition
        (gains.json), so that it need not be timed. Empty for micro-batches so small that the host
        may limit the step."""
        sizes = [math.prod(shape[1:]) for use in self.uses for shape, *_ in use.inputs]
        if self.samples * max(sizes, default=0) < MIN_BUSY_ELEMENTS:
            return {}
        card = match_card(get_device_name(self.stack.device))
        phrases = {}
        for key, gain in read_object(Path(__file__).with_name("gains.json"))[self.mode].items():
            measured = gain["measured"]
            if min(measured.values()) < 1.0:
                continue
            if card and card.name in measured:
                phrases[key] = f"its definition takes {measured[card.name]} × as long on this GPU"
            elif gain["bytes"] >= LEAST_RATIO:
                phrases[key] = f"its definition moves {gain['bytes']} × as many bytes"
        return phrases

    def decide(self, folder: Path | None) -> tuple[dict[str, Proof], dict[str, Any]]:
        """Tries the kernels, or reads what an earlier trial has found. Returns runtime key ->
        decision, and the choice (see `choose_kernels`)."""
        earlier = gather_objects(read_found(folder / KERNELS_FILE) if folder else {})[0]
        auto = [key for key, value in self.requested.items() if value == AUTO]
        chosen = {key: on for key, on in dict(earlier.get("chosen") or {}).items() if key in auto}

        # Do not try a kernel that this run decided earlier not to use. A kernel that it decided to
        # use must pass its parity test, but is not timed again.
        keys = [key for key in self.requested if chosen.get(key, True)]
        untimed = auto if self.stack.deterministic else {**self.gains, **chosen}
        timed = [key for key in auto if key not in untimed]
        findings = settle(
            "kernels",
            self.collect_facts(keys, timed),
            lambda known: self.run_trials(keys, timed, known),
            merge_findings,
            earlier.get("found") or {},
        )
        proofs = {}
        for key in self.requested:
            proof = judge(findings.get(key), findings.get(name_times(key)))
            if key in chosen:
                again = f"before: {proof.why}" if key in findings else "so before"
                proof = Proof(chosen[key] and proof.on, f"this run has chosen {again}")
            elif key in auto and key in self.gains and proof.on:
                proof = Proof(True, f"{proof.why}, not timed: {self.gains[key]}")
            proofs[key] = proof
        rows = [{"words": f"{k}={p.on}".lower(), "note": p.why} for k, p in proofs.items()]
        return proofs, {
            "words": " ".join(row["words"] for row in rows),
            "tried": rows,
            "chosen": {key: proofs[key].on for key in auto},
            "found": findings,
        }

    def collect_facts(self, keys: list[str], timed: list[str]) -> dict[str, Facts]:
        """Collects the questions: one about parity for each of `keys`, one about times for each of
        `timed`. Parity depends on the machine, the kernels' code, the kinds of blocks, and the
        runtime keys that change results; times also on further runtime keys, on the other kernels,
        and on the numbers of samples and blocks."""
        machine = describe_machine(self.stack.device, [ROOT / "accel"])
        machine["deterministic"] = self.stack.deterministic
        questions = {}
        for key in keys:
            questions[key] = machine | {
                "parity": key,
                "runtime": [t.settings for t in self.acting if not t.keeps_parity],
                "blocks": [use.kind for use in self.uses if find_switches(use.block, key)],
            }
        for key in timed:
            questions[name_times(key)] = machine | {
                "timed": key,
                "runtime": [t.settings for t in self.acting],
                "captured": self.captured,
                "kernels": {key: self.requested[key] for key in keys},
                "samples": self.samples,
                "blocks": [[use.kind, use.blocks] for use in self.uses],
            }
        return questions

    def run_trials(
        self, keys: list[str], timed: list[str], known: Mapping[str, Finding]
    ) -> dict[str, Finding]:
        """Tries the kernels of `keys`, and times those of `timed`, in separate processes, except
        what is `known`. Returns the findings: that of a parity test under the runtime key, that of
        times under `name_times(key)`.

        If a process crashes or hangs, the method refuses the kernel that the process was trying,
        and starts a new process for the remaining kernels. Rank 0 prints a message while it waits.
        """
        began = time.monotonic()
        findings = {**known}
        missing = find_missing(findings, keys, timed)
        if not missing:
            return findings
        if is_first_rank():
            tests = sum(name in keys for name in missing)
            blocks = len(missing) - tests
            seconds = PARITY_SECONDS * (tests > 0)
            seconds += TIMING_SECONDS[self.mode] * (blocks + (blocks > 0))
            print(
                "Trying fused kernels in a separate process, parity first, then time; about "
                f"{seconds:.0f} s: {'; '.join(missing)} …",
                file=sys.stderr,
                flush=True,
            )
        # Return PyTorch's cached memory to the driver, because the trial's process needs memory of
        # the same GPU.
        if self.stack.device.type == "cuda":
            torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory(prefix="fastlatent-trial-") as name:
            file = Path(name) / "blocks.pt"
            try:
                torch.save([use.block for use in self.uses], file)
            except Exception as error:
                why = f"its block cannot be sent to another process: {shorten_error(error)}"
                return {key: make_failure(why) for key in keys}
            job = {
                "device": str(self.stack.device),
                "keys": keys,
                "timed": timed,
                "samples": self.samples,
                "captured": self.captured,
                "deterministic": self.stack.deterministic,
                "runtime": dict(
                    pair for t in self.acting for pair in (t.option | {t.key: t.value}).items()
                ),
                "file": str(file),
                "blocks": [use._replace(block=None)._asdict() for use in self.uses],
            }
            while missing:
                state, end = ask_child(["-m", "accel.trial.child"], job | {"found": findings})
                findings = state.get("found", findings)

                # If the process ended while it tried the kernel of a key, record that kernel as
                # failed. If it ended before it tried any kernel, record all missing ones as failed.
                failed = state.get("trying")
                if failed or find_missing(findings, keys, timed) == missing:
                    why = f"the process that tried it {end} in {state.get('doing', 'its start')}"
                    names = [failed] if failed else missing
                    findings |= dict.fromkeys(names, make_failure(why))
                missing = find_missing(findings, keys, timed)
        if is_first_rank():
            print(f"… took {time.monotonic() - began:.0f} s.", file=sys.stderr, flush=True)
        return findings


def judge(parity: Finding | None, times: Finding | None) -> Proof:
    """Decides whether to use a kernel by what its trial found about parity and times (None: there
    was no trial, or it was not timed)."""
    if parity is None:
        return Proof(False, "it was not tried")
    refusal = parity["refusal"] or (times or parity)["refusal"]
    if refusal:
        return Proof(False, refusal)
    why = "error {error:.0e} (definition {definition_error:.0e})".format(**parity)
    if times is None:
        return Proof(True, why)

    on = times["on_ms"]
    off = times["off_ms"]
    if on is None:
        both = " and without it" if off is None else ""
        return Proof(off is None, f"{why}, memory ran out with it{both}")
    if off is None:
        return Proof(True, f"{why}, {on:.3g} ms a block; memory ran out without it")
    speed = f"{on:.3g} ms a block against {off:.3g} ms ({off / on:.3g} ×)"
    return Proof(on <= MAX_SLOWDOWN * off, f"{why}, {speed}")


def find_missing(findings: Mapping[str, Finding], keys: list[str], timed: list[str]) -> list[str]:
    """Finds the names of findings that are missing; times are needed only of kernels that have
    passed their parity test."""
    passed = [key for key in timed if findings.get(key, {}).get("refusal") is None]
    return [name for name in (*keys, *map(name_times, passed)) if name not in findings]


def make_failure(why: str) -> Finding:
    """Makes the finding about a kernel that failed for the reason `why`. The failure is passing:
    the next trial may succeed."""
    return {"refusal": why, "passing": True}


def merge_findings(ranks: Sequence[dict[str, Finding]]) -> dict[str, Finding]:
    """Merges the findings of all ranks into one for each name: a refusal if any rank refused the
    kernel, otherwise the largest numbers, None if one is None."""
    merged = {}
    for name, first in ranks[0].items():
        findings = [rank[name] for rank in ranks if name in rank]
        refused = [finding for finding in findings if finding["refusal"] is not None]
        merged[name] = {**(refused or findings)[0]}
        for figure in [] if refused else first.keys() & FIGURES:
            values = [finding[figure] for finding in findings]
            merged[name][figure] = None if None in values else max(values)
    return merged
