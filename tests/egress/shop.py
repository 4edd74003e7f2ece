"""A registry of everything on one HTTPS server: a wheel, an npm package, a Go module, a crate, a git repository, a Debian
package. What real package managers fetch, made here, so that nothing leaves this machine."""

import base64
import gzip
import hashlib
import http.server
import io
import json
import os
import ssl
import subprocess
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HOST = "shop.test"


class Shop(http.server.ThreadingHTTPServer):
    """Serves `pages` (path → body) and, below /git/, a repository through git's own CGI."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, repositories: Path, context: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.context = context
        self.pages: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def get_request(self) -> Any:
        client, peer = super().get_request()
        if self.context is not None:
            client.settimeout(30)
            client = self.context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        return client, peer

    def handle_error(self, *_: object) -> None: ...

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(5)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Shop
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append((self.headers.get("Host", ""), self.path))
        path = urlsplit(self.path).path
        if path.startswith("/git/"):
            self._git()
            return
        path = path.replace("/./", "/")
        body = self.server.pages.get(path) or self.server.pages.get(path.rstrip("/"))
        self.send_response(200 if body is not None else 404)
        self.send_header("Content-Length", str(len(body or b"")))
        if path.startswith("/simple"):
            self.send_header("Content-Type", "text/html")
        elif path.startswith("/npm") and not path.endswith(".tgz"):
            self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body or b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.server.asked.append((self.headers.get("Host", ""), self.path))
        self._git()

    def _git(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        env = {
            "GIT_PROJECT_ROOT": str(self.server.repositories), "GIT_HTTP_EXPORT_ALL": "1", "PATH": os.environ["PATH"],
            "PATH_INFO": parts.path.removeprefix("/git"), "QUERY_STRING": parts.query, "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""), "CONTENT_LENGTH": str(len(body)),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""), "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }  # fmt: skip
        done = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True, check=False)
        head, _, rest = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line)
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest)

    def log_message(self, *_: object) -> None: ...


def stock(shop: Shop, scratch: Path) -> None:
    """Put one package of each kind on the shelves."""
    _wheel(shop)
    _npm(shop)
    _go(shop)
    _crate(shop)
    _debian(shop, scratch)
    _repository(shop, scratch)
    shop.pages["/hello.txt"] = b"hello from the shop\n"


def _zip(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def _tgz(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _wheel(shop: Shop) -> None:
    name = "glass-1.0-py3-none-any.whl"
    info = "glass-1.0.dist-info"
    files = {
        "glass.py": "SAYS = 'wheel'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: glass\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    shop.pages["/simple/glass"] = f'<a href="/wheels/{name}">{name}</a>'.encode()
    shop.pages[f"/wheels/{name}"] = _zip(files)


def _npm(shop: Shop) -> None:
    tarball = _tgz(
        {
            "package/package.json": '{"name":"glass","version":"1.0.0","main":"index.js"}',
            "package/index.js": "module.exports='npm'",
        }
    )
    digest = base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    shop.pages["/npm/glass/-/glass-1.0.0.tgz"] = tarball
    shop.pages["/npm/glass"] = json.dumps(
        {
            "name": "glass", "dist-tags": {"latest": "1.0.0"},
            "versions": {"1.0.0": {"name": "glass", "version": "1.0.0", "dist": {
                "tarball": f"https://{HOST}/npm/glass/-/glass-1.0.0.tgz", "integrity": f"sha512-{digest}",
            }}},
        }
    ).encode()  # fmt: skip


def _go(shop: Shop) -> None:
    module, version = f"{HOST}/glass", "v1.0.0"
    shop.pages[f"/go/{module}/@v/list"] = f"{version}\n".encode()
    shop.pages[f"/go/{module}/@v/{version}.info"] = json.dumps({"Version": version}).encode()
    shop.pages[f"/go/{module}/@v/{version}.mod"] = f"module {module}\n\ngo 1.20\n".encode()
    shop.pages[f"/go/{module}/@v/{version}.zip"] = _zip(
        {
            f"{module}@{version}/go.mod": f"module {module}\n\ngo 1.20\n",
            f"{module}@{version}/glass.go": 'package glass\n\nfunc Says() string { return "go" }\n',
        }
    )


def _crate(shop: Shop) -> None:
    crate = _tgz(
        {
            "glass-1.0.0/Cargo.toml": '[package]\nname = "glass"\nversion = "1.0.0"\nedition = "2021"\n',
            "glass-1.0.0/src/lib.rs": "",
        }
    )
    shop.pages["/crates/config.json"] = json.dumps(
        {"dl": f"https://{HOST}/dl/{{crate}}-{{version}}.crate"}
    ).encode()
    shop.pages["/dl/glass-1.0.0.crate"] = crate
    entry = {
        "name": "glass", "vers": "1.0.0", "deps": [], "features": {}, "yanked": False,
        "cksum": hashlib.sha256(crate).hexdigest(),
    }  # fmt: skip
    shop.pages["/crates/gl/as/glass"] = json.dumps(entry).encode() + b"\n"


def _debian(shop: Shop, scratch: Path) -> None:
    root = scratch / "glass-deb"
    (root / "DEBIAN").mkdir(parents=True)
    control = "Package: glass\nVersion: 1.0\nArchitecture: all\nMaintainer: test <t@shop.test>\nDescription: glass\n"
    (root / "DEBIAN/control").write_text(control)
    built = scratch / "glass_1.0_all.deb"
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", str(root), str(built)], check=True, capture_output=True
    )
    data = built.read_bytes()
    index = (
        control
        + f"Filename: ./glass_1.0_all.deb\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n\n"
    ).encode()
    shop.pages["/apt/glass_1.0_all.deb"] = data
    shop.pages["/apt/Packages"] = index
    shop.pages["/apt/Release"] = (
        f"Date: Sat, 01 Jan 2022 00:00:00 UTC\nSHA256:\n {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
    ).encode()


def _repository(shop: Shop, scratch: Path) -> None:
    work, bare = scratch / "glass-work", shop.repositories / "glass.git"
    env = {
        "PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(scratch),
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@shop.test", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@shop.test",
    }  # fmt: skip

    def git(*words: str) -> None:
        subprocess.run(["git", *words], env=env, check=True, capture_output=True)

    git("init", "-q", str(work))
    (work / "README").write_text("git\n")
    git("-C", str(work), "add", "README")
    git("-C", str(work), "commit", "-q", "-m", "one")
    git("clone", "-q", "--bare", str(work), str(bare))
    git("-C", str(bare), "config", "http.receivepack", "true")
