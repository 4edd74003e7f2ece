"""What an ordinary user's sandboxes do beyond the contract suite, as JSON. Each entry is a refusal and its permitted twin."""

import http.server
import json
import sys
import threading

from cloche import ClocheError, Sandbox, Volume


class Neighbour(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"hi")

    def log_message(self, format: str, *args: object) -> None:
        pass


def network() -> list[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Neighbour) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        fetch = f"curl -s -m 20 http://a.test:{port}/ || true"
        pinned = {f"a.test:{port}": f"127.0.0.1:{port}"}
        with Sandbox(allow=["b.test"], resolve=pinned) as box:
            refused = box.exec(fetch)
        with Sandbox(allow=[f"a.test:{port}"], resolve=pinned) as box:
            allowed = box.exec(fetch)
        with Sandbox() as box:
            before = box.exec(fetch)
            box.policy.update(allow=[f"a.test:{port}"], resolve=pinned)
            after = box.exec(fetch)
        server.shutdown()
    return [refused.denials[0].target if refused.denials else "", allowed.stdout, before.stdout, after.stdout]


def snapshots() -> list[str]:
    with Sandbox() as box:
        box.files.write("a.txt", "one")
        kept = box.snapshot()
        box.files.write("a.txt", "two")
        forked = box.fork(1)[0]
        box.restore(kept)
        found = [box.files.read("a.txt"), forked.files.read("a.txt")]
        forked.delete()
    return found


def volumes() -> list[str]:
    Volume.create("kept", size_mib=16)
    with Sandbox(volumes={"/data": "kept"}) as box:
        box.exec("echo stays > /data/a.txt", check=True)
    with Sandbox(volumes={"/data": "kept:ro"}) as box:
        found = [box.exec("cat /data/a.txt").stdout, box.exec("echo x > /data/b.txt").stderr]
    Volume.get("kept").delete()
    return found


def ports() -> list[str]:
    with Sandbox() as box:
        try:
            box.connect(8000)
            refused = ""
        except ClocheError as problem:
            refused = problem.code
        serve = "import http.server as h; s = h.HTTPServer(('::1', 8000), h.SimpleHTTPRequestHandler)"
        box.start(
            ["python3", "-Ic", "import socket, http.server as h; h.HTTPServer.address_family = socket.AF_INET6; "
             + serve + "; s.serve_forever()"]
        )  # fmt: skip
        while not box.ports():
            pass
        with box.connect(8000) as tunnel:
            tunnel.write("HEAD / HTTP/1.0\r\n\r\n")
            return [refused, tunnel.read(12).decode()]


json.dump(
    {"network": network(), "snapshots": snapshots(), "volumes": volumes(), "ports": ports()}, sys.stdout
)
