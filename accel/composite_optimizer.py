"""One optimizer made of several: a library's behind PyTorch's interface, two kinds side by side, or
one for each part.

Its state is told and loaded as plain tensors, so that a checkpoint holds nothing of a library's own
classes and needs no library to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.errors import UserError

Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]
LIBRARY_TABLES = frozenset({"qmap", "qmap1", "qmap2"})
"""Constants that libraries keep beside each 8-bit state: the same in every run, so not part of
one."""
COMPENSATION = "compensation"
"""What Kahan's rounding keeps beside the optimizer's own tensors (accel/techniques/weights.py)."""
DEVICE_DECISIONS = ("grad_scale", "found_inf")
"""Attributes by which a fused optimizer scales and skips on the device."""
PART_ELEMENTS = 2**24
"""Elements after which a part ends: 64 MiB of fp32, and the last parameter."""


def split_parts(groups: Groups) -> list[Groups]:
    """Parameter groups cut into parts of about `PART` elements, each again a list of groups; their
    order is kept."""
    parts: list[Groups] = []
    size = PART_ELEMENTS
    for group in groups:
        own: list[Tensor] | None = None
        for parameter in group["params"]:
            if size >= PART_ELEMENTS:
                parts.append([])
                size = 0
                own = None
            if own is None:
                own = []
                parts[-1].append(group | {"params": own})
            own.append(parameter)
            size += parameter.numel()
    return parts


def count_largest_part(groups: Groups) -> int:
    """Elements of the largest part."""
    return max(sum(p.numel() for p in list_parameters(part)) for part in split_parts(groups))


def list_parameters(groups: Groups) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def select_groups(groups: Groups, wanted: Callable[[Tensor], bool]) -> Groups:
    """The groups with the parameters that are `wanted`; those without any are left out."""
    found = [group | {"params": [p for p in group["params"] if wanted(p)]} for group in groups]
    return [group for group in found if group["params"]]


class Members(torch.optim.Optimizer):
    """An optimizer that hands each of `members` its own parameters.

    `groups` numbers the parameters in `state_dict`, however they are dealt to the members, who may
    know some of them by `stand_ins`. ValueError for sharded parameters: what the members keep is
    not cut as parameters are.
    """

    def __init__(
        self,
        groups: Groups,
        members: Iterable[torch.optim.Optimizer],
        stand_ins: Mapping[Tensor, Tensor] = MappingProxyType({}),
    ) -> None:
        self.members = list(members)
        self.stand_ins = stand_ins
        self.numbered_parameters = list_parameters(groups)
        if any(isinstance(p, DTensor) for p in self.numbered_parameters):
            raise UserError(
                f"{type(self).__name__} keeps a state that cannot be cut over several processes; "
                "use optim=adamw with runtime.parallel.mode=fsdp or hsdp, or "
                "runtime.parallel.mode=ddp."
            )
        fused = all(member.defaults.get("fused") for member in self.members)
        members_groups = [group for member in self.members for group in member.param_groups]
        super().__init__(members_groups, self.members[0].defaults | {"fused": fused})
        self.owner = {p: m for m in self.members for p in list_parameters(m.param_groups)}

    def surround_update(self, _member: torch.optim.Optimizer) -> AbstractContextManager[object]:
        """What surrounds the update of one member's parameters."""
        return nullcontext()

    def wait(self) -> None:
        """Waits until the state of the parameters can be read on the host."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters. A fused member decides on the device, by `grad_scale` and
        `found_inf`."""
        assert closure is None
        for member in self.members:
            for name in DEVICE_DECISIONS:
                if hasattr(self, name):
                    setattr(member, name, getattr(self, name))
            with self.surround_update(member):
                member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the parameters themselves; a stand-in has a gradient during the update only."""
        assert set_to_none
        for parameter in self.numbered_parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """`state`: number of a parameter -> `kept_by`. Hyper-parameters are left out: the
        configuration has them."""
        kept = {i: collect_state(self, p) for i, p in enumerate(self.numbered_parameters)}
        return {"state": {i: entries for i, entries in kept.items() if entries}, "param_groups": []}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` gave, in place; with an empty state the optimizer is as if it had
        never stepped.

        ValueError if it was made by other members. A tensor of our own that an earlier run had no
        use for is zero.
        """
        saved = state_dict["state"]
        owner, key, _ = locate_state(self, self.numbered_parameters[0])
        if saved and not owner.state.get(key):
            self.make_state()
        for i, parameter in enumerate(self.numbered_parameters):
            entries = saved.get(i, {})
            owner, key, ours = locate_state(self, parameter)
            holds_a_state = bool(entries.keys() - ours)
            for name, current in collect_state(self, parameter).items():
                if holds_a_state and name not in entries and name not in ours:
                    raise UserError(
                        f"the optimizer's state has no {name} for parameter {i}; it is another's."
                    )
                value = entries.get(name, 0)
                if not isinstance(current, Tensor):
                    owner.state[key][name] = type(current)(value)
                elif isinstance(value, Tensor):
                    current.copy_(value)
                else:
                    current.fill_(value)

    def make_state(self) -> None:
        """Has every member make its state, by a step of rate 0 on gradients of 0: parameters stay
        as they are."""
        rates = [group["lr"] for group in self.param_groups]
        grads = [parameter.grad for parameter in self.numbered_parameters]
        own = vars(self)
        scale = {name: own.pop(name) for name in DEVICE_DECISIONS if name in own}
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        for parameter in self.numbered_parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.step()

        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, grad in zip(self.numbered_parameters, grads, strict=True):
            parameter.grad = grad
        own.update(scale)


def locate_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor
) -> tuple[torch.optim.Optimizer, Tensor, dict[str, Any]]:
    """The innermost optimizer that updates a parameter, the tensor by which it knows it, and what
    those around it keep for the parameter."""
    ours: dict[str, Any] = {}
    while isinstance(optimizer, Members):
        optimizer.wait()
        ours |= optimizer.state.get(parameter, {})
        parameter = optimizer.stand_ins.get(parameter, parameter)
        optimizer = optimizer.owner[parameter]
    return optimizer, parameter, ours


def collect_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Returns the state of one parameter by name: plain tensors, which are written in place, and
    numbers. A tensor of a library's class comes as its parts, under a name for each."""
    owner, key, ours = locate_state(optimizer, parameter)
    return dict(flatten_state(owner.state.get(key, {}))) | ours


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters that an optimizer updates."""
    if isinstance(optimizer, Members):
        return optimizer.numbered_parameters
    return list_parameters(optimizer.param_groups)


def flatten_state(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries, with a library's tensors in their parts and without its tables."""
    for name, value in entries.items():
        library = hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor)
        parts = value.__tensor_flatten__()[0] if library else ()
        for part in parts:
            if part not in LIBRARY_TABLES:
                yield f"{name}_{part}", getattr(value, part)
        if not library and name not in LIBRARY_TABLES:
            yield name, value


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer scales its gradients and skips a step on the device."""
    return bool(optimizer.defaults.get("fused"))


def count_bytes(value: Tensor) -> int:
    """Bytes of a tensor; of a library's tensor class those of its parts."""
    return sum(t.nbytes for _, t in flatten_state({"": value}))


def iterate_innermost(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """The optimizers that update parameters themselves."""
    if isinstance(optimizer, Members):
        for member in optimizer.members:
            yield from iterate_innermost(member)
    else:
        yield optimizer
