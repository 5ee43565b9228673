"""Are the packages `placement`, `envs`, `agents` and `conf` really ours?

These names are short, and other distributions install packages of the same names (`openai-agents`
and `agents` ship `agents/`, `envs` ships `envs/`, `openstack-placement` ships `placement/`). pip
writes both into one folder without a word, and what is imported then is a mixture. Every entry
point calls `check_packages` first and stops with the name of the intruder.
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "device-placement-rl"
PACKAGES = ("placement", "envs", "agents", "conf")

_ADVICE = f"""Install {DISTRIBUTION} into a virtual environment of its own; from its checkout:
  python3 -m venv .venv && .venv/bin/python -m pip install -c constraints.txt -e ."""
_LIBRARIES = {sysconfig.get_path(x) for x in ("stdlib", "platstdlib", "purelib", "platlib")}
_RECORDED = re.compile(rf'^"?({"|".join(PACKAGES)})/', re.MULTILINE)


def version(name: str = DISTRIBUTION) -> str:
    """The installed version of a distribution, or that there is none; default: of this one."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


class OwnershipError(ValueError):
    """Another distribution, or another folder, provides a package of ours."""


def is_yours(file: str) -> bool:
    """Whether a file of code belongs to no installed library, and is a file."""
    return not file.startswith(("<", *_LIBRARIES))


@contextmanager
def needing(extra: str, what: str, error: type[ValueError], otherwise: str = "") -> Iterator[None]:
    """Raises: ``error``, an import inside failed: ``what`` needs the optional ``extra``."""
    try:
        yield
    except ImportError as cause:
        how = f"pip install '{DISTRIBUTION}[{extra}]'{otherwise}"
        raise error(f"{what} ({cause}): {how}") from cause


@cache
def check_packages() -> None:
    """Raise unless the four packages come from this distribution alone, and from one folder.

    A source checkout that is not installed passes: no distribution claims the packages. Costs a
    few milliseconds, and imports none of the packages.

    Raises:
        OwnershipError: another installed distribution contains one of the packages, or the
            package that `import` finds does not lie beside this `placement`.
    """
    for distribution, package in _claims():
        # As package indexes compare names (PEP 503).
        if re.sub(r"[-_.]+", "-", distribution).lower() != DISTRIBUTION:
            raise OwnershipError(
                f"the distribution '{distribution}' also installs a package '{package}', which "
                f"overwrites or hides that of {DISTRIBUTION}.\n{_ADVICE}"
            )
    root = Path(__file__).resolve().parents[2]
    for package in PACKAGES:
        folder = _import_folder(package)
        if folder != root / package:
            where = f"is imported from {folder}" if folder else "cannot be imported"
            raise OwnershipError(
                f"the package '{package}' {where}, but that of {DISTRIBUTION} belongs in "
                f"{root / package}.\n{_ADVICE}"
            )


def _claims() -> Iterator[tuple[str, str]]:
    """(distribution, package) of every installed distribution that contains one of `PACKAGES`.

    `metadata.packages_distributions()` answers the same, but parses every line of every RECORD:
    0.2 s in an environment with torch, against 5 ms for searching the text.
    """
    for distribution in metadata.distributions():
        top_level = distribution.read_text("top_level.txt")
        if top_level:
            packages = set(top_level.split())
        else:
            packages = set(_RECORDED.findall(distribution.read_text("RECORD") or ""))
        for package in PACKAGES:
            if package in packages:
                yield distribution.metadata["Name"], package


def _import_folder(package: str) -> Path | None:
    """The folder that `import package` reads, without importing it; None if there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return Path(spec.origin).resolve() if spec and spec.origin else None
    return Path(next(iter(spec.submodule_search_locations))).resolve()
