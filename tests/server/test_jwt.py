"""Tokens of an issuer: everything that must not pass, then what does, then keys that come and go."""

import asyncio
import base64
import hmac
import json
import threading
from collections.abc import Iterator
from http import server as http_server
from typing import Any, ClassVar

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from cloche import errors, settings
from cloche.server import jwt, keys
from tests.server.conftest import Clock

NOW = 1_800_000_000.0
ISSUER, AUDIENCE = "https://id.example", "cloche"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
WEAK_RSA = rsa.generate_private_key(public_exponent=65537, key_size=1024)
EC = {
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "ES384": ec.generate_private_key(ec.SECP384R1()),
    "ES512": ec.generate_private_key(ec.SECP521R1()),
}
ED = ed25519.Ed25519PrivateKey.generate()
HASHES = {"256": hashes.SHA256(), "384": hashes.SHA384(), "512": hashes.SHA512()}
CURVES = {"ES256": ("P-256", 32), "ES384": ("P-384", 48), "ES512": ("P-521", 66)}


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def number(value: int, size: int | None = None) -> str:
    return encoded(value.to_bytes(size or (value.bit_length() + 7) // 8, "big"))


def published(key: Any, kid: str, **more: Any) -> dict[str, Any]:
    public = key.public_key()
    if isinstance(key, rsa.RSAPrivateKey):
        numbers = public.public_numbers()
        return {"kty": "RSA", "kid": kid, "n": number(numbers.n), "e": number(numbers.e), **more}
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return {"kty": "OKP", "crv": "Ed25519", "kid": kid, "x": encoded(public.public_bytes_raw()), **more}
    curve, size = next(CURVES[name] for name, made in EC.items() if made is key)
    numbers = public.public_numbers()
    return {
        "kty": "EC",
        "crv": curve,
        "kid": kid,
        "x": number(numbers.x, size),
        "y": number(numbers.y, size),
        **more,
    }


def claims(**more: Any) -> dict[str, Any]:
    said = {
        "iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "tenant": "red", "scope": "openid exec files",
        "iat": NOW, "exp": NOW + 300, **more,
    }  # fmt: skip
    return {name: value for name, value in said.items() if value is not ...}


def signed(key: Any, algorithm: str, said: dict[str, Any] | None = None, **header: Any) -> str:
    head = {"alg": algorithm, "typ": "JWT", **header}
    body = claims() if said is None else said
    text = f"{encoded(json.dumps(head).encode())}.{encoded(json.dumps(body).encode())}"
    return f"{text}.{encoded(signature(key, algorithm, text.encode()))}"


def signature(key: Any, algorithm: str, data: bytes) -> bytes:
    if isinstance(key, bytes):
        return hmac.new(
            key, data, {"256": "sha256", "384": "sha384", "512": "sha512"}[algorithm[2:]]
        ).digest()
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(data)
    digest = HASHES[algorithm[2:]]
    if isinstance(key, ec.EllipticCurvePrivateKey):
        size = CURVES[algorithm][1]
        return b"".join(
            half.to_bytes(size, "big") for half in decode_dss_signature(key.sign(data, ec.ECDSA(digest)))
        )
    filled = (
        padding.PSS(padding.MGF1(digest), digest.digest_size) if algorithm[0] == "P" else padding.PKCS1v15()
    )
    return key.sign(data, filled, digest)


EVERY = [
    published(RSA, "rsa"), published(ED, "ed"), *(published(key, name) for name, key in EC.items()),
    published(WEAK_RSA, "weak"), published(OTHER_RSA, "for-encryption", use="enc"), published(OTHER_RSA, "ps-only", alg="PS256"),
    {"kty": "oct", "kid": "oct", "k": encoded(b"x" * 32)}, "nonsense", {"kty": "RSA", "kid": "half", "n": "AQAB"},
    {"kty": "EC", "crv": "P-256", "kid": "off-curve", "x": number(1, 32), "y": number(1, 32)},
]  # fmt: skip


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": EVERY}))
    return path


def tokens(place: Any, **more: Any) -> jwt.Tokens:
    said = {"issuer": ISSUER, "audience": (AUDIENCE,), "jwks": str(place), **more}
    return jwt.Tokens(settings.Jwt(**said), now=lambda: NOW)


def check(known: jwt.Tokens, token: str) -> Any:
    async def both() -> Any:
        await known.prepare(token)
        return known.check(token)

    return asyncio.run(both())


def refusal(known: jwt.Tokens, token: str) -> errors.ClocheError:
    with pytest.raises(errors.ClocheError) as caught:
        check(known, token)
    return caught.value


# ── what does not pass ─────────────────────────────────────────────────────────────────────────────


def tampered(token: str) -> str:
    head, _, tail = token.split(".")
    return f"{head}.{encoded(json.dumps(claims(tenant='blue')).encode())}.{tail}"


def unsigned(token: str) -> str:
    return f"{encoded(json.dumps({'alg': 'none'}).encode())}.{token.split('.')[1]}."


PEM = RSA.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)
GOOD = signed(RSA, "RS256", kid="rsa")
HEAD, BODY, TAIL = GOOD.split(".")
BAD = {
    "tampered": tampered(GOOD),
    "another's signature": signed(OTHER_RSA, "RS256", kid="rsa"),
    "the signature of another token": f"{BODY}.{BODY}.{TAIL}",
    "unsigned": unsigned(GOOD),
    "unsigned, with what was the signature": unsigned(GOOD) + TAIL,
    "None": signed(RSA, "RS256", kid="rsa").replace(HEAD, encoded(b'{"alg":"None","kid":"rsa"}')),
    "HS256 with the public key": signed(PEM, "HS256", kid="rsa"),
    "HS256 with the modulus": signed(number(RSA.public_key().public_numbers().n).encode(), "HS256", kid="rsa"),
    "HS256 with a published secret": signed(b"x" * 32, "HS256", kid="oct"),
    "an unknown key": signed(RSA, "RS256", kid="nobody's"),
    "no key named, of several": signed(RSA, "RS256"),
    "a key that is no text": signed(RSA, "RS256", kid=["rsa"]),
    "a key of another type": signed(RSA, "RS256", kid="ES256"),
    "an algorithm of another type": signed(RSA, "RS256", kid="rsa").replace(HEAD, encoded(b'{"alg":"ES256","kid":"rsa"}')),
    "another curve": signed(EC["ES256"], "ES256", kid="ES384"),
    "an algorithm that the key does not name": signed(OTHER_RSA, "RS256", kid="ps-only"),
    "a key for something else": signed(OTHER_RSA, "RS256", kid="for-encryption"),
    "a weak key": signed(WEAK_RSA, "RS256", kid="weak"),
    "a point that is not on the curve": signed(EC["ES256"], "ES256", kid="off-curve"),
    "its own key": signed(OTHER_RSA, "RS256", kid="mine", jwk=published(OTHER_RSA, "mine")),
    "keys from elsewhere": signed(OTHER_RSA, "RS256", kid="mine", jku="http://127.0.0.1:1/keys"),
    "a critical extension": signed(RSA, "RS256", kid="rsa", crit=["b64"], b64=False),
    "another kind of token": signed(RSA, "RS256", kid="rsa", typ="secevent+jwt"),
    "a signature in DER": f"{signed(EC['ES256'], 'ES256', kid='ES256').rpartition('.')[0]}."
    + encoded(EC["ES256"].sign(b"x", ec.ECDSA(hashes.SHA256()))),
    "a signature of nothing": encoded(b'{"alg":"ES256","kid":"ES256"}') + f".{BODY}.{encoded(bytes(64))}",
    "another audience": signed(RSA, "RS256", claims(aud="billing"), kid="rsa"),
    "no audience": signed(RSA, "RS256", claims(aud=...), kid="rsa"),
    "an audience that is none": signed(RSA, "RS256", claims(aud={"cloche": 1}), kid="rsa"),
    "another issuer": signed(RSA, "RS256", claims(iss=ISSUER + "/"), kid="rsa"),
    "no issuer": signed(RSA, "RS256", claims(iss=...), kid="rsa"),
    "not yet": signed(RSA, "RS256", claims(nbf=NOW + 31), kid="rsa"),
    "issued tomorrow": signed(RSA, "RS256", claims(iat=NOW + 86400), kid="rsa"),
    "without end": signed(RSA, "RS256", claims(exp=...), kid="rsa"),
    "an end that is no time": signed(RSA, "RS256", claims(exp="never"), kid="rsa"),
    "an end that is true": signed(RSA, "RS256", claims(exp=True), kid="rsa"),
    "nobody": signed(RSA, "RS256", claims(sub=...), kid="rsa"),
    "an empty name": signed(RSA, "RS256", claims(sub=""), kid="rsa"),
    "a name with a line": signed(RSA, "RS256", claims(sub="alice\nkey:admin"), kid="rsa"),
    "a huge name": signed(RSA, "RS256", claims(sub="a" * 201), kid="rsa"),
    "no tenant": signed(RSA, "RS256", claims(tenant=...), kid="rsa"),
    "an empty tenant": signed(RSA, "RS256", claims(tenant=""), kid="rsa"),
    "a tenant with a path": signed(RSA, "RS256", claims(tenant="red/blue"), kid="rsa"),
    "several tenants": signed(RSA, "RS256", claims(tenant=["red"]), kid="rsa"),
    "too long": signed(RSA, "RS256", claims(padding="x" * 9000), kid="rsa"),
    "no JSON": f"{encoded(b'[]')}.{BODY}.{TAIL}",
    "no base64": f"{HEAD}.{BODY}.{TAIL[:-3]}!!!",
    "padded": f"{HEAD}.{BODY}==.{TAIL}",
    "empty parts": "eyJ..",
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_token_that_is_not_genuine_is_refused_and_nothing_is_told(place, what):
    known = tokens(place)
    problem = refusal(known, BAD[what])
    assert (problem.code, problem.message, problem.details) == (
        "token_invalid",
        "the token is not accepted here",
        {},
    )
    assert problem.record, "the audit log says why"
    assert check(known, GOOD).name == "jwt:alice"


def test_an_expired_token_says_so_and_only_a_genuine_one(place):
    late = claims(exp=NOW - 31)
    assert refusal(tokens(place), signed(RSA, "RS256", late, kid="rsa")).code == "token_expired"
    assert refusal(tokens(place), signed(OTHER_RSA, "RS256", late, kid="rsa")).code == "token_invalid"
    other = claims(exp=NOW - 31, aud="billing")
    assert refusal(tokens(place), signed(RSA, "RS256", other, kid="rsa")).code == "token_invalid"


def test_an_algorithm_that_the_operator_does_not_want_is_refused(place):
    known = tokens(place, algorithms=("ES256",))
    assert refusal(known, GOOD).code == "token_invalid"
    assert check(known, signed(EC["ES256"], "ES256", kid="ES256")).name == "jwt:alice"


@pytest.mark.parametrize(
    "jwks",
    ["http://id.example/keys", "ftp://id.example/keys", "keys.json", "", "file://host/keys", "https://"],
)
def test_keys_do_not_come_by_a_way_that_anybody_can_answer_on(jwks):
    with pytest.raises(errors.ClocheError) as caught:
        tokens(jwks)
    assert caught.value.code == "settings_invalid"


# ── what passes ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("algorithm", jwt.ALGORITHMS)
def test_every_algorithm_that_is_promised_works(place, algorithm):
    key, kid = (
        (RSA, "rsa") if algorithm[1] == "S" and algorithm[0] != "E" else (EC.get(algorithm, ED), algorithm)
    )
    kid = "ed" if algorithm == "EdDSA" else kid
    found = check(tokens(place), signed(key, algorithm, kid=kid))
    assert (found.name, found.tenant, found.scopes) == ("jwt:alice", "red", {"exec", "files"})
    assert (found.actor, found.expires_at, found.host_paths) == ("jwt:alice@red", NOW + 300, False)


def test_a_little_late_and_a_little_early_are_forgiven(place):
    said = claims(exp=NOW - 29, nbf=NOW + 29, iat=NOW + 29)
    assert check(tokens(place), signed(RSA, "RS256", said, kid="rsa")).name == "jwt:alice"


def test_a_token_may_leave_out_which_key_where_there_is_one(place):
    place.write_text(json.dumps({"keys": [published(RSA, "rsa")]}))
    assert check(tokens(place), signed(RSA, "RS256")).name == "jwt:alice"


@pytest.mark.parametrize(
    ("settings", "said", "tenant", "scopes"),
    [
        ({"tenant_claim": None}, {"tenant": ...}, "", {"exec", "files"}),
        ({"tenant_claim": "org.id"}, {"org": {"id": "green"}}, "green", {"exec", "files"}),
        ({"tenant_claim": "https://x.example/org"}, {"https://x.example/org": "green"}, "green", {"exec", "files"}),
        ({"scopes_claim": "scp"}, {"scp": ["exec", "*", "nonsense", 5]}, "red", {"exec"}),
        ({"scope_prefix": "cloche:"}, {"scope": "exec cloche:files"}, "red", {"files"}),
        ({"scopes_claim": None}, {}, "red", set()),
        ({"roles_claim": "roles", "scopes_claim": None}, {"roles": ["runner", "king"]}, "red", set(keys.ROLES["runner"])),
        ({"scopes_claim": None}, {"roles": ["admin"]}, "red", set()),
        ({"roles_claim": "groups", "roles": {"ops": "admin"}, "scopes_claim": None}, {"groups": ["ops", "admin"]}, "red", {"*"}),
        ({"roles_claim": "groups", "roles": {"ops": "admin"}, "scopes_claim": None}, {"groups": ["admin"]}, "red", set()),
        ({"name_claim": "email"}, {"email": "a@example.org"}, "red", {"exec", "files"}),
    ],
    ids=lambda value: None if isinstance(value, set) else repr(value),
)  # fmt: skip
def test_claims_are_read_as_the_operator_says(place, settings, said, tenant, scopes):
    found = check(tokens(place, **settings), signed(RSA, "RS256", claims(**said), kid="rsa"))
    assert (found.tenant, found.scopes) == (tenant, scopes)


# ── keys that come and go ──────────────────────────────────────────────────────────────────────────


def test_a_file_is_read_again_when_it_changes_and_kept_when_it_is_broken(place, caplog):
    known = tokens(place)
    place.write_text(json.dumps({"keys": [published(OTHER_RSA, "new")]}))
    assert check(known, signed(OTHER_RSA, "RS256", kid="new")).name == "jwt:alice"
    place.write_text("{")
    assert check(known, signed(OTHER_RSA, "RS256", kid="new")).name == "jwt:alice"
    assert "could not be read" in caplog.text
    place.write_text(json.dumps({"keys": EVERY}))
    assert refusal(known, signed(OTHER_RSA, "RS256", kid="new")).code == "token_invalid"
    assert check(known, GOOD).name == "jwt:alice"


class Issuer(http_server.BaseHTTPRequestHandler):
    answer: tuple[int, bytes] = (200, b"")
    asked = 0
    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        type(self).asked += 1
        type(self).paths.append(self.path)
        status, data = type(self).answer
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def issuer() -> Iterator[tuple[type[Issuer], str]]:
    class Own(Issuer):
        paths: ClassVar[list[str]] = []

    Own.answer = (200, json.dumps({"keys": EVERY}).encode())
    with http_server.ThreadingHTTPServer(("127.0.0.1", 0), Own) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield Own, f"http://127.0.0.1:{made.server_port}/keys"
        made.shutdown()
        thread.join()


def fetching(url: str, clock: Clock) -> jwt.Tokens:
    said = settings.Jwt(issuer=ISSUER, audience=(AUDIENCE,), jwks=url)
    return jwt.Tokens(said, now=lambda: NOW, clock=clock)


def test_keys_are_fetched_once_and_shared(issuer):
    own, url = issuer
    known = fetching(url, Clock(1000.0))

    async def many() -> None:
        await asyncio.gather(*(known.prepare(GOOD) for _ in range(50)))

    asyncio.run(many())
    assert known.check(GOOD).name == "jwt:alice"
    assert own.asked == 1


def test_unknown_keys_do_not_hammer_the_issuer(issuer):
    own, url = issuer
    clock = Clock(1000.0)
    known = fetching(url, clock)

    async def storm() -> None:
        await asyncio.gather(*(known.prepare(signed(RSA, "RS256", kid=f"made-up-{i}")) for i in range(300)))

    asyncio.run(storm())
    asyncio.run(storm())
    assert own.asked == 1
    clock.now += 11
    asyncio.run(storm())
    assert own.asked == 2


def test_a_key_that_was_rotated_in_is_found_and_one_that_was_rotated_out_is_not(issuer):
    own, url = issuer
    clock = Clock(1000.0)
    known = fetching(url, clock)
    assert check(known, GOOD).name == "jwt:alice"
    own.answer = (200, json.dumps({"keys": [published(OTHER_RSA, "new")]}).encode())
    clock.now += 11
    assert check(known, signed(OTHER_RSA, "RS256", kid="new")).name == "jwt:alice"
    assert refusal(known, GOOD).code == "token_invalid"


@pytest.mark.parametrize(
    "answer",
    [(500, b"no"), (200, b"{"), (200, b'{"keys": []}'), (200, b"x" * (1 << 21)), (302, b"")],
    ids=["fails", "no JSON", "empty", "huge", "leads elsewhere"],
)
def test_who_cannot_fetch_goes_on_with_what_there_is_and_says_so(issuer, answer, caplog):
    own, url = issuer
    clock = Clock(1000.0)
    known = fetching(url, clock)
    assert check(known, GOOD).name == "jwt:alice"
    own.answer = answer
    clock.now += 11
    refusal(known, signed(RSA, "RS256", kid="unknown"))
    assert own.asked == 2
    assert "/elsewhere" not in own.paths
    assert "could not be fetched" in caplog.text
    assert check(known, GOOD).name == "jwt:alice"


def test_without_any_keys_it_is_our_fault(caplog):
    known = fetching("http://127.0.0.1:1/keys", Clock(1000.0))
    assert refusal(known, GOOD).code == "server_unavailable"
    assert "could not be fetched" in caplog.text


def test_old_keys_are_fetched_again_beside_the_request(issuer):
    own, url = issuer
    clock = Clock(1000.0)
    known = fetching(url, clock)

    async def again() -> None:
        await known.prepare(GOOD)
        clock.now += 601
        await known.prepare(GOOD)
        fetching = known._published._fetching
        assert fetching is not None
        await fetching

    asyncio.run(again())
    assert own.asked == 2


def test_a_digest_is_what_it_says():
    """The helper above signs as RFC 7515 says: its own example (A.1)."""
    key = base64.urlsafe_b64decode(
        "AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow=="
    )
    text = "eyJ0eXAiOiJKV1QiLA0KICJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ"
    assert encoded(signature(key, "HS256", text.encode())) == "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
