"""Stored secrets: refused first, then kept; nothing of a value in any file, and no file that others may read."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cloche import errors, model
from cloche import secrets as kept
from cloche.egress import credentials
from cloche.secrets import vault

VALUE = b"ghp_a-value/that+nobody=sees"


def secret(**fields: object) -> model.Secret:
    base = {"name": "github", "hosts": ("api.github.com",), "env": "GITHUB_TOKEN"}
    return model.Secret(**{**base, **fields})  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "s").mkdir(mode=0o700)
    return tmp_path / "s"


@pytest.fixture
def store(home: Path) -> kept.LocalSecrets:
    return kept.LocalSecrets(str(home))


def code_of(call, *arguments) -> str:
    with pytest.raises(errors.ClocheError) as caught:
        call(*arguments)
    assert VALUE.decode() not in repr(caught.value) + str(caught.value)
    assert caught.value.hint
    return caught.value.code


def everything_in(home: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in home.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": "../key"},
        {"name": "a b"},
        {"name": "x" * 65},
        {"hosts": ()},
        {"hosts": ("*",)},
        {"hosts": ("*.com",)},
        {"hosts": ("**.org",)},
        {"hosts": ("10.0.0.0/8",)},
        {"hosts": ("https://api.github.com",)},
        {"hosts": ("api.github.com methods=GET",)},
        {"hosts": ("api.github.com:99999",)},
        {"hosts": ("localhost",)},
        {"env": "", "file": ""},
        {"env": "A=B"},
        {"env": "A\nB"},
        {"file": "dir/"},
        {"file": "a\x00b"},
        {"how": "header"},
        {"how": "header", "field": "Host"},
        {"how": "header", "field": "a: b"},
        {"how": "header", "field": "Transfer-Encoding"},
        {"how": "header", "field": "X", "format": "no place"},
        {"how": "header", "field": "X", "format": "{}\r\nY: {}"},
        {"how": "query"},
        {"how": "bearer", "field": "X"},
        {"how": "bearer", "user": "me"},
        {"how": "basic", "user": "a:b"},
    ],
)
def test_a_binding_that_cannot_be_is_refused(
    store: kept.LocalSecrets, home: Path, fields: dict[str, object]
) -> None:
    assert code_of(store.set, secret(**fields), VALUE) == "secret_invalid"
    assert store.list() == []
    assert not (home / "secrets.json").exists()


@pytest.mark.parametrize(
    "value",
    [b"", b"short", b"with a\nline", b"with a\rreturn", b"nul\x00inside", b" blank-first", b"blank-last ", b"x" * 20000,
     b"cloche-secret-abcdefghijklmnop"],
)  # fmt: skip
def test_a_value_that_no_header_can_carry_is_refused(store: kept.LocalSecrets, value: bytes) -> None:
    assert code_of(store.set, secret(), value) == "secret_invalid"
    assert store.list() == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hosts": ("API.GitHub.com.", "*.github.com:443", "**.example.co.uk", "10.0.0.1:8443")},
        {"how": "basic", "user": "x-access-token"},
        {"how": "header", "field": "X-Api-Key", "format": "key={}"},
        {"how": "query", "field": "api_key"},
        {"env": "", "file": "~/.token"},
    ],
)
def test_what_can_be_is_stored_and_listed_without_its_value(
    store: kept.LocalSecrets, home: Path, fields: dict[str, object]
) -> None:
    info, replaced = store.set(secret(**fields), VALUE)
    assert not replaced
    assert store.list() == [info]
    assert VALUE not in everything_in(home)
    assert VALUE.decode() not in repr(store.list()) + repr(store) + msgspec.json.encode(store.list()).decode()
    for path in home.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_hosts_are_kept_canonical(store: kept.LocalSecrets) -> None:
    info, _ = store.set(secret(hosts=("API.GitHub.com.", "api.github.com")), VALUE)
    assert info.hosts == ("api.github.com",)


def test_replacing_keeps_when_it_was_made(home: Path) -> None:
    now = [1000.0]
    store = kept.LocalSecrets(str(home), clock=lambda: now[0])
    store.set(secret(), VALUE)
    now[0] = 2000.0
    info, replaced = store.set(secret(hosts=("github.com",)), b"another-value")
    assert replaced
    assert (info.created_at, info.updated_at, info.hosts) == (1000.0, 2000.0, ("github.com",))
    assert len(store.list()) == 1


def test_removing(store: kept.LocalSecrets) -> None:
    assert code_of(store.remove, "github") == "secret_not_found"
    store.set(secret(), VALUE)
    assert code_of(store.remove, "githbu") == "secret_not_found"
    assert store.remove("github").name == "github"
    assert store.list() == []


# ── grants ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_secret_is_not_granted(store: kept.LocalSecrets) -> None:
    store.set(secret(), VALUE)
    assert code_of(store.grants, ["github", "other"], "s1") == "secret_not_found"


def test_two_secrets_cannot_have_one_place(store: kept.LocalSecrets) -> None:
    store.set(secret(), VALUE)
    store.set(secret(name="second"), VALUE)
    assert code_of(store.grants, ["github", "second"], "s1") == "secret_invalid"


def test_a_grant_shows_placeholders_and_hides_the_value(store: kept.LocalSecrets) -> None:
    store.set(secret(file="~/.token", how="header", field="X-Key", format="k {}", body=True), VALUE)
    first, second = store.grants(["github", "github"], "s1"), store.grants(["github"], "s2")
    assert first.credentials is not None
    assert second.credentials is not None
    try:
        assert re.fullmatch(r"cloche-secret-[a-z0-9]{32}", first.env["GITHUB_TOKEN"])
        assert first.env != second.env, "a placeholder is worth nothing in another sandbox"
        assert first.files == {"~/.token": first.env["GITHUB_TOKEN"].encode()}
        assert VALUE.decode() not in repr(first)
        found = credentials.unseal(first.credentials.fd).all
        assert [(one.value, one.placeholder, one.field, one.body) for one in found] == [
            (VALUE, first.env["GITHUB_TOKEN"], "X-Key", True)
        ]
    finally:
        first.credentials.close()
        second.credentials.close()
        second.credentials.close()


def test_nothing_is_granted_for_nothing(store: kept.LocalSecrets, home: Path) -> None:
    assert store.grants([], "s1") == ({}, {}, None)
    assert list(home.iterdir()) == []


# ── keys, and files that were touched ──────────────────────────────────────────────────────────────


def test_without_the_key_nothing_is_granted_and_no_new_key_is_made(
    store: kept.LocalSecrets, home: Path
) -> None:
    store.set(secret(), VALUE)
    key = home / "keys/secrets.key"
    right = key.read_bytes()
    key.unlink()
    for call in (lambda: store.grants(["github"], "s1"), lambda: store.set(secret(name="b"), VALUE)):
        assert code_of(call) == "secrets_locked"
        assert not key.exists()
    assert [info.name for info in store.list()] == ["github"]
    for wrong in (b"0" * 64, b"", b"not a key", b"\xff" * 64):
        key.write_bytes(wrong)
        key.chmod(0o600)
        assert code_of(store.grants, ["github"], "s1") == "secrets_locked"
    key.write_bytes(right)
    grants = store.grants(["github"], "s1")
    assert grants.credentials is not None
    grants.credentials.close()


@pytest.mark.parametrize("which", ["keys/secrets.key", "secrets.json"])
@pytest.mark.parametrize("how", ["others may read it", "a link", "a directory"])
def test_a_file_that_is_not_ours_alone_is_refused(
    store: kept.LocalSecrets, home: Path, which: str, how: str
) -> None:
    store.set(secret(), VALUE)
    path = home / which
    match how:
        case "others may read it":
            path.chmod(0o644)
        case "a link":
            path.rename(home / "moved")
            path.symlink_to(home / "moved")
        case _:
            path.unlink()
            path.mkdir()
    assert code_of(store.grants, ["github"], "s1") == "secrets_locked"


def test_who_has_no_key_cannot_lead_a_value_elsewhere(store: kept.LocalSecrets, home: Path) -> None:
    store.set(secret(), VALUE)
    path = home / "secrets.json"
    path.write_text(path.read_text().replace("api.github.com", "api.attack.test"))
    assert store.list()[0].hosts == ("api.attack.test",)
    assert code_of(store.grants, ["github"], "s1") == "secrets_corrupt"


def test_values_cannot_change_places(store: kept.LocalSecrets, home: Path) -> None:
    store.set(secret(), VALUE)
    store.set(secret(name="other", env="B"), b"another-value")
    path = home / "secrets.json"
    data = json.loads(path.read_text())
    first, second = data["secrets"]
    for field in ("nonce", "sealed"):
        first[field], second[field] = second[field], first[field]
    path.write_text(json.dumps(data))
    assert code_of(store.grants, ["github"], "s1") == "secrets_corrupt"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 2, "key": "", "secrets": []}', '{"version":1,"key":"x","secrets":[{}]}'],
)
def test_a_damaged_file_is_said_to_be_one(store: kept.LocalSecrets, home: Path, text: str) -> None:
    store.set(secret(), VALUE)
    (home / "secrets.json").write_text(text)
    for call in (store.list, lambda: store.grants(["github"], "s1"), lambda: store.set(secret(), VALUE)):
        assert code_of(call) == "secrets_corrupt"
    assert (home / "secrets.json").read_text() == text, "what might be repaired is not written over"


def test_a_key_from_elsewhere(home: Path, tmp_path: Path) -> None:
    named = tmp_path / "elsewhere.key"
    store = kept.LocalSecrets(str(home), key_file=str(named))
    assert code_of(store.set, secret(), VALUE) == "secrets_locked", "a named key is not made by us"
    named.write_text("ab" * 32 + "\n")
    named.chmod(0o600)
    store.set(secret(), VALUE)
    assert not (home / "keys").exists()
    same = kept.LocalSecrets(str(home), key="ab" * 32)
    grants = same.grants(["github"], "s1")
    assert grants.credentials is not None
    grants.credentials.close()
    assert code_of(kept.LocalSecrets(str(home), key="cd" * 32).grants, ["github"], "s1") == "secrets_locked"
    assert code_of(same.rotate_key) == "secret_invalid"
    assert "abab" not in repr(same) + repr(same._vault)


def test_turning_the_key(store: kept.LocalSecrets, home: Path) -> None:
    assert store.rotate_key() == 0
    store.set(secret(), VALUE)
    old, before = (home / "keys/secrets.key").read_bytes(), (home / "secrets.json").read_bytes()
    assert store.rotate_key() == 1
    assert (home / "keys/secrets.key").read_bytes() != old
    grants = store.grants(["github"], "s1")
    assert grants.credentials is not None
    grants.credentials.close()
    (home / "secrets.json").write_bytes(before)
    assert code_of(store.grants, ["github"], "s1") == "secrets_locked", "the old key is of no use any more"


@pytest.mark.parametrize("moment", ["after the new key", "after the file"])
def test_turning_the_key_may_be_cut_off(
    store: kept.LocalSecrets, home: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.set(secret(), VALUE)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if moment == "after the new key":
            patched.setattr(vault.Vault, "_write", stop)
        else:
            replace = os.replace

            def replacing(source: str, target: str) -> None:
                if source.endswith(".new"):
                    stop()
                replace(source, target)

            patched.setattr(os, "replace", replacing)
        with pytest.raises(KeyboardInterrupt):
            store.rotate_key()
    for _ in range(2):
        grants = store.grants(["github"], "s1")
        assert grants.credentials is not None
        grants.credentials.close()
    store.set(secret(name="b", env="B"), VALUE)
    assert store.rotate_key() == 2


_STORE_MANY = """
import sys
sys.path[:0] = {path!r}
from cloche import model, secrets
store = secrets.LocalSecrets(sys.argv[1])
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 10):
    store.set(model.Secret(name=f"n{{number}}", hosts=("h.test",), env=f"V{{number}}"), b"some-value")
"""


def test_several_processes_lose_nothing(home: Path) -> None:
    program = _STORE_MANY.format(path=sys.path)
    working = [
        subprocess.Popen([sys.executable, "-c", program, str(home), str(first)]) for first in (0, 10, 20)
    ]
    assert [process.wait(50) for process in working] == [0, 0, 0]
    store = kept.LocalSecrets(str(home))
    assert len(store.list()) == 30
    grants = store.grants([info.name for info in store.list()], "s1")
    assert grants.credentials is not None
    assert len(grants.env) == 30
    grants.credentials.close()
    assert sorted(path.name for path in home.iterdir()) == ["keys", "secrets.json", "secrets.lock"]
