"""What an engine holds: events in, lines of one segment out.

*When a line is safe.* `append` only takes the event; `flush`, in the next turn of the event loop and before any answer, hands all of them
to the kernel in one write. So a SIGKILL of the engine loses nothing that anybody was told of. A loss of power may take what the kernel had not written yet: seconds, unless `audit.fsync`
is on, and never what was sealed. The write goes to the page cache and takes microseconds; signing and syncing are `tend`'s work,
in a thread.

*When it fails.* A full or broken disk leaves a whole line or none. The events wait in memory, at most `MOST_WAITING` of them, and are
written when it goes again, after a line that says how many did not fit. Meanwhile `audit.on_failure` decides: `warn` says so
with every sandbox that is made, `refuse` lets nothing be done that would need a line. Neither is silent.

*When the writer dies.* A segment belongs to a process by a lock on its file, which the kernel takes back. `recover`, in the next engine
that stays a while, signs what it finds and leaves the file as it is.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cloche import errors, events, interfaces, settings
from cloche.audit import keys, lines, manifest, masking

DIRECTORY = "audit"
OPEN, DONE = ".open", ".jsonl"
SEAL_EVERY = 1000
MOST_WAITING = 5000
_MAX_AGE_S = 86400.0
_DAY_S = 86400.0


class _Segment:
    """One file, its lock, and the state of its chain. Only whole lines count."""

    def __init__(self, directory: str, name: str) -> None:
        self.name = name
        self.path = os.path.join(directory, name + OPEN)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self.fd = os.open(self.path, flags, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        self.lines = 0
        self.size = 0
        self.head = lines.ZERO
        self.sealed_at = 0
        self.synced_at = 0
        self.born = time.monotonic()

    def write(self, batch: bytes, count: int, head: str) -> None:
        manifest.write_all(self.fd, batch, self.size)
        self.lines += count
        self.size += len(batch)
        self.head = head

    def note(self, kind: str, now: float, data: dict[str, object]) -> None:
        line, head = lines.of_log(kind, self.lines, self.head, now, data)
        self.write(line, 1, head)

    def broken(self) -> bool:
        try:
            return os.fstat(self.fd).st_size != self.size
        except OSError:
            return True

    def seal(self, act: str) -> manifest.Seal:
        return manifest.Seal(act, self.name, self.lines, self.size, self.head)

    def finish(self) -> None:
        """Its last word is signed: say so by its name, and let go of it."""
        os.rename(self.path, self.path.removesuffix(OPEN) + DONE)
        self.leave()

    def leave(self) -> None:
        """Let go: the lock goes with the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Follows(NamedTuple):
    segment: str
    head: str


class Log(interfaces.Audit):
    """`seal_later`: a writer that goes at once leaves the signing to the next one that stays."""

    def __init__(
        self,
        home: str,
        config: settings.Audit,
        owner: str,
        *,
        seal_later: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = os.path.join(home, DIRECTORY)
        self._keys = os.path.join(home, "keys")
        self._config = config
        self._owner = owner
        self._seal_later = seal_later
        self._clock = clock
        self._masker = masking.Masker(config.redact)
        self._waiting: list[events.AnyEvent] = []
        self._lost = 0
        self._unwritten: str | None = None
        self._unsigned: str | None = None
        self._segment: _Segment | None = None
        self._full: list[_Segment] = []
        self._follows: _Follows | None = None
        self._count = 0
        self._signer: keys.Signer | None = None
        self._state = threading.Lock()  # the chain: held for a write
        self._tending = threading.Lock()  # signing: held for as long as that takes
        self._pid = os.getpid()
        self._closed = False

    # ── in the event loop ──────────────────────────────────────────────────────────────────────────

    def masked(self, event: events.AnyEvent) -> events.AnyEvent:
        return self._masker.event(event)

    def append(self, event: events.AnyEvent) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(event)
        else:
            self._lost += 1

    def flush(self) -> bool:
        if self._closed or os.getpid() != self._pid:  # a forked child has no log: its parent's is not its own
            self._waiting.clear()
            return False
        with self._state:
            if self._waiting:
                self._flush()
            return self._has_work()

    def _flush(self) -> None:
        try:
            segment = self._current()
            resumed = self._resumed()
            batch, head, seq = [], segment.head, segment.lines
            for event in [*resumed, *self._waiting]:
                line, head = lines.of_event(event, seq, head)
                batch.append(line)
                seq += 1
            segment.write(b"".join(batch), len(batch), head)
        except OSError as problem:
            self._unwritten = self._words("written", problem)
            self._abandon_if_broken()
            return
        self._waiting.clear()
        self._lost = 0
        self._unwritten = None
        self._rotate_if_due(segment)

    def _abandon_if_broken(self) -> None:
        """Where not even the half-written line could be taken back, it stays the last of its segment."""
        segment = self._segment
        if segment is not None and segment.broken():
            self._segment = None
            segment.leave()

    def _resumed(self) -> list[events.AnyEvent]:
        """After a failure, what the chain would otherwise not show."""
        if self._unwritten is None:
            return []
        return [
            events.Administered(
                sandbox=None,
                time=self._clock(),
                actor="engine",
                operation="audit_resumed",
                detail=f"{self._lost} events were lost; before: {self._unwritten}",
                failed=self._lost > 0,
            )
        ]

    def _words(self, what: str, problem: Exception) -> str:
        cause = getattr(problem, "message", None) or getattr(problem, "strerror", None) or str(problem)
        return f"the audit log in {self._directory} cannot be {what}: {cause}"

    def _current(self) -> _Segment:
        if self._segment is None:
            self._segment = self._open()
        return self._segment

    def _open(self) -> _Segment:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        now = self._clock()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
        self._count += 1
        name = f"{stamp}-{self._owner.replace(':', '-')}-{self._count:04}"
        made = _Segment(self._directory, name)
        try:
            follows = None if self._follows is None else self._follows._asdict()
            made.note(
                lines.OPENED, now, {"version": 1, "segment": name, "writer": self._owner, "follows": follows}
            )
            manifest.append(self._directory, made.seal("opened"), now, None)
        except BaseException:
            os.unlink(made.path)  # it never was a segment
            made.leave()
            raise
        return made

    def _rotate_if_due(self, segment: _Segment) -> None:
        old = time.monotonic() - segment.born > _MAX_AGE_S  # not by the clock, which may jump
        if segment.size >= self._config.max_segment_mib << 20 or old:
            self._follows = _Follows(segment.name, segment.head)
            self._full.append(segment)
            self._segment = None

    def _has_work(self) -> bool:
        if self._full:
            return True
        segment = self._segment
        if segment is None:
            return False
        unsynced = self._config.fsync and segment.synced_at < segment.size
        return unsynced or segment.lines - segment.sealed_at >= SEAL_EVERY

    @property
    def problem(self) -> str | None:
        return self._unwritten or self._unsigned

    def check(self) -> None:
        if self.problem is None:
            return
        self.flush()  # it may go again by now
        if self._config.on_failure == "warn":
            return
        if self._unsigned is not None:
            self.tend()
        if self.problem is not None:
            raise errors.error(
                "audit_unavailable",
                f"{self.problem}; nothing is done that could not be recorded",
                hint="free some space, or set audit.on_failure to 'warn'",
            )

    # ── in a thread ────────────────────────────────────────────────────────────────────────────────

    def tend(self) -> None:
        with self._tending:
            try:
                self._tend()
                self._unsigned = None
            except (OSError, errors.ClocheError) as problem:
                self._unsigned = self._words("signed", problem)

    def _tend(self) -> None:
        while self._full:
            self._end(self._full[0])
            del self._full[0]
        with self._state:
            segment = self._segment
            size = 0 if segment is None else segment.size
        if segment is None:
            return
        if self._config.fsync and segment.synced_at < size:
            os.fdatasync(segment.fd)
            segment.synced_at = size
        if segment.lines - segment.sealed_at >= SEAL_EVERY:
            self._seal(segment)

    def _seal(self, segment: _Segment) -> None:
        with self._state:
            seal = segment.seal("sealed")
        os.fdatasync(segment.fd)  # what is signed is on disk
        place = self._sign(seal)
        with self._state:
            segment.note(lines.SEALED, self._clock(), {"manifest": place.n, "head": place.hash})
            segment.sealed_at = segment.lines

    def _end(self, segment: _Segment) -> None:
        os.fdatasync(segment.fd)
        place = self._sign(segment.seal("closed"))
        segment.note(lines.CLOSED, self._clock(), {"manifest": place.n, "head": place.hash})
        segment.finish()

    def _sign(self, seal: manifest.Seal) -> manifest.Place:
        if self._signer is None:
            self._signer = keys.signer(self._keys)
        return manifest.append(self._directory, seal, self._clock(), self._signer)

    def close(self) -> None:
        """Write what waits, sign, let go. Twice is harmless."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        if os.getpid() != self._pid:
            return
        with self._tending:
            last, self._segment = self._segment, None
            for segment in [*self._full, *([last] if last is not None else [])]:
                try:
                    self._conclude(segment)
                except (OSError, errors.ClocheError) as problem:
                    self._unsigned = self._words("signed", problem)
                    segment.leave()
            self._full.clear()

    def _conclude(self, segment: _Segment) -> None:
        if self._seal_later:
            segment.note(lines.CLOSED, self._clock(), {"manifest": None, "head": None})
            segment.leave()
        else:
            self._end(segment)

    def read(
        self, *, since: float | None, until: float | None, sandbox: str | None, kinds: Sequence[str], actor: str | None,
        outcome: str | None, after: tuple[float, str, int] | None, limit: int,
    ) -> list[dict[str, Any]]:  # fmt: skip
        from cloche.audit import reading  # which reads what this writes

        wanted = reading.Wanted(
            max(since or 0.0, after[0]) if after else since, until, sandbox, tuple(kinds), actor, outcome
        )
        return reading.page(self._directory, wanted, after, limit)

    def verify(self, head: str | None) -> dict[str, Any]:
        from cloche.audit import verifying

        public = os.path.join(self._keys, keys.PUBLIC)
        verifier = keys.verifier(public) if os.path.exists(public) else None
        return verifying.verify(self._directory, verifier, head).to_builtins()

    def recover(self) -> list[str]:
        """Sign what dead writers left, remove what is too old; the names of both."""
        if self._seal_later:
            return []
        with self._tending:
            try:
                return [*self._recover(), *self._drop_old()]
            except (OSError, errors.ClocheError) as problem:
                self._unsigned = self._words("signed", problem)
                return []

    def _recover(self) -> list[str]:
        try:
            left = sorted(name for name in os.listdir(self._directory) if name.endswith(OPEN))
        except FileNotFoundError:
            return []
        return [name.removesuffix(OPEN) for name in left if self._adopt(name)]

    def _adopt(self, name: str) -> bool:
        path = os.path.join(self._directory, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(path):  # somebody was faster
                return False
            self._sign(_found(fd, name.removesuffix(OPEN)))
            os.rename(path, path.removesuffix(OPEN) + DONE)
            return True
        except BlockingIOError:
            return False  # its writer lives
        finally:
            os.close(fd)

    def _drop_old(self) -> list[str]:
        if self._config.keep_days is None:
            return []
        limit = self._clock() - self._config.keep_days * _DAY_S
        dropped = []
        try:
            with os.scandir(self._directory) as found:
                old = [entry for entry in found if _is_old(entry, limit)]
        except FileNotFoundError:
            return []
        for entry in old:
            name = entry.name.removesuffix(DONE)
            self._sign(manifest.Seal("dropped", name, 0, 0, lines.ZERO))
            os.unlink(entry.path)
            dropped.append(name)
        return dropped


def _is_old(entry: os.DirEntry[str], limit: float) -> bool:
    return entry.name.endswith(DONE) and entry.name != manifest.NAME and entry.stat().st_mtime < limit


def _found(fd: int, name: str) -> manifest.Seal:
    """What a dead writer left: its whole lines, and what it did not finish."""
    os.fsync(fd)
    size = os.fstat(fd).st_size
    count, end, head, last = 0, 0, lines.ZERO, None
    with os.fdopen(os.dup(fd), "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            count += 1
            end += len(line)
            last = line
    if last is not None:
        members = lines.opened(last[:-1])
        head = members["hash"] if members is not None else lines.digest(last)
        orderly = members is not None and members["kind"] == lines.CLOSED and end == size
        if orderly:
            return manifest.Seal("closed", name, count, size, head)
    return manifest.Seal("died", name, count, end, head, torn=size - end)
