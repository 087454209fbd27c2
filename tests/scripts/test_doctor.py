"""The doctor reports for every technique whether this machine has it."""

import json
from enum import Enum
from typing import Any

import pytest
import torch

from accel.ledger import NO_GPU
from accel.stack import TECHNIQUES
from accel.techniques.precision import Precision
from common.config.schema import RuntimeConfig
from scripts import doctor
from scripts.capabilities import find_capabilities, measure_rates
from tests.harness.pretended_gpu import Device
from tests.harness.refusals import expect_refusal
from tests.harness.words import CPU


def test_every_technique_is_examined_in_every_way(capsys):
    doctor.diagnose(doctor.DoctorConfig(json=True))
    findings = json.loads(capsys.readouterr().out)
    rows = findings["techniques"]
    keys = {"parallel.mode" if kind.key == "parallel" else kind.key for kind in TECHNIQUES}
    words = [row["word"].removeprefix("runtime.") for row in rows]
    assert {word.partition("=")[0] for word in words} == keys
    values = [word.partition("=")[2] for word in words if word.startswith("attention=")]
    assert values == ["flash", "cudnn", "efficient", "math", "flex", "flash3", "flash4"]
    assert findings["machine"]["cpu_threads"] == torch.get_num_threads()

    doctor.diagnose(doctor.DoctorConfig())
    page = capsys.readouterr().out
    assert len(page.splitlines()) <= 50, "one screen"
    for row in rows:
        assert row["word"].removeprefix("runtime.").removesuffix("=true") in page


def test_a_techniques_examples_are_all_the_ways_that_the_configuration_knows_to_switch_it_on():
    default = RuntimeConfig()
    for kind in TECHNIQUES:
        value = default.parallel.mode if kind.key == "parallel" else getattr(default, kind.key)
        values = {True, False}
        if isinstance(value, Enum):
            values = {choice.value for choice in type(value)}
        ways = kind.list_ways()
        assert {way[kind.key] for way in ways} == values - {kind.off, "auto"}
        assert all(set(way) <= {kind.key, *kind.options, "fused_adamw"} for way in ways)


GPU = torch.device("cuda", 1)
PROPERTIES = Device(clock_rate=1980000, memory_clock_rate=3201000, uuid="1b2c")
EXPECTED = {
    "shared_memory_kib_a_block": 227.0,
    "l2_mib": 50.0,
    "sm_clock_peak_mhz": 1980.0,
    "memory_clock_peak_mhz": 3201.0,
    "sm_clock_mhz": 345.0,
    "memory_clock_mhz": 2619.0,
    "power_limit_w": "unknown",
}


@pytest.fixture
def plant(monkeypatch, tmp_path):
    """`plant(script)` pretends a GPU whose nvidia-smi is that shell script."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(script):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


def test_the_limits_and_clocks_of_a_gpu_are_found(plant):
    plant(
        'case "$*" in *--id=GPU-1b2c*clocks.sm,clocks.mem,power.limit*) '
        'echo "345, 2619, [N/A]";; esac'
    )
    findings = doctor.describe_machine(GPU)
    assert EXPECTED.items() <= findings.items()
    empty: dict[str, Any] = {"versions": {}, "lacking": {}, "presets": {}, "techniques": []}
    page = doctor.format_findings({"machine": findings} | empty)
    assert "  shared memory kib a block  227\n" in page


@pytest.mark.parametrize("smi", ["exit 9", "echo driver mismatch", "while :; do :; done"])
def test_an_nvidia_smi_that_is_absent_or_fails_or_hangs_leaves_clocks_unknown(
    smi, plant, monkeypatch
):
    monkeypatch.setattr(doctor, "NVIDIA_SMI_SECONDS", 0.2)
    unknown = dict.fromkeys(doctor.CLOCKS, "unknown")
    assert doctor.read_clocks("GPU-1b2c") == unknown
    plant(smi)
    assert doctor.read_clocks("GPU-1b2c") == unknown


def test_rates_are_measured():
    findings = measure_rates(CPU)
    fast = [name for name in ("bf16", "fp16") if Precision(name, CPU).find_obstacle() is None]
    assert list(findings) == [*(f"{name}_product_tflops" for name in ("fp32", *fast)), "copy_gb_s"]
    assert all(rate > 0 for rate in findings.values())


def test_pretended_cards_have_what_their_capability_allows(monkeypatch, capsys):
    """Installed packages do not matter, and nothing of the pretence stays."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    doctor.diagnose(doctor.DoctorConfig(cards=["a100", "h100", "b200", "rtx5090"], json=True))
    rows = {word: row for word, *row in json.loads(capsys.readouterr().out)}
    flash3 = "FlashAttention-3 needs compute capability 9.x; flash_attn_interface"
    assert rows["runtime.attention=flash3"] == ["no", "yes", "no", "no", flash3]
    assert rows["runtime.attention=flash4"][:4] == ["no", "yes", "yes", "no"]
    assert rows["runtime.precision=fp8"][:4] == ["no", "yes", "yes", "yes"]
    assert rows["runtime.fused_scan=true"] == ["yes"] * 4 + ["triton"]
    without_gpu = str(find_capabilities(CPU))
    assert without_gpu.count("NVIDIA GPU") == without_gpu.count(NO_GPU) > 8


def test_an_unknown_card_is_refused_with_the_known_ones():
    with expect_refusal(r"cards=\[abacus\] is not known; choose some of h200"):
        doctor.diagnose(doctor.DoctorConfig(cards=["abacus"]))
