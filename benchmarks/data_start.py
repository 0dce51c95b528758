"""Start of a run with a million rows: seconds until the first prompt, and memory. Targets: under 10 s and 1 GB."""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from grpo_cli.compose import compose
from grpo_cli.data import load_data
from grpo_cli.model.builtin import tiny_tokenizer
from grpo_cli.schema import parse

ROWS = 1_000_000
SECONDS, MEGABYTES = 10.0, 1000.0


def write(path: Path) -> None:
    generator = random.Random(0)
    with path.open("w") as file:
        for _ in range(ROWS):
            a, b = generator.randrange(100_000), generator.randrange(100_000)
            row = {"prompt": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b)}
            file.write(json.dumps(row) + "\n")


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.jsonl")
        write(path)
        resolved = compose(["data=jsonl", f"data.train={path}"]).config
        assert resolved is not None
        cfg, tokenizer = parse(resolved), tiny_tokenizer()
        before, started, used = megabytes(), time.perf_counter(), time.process_time()
        data = load_data(cfg, tokenizer)
        loaded = time.perf_counter() - started
        data.next(cfg.trainer.prompts_per_step)
        first = time.perf_counter() - started
        used = time.process_time() - used
        size = path.stat().st_size / 1e6
    print(f"{ROWS} rows, {size:.0f} MB: read and checked in {loaded:.1f} s, first prompts after {first:.1f} s")
    print(f"of which {used:.1f} s on a processor")
    print(f"memory: {megabytes() - before:.0f} MB for the data, {megabytes():.0f} MB in all")
    return 0 if first < SECONDS and megabytes() < MEGABYTES else 1


if __name__ == "__main__":
    sys.exit(main())
