"""The C++ compiler that PyTorch's Inductor calls."""

from __future__ import annotations

import os
import platform
import shutil


def missing_compiler() -> str:
    """Its name, if there is none of that name; empty if there is."""
    name = os.environ.get("CXX") or ("clang++" if platform.system() == "Darwin" else "g++")
    return "" if shutil.which(name.split()[0]) else name
