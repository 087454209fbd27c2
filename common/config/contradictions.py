"""Refuses runtime keys that contradict each other on every machine, and values that no type of a
field describes. This file must not import torch, so that `--help` stays quick.

`runtime` is the `RuntimeConfig` of common/config/schema.py, which calls this file. The rules are in
contradictions.yaml.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError

DEVICE_OPTIMIZERS = (None, "torch.optim.Adam", "torch.optim.AdamW")
"""`_target_` of each optimizer whose fused step reads a flag on the device and skips the update if
the flag is set; other optimizers need a decision on the host. None: the calling code names no
optimizer."""
RULES = Path(__file__).with_name("contradictions.yaml")


@cache
def read_rules() -> list[dict[str, Any]]:
    return yaml.safe_load(RULES.read_text())


def check_contradictions(
    runtime: Any, accumulation_steps: int, deterministic: bool, optimizer: str | None
) -> None:
    """Raises UserError for the first rule of `RULES` whose conditions all hold, or if
    `tune_seconds` is not below `timeout_minutes`, the time for which other processes wait.
    `optimizer` is the `_target_` of the optimizer, or None."""
    values = runtime.values() | {
        "accumulates": accumulation_steps > 1,
        "deterministic": deterministic,
        "optimizer": optimizer,
        "needs_whole": str(optimizer).startswith(
            ("torch.optim.Adafactor", "training.optim.small_adamw.")
        ),
        "decides_on_device": optimizer in DEVICE_OPTIMIZERS,
    }
    for rule in read_rules():
        # For a key that does not exist `values.get` returns None, which no rule expects.
        if all(
            values.get(key) in (expected if isinstance(expected, list) else (expected,))
            for key, expected in rule["if"].items()
        ):
            raise UserError(rule["say"].format(**values))
    if runtime.tune and runtime.tune_seconds >= 60 * runtime.parallel.timeout_minutes:
        raise UserError(
            f"runtime.tune_seconds={runtime.tune_seconds} must be below the "
            f"{runtime.parallel.timeout_minutes} minutes of runtime.parallel.timeout_minutes, for "
            "which other processes wait."
        )


def check_nccl(variables: Iterable[str]) -> None:
    """Raises UserError for an environment variable whose name is not in `NCCL_VARIABLES`.

    `NCCL_VARIABLES` leaves out variables that name a library, an output file, or a file of further
    variables (*_PLUGIN, *_FILE, CONF_FILE): a configuration must not load code or write files.
    """
    for name in variables:
        if not name.startswith("NCCL_") or name.removeprefix("NCCL_") not in NCCL_VARIABLES.split():
            raise UserError(
                f"runtime.parallel.nccl.{name} may not be set here, for some variables of NCCL "
                "load code or write files; set it in the environment of the command: "
                f"{name}=<value>."
            )


NCCL_VARIABLES = """
    ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECKS_DISABLE CHECK_POINTERS
    COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING CROSS_NIC CTA_POLICY CUMEM_ENABLE
    CUMEM_HOST_ENABLE DEBUG DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS
    DMABUF_ENABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY
    IB_ADDR_RANGE IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DATA_DIRECT IB_DISABLE IB_ECE_ENABLE
    IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION
    IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC
    IB_TIMEOUT IGNORE_CPU_AFFINITY LAUNCH_MODE LL_THRESHOLD LOCAL_REGISTER MAX_CTAS
    MAX_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS MNNVL_ENABLE NET NET_GDR_C2C
    NET_GDR_LEVEL NET_GDR_READ NET_SHARED_BUFFERS NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS
    NVB_DISABLE NVLS_ENABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE
    P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROTO PXN_DISABLE RUNTIME_CONNECT
    SET_THREAD_NAME SHM_DISABLE SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME
    SOCKET_NTHREADS SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC TREE_THRESHOLD UID_STAGGER_RATE
    UID_STAGGER_THRESHOLD
"""
"""Names, without the prefix NCCL_, of the environment variables that a configuration may set:
NCCL's documentation lists them, and they only tune NCCL or make it log."""


def list_sides(resolution: Any) -> list[int]:
    """Returns [height, width] for a value of the key `resolution`, where a number is that of a
    square. Raises UserError for any other value."""
    sides = resolution if isinstance(resolution, list) else [resolution] * 2
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise UserError(
            f"resolution={resolution} must be a number of pixels, or two of them: [height,width]."
        )
    return sides


def is_colour(text: str) -> bool:
    """Says whether Pillow knows `text` as a colour without transparency."""
    from PIL import ImageColor  # imported here, so that `--help` stays quick

    try:
        return len(ImageColor.getrgb(text)) == 3
    except ValueError:
        return False
