"""Term `regex`: the pattern is found in the completion. Runs in a worker: some patterns take for ever on some texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any


def make(options: Mapping[str, Any]) -> Callable[[str], list[float | None]]:
    """The grader of `options["pattern"]`: 1.0 where `re.search` finds it, else 0.0."""
    pattern = re.compile(options["pattern"])
    return lambda text: [float(pattern.search(text) is not None)]
