"""Words for people, on stderr: `cloche: …` lines, errors with their hint. Data goes to stdout and is not written here.

Colour only where a terminal reads it and NO_COLOR is not set; it repeats what the words say and never replaces them.
"""

import os
import sys

_RED, _YELLOW, _CYAN, _BOLD, _DIM = "31", "33", "36", "1", "2"


def coloured(stream_fd: int) -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and os.isatty(stream_fd)


def paint(text: str, colour: str, fd: int = 2) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if coloured(fd) else text


def say(text: str) -> None:
    _write(f"cloche: {clean(text)}\n")


def warning(text: str) -> None:
    _write(f"cloche: {paint('warning', _YELLOW)}: {clean(text)}\n")


def error(message: str, hint: str | None = None) -> None:
    lines = f"cloche: {paint('error', _RED)}: {clean(message)}\n"
    if hint:
        lines += f"\n{paint('hint', _CYAN)}: {clean(hint)}\n"
    _write(lines)


def clean(text: str) -> str:
    """What came from a command or a file must not drive the reader's terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def _write(text: str) -> None:
    try:
        sys.stderr.write(text.encode("utf-8", "backslashreplace").decode())
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # nobody to talk to
