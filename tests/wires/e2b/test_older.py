"""Older SDKs: the paths, headers and bodies that they still send."""

from collections.abc import Iterator

import httpx
import pytest

from tests.server import conftest as server
from tests.wires.e2b.conftest import Client, Raised, client_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture(scope="module", params=["2.45", "2.31"])
def older(request: pytest.FixtureRequest, served: server.Served) -> Iterator[tuple[str, Client]]:
    made = client_of(request.param, served)
    try:
        made("import e2b\nfrom e2b_code_interpreter import Sandbox")
        yield request.param, made
    finally:
        made.close()


def test_an_older_client(older: tuple[str, Client], http: httpx.Client) -> None:
    pair, program = older
    box = program("box = Sandbox.create(timeout=600, metadata={'older': 'yes'}); answer = box.sandbox_id")
    with pytest.raises(Raised) as slow:
        program("box.commands.run('sleep 300', timeout=1)")
    assert slow.value.name == "TimeoutException"
    assert program("answer = box.commands.run('echo hi').stdout") == "hi\n"
    program("box.files.write('a/b', 'x'); box.files.make_dir('d'); box.files.rename('a/b', 'd/c')")
    there = http.get(f"/v1/sandboxes/{box}/files", params={"path": "/home/user/d/c"})
    assert there.text == "x"
    told = program(
        "h = box.commands.run('cat', background=True, stdin=True); box.commands.send_stdin(h.pid, 'y\\n'); answer = h.pid"
    )
    assert isinstance(told, int)
    assert program("answer = box.commands.kill(h.pid)") is True
    watched = program("""
        import time
        w = box.files.watch_dir("d"); box.files.write("d/new", "x")
        found, deadline = [], time.monotonic() + 40
        while not found and time.monotonic() < deadline:
            found += [e.name for e in w.get_new_events()]
        w.stop(); answer = found
    """)
    assert watched[0] == "new"
    assert program(
        "answer = [s.sandbox_id for s in Sandbox.list().next_items() if s.metadata.get('older')]"
    ) == [box]
    assert (
        program(
            "box.beta_pause(); again = Sandbox.connect(box.sandbox_id, timeout=600); answer = again.commands.run('echo back').stdout"
        )
        == "back\n"
    )
    if pair == "2.45":
        assert program("box.run_code('x = 41'); answer = box.run_code('x + 1').text") == "42"
    assert program("answer = box.kill()") is True
    assert http.get(f"/v1/sandboxes/{box}").status_code in (404, 410)
