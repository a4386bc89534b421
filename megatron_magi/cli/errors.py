"""Ends a program of ours that cannot continue: one line on standard error, no traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_magi.cli.parser import UsageError
from megatron_magi.requirements import explained

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""

CLOSED_PIPE = 141
"""Exit code once the reader of a pipe has closed it, as in shells: no verdict was delivered."""


def run_cli(program: Callable[[], int | None]) -> int:
    """The program's exit code; 2 and one line where its input or this machine stops it.

    Every command and script runs in here, so that an error that nothing else explains still ends
    with one line. Exceptions that are not named below are bugs and keep their traceback.
    """
    try:
        return _written(program)
    except UsageError as error:
        return _stopped(str(error))
    except BrokenPipeError:  # the reader of a pipe, such as head, has closed it
        _close_output()
        return CLOSED_PIPE
    except KeyboardInterrupt:
        return _stopped("interrupted", INTERRUPTED)
    except ImportError as error:
        return _stopped(explained(error))
    except UnicodeDecodeError as error:
        return _stopped(encoding_error(error))
    except json.JSONDecodeError as error:
        return _stopped(f"a file of JSON must be whole, got {error}; name another file, or mend it")
    except MemoryError:
        return _stopped("more memory is needed than there is; try it with fewer tokens or ranks")
    except OSError as error:
        _close_output()  # writing the output may be what failed
        return _stopped(file_error(error))
    except Exception as error:
        from megatron_magi.compare.run_error import RunError

        if not isinstance(error, RunError):
            raise
        return _stopped(str(error))


def file_error(error: OSError) -> str:
    """The system's message, the file, and a hint."""
    place = f": {error.filename}" if error.filename is not None else ""
    return (
        f"files and folders must be there and open to this user, got "
        f"{error.strerror or error}{place}; check the path, permissions and free space"
    )


def encoding_error(error: UnicodeDecodeError, path: Path | None = None) -> str:
    """Where a file stops being text."""
    what = f"byte {error.object[error.start]:#04x} at {error.start}"
    place = f" in {path}" if path is not None else ""
    return f"a file of text must be UTF-8, got {what}{place}; name another file, or convert it"


def _written(program: Callable[[], int | None]) -> int:
    """Run the program, and flush its output while an error can still be handled."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that its encoding lacks
    try:
        return program() or 0
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


def _close_output() -> None:
    """Redirect the interpreter's last flush, which would print an error, to nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _stopped(text: str, code: int = 2) -> int:
    with contextlib.suppress(OSError):
        print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code
