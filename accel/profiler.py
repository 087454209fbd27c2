"""Reads what PyTorch's profiler records of a call: operations of the host in order, matrix
products, GPU kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

CPU = torch.device("cpu")
EIGHT_BIT = "aten::_scaled_mm"
WEIGHT_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::convolution",
    "aten::convolution_backward",
    EIGHT_BIT,
)
"""Products of a weight, or of its gradient: autocast decides about their dtype."""
ACTIVATION_PRODUCTS = ("aten::bmm", "aten::baddbmm")
"""Batched, so products of two activations as a rule; accel/techniques/precision.py finds those of a
weight. One in fp32 under autocast is meant to be: only a layer that switches autocast off gets
it."""
PRODUCTS = WEIGHT_PRODUCTS + ACTIVATION_PRODUCTS
UPDATE = "Optimizer.step#"
"""PyTorch begins the name of an optimizer's step with this; the class follows."""
REGION = "Torch-Compiled Region"
"""PyTorch begins the name of each call of a compiled function with this."""
FLEX = "fastlatent flex"
"""`accel.kernels.attend.flex` gives this name to its calls of FlexAttention, which compiles
itself."""


def profiled_events(run: Callable[[], object], device: torch.device) -> list[Any]:
    """The profiler's events of one call of `run`, those of the host and those of `device`, as
    recorded.

    torch.profiler would parse them into its own classes, which takes several times as long as a
    small step.
    """
    use_device = "cuda" if device.type == "cuda" else None
    # Without use_kineto this class asks no GPU for its kernels, and says nothing about it.
    profiler = torch.autograd.profiler.profile(
        use_device=use_device, use_kineto=True, record_shapes=True
    )
    with profiler:
        run()  # the profiler waits for the device at its end
    assert profiler.kineto_results is not None
    return list(profiler.kineto_results.events())


def kernels_of(events: Iterable[Any]) -> list[Any]:
    """Returns the events of the device: kernels, copies and fills.

    The profiler also repeats the host's annotations on the device, around their kernels; these are
    left out.
    """
    device = (event for event in events if event.device_type() != torch.autograd.DeviceType.CPU)
    return [event for event in device if not event.is_user_annotation()]


def on_host(events: Iterable[Any]) -> list[Any]:
    """Events of the host in the order in which they began, an outer one before those in it."""
    found = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    return sorted(
        found, key=lambda event: (event.start_thread_id(), event.start_ns(), -event.duration_ns())
    )


def products_of(events: list[Any]) -> Counter[tuple[str, str]]:
    """(Op name, dtype) -> number of products among the host's events.

    Of an op inside one of the same name (a dispatch mode or autocast enters it twice) the inner one
    counts; one inside another product is a part of that. But an 8-bit product is what the one
    around it has become, and counts in its place. Those of the optimizer, such as Muon's, are none
    of the step's precision. The dtype is that of the second tensor argument, which is never a bias.
    """
    updates = [event for event in events if event.name().startswith(UPDATE)]
    open_ones: list[list[Any]] = []  # [event, whether it counts], those around the present one
    found: list[list[Any]] = []
    for event in events:
        if event.name() not in PRODUCTS or len(event.dtypes()) < 2:
            continue
        if any(contains(update, event) for update in updates):
            continue
        while open_ones and not contains(open_ones[-1][0], event):
            open_ones.pop()
        name = event.name()
        within = {outer.name() for outer, _ in open_ones}
        entry = [event, not within - {name} or (name == EIGHT_BIT and EIGHT_BIT not in within)]
        if entry[1]:
            for outer in open_ones:
                outer[1] = False
        open_ones.append(entry)
        found.append(entry)
    return Counter(
        (event.name(), event.dtypes()[1].removeprefix("c10::")) for event, counts in found if counts
    )


def contains(outer: Any, event: Any) -> bool:
    """Returns whether `event` ran within `outer`, in the same thread."""
    if outer.start_thread_id() != event.start_thread_id() or event.start_ns() < outer.start_ns():
        return False
    return event.start_ns() + event.duration_ns() <= outer.start_ns() + outer.duration_ns()


def observe_ops(run: Callable[[], object], device: torch.device = CPU) -> Counter[str]:
    """Profiler event name -> how often it ran in one call of `run`."""
    events = profiled_events(run, device)
    return Counter(event.name() for event in (*on_host(events), *kernels_of(events)))


def observe_kernels(run: Callable[[], object], device: torch.device) -> set[str]:
    """Names of the device's kernels in one call of `run`; copies and fills left out."""
    names = {kernel.name() for kernel in kernels_of(profiled_events(run, device))}
    return {name for name in names if not name.startswith(("Memcpy", "Memset"))}
