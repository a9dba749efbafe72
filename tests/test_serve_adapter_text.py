"""An adapter's own text files: what is kept of them, what is refused, and the text side made of
them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from engine.errors import UnsupportedModelError
from serve_app.text import adapter_text
from serve_app.text.adapter_text import (
    AdapterTexts,
    brought,
    check_adapter_text,
    key_of,
    own_files,
    read_adapter_files,
)
from serve_app.text.base_text import (
    BaseText,
    read_files,
    template_source,
    with_response_template,
)
from serve_app.text.response_template import family_template, load_template
from tests.response_texts import template_json
from tests.text_factory import SMOLLM, ZEPHYR, write_folder

NUM_TOKENS, NUM_ROWS = 428, 436
USER = [{"role": "user", "content": "Hello"}]
Change = Callable[[PreTrainedTokenizerFast], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("base"))
    config = {"eos_token_id": [1, 3], "vocab_size": NUM_ROWS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    assert vocab == NUM_TOKENS
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    return folder


def saved(base: Path, folder: Path, change: Change = lambda tokenizer: None) -> dict[str, bytes]:
    """The text files as trainers of PEFT and TRL leave them, by the tokenizer's own method."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(base))
    change(tokenizer)
    tokenizer.save_pretrained(str(folder))
    return read_adapter_files(folder)


def own(base: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    return own_files(read_files(base), files)


def edited(base: Path, change: Callable[[dict[str, object]], object]) -> dict[str, bytes]:
    """The base's tokenizer.json with a change."""
    document = json.loads((base / "tokenizer.json").read_bytes())
    change(document)
    return {"tokenizer.json": json.dumps(document).encode()}


def train_settings(tokenizer: PreTrainedTokenizerFast) -> None:
    """Changes the settings that a data collator changes."""
    tokenizer.pad_token = "</s>"
    tokenizer.padding_side = "left"
    tokenizer(["some text"], truncation=True, max_length=4, padding="max_length")


def test_a_folder_without_text_files_brings_nothing(base: Path, folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert own(base, read_adapter_files(folder)) == {}


@pytest.mark.parametrize("change", [lambda tokenizer: None, train_settings])
def test_a_tokenizer_saved_by_a_trainer_brings_nothing(
    base: Path, folder: Path, change: Change
) -> None:
    files = saved(base, folder, change)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= files.keys()
    assert own(base, files) == {}


def test_merges_in_the_form_of_older_libraries_are_equal(base: Path) -> None:
    def old_form(document: dict[str, object]) -> None:
        model = document["model"]
        assert isinstance(model, dict)
        assert isinstance(model["merges"][0], list)
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
        del model["dropout"], model["ignore_merges"], model["byte_fallback"]

    assert own(base, edited(base, old_form)) == {}


def test_another_chat_template_is_kept_in_either_place(base: Path) -> None:
    config = json.dumps({"chat_template": ZEPHYR}).encode()
    named = json.dumps({"chat_template": [{"name": "default", "template": ZEPHYR}]}).encode()
    for files in (
        {"chat_template.jinja": ZEPHYR.encode()},
        {"tokenizer_config.json": config},
        {"tokenizer_config.json": named},
        {"chat_template.json": config},
        {"chat_template.json": config, "chat_template.jinja": b"other"},
        {"chat_template.jinja": ZEPHYR.encode(), "tokenizer_config.json": b'{"chat_template": ""}'},
    ):
        assert own(base, files) == {"chat_template.jinja": ZEPHYR.encode()}


@pytest.mark.parametrize(
    "places", [("json", "jinja", "config"), ("json", "config"), ("jinja", "config"), ("config",)]
)
def test_template_is_the_one_that_transformers_takes(places: tuple[str, ...], folder: Path) -> None:
    """A processor reads its own two files, a tokenizer the others."""
    names = {
        "json": "chat_template.json",
        "jinja": "chat_template.jinja",
        "config": "tokenizer_config.json",
    }
    for place in places:
        text = f"from {place}"
        is_json = place != "jinja"
        (folder / names[place]).write_text(json.dumps({"chat_template": text}) if is_json else text)
    found = template_source(read_adapter_files(folder))
    assert found == f"from {places[0]}"
    if places[0] != "config":
        kept, _ = ProcessorMixin.get_processor_dict(folder)
        assert kept["chat_template"] == found


def test_template_of_a_bases_processor_is_served_and_an_adapters_own_replaces_it(
    base: Path,
) -> None:
    files = {**read_files(base), "chat_template.json": b'{"chat_template": "of the processor"}'}
    text = BaseText.from_files(files)
    assert text.render_chat(USER) == "of the processor"
    kept = own_files(files, {"chat_template.jinja": b"of the adapter"})
    assert text.with_adapter(kept).render_chat(USER) == "of the adapter"
    assert own_files(files, {"chat_template.jinja": b"of the processor"}) == {}


def test_the_text_side_has_the_adapters_template_and_the_bases_tokenizer(base: Path) -> None:
    text = BaseText.from_folder(base)
    files = own(base, {"chat_template.jinja": b"{{ bos_token }}{{ messages[0].content }}!"})
    side = text.with_adapter(files)
    assert side.render_chat(USER) == "<s>Hello!"
    assert text.render_chat(USER) != "<s>Hello!"
    assert side.tokenizer is text.tokenizer
    assert (side.eos_token_ids, side.own_eos_token_ids) == (text.eos_token_ids, ())


def test_added_tokens_within_the_embedding_rows_are_served(base: Path, folder: Path) -> None:
    def change(tokenizer: PreTrainedTokenizerFast) -> None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
        tokenizer.eos_token = "</think>"

    files = own(base, saved(base, folder, change))
    assert brought(files) == ("special tokens", "added tokens")
    text = BaseText.from_folder(base)
    side = text.with_adapter(files)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
    for words in ("a <think> b</think>", "<tool call>é x", "plain"):
        assert side.encode(words) == theirs(words)["input_ids"]
    assert side.encode("<think>", add_special_tokens=False) == [NUM_TOKENS]
    assert text.encode("<think>", add_special_tokens=False) != [NUM_TOKENS]
    assert side.tokenizer.decode([NUM_TOKENS], skip_special_tokens=False) == "<think>"
    assert side.tokenizer.decode([NUM_TOKENS]) == ""
    assert side.own_eos_token_ids == (NUM_TOKENS + 1,)
    assert side.eos_token_ids == {1, 3, NUM_TOKENS + 1}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": [1, 3]}, {}, ()),
        ({"eos_token_id": 1}, {}, (3,)),
        ({"eos_token_id": 3}, {"eos_token_id": 1}, (3,)),
        ({"eos_token_id": 1}, {"eos_token_id": [3]}, ()),
        ({"eos_token_id": 1, "vocab_size": 3}, {}, ()),  # no row: the engine could not draw it
        ({}, {}, (3,)),
    ],
)
def test_an_end_of_text_that_the_tokenizer_alone_names_ends_answers(
    base: Path, config: dict[str, object], generation: dict[str, object], expected: tuple[int, ...]
) -> None:
    files = read_files(base)
    files["config.json"] = json.dumps(config).encode()
    files["generation_config.json"] = json.dumps(generation).encode()
    text = BaseText.from_files(files)
    assert text.special_tokens["eos_token"] == "<|im_end|>"
    assert text.own_eos_token_ids == expected
    assert text.eos_token_ids >= {3}
    side = text.with_adapter({"generation_config.json": b'{"eos_token_id": [7]}'})
    assert side.own_eos_token_ids == (*expected, 7)


def test_added_tokens_of_older_libraries_are_served(base: Path) -> None:
    config = {"added_tokens_decoder": {"428": {"content": "<tool>", "special": True}}}
    listed = json.dumps({"<tool>": 428, "<|im_end|>": 3}).encode()
    files = {"added_tokens.json": listed, "tokenizer_config.json": json.dumps(config).encode()}
    kept = own(base, files)
    assert [token["content"] for token in json.loads(kept["added_tokens.json"])] == ["<tool>"]
    side = BaseText.from_folder(base).with_adapter(kept)
    assert side.encode("<tool>", add_special_tokens=False) == [428]
    assert side.tokenizer.is_special(428)


def test_added_tokens_beyond_the_embedding_rows_are_refused(base: Path, folder: Path) -> None:
    files = saved(base, folder, lambda t: t.add_tokens([f"<x{i}>" for i in range(9)]))
    with pytest.raises(
        UnsupportedModelError, match=r"token '<x8>' with id 436, but the base has 436 embedding"
    ):
        own(base, files)


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ({"<tool>": 5}, r"token '<tool>' with id 5, which is the base's token"),
        ({"<|im_end|>": 430}, r"token '<\|im_end\|>' with id 430, in the base it has id 3"),
        ({"": 430}, "a token has 1 to 256 characters"),
        ({"<a>": 430, "<b>": 430}, "token '<b>' with id 430, which is the base's token '<a>'"),
        ({"<a>": "x"}, "cannot be read"),
    ],
)
def test_added_tokens_that_collide_are_refused(
    base: Path, listed: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        own(base, {"added_tokens.json": json.dumps(listed).encode()})


def test_added_tokens_with_a_gap_before_them_are_refused(base: Path, folder: Path) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 431}))
    with pytest.raises(UnsupportedModelError, match="id 431, but the next free id is 428"):
        check_adapter_text(base, folder)


def _other_vocabulary(document: dict[str, object]) -> None:
    document["model"]["vocab"]["hello"] = 427  # type: ignore[index]


def _other_merges(document: dict[str, object]) -> None:
    document["model"]["merges"].pop()  # type: ignore[index]


def _other_splits(document: dict[str, object]) -> None:
    document["pre_tokenizer"]["add_prefix_space"] = True  # type: ignore[index]


def _dropped_token(document: dict[str, object]) -> None:
    tokens = document["added_tokens"]
    assert isinstance(tokens, list)
    document["added_tokens"] = [token for token in tokens if token["content"] != "é"]


def _much_larger(document: dict[str, object]) -> None:
    document["model"]["vocab"] |= {f"t{i}": i for i in range(40_000)}  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_vocabulary, "its vocabulary differs from the base's: token 'hello' has id 427"),
        (_other_merges, "its merges differ"),
        (_other_splits, "its pre_tokenizer differs"),
        (_dropped_token, "it lacks the base's token 'é'"),
        (_much_larger, "it is much larger than the base's"),
        (lambda document: document.pop("model"), "it cannot be read"),
    ],
)
def test_another_tokenizer_is_refused_with_the_difference(
    base: Path, change: Callable[[dict[str, object]], object], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        own(base, edited(base, change))
    assert "remove the file from its folder" in str(refusal.value)


def test_generation_defaults_that_differ_are_kept(base: Path) -> None:
    config = {"temperature": 0.1, "top_k": 20, "do_sample": True, "num_beams": 1}
    files = {"generation_config.json": json.dumps({**config, "eos_token_id": 7}).encode()}
    kept = own(base, files)
    assert json.loads(kept["generation_config.json"]) == {"temperature": 0.1, "eos_token_id": [7]}
    assert BaseText.from_folder(base).with_adapter(kept).own_eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"temperature": 9.0}, "generation_config.json: temperature is 9.0"),
        ({"num_beams": 4}, "num_beams is 4, which is not served"),
        ({"suppress_tokens": [5]}, r"suppress_tokens is \[5\], which is not served"),
        ({"eos_token_id": NUM_ROWS}, "eos_token_id is 436"),
        ({"eos_token_id": ["a"]}, "eos_token_id is"),
        ({"eos_token_id": [1] * 17}, "at most 16 ids"),
    ],
)
def test_generation_defaults_that_cannot_be_served_are_refused(
    base: Path, config: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        own(base, {"generation_config.json": json.dumps(config).encode()})


def test_a_response_template_of_its_own_replaces_the_bases(base: Path) -> None:
    template = template_json("mistral")
    files = {"tokenizer_config.json": json.dumps({"response_template": template}).encode()}
    kept = own(base, files)
    assert brought(kept) == ("response template",)
    text = BaseText.from_files(read_files(base))
    assert (text.response_spec, text.with_adapter(kept).response_spec) == (None, template)
    of_base = {**read_files(base), "tokenizer_config.json": files["tokenizer_config.json"]}
    assert own_files(of_base, files) == {}
    assert BaseText.from_files(of_base).with_adapter({}).response_spec == template
    assert text.with_adapter(kept).response_template == load_template(template, "own")


def test_a_family_that_is_named_for_a_base_replaces_what_its_files_say(base: Path) -> None:
    of_base = template_json("mistral")
    config = json.dumps({"response_template": of_base, "eos_token": "</s>"}).encode()
    files = {**read_files(base), "tokenizer_config.json": config}
    text = BaseText.from_files(with_response_template(files, "qwen-xml"))
    assert text.response_template == family_template("qwen-xml")
    assert text.special_tokens["eos_token"] == "</s>"
    inherited = text.with_adapter({"chat_template.jinja": b"{{ messages[0].content }}"})
    assert inherited.response_template == family_template("qwen-xml")
    kept = own(base, {"tokenizer_config.json": config})
    assert text.with_adapter(kept).response_template == load_template(of_base, "own")
    bare = with_response_template(read_files(base), "granite")
    assert BaseText.from_files(bare).response_template == family_template("granite")


def test_a_base_with_a_response_template_that_is_not_understood_answers_in_text(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"tokenizer_config.json": json.dumps({"response_template": {"version": 9}}).encode()}
    assert BaseText.from_files({**read_files(base), **files}).response_template is None
    assert "stay text: response_template: must be an object of version 1" in caplog.text
    with pytest.raises(UnsupportedModelError, match="version 1"):
        own(base, files)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer_config.json": b'{"response_template": "x"}'}, "is not an object"),
        ({"tokenizer_config.json": b"[]"}, "not a JSON object"),
        ({"tokenizer_config.json": b'{"x": ["\\ud800"]}'}, "half of a surrogate pair"),
        ({"added_tokens.json": b'{"\\ud800": 428}'}, "half of a surrogate pair"),
        ({"tokenizer_config.json": b'{"eos_token": "<gone>"}'}, "eos_token is '<gone>'"),
        ({"chat_template.jinja": b"\xff"}, "chat_template.jinja"),
        ({"chat_template.json": b"{"}, "chat_template.json: "),
        ({"chat_template.json": b'{"chat_template": 3}'}, "chat_template is not a text"),
        ({"chat_template.jinja": b"x" * 70_000}, "70000 characters, at most 65536"),
        ({"chat_template.jinja": b"{{a}}" * 13_000}, "more than 8192 words and signs of code"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"response_template": {"x": "y" * 70_000}}
                ).encode()
            },
            "response_template has",
        ),
    ],
)
def test_files_that_cannot_be_served_are_refused(
    base: Path, files: dict[str, bytes], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        own(base, files)


def test_a_template_with_a_name_that_is_none_is_left_out(base: Path) -> None:
    named = [{"name": [], "template": "a"}, {"name": "default", "template": "b"}]
    files = {"tokenizer_config.json": json.dumps({"chat_template": named}).encode()}
    assert own(base, files) == {"chat_template.jinja": b"b"}


def test_a_base_with_a_special_token_that_is_no_text_is_refused(base: Path) -> None:
    files = {"tokenizer_config.json": b'{"bos_token": "\\ud800"}'}
    with pytest.raises(UnsupportedModelError, match="half of a surrogate pair"):
        BaseText.from_files({**read_files(base), **files})


def test_a_file_beyond_its_limit_is_refused_unread(folder: Path) -> None:
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(adapter_text.MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json: it has"):
        read_adapter_files(folder)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(10**9) %}{{ i }}{% endfor %}", "chat template:"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}", "work"),
        ("{% if %}", "chat template:"),
        ("{% for a in b %}" * 60 + "{% endfor %}" * 60, "chat template:"),
    ],
)
def test_a_template_beyond_the_budget_is_refused(
    base: Path, folder: Path, template: str, reason: str
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UnsupportedModelError, match=reason):
        check_adapter_text(base, folder)


def test_adapters_with_equal_files_share_a_text_side(base: Path) -> None:
    text, texts = BaseText.from_folder(base), AdapterTexts()
    files = {"chat_template.jinja": b"{{ messages[0].content }}"}
    first = texts.open(key_of("b", files), text)
    assert texts.open(key_of("b", dict(files)), text) is first
    assert texts.open(key_of("c", files), text) is not first
    assert texts.find(key_of("b", files)) is first


def test_the_text_sides_that_are_kept_are_bounded(base: Path) -> None:
    text, texts = BaseText.from_folder(base), AdapterTexts(max_bytes=1000, max_tokenizers=2)
    keys = [key_of("b", {"chat_template.jinja": b"%3d" % i + b"x" * 197}) for i in range(9)]
    for key in keys:
        texts.open(key, text)
    assert [texts.find(key) is not None for key in keys] == [False] * 4 + [True] * 5
    added = [json.dumps([{"id": 428, "content": f"<{i}>"}]).encode() for i in range(4)]
    keys = [key_of("b", {"added_tokens.json": one}) for one in added]
    for key in keys:
        texts.open(key, text)
    assert [texts.find(key) is not None for key in keys] == [False, False, True, True]


def test_adapters_with_equal_added_tokens_share_a_tokenizer(base: Path) -> None:
    text, texts = BaseText.from_folder(base), AdapterTexts()
    added = json.dumps([{"id": 428, "content": "<tool>"}]).encode()
    first = texts.open(key_of("b", {"added_tokens.json": added}), text)
    files = {"added_tokens.json": added, "chat_template.jinja": SMOLLM.encode()}
    assert texts.open(key_of("b", files), text).tokenizer is first.tokenizer


def test_flags_of_a_known_token_may_change(base: Path, folder: Path) -> None:
    def change(tokenizer: PreTrainedTokenizerFast) -> None:
        token = AddedToken("<tool call>", special=True, normalized=False)
        tokenizer.add_tokens([token], special_tokens=True)

    files = own(base, saved(base, folder, change))
    text = BaseText.from_folder(base)
    token_id = text.tokenizer.token_id("<tool call>")
    assert token_id is not None
    assert not text.tokenizer.is_special(token_id)
    assert text.with_adapter(files).tokenizer.is_special(token_id)
