"""The certificate authority of one engine: trusted inside its sandboxes, nowhere else, and gone with the engine.

    authority = Authority()                       a key in this process's memory; never in a file
    authority.certificate                         PEM, public: sandboxes get it beside the system's certificates
    authority.leaf("api.github.com")              PEM: key, certificate and its issuer, for the proxy to answer with

The engine signs and the proxy asks it to (records.py). So the authority outlives a proxy that is started again, with it the
sandboxes that trust it, and the process that reads hostile bytes does not hold the key. All leaves share one key of their own.

`cryptography` takes a quarter of a second to import on a slow machine: it is imported when the first authority is made.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import ssl
from functools import cache
from typing import Any

from cloche.policy import names

BUNDLE_PATH = "/etc/ssl/certs/ca-certificates.crt"
"""Where most programs of a Debian-like root look; the bundle belongs there too, for those without a variable (wget)."""

VARIABLES = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "CARGO_HTTP_CAINFO",
    "AWS_CA_BUNDLE",
    "DENO_CERT",
    "BUNDLE_SSL_CA_CERT",
    "HEX_CACERTS_PATH",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "NIX_SSL_CERT_FILE",
    "npm_config_cafile",
)
"""What programs read the place of a bundle from. Java reads none: it has a trust store in a format of its own."""

_SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_DAY = datetime.timedelta(days=1)
_LEAF_DAYS = 30
LEAF_RENEWED_S = 24 * 3600.0
"""How long the proxy uses a leaf before it asks for another."""


def variables(path: str) -> dict[str, str]:
    """The environment that makes programs trust the bundle at `path`."""
    return dict.fromkeys(VARIABLES, path)


@cache
def system_bundle() -> bytes:
    """The certificates that this machine trusts, as PEM; empty where there are none."""
    paths = ssl.get_default_verify_paths()
    for path in (*_SYSTEM_BUNDLES, paths.openssl_cafile):
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError:
            continue
    return b""


def bundle(certificate: str) -> bytes:
    """What a sandbox trusts: the system's authorities, and ours."""
    found = system_bundle()
    return found + (b"" if not found or found.endswith(b"\n") else b"\n") + certificate.encode()


class Authority:
    """Signs certificates for hosts. Blocking, a millisecond each."""

    def __init__(self) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.generate_private_key(ec.SECP256R1())
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        # A name of its own: two authorities with one name and two keys confuse clients that have met both.
        self._name = _name(f"Cloche sandbox authority {secrets.token_hex(6)}")
        public = self._key.public_key()
        made = self._builder(self._name, public, days=3650).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        made = made.add_extension(_usage(signs=True), critical=True)
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(public)
        self._signed = self._sign(made.add_extension(self._identifier, critical=False))
        self.certificate = _pem(self._signed)

    def __repr__(self) -> str:
        return "Authority()"

    def leaf(self, host: str) -> str:
        """A certificate for one canonical host, with key and issuer."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.x509.oid import ExtendedKeyUsageOID

        other: x509.GeneralName = (
            x509.IPAddress(ipaddress.ip_address(host)) if names.is_address(host) else x509.DNSName(host)
        )
        public = self._leaf_key.public_key()
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier)
        made = (
            self._builder(_name(host[:64]), public, days=_LEAF_DAYS)
            .add_extension(x509.SubjectAlternativeName([other]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(issuer, critical=False)
        )
        key = self._leaf_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return key.decode() + _pem(self._sign(made)) + self.certificate

    def _builder(self, subject: Any, public: Any, *, days: int) -> Any:
        from cryptography import x509

        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)  # clocks inside may be behind
            .not_valid_after(now + days * _DAY)
        )

    def _sign(self, made: Any) -> Any:
        from cryptography.hazmat.primitives import hashes

        return made.sign(self._key, hashes.SHA256())


def _name(text: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: Any) -> str:
    from cryptography.hazmat.primitives import serialization

    text: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return text.decode()


def server_context(leaf: str) -> ssl.SSLContext:
    """What the proxy answers a client with: HTTP/1.1 and nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    memory = os.memfd_create("cloche-leaf", os.MFD_CLOEXEC)  # ssl loads keys from files only
    try:
        os.write(memory, leaf.encode())
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def client_context(extra: str = "") -> ssl.SSLContext:
    """How the proxy looks at servers: this machine's authorities, and those that the engine was given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.set_default_verify_paths()
    found = system_bundle()
    for pem in (found.decode("ascii", "replace"), extra):
        if pem.strip():
            context.load_verify_locations(cadata=pem)
    return context
