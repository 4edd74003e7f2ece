"""TLS: what is not spoken, what is not started, what is not believed; then certificates that change under a running server."""

import datetime
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cloche import errors
from cloche.server.http import tls
from tests.server import conftest
from tests.server.conftest import Clock
from tests.server.test_frames import far


class Pair(NamedTuple):
    cert: bytes
    key: bytes
    serial: int


def name(words: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words)])


class Authority:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._cert = self._builder("authority", self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        ).sign(self._key, hashes.SHA256())  # fmt: skip
        self.pem = self._cert.public_bytes(serialization.Encoding.PEM)

    def _builder(self, words: str, key: Any) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name(words))
            .issuer_name(name("authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )

    def pair(self) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        cert = self._builder("server", key).add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = cert.sign(self._key, hashes.SHA256())
        return Pair(
            signed.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            signed.serial_number,
        )


class Secure(NamedTuple):
    served: conftest.Served
    authority: Authority
    cert: Path
    key: Path
    ca: Path

    def client(self, **more: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.served.key}"}
        trusted = ssl.create_default_context(cafile=str(self.ca))
        return httpx.Client(
            base_url=self.served.url, headers=headers, verify=trusted, timeout=50, trust_env=False, **more
        )

    def shown(self) -> int:
        """The serial number of the certificate that is shown now, to who names nobody."""
        context = ssl.create_default_context(cafile=str(self.ca))
        address = httpx.URL(self.served.url)
        with (
            socket.create_connection((address.host, address.port), timeout=50) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
        ):
            shown = sock.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number


def write(path: Path, data: bytes) -> None:
    draft = path.with_suffix(".new")
    draft.write_bytes(data)
    draft.replace(path)


@pytest.fixture(scope="module")
def secure() -> Iterator[Secure]:
    with tempfile.TemporaryDirectory(prefix="cl-") as directory:
        home = Path(directory)
        authority = Authority()
        pair = authority.pair()
        cert, key, ca = home / "cert.pem", home / "key.pem", home / "ca.pem"
        cert.write_bytes(pair.cert)
        key.write_bytes(pair.key)
        ca.write_bytes(authority.pem)
        made = conftest.serve(home, "--tls-cert", str(cert), "--tls-key", str(key))
        try:
            yield Secure(made, authority, cert, key, ca)
        finally:
            assert conftest.stop(made) == 0


# ── what is not started ────────────────────────────────────────────────────────────────────────────


def start(home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CLOCHE_HOME": str(home / "s"),
        "CLOCHE_KEEPER": "off",
    }
    return subprocess.run(
        conftest.argv("serve", "--port", "0", *words),
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_keys_do_not_travel_in_the_open_by_mistake(tmp_path, host):
    ran = start(tmp_path, "--host", host, "--json")
    assert ran.returncode == 125
    problem = json.loads(ran.stdout)["error"]
    assert problem["code"] == "tls_required"
    assert "--insecure" in problem["hint"]
    assert not (tmp_path / "s/cloche.sock").exists()


def test_one_file_of_two_is_refused(tmp_path):
    assert "needs its key" in start(tmp_path, "--tls-cert", "/nowhere").stderr
    assert "needs its key" in start(tmp_path, "--tls-key", "/nowhere").stderr


def test_a_pair_that_cannot_be_used_is_refused_and_says_why(tmp_path):
    authority = Authority()
    first, second = authority.pair(), authority.pair()
    locked = serialization.load_pem_private_key(first.key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"x"),
    )
    for cert, key, words in (
        (first.cert, second.key, "KEY_VALUES_MISMATCH"),
        (b"nonsense", first.key, "cannot be used"),
        (first.cert, b"", "cannot be used"),
        (first.cert, locked, "passphrase"),
    ):
        (tmp_path / "cert").write_bytes(cert)
        (tmp_path / "key").write_bytes(key)
        with pytest.raises(errors.ClocheError) as caught:
            tls.Certificate(str(tmp_path / "cert"), str(tmp_path / "key"))
        assert caught.value.code == "settings_invalid"
        assert words in caught.value.message
    with pytest.raises(errors.ClocheError) as caught:
        tls.Certificate(str(tmp_path / "nowhere"), str(tmp_path / "key"))
    assert "No such file" in caught.value.message


def test_plain_http_beyond_loopback_is_there_for_who_says_so(tmp_path):
    made = conftest.serve(tmp_path, "--host", "0.0.0.0", "--insecure")
    try:
        assert made.url.startswith("http://127.0.0.1:")
        with made.client() as client:
            assert client.get("/v1/sandboxes").status_code == 200
            assert client.get("/healthz", headers={"Host": "evil.example"}).status_code == 403
    finally:
        conftest.stop(made)


# ── what is not spoken, and what is not believed ───────────────────────────────────────────────────


def test_nothing_is_said_in_the_open(secure):
    address = httpx.URL(secure.served.url)
    with socket.create_connection((address.host, address.port), timeout=50) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" not in sock.recv(1000)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_tls_is_not_spoken(secure):
    context = ssl.create_default_context(cafile=str(secure.ca))
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    address = httpx.URL(secure.served.url)
    with (
        socket.create_connection((address.host, address.port), timeout=50) as plain,
        pytest.raises((ssl.SSLError, OSError)),
    ):
        context.wrap_socket(plain, server_hostname="localhost")
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = ssl.create_default_context(cafile=str(secure.ca))
        context.minimum_version = context.maximum_version = version
        with (
            socket.create_connection((address.host, address.port), timeout=50) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as sock,
        ):
            assert sock.version() == version.name.replace("_", ".")


def test_a_client_does_not_believe_just_anybody(secure, tmp_path):
    ran = far(secure.served, "Sandbox()")
    assert "(server_unavailable)" in ran.stderr
    assert "CLOCHE_CA_FILE" in ran.stderr
    (tmp_path / "other.pem").write_bytes(Authority().pem)
    assert (
        "(server_unavailable)"
        in far(secure.served, "Sandbox()", CLOCHE_CA_FILE=str(tmp_path / "other.pem")).stderr
    )
    assert "(settings_invalid)" in far(secure.served, "Sandbox()", CLOCHE_CA_FILE="/nowhere").stderr
    (tmp_path / "junk.pem").write_text("junk")
    assert (
        "(settings_invalid)"
        in far(secure.served, "Sandbox()", CLOCHE_CA_FILE=str(tmp_path / "junk.pem")).stderr
    )
    plain = secure.served.url.replace("https", "http")
    assert "(server_unavailable)" in far(secure.served, "Sandbox()", CLOCHE_URL=plain).stderr


def test_sdk_and_command_line_work_over_it(secure):
    assert secure.served.url.startswith("https://")
    with secure.client() as client:
        assert client.post("/run", json={"command": "echo hi"}).json()["stdout"] == "hi\n"
    ran = far(secure.served, "print(Sandbox().exec('echo far').stdout)", CLOCHE_CA_FILE=str(secure.ca))
    assert ran.stdout == "far\n\n", ran.stderr
    known = {
        **secure.served.environment, "CLOCHE_HOME": str(secure.served.home / "far"), "CLOCHE_URL": secure.served.url,
        "CLOCHE_API_KEY": secure.served.key,
    }  # fmt: skip

    def cloche(**more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            conftest.argv("run", "--", "echo", "there"),
            capture_output=True,
            text=True,
            env={**known, **more},
            timeout=50,
        )

    refused = cloche()
    assert (refused.returncode, "CLOCHE_CA_FILE" in refused.stderr) == (125, True)
    assert cloche(CLOCHE_CA_FILE=str(secure.ca)).stdout == "there\n"


# ── certificates that change ───────────────────────────────────────────────────────────────────────


def shows(secure: Secure, serial: int) -> None:
    """Files are looked at once a second: so long it may take."""
    deadline = time.monotonic() + 40
    while secure.shown() != serial:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_renewed_certificate_is_shown_and_open_connections_stay(secure):
    pair = secure.authority.pair()
    with secure.client() as client:
        assert client.get("/healthz").status_code == 200
        before = secure.shown()
        write(secure.cert, pair.cert)
        write(secure.key, pair.key)
        shows(secure, pair.serial)
        assert pair.serial != before
        assert client.get("/healthz").status_code == 200


def test_a_bad_pair_keeps_the_one_before(secure):
    before, other = secure.shown(), secure.authority.pair()
    good = secure.cert.read_bytes()
    write(secure.cert, other.cert)  # its key comes later, or never
    for _ in range(3):
        assert secure.shown() == before
    write(secure.cert, b"junk")
    assert secure.shown() == before
    write(secure.cert, good)
    pair = secure.authority.pair()
    write(secure.key, pair.key)
    write(secure.cert, pair.cert)
    shows(secure, pair.serial)


def test_the_log_says_once_that_a_pair_cannot_be_used(tmp_path, caplog):
    authority = Authority()
    pair, other = authority.pair(), authority.pair()
    cert, key, clock = tmp_path / "cert", tmp_path / "key", Clock()
    cert.write_bytes(pair.cert)
    key.write_bytes(pair.key)
    made = tls.Certificate(str(cert), str(key), clock)
    first = made._current
    write(cert, other.cert)
    made.look_again()
    assert caplog.text == "", "not twice within a second"
    for _ in range(5):
        clock.now += 2
        made.look_again()
    assert made._current is first
    assert caplog.text.count("stays in use") == 1
    write(key, other.key)
    clock.now += 2
    made.look_again()
    assert made._current is not first
    key.unlink()
    second = made._current
    clock.now += 2
    made.look_again()
    assert made._current is second
    assert caplog.text.count("stays in use") == 2
