"""Rules of the logger and of the run directory."""

from __future__ import annotations

import netrc
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from grpo_cli.checks.engine import Found, View, broken, declare, error, state

LONGEST_NAME = 128


@error("run.name")
def run_name_is_one_component(c: View) -> Found:
    """run.name is joined into paths; more than one plain component would write outside the run directory."""
    name = c.run.name
    if not name or len(name) > LONGEST_NAME or name in (".", "..") or re.search(r"[/\\\x00-\x1f\x7f]", name):
        plain = re.sub(r"[^\w.-]+", "_", name or "").strip("._")[:LONGEST_NAME] or "grpo"
        yield broken(
            f"{state(c, 'run.name')} is not one path component of 1 to {LONGEST_NAME} characters.", {"run.name": plain}
        )


@error("logger.wandb.mode")
def wandb_online_needs_key(c: View) -> Found:
    """W&B would wait for a prompt, or die at the first logged step. `wandb login` writes the netrc entry."""
    if c.logger.wandb.mode == "online" and not has_wandb_key():
        yield broken(
            "logger.wandb.mode=online, but WANDB_API_KEY is not set and netrc has no entry for the W&B host; set the "
            "key, or log offline.",
            {"logger.wandb.mode": "offline"},
            {"logger.wandb.mode": "disabled"},
        )


def has_wandb_key() -> bool:
    """Whether WANDB_API_KEY is set, or netrc has an entry for the W&B host. The key itself is not kept."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        named = os.environ.get("NETRC")
        files = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
        return any(host in netrc.netrc(str(file)).hosts for file in files if file.is_file())
    except (OSError, RuntimeError, netrc.NetrcParseError, UnicodeDecodeError):
        return False


declare(
    "run_dir_is_fresh", "error", "logging", "start", "run.dir", "run.name", "trainer.resume",
    why="""run.dir holds a run.json and trainer.resume is never, or another live process owns it. Two runs would
    overwrite each other's metrics and checkpoints. Choose another run.name, or trainer.resume=auto.""",
)  # fmt: skip
declare(
    "run_dir_writable", "error", "logging", "start", "run.dir",
    why="""run.dir cannot be created and written: the first checkpoint would fail after hours. Correct run.dir.""",
)  # fmt: skip
declare(
    "run_dir_has_room", "warning", "logging", "start", "trainer.keep_checkpoints", "run.dir",
    why="""Free space is less than (trainer.keep_checkpoints + 1) checkpoints: the disk would be full in the middle of
    a save. Lower trainer.keep_checkpoints, or move run.dir.""",
)  # fmt: skip
declare(
    "wandb_installed", "error", "logging", "start", "logger.wandb.mode",
    why="""logger.wandb.mode is not disabled and the package wandb cannot be found: an import error at the first log.
    Install it, or set logger.wandb.mode=disabled.""",
)  # fmt: skip
