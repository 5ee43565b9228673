"""A fake site-packages in a temporary folder, with the metadata that pip would have written."""

import importlib.metadata
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from placement.tools.ownership import PACKAGES, OwnershipError, check_packages

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    check_packages.cache_clear()


def install(site: Path, distribution: str, *packages: str, egg: bool = False) -> None:
    """Write the dist-info that pip leaves behind, or an egg-info as setuptools did."""
    info = site / f"{distribution.replace('-', '_')}-1.0.{'egg' if egg else 'dist'}-info"
    info.mkdir()
    header = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
    (info / ("PKG-INFO" if egg else "METADATA")).write_text(header)
    if egg:
        (info / "top_level.txt").write_text("\n".join(packages) + "\n")
    else:
        record = [f"{package}/__init__.py,," for package in packages]
        (info / "RECORD").write_text("\n".join([*record, f"{info.name}/METADATA,,"]) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages that comes after the checkout on the path."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path, str(tmp_path)])
    importlib.invalidate_caches()
    return tmp_path


def test_a_checkout_that_nothing_else_touches_passes(site: Path) -> None:
    check_packages()


def test_our_own_distribution_may_contain_them_and_others_are_no_intruders(site: Path) -> None:
    install(site, "Device_Placement.RL", *PACKAGES)
    install(site, "reagents", "reagents", "agents_sdk", "envs2")  # similar names
    install(site, "conftools", "conftools", egg=True)
    (site / "system_package-1.0.egg-info").mkdir()  # without a record
    check_packages()


@pytest.mark.parametrize(
    ("distribution", "package", "egg"),
    [
        ("openai-agents", "agents", False),
        ("agents", "agents", True),
        ("envs", "envs", True),
        ("openstack-placement", "placement", False),
    ],
)
def test_an_intruder_is_named(site: Path, distribution: str, package: str, egg: bool) -> None:
    install(site, "device-placement-rl", *PACKAGES)
    install(site, distribution, package, egg=egg)
    with pytest.raises(OwnershipError) as error:
        check_packages()
    assert f"distribution '{distribution}' also installs a package '{package}'" in str(error.value)
    assert "virtual environment" in str(error.value)


def test_a_package_found_elsewhere_is_reported(tmp_path: Path) -> None:
    # A folder on the path with an `agents` of its own and no metadata at all: only where the
    # import leads gives it away.
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").touch()
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
    code += "from placement.tools.ownership import check_packages; check_packages()"
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 1
    assert f"'agents' is imported from {tmp_path / 'agents'}" in result.stderr
    assert f"belongs in {ROOT / 'agents'}" in result.stderr


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda x: None if x == "conf" else find(x))
    with pytest.raises(OwnershipError, match="'conf' cannot be imported"):
        check_packages()


def test_reads_metadata_only(site: Path) -> None:
    # Not an absolute time: the check must stay well below what the standard library needs for
    # the same question, in the same process.
    def best_of_5(function: Callable[[], object]) -> float:
        def once() -> float:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start

        return min(once() for _ in range(5))

    slow_s = best_of_5(importlib.metadata.packages_distributions)
    assert best_of_5(check_packages.__wrapped__) < slow_s
