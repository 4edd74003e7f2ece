"""Unpacking in a process of its own: killed when nobody waits for it, and unable to write anywhere but into its draft.

The child is this module, started with an empty environment. It reads one request, confines itself by Landlock where the
kernel has it, says what it does line by line, and ends with a result or an error, all as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cloche import errors

_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from cloche.images.unpacking import main; main()"
_SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MOST_FILES = 500_000
_MEMORY = 4 << 30


async def unpack(
    blobs: Sequence[Any], root: str, *, most_bytes: int, owners: bool, progress: Callable[[str], None]
) -> int:
    """Put layers, in order, into the empty directory `root`; the bytes that their files have."""
    request = {"blobs": [list(blob) for blob in blobs], "root": root, "bytes": most_bytes, "owners": owners}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", _PROGRAM.format(root=_SOURCE),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(request).encode())
        child.stdin.close()
        async for line in child.stdout:
            said = json.loads(line)
            if "error" in said:
                raise errors.from_dict(said["error"])
            if "size" in said:
                return int(said["size"])
            progress(said["progress"])
        raise errors.error("internal_error", f"the unpacker ended with {await child.wait()} and said nothing")
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def main() -> None:
    """The child."""
    try:
        request = json.load(sys.stdin)
        _say({"size": _unpack(request)})
    except errors.ClocheError as problem:
        _say({"error": problem.to_dict()})
    except OSError as problem:
        code = "disk_full" if problem.errno in (28, 122) else "internal_error"
        text = f"the image could not be unpacked: {problem.strerror} ({problem.filename!r})"
        _say({"error": errors.error(code, text, hint="free space below CLOCHE_HOME").to_dict()})
    except (MemoryError, RecursionError):
        text = "a layer needs more memory to read than is given to it"
        _say({"error": errors.error("image_invalid", text).to_dict()})


def _unpack(request: dict[str, Any]) -> int:
    from cloche.images import layers

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    _confine(request["root"])
    limits = layers.Limits(request["bytes"], MOST_FILES)
    owners = bool(request["owners"])
    root = os.open(request["root"], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    modes = layers.Modes(root, owners=owners)
    for number, blob in enumerate(request["blobs"]):
        _say({"progress": f"unpacking layer {number + 1} of {len(request['blobs'])}"})
        layers.unpack(layers.Blob(*blob), root, limits, modes, owners=owners, number=number)
    modes.settle()
    return limits.most_bytes - limits.bytes


def _confine(root: str) -> None:
    """Read everything, write only below `root`: the second fence, should the first have a hole."""
    from cloche.linux import landlock

    if landlock.abi():
        # SAFETY: tests/images/test_layers.py::test_the_unpacker_cannot_write_elsewhere
        landlock.restrict([("/", landlock.READ_ONLY), ("/dev/null", landlock.DEVICE), (root, landlock.ALL)])


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)  # noqa: T201 - the pipe to the parent
