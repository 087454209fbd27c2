"""Mutates good inputs at random, and tries each mutant in a process with limits; test_fuzz.py has
the inputs.

Every mutator returns in words what it did. A case is a pure function of its subject and seed, so it
is repeated with

    FUZZ_SEEDS=17 pytest tests/faults/test_fuzz.py -k manifest
    FUZZ_SEEDS=1000:2000 pytest tests/faults/test_fuzz.py -k manifest
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import resource
import signal
import struct
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from training.config.compose import report_user_errors

GIB = 2**30
CPU_SECONDS = 5
WALL_SECONDS = 600
"""The first is what a case may take; the second ends one that hangs, and allows for a busy
machine."""
DEEP = "DEEP"
ODD = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        2**31,
        2**53 + 1,
        2**63 - 1,
        2**63,
        2**64,
        2**70,
        -(2**63),
        10**400,
    ),
    *(
        0.5,
        -0.5,
        1e-320,
        1e-40,
        1e38,
        3.5e38,
        1e308,
        -1e308,
        float("nan"),
        float("inf"),
        float("-inf"),
    ),
    *(
        "",
        "0",
        "a",
        "-1",
        "\n",
        "\0",
        "\x1b[31m",
        "ñ漢🙂",
        "../x",
        "x" * 10_000,
        "\ud800",
        "float16",
        "train",
        "sample",
    ),
    *([], {}, [[]], [None], [1] * 1000, {"": {}}, {"a": [1, {"b": None}]}, DEEP),
]
"""Values of every type, and those at the edge of what a type holds."""
Say = Callable[[str], None]
Subject = Callable[[Random, Path, Say], None]


class Ending(NamedTuple):
    """What a case did, and how it ended: "success", a sentence, or a fault of ours."""

    words: str
    ending: str
    text: str = ""

    @property
    def good(self) -> bool:
        return self.ending in ("success", "sentence")


def tried(subject: Subject, seed: int, folder: Path) -> Ending:
    """Runs a case in a forked process that may take 1 GiB of memory and 5 s of processor time."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # of forking beside threads; they hold nothing of ours
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w", errors="backslashreplace") as pipe:
            run_limited(
                subject, seed, folder, lambda *told: print(json.dumps(told), file=pipe, flush=True)
            )
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = [json.loads(line) for line in pipe]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    words = "; ".join(line[0] for line in told if len(line) == 1)
    found = [Ending(words, *line) for line in told if len(line) == 2]
    return (
        found[0]
        if found
        else Ending(words, "killed", signal.Signals(-status).name if status < 0 else str(status))
    )


def run_limited(subject: Subject, seed: int, folder: Path, tell: Callable[..., None]) -> None:
    """The forked process; never returns."""
    try:
        torch.set_num_threads(1)
        memory = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmData")
        )
        resource.setrlimit(
            resource.RLIMIT_DATA, (int(memory.split()[1]) * 1024 + GIB, resource.RLIM_INFINITY)
        )
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, resource.RLIM_INFINITY))
        signal.alarm(WALL_SECONDS)
        warnings.simplefilter("ignore")
        tell(*ended(subject, seed, folder, tell))
    finally:
        os._exit(0)


def ended(subject: Subject, seed: int, folder: Path, say: Say) -> tuple[str, str]:
    """Runs a case, and judges what the user would see of it."""
    errors = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(errors),
            report_user_errors(),
        ):
            subject(Random(seed), folder, say)
    except SystemExit:
        message = errors.getvalue().removesuffix("\n")
        return "no sentence" if is_unfit(message) else "sentence", message[:3000]
    except BaseException:
        return "traceback", traceback.format_exc()[-3000:]
    return "success", ""


def is_unfit(message: str) -> bool:
    """Whether a message has line breaks, control characters, an address in memory, or no end."""
    unfit = r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|\b0x[0-9a-f]{6}"
    return len(message) > 1500 or re.search(unfit, message) is not None


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every value in a JSON tree."""
    yield above
    for key in (
        tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    ):
        yield from places(tree[key], (*above, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def mutate_tree(rng: Random, tree: Any) -> str:
    """Changes one entry of a JSON tree in place, at any depth: each depth is as likely."""
    found = [path for path in places(tree) if path]
    depth = rng.randint(1, max(map(len, found), default=0)) if found else 0
    path = rng.choice([path for path in found if len(path) == depth]) if found else ()
    if not path:
        return "nothing left to change"
    parent = at(tree, path[:-1])
    key = path[-1]
    other = rng.choice(found)
    name = ".".join(map(str, path))
    value = copy.deepcopy(parent[key])
    kind = rng.choice(
        ("odd", "odd", "odd", "near", "delete", "copy", "twice", "swap", "nest", "reorder")
    )
    if kind == "odd":
        parent[key] = copy.deepcopy(rng.choice(ODD))
    elif kind == "near" and isinstance(value, int | float):
        parent[key] = rng.choice(
            (value + 1, value - 1, -value, value * 1000, value / 2, value * 1e40, value * 1e-40)
        )
    elif kind == "delete":
        del parent[key]
        return f"{name} deleted"
    elif kind == "copy":
        parent[key] = copy.deepcopy(at(tree, other))
    elif kind == "twice" and isinstance(parent, list):
        parent.insert(key, value)
        return f"{name} twice"
    elif kind == "swap" and len(parent) > 1:
        second = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[second] = parent[second], parent[key]
        return f"{name} and {second} swapped"
    elif kind == "reorder" and isinstance(parent, list):
        rng.shuffle(parent)
        return f"the siblings of {name} reordered"
    else:
        parent[key] = rng.choice(([value], {"a": value}, str(value)))
    return f"{name} = {str(parent[key])[:60]!r}"


def as_json(tree: Any) -> bytes:
    """A tree as JSON, with NaN and Infinity, and a value nested deeper than Python's own writer
    goes for `DEEP`."""
    return json.dumps(tree).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).encode()


def mutate_bytes(rng: Random, content: bytes) -> tuple[bytes, str]:
    """Flips, overwrites, inserts, deletes, repeats or cuts bytes; mostly near the start, where
    headers are."""
    near = min(len(content), rng.choice((16, 600, 10**9)))
    start = rng.randrange(near + 1)
    size = rng.choice((1, 1, 2, 4, 8, 100, 512))
    new = rng.choice(
        (
            rng.randbytes(size),
            bytes(size),
            b"\xff" * size,
            struct.pack("<q", rng.choice((-1, 2**31, 2**62))),
        )
    )
    kind = rng.choice(
        ("bit", "overwrite", "overwrite", "insert", "delete", "repeat", "cut", "append")
    )
    match kind:
        case "bit":
            changed = bytearray(content or b"\0")
            changed[start % len(changed)] ^= 1 << rng.randrange(8)
            return bytes(changed), f"a bit of byte {start} flipped"
        case "overwrite":
            return content[:start] + new + content[
                start + len(new) :
            ], f"bytes from {start} on = {new[:8].hex()}…"
        case "insert":
            return content[:start] + new + content[start:], f"{len(new)} bytes inserted at {start}"
        case "delete":
            return content[:start] + content[start + size :], f"{size} bytes deleted at {start}"
        case "repeat":
            return content[:start] + content[
                max(0, start - size) :
            ], f"{size} bytes before {start} repeated"
        case "cut":
            return content[:start], f"cut at {start} of {len(content)}"
        case _:
            return content + new, f"{len(new)} bytes appended"


def mutate_file(rng: Random, file: Path) -> str:
    content, words = mutate_bytes(rng, file.read_bytes())
    file.write_bytes(content)
    return f"{file.name}: {words}"
