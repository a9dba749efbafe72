"""A registry of fixed content in a folder, and a base folder with a byte-level tokenizer.

For Serve tests whose engine is the paced one: no weights, no MLflow, the same interface.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from registry.cache import CacheStats
from registry.catalog import Catalog, visible
from registry.catalog_file import CatalogFile
from registry.entities import AdapterVersion, BaseVersion, Setting
from registry.errors import (
    CacheFailedError,
    CacheFullError,
    RegistrationError,
    RegistryError,
    RegistryUnavailableError,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = "<eos>"
UNREADABLE = "unreadable"
EOS_ID = 256  # after the bytes
V = TypeVar("V", BaseVersion, AdapterVersion)


@dataclass(frozen=True, slots=True)
class FolderRegistry:
    """`catalog.json` in the folder is the snapshot; without it the registry is down.

    `DIGEST.full` next to the files of a version: the disk has no room for a copy of them.
    UNREADABLE: the cache's disk fails when it is measured; with a text: it is full."""

    folder: Path

    def write(self, catalog: Catalog) -> None:
        temporary = self.folder / "catalog.tmp"
        parts = {
            "bases": catalog.bases,
            "adapters": catalog.adapters,
            "settings": catalog.settings,
        }
        temporary.write_bytes(msgspec.json.encode(parts))
        temporary.rename(self.folder / "catalog.json")

    def snapshot(self) -> Catalog:
        known = self._read()
        return replace(known, adapters=visible(known.adapters, known.settings))

    def _read(self) -> Catalog:
        try:
            parts = json.loads((self.folder / "catalog.json").read_bytes())
        except FileNotFoundError:
            with (self.folder / "vain").open("a") as file:
                file.write(".")
            raise RegistryUnavailableError("catalog.json is away") from None
        return Catalog(
            msgspec.convert(parts["bases"], tuple[BaseVersion, ...]),
            msgspec.convert(parts["adapters"], tuple[AdapterVersion, ...]),
            settings=msgspec.convert(parts["settings"], tuple[Setting, ...]),
        )

    def set_alias(self, name: str, alias: str, version: int | None) -> None:
        def aliased(one: V) -> V:
            aliases = [known for known in one.aliases if known != alias]
            if (one.name, one.version) == (name, version):
                aliases.append(alias)
            return replace(one, aliases=tuple(aliases)) if one.name == name else one

        known = self._read()
        bases, adapters = map(aliased, known.bases), map(aliased, known.adapters)
        self.write(replace(known, bases=tuple(bases), adapters=tuple(adapters)))

    def set_setting(self, name: str, key: str, value: str | None) -> None:
        known = self._read()
        others = tuple(s for s in known.settings if (s.name, s.key) != (name, key))
        own = () if value is None else (Setting(name, key, value),)
        self.write(replace(known, settings=(*others, *own)))

    @property
    def num_vain_polls(self) -> int:
        """The number of polls of all processes while the catalog was missing."""
        vain = self.folder / "vain"
        return vain.stat().st_size if vain.exists() else 0

    def ensure_webhook(self, url: str, secret: str) -> None:
        raise RegistryError("a folder calls nobody")

    def register_adapter(self, folder: Path, name: str, base: str, alias: str) -> None:
        """Accepts every folder but one called `refused`; its content is its path's last part."""
        if folder.name == "refused":
            raise RegistrationError(f"adapter {name!r} is refused: lora_A of x is missing")
        known = self._read()
        version = 1 + max((a.version for a in known.adapters if a.name == name), default=0)
        added = self.add_adapter(f"{name}-{folder.name}", known.resolve_base(base))
        one = replace(added, name=name, version=version)
        self.write(replace(known, adapters=(*known.adapters, one)))
        self.set_alias(name, alias, version)

    def check_adapter(self, version: AdapterVersion) -> None:
        """Does nothing: a folder keeps no verdicts."""

    def fetch(self, version: BaseVersion | AdapterVersion) -> Path:
        path = self.folder / version.digest
        if (self.folder / f"{version.digest}.full").exists():
            raise CacheFullError("no space left for a local copy")
        if not path.is_dir():
            raise RegistryUnavailableError(f"the files of {version.name} are away")
        return path

    def release(self, folder: Path) -> None:
        pass

    def verify(self, version: BaseVersion | AdapterVersion) -> bool:
        return True

    def local_digests(self) -> frozenset[str]:
        return frozenset(path.name for path in self.folder.iterdir() if path.is_dir())

    def stored_catalog(self) -> Catalog | None:
        return CatalogFile(self.folder / "last.json", "here").read()

    def store_catalog(self, catalog: Catalog) -> None:
        CatalogFile(self.folder / "last.json", "here").write(catalog)

    def cache_stats(self) -> CacheStats:
        unreadable = self.folder / UNREADABLE
        if unreadable.exists():
            raise (CacheFullError if unreadable.read_text() else CacheFailedError)("the disk")
        return CacheStats(0, None, 0, 0, 0, 0, 0)

    def add_base(self, name: str, version: int = 1, *, has_files: bool = True) -> BaseVersion:
        # The folder too: applications are named by digests, and each reads its own folder.
        base = BaseVersion(name, version, _digest(f"{name}@{version} in {self.folder}"), source="")
        if has_files:
            write_text_files(self.folder / base.digest)
        return base

    def add_adapter(
        self,
        name: str,
        base: BaseVersion,
        version: int = 1,
        *,
        aliases: tuple[str, ...] = (),
        has_files: bool = True,
    ) -> AdapterVersion:
        digest = _digest(f"{name}@{version} of {base.digest}")
        if has_files:
            (self.folder / digest).mkdir(exist_ok=True)
        return AdapterVersion(
            name, version, digest, base.name, base.digest, 8, ("q_proj",), "", aliases
        )


def write_text_files(folder: Path) -> None:
    """Ids are the bytes in the order of the alphabet, so that each character is a token."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
