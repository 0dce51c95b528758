"""The wheel, away from the source tree, is the whole tool."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

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
