"""Terminals by WebSocket: who is refused, what passes, and that leaving stops nothing."""

import json
from contextlib import suppress

import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from tests.server import conftest


class Terminal:
    def __init__(self, served, box, execution):
        self.at = f"{served.url.replace('http', 'ws', 1)}/v1/sandboxes/{box}/executions/{execution}/terminal"
        self.key = served.key

    def open(self, after=0, key=None, query=None, **headers):
        given = {"Authorization": f"Bearer {key or self.key}", **headers}
        where = f"{self.at}?{query or f'after={after}'}"
        return connect(where, additional_headers=given, open_timeout=conftest.PATIENCE_S)


@pytest.fixture
def terminal(served, http, box):
    def start(command, **more):
        body = {"command": command, "pty": [80, 24], **more}
        made = http.post(f"/v1/sandboxes/{box}/executions", json=body).raise_for_status().json()
        return Terminal(served, box, made["id"])

    return start


def until(link, words):
    """Read until the words have come: what came, and how many messages that were."""
    said, count = b"", 0
    while words not in said:
        piece = link.recv()
        assert isinstance(piece, bytes), piece
        said, count = said + piece, count + 1
    return said, count


def ending(link):
    """The last words, and the code of the close."""
    said = []
    with suppress(ConnectionClosedError):
        said.extend(iter(link))
    return json.loads(said[-1]), link.close_code


def refused(action):
    with pytest.raises(InvalidStatus) as caught:
        action()
    return caught.value.response.status_code, json.loads(caught.value.response.body)["error"]["code"]


def test_who_may_not_run_commands_sees_no_terminal(served, terminal, box):
    found = terminal("sleep 100")
    key = served.cloche("key", "create", "no-exec", "--scope", "ports", "--scope", "sandboxes").stdout.strip()
    assert refused(lambda: found.open(key="cl_" + "0" * 40)) == (401, "key_refused")
    assert refused(lambda: found.open(key=key)) == (403, "scope_missing")
    red = served.cloche(
        "key", "create", "terminal-of-red", "--tenant", "red", "--role", "runner"
    ).stdout.strip()
    assert refused(lambda: found.open(key=red)) == (404, "sandbox_not_found")
    assert refused(lambda: found.open(Origin="https://evil.example")) == (403, "peer_refused")
    assert refused(lambda: found.open(query="after=x")) == (400, "argument_invalid")
    assert refused(lambda: Terminal(served, box, "nobody").open()) == (404, "execution_not_found")
    assert refused(lambda: Terminal(served, "x" * 20, "nobody").open()) == (404, "sandbox_not_found")


def test_what_makes_no_sense_is_told_and_ends_nothing(terminal):
    found = terminal("cat")
    with found.open() as link:
        for nonsense in ("x", "[]", '{"resise": {}}', '{"resize": {"columns": 1}}', '{"signal": 99}'):
            link.send(nonsense)
            said = json.loads(link.recv())
            assert said["error"]["code"] in ("argument_invalid", "signal_unknown"), nonsense
        link.send(b"still here\r")
        until(link, b"still here\r\nstill here")


def test_a_terminal_types_shows_resizes_signals_and_ends(terminal):
    found = terminal('stty -echo; while read line; do echo "[$line] $(stty size)"; done')
    with found.open() as link:
        link.send(json.dumps({"resize": {"columns": 132, "rows": 43}}))
        link.send("hällo\r".encode())
        assert "[hällo] 43 132".encode() in until(link, b"132")[0]
        link.send(json.dumps({"end": True}))
        last, code = ending(link)
    assert (last["exit"]["exit_code"], code) == (0, 1000)
    found = terminal("sleep 100")
    with found.open() as link:
        link.send(json.dumps({"signal": 15}))
        last, code = ending(link)
    assert (last["exit"]["signal"], code) == (15, 1000)


def test_who_leaves_stops_nothing_and_goes_on_where_it_was(terminal):
    found = terminal("stty -echo; echo one; read a; echo two $a; read b; echo three $b")
    with found.open() as link:
        _, count = until(link, b"one")
    with found.open(after=count) as link:
        link.send(b"x\r")
        said, more = until(link, b"two x")
        assert b"one" not in said
    with found.open(after=count + more) as link, found.open() as second:
        link.send(b"y\r")
        assert b"two" not in until(link, b"three y")[0]
        assert ending(link)[0]["exit"]["exit_code"] == 0
        assert b"two x" in until(second, b"three y")[0]  # another one sees all of it
    with found.open() as link:
        until(link, b"three y")
        assert ending(link)[0]["exit"]["exit_code"] == 0


def test_a_sandbox_that_ends_is_told(terminal, http, box):
    found = terminal("echo here; sleep 100")
    with found.open() as link:
        until(link, b"here")
        http.delete(f"/v1/sandboxes/{box}")
        last, code = ending(link)
    assert "exit" in last or last["error"]["code"] == "sandbox_lost"
    assert code in (1000, 4410)
