"""Which devices a server of the run's own is shown."""

from __future__ import annotations

import pytest

from grpo_cli.rollout.server_process import visible_devices


@pytest.mark.parametrize(
    ("devices", "ours", "shown"),
    [
        ([1, 2], None, "1,2"),
        ([1], "4,5,6", "5"),  # our second device is the machine's sixth
        ([2, 0], "GPU-a, GPU-b, GPU-c", "GPU-c,GPU-a"),
    ],
)
def test_devices_are_numbered_as_the_run_sees_them(devices, ours, shown):
    assert visible_devices(devices, ours) == shown
