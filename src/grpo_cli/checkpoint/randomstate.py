"""The random states of a process as JSON: python, numpy, torch and its devices."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from grpo_cli.errors import RunError
from grpo_cli.seeds import derive_seed


def capture() -> dict[str, Any]:
    """Every global random state of this process; `restore` makes it so again."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert isinstance(keys, np.ndarray)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` gave. Raises RunError where a state does not fit: a run never goes on with another
    one."""
    try:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_decode(state["torch"]))
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_decode(state["cuda"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"The random state in the checkpoint cannot be restored: {error}") from error


def reseed(seed: int, step: int, rank: int) -> None:
    """The states of a fresh run (step 0), and of a rank that the saved run did not have; the same at every attempt."""
    random.seed(derive_seed(seed, "process", step, rank, "python"))
    np.random.seed(derive_seed(seed, "process", step, rank, "numpy") % 2**32)
    torch.manual_seed(derive_seed(seed, "process", step, rank, "torch"))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
