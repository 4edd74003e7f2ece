"""The parsers without sockets: bytes that could be read in two ways are refused, anything else ends in a fact or "more"."""

import ipaddress
import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.egress import dns, http, socks, tls
from cloche.policy import names

# ── HTTP ──


def target_of(text: bytes) -> http.Target:
    head = http.parse_request(text)
    assert head is not None
    return http.proxy_target(head)


@pytest.mark.parametrize(
    "text",
    [b"GET http://a.org/\r\n\r\n", b"GET  http://a.org/ HTTP/1.1\r\n\r\n", b"G(T http://a.org/ HTTP/1.1\r\n\r\n",
     b"GET http://a.org/ HTTP/2.0\r\n\r\n", b"GET http://a.org/ HTTP/1.1\nHost: a.org\n\n",
     b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\n\r\n\r\n", b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\n x: folded\r\n\r\n",
     b"GET http://a.org/ HTTP/1.1\r\nHost : a.org\r\n\r\n", b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\nHost: a.org\r\n\r\n",
     b"GET http://a.org/ HTTP/1.1\r\nHost: b.org\r\n\r\n", b"GET http://a.org/ HTTP/1.1\r\nHost: a.org:8080\r\n\r\n",
     b"GET http://a.org/ HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a.org\r\n\r\n",
     b"GET https://a.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n", b"GET http://u@a.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n",
     b"GET http://a.org/#x HTTP/1.1\r\nHost: a.org\r\n\r\n", b"GET http:///x HTTP/1.1\r\nHost: a.org\r\n\r\n",
     b"GET http://a.org:99999/ HTTP/1.1\r\nHost: a.org\r\n\r\n", b"GET http://a.org/\x00 HTTP/1.1\r\nHost: a.org\r\n\r\n",
     b"CONNECT a.org HTTP/1.1\r\n\r\n", b"CONNECT a.org:0 HTTP/1.1\r\n\r\n", b"CONNECT http://a.org:443 HTTP/1.1\r\n\r\n",
     b"CONNECT a.org:443 HTTP/1.1\r\nHost: b.org:443\r\n\r\n", b"CONNECT a.org:443 HTTP/1.1\r\nHost: a.org:80\r\n\r\n",
     b"CONNECT a.org\x00.b.org:443 HTTP/1.1\r\n\r\n", b"\r\nGET http://a.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n",
     b"GET http://a.org/ HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n", b"GET http://a.org/" + b"x" * 70000],
)  # fmt: skip
def test_requests_with_two_meanings_are_refused(text: bytes) -> None:
    with pytest.raises(http.BadRequest):
        target_of(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(b"CONNECT a.org:443 HTTP/1.1\r\nHost: a.org:443\r\n\r\n", ("a.org", 443, "", True)),
     (b"CONNECT A.org.:443 HTTP/1.0\r\n\r\n", ("a.org", 443, "", True)),
     (b"CONNECT [::1]:443 HTTP/1.1\r\nHost: [::1]\r\n\r\n", ("::1", 443, "", True)),
     (b"GET http://a.org/x?y HTTP/1.1\r\nHost: A.org\r\n\r\n", ("a.org", 80, "/x?y", False)),
     (b"GET http://a.org:81?y HTTP/1.1\r\nHost: a.org:81\r\n\r\n", ("a.org", 81, "/?y", False)),
     (b"GET http://0x7f.1/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", ("127.0.0.1", 80, "/", False))],
)  # fmt: skip
def test_requests_to_a_proxy(text: bytes, expected: tuple[object, ...]) -> None:
    assert target_of(text) == expected


@pytest.mark.parametrize(
    "fields",
    [b"Content-Length: 1\r\nContent-Length: 1\r\n", b"Content-Length: +1\r\n", b"Content-Length: 1, 1\r\n",
     b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n",
     b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", b"Transfer-Encoding: xchunked\r\n",
     b"Content-Length: 0x10\r\n", b"Content-Length:\r\n"],
)  # fmt: skip
def test_bodies_with_two_lengths_are_refused(fields: bytes) -> None:
    head = http.parse_request(b"POST http://a.org/ HTTP/1.1\r\nHost: a.org\r\n" + fields + b"\r\n")
    assert head is not None
    with pytest.raises(http.BadRequest):
        http.body_of(head)


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n",
        b"5\nhello\r\n",
        b"2\r\nhello\r\n",
        b"-1\r\n",
        b"0x5\r\n",
        b"1 2\r\n",
        b"5" * 20 + b"\r\n",
        b"1;" + b"x" * 9000,
    ],
)
def test_chunks_that_do_not_add_up_are_refused(body: bytes) -> None:
    with pytest.raises(http.BadRequest):
        http.Body(None).feed(body)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=5), st.binary(max_size=20), st.integers(1, 7))
def test_a_chunked_body_ends_exactly_where_it_ends(chunks: list[bytes], after: bytes, step: int) -> None:
    text = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nTrailer: x\r\n\r\n"
    body, used = http.Body(None), 0
    stream = text + after
    while used < len(stream) and not body.done:
        used += body.feed(stream[used : used + step])
    assert (used, body.done) == (len(text), True)


def test_forwarding_drops_what_was_for_the_proxy_and_keeps_the_framing() -> None:
    head = http.parse_request(
        b"POST http://a.org/x HTTP/1.1\r\nHost: a.org\r\nProxy-Authorization: Basic x\r\nConnection: X-Private, Host, Content-Length\r\n"
        b"X-Private: 1\r\nContent-Length: 3\r\nProxy-Connection: keep-alive\r\nUpgrade: h2c\r\nAccept: */*\r\n\r\n"
    )
    assert head is not None
    sent = http.forward(head, http.proxy_target(head))
    assert (
        sent
        == b"POST /x HTTP/1.1\r\nHost: a.org\r\nContent-Length: 3\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    )


@given(st.text(max_size=3000))
def test_a_refusal_is_one_head_and_one_line_whatever_it_says(text: str) -> None:
    made = http.refusal(403, "blocked-by-policy", text)
    head, _, body = made.partition(b"\r\n\r\n")
    assert head.count(b"\r\n") == 4
    assert body.count(b"\n") == 1


@given(st.binary(max_size=400))
def test_any_bytes_are_a_head_or_more_or_refused(data: bytes) -> None:
    for start in (b"", b"GET ", b"GET http://a.org/ HTTP/1.1\r\n", b"CONNECT "):
        try:
            head = http.parse_request(start + data)
            if head is not None:
                http.proxy_target(head)
                http.body_of(head)
        except http.BadRequest:
            pass
    http.looks_like_http(data)


@pytest.mark.parametrize(("data", "expected"), [
    (b"", None), (b"GE", None), (b"GET ", None), (b"GET / HTTP/1.1\r\n", True), (b"connect a:1 http/1.1\n", True),
    (b"\r\nCONNECT a:1 HTTP/1.1\r\n", True), (b"SSH-2.0-x\r\n", False), (b"EHLO x\r\n", False), (b"\x16\x03", False),
    (b"PRI * HTTP/2.0\r\n\r\n", True), (b"A" * 40, False), (b"GET " + b"x" * 70000, True)])  # fmt: skip
def test_http_is_known_by_its_first_line(data: bytes, expected: bool | None) -> None:
    assert http.looks_like_http(data) is expected


# ── SOCKS5 ──


@pytest.mark.parametrize("data", [
    b"\x05\x02\x00\x01\x01\x02\x03\x04\x00\x50", b"\x05\x03\x00\x01", b"\x04\x01\x00\x01\x00", b"\x05\x01\x01\x01\x00",
    b"\x05\x01\x00\x02\x00\x00\x00\x00\x00", b"\x05\x01\x00\x03\x0aa.org\x00b.de\x01\xbb", b"\x05\x01\x00\x03\x00\x01\xbb",
    b"\x05\x01\x00\x03\x05a.org\x00\x00", b"\x05\x01\x00\x03\x02\xff\xfe\x01\xbb"])  # fmt: skip
def test_socks_requests_that_are_refused(data: bytes) -> None:
    with pytest.raises(socks.BadSocks) as caught:
        socks.parse_request(data)
    assert caught.value.reply[:1] == b"\x05"


def test_socks_requests() -> None:
    assert socks.parse_greeting(b"\x05\x02\x02\x00") == 4
    assert socks.parse_request(b"\x05\x01\x00\x03\x05A.org\x01\xbbrest") == ("a.org", 443, 12)
    assert socks.parse_request(b"\x05\x01\x00\x01\x01\x02\x03\x04\x00\x50") == ("1.2.3.4", 80, 10)
    mapped = ipaddress.ip_address("::ffff:10.0.0.1").packed
    assert socks.parse_request(b"\x05\x01\x00\x04" + mapped + b"\x00\x50") == ("10.0.0.1", 80, 22)
    with pytest.raises(socks.BadSocks):
        socks.parse_greeting(b"\x05\x01\x02")


@given(st.binary(max_size=300))
def test_any_bytes_are_socks_or_more_or_refused(data: bytes) -> None:
    for parse in (socks.parse_greeting, socks.parse_request):
        try:
            parse(b"\x05" + data)
        except socks.BadSocks:
            pass


# ── TLS ──


def hello(name: str | None) -> bytes:
    """A real one, from the ssl module."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    out = ssl.MemoryBIO()
    made = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        made.do_handshake()
    return out.read()


def records(message: bytes, size: int) -> bytes:
    pieces = [message[place : place + size] for place in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + struct.pack(">H", len(piece)) + piece for piece in pieces)


def handmade(*entries: bytes, count: int = 1) -> bytes:
    names_block = b"".join(b"\x00" + struct.pack(">H", len(entry)) + entry for entry in entries)
    extension = struct.pack(">HHH", 0, len(names_block) + 2, len(names_block)) + names_block
    extensions = extension * count
    body = (
        b"\x03\x03"
        + bytes(32)
        + b"\x00"
        + b"\x00\x02\x13\x01"
        + b"\x01\x00"
        + struct.pack(">H", len(extensions))
        + extensions
    )
    return records(b"\x01" + len(body).to_bytes(3, "big") + body, 16384)


@pytest.mark.parametrize("data", [
    b"GET / HTTP/1.1\r\n\r\n", b"\x16\x02\x01\x00\x05hello", b"\x16\x03\x01\x00\x00", b"\x16\x03\x01\xff\xff" + bytes(100),
    b"\x16\x03\x01\x00\x04\x02\x00\x00\x00", b"\x16\x03\x01\x00\x04\x01\xff\xff\xff", handmade(b"a.org", b"b.org"),
    handmade(b"a.org", count=2), handmade(b"a.org\x00.b.org"), handmade(b""), handmade(b"a b")])  # fmt: skip
def test_hellos_that_are_refused(data: bytes) -> None:
    with pytest.raises(tls.BadHello):
        tls.parse_hello(data)


@pytest.mark.parametrize(
    ("name", "expected"), [("pypi.org", "pypi.org"), ("PyPI.org", "pypi.org"), (None, None)]
)
def test_a_real_hello_names_its_server(name: str | None, expected: str | None) -> None:
    assert tls.parse_hello(hello(name)) == tls.Hello(expected)


@pytest.mark.parametrize("size", [1, 2, 5, 100, 300])
def test_a_hello_in_many_records_is_read_and_every_prefix_waits(size: int) -> None:
    whole = hello("pypi.org")
    spread = records(whole[5:], size)
    assert tls.parse_hello(spread) == tls.Hello("pypi.org")
    assert tls.parse_hello(spread + b"more") == tls.Hello("pypi.org")
    for end in range(len(spread)):
        assert tls.parse_hello(spread[:end]) is None


@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_are_a_hello_or_more_or_refused(noise: bytes, place: int) -> None:
    whole = handmade(b"pypi.org")
    for data in (noise, b"\x16\x03\x01" + noise, whole[:place] + noise + whole[place + len(noise) :]):
        try:
            tls.parse_hello(data)
        except tls.BadHello:
            pass


# ── DNS ──


def query(
    name: bytes,
    kind: int = 1,
    *,
    flags: int = 0x0100,
    counts: tuple[int, int, int, int] = (1, 0, 0, 0),
    family: int = 1,
) -> bytes:
    labels = b"".join(bytes([len(label)]) + label for label in name.split(b".")) + b"\0"
    return struct.pack(">HHHHHH", 77, flags, *counts) + labels + struct.pack(">HH", kind, family)


def ask(packet: bytes, table: dns.NameTable | None = None, *, ipv6: bool = True) -> dns.Answer:
    return dns.answer(
        packet, dns.NameTable() if table is None else table, lambda host: host.endswith("ok.org"), ipv6=ipv6
    )


@pytest.mark.parametrize(("packet", "code"), [
    (query(b"evil.org"), dns.NXDOMAIN), (query(b"1.2.3.4"), dns.NXDOMAIN), (query(b"evil.org", 16), dns.NXDOMAIN),
    (query(b"ok.org", 16), dns.REFUSED), (query(b"ok.org", 255), dns.REFUSED), (query(b"ok.org", 15), dns.REFUSED),
    (query(b"ok.org", 252), dns.REFUSED), (query(b"ok.org", family=3), dns.REFUSED), (query(b"ok.org", flags=0x2800), dns.NOTIMP),
    (query(b"ok.org", counts=(2, 0, 0, 0)), dns.FORMERR), (query(b"ok.org", counts=(1, 1, 0, 0)), dns.FORMERR),
    (query(b"a\x00.ok.org"), dns.NXDOMAIN), (query("ü.ok.org".encode()), dns.NXDOMAIN),
    (struct.pack(">HHHHHH", 1, 0, 1, 0, 0, 0) + b"\xc0\x0c\x00\x01\x00\x01", dns.FORMERR),
    (struct.pack(">HHHHHH", 1, 0, 1, 0, 0, 0) + b"\x05ok", dns.FORMERR),
    (struct.pack(">HHHHHH", 1, 0, 1, 0, 0, 0) + b"\x02ok\x00\x00", dns.FORMERR),
    (query(b".".join([b"a" * 60] * 5) + b".ok.org"), dns.FORMERR)])  # fmt: skip
def test_questions_that_get_no_address(packet: bytes, code: int) -> None:
    table = dns.NameTable()
    answer = ask(packet, table)
    assert answer.packet is not None
    assert answer.packet[3] & 15 == code
    assert struct.unpack_from(">H", answer.packet, 6)[0] == 0
    assert len(table) == 0


@pytest.mark.parametrize("packet", [b"", b"short", query(b"ok.org", flags=0x8180), bytes(5000)])
def test_some_packets_get_no_answer_at_all(packet: bytes) -> None:
    assert ask(packet).packet is None


def test_an_allowed_name_gets_addresses_that_lead_back_to_it() -> None:
    table = dns.NameTable(first=131070)
    for text in (b"ok.org", b"WWW.ok.ORG", b"a.ok.org"):
        packet = query(text)
        answer = ask(packet, table)
        assert answer.packet is not None
        assert packet[12:] in answer.packet  # the question is echoed with its case
        v4 = ipaddress.IPv4Address(answer.packet[-4:])
        six = ask(query(text, 28), table).packet
        assert six is not None
        v6 = ipaddress.IPv6Address(six[-16:])
        host = text.decode().lower()
        assert v4 in dns.FAKE_V4
        assert v6 in dns.FAKE_V6
        assert (table.host_of(v4), table.host_of(v6)) == (host, host)
        assert names.kind_of(v4) != "public"
    assert (
        ask(query(b"ok.org", 28), table, ipv6=False).packet
        == ask(query(b"ok.org", 28), table, ipv6=False).packet
    )
    nothing = ask(query(b"ok.org", 28), table, ipv6=False)
    assert nothing.code == dns.NOERROR
    assert nothing.packet is not None
    assert nothing.packet[6:8] == b"\0\0"


def test_the_name_table_forgets_the_least_used_and_gives_no_number_twice_soon() -> None:
    table = dns.NameTable(capacity=3, first=7)
    first = table.v4("a.org")
    for name in ("b.org", "c.org"):
        table.v4(name)
    assert table.v4("a.org") == first
    fourth = table.v4("d.org")  # b.org was used longest ago
    assert len(table) == 3
    assert table.host_of(first) == "a.org"
    assert fourth != first
    assert [table.host_of(dns.FAKE_V4[number]) for number in (7, 8, 9, 10)] == [
        "a.org",
        None,
        "c.org",
        "d.org",
    ]


@given(st.binary(max_size=600), st.integers(0, 40))
def test_any_packet_is_answered_or_ignored(noise: bytes, place: int) -> None:
    whole = query(b"www.ok.org")
    for data in (noise, whole[:place] + noise):
        answer = ask(data)
        assert answer.packet is None or answer.packet[:2] == data[:2]
