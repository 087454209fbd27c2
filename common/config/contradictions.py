"""Refuses runtime keys that contradict each other on every machine. This file must not import
torch, so that `--help` stays quick.

`runtime` is the `RuntimeConfig` of common/config/schema.py, which calls this file. A rule about a
key that `RuntimeConfig` lacks never applies, so removing a technique needs no change here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from common.errors import UserError

DEVICE_OPTIMIZERS = (None, "torch.optim.Adam", "torch.optim.AdamW")
"""`_target_` of each optimizer whose fused step reads a flag on the device and skips the update if
the flag is set; other optimizers need a decision on the host. None: the calling code names no
optimizer."""
SHARDED_MODES = ("fsdp", "hsdp")
MODE_TEXT = "runtime.parallel.mode={mode}"
Rule = tuple[Mapping[str, Any], str]
"""A rule about runtime keys, as a pair. First a mapping: key -> the value, or a tuple of values,
with which the key meets the rule's condition. Second the message for the user if all keys meet
their conditions."""

REDUCE_OVERHEAD_TEXT = (
    "runtime.compile_mode=reduce-overhead gives wrong gradients with accumulation and with blocks "
    "compiled one by one, and cannot be captured; use runtime.compile_scope=model "
    "accumulation_steps=1 runtime.cuda_graph=false, or runtime.cuda_graph=true "
    "runtime.compile_mode=default, which works with all of them."
)
REDUCES_OVERHEAD = {"compile": True, "compile_mode": "reduce-overhead"}
CONTRADICTIONS: tuple[Rule, ...] = (
    (
        {"tune": True, "deterministic": True},
        "runtime.tune=true chooses techniques by their time, so runs differ; write the choice down "
        "with `python -m scripts.plan tune` and use runtime=tuned with deterministic=true.",
    ),
    (
        {"tune": True, "mode": SHARDED_MODES},
        f"runtime.tune=true contradicts {MODE_TEXT}: it measures in one process, which holds the "
        "whole model; use runtime.parallel.mode=ddp, or runtime=production.",
    ),
    (REDUCES_OVERHEAD | {"cuda_graph": True}, REDUCE_OVERHEAD_TEXT),
    (REDUCES_OVERHEAD | {"accumulates": True}, REDUCE_OVERHEAD_TEXT),
    (REDUCES_OVERHEAD | {"compile_scope": "blocks"}, REDUCE_OVERHEAD_TEXT),
    (
        {"compile": True, "compile_mode": "max-autotune-no-cudagraphs", "deterministic": True},
        "runtime.compile_mode=max-autotune-no-cudagraphs chooses kernels by their time, so runs "
        "differ; use runtime.compile_mode=default with deterministic=true.",
    ),
    (
        {"mode": SHARDED_MODES, "compile": True, "compile_scope": "model"},
        f"runtime.compile_scope=model contradicts {MODE_TEXT}, which gathers parameters block by "
        "block; use runtime.compile_scope=blocks.",
    ),
    (
        {"mode": SHARDED_MODES, "needs_whole": True},
        f"optim._target_={{optimizer}} contradicts {MODE_TEXT}, which shards the optimizer's state "
        "like the parameters; use optim=adamw, or runtime.parallel.mode=ddp.",
    ),
    (
        {"mode": SHARDED_MODES, "weights": "bf16"},
        f"runtime.weights=bf16 contradicts {MODE_TEXT}, which shards parameters of one dtype only; "
        "use runtime.parallel.mode=ddp, or runtime.weights=fp32.",
    ),
    (
        {"mode": SHARDED_MODES, "offload_optimizer": True},
        f"runtime.offload_optimizer=true contradicts {MODE_TEXT}, which has its own offload; "
        "use runtime.parallel.cpu_offload=true.",
    ),
    (
        {
            "offload_activations": True,
            "gradient_checkpointing": True,
            "checkpoint_policy": "selective",
        },
        "runtime.offload_activations=true cannot move the results that "
        "runtime.checkpoint_policy=selective keeps; use runtime.checkpoint_policy=blocks.",
    ),
    (
        {"cuda_graph": True, "mode": ("ddp", *SHARDED_MODES)},
        f"runtime.cuda_graph=true was never tried with {MODE_TEXT}; use runtime=production.",
    ),
    *(
        (
            {"cuda_graph": True, key: True},
            f"runtime.{key}=true copies to the host in every step, which was never tried in a "
            "captured one; use runtime.cuda_graph=false.",
        )
        for key in ("offload_optimizer", "offload_activations")
    ),
    (
        {"cuda_graph": True, "decides_on_device": False},
        "runtime.cuda_graph=true needs an optimizer that decides on the device, and {optimizer} "
        "decides on the host; use optim=adamw, or runtime.cuda_graph=false.",
    ),
)


def check_contradictions(
    runtime: Any, accumulation_steps: int, deterministic: bool, optimizer: str | None
) -> None:
    """Raises UserError for the first rule in `CONTRADICTIONS` whose conditions all hold, or if
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
    for conditions, sentence in CONTRADICTIONS:
        # Refuse the keys if all conditions of a rule hold. For a key that does not exist
        # `values.get` returns None, which no rule expects, so such a rule never applies.
        if all(
            values.get(key) in (expected if isinstance(expected, tuple) else (expected,))
            for key, expected in conditions.items()
        ):
            raise UserError(sentence.format(**values))
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


def is_colour(text: str) -> bool:
    """Says whether Pillow knows `text` as a colour without transparency."""
    from PIL import ImageColor  # imported here, so that `--help` stays quick

    try:
        return len(ImageColor.getrgb(text)) == 3
    except ValueError:
        return False
