"""Standard output and standard error: any text, and nothing is lost because nobody reads them."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any


class Output(io.TextIOWrapper):
    """A standard stream: when nobody reads it any more, what is still to come goes nowhere.

    So a command whose reader has seen enough (``| head``, a pager) still writes its files, and
    its exit code is that of its work. Messages that cannot be written (``2> /dev/full``) end
    nothing either.
    """

    before: io.TextIOWrapper  # whose end would close the file of both

    def write(self, text: str) -> int:
        self._unless_nobody_reads(super().write, text)
        return len(text)

    def flush(self) -> None:
        self._unless_nobody_reads(super().flush)

    def _unless_nobody_reads(self, act: Callable[..., Any], *text: str) -> None:
        try:
            act(*text)
        except OSError as error:
            if not isinstance(error, BrokenPipeError) and self is not sys.stderr:
                raise
            go_nowhere(self)


def go_nowhere(stream: Any) -> None:
    """What a stream still holds, and what is still to come, is thrown away."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def any_output() -> None:
    """Output and errors take any text: what cannot be printed is ``?``, or the nearest that can.

    Closed ones go nowhere; so does what nobody reads any more, see ``Output``.
    """
    codecs.register_error("nearest", _nearest)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # to the end of the process
        elif type(stream) is io.TextIOWrapper:
            stream.flush()
            made = Output(
                stream.buffer,
                stream.encoding,
                "nearest",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            made.before = stream
            setattr(sys, name, made)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="nearest")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join({"µ": "u", "±": "+-", "–": "-"}.get(x, "?") for x in text), error.end


def full_output(error: Exception) -> str | None:
    """What to say if standard output could not be written; None: it is another error.

    Files say their names in their errors.
    """
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if not isinstance(error, OSError) or error.filename is not None or error.errno not in full:
        return None
    go_nowhere(sys.stdout)  # or what it still holds would fail again at the end
    return f"cannot write standard output: {error.strerror}; send it elsewhere"
