"""What the server writes to standard error, for people or for machines.

Either way one record is one line (a traceback in text is the exception, indented), whatever a client put into it: JSON escapes what would end a line,
and text is written with its control characters spelled out.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import msgspec

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_encoder = msgspec.json.Encoder()


class Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = "cloche: " + _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.getMessage())
        if record.exc_info:
            line += "\n  " + self.formatException(record.exc_info).replace("\n", "\n  ")
        return line


class Json(logging.Formatter):
    """`time`, `level`, `logger`, `message`; of a request its own fields (`extra={"fields": …}`); `traceback` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        encoded = _encoder.encode({name: _sound(value) for name, value in line.items()}).decode()
        # JSON need not escape these, and some readers take them for the end of a line, or a terminal for an order.
        return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded)


def _sound(value: Any) -> Any:
    """Text that UTF-8 can carry: a header may have had anything in it."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
