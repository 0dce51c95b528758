"""The wheel, away from the source tree, is the whole tool."""

import configparser
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A directory with the sdist and the wheel that was built from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], check=True, capture_output=True
    )
    return out


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """Python of a new environment that has the wheel, and this environment's libraries but not its `grpo`."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    wheel = next(built.glob("*.whl"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel], check=True
    )
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries) + "\n")
    return home / "bin" / "python"


def run(python: Path, *arguments: str, cwd: Path | str) -> subprocess.CompletedProcess:
    # -P: the current directory is not on the path; the environment's own variables must not lead back to the checkout.
    return subprocess.run(
        [python, "-P", "-m", "grpo_cli.cli", *arguments],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_yaml_is_in_the_wheel(built):
    shipped = {path.relative_to(ROOT / "conf").as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name.removeprefix("grpo_cli/conf/") for name in wheel.namelist() if name.endswith(".yaml")}
    assert names == shipped


def test_installed_wheel_validates_from_anywhere(installed):
    done = run(installed, "validate", "+experiment=grpo", cwd="/")
    assert done.returncode == 0, done.stderr


def test_what_is_installed_agrees_with_itself():
    """Case H11: what `pip check` asks, of grpo's own requirements and of theirs.

    Hydra, OmegaConf and the parser of LaTeX share one antlr runtime; the pins are those that were tried together.
    """
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    own = [line for line in setup["options"]["install_requires"].splitlines() if line]
    assert {"math-verify==0.9.0", "latex2sympy2_extended==1.11.0", "antlr4-python3-runtime==4.9.3"} <= set(own)
    seen, waiting, broken = set(), [("grpo", Requirement(line)) for line in own], []
    while waiting:
        of, asked = waiting.pop()
        if asked.marker is not None and not any(
            asked.marker.evaluate({"extra": extra}) for extra in ("", *asked.extras)
        ):
            continue
        try:
            version = metadata.version(asked.name)
        except metadata.PackageNotFoundError:
            version = "nothing"
        if version == "nothing" or not asked.specifier.contains(version, prereleases=True):
            broken.append(f"{of} needs {asked}, here is {version}")
        elif (asked.name, *asked.extras) not in seen:
            seen.add((asked.name, *asked.extras))
            waiting += [(asked.name, Requirement(line)) for line in metadata.requires(asked.name) or []]
    assert broken == []
    assert len(seen) > 50


ALL_OPTIONS = """
from pathlib import Path
import grpo_cli
from grpo_cli.compose import compose
from grpo_cli.options import conf_dir, read_groups
print(Path(grpo_cli.__file__).parent)
for group, options in read_groups([conf_dir()]).options.items():
    for option in options:
        composed = compose([f"{group}={option}"])
        assert composed.config is not None, (group, option, composed.findings)
"""


def test_installed_wheel_composes_every_option_of_every_group(installed, tmp_path):
    done = subprocess.run(
        [installed, "-P", "-c", ALL_OPTIONS],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(ROOT)
