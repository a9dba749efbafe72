"""Grammars in the engine's policy: the compile gate, forced tokens, deferred draws, failures."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from engine import grammars as grammars_module
from engine.errors import InvalidRequestError
from engine.grammar_state import GrammarState, fill_masks
from engine.grammars import MAX_SOURCE_BYTES, Grammars, check_grammar
from engine.types import Grammar, Request, ResumedChoice
from tests.fakes import make_config, make_request
from tests.grammar_helpers import (
    EOS,
    THINK_END,
    VOCAB,
    DeferringRunner,
    grammars,
    make_grammar_engine,
    random_schema,
    run,
    schema_grammar,
    text,
    token_ids,
    tokenizer,
)

STRICT = {
    "type": "object",
    "properties": {
        "field_a": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 4},
        "items": {"enum": ["value", "items"]},
    },
    "required": ["field_a", "name", "items"],
    "additionalProperties": False,
}


def request_of(name: str, grammar: Grammar, **params: object) -> Request:
    settings = {"max_tokens": 400, "ignore_eos": False, "grammar": grammar}
    return make_request(name, **(settings | params))  # type: ignore[arg-type]


def requests_of(count: int, **params: object) -> dict[Request, dict[str, object]]:
    generator = random.Random(count)
    schemas = [random_schema(generator, 2) for _ in range(count)]
    return {
        request_of(f"r{i}", schema_grammar(schema), seed=i, **params): schema
        for i, schema in enumerate(schemas)
    }


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", '{"uniqueItems": true, "type": "array"}'), "uniqueItems"),
        (Grammar("json_schema", "true"), "not a JSON object"),
        (Grammar("json_schema", "{"), "line 1"),
        (Grammar("json_schema", "[" * 9000), "recursion"),
        (Grammar("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}'), "not"),
        (Grammar("regex", "(a|"), "unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("regex", "a\\\\b\\"), "escapes nothing"),
        (Grammar("regex", "a" * (MAX_SOURCE_BYTES + 1)), f"{MAX_SOURCE_BYTES} are allowed"),
        (Grammar("lark", "start: nope"), "nope"),
        (Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}'), "common multiple"),
        (Grammar("json_schema", '{"type": "number", "\\u006dultipleOf": 1e999999999}'), "size"),
        (Grammar("lark", 'start: %json {"multipleOf": 97, "a": {"multipleOf": 0.101}}'), "states"),
        (Grammar("json_schema", '{"allOf": [' + '{"format": "date"},' * 300 + "{}]}"), "formats"),
        (Grammar("json_schema", '{"enum": ["\ud800"]}'), "serializable"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_with_the_reason(
    grammar: Grammar, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        check_grammar(grammar)
    assert caught.value.param == "grammar"


def test_a_base_without_tokenizer_refuses_grammars_with_the_reason(tmp_path: Path) -> None:
    assert "tokenizer.json" in str(Grammars.load(tmp_path, 400, (EOS,)))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert isinstance(Grammars.load(tmp_path, 400, (EOS,)), str)


@pytest.mark.parametrize(
    ("params", "param"),
    [({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 1}, "min_tokens")],
)
def test_a_grammar_is_refused_beside_what_forbids_its_end(
    params: dict[str, object], param: str
) -> None:
    engine = make_grammar_engine(DeferringRunner())
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(request_of("a", schema_grammar(STRICT), **params))
    assert caught.value.param == param


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_answers_are_valid_and_forced_tokens_change_only_the_number_of_steps(
    runs_ahead: bool,
) -> None:
    requests = requests_of(40)
    answers, num_steps = {}, {}
    for forced in (False, True):
        runner = DeferringRunner()
        runner.runs_ahead = runs_ahead
        engine = make_grammar_engine(runner, force_grammar_tokens=forced)
        outputs = run(engine, tuple(requests))
        answers[forced] = {key: token_ids(found) for key, found in outputs.items()}
        num_steps[forced] = sum(len(batch) for batch in runner.batches)
        assert engine.load().num_free_blocks == 256
        for request, schema in requests.items():
            found = outputs[request.request_id, 0]
            assert found[-1].finish_reason == "stop", found[-1]
            ids = token_ids(found)
            jsonschema.validate(json.loads(text(i for i in ids if i != EOS)), schema)
    assert answers[True] == answers[False]
    assert num_steps[True] < num_steps[False]


def test_forced_tokens_of_a_strict_schema_save_most_steps() -> None:
    steps = {}
    for forced in (False, True):
        runner = DeferringRunner()
        engine = make_grammar_engine(runner, force_grammar_tokens=forced)
        (outputs,) = run(engine, [request_of("a", schema_grammar(STRICT))]).values()
        steps[forced] = len(outputs), len(token_ids(outputs))
    assert steps[True][1] == steps[False][1]
    assert steps[False][0] == steps[False][1]
    assert steps[True][0] < 0.6 * steps[True][1]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_choices_preemption_and_chunks_leave_the_tokens_as_they_are(runs_ahead: bool) -> None:
    requests = [
        request_of(f"r{i}", schema_grammar(STRICT), n=2, seed=i, max_tokens=60) for i in range(6)
    ]
    alone = {}
    for request in requests:
        alone |= run(make_grammar_engine(DeferringRunner()), [request])
    runner = DeferringRunner(num_blocks=17)
    runner.runs_ahead = runs_ahead
    engine = make_grammar_engine(runner, max_num_batched_tokens=16)
    together = run(engine, requests)
    assert engine.load().num_preemptions > 0
    assert {key: token_ids(found) for key, found in together.items()} == {
        key: token_ids(found) for key, found in alone.items()
    }


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_choice_resumed_anywhere_gives_the_tokens_of_an_undisturbed_run(
    runs_ahead: bool,
) -> None:
    request = request_of("a", schema_grammar(STRICT, THINK_END), max_tokens=120, logit_bias=())
    # The fake draws anything before the end of thinking: the answer begins with it.
    request = replace(request, resumed=(ResumedChoice(0, (9, THINK_END)),))
    (whole,) = run(make_grammar_engine(DeferringRunner()), [request]).values()
    expected = [9, THINK_END, *token_ids(whole)]
    assert json.loads(text(expected[2:]))
    for count in range(len(expected)):
        runner = DeferringRunner()
        runner.runs_ahead = runs_ahead
        again = replace(request, resumed=(ResumedChoice(0, tuple(expected[:count])),))
        if count < 2:
            continue
        (rest,) = run(make_grammar_engine(runner), [again]).values()
        assert expected[:count] + token_ids(rest) == expected
        assert rest[-1].finish_reason == "stop"


def test_an_output_that_is_not_of_the_grammar_is_never_continued() -> None:
    engine = make_grammar_engine(DeferringRunner())
    request = replace(
        request_of("a", schema_grammar(STRICT)), resumed=(ResumedChoice(0, (77, 78)),)
    )
    ((output,),) = run(engine, [request]).values()
    assert output.finish_reason == "error"
    assert "is not of the grammar" in str(output.error)
    assert engine.load().num_free_blocks == 256


def test_log_probabilities_come_one_per_token() -> None:
    request = request_of("a", schema_grammar(STRICT))
    plain = run(make_grammar_engine(DeferringRunner()), [request])["a", 0]
    asked = replace(request, params=replace(request.params, logprobs=1))
    outputs = run(make_grammar_engine(DeferringRunner()), [asked])["a", 0]
    assert token_ids(outputs) == token_ids(plain)
    assert all(len(output.logprobs) == len(output.token_ids) == 1 for output in outputs)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_max_tokens_bounds_forced_tokens(max_tokens: int, runs_ahead: bool) -> None:
    request = request_of("a", schema_grammar(STRICT))
    whole = token_ids(run(make_grammar_engine(DeferringRunner()), [request])["a", 0])
    runner = DeferringRunner()
    runner.runs_ahead = runs_ahead
    short = replace(request, params=replace(request.params, max_tokens=max_tokens))
    outputs = run(make_grammar_engine(runner), [short])["a", 0]
    assert token_ids(outputs) == whole[:max_tokens]
    assert outputs[-1].finish_reason == "length"


def test_a_stop_id_within_forced_tokens_ends_the_choice_there() -> None:
    request = request_of("a", schema_grammar(STRICT))
    whole = run(make_grammar_engine(DeferringRunner()), [request])["a", 0]
    forced = next(output for output in whole if len(output.token_ids) > 2).token_ids[1]
    stopping = replace(request, params=replace(request.params, stop_token_ids=(forced,)))
    outputs = run(make_grammar_engine(DeferringRunner()), [stopping])["a", 0]
    ids = token_ids(outputs)
    assert ids == token_ids(whole)[: ids.index(forced) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", forced)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_stop_id_may_end_an_answer_where_the_end_of_the_sequence_may(runs_ahead: bool) -> None:
    """An adapter that ends its texts with a token of its own was not trained to write another."""
    found = set()
    for seed in range(16):
        runner = DeferringRunner()
        runner.runs_ahead = runs_ahead
        request = request_of(
            "a", Grammar("regex", "(ab)*c?"), seed=seed, stop_token_ids=(THINK_END,), max_tokens=90
        )
        outputs = run(make_grammar_engine(runner), [request])["a", 0]
        assert outputs[-1].finish_reason == "stop", outputs[-1]
        assert re.fullmatch("(ab)*c?", text(i for i in token_ids(outputs) if i > THINK_END))
        found.add(outputs[-1].stop_token_id)
    assert found == {None, THINK_END}


def test_a_stop_id_that_is_text_of_the_grammar_stays_its_text() -> None:
    (a,) = tokenizer().encode("a").ids
    state = GrammarState(None, None, (a, EOS, THINK_END))
    state.open(grammars().open(Grammar("regex", "a?b"), ()).result())
    assert state.advance(a) is None
    assert "cannot be followed" in str(state.advance(THINK_END))


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_draw_that_fails_ends_its_requests_and_gives_no_token(runs_ahead: bool) -> None:
    runner = DeferringRunner()
    runner.runs_ahead = runs_ahead
    engine = make_grammar_engine(runner)
    engine.add_request(request_of("a", schema_grammar(STRICT)))
    engine.step()
    runner.fail_next_draw = RuntimeError("secret")
    outputs = run(engine, [])["a", 0]
    assert outputs[-1].finish_reason == "error"
    assert outputs[-1].error == "the engine failed in a step of this request"
    assert engine.load().num_free_blocks == 256
    assert (
        run(engine, [request_of("b", schema_grammar(STRICT))])["b", 0][-1].finish_reason == "stop"
    )


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_draw_without_memory_is_repeated_and_gives_the_same_tokens(runs_ahead: bool) -> None:
    request = request_of("a", schema_grammar(STRICT))
    expected = token_ids(run(make_grammar_engine(DeferringRunner()), [request])["a", 0])
    runner = DeferringRunner()
    runner.runs_ahead = runs_ahead
    engine = make_grammar_engine(runner)
    engine.add_request(request)
    found = []
    while engine.has_work:
        runner.fail_next_draw = MemoryError()
        found += engine.step().outputs
    assert token_ids(found) == expected


def test_a_mask_that_fails_ends_the_choice_with_an_error_instead_of_its_token() -> None:
    """The library allows the end of the sequence after a failure: it must not look complete."""
    engine = make_grammar_engine(DeferringRunner())
    engine.add_request(request_of("a", schema_grammar(STRICT)))
    while not engine.scheduler.running:
        engine.step()
    state = engine.scheduler.running[0].grammar_state
    assert state is not None
    assert state._matcher is not None
    state._matcher.consume_token(77)  # leaves the matcher in its error state
    (output,) = run(engine, [])["a", 0]
    assert output.finish_reason == "error"
    assert not output.token_ids
    assert "the grammar cannot be followed" in str(output.error)


def test_a_request_waits_for_its_grammar_without_blocks_while_others_run() -> None:
    own = grammars()
    is_released = threading.Event()
    busy = [own._threads.submit(is_released.wait) for _ in range(2)]
    engine = make_grammar_engine(DeferringRunner())
    grammar = schema_grammar({"enum": ["waits for its compilation"]})
    engine.add_request(request_of("a", grammar))
    engine.add_request(make_request("b"))
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.running] == ["b"]
    assert [s.block_table for s in engine.scheduler.waiting] == [[]]
    while any(s.request.request_id == "b" for s in engine.scheduler.running):
        engine.step()
    engine.step()
    assert not engine.is_stuck  # the compilation wakes nobody: the loop must go on
    assert engine.load().num_free_blocks == 256
    is_released.set()
    outputs = run(engine, [])
    assert text(token_ids(outputs["a", 0])) == '"waits for its compilation"'
    assert all(future.result() for future in busy)


def test_a_grammar_that_only_the_tokenizer_refuses_fails_its_request_alone() -> None:
    engine = make_grammar_engine(DeferringRunner())
    outputs = run(
        engine, [request_of("a", Grammar("lark", 'start: "a" <|nope|>')), make_request("b")]
    )
    assert "nope" in str(outputs["a", 0][-1].error)
    assert outputs["b", 0][-1].finish_reason == "length"


def test_a_grammar_whose_first_mask_costs_too_much_is_refused_before_it_runs() -> None:
    source = "start: " + " ".join(["a?"] * 5000) + '\na: "x"'
    outputs = run(
        make_grammar_engine(DeferringRunner()), [request_of("a", Grammar("lark", source))]
    )
    assert "Too many items" in str(outputs["a", 0][-1].error)


@pytest.mark.parametrize(
    "grammar",
    [Grammar("json_schema", '{"$ref": "#"}'), Grammar("regex", r"[^\s\S]")],
    ids=lambda grammar: grammar.kind,
)
def test_a_grammar_of_no_text_says_so(grammar: Grammar) -> None:
    outputs = run(make_grammar_engine(DeferringRunner()), [request_of("a", grammar)])
    assert "it matches no text" in str(outputs["a", 0][-1].error)


@pytest.mark.parametrize("factor", ["0.01", "5", "1e2", "0.25"])
def test_usual_multiples_are_accepted(factor: str) -> None:
    check_grammar(Grammar("json_schema", f'{{"type": "number", "multipleOf": {factor}}}'))


def test_an_abort_while_the_grammar_is_compiled_leaves_nothing_behind() -> None:
    engine = make_grammar_engine(DeferringRunner())
    engine.add_request(request_of("a", schema_grammar({"enum": ["aborted"]})))
    engine.abort("a")
    assert run(engine, [])["a", 0][-1].finish_reason == "abort"
    assert not engine.scheduler.grammar_gate.is_waiting


def test_the_output_is_free_before_the_end_of_thinking() -> None:
    bias = ((THINK_END, 0.0),)
    grammar = schema_grammar(STRICT, THINK_END)
    state_of = make_grammar_engine(DeferringRunner())
    state_of.add_request(request_of("a", grammar, logit_bias=bias, max_tokens=3))
    while not state_of.scheduler.running:
        state_of.step()
    state = state_of.scheduler.running[0].grammar_state
    assert state is not None
    assert not state.is_constraining
    assert state.advance(THINK_END) is None
    assert state.is_constraining
    assert state.take_forced(100)


def test_a_source_is_compiled_once() -> None:
    own = grammars()
    first = own.lane(schema_grammar({"enum": ["once"]}))
    again = own.lane(schema_grammar({"enum": ["once"]}, THINK_END))
    assert first is again
    assert first.compiled.result() is not own.open(schema_grammar({"enum": ["once"]}), ()).result()


def _open_many(own: Grammars, grammar: Grammar, count: int) -> list[GrammarState]:
    states = []
    for _ in range(count):
        lane = own.lane(grammar)
        states.append(GrammarState(None, lane))
        states[-1].open(own.open(grammar, (), lane).result())
    return states


def test_many_choices_of_a_grammar_spread_over_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "NUM_MASK_THREADS", 3)
    own, grammar = grammars(), schema_grammar({"enum": ["lanes", "lakes"]})
    states = _open_many(own, grammar, 40)
    lanes = own._lanes(grammar)
    assert sorted(lane.num_choices for lane in lanes) == [13, 13, 14]
    assert len({id(lane.compiled.result()) for lane in lanes}) == 3
    masks = np.zeros((len(states), -(-VOCAB // 32)), np.int32)
    fill_masks(states, masks)
    assert (masks == masks[0]).all()
    assert masks[0].any()
    del states[10:]
    assert sum(lane.num_choices for lane in lanes) == 10


def test_a_grammar_that_compiles_slowly_keeps_one_prototype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars_module, "NUM_MASK_THREADS", 3)
    monkeypatch.setattr(grammars_module, "_MAX_COMPILE_S", 0.0)
    own, grammar = grammars(), schema_grammar({"enum": ["slow", "slower"]})
    states = _open_many(own, grammar, 20)
    assert len({id(lane.compiled.result()) for lane in own._lanes(grammar)}) == 1
    assert all(state.is_open for state in states)
    refused = Grammar("regex", "(")
    for _ in range(20):
        assert own.open(refused, ()).exception() is not None


def test_lanes_count_among_the_compiled_grammars_that_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars_module, "NUM_MASK_THREADS", 4)
    monkeypatch.setattr(grammars_module, "_MAX_PROTOTYPES", 9)
    own = Grammars(grammars()._tokenizer)
    try:
        for number in range(6):
            _open_many(own, schema_grammar({"enum": ["kept", number]}), 40)
        kept = [len(lanes) for lanes, _ in own._prototypes.values()]
        assert kept == [4, 4]
        assert own._num_lanes == 8
        monkeypatch.setattr(grammars_module, "_MAX_PROTOTYPE_SOURCES", 200)
        _open_many(own, schema_grammar({"enum": ["long" * 5]}), 40)
        assert [len(lanes) for lanes, _ in own._prototypes.values()] == [4]
        assert own._num_source_bytes <= 200
    finally:
        own.close()


class _DisturbedCompiler:
    """Raises at chosen calls, as the library does where memory is short."""

    def __init__(self, *disturbed: int) -> None:
        self._disturbed = disturbed
        self._num_calls = 0

    def __call__(self, *args: object, **options: object) -> LLMatcher:
        self._num_calls += 1
        if self._num_calls in self._disturbed:
            raise MemoryError("no memory for the grammar")
        return LLMatcher(*args, **options)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(LLMatcher, name)


def test_a_grammar_that_failed_for_another_reason_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars_module, "LLMatcher", _DisturbedCompiler(1))
    grammar = schema_grammar({"enum": ["disturbed"]})
    lost = run(make_grammar_engine(DeferringRunner()), [request_of("a", grammar)])["a", 0]
    assert "no memory" in str(lost[-1].error)
    found = run(make_grammar_engine(DeferringRunner()), [request_of("b", grammar)])["b", 0]
    assert text(token_ids(found)) == '"disturbed"'


def test_a_further_lane_that_fails_has_the_first_prototype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars_module, "NUM_MASK_THREADS", 3)
    monkeypatch.setattr(grammars_module, "LLMatcher", _DisturbedCompiler(2))
    own, grammar = grammars(), schema_grammar({"enum": ["one lane", "is lost"]})
    states = _open_many(own, grammar, 30)
    assert all(state.is_open for state in states)
    assert len({id(lane.compiled.result()) for lane in own._lanes(grammar)}) == 2


def test_the_engine_of_another_configuration_has_no_grammars() -> None:
    from engine.core import Engine

    engine = Engine(make_config(), DeferringRunner())
    with pytest.raises(InvalidRequestError, match="follows no grammars"):
        engine.add_request(request_of("a", schema_grammar(STRICT)))


CHAINS = """
import json, sys
from engine.errors import InvalidRequestError
from engine.grammars import check_grammar, deep_threads
from engine.types import Grammar

count, kind = int(sys.argv[1]), sys.argv[2]
if kind == "lark":
    rules = [f'r{i}: (r{i + 1} | "b")' for i in range(count)]
    source = "\\n".join(["start: r0", *rules, f'r{count}: "a"'])
else:
    parts = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    source = json.dumps({"$ref": "#/$defs/d0", "$defs": {**parts, f"d{count}": {"type": "null"}}})
try:
    deep_threads(1, "x").submit(check_grammar, Grammar(kind, source)).result()
    print("passes")
except InvalidRequestError as error:
    print(error.message)
"""


@pytest.mark.parametrize("kind", ["lark", "json_schema"])
@pytest.mark.parametrize(("count", "words"), [(900, "passes"), (1300, "1000 are allowed")])
def test_long_chains_of_rules_pass_or_are_refused_and_never_overflow_the_stack(
    kind: str, count: int, words: str
) -> None:
    """Runs in a process of its own, which an overflow would end."""
    command = [sys.executable, "-c", CHAINS, str(count), kind]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, words in found.stdout) == (0, True), found.stdout + found.stderr


LEAST = """
import sys
from engine.errors import InvalidRequestError
from engine.grammars import check_grammar
from engine.types import Grammar

try:
    check_grammar(Grammar(sys.argv[1], sys.argv[2]))
except InvalidRequestError as error:
    print(error.message)
"""


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"enum": [1, -9223372036854775808]}'),
        ("json_schema", '{"enum": [-9223372036854775807]}'),
        ("json_schema", '{"type": "integer", "const": -1e19}'),
        ("json_schema", '{"type": "integer", "minimum": -1e300, "maximum": -9.3E+18}'),
        ("lark", 'start: "a" %json {"items": {"const": -99999999999999999999}}'),
    ],
)
def test_a_number_at_which_the_library_ends_the_process_is_refused(kind: str, source: str) -> None:
    """Runs in a process of its own, which one of these would end."""
    command = [sys.executable, "-c", LEAST, kind, source]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, "is too small" in found.stdout) == (0, True), found


ENDLESS = """
import sys
from engine.types import Grammar
from serve_app.openai.structured import check_structured_outputs
from engine.grammars import check_grammar
from tests.grammar_helpers import DeferringRunner, make_grammar_engine, run
from tests.test_engine_grammars import request_of

grammar = check_grammar(check_structured_outputs({"grammar": sys.argv[1]}))
requests = [request_of(f"r{i}", grammar, seed=i, max_tokens=20) for i in range(4)]
for outputs in run(make_grammar_engine(DeferringRunner()), requests).values():
    print(outputs[-1].finish_reason)
"""


@pytest.mark.parametrize(
    "source",
    [
        "start: /a+/ x\nx: x\n",
        'start: "x" /a+/ x | "y" /b*/\nx: x # without a line at the end',
        'start: ("x" | "y") %json {"type": "integer"} /[0-9]+/ x\nx: x',
        'root ::= "x" [a]+ y | "y"\ny ::= y',
    ],
)
def test_a_grammar_of_a_client_cannot_stop_a_step(source: str) -> None:
    """Runs in a process of its own, which would never end."""
    command = [sys.executable, "-c", ENDLESS, source]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found
    assert len(found.stdout.split()) == 4


def test_small_numbers_pass() -> None:
    check_grammar(Grammar("json_schema", '{"enum": [-9223372036854774784, -5, 1e300]}'))
    check_grammar(Grammar("regex", "a-9223372036854775808"))
    check_grammar(Grammar("gbnf", 'root ::= "a" | "-9223372036854775808"'))


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "integer", "multipleOf": 999983, "examples": [{"multipleOf": 0}]}',
        '{"type": "integer", "multipleOf": 9973.' + "0" * 40 + "e3}",
    ],
)
def test_no_other_number_hides_a_large_multiple(schema: str) -> None:
    with pytest.raises(InvalidRequestError, match="multipleOf"):
        check_grammar(Grammar("json_schema", schema))
