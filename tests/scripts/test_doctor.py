"""The doctor says of every technique whether this machine has it."""

from __future__ import annotations

import json
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import driver

from accel.stack import TECHNIQUES
from accel.techniques.attention_backend import AttentionBackend
from accel.techniques.precision import Precision
from scripts import doctor
from scripts.doctor import find_capabilities, measure_rates
from training.config.schema import RuntimeConfig
from training.environment import CARDS

CPU = torch.device("cpu")


def test_every_technique_is_examined_in_every_way(capsys):
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = {"parallel.mode" if kind.key == "parallel" else kind.key for kind in TECHNIQUES}
    assert {row["key"] for row in found["techniques"]} == {f"runtime.{key}" for key in keys}
    values = [row["value"] for row in found["techniques"] if row["key"] == "runtime.attention"]
    assert values == ["flash", "cudnn", "efficient", "math", "flex", "flash3", "flash4"]
    assert all(row["available"] == (row["reason"] is None) for row in found["techniques"])
    assert found["machine"]["cpu_threads"] == torch.get_num_threads()
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    if not torch.cuda.is_available():
        assert not doctor.CLOCKS.keys() & found["machine"].keys()


def test_the_page_has_a_line_for_each_with_its_reason(capsys):
    doctor.main([])
    text = capsys.readouterr().out
    found = find_capabilities(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for word, reason in found.items():
        line = next(line for line in text.splitlines() if f"{word} " in f"{line} ")
        assert line.split()[0] == ("yes" if reason is None else "no")
        assert reason is None or reason in line


def test_a_techniques_examples_are_all_the_ways_that_the_configuration_knows_to_switch_it_on():
    default = RuntimeConfig()
    for kind in TECHNIQUES:
        value = default.parallel.mode if kind.key == "parallel" else getattr(default, kind.key)
        known = (
            {choice.value for choice in type(value)} if isinstance(value, Enum) else {True, False}
        )
        assert {way[kind.key] for way in kind.list_ways()} == known - {kind.off, "auto"}
        assert all(set(way) <= {kind.key, *kind.options, "fused_adamw"} for way in kind.list_ways())


GPU = torch.device("cuda", 1)
H200 = {
    "max_shared_mem": 232448,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "warpSize": 32,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 3201000,
    "mem_bus_width": 6144,
}
"""What Triton's driver returns, by backends/nvidia/driver.c of 3.6 and of 3.7.1."""


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """`planted(smi)` pretends a GPU whose nvidia-smi is that shell script; None: there is none."""
    properties = SimpleNamespace(
        **{
            "name": "NVIDIA H200",
            "major": 9,
            "minor": 0,
            "total_memory": 141 * 2**30,
            "multi_processor_count": 132,
        },
        **{"L2_cache_size": 50 * 2**20, "regs_per_multiprocessor": 65536, "uuid": "1b2c"},
    )
    asked = []

    def told(index):
        asked.append(index)
        return H200

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        driver, "_active", SimpleNamespace(utils=SimpleNamespace(get_device_properties=told))
    )
    monkeypatch.setenv("PATH", str(tmp_path))

    def plant(smi: str | None) -> list[int]:
        if smi is not None:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        return asked

    return plant


def test_the_limits_and_clocks_of_a_gpu_are_told(planted):
    asked = planted(
        'case "$*" in *--id=GPU-1b2c*clocks.sm,clocks.mem,power.limit*) '
        'echo "345, 2619, 700.00";; esac'
    )
    found = doctor.describe_machine(GPU)
    assert asked == [1]
    assert (found["shared_memory_kib_a_block"], found["registers_a_block"]) == (227.0, 65536)
    assert (found["registers_a_multiprocessor"], found["multiprocessors"], found["l2_mib"]) == (
        65536,
        132,
        50.0,
    )
    assert (found["sm_clock_peak_mhz"], found["memory_clock_peak_mhz"]) == (1980.0, 3201.0)
    assert (found["sm_clock_mhz"], found["memory_clock_mhz"], found["power_limit_w"]) == (
        345.0,
        2619.0,
        700.0,
    )
    page = doctor.format_findings({"machine": found, "versions": {}, "techniques": []})
    assert "  shared memory kib a block   227\n" in page


@pytest.mark.parametrize("smi", [None, "exit 9", "echo driver mismatch", "while :; do :; done"])
def test_an_nvidia_smi_that_is_absent_or_fails_or_hangs_leaves_clocks_unknown(
    smi, planted, monkeypatch
):
    monkeypatch.setattr(doctor, "NVIDIA_SMI_SECONDS", 0.2)
    planted(smi)
    assert doctor.read_clocks("GPU-1b2c") == dict.fromkeys(doctor.CLOCKS, "unknown")


def test_what_nvidia_smi_does_not_tell_is_unknown_alone(planted):
    planted('echo "1980, 2619, [N/A]"')
    found = doctor.read_clocks("GPU-1b2c")
    assert found == {"sm_clock_mhz": 1980.0, "memory_clock_mhz": 2619.0, "power_limit_w": "unknown"}


def test_limits_that_triton_cannot_tell_are_unknown_with_the_reason(planted, monkeypatch):
    planted(None)

    class Broken:
        @property
        def utils(self):
            raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(driver, "_active", Broken())
    found = doctor.read_limits(torch.cuda.get_device_properties(GPU), 1)
    assert found["shared_memory_kib_a_block"] == "unknown: Failed to find C compiler."
    assert found["l2_mib"] == 50.0


def test_rates_are_measured():
    found = measure_rates(CPU)
    fast = [name for name in ("bf16", "fp16") if Precision(name, CPU).find_obstacle() is None]
    assert list(found) == [*(f"{name}_product_tflops" for name in ("fp32", *fast)), "copy_gb_s"]
    assert all(rate > 0 for rate in found.values())


def test_pretended_cards_have_what_their_capability_allows(monkeypatch, capsys):
    """Whatever is installed here, and with no trace of the pretence afterwards."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert doctor.main(["--as", "a100", "h100", "b200", "rtx5090", "--json"]) == 0
    found = {word: told for word, *told in json.loads(capsys.readouterr().out)}
    flash3 = "FlashAttention-3 needs compute capability 9.x; flash_attn_interface"
    assert found["runtime.attention=flash3"] == ["no", "yes", "no", "no", flash3]
    assert found["runtime.attention=flash4"][:4] == ["no", "yes", "yes", "no"]
    assert found["runtime.precision=fp8"][:4] == ["no", "yes", "yes", "yes"]
    assert found["runtime.precision=fp8"][4].endswith("; torchao")
    assert found["runtime.fused_scan=true"] == ["yes"] * 4 + ["triton"]
    assert found["runtime.parallel.mode=fsdp"] == ["yes"] * 4 + ["several processes"]
    assert "NVIDIA GPU" in (find_capabilities(CPU)["runtime.tf32=true"] or "")
    assert AttentionBackend("flash3", CPU).find_obstacle() is not None


def test_every_card_of_the_table_has_a_capability():
    assert all(card.capability >= (8, 0) for card in CARDS.values())


def test_an_unknown_card_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--as", "abacus"])
    assert "--as abacus is not known; choose one of h200" in capsys.readouterr().err
