"""What of a notebook's language is not Python: `!command` and `%pip`.

E2B's interpreter is a notebook's kernel, and programs rely on it: smolagents installs what its tools need with `!pip install …`. Our contexts
speak Python. So code that is no Python is tried again with the lines that begin so as calls of a shell, whose output comes like any other; code
that is Python is never touched, whatever its strings contain. As in a notebook, a command's failure raises nothing and is left in `_exit_code`.
Variables (`{name}`, `$name`) are not put into a command; other magics stay the syntax errors that they are.
"""

from __future__ import annotations

import ast
import re

_LINE = re.compile(r"^([ \t]*)(?:!(?!=)(.+)|%(pip[ \t].*))$", re.MULTILINE)


def plain(code: str) -> str:
    """The same in Python, if that is all there is to it."""
    if ("!" not in code and "%" not in code) or _is_python(code):
        return code
    changed = _LINE.sub(_call, code)
    return changed if _is_python(changed) else code


def _call(found: re.Match[str]) -> str:
    indent, command, pip = found.groups()
    line = command if pip is None else f"python3 -m {pip}"
    return f"{indent}_exit_code = __import__('subprocess').call({line.strip()!r}, shell=True)"


def _is_python(code: str) -> bool:
    try:
        # As contexts compile it: `await` is allowed outside of functions.
        compile(code, "<code>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
