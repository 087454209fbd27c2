"""The Triton kernels in the configurations that are shipped, as tests/harness/kernel_resources.py
compiles them."""

from itertools import product
from typing import Any, NamedTuple

ARGUMENTS = {
    "*bf16": "X Y Z H DY DX DZ DH B_IN C_OUT DS DT DDT GROUPS INSIDE OTHER OUT "
    "BRANCH DBRANCH GATE SCALE SHIFT DU JOINED DJOINED QKV Q KEYS DQ DK DV DQKV",
    "*fp32": "STEPS SUMS D DD DSTEPS DSUMS TOTALS ROWS COLUMNS ROWS_BEHIND COLUMNS_BEHIND "
    "STATES WEIGHTS DOTS RESIDUAL DRESIDUAL RSTD BIAS A_LOG NORM WEIGHT Q_WEIGHT K_WEIGHT "
    "ROTATIONS",
    "*i32": "BRANCH_ROWS H_ROWS",
    "i32": "L K rows gate_stride scale_stride shift_stride dt_batch dt_token ddt_batch ddt_token",
}
"""Triton's type -> the kernels' arguments of it, where one kernel does not say otherwise."""
TYPES = {name: kind for kind, names in ARGUMENTS.items() for name in names.split()}
NO_GATE = {"Z": None, "NORM": None, "H": None, "EPS": 0.0}
"""Constants of the scan's forward kernel without its epilogue."""
SCAN_VARIANTS = {
    "forward": {", gated": {"EPS": 1e-6}, "": NO_GATE},
    "dx": {"": {}},
    "ds": {", diagonal": {"DIAGONAL": True}, "": {"DIAGONAL": False}},
}
"""Kernel of the scan -> suffixes and constants of its launches."""


class Case(NamedTuple):
    """One kernel in one shipped configuration."""

    name: str
    kernel: Any
    types: dict[str, str]
    """Argument -> Triton's type, such as *bf16 or i32, for this kernel and others of its kind."""
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    pipelined: bool = False
    """The loop loads ahead, asynchronously."""
    multiplies: bool = False
    """The kernel uses the matrix units."""
    narrow_loads: bool = False
    """The kernel transposes a layout or has small tiles, so its loads cannot be wide."""
    quick: bool = False
    """A common size, which every run of the tests checks."""
    most_registers: int | None = None
    """Limit of registers per thread of the launch; None: the hardware's."""


def add_backward(case, kernel, **changes):
    """Yields a forward case, and the same case of the backward kernel."""
    yield case
    yield case._replace(name=f"{case.name}, backward", kernel=kernel, **changes)


def make_strides(length, **tokens):
    """Strides of a token and of a sample of `length` tokens, by tensor."""
    strides = {f"{name}_token": n for name, n in tokens.items()}
    return strides | {f"{name}_batch": n * length for name, n in tokens.items()}


def widen(types):
    """Types of a run in fp32."""
    return {name: "*fp32" if kind == "*bf16" else kind for name, kind in types.items()}


def cases(architecture):
    """Every kernel in every configuration that is shipped for an architecture."""
    yield from add_norm_cases()
    yield from ssd_cases(architecture)
    yield from ssd_chunks_cases()
    yield from local_mix_cases()
    yield from gated_norm_cases()
    yield from swiglu_cases()
    yield from qk_rope_cases()
    yield from counter_noise_cases()


def add_norm_cases():
    """Tokens in one order, as in most models; with both row maps, as where a layer has an order of
    its own; and with LayerNorm, as in SiT's weights."""
    from accel.kernels.add_norm.kernels_triton import (
        add_norm_backward_kernel,
        add_norm_kernel,
        choose_tile,
    )

    types = TYPES | {"Z": "*fp32", "DZ": "*fp32"}
    absent = {"BRANCH_ROWS": None, "H_ROWS": None}
    variants = {"": absent, ", row maps": {}, ", centred": absent | {"CENTRED": True}}
    for dim in (96, 384, 768, 1024, 1152):
        forward = choose_tile(dim)
        backward = choose_tile(dim, backward=True) | {"ROWS": 64}
        for suffix, constants in variants.items():
            constants = {"D": dim, "CENTRED": False} | constants
            case = Case(
                f"add_norm D={dim}{suffix}",
                add_norm_kernel,
                types,
                constants | forward | {"EPS": 1e-6},
                forward["num_warps"],
                quick=dim == 768,
            )
            yield from add_backward(
                case,
                add_norm_backward_kernel,
                constants=constants | backward,
                warps=backward["num_warps"],
                pipelined=True,
            )


def ssd_cases(architecture):
    """24 heads; the flagship's head dim and state size, and the largest and smallest."""
    from accel.kernels.ssd import backward_triton as backward
    from accel.kernels.ssd import decays_triton as decaying
    from accel.kernels.ssd import forward_triton as ssd
    from accel.kernels.ssd.operator import LN2

    kernels = {
        "forward": ssd.ssd_kernel,
        "dx": backward.ssd_dx_kernel,
        "ds": backward.ssd_ds_kernel,
    }
    sizes = [(256, 64, 64), (300, 64, 64)]
    sizes += [(256, 128, 128), (256, 32, 16), (256, 128, 16), (256, 16, 128)]
    wide = [(256, 64, 64), (256, 128, 128)]
    for shape, fp32 in (*product(sizes, [False]), *product(wide, [True])):
        name = "L={} P={} N={}".format(*shape) + (" fp32" if fp32 else "")
        for part, kernel in kernels.items():
            chosen = ssd.choose_configuration(part, *shape, architecture, fp32=fp32)
            block, warps, most, stages = chosen
            constants = choose_scan_sizes(*shape) | {"BLOCK": block}
            constants["PRECISION"] = "ieee" if fp32 else "tf32"
            case = Case(
                "",
                kernel,
                widen(TYPES) if fp32 else TYPES,
                constants,
                warps,
                stages=stages,
                multiplies=not fp32,
                quick=shape == (256, 64, 64) and not fp32,
                most_registers=most,
            )
            for suffix, more in SCAN_VARIANTS[part].items():
                if not (fp32 and suffix == ", gated"):
                    yield case._replace(
                        name=f"ssd {part} {name}{suffix}", constants=constants | more
                    )
    decays = Case(
        "ssd decays L=256",
        decaying.ssd_decays_kernel,
        TYPES,
        decaying.choose_constants(24, 256),
        decaying.WARPS,
        narrow_loads=True,
        quick=True,
    )
    yield from add_backward(decays, decaying.ssd_decays_backward_kernel)
    decay = {"K": 24, "BLOCK": 64, "TILES": 4, "BLOCK_L": 256, "LN2": LN2}
    kernel = backward.ssd_decay_kernel
    yield decays._replace(name="ssd decay L=256", kernel=kernel, constants=decay, warps=4)


def ssd_chunks_cases():
    """Chunks of 256 tokens; forward reads into y, backward takes products with its gradient."""
    from accel.kernels.ssd import chunks_triton as chunks

    read = chunks.ssd_read_kernel
    kernels = {
        "states": (chunks.ssd_states_kernel, {}),
        "read": (read, {"OTHER": None, "DOTS": None}),
        "read, products": (read, {"INSIDE": None}),
        "groups": (chunks.ssd_groups_kernel, {}),
    }
    for fp32, size in product((False, True), (64, 128)):
        sizes = choose_scan_sizes(256, size, size)
        sizes |= {"g_token": sizes["x_token"], "g_batch": sizes["x_batch"], "o_token": 24 * size}
        block, block_n, warps = chunks.choose_configuration(size, size, fp32)
        sizes |= {"o_batch": 256 * 24 * size, "T": 256, "BLOCK": block, "BLOCK_N": block_n}
        sizes["PRECISION"] = "ieee" if fp32 else "tf32"
        for part, (kernel, absent) in kernels.items():
            yield Case(
                f"ssd {part} T=256 P={size} N={size}{' fp32' if fp32 else ''}",
                kernel,
                widen(TYPES) if fp32 else TYPES,
                sizes | absent,
                warps,
                stages=2,
                multiplies=not fp32,
                quick=size == 64 and not fp32,
            )


def choose_scan_sizes(length, head_dim, state_dim):
    """Constants of a launch for 24 heads: x, B and C lie as `local_mix` writes them, and z in the
    projection."""
    inner = 24 * head_dim
    mixed = inner + 4 * state_dim
    strides = make_strides(length, x=mixed, b=mixed, c=mixed, dx=mixed, z=inner + mixed + 2 * 24)
    return {"L": length, "K": 24, "N": state_dim, "P": head_dim} | strides


def local_mix_cases():
    """3 × 3 taps on a 16 × 16 grid, and 7 taps along 1,024 tokens."""
    from accel.kernels.local_mix import kernels_triton as mix

    types = TYPES | {"D": "i32"}
    blocks = {"BLOCK_L": mix.BLOCK_L, "BLOCK_C": mix.BLOCK_C}
    for rows, columns, r, c in ((16, 16, 3, 3), (1, 1024, 1, 7)):
        sizes = blocks | {"ROWS": rows, "COLUMNS": columns, "R": r, "C": c}
        # x is a slice of the projection of ssd_mlp_b
        sizes |= make_strides(rows * columns, x=1816, y=1024)
        name = f"local_mix {r}×{c} on {rows}×{columns}"
        constants = sizes | {"BACKWARDS": False}
        kernel = mix.local_mix_kernel
        case = Case(name, kernel, types, constants, mix.WARPS, quick=rows == 16)
        turned = sizes | {"BACKWARDS": True}
        yield case._replace(name=f"{name}, turned", constants=turned, quick=False)
        yield from add_backward(
            case,
            mix.local_mix_backward_kernel,
            constants=sizes | mix.SUMMING,
            warps=mix.SUMMING["num_warps"],
            narrow_loads=True,
        )


def gated_norm_cases():
    from accel.kernels.gated_norm import kernels_triton as norm

    strides = make_strides(256, z=1816, dz=1816)
    for head_dim in (32, 64, 128):
        sizes = {"EPS": 1e-6, "P": head_dim, "BLOCK_L": norm.BLOCK_L, "BLOCK_P": head_dim} | strides
        name = f"gated_norm P={head_dim}"
        case = Case(name, norm.gated_norm_kernel, TYPES, sizes, norm.WARPS, quick=head_dim == 64)
        yield from add_backward(case, norm.gated_norm_backward_kernel)


def swiglu_cases():
    from accel.kernels.swiglu import kernels_triton as swiglu

    sizes = {"H": 2048, "BLOCK_R": swiglu.BLOCK_R, "BLOCK_H": swiglu.BLOCK_H}
    case = Case("swiglu", swiglu.swiglu_kernel, TYPES, sizes, swiglu.WARPS, quick=True)
    yield from add_backward(case, swiglu.swiglu_backward_kernel)


def qk_rope_cases():
    """Gradients as attention returns them, each in its own tensor."""
    from accel.kernels.attention import qk_rope_triton as rope

    for head_dim in (32, 64, 128):
        width = 12 * head_dim
        sizes = {"L": 256, "K": 12, "P": head_dim, "EPS": 1e-6}
        sizes |= {"BLOCK_L": rope.TILE_ELEMENTS // head_dim}
        sizes |= make_strides(256, q=width, k=width, v=width)
        case = Case(
            f"qk_rope P={head_dim}",
            rope.qk_rope_kernel,
            TYPES,
            sizes,
            rope.WARPS,
            pipelined=True,
            quick=head_dim == 64,
        )
        yield from add_backward(case, rope.qk_rope_backward_kernel)


def counter_noise_cases():
    from accel.kernels.counter_noise import kernels_triton as noise

    integers = dict.fromkeys(("purpose", "key_low", "key_high", "words", "half"), "i32")
    for kind, number in noise.KINDS.items():
        types = {"POSITION": "*i64", "OUT": "*i64" if kind == "bits" else "*fp32"} | integers
        constants = {"KIND": number, "BLOCK": noise.BLOCK}
        yield Case(
            f"counter_noise {kind}",
            noise.counter_noise_kernel,
            types,
            constants,
            4,
            narrow_loads=True,
            quick=True,
        )
