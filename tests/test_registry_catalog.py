"""Names, their resolution and the pickling of a catalog: pure, without a store."""

import pickle
from dataclasses import replace

import msgspec
import pytest

from registry.catalog import Catalog, DefaultAliases
from registry.entities import AdapterVersion, BaseVersion, DanglingAlias, Rejected
from registry.errors import (
    InvalidNameError,
    NotFoundError,
    RefusedVersionError,
    RegistryError,
)
from registry.names import (
    check_name,
    check_weight,
    join_weighted,
    model_key,
    parse_model,
    split_adapters,
)


def base(version: int = 1, *aliases: str, name: str = "tiny", digest: str = "") -> BaseVersion:
    return BaseVersion(name, version, digest or f"{name}-{version}", "uri", aliases)


def adapter(
    version: int = 1, *aliases: str, name: str = "pirate", of: str = "tiny-1"
) -> AdapterVersion:
    base_name = of.partition("-")[0]
    return AdapterVersion(
        name, version, f"{name}-{version}", base_name, of, 8, ("q_proj",), "uri", aliases
    )


CATALOG = Catalog(
    bases=(base(1), base(2, "champion"), base(3, "canary"), base(1, name="other")),
    adapters=(
        adapter(1, of="tiny-2"),
        adapter(2, "canary", of="tiny-1"),
        adapter(3, of="tiny-2"),
        adapter(1, name="orphan", of="tiny-9"),
    ),
)


@pytest.mark.parametrize(
    ("model", "base_digest", "adapter_digest"),
    [
        ("tiny", "tiny-2", None),  # champion
        ("tiny@canary", "tiny-3", None),
        ("tiny@1", "tiny-1", None),
        ("other", "other-1", None),  # no champion: the highest
        ("pirate", "tiny-2", "pirate-3"),
        ("pirate@1", "tiny-2", "pirate-1"),
        ("pirate@canary", "tiny-1", "pirate-2"),  # its own base, not the champion
        ("tiny:pirate", "tiny-2", "pirate-3"),
        ("tiny:pirate@canary", "tiny-1", "pirate-2"),
        ("tiny@1:pirate@canary", "tiny-1", "pirate-2"),
        ("tiny@champion:pirate", "tiny-2", "pirate-3"),
    ],
)
def test_model_resolves(model: str, base_digest: str, adapter_digest: str | None) -> None:
    found = CATALOG.resolve(model)
    assert found.base.digest == base_digest
    assert (found.adapter.digest if found.adapter else None) == adapter_digest


@pytest.mark.parametrize(
    "model",
    [
        "nobody",
        "tiny@7",
        "tiny@nobody",
        "pirate@7",
        "tiny:nobody",
        "nobody:pirate",
        "other:pirate",  # an adapter of another base
        "tiny@3:pirate",  # of another version of its base
        "tiny:tiny",
        "orphan",  # its base version is gone
        *("meta-llama/Llama-3.1-8B-Instruct", "a/b", "tiny:a/b", "a/b:pirate", "../x", "é"),
        *("x" * 97, "-a", "org/name@main", "org/name@latest", "org/name:free:extra"),
    ],
)
def test_unknown_model_is_not_found(model: str) -> None:
    with pytest.raises(NotFoundError):
        CATALOG.resolve(model)


@pytest.mark.parametrize(
    "model",
    [
        *("", "a@", "a@b@c", "@a", ":a", "a:", "a b", "a\n", "a\x7f", "a\u2028"),
        *("a@latest", "a@v1", "a@0", "a@x.y", "a\0", "x" * 100_000),
    ],
)
def test_illegal_model_string_is_refused(model: str) -> None:
    with pytest.raises(InvalidNameError):
        parse_model(model)


def test_longest_name_is_legal() -> None:
    assert check_name("x" * 96) == "x" * 96


def test_catalog_lists_each_name_once_with_parent() -> None:
    listed = [(entry.name, entry.parent, entry.version) for entry in CATALOG.entries()]
    assert listed == [
        ("other", None, 1),
        ("tiny", None, 2),
        ("orphan", "tiny", 1),
        ("pirate", "tiny", 3),
    ]


def test_catalog_travels_by_pickle_and_msgspec() -> None:
    CATALOG.resolve("tiny:pirate")  # indices are cached, and not pickled
    sent = (
        pickle.loads(pickle.dumps(CATALOG)),
        msgspec.msgpack.decode(msgspec.msgpack.encode(CATALOG), type=Catalog),
    )
    for copy in sent:
        assert copy == CATALOG
        assert copy.revision == CATALOG.revision
        assert copy.resolve("tiny:pirate") == CATALOG.resolve("tiny:pirate")


@pytest.mark.parametrize(
    ("aliases", "base_digest", "adapter_digest"),
    [
        (DefaultAliases(), "tiny-2", "pirate-3"),
        (DefaultAliases("canary"), "tiny-3", "pirate-2"),
        (DefaultAliases(of_adapters=(("tiny", "canary"),)), "tiny-2", "pirate-2"),
        (DefaultAliases("canary", (("tiny", "production"),)), "tiny-3", "pirate-3"),
        (DefaultAliases(of_adapters=(("other", "canary"),)), "tiny-2", "pirate-3"),
    ],
)
def test_a_bare_name_means_the_default_alias(
    aliases: DefaultAliases, base_digest: str, adapter_digest: str
) -> None:
    catalog = replace(CATALOG, default_aliases=aliases)
    found = catalog.resolve("tiny:pirate").adapter
    assert found is not None
    assert found == catalog.resolve("pirate").adapter
    assert (catalog.resolve("tiny").base.digest, found.digest) == (base_digest, adapter_digest)
    listed = {entry.name: entry.digest for entry in catalog.entries()}
    assert (listed["tiny"], listed["pirate"]) == (base_digest, adapter_digest)
    copy = pickle.loads(pickle.dumps(catalog))
    assert copy.resolve("pirate").adapter == found


def test_other_default_aliases_are_another_revision() -> None:
    assert replace(CATALOG, default_aliases=DefaultAliases("canary")).revision != CATALOG.revision


def test_moved_alias_changes_the_revision() -> None:
    one, two = Catalog((base(1, "champion"), base(2))), Catalog((base(1), base(2, "champion")))
    assert one.revision != two.revision


def test_same_base_content_twice_resolves_to_the_default_version() -> None:
    twice = Catalog((base(1, "champion", digest="d"), base(2, digest="d")), (adapter(of="d"),))
    renamed = AdapterVersion("pirate", 1, "p", "tiny", "d", 8, (), "uri")
    assert Catalog(twice.bases, (renamed,)).resolve("pirate").base.version == 1


@pytest.mark.parametrize("kind", RegistryError.__subclasses__())
def test_errors_pickle(kind: type[RegistryError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("reason")))
    assert type(copy) is kind
    assert str(copy) == "reason"


def test_a_base_can_be_called_by_the_id_of_its_repository() -> None:
    named = replace(CATALOG.bases[0], model_id="Meta/Tiny-1B")
    catalog = replace(CATALOG, bases=(named, *CATALOG.bases[1:]))
    for suffix in ("", "@canary", "@1", ":pirate", ":pirate@canary", "@1:pirate@canary"):
        assert catalog.resolve(f"Meta/Tiny-1B{suffix}") == catalog.resolve(f"tiny{suffix}")
    assert catalog.resolve_base("Meta/Tiny-1B@3").version == 3
    assert [entry.name for entry in catalog.entries()][:3] == ["other", "tiny", "Meta/Tiny-1B"]


@pytest.mark.parametrize("newer", ["aaa", "zzz"])
def test_a_new_base_does_not_take_the_id_of_an_older_one_over(newer: str) -> None:
    mine = [replace(base(n), created_s=n * 100, model_id="Meta/Tiny-1B") for n in (1, 3)]
    theirs = replace(base(1, name=newer), created_s=200, model_id="Meta/Tiny-1B")
    for bases in ((*mine, theirs), (theirs, *mine)):
        catalog = Catalog(bases)
        assert catalog.registered("Meta/Tiny-1B") == "tiny"
        assert catalog.default_base("Meta/Tiny-1B") == mine[1]


def test_of_two_bases_of_one_second_the_first_by_the_alphabet_has_the_id() -> None:
    pair = [replace(base(1, name=name), model_id="Meta/Tiny-1B") for name in ("b", "a")]
    assert Catalog(tuple(pair)).registered("Meta/Tiny-1B") == "a"


@pytest.mark.parametrize("model", ["Meta/Other", "meta/tiny-1b", "Meta/Tiny-1B/x", "/", "a/b:c@d"])
def test_an_unknown_repository_id_is_not_found(model: str) -> None:
    named = replace(CATALOG.bases[0], model_id="Meta/Tiny-1B")
    with pytest.raises(NotFoundError):
        replace(CATALOG, bases=(named,)).resolve(model)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("Meta/Tiny-1B", "tiny-1b"),
        ("/home/me/tiny-1b/", "tiny-1b"),
        ("C:\\models\\Tiny-1B", "tiny-1b"),
        ("/cache/models--Meta--Tiny-1B/snapshots/0123abcd", "tiny-1b"),
        ("", ""),
    ],
)
def test_spellings_of_one_model_have_one_key(path: str, key: str) -> None:
    assert model_key(path) == key


def with_adapters(*adapters: AdapterVersion) -> Catalog:
    return replace(CATALOG, adapters=(*CATALOG.adapters, *adapters))


def test_several_adapters_resolve_each_as_its_name_alone() -> None:
    catalog = with_adapters(
        adapter(1, name="sql", of="tiny-2"), adapter(2, name="sql", of="tiny-2")
    )
    found = catalog.resolve_request("tiny:pirate+0.5*sql@1")
    assert found.base.digest == "tiny-2"
    weighted = [(one.version.digest, one.weight) for one in found.adapters]
    assert weighted == [("pirate-3", 1.0), ("sql-1", 0.5)]
    assert found.adapter == found.adapters[0].version
    assert found.versions == "pirate@3+0.5*sql@1"
    assert catalog.resolve_request("pirate+0.5*sql@1") == found
    assert catalog.resolve_request("tiny:pirate") == catalog.resolve("tiny:pirate")
    assert catalog.resolve_request("tiny").versions == "tiny@2"
    assert catalog.resolve_request("tiny").adapters == ()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "tiny:pirate+sql@canary",
            "'sql' was made for version 1 of 'tiny', the first for version 2",
        ),
        ("tiny:pirate@2+twin", "of different bases"),
        ("tiny:pirate+pirate@3", "has the same files as another adapter"),
        ("tiny:pirate+pirate", "'pirate' is twice in"),
        ("tiny:", "a name is missing in 'tiny:'"),
        (":pirate", "a name is missing in ':pirate'"),
        ("tiny:+", "a name is missing in 'tiny:+'"),
        ("tiny:pirate+0.5*", "a name is missing in 'tiny:pirate+0.5*'"),
        ("pirate+tiny:sql", "is named 'pirate+tiny'"),
        ("2*tiny", "'tiny' in '2*tiny' is a base, not an adapter"),
        ("tiny+other", "named 'other'"),
    ],
)
def test_adapters_that_cannot_be_together_are_refused(model: str, words: str) -> None:
    catalog = with_adapters(
        adapter(1, "canary", name="sql", of="tiny-1"), adapter(1, name="twin", of="tiny-2")
    )
    with pytest.raises(RegistryError) as error:
        catalog.resolve_request(model)
    assert words in str(error.value)


def test_an_alora_is_alone_in_its_request() -> None:
    judge = replace(adapter(1, name="judge", of="tiny-2"), invocation=(5, 6))
    catalog = with_adapters(judge)
    assert catalog.resolve_request("tiny:0.5*judge").adapters[0].weight == 0.5
    with pytest.raises(InvalidNameError, match="'judge' in 'tiny:pirate\\+judge' has alora_invoc"):
        catalog.resolve_request("tiny:pirate+judge")


@pytest.mark.parametrize("name", ["a+b", "2*a"])
def test_no_registered_name_looks_like_several(name: str) -> None:
    with pytest.raises(InvalidNameError):
        check_name(name)
    with pytest.raises(RegistryError):
        CATALOG.resolve(f"tiny:{name}")


@pytest.mark.parametrize("weight", [1.0, 0.5, -2.0, 1e-6, 100.0, 0.123456789])
def test_a_joined_model_is_split_again(weight: float) -> None:
    joined = f"tiny@2:{join_weighted([('a', weight), ('b@champion', 1.0)])}"
    assert split_adapters(joined) == (
        ("tiny@2:a", weight), ("tiny@2:b@champion", 1.0),
    )  # fmt: skip


@pytest.mark.parametrize("weight", [0.0, -0.0, 1e-7, 101.0, float("nan"), float("inf")])
def test_a_weight_out_of_its_bounds_is_refused(weight: float) -> None:
    with pytest.raises(InvalidNameError, match=r"between 0\.000001 and 100"):
        check_weight(weight)


def test_a_name_of_refused_versions_alone_is_answered_with_the_reason_of_the_highest() -> None:
    rejected = (
        Rejected("ia3", 2, "it is IA3", is_public=True),
        Rejected("ia3", 1, "no weights", is_public=True),
        Rejected("pirate", 4, "it is IA3", is_public=True),
        Rejected("hidden", 1, "its store fails"),
    )
    dangling = DanglingAlias("pirate", "next", 4, "it is IA3")
    catalog = replace(CATALOG, rejected=rejected, dangling=(dangling,))
    for model, words in {
        "pirate@next": "The adapter 'pirate' version 4 cannot be served: it is IA3",
        "ia3": "The adapter 'ia3' version 2 cannot be served: it is IA3",
        "tiny:ia3": "The adapter 'ia3' version 2 cannot be served: it is IA3",
        "ia3@1": "The adapter 'ia3' version 1 cannot be served: no weights",
        "tiny:pirate@4": "The adapter 'pirate' version 4 cannot be served: it is IA3",
    }.items():
        with pytest.raises(RefusedVersionError) as caught:
            catalog.resolve(model)
        assert str(caught.value) == words
    assert catalog.resolve("pirate").versions == "pirate@3"
    with pytest.raises(NotFoundError, match="no base model or adapter is named 'hidden'"):
        catalog.resolve("hidden")
