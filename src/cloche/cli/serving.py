"""`cloche serve`: the keeper's socket and HTTP on one engine, in the foreground, until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import resource
import shlex
import socket
import sys
from contextlib import suppress

import msgspec

from cloche import errors, measures, settings, wiring
from cloche.cli import keeper as process
from cloche.drivers import spawning
from cloche.mcp.http import HttpFace
from cloche.server import keeper, keys, tokens
from cloche.server.leaving import Leaving

DEFAULT_KEY = "default"


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    add = parser.add_argument
    add("--host", metavar="ADDRESS", help="the address to listen on (127.0.0.1)")
    add("--port", metavar="N", type=int, help="the port to listen on (7777); 0 takes a free one")
    add("--socket", metavar="PATH", help="where the unix socket is made (cloche.sock in the state directory)")
    add(
        "--tls-cert",
        metavar="FILE",
        help="the certificate chain (PEM), for HTTPS; read again when it changes",
    )
    add("--tls-key", metavar="FILE", help="the certificate's private key (PEM)")
    add("--insecure", action="store_true", help="plain HTTP beyond loopback: something in front ends TLS")
    add("--config", metavar="FILE", help="a settings file to use instead of your own")


def execute(verb: str, chosen: argparse.Namespace) -> int:
    config = settings.load(os.environ, file=chosen.config)
    named = ("host", "port", "tls_cert", "tls_key")
    said = {name: value for name in named if (value := getattr(chosen, name)) is not None}
    if chosen.insecure:
        said["insecure"] = True
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, **said))
    _check_way(config.server)
    settings.make_home(config.home)
    lock = process.take_lock(config.home)
    if lock < 0:
        raise errors.error(
            "state_locked",
            f"{config.home} is held by {process.holder(config.home)}",
            hint="`cloche gc --restart` ends a keeper without sandboxes; or set CLOCHE_HOME to another directory",
        )
    _open_log(config.server.log)
    try:
        asyncio.run(_serve(config, chosen.socket or config.socket_path, lock, as_json=chosen.json))
    finally:
        os.close(lock)
    return 0


def _check_way(server: settings.Server) -> None:
    """Keys do not travel in the open unless somebody has said that they do not."""
    if (server.tls_cert is None) != (server.tls_key is None):
        raise errors.error(
            "settings_invalid",
            "a certificate needs its key, and a key its certificate",
            hint="give --tls-cert and --tls-key, or server.tls_cert and server.tls_key in the settings",
        )
    if server.tls_cert is None and not server.insecure and not _loopback(server.host):
        raise errors.error(
            "tls_required",
            f"{server.host} is reached from other machines, and over plain HTTP keys and output travel in the open",
            hint="give --tls-cert and --tls-key; or --insecure, if a proxy in front ends TLS",
        )


def _open_log(kind: str) -> None:
    from cloche.server import logs

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logs.Json() if kind == "json" else logs.Text())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for chatty in ("uvicorn.error", "mcp", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


async def _serve(config: settings.Settings, path: str, lock: int, *, as_json: bool) -> None:
    from cloche.compat import e2b
    from cloche.server.http import connections, links, serving, tls
    from cloche.server.http.meters import Meters  # uvicorn and Starlette: only here

    watch = connections.Watch(connections.Limits.of(config.server, _raise_descriptors()))
    server = config.server
    certificate = (
        tls.Certificate(server.tls_cert, server.tls_key) if server.tls_cert and server.tls_key else None
    )
    listener = serving.listen(config.server.host, config.server.port)
    known = keys.Keys(config.home)
    key_file = first_key(known)
    if config.api_key:
        known.accept(config.api_key)
    url = _url(listener, certificate is not None)
    counted = measures.Measures()
    engine = wiring.make_engine(os.environ, where=url, warm=True, config=config, measures=counted)
    word = keys.new_secret()  # of this process alone: who came by the unix socket
    access = tokens.AccessTokens(config.home, known)
    engine.make_token = access.issue
    await process.host(engine, config)
    asyncio.get_running_loop().set_exception_handler(process.Complaints())
    tools = HttpFace(config)
    meters = Meters(watch, counted)
    leaving = Leaving(config.server.drain_s)
    scheme = "http" if certificate is None else "https"
    base = links.base_url(config.server.domain, listener.getsockname()[1], scheme=scheme)
    signed = links.Links(config.home, base, known)
    engine.make_link = signed.make
    app = serving.make_app(
        engine,
        known,
        config,
        faces={"/mcp": tools},
        around=[e2b.Face],
        meters=meters,
        access=access,
        signed=signed,
        leaving=leaving,
        local=word,
    )
    http = serving.Http(app, config, watch, leaving, certificate=certificate, local=word)
    kept = keeper.Keeper(
        engine, engine, idle_exit_s=None, defaults=config.defaults,
        observe=lambda call, code: meters.called(f"socket {call}", code), leaving=leaving, http=http.local,
    )  # fmt: skip
    port = asyncio.ensure_future(http.serve(listener))
    port.add_done_callback(lambda _: kept.leave())
    frames = asyncio.ensure_future(kept.serve(path, before_end=lambda: _stop(port, tools)))
    await asyncio.sleep(0)
    process.sign_lock(lock, url)
    _greet(url, path, key_file, as_json=as_json)
    notify("READY=1", f"STATUS=serving on {url}")
    await frames
    await _stop(port, tools)


def _raise_descriptors() -> int:
    """As many descriptors as this process may have; what sandboxes are given stays as it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spawning.soft_descriptors = soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def notify(*lines: str) -> None:
    """Tell the service manager that started us, if one did (`sd_notify`)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto("\n".join(lines).encode(), "\0" + address[1:] if address[0] == "@" else address)


async def _stop(http: asyncio.Future[None], tools: HttpFace) -> None:
    notify("STOPPING=1")
    http.cancel()
    with suppress(asyncio.CancelledError):
        await http
    await tools.aclose()


def first_key(known: keys.Keys) -> str:
    """The file that holds the first key, which is made where there is none yet."""
    if not known.list():
        known.keep_secret(DEFAULT_KEY, known.create(DEFAULT_KEY, ("*",)), make=True)
    return known.secret_file(DEFAULT_KEY)


def _greet(url: str, path: str, key_file: str, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode({"url": url, "socket": path, "key_file": key_file}).decode(), flush=True)
        return
    shown = key_file if os.path.exists(key_file) else "the key that you made with `cloche key create`"
    key = f'"$(cat {shlex.quote(key_file)})"'
    bearer = f'-H "Authorization: Bearer $(cat {shlex.quote(key_file)})"'
    loop = "for i in 1 2 3; do echo $i; sleep 0.3; done"
    print(
        f"serving on {url} and {path}\n"
        f"the key is in {shown}\n\n"
        f"try:\n"
        f'  curl -s {url}/run {bearer} --json \'{{"command": "uname -a"}}\'\n'
        f'  curl -sN {url}/run/stream {bearer} --json \'{{"command": "{loop}"}}\'\n'
        f"  CLOCHE_URL={url} CLOCHE_API_KEY={key} cloche run -- echo hello from a sandbox\n\n"
        f"programs that use E2B: E2B_API_URL={url} E2B_SANDBOX_URL={url} E2B_API_KEY=e2b_…, the key's digits after cl_",
        flush=True,
    )


def _url(listener: socket.socket, secure: bool) -> str:
    """How it is reached from here: every address is also loopback's."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http{'s' if secure else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
