"""Checkpoint directories as files: which are there, which are whole, and that they are plain data. Imports no torch.

    checkpoints/step_000020/  manifest.json  state.json  config.yaml  ledger.jsonl  rng_00000.json
    slices_00000.safetensors  …

The manifest names every file with its size and SHA-256 and is written last, before the directory gets its name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from grpo_cli.files.jsonio import read_json

NAME = "manifest.json"
STATE = "state.json"
CONFIG = "config.yaml"
FORMAT = 1

_DIRECTORY = re.compile(r"step_(\d{6,})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.(json|jsonl|yaml|safetensors)")
"""Names that a manifest may hold: one path component each, of kinds that are data and nothing else."""

_LONGEST_TABLE = 2**27


def directory_name(step: int) -> str:
    """The name of the checkpoint after `step` steps.

    >>> directory_name(20)
    'step_000020'
    """
    return f"step_{step:06d}"


def newest_first(checkpoints: Path) -> Iterator[tuple[int, Path]]:
    """(step, directory) of everything that is named like a checkpoint, by number: clocks play no part."""
    found = []
    if checkpoints.is_dir():
        for path in checkpoints.iterdir():
            match = _DIRECTORY.fullmatch(path.name)
            if match:
                found.append((int(match[1]), path))
    yield from sorted(found, reverse=True)


def read(directory: Path) -> Mapping[str, Any] | None:
    """The manifest of a checkpoint; None where it is missing or broken. Every entry has a size and a hash."""
    manifest = read_json(directory / NAME)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or manifest.get("format") != FORMAT:
        return None
    return manifest if all(_is_entry(entry) for entry in files.values()) else None


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get("sha256"), str)


def quick_problems(directory: Path) -> list[str]:
    """Why a checkpoint is not whole, as far as names and sizes tell; empty where they tell nothing bad."""
    if not directory.is_dir():
        return ["there is no such directory"]
    if not any(directory.iterdir()):
        return ["it is empty"]
    manifest = read(directory)
    if manifest is None:
        return [f"{NAME} is missing or broken: it was never finished"]
    problems = []
    if {STATE, CONFIG} - set(manifest["files"]):
        problems.append(f"{NAME} does not name {STATE} and {CONFIG}")
    for name, entry in manifest["files"].items():
        try:
            if not _FILE.fullmatch(name) or (directory / name).is_symlink():
                problems.append(f"{name!r} is no name of a checkpoint's file")
                continue
            size = (directory / name).stat().st_size
        except OSError:
            problems.append(f"{name} is missing")
            continue
        if size != entry["size"]:
            problems.append(f"{name} has {size} bytes instead of {entry['size']}")
    return problems


def hash_problems(directory: Path, share: int = 0, shares: int = 1) -> list[str]:
    """Files whose content is not what the manifest says; `share` of `shares`: every rank reads its part."""
    manifest = read(directory)
    assert manifest is not None, "quick_problems comes first"
    names = sorted(manifest["files"])[share::shares]
    with ThreadPoolExecutor(4) as pool:
        sums = pool.map(lambda name: sha256(directory / name), names)
        wrong = [name for name, digest in zip(names, sums, strict=True) if digest != manifest["files"][name]["sha256"]]
    return [f"{name} has another content than when it was saved (SHA-256)" for name in wrong]


def problems(directory: Path) -> list[str]:
    """Why a checkpoint cannot be loaded: not whole, changed, or not plain data; empty where it can."""
    return quick_problems(directory) or hash_problems(directory) or not_plain(directory)


def not_plain(directory: Path) -> list[str]:
    """Files that only code-running unpickling could read, or that are not what their name says. Nothing is loaded."""
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.suffix in (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"):
            found.append(f"{path.name} is a pickle")
        elif path.suffix == ".safetensors" and not _is_safetensors(path):
            found.append(f"{path.name} is no safetensors file")
        elif path.suffix == ".json" and read_json(path) is None:
            found.append(f"{path.name} is no JSON")
    return found


def _is_safetensors(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return 2 <= length <= _LONGEST_TABLE and isinstance(json.loads(file.read(length)), dict)
    except (OSError, ValueError):
        return False


def sha256(path: Path) -> str:
    """Hash of a file, read in pieces; '' where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
