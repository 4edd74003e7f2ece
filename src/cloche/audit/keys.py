"""The key that seals the log: Ed25519, made at the first seal, its private half readable by the owner alone.

`cryptography` is imported here and nowhere else in this room, inside the functions: a command that writes three lines and goes
never pays for it.
"""

from __future__ import annotations

import os
import stat
from typing import Any, NamedTuple

from cloche import errors
from cloche.audit import lines

PRIVATE, PUBLIC = "audit.key", "audit.pub"
_CONTEXT = b"cloche audit 1\n"  # what this key signs is never mistaken for anything else


class Signer(NamedTuple):
    fingerprint: str
    private: Any

    def sign(self, body: bytes) -> bytes:
        signature: bytes = self.private.sign(_CONTEXT + body)
        return signature


class Verifier(NamedTuple):
    fingerprint: str
    public: Any

    def holds(self, body: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self.public.verify(signature, _CONTEXT + body)
        except InvalidSignature:
            return False
        return True


def signer(directory: str) -> Signer:
    """The key in `directory`; made if there is none."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    path = os.path.join(directory, PRIVATE)
    if not os.path.exists(path):
        _make(directory)
    private = serialization.load_pem_private_key(_read_private(path), password=None)
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise _wrong(path, "it is not an Ed25519 key")
    _publish(directory, private.public_key())
    return Signer(_fingerprint(private.public_key()), private)


def verifier(path: str) -> Verifier:
    """The public key in a PEM file."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    try:
        with open(path, "rb") as file:
            public = serialization.load_pem_public_key(file.read(1 << 16))
    except OSError as problem:
        raise _wrong(path, problem.strerror or str(problem)) from None
    except ValueError:
        raise _wrong(path, "it is not a public key in PEM") from None
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise _wrong(path, "it is not an Ed25519 key")
    return Verifier(_fingerprint(public), public)


def _make(directory: str) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    os.makedirs(directory, mode=0o700, exist_ok=True)
    pem = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_once(os.path.join(directory, PRIVATE), pem)


def _publish(directory: str, public: Any) -> None:
    from cryptography.hazmat.primitives import serialization

    path = os.path.join(directory, PUBLIC)
    if not os.path.exists(path):
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        _write_once(path, public.public_bytes(serialization.Encoding.PEM, form))


def _write_once(path: str, content: bytes) -> None:
    """Whole or not at all; of several who try at once, the first wins and all use his."""
    draft = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)


def _read_private(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        mode = os.fstat(fd).st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise _wrong(
                path, f"others may read it (mode {stat.S_IMODE(mode):04o})", hint=f"chmod 600 {path}"
            )
        return file.read(1 << 16)


def _fingerprint(public: Any) -> str:
    from cryptography.hazmat.primitives import serialization

    raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return lines.digest(raw)[:16]


def _wrong(path: str, cause: str, hint: str | None = None) -> errors.ClocheError:
    return errors.error("audit_unavailable", f"the audit key {path} cannot be used: {cause}", hint=hint)
