"""Probes need no key, tell nothing, and look at something that can be wrong."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import httpx
import pytest

from cloche import errors, model, store, wiring
from tests.engine.test_pools import Bench
from tests.server import conftest


@pytest.fixture
def own():
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        made = conftest.serve(Path(home))
        try:
            yield made
        finally:
            if made.process.poll() is None:
                conftest.stop(made)


def probe(served: conftest.Served, path: str) -> httpx.Response:
    with httpx.Client(base_url=served.url, trust_env=False, timeout=50) as stranger:
        return stranger.get(path)


def test_a_dead_launcher_is_started_again_before_anybody_is_sent_here(tmp_path):
    async def attempt() -> None:
        engine = wiring.make_engine(
            {"CLOCHE_HOME": str(tmp_path / "h"), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        )
        try:
            await engine.check_ready()
            driver = engine._placement.started[0]
            first = driver._link  # type: ignore[attr-defined]
            box = await engine.create(model.SandboxSpec())
            inside = engine.machine_of(box.id).host_pid  # type: ignore[attr-defined]
            stat = Path(f"/proc/{inside}/stat").read_text()
            os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
            while driver.alive:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            await engine.check_ready()
            assert driver.alive  # type: ignore[attr-defined]
            assert driver._link is not first  # type: ignore[attr-defined]
            again = await engine.create(model.SandboxSpec())
            assert (await engine.exec(again.id, model.ExecRequest(command="true"))).exit_code == 0
        finally:
            await engine.aclose()

    asyncio.run(asyncio.wait_for(attempt(), 50))


def test_a_state_that_is_gone_is_not_ready_and_the_answer_tells_no_path(own):
    assert probe(own, "/healthz").json()["status"] == "ok"
    assert probe(own, "/readyz").status_code == 200
    database = own.home / "s/state.db"
    database.rename(own.home / "s/away.db")
    answer = probe(own, "/readyz")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server_unavailable"
    assert str(own.home) not in answer.text
    assert probe(own, "/healthz").status_code == 200
    (own.home / "s/away.db").rename(database)
    assert probe(own, "/readyz").status_code == 200


def test_a_store_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    kept = store.Store(str(tmp_path / "state.db"))
    kept.check()
    monkeypatch.setattr(store, "_LEAST_ROOM", 1 << 62)
    with pytest.raises(errors.CapacityExceeded) as caught:
        kept.check()
    assert caught.value.code == "disk_full"
    kept.close()


def test_a_closed_engine_is_not_ready(tmp_path):
    async def attempt() -> None:
        async with Bench(tmp_path) as bench:
            await bench.engine.check_ready()
        with pytest.raises(errors.ServerUnavailable):
            await bench.engine.check_ready()

    asyncio.run(attempt())
