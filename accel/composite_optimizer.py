"""An optimizer made of several others, its members: a library's optimizer behind PyTorch's
interface, or one optimizer for each part of the parameters.

Its state dict holds plain tensors, so that a checkpoint contains no class of a library and can be
read without that library.
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
"""Names of the lookup tables that libraries of 8-bit and 4-bit optimizers keep beside each
quantised moment, to convert its codes to numbers. The tables are constants, so checkpoints leave
them out."""
DEVICE_DECISIONS = ("grad_scale", "found_inf")
"""Names of two attributes of a fused optimizer, both scalars on the device: it divides gradients by
`grad_scale`, and skips the step if `found_inf` is not 0."""
PART_ELEMENTS = 2**24
"""Smallest number of elements (2²⁴, 64 MiB in fp32) of a part: whole parameters that the optimizer
updates together. A part ends with the parameter that reaches this number, so most parts are larger;
only the last part may be smaller."""


def split_parts(groups: Groups) -> list[Groups]:
    """Divides the parameters of all groups, in order, into parts of at least `PART_ELEMENTS`
    elements each; only the last part may be smaller. Returns the parts; each is a list of parameter
    groups with the options of the original groups."""
    parts: list[Groups] = []
    size = PART_ELEMENTS
    for group in groups:
        params: list[Tensor] | None = None
        for parameter in group["params"]:
            if size >= PART_ELEMENTS:
                parts.append([])
                size = 0
                params = None
            if params is None:
                params = []
                parts[-1].append(group | {"params": params})
            params.append(parameter)
            size += parameter.numel()
    return parts


def count_largest_part(groups: Groups) -> int:
    """Counts the elements of the largest part into which `split_parts` divides the parameters."""
    return max(sum(p.numel() for p in list_parameters(part)) for part in split_parts(groups))


def list_parameters(groups: Groups) -> list[Tensor]:
    """Returns the parameters of all groups, in order."""
    return [parameter for group in groups for parameter in group["params"]]


class Members(torch.optim.Optimizer):
    """An optimizer that consists of other optimizers, `members`; each member updates its own
    parameters.

    `state_dict` numbers the parameters in the order of `groups`, regardless of the members that
    update them. `stand_ins` maps a parameter to another tensor that the member updates instead of
    the parameter, such as an fp32 copy. Raises UserError for sharded parameters, because the
    members' state is not sharded.
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
                "use optim=adamw or muon with runtime.parallel.mode=fsdp or hsdp, or "
                "runtime.parallel.mode=ddp."
            )
        fused = all(member.defaults.get("fused") for member in self.members)
        members_groups = [group for member in self.members for group in member.param_groups]
        super().__init__(members_groups, self.members[0].defaults | {"fused": fused})
        self.owner = {p: m for m in self.members for p in list_parameters(m.param_groups)}

    def surround_update(self, _member: torch.optim.Optimizer) -> AbstractContextManager[object]:
        """Returns a context in which `step` updates one member; subclasses override this, for
        example to move the member's state to the device."""
        return nullcontext()

    def wait(self) -> None:
        """Waits until the host can read the optimizer's state. Here this does nothing; a subclass
        overrides this method if it copies state to the host asynchronously."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters. Sets the attributes `grad_scale` and `found_inf` of this
        optimizer on each member too, because a fused member divides its gradients by the first and
        skips its update if the second is not 0, both on the device."""
        assert closure is None
        for member in self.members:
            for name in DEVICE_DECISIONS:
                if hasattr(self, name):
                    setattr(member, name, getattr(self, name))
            with self.surround_update(member):
                member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients of all model parameters to None. The substitute tensors in `stand_ins`
        need no clearing, because they have gradients only inside `step`."""
        assert set_to_none
        for parameter in self.numbered_parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Returns a dict with the key `state`, which holds a mapping: index of a parameter, counted
        over all groups -> the parameter's optimizer state (`collect_state`); parameters without
        state are left out. Learning rate, betas and so on are left out, because the configuration
        holds them."""
        states = {i: collect_state(self, p) for i, p in enumerate(self.numbered_parameters)}
        filled = {i: entries for i, entries in states.items() if entries}
        return {"state": filled, "param_groups": []}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies a `state_dict` into the tensors of the optimizer's state; if `state_dict` has an
        empty `state`, sets all of the optimizer's state to zero.

        Raises UserError if another kind of optimizer saved the state.
        """
        saved = state_dict["state"]
        owner, key = locate_state(self, self.numbered_parameters[0])
        if saved and not owner.state.get(key):
            self.make_state()

        for i, parameter in enumerate(self.numbered_parameters):
            entries = saved.get(i, {})
            owner, key = locate_state(self, parameter)
            for name, current in collect_state(self, parameter).items():
                if entries and name not in entries:
                    raise UserError(
                        f"the optimizer's state has no {name} for parameter {i}; another optimizer "
                        "saved it."
                    )
                value = entries.get(name, 0)
                if not isinstance(current, Tensor):
                    owner.state[key][name] = type(current)(value)
                elif isinstance(value, Tensor):
                    current.copy_(value)
                else:
                    current.fill_(value)

    def make_state(self) -> None:
        """Makes every member create its state, by a step with learning rate 0 on zero gradients,
        which changes no parameter."""
        rates = [group["lr"] for group in self.param_groups]
        grads = [parameter.grad for parameter in self.numbered_parameters]
        attributes = vars(self)
        decisions = {name: attributes.pop(name) for name in DEVICE_DECISIONS if name in attributes}
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        for parameter in self.numbered_parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.step()

        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, grad in zip(self.numbered_parameters, grads, strict=True):
            parameter.grad = grad
        attributes.update(decisions)


def locate_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor
) -> tuple[torch.optim.Optimizer, Tensor]:
    """Finds the innermost optimizer that updates a parameter.

    Returns that optimizer, and the tensor under which its `state` holds the parameter's state.
    """
    while isinstance(optimizer, Members):
        optimizer.wait()
        parameter = optimizer.stand_ins.get(parameter, parameter)
        optimizer = optimizer.owner[parameter]
    return optimizer, parameter


def collect_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Returns the optimizer's state of one parameter as a mapping: name -> number or plain tensor.
    These are the optimizer's own tensors, not copies: `load_state_dict` writes into them. In place
    of a tensor of a library's class, such as an 8-bit moment, the mapping has the inner tensors of
    that tensor, each under a name of its own."""
    owner, key = locate_state(optimizer, parameter)
    return dict(flatten_state(owner.state.get(key, {})))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns all parameters that an optimizer updates."""
    if isinstance(optimizer, Members):
        return optimizer.numbered_parameters
    return list_parameters(optimizer.param_groups)


def flatten_state(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for each entry of a parameter's state. Splits a tensor of a library's
    class into its inner tensors, and leaves out the constant tables in `LIBRARY_TABLES`."""
    for name, value in entries.items():
        library = hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor)
        parts = value.__tensor_flatten__()[0] if library else ()
        for part in parts:
            if part not in LIBRARY_TABLES:
                yield f"{name}_{part}", getattr(value, part)
        if not library and name not in LIBRARY_TABLES:
            yield name, value


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer is fused: it then divides its gradients by `grad_scale`, and
    skips a step if `found_inf` is not 0, on the device, without waiting for the host."""
    return bool(optimizer.defaults.get("fused"))


def count_bytes(value: Tensor) -> int:
    """Counts the bytes of a tensor; for a tensor of a library's class, the bytes of its inner
    tensors."""
    return sum(t.nbytes for _, t in flatten_state({"": value}))


def iterate_innermost(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yields the optimizers that update parameters themselves. If `optimizer` is a `Members`, these
    are the optimizers inside it, at any depth; otherwise only `optimizer`."""
    if isinstance(optimizer, Members):
        for member in optimizer.members:
            yield from iterate_innermost(member)
    else:
        yield optimizer
