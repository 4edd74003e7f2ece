"""Every spelling of `spellings.toml`, on every way by which a host enters: rules, HTTP, SOCKS5, TLS and the name service."""

import ipaddress
import socket
import struct
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cloche import errors
from cloche.egress import dns, http, socks
from cloche.policy import names, rules

ROWS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("spellings.toml").read_text("utf-8"))[
    "row"
]
REFUSED = [row for row in ROWS if "refused" in row]
ACCEPTED = [row for row in ROWS if "canonical" in row]
OPEN = rules.RuleSet(mode="open")
make = rules.RuleSet.make


def ids(row: dict[str, Any]) -> str:
    return ascii(row["text"])[1:40]


def test_the_table_is_large_and_each_row_says_one_thing() -> None:
    assert len(ROWS) >= 60
    assert len({row["text"] for row in ROWS}) == len(ROWS)
    assert all(("canonical" in row) != ("refused" in row) for row in ROWS)


@pytest.mark.parametrize("row", REFUSED, ids=ids)
def test_a_spelling_without_one_meaning_is_refused_everywhere(row: dict[str, Any]) -> None:
    text = row["text"]
    with pytest.raises(names.BadHost, match=row["refused"]):
        names.canonical(text)
    assert rules.decide(OPEN, rules.Request(text, 443)).reason == "name_invalid"
    if not text.startswith("*") and ":" not in text and text.strip() == text:
        with pytest.raises(errors.ClocheError):
            make(allow=[{"host": text}])
    raw = text.encode("utf-8", "surrogatepass")[:255]
    with pytest.raises(socks.BadSocks):
        socks.parse_request(b"\x05\x01\x00\x03" + bytes([len(raw)]) + raw + b"\x01\xbb")
    if (
        text != "pypi.org:443"
        and "://" not in text
        and not text.startswith(("/", "pypi.org/", "pypi.org?", "pypi.org#"))
    ):
        for request in (
            f"CONNECT {text}:443 HTTP/1.1\r\n\r\n",
            f"GET http://{text}/ HTTP/1.1\r\nHost: {text}\r\n\r\n",
        ):
            with pytest.raises(http.BadRequest):
                proxied(request.encode())


def proxied(request: bytes) -> http.Target:
    head = http.parse_request(request)
    assert head is not None
    return http.proxy_target(head)


@pytest.mark.parametrize("row", ACCEPTED, ids=ids)
def test_a_spelling_means_its_canonical_form_and_that_means_itself(row: dict[str, Any]) -> None:
    canonical = names.canonical(row["text"])
    assert canonical == row["canonical"]
    assert names.canonical(canonical) == canonical
    assert names.is_address(canonical) == (
        row.get("kind") is not None and canonical not in names.METADATA_NAMES
    )


@pytest.mark.parametrize("row", ACCEPTED, ids=ids)
def test_what_is_not_public_is_refused_in_every_spelling_even_when_open(row: dict[str, Any]) -> None:
    decision = rules.decide(OPEN, rules.Request(row["text"], 80, "http", "GET", "/"))
    kind = row.get("kind", "public")
    assert decision.allowed == (kind == "public"), decision
    if kind != "public":
        assert decision.reason == ("metadata" if kind == "metadata" else "private_address")


@pytest.mark.parametrize("row", [row for row in ACCEPTED if row.get("kind") == "metadata"], ids=ids)
def test_no_rule_reaches_a_metadata_service(row: dict[str, Any]) -> None:
    wide = make("open", allow=["0.0.0.0/0", "::/0", "**.internal", "**.goog"])
    assert rules.decide(wide, rules.Request(row["text"], 80)).reason == "metadata"
    with pytest.raises(errors.ClocheError):
        make(allow=[{"host": row["canonical"]}])
    if names.is_address(row["canonical"]):
        found = rules.check_address(wide, "innocent.test", row["canonical"], 80, pinned=True)
        assert found.reason == "metadata"


@pytest.mark.parametrize("row", [row for row in ACCEPTED if "kind" in row and row["text"].isascii()], ids=ids)
def test_the_system_reads_an_address_as_we_do(row: dict[str, Any]) -> None:
    """What the C library makes of the spelling: the same address, or none at all."""
    text = row["text"].strip("[]")
    if row["canonical"] in names.METADATA_NAMES:
        return
    try:
        found = socket.getaddrinfo(text, 80, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return
    read = ipaddress.ip_address(str(found[0][4][0]))
    assert str(getattr(read, "ipv4_mapped", None) or read) == row["canonical"]


def question(name: bytes, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label for label in name.split(b".")) + b"\0"
    return struct.pack(">HHHHHH", 1, 0x100, 1, 0, 0, 0) + labels + struct.pack(">HH", kind, 1)


@pytest.mark.parametrize("row", REFUSED, ids=ids)
def test_the_name_service_gives_a_refused_spelling_no_address(row: dict[str, Any]) -> None:
    raw = row["text"].encode("utf-8")
    if any(not 0 < len(label) < 64 for label in raw.split(b".")):
        return
    table = dns.NameTable()
    answer = dns.answer(question(raw), table, lambda host: True)
    assert answer.code != dns.NOERROR
    assert len(table) == 0
