"""Durable nouns and the journal, in one SQLite file that several processes share.

    sandboxes   one row each: what is searched for as columns, the noun itself as JSON in `info`
    templates, pools, claims    what waits, by name; a claim with its owner and how far its binding got
    events      the journal: `seq` rises by commit order, is never re-used, and a row is never changed

Memory is the working copy; this is the truth after a restart. Every in-process engine, the keeper and the server of one
state directory write here, so:

* *WAL and `BEGIN IMMEDIATE`.* Readers never wait. A writer takes the lock before it reads what it will change, and
  waits up to `busy_s` for it; after that it is `state_locked`, not a half-made change.
* *`synchronous=NORMAL`.* A killed process loses nothing that was answered. A power cut may lose the last moments of the
  journal, never the file; nothing live survives a power cut anyway, so a disk flush per event buys nothing.
* *Nothing until needed.* Making a `Store` imports and opens nothing: a one-shot run that never asks pays nothing.
* *A file has a version* (`PRAGMA user_version`), moved forward by `_MIGRATIONS` in one transaction each. A newer one
  is refused untouched, `state_too_new`.

What SQLite says is translated here and nowhere else (`_translated`). The row of a sandbox goes when `prune` finds it
ended and old, so a name can be looked up for a while after its end.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from cloche import crash, errors, events, interfaces, model

if TYPE_CHECKING:
    import sqlite3

    from cloche import stock

N = TypeVar("N", bound=model.Noun)
VERSION = 4
BUSY_S = 10.0
TENANT = "local"
"""Who owns what is made without a key: the user of this machine."""

LIVE: tuple[model.Phase, ...] = ("running", "paused", "archived")
_EVENTS = "SELECT seq, kind, sandbox, time, data FROM events"
_LEAST_ROOM = 8 << 20  # bytes: a few transactions and their log

# Each entry takes a file from the version before it. They are history: add one, never edit one.
_MIGRATIONS: dict[int, tuple[str, ...]] = {
    1: (
        """CREATE TABLE sandboxes (
               id TEXT PRIMARY KEY, name TEXT, owner TEXT NOT NULL, phase TEXT NOT NULL, info BLOB NOT NULL
           ) WITHOUT ROWID""",
        # AUTOINCREMENT, because a cursor must not meet an old number again after pruning.
        """CREATE TABLE events (
               seq INTEGER PRIMARY KEY AUTOINCREMENT, sandbox TEXT, kind TEXT NOT NULL, time REAL NOT NULL,
               data BLOB NOT NULL
           )""",
    ),
    2: (
        f"ALTER TABLE sandboxes ADD COLUMN tenant TEXT NOT NULL DEFAULT '{TENANT}'",
        "ALTER TABLE sandboxes ADD COLUMN ended_at REAL",
        # Version 1 did not stop two live sandboxes from having one name: the last id keeps it.
        """UPDATE sandboxes SET name = NULL WHERE phase IN ('running', 'paused') AND EXISTS (
               SELECT 1 FROM sandboxes AS later WHERE later.name = sandboxes.name AND later.id > sandboxes.id
               AND later.phase IN ('running', 'paused'))""",
        """CREATE UNIQUE INDEX sandboxes_live_name ON sandboxes (tenant, name)
               WHERE name IS NOT NULL AND phase IN ('running', 'paused')""",
        "CREATE INDEX sandboxes_phase ON sandboxes (phase, owner)",
        "CREATE INDEX events_sandbox ON events (sandbox, seq)",
        "CREATE INDEX events_time ON events (time)",
    ),
    3: (
        "ALTER TABLE sandboxes ADD COLUMN spec BLOB",
        "DROP INDEX sandboxes_live_name",
        """CREATE UNIQUE INDEX sandboxes_live_name ON sandboxes (tenant, name)
               WHERE name IS NOT NULL AND phase IN ('running', 'paused', 'archived')""",
        f"""CREATE TABLE snapshots (
               id TEXT PRIMARY KEY, tenant TEXT NOT NULL DEFAULT '{TENANT}', name TEXT, info BLOB NOT NULL
           ) WITHOUT ROWID""",
        "CREATE UNIQUE INDEX snapshots_name ON snapshots (tenant, name) WHERE name IS NOT NULL",
        f"""CREATE TABLE volumes (
               name TEXT NOT NULL, tenant TEXT NOT NULL DEFAULT '{TENANT}', info BLOB NOT NULL,
               PRIMARY KEY (tenant, name)
           ) WITHOUT ROWID""",
    ),
    4: (
        """CREATE TABLE templates (
               tenant TEXT NOT NULL, name TEXT NOT NULL, version TEXT NOT NULL, info BLOB NOT NULL,
               PRIMARY KEY (tenant, name)
           ) WITHOUT ROWID""",
        """CREATE TABLE pools (
               tenant TEXT NOT NULL, name TEXT NOT NULL, generation INTEGER NOT NULL, info BLOB NOT NULL,
               PRIMARY KEY (tenant, name)
           ) WITHOUT ROWID""",
        """CREATE TABLE claims (
               tenant TEXT NOT NULL, name TEXT NOT NULL, owner TEXT NOT NULL, phase TEXT NOT NULL, sandbox TEXT,
               ended_at REAL, info BLOB NOT NULL, PRIMARY KEY (tenant, name)
           ) WITHOUT ROWID""",
        # A sandbox is granted once: the second claim that wants it fails here, whoever forgot to look.
        """CREATE UNIQUE INDEX claims_sandbox ON claims (sandbox) WHERE sandbox IS NOT NULL""",
    ),
}


class Pruned(NamedTuple):
    events: int
    sandboxes: int


class Store(interfaces.Store):
    """One state file. Safe under threads; a forked child gets a connection of its own."""

    def __init__(self, path: str, *, busy_s: float = BUSY_S) -> None:
        self.path = path
        self._busy_s = busy_s
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._pid = 0
        self._inherited: list[sqlite3.Connection] = []

    def __repr__(self) -> str:
        return f"Store({self.path!r})"

    # ── sandboxes ──────────────────────────────────────────────────────────────────────────────

    def put_sandbox(
        self, info: model.SandboxInfo, spec: model.SandboxSpec | None = None, *, now: float | None = None
    ) -> None:
        """Insert or replace. A name that another live sandbox of the tenant has is `name_conflict`."""
        ended_at = None if info.phase in LIVE else (time.time() if now is None else now)
        row = (info.id, info.tenant or TENANT, info.name, info.owner, info.phase, ended_at, _dump(info))
        with self._transaction("put_sandbox", f"the name {info.name!r} is taken by another sandbox") as db:
            db.execute(
                """INSERT INTO sandboxes (id, tenant, name, owner, phase, ended_at, info, spec)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?)
                   ON CONFLICT (id) DO UPDATE SET name = excluded.name, owner = excluded.owner,
                   phase = excluded.phase, info = excluded.info, spec = excluded.spec, ended_at = CASE
                   WHEN excluded.ended_at IS NOT NULL THEN COALESCE(sandboxes.ended_at, excluded.ended_at) END""",
                (*row, None if spec is None else _dump(spec)),
            )

    def archived(self) -> list[tuple[model.SandboxInfo, model.SandboxSpec]]:
        rows = self._query(
            "SELECT info, spec, owner FROM sandboxes WHERE phase = 'archived' AND spec IS NOT NULL"
        )
        found = [
            (
                msgspec.structs.replace(self._load(info, model.SandboxInfo), owner=owner),
                self._load(spec, model.SandboxSpec),
            )
            for info, spec, owner in rows
        ]
        return sorted(found, key=lambda pair: (pair[0].created_at, pair[0].id))

    def take_over(self, sandbox: str, owner: str, by: str) -> bool:
        with self._transaction("take_over") as db:
            done = db.execute(
                "UPDATE sandboxes SET owner = ? WHERE id = ? AND owner = ? AND phase = 'archived'",
                (by, sandbox, owner),
            )
            return done.rowcount == 1

    def sandboxes(self, *, live_only: bool = False, tenant: str | None = None) -> list[model.SandboxInfo]:
        """Oldest first; of every tenant unless one is named."""
        rows = self._query(
            """SELECT info FROM sandboxes
               WHERE (?1 IS NULL OR tenant = ?1) AND (NOT ?2 OR phase IN ('running', 'paused', 'archived'))""",
            (tenant, live_only),
        )
        found = [self._load(info, model.SandboxInfo) for (info,) in rows]
        return sorted(found, key=lambda info: (info.created_at, info.id))

    def sandbox(self, id_or_name: str, *, tenant: str = TENANT) -> model.SandboxInfo | None:
        """The sandbox of that id, else the live one of that name, else the one of that name that ended last."""
        rows = self._query(
            """SELECT info FROM sandboxes WHERE tenant = ? AND (id = ? OR name = ?)
               ORDER BY id = ? DESC, ended_at IS NULL DESC, ended_at DESC LIMIT 1""",
            (tenant, id_or_name, id_or_name, id_or_name),
        )
        return self._load(rows[0][0], model.SandboxInfo) if rows else None

    def mark_lost(self, owner_alive: Callable[[str], bool], now: float) -> list[model.SandboxInfo]:
        """Turn the live sandboxes of dead owners into lost ones, with an event each; those that were turned.

        `owner_alive` is asked once for each owner, and before the lock is taken: an owner is a process and its start
        time, so one that is dead stays dead.
        """
        rows = self._query("SELECT DISTINCT owner FROM sandboxes WHERE phase IN ('running', 'paused')")
        dead = [owner for (owner,) in rows if not owner_alive(owner)]
        if not dead:
            return []
        with self._transaction("mark_lost") as db:
            return [lost for owner in dead for lost in self._lose(db, owner, now)]

    def _lose(self, db: sqlite3.Connection, owner: str, now: float) -> list[model.SandboxInfo]:
        live = "SELECT info FROM sandboxes WHERE owner = ? AND phase IN ('running', 'paused') ORDER BY id"
        lost = []
        for (raw,) in db.execute(live, (owner,)).fetchall():
            reason = f"its engine (process {owner.partition(':')[0]}) ended without it; found at {_utc(now)}"
            info = msgspec.structs.replace(self._load(raw, model.SandboxInfo), phase="lost", reason=reason)
            db.execute(
                "UPDATE sandboxes SET phase = 'lost', ended_at = ?, info = ? WHERE id = ?",
                (now, _dump(info), info.id),
            )
            _insert(db, events.to_row(_lost(info, now)))
            lost.append(info)
        return lost

    # ── snapshots ──────────────────────────────────────────────────────────────────────────────

    def put_snapshot(self, info: stock.SnapshotInfo) -> None:
        with self._transaction("put_snapshot", f"there is a snapshot {info.name!r} already") as db:
            db.execute(
                "INSERT INTO snapshots (id, tenant, name, info) VALUES (?, ?, ?, ?)",
                (info.id, info.spec.tenant or TENANT, info.name, _dump(info)),
            )

    def snapshots(self, *, tenant: str | None = None) -> list[stock.SnapshotInfo]:
        from cloche import stock  # few commands ask for one

        rows = self._query("SELECT info FROM snapshots WHERE ?1 IS NULL OR tenant = ?1", (tenant,))
        found = [self._load(info, stock.SnapshotInfo) for (info,) in rows]
        return sorted(found, key=lambda info: (info.created_at, info.id))

    def delete_snapshot(self, snapshot: str) -> None:
        with self._transaction("delete_snapshot") as db:
            db.execute("DELETE FROM snapshots WHERE id = ?", (snapshot,))

    # ── what waits ─────────────────────────────────────────────────────────────────────────────

    def put_template(
        self, info: stock.TemplateInfo, if_version: str | None = None, *, tenant: str = TENANT
    ) -> None:
        """Insert or replace. With `if_version`, only that version is replaced (of several processes one wins)."""
        with self._transaction("put_template") as db:
            _match_version(db, tenant, info.spec.name, if_version)
            db.execute(
                "INSERT OR REPLACE INTO templates (tenant, name, version, info) VALUES (?, ?, ?, ?)",
                (tenant, info.spec.name, info.version, _dump(info)),
            )

    def template(self, name: str, *, tenant: str = TENANT) -> stock.TemplateInfo | None:
        found: stock.TemplateInfo | None = self._one(
            "SELECT info FROM templates WHERE tenant = ? AND name = ?", (tenant, name), "TemplateInfo"
        )
        return found

    def templates(self, *, tenant: str = TENANT) -> list[stock.TemplateInfo]:
        return self._all(
            "SELECT info FROM templates WHERE tenant = ? ORDER BY name", (tenant,), "TemplateInfo"
        )

    def delete_template(self, name: str, if_version: str | None = None, *, tenant: str = TENANT) -> None:
        with self._transaction("delete_template") as db:
            _match_version(db, tenant, name, if_version)
            db.execute("DELETE FROM templates WHERE tenant = ? AND name = ?", (tenant, name))

    def put_pool(self, info: stock.PoolInfo, *, tenant: str = TENANT) -> None:
        with self._transaction("put_pool") as db:
            db.execute(
                "INSERT OR REPLACE INTO pools (tenant, name, generation, info) VALUES (?, ?, ?, ?)",
                (tenant, info.name, info.generation, _dump(info)),
            )

    def pools(self, *, tenant: str = TENANT) -> list[stock.PoolInfo]:
        return self._all("SELECT info FROM pools WHERE tenant = ? ORDER BY name", (tenant,), "PoolInfo")

    def delete_pool(self, name: str, *, tenant: str = TENANT) -> None:
        with self._transaction("delete_pool") as db:
            db.execute("DELETE FROM pools WHERE tenant = ? AND name = ?", (tenant, name))

    def put_claim(self, info: stock.ClaimInfo, owner: str, phase: str, *, tenant: str = TENANT) -> None:
        """Insert, or move on. The name of another engine's live claim is `name_conflict`; so is a bound sandbox."""
        with self._transaction(f"put_claim_{phase}", f"sandbox {info.sandbox} is bound already") as db:
            row = db.execute(
                "SELECT owner FROM claims WHERE tenant = ? AND name = ? AND phase <> 'ended'",
                (tenant, info.name),
            ).fetchone()
            if row and row[0] != owner:
                raise errors.error(
                    "name_conflict",
                    f"the name {info.name!r} is taken by a claim of another engine (process {row[0].partition(':')[0]})",
                    hint="release it there, or choose another name",
                )
            db.execute("DELETE FROM claims WHERE tenant = ? AND name = ?", (tenant, info.name))
            db.execute(
                """INSERT INTO claims (tenant, name, owner, phase, sandbox, ended_at, info)
                   VALUES (?, ?, ?, ?, ?, ?, ?)""",
                (tenant, info.name, owner, phase, info.sandbox, info.finished_at, _dump(info)),
            )

    def claim(self, name: str, *, tenant: str = TENANT) -> stock.ClaimInfo | None:
        found: stock.ClaimInfo | None = self._one(
            "SELECT info FROM claims WHERE tenant = ? AND name = ?", (tenant, name), "ClaimInfo"
        )
        return found

    def claims(self, *, tenant: str = TENANT) -> list[stock.ClaimInfo]:
        return self._all("SELECT info FROM claims WHERE tenant = ? ORDER BY name", (tenant,), "ClaimInfo")

    def delete_claim(self, name: str, *, tenant: str = TENANT) -> None:
        with self._transaction("delete_claim") as db:
            db.execute("DELETE FROM claims WHERE tenant = ? AND name = ?", (tenant, name))

    def settle_claims(self, owner_alive: Callable[[str], bool], now: float) -> list[str]:
        """Of dead owners: what was being bound is undone, what was bound is finished, for its sandbox is gone."""
        rows = self._query("SELECT DISTINCT owner FROM claims WHERE phase <> 'ended'")
        dead = [owner for (owner,) in rows if not owner_alive(owner)]
        if not dead:
            return []
        settled = []
        with self._transaction("settle_claims") as db:
            for owner in dead:
                live = "SELECT tenant, name, phase, info FROM claims WHERE owner = ? AND phase <> 'ended'"
                for tenant, name, phase, raw in db.execute(live, (owner,)).fetchall():
                    settled.append(name)
                    if phase == "binding":
                        db.execute("DELETE FROM claims WHERE tenant = ? AND name = ?", (tenant, name))
                        continue
                    info = _finished(self._read_noun(raw, "ClaimInfo"), owner, now)
                    db.execute(
                        """UPDATE claims SET phase = 'ended', sandbox = NULL, ended_at = ?, info = ?
                           WHERE tenant = ? AND name = ?""",
                        (now, _dump(info), tenant, name),
                    )
        return settled

    def _one(self, statement: str, values: tuple[Any, ...], noun: str) -> Any:
        found = self._all(statement, values, noun)
        return found[0] if found else None

    def _all(self, statement: str, values: tuple[Any, ...], noun: str) -> list[Any]:
        return [self._read_noun(raw, noun) for (raw,) in self._query(statement, values)]

    def _read_noun(self, raw: bytes, noun: str) -> Any:
        from cloche import stock

        return self._load(raw, getattr(stock, noun))

    # ── volumes ────────────────────────────────────────────────────────────────────────────────

    def put_volume(self, info: stock.VolumeInfo) -> None:
        with self._transaction("put_volume", f"there is a volume {info.spec.name!r} already") as db:
            db.execute("INSERT INTO volumes (name, info) VALUES (?, ?)", (info.spec.name, _dump(info)))

    def volumes(self) -> list[stock.VolumeInfo]:
        from cloche import stock

        rows = self._query("SELECT info FROM volumes ORDER BY name")
        return [self._load(info, stock.VolumeInfo) for (info,) in rows]

    def delete_volume(self, name: str) -> None:
        with self._transaction("delete_volume") as db:
            db.execute("DELETE FROM volumes WHERE name = ?", (name,))

    # ── journal ────────────────────────────────────────────────────────────────────────────────

    def append_event(self, kind: str, sandbox: str | None, time: float, data: dict[str, Any]) -> int:
        """Append; the sequence number."""
        with self._transaction("append_event") as db:
            return _insert(db, events.Row(kind, sandbox, time, data))

    def record(self, happened: Iterable[events.AnyEvent]) -> list[int]:
        """Append several events in one transaction, all or none; their sequence numbers."""
        rows = [events.to_row(event) for event in happened]
        if not rows:
            return []
        with self._transaction("record") as db:
            return [_insert(db, row) for row in rows]

    def events(
        self, *, after: int = 0, sandbox: str | None = None, limit: int = 1000
    ) -> list[dict[str, Any]]:
        """Up to `limit` events beyond the cursor `after`, in order: `seq`, `kind`, `sandbox`, `time`, `data`.

        The `seq` of the last one is the next cursor. Numbers are given in commit order, so a follower that has seen
        one will never be passed by a smaller.
        """
        # Two statements, because only the plain comparison uses the index.
        if sandbox is None:
            rows = self._query(f"{_EVENTS} WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit))
        else:
            rows = self._query(
                f"{_EVENTS} WHERE sandbox = ? AND seq > ? ORDER BY seq LIMIT ?", (sandbox, after, limit)
            )
        return [
            {"seq": seq, "kind": kind, "sandbox": whose, "time": at, "data": msgspec.json.decode(data)}
            for seq, kind, whose, at, data in rows
        ]

    def last_seq(self) -> int:
        """The cursor that sees only what is still to come."""
        rows = self._query("SELECT seq FROM sqlite_sequence WHERE name = 'events'")
        return int(rows[0][0]) if rows else 0

    def prune(self, before: float) -> Pruned:
        """Forget events older than `before`, and sandboxes that ended before it."""
        with self._transaction("prune") as db:
            dropped = db.execute("DELETE FROM events WHERE time < ?", (before,)).rowcount
            ended = db.execute("DELETE FROM sandboxes WHERE ended_at < ?", (before,)).rowcount
            db.execute("DELETE FROM claims WHERE ended_at < ?", (before,))
        return Pruned(dropped, ended)

    def close(self) -> None:
        """Twice is harmless; the next use opens again."""
        with self._lock:
            if self._db is not None and self._pid == os.getpid():
                self._db.close()
            self._db = None

    # ── the connection ─────────────────────────────────────────────────────────────────────────

    def _query(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._lock, self._translated():
            return self._connection().execute(statement, values).fetchall()

    def check(self) -> None:
        """The lock that a write would take, and room for what it would write."""
        room = os.statvfs(os.path.dirname(self.path))
        if room.f_bavail * room.f_frsize < _LEAST_ROOM:
            raise errors.error("disk_full", f"the file system of {self.path} has no room", hint="free some")
        with self._lock, self._translated("the state is locked"):
            db = self._connection()
            db.execute("BEGIN IMMEDIATE")
            db.execute("ROLLBACK")
            if not os.path.exists(self.path):
                raise errors.error("state_corrupt", f"{self.path} was removed", hint="restart what uses it")

    @contextmanager
    def _transaction(
        self, act: str, conflict: str = "the row is there already"
    ) -> Iterator[sqlite3.Connection]:
        """One durable write, named for the tests that kill the process around it."""
        with self._lock, self._translated(conflict):
            db = self._connection()
            crash.point(f"{act}:before")
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
                crash.point(f"{act}:after")
            except BaseException:
                # SQLite has already rolled back after some failures (a full disk), and says so.
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _connection(self) -> sqlite3.Connection:
        if self._db is not None and self._pid != os.getpid():
            # A forked child must neither use nor close its parent's connection (closing could drop the parent's WAL).
            self._inherited.append(self._db)
            self._db = None
        if self._db is None:
            self._db = self._open()
            self._pid = os.getpid()
        return self._db

    def _open(self) -> sqlite3.Connection:
        import sqlite3

        _make_file(self.path)
        # Statements decide about transactions; the lock above serialises threads.
        db = sqlite3.connect(self.path, timeout=self._busy_s, isolation_level=None, check_same_thread=False)
        try:
            self._refuse_newer(db)
            _use_wal(db, self._busy_s)
            db.execute("PRAGMA synchronous = NORMAL")
            self._migrate(db)
        except BaseException:
            db.close()
            raise
        return db

    def _refuse_newer(self, db: sqlite3.Connection) -> None:
        version = _version(db)
        if version > VERSION:
            raise errors.error(
                "state_too_new",
                f"{self.path} was written by a newer Cloche (layout {version}; this one knows {VERSION})",
                hint="upgrade this Cloche, or set CLOCHE_HOME to another directory",
                version=version,
            )

    def _migrate(self, db: sqlite3.Connection) -> None:
        while (version := _version(db)) < VERSION:
            db.execute("BEGIN IMMEDIATE")
            try:
                crash.point("migrate:before")
                # Another process may have been faster.
                if _version(db) == version:
                    self._refuse_foreign(db, version)
                    for statement in _MIGRATIONS[version + 1]:
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {version + 1}")
                db.execute("COMMIT")
                crash.point("migrate:after")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _refuse_foreign(self, db: sqlite3.Connection, version: int) -> None:
        if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise self._corrupt("it is a database of another program")

    def _corrupt(self, cause: str) -> errors.ClocheError:
        return errors.error(
            "state_corrupt",
            f"the state file {self.path} cannot be used: {cause}",
            hint="end what uses it and move it away; only history is lost, nothing live is kept in it",
            path=self.path,
        )

    def _load(self, raw: bytes, kind: type[N]) -> N:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.ValidationError, msgspec.DecodeError):
            return self._load_leniently(raw, kind)

    def _load_leniently(self, raw: bytes, kind: type[N]) -> N:
        """A newer Cloche with the same layout may have added fields; they are not ours to read."""
        try:
            fields = msgspec.json.decode(raw, type=dict[str, Any])
            known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
            return msgspec.convert(known, kind)
        except (msgspec.ValidationError, msgspec.DecodeError) as problem:
            raise self._corrupt(f"a {kind.__name__} in it is unreadable: {problem}") from problem

    @contextmanager
    def _translated(self, conflict: str = "") -> Iterator[None]:
        """What SQLite and the file system report, as errors of ours."""
        import sqlite3

        try:
            yield
        except sqlite3.Error as problem:
            code = getattr(problem, "sqlite_errorcode", 0)  # misuse of the module itself has none
            if code in (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY):
                raise errors.error(
                    "name_conflict", conflict, hint="delete it first, or choose another"
                ) from problem
            raise self._meaning(problem, code) from problem
        except OSError as problem:
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._full() from problem
            raise self._unusable(problem.strerror or str(problem)) from problem

    def _meaning(self, problem: Exception, code: int) -> errors.ClocheError:
        import sqlite3

        match code & 0xFF:  # the rest of an extended code says where, not what
            case sqlite3.SQLITE_FULL:
                return self._full()
            case sqlite3.SQLITE_IOERR if _no_space(self.path):
                return self._full()
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return errors.error(
                    "state_locked",
                    f"{self.path} has been locked by another process for {self._busy_s:g} s",
                    hint="try again; if it stays so, see who holds it (fuser)",
                )
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return self._corrupt(str(problem))
            case (
                sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH
            ):
                return self._unusable(str(problem))
            case _:
                return errors.error("internal_error", f"the state file {self.path} failed: {problem}")

    def _full(self) -> errors.ClocheError:
        hint = "free some space, or set CLOCHE_HOME to a directory on another disk"
        return errors.error("disk_full", f"there is no space left for {self.path}", hint=hint)

    def _unusable(self, cause: str) -> errors.ClocheError:
        return errors.error(
            "settings_invalid",
            f"the state file {self.path} cannot be opened: {cause}",
            hint="check its permissions, or set CLOCHE_HOME to a directory of your own",
            path=self.path,
        )


def _make_file(path: str) -> None:
    """Make the file for its owner alone; SQLite gives its side files the same mode."""
    if path == ":memory:":
        return
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    try:
        # Not opened if it exists: closing any descriptor of a file drops this process's POSIX locks on it, and
        # those are what another Store of this process relies on.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if os.stat(path).st_mode & 0o077:
            os.chmod(path, 0o600)


def _use_wal(db: sqlite3.Connection, busy_s: float) -> None:
    """Switch to WAL. SQLite does not wait for its lock here if several processes make the file at once, so we do."""
    import sqlite3

    deadline = time.monotonic() + busy_s
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as problem:
            busy = getattr(problem, "sqlite_errorcode", 0) & 0xFF in (
                sqlite3.SQLITE_BUSY,
                sqlite3.SQLITE_LOCKED,
            )
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _insert(db: sqlite3.Connection, row: events.Row) -> int:
    done = db.execute(
        "INSERT INTO events (kind, sandbox, time, data) VALUES (?, ?, ?, ?)",
        (row.kind, row.sandbox, row.time, _dump(row.data)),
    )
    assert done.lastrowid is not None
    return done.lastrowid


def _dump(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # a host path that is not UTF-8
        return msgspec.json.encode(_printable(msgspec.to_builtins(value)))


def _printable(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_printable(key): _printable(item) for key, item in value.items()}
        case list() | tuple():
            return [_printable(item) for item in value]
        case _:
            return value


def _lost(info: model.SandboxInfo, now: float) -> events.Lost:
    return events.Lost(
        sandbox=info.id, time=now, actor="sweeper", reason=info.reason or "lost", owner=info.owner
    )


def _finished(info: stock.ClaimInfo, owner: str, now: float) -> stock.ClaimInfo:
    from cloche.lifecycle import claims, conditions

    words = f"its engine (process {owner.partition(':')[0]}) ended; found at {_utc(now)}"
    told = conditions.settle(claims.finished("lost", words), info.conditions, now)
    return msgspec.structs.replace(info, sandbox=None, finished_at=now, conditions=told)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _no_space(path: str) -> bool:
    try:
        disk = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return False
    return disk.f_bavail == 0 or disk.f_favail == 0


def _match_version(db: sqlite3.Connection, tenant: str, name: str, wanted: str | None) -> None:
    if wanted is None:
        return
    row = db.execute("SELECT version FROM templates WHERE tenant = ? AND name = ?", (tenant, name)).fetchone()
    found = row[0] if row else ""
    if wanted != found:
        raise errors.error(
            "version_conflict",
            f"the template {name!r} has version {found or 'none'}, not {wanted}",
            hint="look at it again, and put your change on top",
        )
