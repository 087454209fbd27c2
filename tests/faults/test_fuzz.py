"""Random mutants of all that is read: each is used right, or refused in one sentence, in 1 GiB and
5 s."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.fuzz import Subject, tried
from tests.harness.fuzz_inputs import config, foreign, images, lines
from tests.harness.fuzz_runs import checkpoint, good_run, run_folder
from tests.harness.fuzz_sets import block, manifest, shard
from tests.harness.fuzz_weights import weights

FEW: dict[Subject, int] = {
    **{manifest: 8, block: 8, shard: 8, config: 8, lines: 12, images: 20, foreign: 12, weights: 12},
    **{checkpoint: 6, run_folder: 4},
}
"""Cases of each in `make test`."""
MANY = 300
BY_SUBJECT = pytest.mark.parametrize("subject", FEW, ids=lambda subject: subject.__name__)


def seeds(default: range) -> range:
    """FUZZ_SEEDS=first or first:end, if it is set."""
    first, _, end = os.environ.get("FUZZ_SEEDS", "").partition(":")
    return range(int(first), int(end or int(first) + 1)) if first else default


def fuzz(subject: Subject, chosen: range, folder: Path) -> None:
    """Tries a subject with each seed, and shows what went wrong."""
    if subject in (checkpoint, run_folder):
        good_run()
    found = []
    endings = Counter()
    for seed in chosen:
        case = folder / str(seed)
        case.mkdir()
        ending = tried(subject, seed, case)
        endings[ending.ending] += 1
        if not ending.good:
            found.append(
                f"{subject.__name__} seed {seed}: {ending.words}\n{ending.ending}: {ending.text}"
            )
        shutil.rmtree(case)
    print(f"{subject.__name__}: {dict(endings)}")
    if found:
        pytest.fail(
            "\n\n".join([f"{len(found)} of {len(chosen)} cases", *found[:20]]), pytrace=False
        )


@pytest.mark.fault(
    "a mutant of an input at random", "used right, or refused in one sentence, within 1 GiB and 5 s"
)
@BY_SUBJECT
def test_few_mutants(subject: Subject, tmp_path: Path):
    fuzz(subject, seeds(range(FEW[subject])), tmp_path)


@pytest.mark.slow
@BY_SUBJECT
def test_many_mutants(subject: Subject, tmp_path: Path):
    fuzz(subject, seeds(range(FEW[subject], MANY)), tmp_path)
