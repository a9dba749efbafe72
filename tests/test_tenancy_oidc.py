"""Bearers of an issuer: a real issuer on loopback, with real keys, and tokens that are forged."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, hmac, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from pydantic import ValidationError

from serve_app.config import OidcArgs
from serve_app.errors import ServiceUnavailableError
from serve_app.tenancy.authentication import is_token
from serve_app.tenancy.oidc import TokenVerifier
from serve_app.tenancy.table import RefusedKeyError
from tests.waiting import until

NOW_S = 1_800_000_000.0
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


def encoded(value: bytes | dict[str, Any]) -> str:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def number(value: int, num_bytes: int) -> str:
    return encoded(value.to_bytes(num_bytes, "big"))


def jwk(kid: str, key: PrivateKey) -> dict[str, Any]:
    if isinstance(key, rsa.RSAPrivateKey):
        numbers = key.public_key().public_numbers()
        return {"kty": "RSA", "kid": kid, "n": number(numbers.n, 256), "e": number(numbers.e, 3)}
    point = key.public_key().public_numbers()
    x, y = number(point.x, 32), number(point.y, 32)
    return {"kty": "EC", "kid": kid, "crv": "P-256", "x": x, "y": y, "use": "sig"}


def signed(key: PrivateKey, text: bytes) -> bytes:
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(text, padding.PKCS1v15(), hashes.SHA256())
    r, s = decode_dss_signature(key.sign(text, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


class Issuer:
    """An OpenID Connect issuer on loopback: its configuration and its keys."""

    def __init__(self) -> None:
        self.keys = {"r1": jwk("r1", RSA_KEY), "e1": jwk("e1", EC_KEY)}
        self.num_fetches = 0
        self.drips = False  # its keys come a byte at a time, without end
        self.is_over = threading.Event()
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/keys":
                    issuer.num_fetches += 1
                    found: object = {"keys": list(issuer.keys.values())}
                    if issuer.drips:
                        self.drip()
                        return
                else:
                    found = {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/keys"}
                body = json.dumps(found).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def drip(self) -> None:
                self.send_response(200)
                self.end_headers()
                with suppress(OSError):  # the client left
                    while not issuer.is_over.wait(0.02):
                        self.wfile.write(b" ")

            def log_message(self, *arguments: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def args(self, **fields: Any) -> OidcArgs:
        return OidcArgs(issuer=self.url, audience="loraplex", **{"timeout_s": 300} | fields)

    def claims(self, **changes: Any) -> dict[str, Any]:
        claims = {
            "iss": self.url,
            "aud": ["other", "loraplex"],
            "sub": "ann",
            "exp": NOW_S + 300,
            "scope": "openid infer admin:read",
        } | changes
        return {name: value for name, value in claims.items() if value is not None}

    def token(
        self,
        kid: str | None = "r1",
        key: PrivateKey = RSA_KEY,
        header: dict[str, Any] | None = None,
        **changes: Any,
    ) -> str:
        algorithm = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
        head = {"alg": algorithm, "typ": "JWT"} | ({} if kid is None else {"kid": kid})
        text = f"{encoded(head | (header or {}))}.{encoded(self.claims(**changes))}"
        return f"{text}.{encoded(signed(key, text.encode()))}"


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.stop()


async def refusal(verifier: TokenVerifier, token: str) -> str:
    with pytest.raises(RefusedKeyError) as refused:
        await verifier.verify(token, NOW_S)
    return refused.value.reason


@pytest.mark.parametrize(("kid", "key"), [("r1", RSA_KEY), ("e1", EC_KEY), (None, EC_KEY)])
async def test_claims_become_the_caller(issuer: Issuer, kid: str | None, key: PrivateKey) -> None:
    args = issuer.args(tenant_claim="team", models_claim="models")
    verifier = TokenVerifier(args)
    token = issuer.token(kid, key, team="acme", models=["base:*", "sql"])
    assert is_token(token)
    caller = await verifier.verify(token, NOW_S)
    assert caller.key_id == "jwt:ann"
    assert (caller.policy.tenant, caller.policy.models) == ("acme", ("base:*", "sql"))
    assert caller.policy.scopes == {"infer", "admin:read"}
    assert await verifier.verify(token, NOW_S) is caller
    assert issuer.num_fetches == 1


async def test_a_token_ends_even_if_it_was_verified_before(issuer: Issuer) -> None:
    verifier = TokenVerifier(issuer.args())
    token = issuer.token()
    assert await verifier.verify(token, NOW_S)
    with pytest.raises(RefusedKeyError) as refused:
        await verifier.verify(token, NOW_S + 361)
    assert refused.value.reason == "expired"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"iss": "https://evil.example"}, "invalid"),
        ({"aud": "other"}, "invalid"),
        ({"aud": None}, "invalid"),
        ({"exp": None}, "invalid"),
        ({"exp": "soon"}, "invalid"),
        ({"exp": True}, "invalid"),
        ({"exp": 10**400}, "invalid"),
        ({"exp": NOW_S - 61}, "expired"),
        ({"nbf": NOW_S + 61}, "invalid"),
        ({"sub": None}, "invalid"),
        ({"sub": "a\nb"}, "invalid"),
        ({"sub": "a" * 129}, "invalid"),
    ],
)
async def test_wrong_claims_are_refused(
    issuer: Issuer, changes: dict[str, Any], reason: str
) -> None:
    assert await refusal(TokenVerifier(issuer.args()), issuer.token(**changes)) == reason


async def test_forged_signatures_and_other_algorithms_are_refused(issuer: Issuer) -> None:
    verifier = TokenVerifier(issuer.args())
    good = issuer.token()
    head, body, signature = good.split(".")
    assert await refusal(verifier, f"{head}.{encoded(issuer.claims(sub='eve'))}.{signature}")
    assert await refusal(verifier, issuer.token("r1", OTHER_RSA_KEY))
    assert await refusal(verifier, issuer.token("e1", RSA_KEY))  # a key of another kind
    assert await refusal(verifier, issuer.token(header={"crit": ["x"]}))
    for name in ("none", "None", "HS256", "RS512", None, 7):
        assert await refusal(verifier, issuer.token(header={"alg": name}))
    # The public key as the secret of an HMAC.
    public = RSA_KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    text = f"{encoded({'alg': 'HS256', 'kid': 'r1'})}.{body}"
    mac = hmac.HMAC(public, hashes.SHA256())
    mac.update(text.encode())
    assert await refusal(verifier, f"{text}.{encoded(mac.finalize())}")
    for broken in (f"{head}.{body}.", f"{head}..{signature}", "ey..", f"{head}.!.{signature}"):
        assert await refusal(verifier, broken) == "invalid"
    assert await verifier.verify(good, NOW_S)


async def test_a_new_key_of_the_issuer_is_fetched_and_unknown_ones_cause_no_flood(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.tenancy.oidc._MIN_INTERVAL_S", 3600.0)
    verifier = TokenVerifier(issuer.args())
    await verifier.verify(issuer.token(), NOW_S)
    issuer.keys["r2"] = jwk("r2", OTHER_RSA_KEY)
    new = issuer.token("r2", OTHER_RSA_KEY)
    for _ in range(5):
        assert await refusal(verifier, new) == "invalid"  # the last fetch is a moment ago
    assert issuer.num_fetches == 1
    monkeypatch.setattr("serve_app.tenancy.oidc._MIN_INTERVAL_S", 0.0)
    assert (await verifier.verify(new, NOW_S)).key_id == "jwt:ann"
    assert issuer.num_fetches == 2


async def test_an_issuer_that_is_away_is_503_first_and_keeps_its_known_keys(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.tenancy.oidc._MIN_INTERVAL_S", 0.0)
    known = TokenVerifier(issuer.args())
    assert await known.verify(issuer.token(), NOW_S)
    issuer.stop()
    monkeypatch.setattr("serve_app.tenancy.oidc._MAX_AGE_S", -1.0)  # every key is too old
    assert await known.verify(issuer.token(sub="bob"), NOW_S)
    with pytest.raises(ServiceUnavailableError, match="issuer"):
        await TokenVerifier(issuer.args()).verify(issuer.token(), NOW_S)


async def test_an_issuer_that_never_ends_its_answer_holds_no_request_for_long(
    issuer: Issuer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[asyncio.Timeout] = []

    def timeout(limit_s: float) -> asyncio.Timeout:
        """Does not end by itself: the issuer may need long to begin its answer."""
        assert limit_s == 0.3
        limits.append(asyncio.timeout(None))
        return limits[-1]

    patched = SimpleNamespace(**vars(asyncio) | {"timeout": timeout})
    monkeypatch.setattr("serve_app.tenancy.oidc.asyncio", patched)
    issuer.drips = True
    verifier = TokenVerifier(issuer.args(timeout_s=0.3))
    tokens = [issuer.token(sub=f"user{number}") for number in range(20)]
    with caplog.at_level(logging.WARNING, "serve_app.tenancy.oidc"):
        verified = asyncio.gather(
            *(verifier.verify(one, NOW_S) for one in tokens), return_exceptions=True
        )
        await until(lambda: issuer.num_fetches == 1)
        limits[-1].reschedule(asyncio.get_running_loop().time())
        found = await asyncio.wait_for(verified, 30)
    assert all(isinstance(error, ServiceUnavailableError) for error in found), found
    assert issuer.num_fetches == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"could not fetch the issuer's keys: {issuer.url}/keys took longer than 0.3 s"
    ]


async def test_a_request_with_a_known_key_waits_for_no_fetch(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = TokenVerifier(issuer.args(timeout_s=300))
    assert await verifier.verify(issuer.token(), NOW_S)
    monkeypatch.setattr("serve_app.tenancy.oidc._MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr("serve_app.tenancy.oidc._MAX_AGE_S", -1.0)  # every key is too old
    issuer.drips = True
    assert await asyncio.wait_for(verifier.verify(issuer.token(sub="bob"), NOW_S), 30)
    await until(lambda: issuer.num_fetches == 2)  # in the background


@pytest.mark.parametrize(
    "junk",
    [
        7,
        None,
        {"kty": "RSA", "kid": "r1"},
        {"kty": "RSA", "kid": "r1", "n": 5, "e": [1]},
        {"kty": "RSA", "kid": "r1", "n": "AQAB", "e": "AQAB"},  # too short
        {"kty": "EC", "kid": "r1", "crv": "P-256", "x": "AA", "y": "AA"},
        {"kty": "EC", "kid": "r1", "crv": "P-256", "x": number(1, 32), "y": number(1, 32)},
        {"kty": "oct", "kid": "r1", "k": "AAAA"},
        {"kty": {}, "kid": []},
    ],
)
async def test_junk_among_the_keys_of_an_issuer_is_skipped(issuer: Issuer, junk: Any) -> None:
    verifier = TokenVerifier(issuer.args())
    issuer.keys["r1"] = junk
    assert await refusal(verifier, issuer.token()) == "invalid"
    assert await verifier.verify(issuer.token("e1", EC_KEY), NOW_S)


@pytest.mark.parametrize("url", ["http://issuer.example", "ftp://127.0.0.1/", "issuer"])
def test_an_issuer_without_tls_is_refused_unless_it_is_on_this_machine(url: str) -> None:
    with pytest.raises(ValidationError, match="issuer"):
        OidcArgs(issuer=url, audience="loraplex")
