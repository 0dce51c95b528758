"""Nobody reads, the terminal is gone, the disk is full: work is done all the same, and its exit code is the run's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

VALIDATE = f"{sys.executable} -m grpo_cli.cli validate +experiment=smoke"


def shell(line: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&-"])
def test_a_closed_stream_is_no_reason_to_fail(closed):
    done = shell(f"{VALIDATE} {closed}")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_a_full_disk_is_one_line():
    done = shell(f"{VALIDATE} >/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: standard output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr


def test_children_of_a_command_without_output_have_one():
    code = "import subprocess, sys; from grpo_cli.terminal.output import open_missing; open_missing();"
    code += "sys.exit(subprocess.call([sys.executable, '-c', 'print(1, flush=True)']))"
    assert shell(f'{sys.executable} -c "{code}" >&-').returncode == 0


def test_a_reader_that_has_gone_takes_no_code_away():
    code = "import sys, time; from grpo_cli.terminal.output import say;"
    code += "time.sleep(0.3); say('gone'); say('again'); sys.exit(3)"
    done = shell(f'({sys.executable} -c "{code}"; echo $? >&3) 3>&2 2>&1 | true')
    assert done.stderr.split() == ["3"]
