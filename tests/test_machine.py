"""What the machine is fast in, from what its processor says."""

import pytest

from grpo_cli import machine
from grpo_cli.compose import compose


@pytest.mark.parametrize(
    ("line", "has"),
    [
        ("flags\t\t: fpu sse2 avx2 fma", False),
        ("flags\t\t: fpu avx512f avx512_bf16 fma", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
        ("model name\t: bf16", False),
    ],
)
def test_bfloat16_is_read_from_the_processors_flags(tmp_path, line, has):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbugs\t\t: none\n")
    assert machine.cpu_has_bfloat16(tmp_path / "cpuinfo") is has


def test_a_processor_that_does_not_tell_has_none(tmp_path):
    assert not machine.cpu_has_bfloat16(tmp_path / "absent")


@pytest.mark.parametrize(
    ("accelerator", "cpu", "dtype"),
    [(False, False, "float32"), (False, True, "bfloat16"), (True, False, "bfloat16")],
)
def test_the_quickstart_computes_in_what_the_machine_is_fast_in(monkeypatch, accelerator, cpu, dtype):
    monkeypatch.setattr(machine, "has_accelerator", lambda: accelerator)
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: cpu)
    assert compose(["experiment=quickstart"]).config["model"]["dtype"] == dtype
    assert compose(["experiment=quickstart", "model.dtype=bfloat16"]).config["model"]["dtype"] == "bfloat16"


def test_an_accelerator_counts_unless_the_run_is_told_to_leave_it(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert machine.has_accelerator()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert not machine.has_accelerator()
    monkeypatch.delenv("DS_ACCELERATOR")
    tool.unlink()
    assert not machine.has_accelerator()
