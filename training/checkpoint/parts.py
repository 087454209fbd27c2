"""What each process writes of a training state, and how it is put together again.

Weights and averages are written whole, by the first process: anything can read them. All else goes into one file a
process: its rows of sharded moments, its generators, and in the first one's file what all processes share. Read
together, the rows give whole tensors, which fit any number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel.parallel import local, rows_of, whole
from accel.technique import first_line
from training.process.ranks import SINGLE, Ranks

WHOLE = ("model", "ema")
PART = "rank-{rank}-of-{world_size}.safetensors"
PARTS = ("optimizer", "techniques", "guards")
"""Trees of tensors and numbers, two or three levels deep."""


class Staged(NamedTuple):
    """One process's share of a state, in host memory, safe from the steps that follow."""

    whole: dict[str, dict[str, Tensor]]
    """Of each of `WHOLE`; empty but in the first process."""
    own: dict[str, Tensor]
    rows: dict[str, int]
    """Of the tensors in `own` that are parts: the first row."""
    values: dict[str, Any]
    """Everything that is no tensor; fit for JSON."""

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for tensors in (*self.whole.values(), self.own) for t in tensors.values())


class HostCopies:
    """Host memory that tensors are copied to, kept from one save to the next; page-locked beside a GPU.

    The copies are queued on the current stream, after the step that made the values and before the next one, so
    nothing waits for them but who calls `ready`.
    """

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}
        self.copied: torch.cuda.Event | None = None
        self.device = 0

    def take(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.memory or self.memory[name].shape != tensor.shape:
            try:
                self.memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            except RuntimeError as error:
                raise ValueError(
                    f"there is no host memory for a copy of the state, {tensor.nbytes / 2**20:.0f} MiB for {name} "
                    f"({first_line(error)}); use async_checkpoints=false."
                ) from error
        return self.memory[name].copy_(tensor, non_blocking=True)

    def mark(self) -> None:
        """To be called after the last `take`."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.device = torch.cuda.current_device()
            self.copied = torch.cuda.Event()
            self.copied.record()

    def ready(self) -> None:
        """Returns once all copies are complete; in any thread, which begins on the first device whatever ours is."""
        if self.copied is not None:
            torch.cuda.set_device(self.device)
            self.copied.synchronize()


def stage(state: Mapping[str, Any], first: bool, copies: HostCopies | None) -> Staged:
    """This process's share of `TrainState.state_dict()`; all processes call it together.

    Without `copies` tensors of the host are taken as they are: write them before the next step.
    """

    def host(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.cpu() if copies is None else copies.take(name, tensor)

    whole_ones: dict[str, dict[str, Tensor]] = {kind: {} for kind in WHOLE} if first else {}
    for kind in WHOLE:
        for name, tensor in state[kind].items():  # gathered one by one, so that no device holds more than one
            gathered = whole(tensor)
            if first:
                whole_ones[kind][name] = host(f"{kind}.{name}", gathered)
    own: dict[str, Tensor] = {}
    rows: dict[str, int] = {}
    leaves: dict[str, Any] = {}
    for name, leaf in (pair for kind in PARTS for pair in flat(state[kind], kind)):
        if isinstance(leaf, DTensor):
            if (start := rows_of(leaf)) is not None:
                own[name], rows[name] = host(name, local(leaf)), start
        elif isinstance(leaf, Tensor):
            if first:
                own[name] = host(name, leaf)
        else:
            leaves[name] = leaf
    each = {"rng.torch": state["rng"]["torch"]} | {f"rng.cuda.{i}": t for i, t in enumerate(state["rng"]["cuda"])}
    each |= {f"window.{name}": sum_ for name, sum_ in state["window"].items() if isinstance(sum_, Tensor)}
    own |= {name: host(name, tensor) for name, tensor in each.items()}
    if copies is not None:
        copies.mark()
    values = {key: state[key] for key in ("loader", "counters")} | {"leaves": leaves}
    values |= {"window": {name: value for name, value in state["window"].items() if not isinstance(value, Tensor)}}
    return Staged(whole_ones, own, rows, values)


def assembled(folder: Path, values: Mapping[str, Any], ranks: Ranks = SINGLE) -> dict[str, Any]:
    """What `TrainState.load_state_dict` takes, from the files of all processes; each tensor is whole.

    Generators and the sums of the log window are each process's own. At another number of processes each takes
    somebody's generators and the mean of the sums.
    """
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    sums: dict[str, list[Tensor]] = {}
    state: dict[str, Any] = {kind: {} for kind in PARTS} | {"rng": {}}
    files = [PART.format(rank=i, world_size=values["world_size"]) for i in range(values["world_size"])]
    mine = files[ranks.rank % len(files)]
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            rows = json.loads(opened.metadata()["rows"])
            for name in opened.keys():  # noqa: SIM118  # no mapping
                if name.startswith("rng."):
                    if file == mine:
                        state["rng"][name] = opened.get_tensor(name)
                elif name.startswith("window."):
                    sums.setdefault(name.removeprefix("window."), []).append(opened.get_tensor(name))
                else:
                    parts.setdefault(name, []).append((rows.get(name, 0), opened.get_tensor(name)))
    leaves = dict(values["leaves"])
    for name, found in parts.items():
        tensors = [tensor for _, tensor in sorted(found, key=lambda part: part[0])]
        leaves[name] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    for name, leaf in leaves.items():
        kind, key, *rest = name.split(".")
        node = state[kind].setdefault(int(key) if kind == "optimizer" else key, {}) if rest else state[kind]
        node[rest[0] if rest else key] = leaf
    rng = state["rng"]
    cuda = [rng[f"rng.cuda.{i}"] for i in range(len(rng) - 1)]
    whole_ones = {kind: load_file(folder / f"{kind}.safetensors") for kind in WHOLE}
    same = len(files) == ranks.world_size
    window = {name: found[ranks.rank] if same else torch.stack(found).mean(0) for name, found in sums.items()}
    rest = {key: values[key] for key in ("loader", "counters")} | {"window": window | values["window"]}
    return state | whole_ones | rest | {"rng": {"torch": rng["rng.torch"], "cuda": cuda}}


def flat(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with dotted names."""
    for key, value in node.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from flat(value, name)
        else:
            yield name, value
