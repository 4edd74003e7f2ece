"""Clients that find a sandbox's ports by host name over TLS only, as code-interpreter 2.8 does: with a terminator and a wildcard name before us.

The terminator is this test's; so is the wildcard, a few lines in the client's program where a name service would be. The client itself
is unmodified.
"""

import contextlib
import selectors
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.egress import room
from tests.server import conftest as server
from tests.wires.e2b.conftest import client_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
DOMAIN = "boxes.test"
NAMES = f"""
import socket
_asked = socket.getaddrinfo
def getaddrinfo(host, *rest, **more):
    text = host.decode() if isinstance(host, bytes) else host
    return _asked("127.0.0.1" if text.endswith({DOMAIN!r}) else host, *rest, **more)
socket.getaddrinfo = getaddrinfo
"""


@contextlib.contextmanager
def terminated(target: int, directory: Path) -> Iterator[tuple[int, Path]]:
    """TLS on a port of its own, bytes to ours; the port, and the authority to trust."""
    cert, key = room.certificate(directory, DOMAIN, f"*.{DOMAIN}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=relay, args=(raw,), daemon=True).start()

    def relay(raw: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            context.wrap_socket(raw, server_side=True) as near,
            socket.create_connection(("127.0.0.1", target)) as far,
            selectors.DefaultSelector() as ready,
        ):
            ready.register(near, selectors.EVENT_READ, far)
            ready.register(far, selectors.EVENT_READ, near)
            while True:
                for one, _ in ready.select():
                    if not moved(one.fileobj, one.data):
                        return

    def moved(source: Any, sink: Any) -> bool:
        """Everything that has come; False at its end."""
        while True:
            data = source.recv(65536)
            sink.sendall(data)
            if not data:
                return False
            if not (isinstance(source, ssl.SSLSocket) and source.pending()):
                return True

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], cert
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_code_interpreter_2_8(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        served = server.serve(Path(home), settings=f'[server]\nhosts = ["{DOMAIN}"]\n')
        try:
            with terminated(urlsplit(served.url).port or 0, tmp_path) as (port, authority):
                url = f"https://{DOMAIN}:{port}"
                program = client_of(
                    "2.31",
                    served,
                    variables={"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "SSL_CERT_FILE": str(authority)},
                )
                try:
                    program(NAMES + "import e2b\nfrom e2b_code_interpreter import Sandbox")
                    box = program("box = Sandbox.create(timeout=600)\nanswer = box.sandbox_id")
                    assert program("answer = box.get_host(49999)") == f"49999-{box}.{DOMAIN}:{port}"
                    assert program("answer = box.commands.run('echo hi').stdout") == "hi\n"
                    assert program("box.run_code('x = 41'); answer = box.run_code('x + 1').text") == "42"
                    made = program("c = box.create_code_context(cwd='/tmp'); answer = c.id")
                    with served.client() as http:
                        ours = http.get(f"/v1/sandboxes/{box}/contexts").json()["contexts"]
                    assert made in [one["id"] for one in ours]
                    assert program("answer = box.kill()") is True
                finally:
                    program.close()
            plain = httpx.get(f"{served.url}/health", headers={"Host": "other.test"}, trust_env=False)
            assert plain.status_code == 403  # a name that nobody gave us
        finally:
            assert server.stop(served) == 0
