"""The config groups as they lie on disk: where conf/ is, which options each group has, and what each is for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

PRIMARY = "train"


def conf_dir() -> Path:
    """The shipped conf/: inside the package (wheel), or at the top of the checkout (plain or `pip install -e`)."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parents[1] / "conf"):
        if (candidate / f"{PRIMARY}.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"conf/{PRIMARY}.yaml is neither in {package} nor in {package.parents[1]}: reinstall grpo")


@dataclass(frozen=True, slots=True)
class Groups:
    """Options of each group, and the one that each base group has by default; the other groups are optional.

    >>> Groups({"loss": ("dapo", "ppo_clip"), "experiment": ("dapo",)}, {"loss": "ppo_clip"}).optional
    ('experiment',)
    """

    options: dict[str, tuple[str, ...]]
    defaults: dict[str, str]

    @property
    def optional(self) -> tuple[str, ...]:
        return tuple(group for group in self.options if group not in self.defaults)


def read_groups(dirs: Sequence[Path]) -> Groups:
    """The groups of conf/ and of a user's own directory; an option in a subfolder is called `folder/option`."""
    found: dict[str, set[str]] = {}
    for top in dirs:
        for file in top.rglob("*.yaml"):
            group, *option = file.relative_to(top).with_suffix("").parts
            if option and group != "hydra" and file.is_file():
                found.setdefault(group, set()).add("/".join(option))
    primary = yaml.safe_load((dirs[0] / f"{PRIMARY}.yaml").read_text(encoding="utf-8"))
    defaults = {
        group: option for entry in primary["defaults"] if isinstance(entry, dict) for group, option in entry.items()
    }
    return Groups({group: tuple(sorted(found[group])) for group in sorted(found)}, defaults)


def find_option(dirs: Iterable[Path], group: str, option: str) -> Path | None:
    """The file of an option; None where there is none."""
    return next((file for top in dirs if (file := top / group / f"{option}.yaml").is_file()), None)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, one that begins with it first; None only where nothing is known."""
    words = list(known)
    longer = [candidate for candidate in words if word and candidate.startswith(word)]
    return next(iter(difflib.get_close_matches(word, longer or words, n=1, cutoff=0.0)), None)
