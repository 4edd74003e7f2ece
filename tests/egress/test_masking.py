"""Masking and putting in, as pure functions: what is found however it is cut, and what is left alone."""

import base64
import itertools
import os
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.egress import credentials, masking

VALUE = b"ghp/Za+9 \"q'\\=<secret>&%"
SHOWN = b"cloche-secret-0123456789abcdef"
FORMS = masking.forms(VALUE, SHOWN)


@given(st.lists(st.integers(0, 400), max_size=8), st.integers(0, 3), st.booleans())
def test_an_echo_is_found_however_the_stream_is_cut(cuts: list[int], before: int, keep: bool) -> None:
    text = (
        b"<" * before
        + VALUE
        + b" and "
        + base64.b64encode(b"x" * before + VALUE)
        + b" "
        + quote(VALUE, "").encode()
    )
    text += b" " + VALUE[:10] + b" " + VALUE[:-1]
    masker = masking.Masker(FORMS, keep_length=keep)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [masker.feed(text[a:b]) for a, b in itertools.pairwise(places)]
    made = b"".join(pieces) + masker.finish()
    for spelling in FORMS:
        assert spelling not in made
    assert made == masking.Masker(FORMS, keep_length=keep).whole(text)
    if keep:
        assert len(made) == len(text)
    assert made.endswith(VALUE[:10] + b" " + VALUE[:-1])  # a part of it is not it


@given(st.binary(max_size=2000), st.integers(1, 50))
def test_what_is_not_an_echo_is_untouched(data: bytes, step: int) -> None:
    masker = masking.Masker(FORMS)
    pieces = [masker.feed(data[place : place + step]) for place in range(0, len(data), step)]
    assert b"".join(pieces) + masker.finish() == data


def test_nothing_is_held_back_that_cannot_be_an_echo() -> None:
    masker = masking.Masker(FORMS)
    assert masker.feed(b"data: first\n\n") == b"data: first\n\n"
    assert masker.feed(b"data: " + VALUE[:5]) == b"data: "
    assert masker.feed(b"!\n\n") == VALUE[:5] + b"!\n\n"


@pytest.mark.parametrize("offset", range(6))
def test_base64_hides_no_alignment(offset: int) -> None:
    value = os.urandom(20).hex().encode()
    masked = masking.Masker(masking.forms(value, SHOWN)).whole(
        base64.b64encode(b"a" * offset + value + b"zz")
    )
    for alignment in range(3):
        core = base64.b64encode(b"\0" * alignment + value)[4:-4]
        assert core not in masked


def one(**fields: object) -> credentials.Credential:
    base = {"name": "n", "placeholder": SHOWN.decode(), "value": b"the-real-value", "hosts": ("api.test",)}
    return credentials.Credential(**{**base, **fields})  # type: ignore[arg-type]


def put(
    credential: credentials.Credential,
    target: str = "/",
    host: str = "api.test",
    port: int = 443,
    **fields: str,
):
    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    return credentials.Credentials([credential]).put_in(target, listed, host, port)


P = SHOWN.decode()


@pytest.mark.parametrize(
    ("credential", "arguments"),
    [
        (one(), {"host": "other.test", "Authorization": f"Bearer {P}"}),
        (one(), {"host": "api.test.evil.test", "Authorization": f"Bearer {P}"}),
        (one(), {"host": "sub.api.test", "Authorization": f"Bearer {P}"}),
        (one(hosts=("api.test:8443",)), {"Authorization": f"Bearer {P}"}),
        (one(), {"X_Other": P}),
        (one(), {"target": f"/?token={P}"}),
        (one(), {"Proxy_Authorization": f"Bearer {P}"}),
        (one(how="basic"), {"Authorization": f"Bearer {P}"}),
        (one(how="header", field="X-Api-Key"), {"Authorization": f"Bearer {P}"}),
        (one(how="header", field="X-Api-Key"), {"X_Api_Key2": P}),
        (one(how="query", field="key"), {"target": f"/{P}?other={P}"}),
        (one(how="query", field="key"), {"X_Key": P}),
    ],
)
def test_out_of_place_nothing_is_put_in(
    credential: credentials.Credential, arguments: dict[str, str]
) -> None:
    out = put(credential, **arguments)  # type: ignore[arg-type]
    assert out.used == ()
    assert [kept.name for kept in out.withheld] == ["n"]
    assert b"the-real-value" not in out.target.encode() + b"".join(value for _, value in out.fields)


@pytest.mark.parametrize(
    ("credential", "arguments", "expected"),
    [
        (one(), {"Authorization": f"Bearer {P}"}, b"Bearer the-real-value"),
        (one(), {"authorization": f"token {P}"}, b"token the-real-value"),
        (one(hosts=("*.test",)), {"Authorization": f"Bearer {P}"}, b"Bearer the-real-value"),
        (one(hosts=("**.api.test:443",)), {"Authorization": f"Bearer {P}"}, b"Bearer the-real-value"),
        (
            one(),
            {"Authorization": "Basic " + base64.b64encode(f"x-access-token:{P}".encode()).decode()},
            b"Basic " + base64.b64encode(b"x-access-token:the-real-value"),
        ),
        (
            one(how="basic", user="me"),
            {"Authorization": "Basic " + base64.b64encode(f"anyone:{P}".encode()).decode()},
            b"Basic " + base64.b64encode(b"me:the-real-value"),
        ),
        (one(how="header", field="X-Api-Key"), {"x_api_key": P}, b"the-real-value"),
        (one(how="header", field="Auth", format="key={}"), {"Auth": P}, b"key=the-real-value"),
    ],
)
def test_in_its_place_it_is_put_in(
    credential: credentials.Credential, arguments: dict[str, str], expected: bytes
) -> None:
    out = put(credential, **arguments)  # type: ignore[arg-type]
    assert out.fields[0][1] == expected
    assert [used.name for used in out.used] == ["n"]
    assert out.withheld == ()


def test_in_a_query_it_is_quoted() -> None:
    out = put(one(how="query", field="key", value=b"a&b=c/d e+f"), target=f"/v1?x=1&key={P}&y={P}")
    assert out.target == f"/v1?x=1&key=a%26b%3Dc%2Fd%20e%2Bf&y={P}"
    assert len(out.withheld) == 1, "the second one is out of place"


def test_a_credential_does_not_show_itself() -> None:
    assert "real-value" not in repr(one()) + str([one()]) + repr(put(one(), Authorization=f"Bearer {P}").used)


def test_sealed_credentials_cannot_be_changed() -> None:
    fd = credentials.seal([one()])
    try:
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert [(kept.name, kept.value) for kept in credentials.unseal(fd).all] == [("n", b"the-real-value")]
    finally:
        os.close(fd)


def test_a_damaged_file_is_refused_without_a_word_of_it() -> None:
    fd = os.memfd_create("test")
    try:
        os.write(fd, b'[{"name": "n", "value": "the-real-value"}]')
        with pytest.raises(ValueError) as refused:
            credentials.unseal(fd)
        assert "real-value" not in str(refused.value)
    finally:
        os.close(fd)
