"""Write files so that a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path


class FileError(ValueError):
    """A file cannot be written; the message says which, why, and what to do."""


def write_atomic(path: str | Path, content: str | bytes) -> Path:
    """Write ``content`` (text as UTF-8) beside ``path``, then rename it; folders are made.

    What is there keeps its permissions; of a symbolic link, what it leads to is written.

    Raises:
        FileError: no permission, a read-only or full disk, a file where a folder should be, or a
            ``path`` that is a folder, a device or a pipe.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    target = _followed(path)
    temporary = _beside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise FileError(f"cannot write {path}: {_reason(error, target, len(data))}") from error
    finally:
        _discard(temporary)
    return path


def check_writable(path: str | Path) -> None:
    """Find out before long work whether ``write_atomic`` could write there now; leaves no trace.

    Raises:
        FileError: as ``write_atomic``, but for a disk that is full.
    """
    path = _followed(Path(path))
    temporary = _beside(path)
    if not path.parent.is_dir():  # which would be made: by writing into the nearest that is there
        temporary = _beside(next(p for p in path.parents if p.exists()) / path.name)
    try:
        temporary.touch()
    except OSError as error:
        raise FileError(f"cannot write {path}: {_reason(error, path, 0)}") from error
    finally:
        _discard(temporary)


def model_file(path: str | Path, content: bytes) -> str:
    """What the file of a model is, and what to give instead of it; empty for another file."""
    path = Path(path)
    module = path.stem if path.suffix == ".py" else "package.module"
    if path.suffix == ".py":
        what = "Python code"
    elif content[:4] == b"PK\x03\x04":  # a ZIP archive
        what = "weights, an exported program or another archive (.pt, .pt2, .zip)"
    elif content[:1] == b"\x80":
        what = "a pickle of Python, e.g. weights of PyTorch"
    elif content[8:9] == b"{" and path.suffix == ".safetensors":
        what = "weights alone (safetensors)"
    else:
        return ""
    return (
        f"{what}. A model is a function that returns the module and its inputs: "
        f"placement plan {module}:function"
    )


def _followed(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _beside(path: Path) -> Path:
    """A name for the content until it is whole."""
    if path.exists() and not path.is_file():  # renaming would replace a folder, or /dev/null
        raise FileError(f"cannot write {path}: it is not a file; name another")
    # A name has 255 bytes at most, and this one is longer than the file's.
    return path.with_name(f".{path.name[:50]}.{os.getpid()}-{threading.get_ident()}.tmp")


def cache_folder() -> Path:
    """Where measurements are kept: ``$PLACEMENT_HOME``, or ``~/.cache/placement``."""
    return Path(os.environ.get("PLACEMENT_HOME") or Path.home() / ".cache" / "placement")


def _discard(temporary: Path) -> None:
    try:
        temporary.unlink(missing_ok=True)
    except OSError:  # what stopped the writing may stop this too, and has been reported
        return


def _reason(error: OSError, path: Path, num_bytes: int) -> str:
    folder = next((p for p in path.parents if p.is_dir()), Path("/"))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free
        return (
            f"no space left in {folder} ({num_bytes} bytes needed, {free} free); "
            "free some or choose another folder"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"no permission to write in {folder}; choose a folder of yours, or: chmod u+w {folder}"
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"a part of {path.parent} is a file, not a folder; choose another folder"
    return error.strerror or str(error)
