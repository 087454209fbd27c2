"""The doctor says of every technique whether this machine has it."""

from __future__ import annotations

import json
from enum import Enum

import pytest
import torch

from accel.stack import TECHNIQUES
from scripts import doctor
from scripts.capabilities import capabilities
from scripts.timing import rates
from training.config.schema import RuntimeConfig


def test_every_technique_is_examined_in_every_way(capsys):
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = {"parallel.mode" if kind.key == "parallel" else kind.key for kind in TECHNIQUES}
    assert {row["key"] for row in found["techniques"]} == {f"runtime.{key}" for key in keys}
    values = [row["value"] for row in found["techniques"] if row["key"] == "runtime.attention"]
    assert values == ["flash", "cudnn", "efficient", "math", "flex"]
    assert all(row["available"] == (row["reason"] is None) for row in found["techniques"])
    assert found["machine"]["cpu_threads"] == torch.get_num_threads()
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert {row["name"] for row in found["planned"]} == {"FP8 matrix products", "FlashAttention-3"}


def test_the_page_has_a_line_for_each_with_its_reason(capsys):
    doctor.main([])
    text = capsys.readouterr().out
    for capability in capabilities(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        line = next(line for line in text.splitlines() if f"{capability.word} " in f"{line} ")
        assert line.split()[0] == ("yes" if capability.reason is None else "no")
        assert capability.reason is None or capability.reason in line


def test_a_techniques_examples_are_all_the_ways_that_the_configuration_knows_to_switch_it_on():
    default = RuntimeConfig()
    for kind in TECHNIQUES:
        value = default.parallel.mode if kind.key == "parallel" else getattr(default, kind.key)
        known = {choice.value for choice in type(value)} if isinstance(value, Enum) else {True, False}
        assert {way[kind.key] for way in kind.ways()} == known - {kind.off, "auto"}
        assert all(set(way) <= {kind.key, *kind.options, "fused_adamw"} for way in kind.ways())


@pytest.mark.parametrize(
    ("capability", "fp8", "flash3"), [((8, 0), 0, 0), ((8, 9), 1, 0), ((9, 0), 1, 1), ((10, 0), 1, 0)]
)
def test_what_is_planned_is_judged_by_the_hardware(capability, fp8, flash3, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert [row["hardware"] for row in doctor.planned(torch.device("cuda"))] == [bool(fp8), bool(flash3)]
    assert [row["hardware"] for row in doctor.planned(torch.device("cpu"))] == [False, False]


def test_rates_are_measured():
    found = rates(torch.device("cpu"))
    assert found["fp32_product_tflops"] > 0
    assert found["copy_gb_s"] > 0
