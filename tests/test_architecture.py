"""The direction of imports that ARCHITECTURE.md promises, read from the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "grpo_cli"

STAGES = ("data", "reward", "rollout", "filter", "advantage", "loss", "trainer", "checkpoint", "logger")
USES = {("trainer", "loss")}
"""A stage that is told to call another one: an update is made of the loss."""


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


@pytest.mark.parametrize(("module", "path"), list(modules()))
def test_stages_do_not_import_each_other(module, path):
    stage = stage_of(module)
    others = {other for name in imports(path) if (other := stage_of(name)) not in (None, stage)}
    if stage is not None:
        assert {(stage, other) for other in others} <= USES


@pytest.mark.parametrize(("module", "path"), list(modules()))
def test_what_validate_imports_knows_no_stage_with_weights(module, path):
    if module.partition(".")[0] in ("errors", "types", "schema", "passes", "seeds", "compose", "checks", "plan", "cli"):
        heavy = {"worker", "trainer", "model", "batch", "checkpoint", "ranks"}
        at_import = {name for name in top_level_imports(path) if name.partition(".")[0] in heavy}
        assert not at_import


def top_level_imports(path: Path) -> set[str]:
    tree = without_type_checking(ast.parse(path.read_text()))
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpo_cli"):
            module = (node.module or "").removeprefix("grpo_cli").lstrip(".")
            names |= {f"{module}.{name.name}".lstrip(".") for name in node.names}
    return names
