"""JSON Web Tokens of an issuer (OpenID Connect) as bearers: issuer, audience and claims identify
the caller. RFC 7519 and 7515, signed with RS256 or ES256 only; keys by RFC 7517.

PyJWT verifies them. The two algorithms are fixed here, so that no header of a token chooses another
one; the times are compared with the caller's clock. A request waits for a fetch of the issuer's
public keys only if its key is unknown; a fetch has a time limit as a whole, and the next one begins
ten seconds after its end at the earliest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import ssl
import time
from functools import cache
from typing import Any

import httpx
import jwt

from serve_app.config import OidcArgs
from serve_app.errors import ServiceUnavailableError
from serve_app.tasks import spawn
from serve_app.tenancy.caller import SCOPES, Caller, KeyPolicy
from serve_app.tenancy.table import RefusedKeyError

logger = logging.getLogger(__name__)

_LEEWAY_S = 60.0  # between the issuer's clock and this one
_MAX_AGE_S = 3600.0  # then the keys are fetched again
_MIN_INTERVAL_S = 10.0  # from the end of a fetch to the next one
_MAX_DOCUMENT_BYTES = 1024**2
_MIN_RSA_BITS = 2048
_MAX_VERIFIED = 4096  # tokens; a signature costs 30 to 100 us
_MAX_CHARS = 128  # of a tenant and of a subject
_MAX_GLOBS = 1000

_OPTIONS: Any = {"verify_exp": False, "verify_nbf": False, "verify_iat": False, "verify_jti": False}


class TokenVerifier:
    def __init__(self, args: OidcArgs) -> None:
        self._args = args
        self._keys: dict[str, jwt.PyJWK] = {}  # by `kid`
        self._fetched_s = -math.inf  # when the keys last arrived
        self._ended_s = -math.inf  # when the last fetch ended
        self._fetching: asyncio.Task[None] | None = None
        self._verified: dict[bytes, tuple[Caller, float]] = {}  # by hash; until when

    async def verify(self, text: str, now_s: float) -> Caller:
        """Returns the caller. `now_s`: seconds since 1970. Raises RefusedKeyError, and
        ServiceUnavailableError if the issuer's keys are not known."""
        name = hashlib.sha256(text.encode()).digest()
        known = self._verified.get(name)
        is_fresh = time.monotonic() - self._fetched_s <= _MAX_AGE_S
        if known is not None and now_s < known[1] and is_fresh:
            return known[0]
        try:
            header = jwt.get_unverified_header(text)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise RefusedKeyError("invalid") from None
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in ("RS256", "ES256") or "crit" in header:
            raise RefusedKeyError("invalid")
        key = await self._key(algorithm, kid)
        claims = None if key is None else self._claims(text, key)
        if claims is None:
            raise RefusedKeyError("invalid")
        until_s = _check_times(claims, now_s)
        caller = self._caller(claims)
        if len(self._verified) >= _MAX_VERIFIED:
            del self._verified[next(iter(self._verified))]
        self._verified[name] = caller, until_s
        return caller

    async def _key(self, algorithm: str, kid: object) -> jwt.PyJWK | None:
        is_old = time.monotonic() - self._fetched_s > _MAX_AGE_S
        is_unknown = self._find(algorithm, kid) is None
        if (is_old or is_unknown) and (fetching := self._refresh()) is not None and is_unknown:
            await asyncio.wait((fetching,))
        if not self._keys:
            raise ServiceUnavailableError("The keys of the token's issuer are not known.", 5)
        return self._find(algorithm, kid)

    def _find(self, algorithm: str, kid: object) -> jwt.PyJWK | None:
        if kid is None:  # allowed where the issuer has one key of the kind
            fitting = [key for key in self._keys.values() if key.algorithm_name == algorithm]
            return fitting[0] if len(fitting) == 1 else None
        key = self._keys.get(kid) if isinstance(kid, str) else None
        return key if key is not None and key.algorithm_name == algorithm else None

    def _refresh(self) -> asyncio.Task[None] | None:
        """Returns the fetch of the keys, which concurrent callers share; None a moment after the
        last one."""
        if self._fetching is None and time.monotonic() - self._ended_s >= _MIN_INTERVAL_S:
            self._fetching = spawn(self._fetch_keys(), "fetch-issuer-keys")
        return self._fetching

    async def _fetch_keys(self) -> None:
        """If it fails, the keys stay as they are."""
        try:
            url, document = await self._fetch_document()
            keys = await asyncio.to_thread(_read_keys, url, document)
        except Exception as error:  # whatever the issuer sends
            logger.warning("could not fetch the issuer's keys: %s", error)
        else:
            if _numbers(keys) != _numbers(self._keys):
                self._verified = {}  # a key that the issuer withdrew ends its tokens
            self._keys, self._fetched_s = keys, time.monotonic()
        finally:
            self._fetching, self._ended_s = None, time.monotonic()

    async def _fetch_document(self) -> tuple[str, Any]:
        """Returns the list of keys, and its address."""
        url, timeout_s = self._args.jwks_url, self._args.timeout_s
        if url is None:
            issuer = self._args.issuer
            place = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
            found = await _fetch(place, timeout_s)
            if not isinstance(found, dict) or found.get("issuer") != issuer:
                raise ValueError(f"the configuration at {issuer} is of another issuer")
            url = found.get("jwks_uri")
            if not isinstance(url, str) or not url.startswith(("https://", issuer)):
                raise ValueError(f"the configuration at {issuer} has no jwks_uri of https")
        return url, await _fetch(url, timeout_s)

    def _claims(self, text: str, key: jwt.PyJWK) -> dict[str, Any] | None:
        """Returns the claims; None without a valid signature, or for another issuer or audience."""
        args = self._args
        try:
            claims: dict[str, Any] = jwt.decode(
                text,
                key,
                algorithms=[key.algorithm_name],
                audience=args.audience,
                issuer=args.issuer,
                options=_OPTIONS,
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            return None
        return claims

    def _caller(self, claims: dict[str, Any]) -> Caller:
        args = self._args
        tenant, subject = claims.get(args.tenant_claim), claims.get("sub")
        for name in (tenant, subject):
            is_name = isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_CHARS
            if not is_name:
                raise RefusedKeyError("invalid")
        scopes = _words(claims.get(args.scopes_claim))
        models = ("*",) if args.models_claim is None else _words(claims.get(args.models_claim))
        granted = frozenset(scope for scope in SCOPES if scope in scopes)
        return Caller(f"jwt:{subject}", KeyPolicy(str(tenant), models, granted))


async def _fetch(url: str, timeout_s: float) -> Any:
    """Returns the JSON document at a URL. Raises OSError or ValueError."""
    content = b""
    try:
        # httpx has limits for each read alone: an issuer may send a byte now and then.
        async with (
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(timeout=None, verify=await asyncio.to_thread(_tls)) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != 200:
                raise OSError(f"{url} answered {answer.status_code}")
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > _MAX_DOCUMENT_BYTES:
                    raise ValueError(f"{url} has more than {_MAX_DOCUMENT_BYTES} bytes")
    except TimeoutError as error:
        raise OSError(f"{url} took longer than {timeout_s:g} s") from error
    except httpx.HTTPError as error:
        raise OSError(f"{url}: {error or type(error).__name__}") from error
    return json.loads(content)


@cache
def _tls() -> ssl.SSLContext:
    """Reads the authorities' certificates, which takes milliseconds."""
    return httpx.create_ssl_context()


def _read_keys(url: str, document: object) -> dict[str, jwt.PyJWK]:
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError(f"{url} has no list of keys")
    keys: dict[str, jwt.PyJWK] = {}
    for number, one in enumerate(listed):
        key = _read_key(one) if isinstance(one, dict) else None
        if key is not None:
            kid = one.get("kid")
            keys[kid if isinstance(kid, str) else f"\0{number}"] = key
    if not keys:
        raise ValueError(f"{url} has no key for RS256 or ES256")
    return keys


def _read_key(found: dict[str, Any]) -> jwt.PyJWK | None:
    """Returns a public key; None for a key of another kind or purpose, or a damaged key."""
    algorithm = {"RSA": "RS256", "EC": "ES256"}.get(str(found.get("kty")))
    if algorithm is None or found.get("use", "sig") != "sig":
        return None
    if found.get("alg", algorithm) != algorithm:
        return None
    if algorithm == "ES256" and found.get("crv") != "P-256":
        return None
    names = ("kty", "n", "e") if algorithm == "RS256" else ("kty", "crv", "x", "y")
    try:
        key = jwt.PyJWK({name: found[name] for name in names}, algorithm)
    except (jwt.PyJWTError, KeyError, TypeError, ValueError):
        return None
    return key if algorithm == "ES256" or key.key.key_size >= _MIN_RSA_BITS else None


def _numbers(keys: dict[str, jwt.PyJWK]) -> dict[str, object]:
    """Returns the keys as values that can be compared."""
    return {kid: one.key.public_numbers() for kid, one in keys.items()}


def _check_times(claims: dict[str, Any], now_s: float) -> float:
    """Returns the time until which the token counts. Raises RefusedKeyError."""
    begins_s, ends_s = _time(claims.get("nbf", 0)), _time(claims.get("exp"))
    if begins_s is None or ends_s is None or now_s < begins_s - _LEEWAY_S:
        raise RefusedKeyError("invalid")
    if now_s >= ends_s + _LEEWAY_S:
        raise RefusedKeyError("expired")
    return ends_s + _LEEWAY_S


def _time(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _words(value: object) -> tuple[str, ...]:
    """Returns the values of a claim: a list of strings, or one string with spaces between them."""
    found = value.split() if isinstance(value, str) else value
    if not isinstance(found, list):
        return ()
    return tuple(word for word in found[:_MAX_GLOBS] if isinstance(word, str))
