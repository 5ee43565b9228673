"""Atomic writes: all or nothing, and errors that say what to do."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from placement.tools import files
from placement.tools.files import FileError, check_writable, read_file, read_text, write_atomic


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_may_never_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="a pipe or a device; write"):
            read_file(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    (tmp_path / "long").write_bytes(b"x" * 9)
    monkeypatch.setattr(files, "MOST", files.MOST._replace(file_bytes=8))
    with pytest.raises(OSError, match="9 bytes, at most 8"):
        read_file(tmp_path / "long")
    ends = os.pipe()
    os.write(ends[1], b"abc")
    os.close(ends[1])
    assert read_text(f"/dev/fd/{ends[0]}") == "abc", "what a shell pipes in ends with its program"
    os.close(ends[0])


def test_writes_text_and_bytes_and_makes_folders(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "a" / "b" / "x.txt", "µs\n")
    assert path.read_bytes() == "µs\n".encode()
    write_atomic(path, b"\x00new")
    assert path.read_bytes() == b"\x00new"
    assert os.listdir(path.parent) == ["x.txt"], "no temporary file is left"


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path, monkeypatch):
    path = write_atomic(tmp_path / "x", "old")

    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.EIO, "input/output error")))
    with pytest.raises(FileError, match="input/output error"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, r"no space left in .* \(3 bytes needed, \d+ free\)"),
        (errno.EACCES, r"no permission to write in .*; choose a folder of yours"),
        (errno.EROFS, r".* can only be read; choose a folder elsewhere"),
    ],
)
def test_errors_name_the_file_the_cause_and_the_remedy(tmp_path, monkeypatch, number, says):
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(FileError, match=f"cannot write .*x.json: {says}"):
        write_atomic(tmp_path / "x.json", "abc")


def test_links_permissions_and_long_names_stay(tmp_path: Path) -> None:
    target = write_atomic(tmp_path / ("x" * 250), "old")
    target.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(target)
    write_atomic(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600 and len(os.listdir(tmp_path)) == 2


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("I am a file")
    with pytest.raises(FileError, match="is a file, not a folder"):
        write_atomic(tmp_path / "runs" / "x", "abc")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_folders_that_would_be_made_may_be_called_as_others_are(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    check_writable(tmp_path / "new" / "results")
    assert [p.name for p in tmp_path.iterdir()] == ["results"]


def test_a_name_that_no_file_can_have_is_told_before_long_work(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot write"):
        check_writable(tmp_path / f"{'計' * 90}.json")
    assert not list(tmp_path.iterdir())


def test_what_may_not_be_looked_at_is_no_permission(tmp_path, monkeypatch) -> None:
    """As below a folder of somebody else's, where ``Path.exists`` raises."""

    def denied(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    for asks in ("exists", "is_dir", "is_symlink"):
        monkeypatch.setattr(Path, asks, denied)
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=PermissionError(errno.EACCES, "no")))
    with pytest.raises(FileError, match="no permission to write in"):
        write_atomic(tmp_path / "a", "b")
    with pytest.raises(FileError, match="no permission to write in"):
        check_writable(tmp_path / "a")


def test_what_is_not_a_file_is_never_replaced(tmp_path: Path) -> None:
    # As with --out /dev/null: renaming over it would destroy the device for everybody.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(FileError, match="it is not a file"):
            write_atomic(path, "abc")
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]
