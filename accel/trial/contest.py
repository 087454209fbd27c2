"""Keeps what trials on this machine have found, for all ranks of a run and for later runs.

A question is a dict of the facts on which its answer depends; the answer, called finding, is a dict
too. Two kinds of candidates compete: a fused kernel in a block (accel/trial/kernels.py), and a set
of runtime keys in a step (training/preflight/tune.py). A child process measures them, because a
candidate may crash or hang (`common.workers.ask_child`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from accel.ledger import AUTO, LedgerRow
from accel.sharding import gather_objects, is_first_rank
from common.environment import get_device_name, memory_of
from common.files import find_cache_folder, hash_content, write_to_cache
from common.workers import read_found

Facts = dict[str, Any]
Finding = dict[str, Any]
PACKAGES = ("torch", "triton", "mamba-ssm")


def describe_machine(device: torch.device, folders: Iterable[Path]) -> Facts:
    """Collects the facts on which every finding depends: the device and its driver, the versions of
    `PACKAGES`, and a hash of the Python files in `folders`."""
    from torch.utils import collect_env

    code = hashlib.sha256()
    for file in (file for folder in folders for file in sorted(folder.rglob("*.py"))):
        code.update(file.read_bytes())
    facts: Facts = {
        "device": get_device_name(device),
        "memory": memory_of(device),
        "code": code.hexdigest(),
    }
    if device.type == "cuda":
        facts["driver"] = collect_env.get_nvidia_driver_version(collect_env.run)
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts


def settle(
    place: str,
    questions: Mapping[str, Facts],
    measure: Callable[[dict[str, Finding]], dict[str, Finding]],
    merge: Callable[[Sequence[dict[str, Finding]]], dict[str, Finding]],
    kept: Mapping[str, Finding],
) -> dict[str, Finding]:
    """Answers `questions`, name -> facts. Returns name -> finding, which has its question under the
    key `facts`.

    Takes findings from `kept`, those in the run folder, and from the cache folder `place`, as far
    as their facts are still the same, and only if all ranks ask the same questions. `measure` gets
    these, and returns all findings of its rank; `merge` makes one finding of those of all ranks.
    All ranks call this function together and get the same findings. A finding that has `passing`
    is not cached, because the next trial may succeed.
    """
    questions = json.loads(json.dumps(questions))
    files = {
        name: find_cache_folder(place) / f"{hash_content(facts, sort_keys=True)}.json"
        for name, facts in questions.items()
    }
    known = {}
    for name, facts in questions.items():
        for finding in (read_found(files[name]), kept.get(name)):
            if finding and finding.get("facts") == facts:
                known[name] = finding

    ranks = gather_objects((questions, known))
    known = ranks[0][1] if all(asked == questions for asked, _ in ranks) else {}
    findings = merge(gather_objects(measure(known)))
    for name in questions.keys() & findings.keys():
        if findings[name] != known.get(name):
            findings[name] = {**findings[name], "facts": questions[name]}
            if is_first_rank() and not findings[name].get("passing"):
                write_to_cache(files[name], findings[name])
    return findings


def make_ledger_row(choices: Iterable[Mapping[str, Any]]) -> LedgerRow:
    """Makes the ledger's row about the contests of a run. Each choice has `words`, the overrides
    that won, and `tried`, a row for each candidate: its `words`, and as `note` how fast it was, why
    it was refused, or why it was not tried."""
    notes = [f"{row['words']}: {row['note']}" for choice in choices for row in choice["tried"]]
    words = " ".join(choice["words"] for choice in choices)
    return LedgerRow("trials", AUTO, words, "; ".join(notes))
