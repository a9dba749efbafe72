"""The configuration of keys: their database, and the issuers whose bearers count besides them."""

from __future__ import annotations

from pydantic import Field

from serve_app.config.values import Args


class OidcArgs(Args):
    """JSON Web Tokens of an issuer (OpenID Connect), signed with RS256 or ES256, as bearers."""

    issuer: str = Field(pattern=r"^https://[^\s]+$|^http://(localhost|127\.0\.0\.1|\[::1\])[:/]")
    """The issuer, as in the claim `iss`. `http://` on this machine only."""
    audience: str = Field(min_length=1)
    """The audience of this server: the claim `aud` has to contain it."""
    jwks_url: str | None = Field(
        default=None, pattern=r"^https://[^\s]+$|^http://(localhost|127\.0\.0\.1|\[::1\])[:/]"
    )
    """The address of the issuer's public keys. By default `jwks_uri` of
    `ISSUER/.well-known/openid-configuration`."""
    tenant_claim: str = "sub"
    """The claim with the tenant."""
    scopes_claim: str = "scope"
    """The claim with the scopes: `infer`, `load`, `admin:read`, `admin`, as a list or separated by
    spaces. Others in it are ignored."""
    models_claim: str | None = None
    """The claim with the globs of the models, as a list or separated by spaces. By default every
    model is allowed."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Seconds for each request to the issuer."""


class PriceArgs(Args):
    """The price of a base and of its adapters, in any currency. Applied when usage is read."""

    prompt: float = Field(default=0.0, ge=0)
    """Of a million prompt tokens that were computed."""
    cached: float | None = Field(default=None, ge=0)
    """Of a million prompt tokens that were in the prefix cache. By default `prompt`."""
    output: float = Field(default=0.0, ge=0)
    """Of a million output tokens."""
    engine_hour: float = Field(default=0.0, ge=0)
    """Of an hour of an engine, shared by the requests of each step."""
    per_rank: float = Field(default=0.0, ge=0)
    """The part of the price that each rank of an adapter adds to it: with 0.01 an adapter of rank
    16 costs 1.16 times as much as its base."""


class TenancyArgs(Args):
    """Keys of clients. With them each request needs a key, or the admin token."""

    enabled: bool = False
    """Whether requests need a key. The first ones are made with `loraplex keys create`, which uses
    the admin token."""
    database_url: str | None = Field(default=None, pattern=r"^(sqlite|postgresql(\+\w+)?)://")
    """The database of the keys and the audit log, as SQLAlchemy writes it, such as
    `postgresql+psycopg2://USER:PASSWORD@HOST/NAME`. By default the variable
    `LORAPLEX_DATABASE_URL`, otherwise the SQLite file `loraplex.db` in the home. SQLite on a
    network disk is refused."""
    oidc: OidcArgs | None = None
    """Off by default."""
    burst_s: float = Field(default=0.5, gt=0, le=60)
    """Seconds of its rates per minute that an idle key may use at once; at least four requests, and
    one request of any number of tokens."""
    prices: dict[str, PriceArgs] = Field(default={})
    """Prices by the name of the base; `*`: of all others. By default usage costs nothing."""
