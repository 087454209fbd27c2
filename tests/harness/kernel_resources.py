"""Finds the GPU resources of each Triton kernel without a GPU: compiles ahead of time and reads the
compiler's report.

    python -m tests.harness.kernel_resources                    all kernels, for all architectures
    python -m tests.harness.kernel_resources arch=90 like=ssd   some of them
    python -m tests.harness.kernel_resources out=docs/benchmarks/kernel_resources.json

The last writes the table with which tests compare.

With `arch=` or `like=` the command replaces only those rows of the table. It keeps the rows of
other versions of Triton.

The columns are registers per thread, bytes of shared memory, stack and spills, 128-bit loads,
asynchronous copies, matrix instructions, and instructions in fp64, of which there should be none.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.config.compose import parse_words, report_user_errors
from common.text import format_table
from scripts.commands import format_rows
from tests.harness.kernel_cases import Case, cases

SHARED_MEMORY_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Compute capability -> KiB of shared memory that a thread block may have (CUDA C++ Programming
Guide, table of technical specifications by compute capability)."""
ARCHITECTURES = tuple(SHARED_MEMORY_KIB)


class Resources(NamedTuple):
    """The compiler's report on one kernel in one configuration (a case), for one GPU
    architecture."""

    registers: int
    stack: int
    shared: int
    spills: int
    """Number of instructions that store to local memory, which spilled registers cause."""
    loads_128: int
    async_copies: int
    products: int
    """Number of matrix instructions (tensor cores)."""
    fp64: int


def compile_kernel(case: Case, architecture: int) -> Any:
    """Compiles the kernel of `case` for sm_<architecture>; this needs no GPU. It fails in a process
    in which Triton interprets kernels (TRITON_INTERPRET=1)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    known = {name: value for name, value in case.constants.items() if name in names}
    types = {name: kind for name, kind in case.types.items() if name in names and name not in known}
    signature = {name: "constexpr" if name in known else types[name] for name in names}
    constants = {(names.index(name),): value for name, value in known.items()}

    # Declare pointers and sizes as multiples of 16: they are so in every shipped configuration, and
    # Triton compiles a special kernel for such values.
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in types}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=divisible)
    options = {"num_warps": case.warps, "num_stages": case.stages, "maxnreg": case.most_registers}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def measure(case: Case, architecture: int) -> Resources:
    """Compiles `case` for sm_<architecture> and reads its resources."""
    kernel = compile_kernel(case, architecture)
    report = disassemble(kernel.asm["cubin"])
    match = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert match is not None

    def count(pattern: str, text: str = report) -> int:
        return len(re.findall(pattern, text))

    return Resources(
        registers=int(match[1]),
        stack=int(match[2]),
        shared=kernel.metadata.shared,
        spills=count(r"\bSTL"),
        loads_128=count(r"LDG\.E\S*\.128") + count(r"LDGSTS\S*\.128"),
        async_copies=count(r"LDGSTS"),
        products=count(r"HGMMA|HMMA|UTC\S*MMA"),
        fp64=count(r"\.f64", kernel.asm["ptx"]),
    )


def disassemble(cubin: bytes) -> str:
    """Returns the resource report and the machine code of a compiled kernel, as text."""
    import triton

    tool = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class ResourcesConfig:
    """Keys of the command `kernel_resources`."""

    arch: int | None = None
    like: str = ""
    """Compiles only the cases whose names contain this text."""
    out: str | None = None
    """A JSON file to write the table to."""


def main() -> None:
    import triton

    with report_user_errors():
        cfg = parse_words(ResourcesConfig, sys.argv[1:], __doc__ or "")
        measured = {
            (case.name, architecture): measure(case, architecture)
            for architecture in (ARCHITECTURES if cfg.arch is None else (cfg.arch,))
            for case in cases(architecture)
            if cfg.like in case.name
        }
        rows = [(f"{name} sm_{arch}", *found) for (name, arch), found in measured.items()]
        print(format_table([("kernel", *Resources._fields), *rows]))
        if cfg.out is None:
            return

        # Keep the rows of the file for this version of Triton that this call did not measure.
        file = Path(cfg.out)
        tables: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        partial = cfg.arch is not None or cfg.like
        kernels = tables.get(triton.__version__, {}) if partial else {}
        for (name, architecture), found in measured.items():
            kernels.setdefault(name, {})[f"sm_{architecture}"] = " ".join(map(str, found))
        tables |= {"fields": " ".join(Resources._fields), triton.__version__: kernels}
        file.write_text(format_rows(tables) + "\n")


def read_recorded(path: Path) -> dict[str, dict[str, Resources]]:
    """Reads a table that this command wrote: version of Triton -> "<case> sm_<architecture>" -> the
    compiler's report."""
    tables = json.loads(path.read_text())
    assert tables.pop("fields").split() == list(Resources._fields)
    return {
        version: {
            f"{name} {architecture}": Resources(*map(int, row.split()))
            for name, rows in kernels.items()
            for architecture, row in rows.items()
        }
        for version, kernels in tables.items()
    }


if __name__ == "__main__":
    main()
