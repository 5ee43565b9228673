"""The wheel, built and installed into a fresh environment, works from any other directory.

The fresh environment borrows the dependencies of the running one through a .pth file, so that
nothing is downloaded. The checkout itself is not on its path: an editable installation of the
checkout in the running environment is hooked in by a .pth file too, and those are only read in a
site-packages folder of the environment's own.
"""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, without the checkout on its path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(word) for word in command]
    result = subprocess.run(words, capture_output=True, text=True, timeout=90, cwd=cwd, env=env)
    assert result.returncode == 0, f"{words}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder, cwd=ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root of a fresh virtual environment that holds the wheel and borrows its dependencies."""
    venv = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv)
    python = venv / "bin" / "python"
    where = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=venv)
    borrowed = sysconfig.get_path("purelib")
    (Path(where.strip()) / "dependencies.pth").write_text(borrowed + "\n")
    # --ignore-installed: the running environment may hold the checkout, and must keep it.
    pip = ("-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed")
    run(python, *pip, "--disable-pip-version-check", wheel, cwd=venv)
    return venv


@pytest.fixture
def python(installed: Path) -> Path:
    return installed / "bin" / "python"


def test_the_wheel_contains_the_packages_and_nothing_else(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in files if ".dist-info/" not in name}
    assert tops == {"placement", "envs", "agents", "conf"}
    assert "placement/py.typed" in files
    pages = ROOT / "placement" / "report" / "page"
    assert {p.relative_to(ROOT).as_posix() for p in pages.iterdir()} <= set(files)
    weights = list((ROOT / "agents" / "released").glob("*.safetensors"))
    assert weights and {p.relative_to(ROOT).as_posix() for p in weights} <= set(files)
    configs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    assert configs, "conf/ holds no YAML files"
    assert configs <= set(files)


def test_the_packages_are_ours_and_hydra_finds_every_config(python, installed, tmp_path):
    """They are those of the fresh environment; the entry configs compose, and every group offers
    what the checkout has.
    """

    def stems(folder: Path) -> list[str]:
        return sorted(path.stem for path in folder.glob("*.yaml"))

    conf = ROOT / "conf"
    entries, folders = stems(conf), filter(stems, conf.rglob("*"))
    groups = {folder.relative_to(conf).as_posix(): stems(folder) for folder in folders}
    code = f"""
import agents, conf, envs, placement
from placement.tools.ownership import check_packages
check_packages()
for package in (agents, conf, envs, placement):
    assert package.__file__.startswith({str(installed)!r}), package
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
with initialize_config_module("conf", version_base="1.3"):
    for name in {entries!r}:
        compose(name)
    loader = GlobalHydra.instance().config_loader()
    for group, options in {groups!r}.items():
        assert loader.get_group_options(group) == options, group
"""
    assert entries and groups, "conf/ holds no YAML files"
    run(python, "-c", code, cwd=tmp_path)


@pytest.mark.parametrize("command", ["placement", "placement-compare", "placement-train"])
def test_commands_print_their_help(installed: Path, tmp_path: Path, command: str) -> None:
    assert command in run(installed / "bin" / command, "--help", cwd=tmp_path)
    assert not list(tmp_path.iterdir()), "asking for help must not write anything"
