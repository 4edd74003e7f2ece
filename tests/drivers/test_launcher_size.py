"""What every sandbox is forked with: the launcher's memory is paid for once by each."""

import subprocess
import sys
from pathlib import Path

import cloche

COSTLY = {
    "re",
    "enum",
    "json",
    "socket",
    "signal",
    "collections",
    "functools",
    "typing",
    "selectors",
    "asyncio",
}


def test_the_launcher_imports_nothing_costly() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(cloche.__file__).parent.parent)!r}); from cloche.drivers import launcher; "
        "launcher._prime(); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "cloche.drivers.launcher" in loaded
    assert loaded & COSTLY == set()
