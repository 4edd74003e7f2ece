"""Secrets that sandboxes use and never see: kept encrypted, bound to hosts, granted as placeholders.

    kept = LocalSecrets(home, key_file=None, key=None)
    kept.set(model.Secret(name="github", hosts=("api.github.com",), env="GITHUB_TOKEN"), b"ghp_…")
    grants = kept.grants(["github"], "k3…")       env {"GITHUB_TOKEN": "cloche-secret-…"}, files, and credentials for the proxy

    vault     the encrypted file and its key: reading, changing, turning the key
    this file what a binding may be, and what a sandbox is given

A value is in this process only while it is stored or granted; then it lies in a sealed memory file that the proxy reads. A
placeholder is made anew for every sandbox. What a sandbox may use is what stood in the vault when it was granted: removing a
secret does not reach into sandboxes that run.

`cryptography` is imported when a value is stored or granted, not to list.
"""

from __future__ import annotations

import re
import secrets as randomness
import time
from collections.abc import Callable, Iterable

import msgspec

from cloche import errors, interfaces, model
from cloche.egress import credentials
from cloche.policy import rules
from cloche.secrets import vault

MIN_VALUE, MAX_VALUE = 8, 16 * 1024
MOST = 1000

_NAME = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,62}[a-zA-Z0-9])?\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}\Z")
_FIELD = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}\Z")
_VALUE = re.compile(rb"[\x21-\x7e\x80-\xff]([\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?\Z")
# A credential there would be read by the connection, not by the server, or change what the message is.
_NOT_FIELDS = {
    "host",
    "connection",
    "content-length",
    "transfer-encoding",
    "upgrade",
    "te",
    "trailer",
    "expect",
}
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"


class LocalSecrets(interfaces.Secrets):
    """The secrets of one state directory. Methods block; several processes may work at once."""

    def __init__(
        self,
        home: str,
        *,
        key_file: str | None = None,
        key: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._vault = vault.Vault(home, key_file=key_file, key=key)
        self._clock = clock

    def __repr__(self) -> str:
        return "LocalSecrets()"

    def list(self) -> list[model.SecretInfo]:
        return sorted((entry.info for entry in self._vault.read()), key=lambda info: info.name)

    def set(
        self, secret: model.Secret, value: bytes, if_version: str | None = None
    ) -> tuple[model.SecretInfo, bool]:
        secret = check(secret)
        check_value(value)
        now = self._clock()
        with self._vault.changing() as entries:
            before = next((entry.info for entry in entries if entry.info.name == secret.name), None)
            _check_version(secret.name, before, if_version)
            info = model.SecretInfo(
                **{name: getattr(secret, name) for name in model.Secret.__struct_fields__},
                created_at=before.created_at if before is not None else now,
                updated_at=now,
            )
            entries[:] = [entry for entry in entries if entry.info.name != secret.name]
            if len(entries) >= MOST:
                raise errors.error("secret_invalid", f"there are {MOST} secrets already", hint="remove some")
            entries.append(self._vault.seal(info, value))
        return info, before is not None

    def remove(self, name: str, if_version: str | None = None) -> model.SecretInfo:
        with self._vault.changing() as entries:
            found = next((entry for entry in entries if entry.info.name == name), None)
            if found is None:
                raise _not_found(name, entries)
            _check_version(name, found.info, if_version)
            entries.remove(found)
        return found.info

    def rotate_key(self) -> int:
        return self._vault.rotate()

    def grants(self, names: Iterable[str], sandbox_id: str) -> interfaces.Grants:
        wanted = list(dict.fromkeys(names))
        if not wanted:
            return interfaces.Grants({}, {}, None)
        entries = self._vault.read()
        known = {entry.info.name: entry for entry in entries}
        for name in wanted:
            if name not in known:
                raise _not_found(name, entries)
        env: dict[str, str] = {}
        files: dict[str, bytes] = {}
        made: list[credentials.Credential] = []
        for name in wanted:
            info = known[name].info
            placeholder = new_placeholder()
            _place(env, info.env, placeholder, info)
            _place(files, info.file, placeholder.encode(), info)
            made.append(
                credentials.Credential(
                    name=info.name,
                    placeholder=placeholder,
                    value=self._vault.open(known[name]),
                    hosts=info.hosts,
                    how=info.how,
                    user=info.user,
                    field=info.field,
                    format=info.format,
                    body=info.body,
                    plain=info.plain,
                )
            )
        return interfaces.Grants(env, files, interfaces.Credentials(tuple(wanted), credentials.seal(made)))


def new_placeholder() -> str:
    """165 bits; of letters that no encoding of a request changes."""
    return credentials.PREFIX + "".join(randomness.choice(_ALPHABET) for _ in range(32))


def _place(table: dict[str, vault.T], key: str, value: vault.T, info: model.SecretInfo) -> None:
    if not key:
        return
    if key in table:
        raise _invalid(f"the secrets of this sandbox both want {key!r}; {info.name!r} is the second")
    table[key] = value


# ── what a binding may be ──────────────────────────────────────────────────────────────────────────


def check(secret: model.Secret) -> model.Secret:
    """The secret with its hosts in canonical form; raises `secret_invalid` with the field."""
    if not _NAME.match(secret.name):
        raise _invalid(
            f"{secret.name[:80]!r} is no name for a secret", "use letters, digits, '-', '_' and '.'"
        )
    if not secret.hosts:
        raise _invalid(
            "a secret is bound to at least one host", "say where it may be sent: --host api.github.com"
        )
    hosts = tuple(dict.fromkeys(_host(text) for text in secret.hosts))
    _check_place(secret)
    if secret.env and not _VARIABLE.match(secret.env):
        raise _invalid(f"{secret.env[:80]!r} is no name for a variable")
    if secret.file and (
        len(secret.file) > 4096 or not secret.file.isprintable() or secret.file.endswith("/")
    ):
        raise _invalid("the file is not a path")
    if not secret.env and not secret.file:
        raise _invalid(
            "the sandbox would not see a placeholder", "say where it finds one: --env NAME or --file PATH"
        )
    return msgspec.structs.replace(secret, hosts=hosts)


def _host(text: str) -> str:
    try:
        rule = rules.Rule.parse(text)
    except errors.ClocheError as problem:
        raise _invalid(f"the host {text[:300]!r} is refused: {problem.message}") from None
    if rule.is_conditional or rule.raw or rule.upload_bytes is not None or rule.reason:
        raise _invalid(f"a secret's host is host[:port]; {text[:300]!r} says more")
    if "/" in rule.host:
        raise _invalid("a secret is bound to names or single addresses, not to a network")
    if rule.host.lstrip("*").count(".") < 2 and rule.host.startswith("*"):
        raise _invalid(f"{text!r} is everybody's; bind a secret to hosts that one party owns")
    return str(rule)


def _check_place(secret: model.Secret) -> None:
    match secret.how:
        case "header" | "query":
            if not _FIELD.match(secret.field):
                raise _invalid(f"{secret.field[:80]!r} is no name for a {secret.how} field")
            if secret.how == "header" and secret.field.lower() in _NOT_FIELDS:
                raise _invalid(f"a secret cannot stand in the field {secret.field!r}")
        case _:
            if secret.field:
                raise _invalid(f"`{secret.how}` has its field already; only header and query name one")
    if secret.user and (secret.how != "basic" or ":" in secret.user or not secret.user.isprintable()):
        raise _invalid("a user belongs to `basic`, and has no colon")
    if secret.format and (
        secret.how != "header" or secret.format.count("{}") != 1 or not secret.format.isprintable()
    ):
        raise _invalid("a format belongs to `header`, and has {} once, where the value goes")


def check_value(value: bytes) -> None:
    """Say what is wrong with a value, without saying a word of it."""
    if len(value) < MIN_VALUE:
        raise _invalid(
            f"the value has {len(value)} bytes; under {MIN_VALUE} it could not be told from ordinary text in an answer"
        )
    if len(value) > MAX_VALUE:
        raise _invalid(f"the value has {len(value)} bytes; {MAX_VALUE} are the most")
    if not _VALUE.match(value):
        raise _invalid(
            "the value has a line break, a control byte, or a blank at an end; no header can carry it"
        )
    if credentials.PREFIX.encode() in value:
        raise _invalid("the value is a placeholder of a sandbox, not a secret")


def _invalid(message: str, hint: str = "see docs/concepts/secrets.md") -> errors.ClocheError:
    return errors.error("secret_invalid", message, hint=hint)


def _check_version(name: str, found: model.SecretInfo | None, wanted: str | None) -> None:
    if wanted is not None and (found is None or found.version != wanted):
        raise errors.error(
            "version_conflict",
            f"the secret {name!r} is not the one that was seen",
            hint="look at it again, and change that one",
        )


def _not_found(name: str, entries: Iterable[vault.Entry]) -> errors.ClocheError:
    known = [entry.info.name for entry in entries]
    hint = errors.nearest(name, known) if known else "store one: cloche secret set NAME --host HOST --env VAR"
    return errors.error("secret_not_found", f"there is no secret {name[:80]!r}", hint=hint, name=name[:80])
