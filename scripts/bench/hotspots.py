"""Where the time of a training step goes, op by op, and how near each op comes to what the device
can do.

    python -m scripts.bench hotspots setting=b256
    python -m scripts.bench hotspots setting=s256 model=conv_s batch_size=64

One eager step with the fused kernels (runtime=fast) of a mamba, an ssd_mlp and a dit model of the
setting's size, or of the model that is named. Bytes: each input read once and each output written
once, a gather's source as far as it is taken. FLOPs: of products, attention and convolutions by
PyTorch's formulas, of the fused operators by their own; others are unknown. Both over the time, as
shares of the rates that this device reaches in a large copy and a large product.

On a GPU an op's time is that of the kernels that it launched, otherwise the host's. `busy` is the
sum over all ops of one profiled step; the step itself is timed without the profiler.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from accel.kernels.operator import OPERATORS
from accel.techniques.precision import name_of
from common.errors import UserError
from scripts.bench.report import table
from scripts.bench.rows import Benchmark, Row
from scripts.bench.settings import SETTINGS, BenchConfig
from scripts.bench.workload import Workload, time_steps
from scripts.timing import profiler_activities, rates, synchronise
from training.config.compose import compose

FAMILIES = ("mamba", "ssd_mlp", "dit")
TOP = 20
MARK = "fastlatent op"
"""What the profiler calls an op's range, before its index."""
FREE = ("_unsafe_view", "_reshape_alias", "lift_fresh", "empty", "new_empty", "resize_")
"""How ops begin that move nothing, beside views."""
GATHERS = ("index", "index_select", "gather", "embedding")
"""Ops that read as much of their first input as they return."""
OVERWRITES = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")
"""Ops that do not read what they write to."""
OF_CPU = "_scaled_dot_product_flash_attention_for_cpu"
"""Attention on a CPU, which takes the arguments of the one without `_for_cpu` and has no FLOP
formula of its own."""
measured_rates = cache(rates)
"""Once a process."""


class Call(NamedTuple):
    """One op that ran."""

    op: str
    shapes: str
    """Of the inputs, with their dtypes."""
    bytes: int | None
    """None: unknown."""
    flops: int | None
    dtype: str
    """The narrowest of the floating inputs."""


class Recorder(TorchDispatchMode):
    """Inside, `calls` lists the ops that run, and a profiler sees op i as a range called `MARK i`.

    An operator of ours that only calls others is not one op, but those.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if (
            func.namespace == "fastlatent"
            and (own := OPERATORS[func._schema.name.split("::")[1]]).kernel is None
        ):
            with self:
                return own.definition(*args)
        with torch.profiler.record_function(f"{MARK} {len(self.calls)}"):
            out = func(*args, **kwargs)
        given = tensors((args, kwargs))
        floating = [t.dtype for t in given if t.is_floating_point()]
        dtype = name_of(str(min(floating, key=lambda d: d.itemsize))) if floating else ""
        shapes = described(*args, *kwargs.values())
        moved = bytes_of(func, args, kwargs, out)
        self.calls.append(
            Call(func._schema.name, shapes, moved, flops_of(func, args, kwargs, out), dtype)
        )
        return out


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size(tensor: Tensor) -> int:
    """Bytes that reading the tensor takes: an expanded dimension is read once."""
    values = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        values *= length if stride or not length else 1
    return values * tensor.element_size()


def bytes_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int | None:
    """What an op reads and writes; None where only a part of what it writes to is touched."""
    name = func._schema.name.split("::")[1]
    if func.is_view or name.startswith(FREE):
        return 0
    if name.startswith(("index_put", "scatter", "index_add")):
        return None
    changed = [
        argument
        for argument in func._schema.arguments
        if argument.alias_info and argument.alias_info.is_write
    ]
    by_name = (
        dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        | kwargs
    )
    written = {id(t): t for argument in changed for t in tensors(by_name.get(argument.name))}
    read = {
        id(t): t for t in tensors((args, kwargs)) if not (name in OVERWRITES and id(t) in written)
    }
    written |= {id(t): t for t in tensors(out)}
    sizes = [size(t) for t in read.values()]
    if name in GATHERS:
        sizes[0] = min(sizes[0], sum(size(t) for t in written.values()))
    return sum(sizes) + sum(size(t) for t in written.values())


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int | None:
    """By the formula that PyTorch, or the operator's own module, has registered.

    Not for a convolution's backward pass: PyTorch's overlooks groups. Each gradient costs what the
    forward pass did.
    """
    packet = func._overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        grad, _, weight, *_, wanted = args
        return 2 * grad.numel() * weight[0].numel() * sum(wanted[:2])
    if func.namespace == "aten" and packet.__name__.startswith(OF_CPU):
        packet = getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""))
    formula = flop_registry.get(packet)
    return None if formula is None else formula(*args, **kwargs, out_val=out)


def described(*arguments: Any) -> str:
    """ "bf16 256×384, fp32 384"; of a list with more than four tensors their number."""

    def one(t: Tensor) -> str:
        return (
            f"{name_of(str(t.dtype)).removeprefix('torch.')} "
            f"{'×'.join(map(str, t.shape)) or 'scalar'}"
        )

    parts: list[str] = []
    for argument in arguments:
        found = tensors(argument)
        parts += [f"{len(found)} tensors"] if len(found) > 4 else map(one, found)
    return ", ".join(parts)


def spent(events: Iterable[Any], cuda: bool) -> tuple[dict[int, Counter[str]], Counter[str]]:
    """Microseconds of each marked op by kernel, or by host op without a GPU; and of kernels that no
    op launched.

    `events` are the profiler's function events. A kernel belongs to the innermost op that was open
    when it was launched, whether by a library or by Triton.
    """
    marked: dict[int, Counter[str]] = {}
    every: Counter[str] = Counter()
    for event in events:
        if event.device_type != DeviceType.CPU:
            if not event.is_user_annotation:
                every[event.name] += event.time_range.elapsed_us()
        elif event.name.startswith(MARK):
            own = marked[int(event.name.removeprefix(MARK))] = Counter()
            if cuda:
                for kernel in (kernel for inner in opened(event) for kernel in inner.kernels):
                    own[kernel.name] += kernel.duration
            else:
                for inner in event.cpu_children:
                    own[inner.name] += inner.cpu_time_total
    for own in marked.values():
        every.subtract(own)
    return marked, +every


def opened(event: Any) -> Iterator[Any]:
    """A host event and all those inside it."""
    yield event
    for inner in event.cpu_children:
        yield from opened(inner)


def ranked(
    calls: Sequence[Call],
    marked: dict[int, Counter[str]],
    alone: Counter[str],
    rate: dict[str, float],
) -> tuple[list[dict[str, Any]], float]:
    """Groups of equal calls, those that take most time first, and the milliseconds of all of them.

    Calls, bytes and FLOPs are those of the whole step. A kernel without an op has its own group.
    """
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        if marked.get(i, Counter()).total() > 0:
            groups[call.op, call.shapes].append(i)
    total = (sum(own.total() for own in marked.values()) + alone.total()) / 1e3
    found = []
    for (op, shapes), members in groups.items():
        kernels = sum((marked[i] for i in members), Counter[str]())
        ms = kernels.total() / 1e3
        known = {
            "op": op,
            "shapes": shapes,
            "calls": len(members),
            "kernel": kernels.most_common(1)[0][0],
        }
        sums = {
            what: sum_of([getattr(calls[i], what) for i in members]) for what in ("bytes", "flops")
        }
        found.append(
            known | {"ms": ms} | sums | shares(ms, **sums, dtype=calls[members[0]].dtype, rate=rate)
        )
    for kernel, us in alone.items():
        nothing = dict.fromkeys(
            ("op", "shapes", "calls", "bytes", "flops", "of_copy_rate", "of_product_rate")
        )
        found.append(nothing | {"kernel": kernel, "ms": us / 1e3})
    for group in found:
        group["share"] = group["ms"] / total
    return sorted(found, key=lambda group: -group["ms"]), total


def sum_of(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def shares(
    ms: float, bytes: int | None, flops: int | None, dtype: str, rate: dict[str, float]
) -> dict[str, Any]:
    """Of the measured rates; None where the work is unknown, or no product of this dtype was
    measured."""
    if dtype == "fp32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tf32"
    peak = rate.get(f"{dtype}_product_tflops")
    return {
        "of_copy_rate": None if bytes is None else bytes / ms / 1e6 / rate["copy_gb_s"],
        "of_product_rate": None if flops is None or peak is None else flops / ms / 1e9 / peak,
    }


def measure(overrides: list[str], steps: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Times steps, profiles one, and returns figures with the ops that took most of it."""
    rate = measured_rates(device)
    workload = Workload(overrides)
    recorder = Recorder()
    step_ms = time_steps({"step": workload}, steps, repeats)["step"]
    workload.prepare()
    with (
        torch.profiler.profile(activities=profiler_activities(), acc_events=True) as profiler,
        recorder,
    ):
        workload.run(1)
        synchronise(device)
    groups, busy = ranked(
        recorder.calls, *spent(profiler.events() or [], device.type == "cuda"), rate
    )
    top = groups[:TOP]
    rest = busy - sum(group["ms"] for group in top)
    own = {
        "batch_size": workload.batch_size,
        "busy_ms": busy,
        "top": top,
        "rest_ms": rest,
        "rates": rate,
    }
    return workload.figures(step_ms) | own


def plan(cfg: BenchConfig, overrides: list[str], device: torch.device) -> Iterator[Row]:
    """A row for each model. ValueError for a step that is compiled or captured: it has no ops."""
    if not any(word.startswith("runtime=") for word in overrides):
        overrides = ["runtime=fast", *overrides]
    composed = compose(overrides)
    for key in ("compile", "cuda_graph"):
        if getattr(composed.cfg.runtime, key):
            raise UserError(
                f"runtime.{key}=true: hotspots looks at an eager step, op by op; use "
                f"runtime.{key}=false."
            )
    assert cfg.setting is not None
    own = next(word for word in SETTINGS[cfg.setting] if word.startswith("model="))
    names = [f"{family}_{own.rpartition('_')[2]}" for family in FAMILIES]
    if own not in overrides:  # another one was named
        names = [composed.choices["model"]]
    for name in names:
        words = [f"model={name}" if word == own else word for word in overrides]
        yield Row(name, partial(measure, words, cfg.steps, cfg.repeats, device), 60.0)


def texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    """A table a model."""
    return [
        text_of(entry)
        if "top" in entry
        else f"{entry['name']}: {entry.get('reason') or entry.get('error')}"
        for entry in entries
    ]


def text_of(entry: dict[str, Any]) -> str:
    heads = (
        "",
        "inputs",
        "calls",
        "ms",
        "share",
        "MB",
        "GFLOP",
        "of copy rate",
        "of product rate",
        "kernel",
    )
    rows: list[Sequence[object]] = [heads]
    for group in entry["top"]:
        op = group["op"] or "(no op)"
        kernel = group["kernel"]
        cells: list[object] = [
            op,
            shortened(group["shapes"] or "unknown", 60),
            group["calls"] or "unknown",
        ]
        cells += [f"{group['ms']:.3f}", f"{group['share']:.0%}"]
        cells += [
            "unknown" if group[key] is None else f"{group[key] / 10**n:.3g}"
            for key, n in (("bytes", 6), ("flops", 9))
        ]
        cells += [
            "unknown" if group[key] is None else f"{group[key]:.0%}"
            for key in ("of_copy_rate", "of_product_rate")
        ]
        rows.append((*cells, "" if kernel == op else shortened(kernel, 40)))
    measured = ", ".join(
        f"{name.replace('_', ' ')} {value:.1f}" for name, value in entry["rates"].items()
    )
    head = (
        f"{entry['name']}: a step of {entry['batch_size']} samples takes {entry['step_ms']:.2f} ms"
    )
    busy = (
        f"ops are busy for {entry['busy_ms']:.2f} ms, those not listed for {entry['rest_ms']:.2f}"
    )
    return f"{head}; {busy}; measured rates: {measured}\n{table(rows)}"


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


BENCHMARKS = {"hotspots": Benchmark(BenchConfig, plan, texts, __doc__ or "")}
