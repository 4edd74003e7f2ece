"""Row 6: `cloche run -- true` as a shell would start it, whole process, against a bare Python of the same environment.

With a keeper, which is what a second command finds; and without one, where the process is its own engine. The command
line is that of scripts/cloche: the interpreter, isolated, and the thin client's `main`.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import cloche
from bench import peers, records, setup

_THIN = 'import sys; sys.argv[0] = "cloche"; from cloche.cli.thin import main; sys.exit(main())'
CLOCHE = [sys.executable, "-I", "-c", _THIN]
RUN = [*CLOCHE, "run", "--", "true"]
BARE = [sys.executable, "-c", "pass"]
_KEEPER_S = 20.0


def run(bench: setup.Bench) -> list[records.Row]:
    """Rows 6a (with a keeper) and 6b (without)."""
    kept, alone = bench.home + ".keeper", bench.home + ".alone"
    for home in (kept, alone):
        os.makedirs(home, mode=0o700)
    keeper = None
    try:
        _describe(rows := _rows(), alone)
        _refuse_broken(alone)
        keeper = bench.attempt("row6a", lambda: _start_keeper(kept))
        _race(bench, rows, None if keeper is None else kept, alone)
    except LookupError as problem:
        bench.skip("row6", str(problem))
        return []
    finally:
        if keeper is not None:
            _stop(keeper)
        for home in (kept, alone):
            shutil.rmtree(home, ignore_errors=True)
    return [row for row in rows if row.subject.samples]


def _race(bench: setup.Bench, rows: list[records.Row], kept: str | None, alone: str) -> None:
    bare = records.Series(name="python -c pass")
    contestants = [(bare, functools.partial(whole, BARE, dict(os.environ)))]
    contestants.append((rows[1].subject, functools.partial(whole, RUN, _environment(alone, keeper=False))))
    if kept is not None:
        contestants.append((rows[0].subject, functools.partial(whole, RUN, _environment(kept, keeper=True))))
    others = _peers(bench)
    setup.interleave(bench.count(60), *contestants, *others)
    for row in rows:
        row.beside = [bare, *(series for series, _ in others)]


def _rows() -> list[records.Row]:
    boundary = "the process is spawned → it has been reaped"
    anchor = "agentkernel 195–940 ms; on a development machine Codex 38 ms, sandbox-runtime 301 ms"
    return [
        records.Row(
            key="row6a", name="`cloche run -- true`, with a keeper", boundary=boundary, anchor=anchor,
            subject=records.Series(name="cloche"), bars=[records.Bar(value=3, of="python -c pass")],
        ),
        records.Row(
            key="row6b", name="`cloche run -- true`, without a keeper", boundary=boundary, anchor=anchor,
            subject=records.Series(name="cloche"), bars=[records.Bar(value=8, of="python -c pass")],
        ),
    ]  # fmt: skip


def _environment(home: str, *, keeper: bool) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "CLOCHE_URL")}
    return {**kept, "CLOCHE_HOME": home, "CLOCHE_KEEPER": "on" if keeper else "off"}


def whole(command: list[str], environment: dict[str, str]) -> float:
    """Milliseconds of a whole process, from its start to its end."""
    before = time.perf_counter()
    code = subprocess.call(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    taken = (time.perf_counter() - before) * 1e3
    if code:
        raise LookupError(f"{' '.join(command[-4:])} ended with {code}")
    return taken


def _refuse_broken(home: str) -> None:
    """One attempt whose words are kept."""
    done = subprocess.run(
        RUN,
        env=_environment(home, keeper=False),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise LookupError(f"`cloche run -- true` ended with {done.returncode}: {done.stderr.strip()[-200:]}")


def _start_keeper(home: str) -> int:
    """Run once, which leaves a keeper starting behind it; the keeper's pid when it answers."""
    whole(RUN, _environment(home, keeper=True))
    deadline = time.monotonic() + _KEEPER_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect(os.path.join(home, "cloche.sock"))
            pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            return pid
        time.sleep(0.05)
    raise LookupError(f"no keeper answered within {_KEEPER_S:g} s of the first `cloche run`")


def _stop(keeper: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(keeper, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and os.path.exists(f"/proc/{keeper}"):
        with suppress(ChildProcessError):
            os.waitpid(keeper, os.WNOHANG)  # a daemon that we inherited as subreaper
        time.sleep(0.02)


def _peers(bench: setup.Bench) -> list[tuple[records.Series, setup.Measure]]:
    found, missing = peers.find(bench.peers)
    for name, reason in missing:
        bench.skip(name, reason)
    return [
        (records.Series(name=peer.name), functools.partial(whole, peer.command, peer.environment))
        for peer in found
    ]


def _describe(rows: list[records.Row], home: str) -> None:
    """A sandbox made as `run` makes it, by the same engine: in this process, because `run` leaves none to ask."""
    with state_directory(home), cloche.Sandbox() as box:
        for row in rows:
            setup.hold(row, box.info())
    setup.close_engine()


@contextmanager
def state_directory(home: str) -> Iterator[None]:
    before = os.environ["CLOCHE_HOME"]
    os.environ["CLOCHE_HOME"] = home
    try:
        yield
    finally:
        os.environ["CLOCHE_HOME"] = before
