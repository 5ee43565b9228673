"""Files: written so that a reader sees the old content or the new, read so that none does harm.

What is read came from anybody. ``parse_json`` and ``parse_yaml`` give values that are as deep and
as many as they look, and whose numbers float64 holds; ``short`` shows any of them in a line.
"""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import reprlib
import shutil
import stat
import threading
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from placement.tools.limits import MOST


class FileError(ValueError):
    """A file cannot be written; the message says which, why, and what to do."""


def read_file(path: str | Path) -> bytes:
    """All bytes of a file, or what is compressed in it (gzip).

    Raises:
        OSError: it cannot be read; or is larger than ``MOST.file_bytes``, or a device or a named
            pipe, which may never end.
    """
    size = check_is_file(path)
    if size > MOST.file_bytes:
        raise OSError(errno.EFBIG, f"{size} bytes, at most {MOST.file_bytes} are read")
    content = Path(path).read_bytes()
    return _unpacked(content) if content[:2] == b"\x1f\x8b" else content


def _unpacked(content: bytes) -> bytes:
    most = min(MOST.unpacked_bytes, 2**24 + MOST.unpacked_times * len(content))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:  # perhaps several that were joined
            data = file.read(most + 1)
    except EOFError:
        raise OSError(errno.EINVAL, "the compressed file is cut off") from None
    except (OSError, zlib.error) as error:
        raise OSError(errno.EINVAL, f"damaged: {error}") from error
    if len(data) > most:
        raise OSError(errno.EFBIG, f"the compressed file holds more than {most} bytes")
    return data


def check_is_file(path: str | Path) -> int:
    """How many bytes it has.

    Raises:
        OSError: it is not there; or is a device or a named pipe, which may never end.
    """
    about = Path(path).stat()
    is_named = os.path.exists(os.path.realpath(path))  # what a shell pipes in has no name
    if is_named and not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
        raise OSError(errno.EINVAL, "a pipe or a device; write what it gives into a file")
    return about.st_size


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8, without the byte order mark that some editors write.

    Raises:
        OSError: see ``read_file``.
        ValueError: it is not UTF-8.
    """
    return read_file(path).decode("utf-8-sig")


def read_json(path: str | Path, error: type[ValueError], *, infinite: bool = False) -> Any:
    """The value in a file of JSON; ``infinite`` as for ``parse_json``.

    Raises:
        ValueError: (``error``) it cannot be read, or is not JSON.
    """
    try:
        return parse_json(read_text(path), infinite=infinite)
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror}") from cause
    except ValueError as cause:
        raise error(f"{path}: not valid JSON: {cause}") from cause


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
        if os.path.exists(target):
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise FileError(f"cannot write {path}: {_reason(error, target, len(data))}") from error
    finally:
        _discard(temporary)
    return path


def as_data(value: Any) -> Any:
    """``value`` as JSON; what JSON cannot hold becomes text."""
    if isinstance(value, Mapping):
        return {str(k): as_data(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(v) for v in value]
    if hasattr(value, "dtype") and value.shape == ():  # a number of numpy
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def append(path: str | Path, text: str) -> None:
    """Write at the end of a file; it is on the disk then.

    Raises:
        FileError: as ``write_atomic``.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise FileError(f"cannot write {path}: {_reason(error, Path(path), len(text))}") from error


def check_writable(path: str | Path) -> None:
    """Find out before long work whether ``write_atomic`` could write there now; leaves no trace.

    Raises:
        FileError: as ``write_atomic``; a disk is full if it has no room for one plan.
    """
    path = _followed(Path(path))
    temporary = _beside(path)
    if not os.path.isdir(path.parent):  # which would be made: by writing into the nearest there is
        temporary = _beside(next(p for p in path.parents if os.path.exists(p)) / f"new-{path.name}")
    room = 2**16  # bytes: about one plan
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)  # or its name is too long, which the other one's is not
        temporary.write_bytes(bytes(room))
    except OSError as error:
        raise FileError(f"cannot write {path}: {_reason(error, path, room)}") from error
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
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def _beside(path: Path) -> Path:
    """A name for the content until it is whole."""
    # Renaming would replace a folder, or /dev/null. (Path.exists raises where nothing may be seen.)
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileError(f"cannot write {path}: it is not a file; name another")
    # A name has 255 bytes at most, and this one is longer than the file's.
    return path.with_name(f".{path.name[:50]}.{os.getpid()}-{threading.get_ident()}.tmp")


def cache_folder() -> Path:
    """Where measurements are kept: ``$PLACEMENT_HOME``, or ``~/.cache/placement``."""
    return Path(os.environ.get("PLACEMENT_HOME") or Path.home() / ".cache" / "placement")


def parse_json(text: str | bytes, *, infinite: bool = False) -> Any:
    """The value that a text of JSON says.

    Args:
        infinite: ``NaN`` and ``Infinity`` are taken too: Python writes them, JSON has none.

    Raises:
        ValueError: not JSON, a key twice in one object, a number that float64 does not hold, or
            nested deeper than ``MOST.depth``; the message is one line.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_no_repeats,
            parse_constant=None if infinite else _no_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth([value], _inside)
    return value


def parse_yaml(text: str) -> Any:
    """The value that a text of YAML says; nothing but data is made.

    Raises:
        ValueError: not YAML, a key twice in one mapping, a number that float64 does not hold,
            nested deeper than ``MOST.depth``, or aliases of aliases that together repeat more than
            the text says; the message is one line.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_depth([node], _inside_yaml, len(text) + MOST.aliases)
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except yaml.YAMLError as error:  # which points into the text over several lines
        raise ValueError(" ".join(str(error).split())) from error
    except (TypeError, AttributeError) as error:  # PyYAML's own, of a key or a tag that is none
        raise ValueError(f"not YAML: {error}") from error


def write_arrays(path: str | Path, **arrays: Any) -> Path:
    """Write an ``.npz`` file of arrays and texts, whole or not at all (no pickle).

    Raises:
        FileError: it cannot be written there.
    """
    import numpy as np

    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return write_atomic(path, buffer.getvalue())


def read_arrays(path: str | Path) -> dict[str, Any]:
    """The arrays of an ``.npz`` file by name; nothing in it is executed.

    Raises:
        ValueError: it is none, it is damaged, it holds Python objects, or far more than its size.
        OSError: it cannot be opened.
    """
    import numpy as np

    check_is_file(path)
    with open(path, "rb") as file:
        if not zipfile.is_zipfile(file):  # of which numpy would say: unpickle it
            raise ValueError("it is no .npz file")
        try:
            with zipfile.ZipFile(file) as parts:
                held = sum(part.file_size for part in parts.infolist())
            most = 2**26 + MOST.packed_times * os.fstat(file.fileno()).st_size
            if held > most:
                raise ValueError(f"it holds {held} bytes, more than {most}")
            file.seek(0)
            with np.load(file, allow_pickle=False) as data:
                return {name: data[name] for name in data.files}
        except (ValueError, MemoryError):
            raise
        except Exception as error:  # zip, zlib and numpy's own parser each raise their own kinds
            raise ValueError(f"damaged: {error}") from error


def csv_text(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table as CSV: full precision, empty where a value is None or not a number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if v is None or v != v else v for v in row] for row in rows)
    return text.getvalue()


def short(value: Any, limit: int = 60) -> str:
    """``repr`` of anything at all, in ``limit`` characters at most."""
    text = _SHORT.repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def some(items: Sequence[str], sep: str = ", ", most: int = 5) -> str:
    """The first of ``items``, and how many more there are."""
    more = len(items) - most
    return sep.join(items[:most]) + (f"{sep}and {more} more" if more > 0 else "")


_SHORT = reprlib.Repr()
vars(_SHORT).update(maxlevel=3, maxlong=40, maxstring=60, maxother=60)
_TOO_DEEP = f"nested deeper than {MOST.depth} levels"


def _check_depth(
    level: list[Any], inside: Callable[[Any], Iterable[Any]], most: int | None = None
) -> None:
    """Raise ``ValueError`` unless values in each other end, and are ``most`` together."""
    count = 0
    for _ in range(MOST.depth + 1):
        level = [value for outer in level for value in inside(outer)]
        if not level:
            return
        count += len(level)
        if most is not None and count > most:
            raise ValueError("its aliases (*name) repeat each other: write out what is meant")
    raise ValueError(_TOO_DEEP)


def _inside(value: Any) -> Iterable[Any]:
    """The lists and objects in a value of JSON."""
    if type(value) is dict:
        value = value.values()
    elif type(value) is not list:
        return ()
    return [x for x in value if type(x) is dict or type(x) is list]


def _inside_yaml(node: Any) -> Iterable[Any]:
    """The nodes in a node of YAML, which is checked."""
    if node.id == "scalar":
        if node.tag.endswith((":int", ":float")) and len(node.value) > MOST.digits:
            raise ValueError(_too_large(node.value))
        return ()
    if node.id == "sequence":
        return node.value
    keys = [key.value for key, _ in node.value if key.id == "scalar" and key.value != "<<"]
    _check_keys(keys)
    return [part for pair in node.value for part in pair]


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        _check_keys([key for key, _ in pairs])
    return record


def _check_keys(keys: list[str]) -> None:
    if len(set(keys)) != len(keys):
        twice = next(key for key, times in Counter(keys).items() if times > 1)
        raise ValueError(f"the key {short(twice)} appears twice in one object")


def _no_constant(word: str) -> None:
    raise ValueError(f'{word} is not a number that JSON knows; infinity is written "inf"')


def _finite(word: str) -> float:
    if not isfinite(float(word)):
        raise ValueError(_too_large(word))
    return float(word)


def _whole(word: str) -> int:
    if len(word) > MOST.digits:
        raise ValueError(_too_large(word))
    return int(word)


def _too_large(word: str) -> str:
    shown = word if len(word) <= 40 else f"{word[:20]}... ({len(word)} characters)"
    return f"{shown} is too large a number"


def _discard(temporary: Path) -> None:
    try:
        temporary.unlink(missing_ok=True)
    except OSError:  # what stopped the writing may stop this too, and has been reported
        return


def _reason(error: OSError, path: Path, num_bytes: int) -> str:
    folder = next((p for p in path.parents if os.path.isdir(p)), Path("/"))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free
        return (
            f"no space left in {folder} ({num_bytes} bytes needed, {free} free); "
            "free some or choose another folder"
        )
    if error.errno == errno.EFBIG:
        return f"{num_bytes} more bytes are more than files may have here (ulimit -f)"
    if error.errno == errno.EROFS:
        return f"{folder} can only be read; choose a folder elsewhere"
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"no permission to write in {folder}; choose a folder of yours, or: chmod u+w {folder}"
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"a part of {path.parent} is a file, not a folder; choose another folder"
    return error.strerror or str(error)
