"""A process that dies before or after any durable write leaves a state that the next start makes whole.

The points are found in the source. Each is died at, in a process of its own that lives through everything that an engine
writes; then another engine starts on what is left, and the promises are looked at: no sandbox granted twice, none lost without
a word, no pool over its size, a half-done claim undone or finished, everything readable. A write without points fails the first test.
"""

import ast
import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloche import engine as engines
from cloche import model, settings, stock, store, wiring, workspaces
from cloche.engine import reaping
from cloche.testing import fakes

SOURCE = Path(store.__file__).parent
PHASES = ("binding", "bound", "ended")

# Writes to files, by who makes sure that they survive a crash: each is a rename of something whole, or is looked through by its
# owner's sweep. What is written to SQLite is found below.
ELSEWHERE = {
    "audit": "an append-only chain with a recovery of its own: tests/audit",
    "cli/copying.py": "the user's own files on the host",
    "cli/keeper.py": "the keeper's log",
    "drivers/keeping.py": "moved into place whole; half-made ones are swept: tests/engine/test_snapshots.py",
    "drivers/supervising.py": "inside a sandbox",
    "engine/archiving.py": "moved into place whole; the row decides: tests/engine/test_archiving.py",
    "engine/snapshots.py": "moved into place whole; the row decides: tests/engine/test_snapshots.py",
    "engine/volumes.py": "moved into place whole; the row decides: tests/engine/test_volumes.py",
    "guest": "inside a sandbox",
    "images": "a cache: moved into place whole, by content",
    "linux": "primitives; whoever calls them answers",
    "mcp/clients.py": "the user's own files on the host, replaced whole",
    "secrets/vault.py": "one file, replaced whole: tests/secrets",
    "server/http/answers.py": "lines that are appended, a cut one is skipped; replaced whole: tests/server/test_leaving.py",
    "server/keys.py": "one file, replaced whole: tests/server",
    "settings.py": "one file, replaced whole",
    "testing": "for tests",
    "workspaces": "the user's own files on the host; stubs are swept: tests/workspaces",
}
_RENAMES = {"replace", "rename", "link", "fsync"}


# ── what there is ──────────────────────────────────────────────────────────────────────────────────


def transactions():
    """The names of all durable writes of the store, from its source."""
    for node in ast.walk(ast.parse((SOURCE / "store.py").read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "_transaction"
        ):
            yield node


def names(call):
    first: Any = call.args[0] if call.args else None
    if isinstance(first, ast.Constant):
        return [first.value]
    if isinstance(first, ast.JoinedStr):  # the one that says the phase
        return [f"{ast.literal_eval(first.values[0])}{phase}" for phase in PHASES]
    return []


WRITES = sorted([name for call in transactions() for name in names(call)] + ["migrate"])
POINTS = [f"{write}:{when}" for write in WRITES for when in ("before", "after")]


def test_every_durable_write_has_its_points():
    unnamed = [call.lineno for call in transactions() if not names(call)]
    assert unnamed == [], f"store.py: transactions without a name, in lines {unnamed}"
    assert len(set(WRITES)) == len(WRITES)
    assert set(WRITES) == set(SCENES), "a write that no scene below passes"


def test_sqlite_is_written_inside_of_transactions_only():
    tree = ast.parse((SOURCE / "store.py").read_text())
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any("_transaction" in ast.unparse(item) for item in node.items):
            inside |= {id(child) for child in ast.walk(node)}
        if isinstance(node, ast.FunctionDef) and any(a.arg == "db" for a in node.args.args):
            inside |= {id(child) for child in ast.walk(node)}  # a part of one, or the opening of the file
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "execute"
        ):
            said = ast.unparse(node.args[0]).lstrip("f'\"").upper()
            if said.startswith(("INSERT", "UPDATE", "DELETE", "REPLACE", "CREATE", "DROP", "ALTER")):
                assert id(node) in inside, f"store.py:{node.lineno} writes outside of a transaction"


def test_files_are_moved_into_place_only_where_somebody_answers_for_it():
    unanswered = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = str(path.relative_to(SOURCE))
        calls = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "os"
            and node.func.attr in _RENAMES
        ]
        if calls and not any(place == known or place.startswith(f"{known}/") for known in ELSEWHERE):
            unanswered.append(place)
    assert unanswered == [], "say in ELSEWHERE what becomes of these after a crash, or give them crash points"


# ── a life, in a process that dies ─────────────────────────────────────────────────────────────────

LIFE = """
import asyncio, os, sys, time
sys.path[:0] = {path!r}
from cloche import crash, model, stock
from tests import test_crash

async def main():
    made = await test_crash.open_engine({home!r})
    crash.arm({point!r})
    await test_crash.live(made)
    print("survived")

asyncio.run(main())
"""


async def open_engine(home):
    config = settings.Settings(home=home)
    settings.make_home(config.home)
    driver = fakes.FakeDriver()
    made = engines.Engine(
        config,
        store.Store(config.state_path),
        [("fake", lambda: driver)],
        owner=wiring.owner(),
        interpreters=wiring.interpreters(),
        workspaces=workspaces.LocalWorkspaces(config.home, os.environ),
        egress=lambda: wiring.egress(config),
        policies=settings.PolicyFiles(config, {"HOME": home}),
    )
    made.driver = driver  # type: ignore[attr-defined]
    return made


async def live(engine):
    """Everything that is ever written, in one life."""
    records = engine._store
    await engine.put_template(stock.TemplateSpec(name="data", env={"A": "1"}))
    await engine.put_pool(stock.PoolSpec(template="data", size=3, stay=True))
    await engine.wait_pool("data")
    first = await engine.claim(stock.ClaimSpec(pool="data", name="first", stay=True))
    await engine.claim(stock.ClaimSpec(pool="data", name="second", timeout_s=0.01, shutdown_policy="Retain"))
    async with asyncio.timeout(20):  # the second one's sandbox expires
        while (await engine.claim_info("second")).sandbox is not None:
            await asyncio.sleep(0.005)
    await engine.events()  # what happened is written
    dead = "999999:1"
    info = await engine.info(first.sandbox)
    import msgspec

    orphan = msgspec.structs.replace(info, id="o" * 20, name=None, owner=dead)
    records.put_sandbox(orphan)
    records.put_claim(msgspec.structs.replace(first, name="half", sandbox="h" * 20), dead, "binding")
    records.put_claim(msgspec.structs.replace(first, name="whole", sandbox="w" * 20), dead, "bound")
    records.mark_lost(lambda owner: owner != dead, 1.0)
    records.settle_claims(lambda owner: owner != dead, 1.0)
    archived = msgspec.structs.replace(info, id="a" * 20, name=None, phase="archived", owner=dead)
    records.put_sandbox(archived, engine._sandboxes[first.sandbox].spec)
    records.take_over("a" * 20, dead, engine.owner)
    snapshot = stock.SnapshotInfo(
        id="s" * 20, name="snap", sandbox=info.id, created_at=1.0, size_bytes=1, files=1, template="data",
        spec=engine._sandboxes[first.sandbox].spec,
    )  # fmt: skip
    records.put_snapshot(snapshot)
    records.delete_snapshot("s" * 20)
    limit = model.Limit(value=1, enforcement="none", by="nobody")
    records.put_volume(
        stock.VolumeInfo(spec=stock.VolumeSpec(name="v"), created_at=1.0, used_bytes=0, limit=limit)
    )
    records.delete_volume("v")
    records.append_event("tested", None, 1.0, {})
    records.prune(0.5)
    await engine.release_claim("first")
    await engine.delete_pool("data")
    await engine.delete_template("data")


SCENES = {
    "append_event",
    "delete_claim",
    "delete_pool",
    "delete_snapshot",
    "delete_template",
    "delete_volume",
    "mark_lost",
    "migrate",
    "prune",
    "put_claim_binding",
    "put_claim_bound",
    "put_claim_ended",
    "put_pool",
    "put_sandbox",
    "put_snapshot",
    "put_template",
    "put_volume",
    "record",
    "settle_claims",
    "take_over",
}  # fmt: skip


def die_at(point, home):
    root = Path(__file__).parents[1]
    program = LIFE.format(path=[str(root), str(root / "src")], home=str(home), point=point)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    return done.returncode, done.stdout + done.stderr


def test_without_a_crash_it_is_a_whole_life(tmp_path):
    code, said = die_at("nowhere", tmp_path / "home")
    assert (code, said) == (0, "survived\n"), said[-2000:]


@pytest.mark.parametrize("point", POINTS)
def test_dying_there_leaves_nothing_that_the_next_start_does_not_settle(point, tmp_path):
    home = tmp_path / "home"
    code, said = die_at(point, home)
    assert code == -signal.SIGKILL, f"{point} was not passed: {said[-2000:]}"
    asyncio.run(look(str(home)))
    asyncio.run(look(str(home)))  # and once more: settling twice is settling once


async def look(home):
    engine = await open_engine(home)
    try:
        await engine.host()
        engine._store.mark_lost(reaping.owner_lives, 2.0)
        live_sandboxes = [
            info for info in engine._store.sandboxes(live_only=True) if info.phase != "archived"
        ]
        assert live_sandboxes == [], "what was live is lost, with a reason"
        assert all(info.reason for info in engine._store.sandboxes() if info.phase == "lost")
        claims = await engine.claims()
        bound = [claim.sandbox for claim in claims if claim.sandbox is not None]
        assert bound == [], "nothing live survives its engine"
        for claim in claims:
            assert claim.finished_at is not None, claim
            assert {c.type: c.status for c in claim.conditions} == {"Ready": "False", "Finished": "True"}
        assert "half" not in {claim.name for claim in claims}, "a half-done binding is undone"
        known = {info.spec.name for info in await engine.templates()}
        for pool in await engine.pools():
            assert pool.spec.template in known
            full = await engine.wait_pool(pool.name, timeout_s=30)
            assert full.ready == full.size == 3
            live = [machine for machine in engine.driver.machines if not machine.ended.done()]
            assert len(live) == 3, "no pool over its size"
            again = await engine.claim(stock.ClaimSpec(pool=pool.name, name="first", stay=True))
            assert again.warm
            assert await engine.claim(stock.ClaimSpec(pool=pool.name, name="first", stay=True)) == again
            await engine.release_claim("first")
        await engine.events()
    finally:
        await engine.aclose()
