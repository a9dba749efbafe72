"""`loraplex models`: lists the models in the registry, or those that a running server serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from serve_app.cli.commands.common import console, print_json, print_table
from serve_app.cli.options import Json, Uri
from serve_app.home import api_headers

if TYPE_CHECKING:
    from registry.catalog import Catalog
    from registry.entities import AdapterVersion, BaseVersion

_DIGEST_CHARS = 12


def models(
    url: Annotated[str | None, typer.Option(help="Ask this running server")] = None,
    tracking_uri: Uri = None,
    json: Json = False,
) -> None:
    """List base models and their adapters."""
    if url is not None:
        _print_served(url.rstrip("/"), json)
        return
    from serve_app.cli.commands.store import read_catalog
    from serve_app.config import RegistryArgs

    catalog = read_catalog(RegistryArgs(tracking_uri=tracking_uri))
    if json:
        parts = ("bases", "adapters", "rejected", "dangling")
        print_json({part: getattr(catalog, part) for part in parts})
    else:
        _print_catalog(catalog)


def _print_catalog(catalog: Catalog) -> None:
    if not catalog.bases and not catalog.rejected:
        console.print("The registry is empty; try: loraplex demo, or loraplex register base")
    for base in catalog.bases:
        tree = Tree(f"[bold]{_pointer(base)}[/]  {base.architecture}  {_digest(base)}")
        for adapter in catalog.adapters:
            if (adapter.base_name, adapter.base_digest) != (base.name, base.digest):
                continue
            targets = ",".join(adapter.targets)
            line = f"{_pointer(adapter)}  rank {adapter.rank}  {targets}  {_digest(adapter)}"
            tree.add(f"{line}{_effect(adapter)}")
        console.print(tree, soft_wrap=True, highlight=False)
    warnings = [f"cannot be served: {r.name}@{r.version}: {r.reason}" for r in catalog.rejected]
    for words in (*warnings, *map(str, catalog.dangling)):
        console.print(words, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _pointer(version: BaseVersion | AdapterVersion) -> str:
    aliases = "".join(f" @{alias}" for alias in version.aliases)
    return f"{version.name}@{version.version}{aliases}"


def _effect(adapter: AdapterVersion) -> str:
    """Returns a warning if the adapter has no effect or cannot be served, otherwise ""."""
    if adapter.is_noop or adapter.effect == "none":
        return "  [yellow]changes nothing[/]"
    if adapter.refused:
        return f"  [yellow]cannot be served: {escape(adapter.refused)}[/]"
    return "  [yellow]non_finite[/]" if adapter.effect == "non_finite" else ""


def _digest(version: BaseVersion | AdapterVersion) -> str:
    return f"[dim]{version.digest[:_DIGEST_CHARS]}[/]"


def _print_served(url: str, json: bool) -> None:
    import httpx

    from serve_app.cli.commands.client import served_models

    with httpx.Client(timeout=10, headers=api_headers()) as client:
        served = served_models(client, url)
    if json:
        print_json({"models": served})
        return
    table = Table("model", "base", "version", "context", box=None)
    for line in served:
        context = str(line.max_model_len or "")
        table.add_row(line.model, line.parent or "", line.root or "", context)
    print_table(table)
