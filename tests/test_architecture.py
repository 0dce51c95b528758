"""The direction of imports that ARCHITECTURE.md promises, read from the sources."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "grpo_cli"

STAGES = ("data", "reward", "rollout", "filter", "advantage", "loss", "trainer", "checkpoint", "logger")
USES = {("trainer", "loss")}
"""A stage that is told to call another one: an update is made of the loss."""

LIGHT = (
    *("errors", "types", "schema", "passes", "seeds", "compose", "checks", "memory", "files", "terminal"),
    *("cli", "train", "sweep", "validate", "plan", "launch", "evaluate", "report", "doctor", "export", "status"),
)
"""What commands are made of, `grpo replay` apart, with what lies in these packages."""

HEAVY = ("torch", "deepspeed", "transformers", "vllm", "wandb")


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path) -> set[str]:
    """Modules of the package that this one imports, types apart: `data.rows` for `grpo_cli.data.rows`."""
    found = set()
    for node in ast.walk(without_type_checking(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {name.name.removeprefix("grpo_cli.") for name in node.names if name.name.startswith("grpo_cli.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: {ast.unparse(node)} is relative; the package names modules in full"
            if node.module == "grpo_cli":
                found |= {name.name for name in node.names}
            elif (node.module or "").startswith("grpo_cli."):
                found.add(node.module.removeprefix("grpo_cli."))
    return found


def without_type_checking(tree: ast.Module) -> ast.Module:
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return tree


def stage_of(module: str) -> str | None:
    top = module.partition(".")[0]
    return top if top in STAGES else None


PATHS = dict(modules())


@pytest.mark.parametrize(("module", "path"), list(modules()))
def test_stages_do_not_import_each_other(module, path):
    stage = stage_of(module)
    others = {other for name in imports(path) if (other := stage_of(name)) not in (None, stage)}
    if stage is not None:
        assert {(stage, other) for other in others} <= USES


@pytest.mark.parametrize("module", [name for name, _ in modules() if name.partition(".")[0] in LIGHT])
def test_the_command_line_imports_nothing_heavy(module):
    """At import, by whatever way round; what a function imports is what that function needs."""
    assert heavy_ways([module], set()) == []


def test_a_heavy_import_is_found_at_the_end_of_a_chain():
    assert "worker > checkpoint.store > torch" in heavy_ways(["worker"], set())


def heavy_ways(way: list[str], seen: set[str]) -> list[str]:
    """Chains of imports from the last module of `way` to a heavy package, each as `a > b > torch`."""
    found = []
    for name in sorted(at_import(PATHS[way[-1]])):
        if name.partition(".")[0] in HEAVY:
            found.append(" > ".join([*way, name]))
        elif (inside := name.removeprefix("grpo_cli.")) in PATHS and name.startswith("grpo_cli.") and name not in seen:
            seen.add(name)
            found += heavy_ways([*way, inside], seen)
    return found


@functools.cache
def at_import(path: Path) -> set[str]:
    """Full names that are imported with this module, the packages that they lie in too."""
    names: set[str] = set()
    for node in without_type_checking(ast.parse(path.read_text())).body:
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return {".".join(parts[: end + 1]) for name in names for parts in [name.split(".")] for end in range(len(parts))}
