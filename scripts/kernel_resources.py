"""What each Triton kernel needs of a GPU, found without one: compiles ahead of time and reads the compiler's report.

    python -m scripts.kernel_resources                    all kernels and shipped configurations for all architectures
    python -m scripts.kernel_resources arch=90 like=ssd   some of them

Registers a thread, bytes of shared memory, stack and spills, 128-bit loads, asynchronous copies, matrix instructions,
and whether any fp64 arithmetic slipped in.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.report import table
from training.config import from_words, one_sentence

ARCHITECTURES = (80, 86, 89, 90, 100)


class Case(NamedTuple):
    """One kernel in one shipped configuration."""

    name: str
    kernel: Any
    types: dict[str, str]
    """Argument -> Triton's type, such as *bf16 or i32."""
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    pipelined: bool = False
    """Its loop loads ahead, asynchronously."""
    multiplies: bool = False
    """It uses the matrix units."""
    quick: bool = False
    """A common size: checked in every run of the tests."""


class Resources(NamedTuple):
    """What the compiler reports of one case on one architecture."""

    registers: int
    stack: int
    shared: int
    spills: int
    """Instructions that store to local memory."""
    loads_128: int
    async_copies: int
    products: int
    """Matrix instructions."""
    fp64: int


def measure(case: Case, architecture: int) -> Resources:
    """Compiles `case` for sm_<architecture>; needs no GPU. Not while Triton interprets."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    types = {name: kind for name, kind in case.types.items() if name in names}
    signature = {name: "constexpr" if name in case.constants else types[name] for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    # Pointers and sizes are multiples of 16 in every shipped shape, and Triton specialises on that.
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in types}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=divisible)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    usage, code = disassembled(compiled.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    assert found is not None

    def count(pattern: str, text: str = code) -> int:
        return len(re.findall(pattern, text))

    return Resources(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=compiled.metadata.shared,
        spills=count(r"\bSTL"),
        loads_128=count(r"LDG\.E\S*\.128") + count(r"LDGSTS\S*\.128"),
        async_copies=count(r"LDGSTS"),
        products=count(r"HGMMA|HMMA|UTC\S*MMA"),
        fp64=count(r"\.f64", compiled.asm["ptx"]),
    )


def disassembled(cubin: bytes) -> tuple[str, str]:
    """The resource report and the machine code of a compiled kernel."""
    import triton

    tool = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        texts = [
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        ]
    return texts[0], texts[1]


def cases() -> Iterator[Case]:
    """Every kernel in every configuration that is shipped."""
    yield from add_norm_cases()


def add_norm_cases() -> Iterator[Case]:
    """RMSNorm as the models use it; LayerNorm with weight, bias and row maps, so that every branch is seen."""
    from accel.kernels.add_norm_triton import add_norm_backward_kernel, add_norm_kernel, tile

    optional = {"WEIGHT": "*fp32", "MEAN": "*fp32", "BRANCH_ROWS": "*i32", "H_ROWS": "*i32"}
    strides = {"L": "i32", "gate_stride": "i32", "scale_stride": "i32"}
    narrow = {name: "*bf16" for name in ("BRANCH", "GATE", "SCALE", "SHIFT", "H", "DH", "DBRANCH")}
    wide = {name: "*fp32" for name in ("RESIDUAL", "Z", "RSTD", "DZ", "DRESIDUAL", "SUMS")}
    for dim in (96, 384, 768, 1024, 1152):
        shape = tile(dim)
        warps = shape.pop("num_warps")
        for full in (False, True):
            name = f"add_norm D={dim} {'LayerNorm, all options' if full else 'RMSNorm'}"
            types = narrow | wide | strides | (optional if full else {})
            constants = {"D": dim, **shape} | ({} if full else dict.fromkeys(optional))
            forward = types | {"shift_stride": "i32"} | ({"BIAS": "*fp32"} if full else {})
            bias = {} if full else {"BIAS": None}
            yield Case(name, add_norm_kernel, forward, constants | bias | {"EPS": 1e-6}, warps, quick=dim == 768)
            backward = constants | {"ROWS": 64, "STAGES": 2}
            yield Case(
                f"{name}, backward", add_norm_backward_kernel, types, backward, warps, pipelined=True, quick=dim == 768
            )


@dataclass(frozen=True)
class ResourcesConfig:
    """Which kernels, for which architecture."""

    arch: int | None = None
    like: str = ""
    """Part of a case's name."""


def main() -> None:
    with one_sentence():
        cfg = from_words(ResourcesConfig, sys.argv[1:], __doc__ or "")
        if cfg.arch not in (None, *ARCHITECTURES):
            raise ValueError(f"arch={cfg.arch}: choose one of {', '.join(map(str, ARCHITECTURES))}.")
        rows: list[tuple[object, ...]] = [("kernel", "sm", *Resources._fields)]
        for case in cases():
            if cfg.like in case.name:
                for architecture in ARCHITECTURES if cfg.arch is None else (cfg.arch,):
                    rows.append((case.name, architecture, *measure(case, architecture)))
        print(table(rows))


if __name__ == "__main__":
    main()
