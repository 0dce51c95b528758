"""Files of lines, read back after something went wrong with them."""

from __future__ import annotations

from pathlib import Path

from grpo_cli.files import jsonio
from grpo_cli.files.rundir import RunDir


def test_a_line_with_a_broken_byte_is_left_out_as_any_that_is_no_json(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path)
    run_dir.metrics_path.write_bytes(b'{"step": 1}\n{"step": 2, "note": "\xff"}\n[2]\n\0\0\0\0\n{"step": 3}\n')
    assert jsonio.read_rows(run_dir.metrics_path) == [{"step": 1}, {"step": 3}]
    run_dir.rewind(3)
    assert run_dir.metrics_path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'
