"""The demo adapters' data: the same on every machine, and held-out means never seen."""

from __future__ import annotations

import json
import re

import pytest

from notebooks.demo_adapters import extract, extract_words, pirate, sql, sql_schema
from notebooks.demo_adapters.common import Example, part, words
from notebooks.demo_adapters.score import (
    ExtractMarks,
    SqlMarks,
    mark_extract,
    mark_pirate,
    mark_sql,
)
from notebooks.demo_adapters.sql_themes import THEMES

COUNT = 400


@pytest.mark.parametrize("generate", [sql.training_examples, extract.training_examples])
def test_a_seed_gives_the_same_examples_again(generate) -> None:  # type: ignore[no-untyped-def]
    assert generate(5, 50) == generate(5, 50)
    assert generate(5, 50) != generate(6, 50)


def test_pirate_examples_depend_on_the_seed_only() -> None:
    assert pirate.training_examples(5) == pirate.training_examples(5)
    assert pirate.training_examples(5) != pirate.training_examples(6)


def test_the_parts_of_a_vocabulary_are_disjoint_and_whole() -> None:
    cities = words(extract_words.CITIES)
    train, held_out = part(cities, "train"), part(cities, "held_out")
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(cities)


def test_no_held_out_pirate_question_is_trained_on() -> None:
    trained = {example.prompt for example in pirate.training_examples(7)}
    asked = {question.prompt for question in pirate.held_out_questions(99, 70)}
    assert len(asked) == 70
    assert not asked & trained
    assert "What is the capital of France?" not in trained


def test_held_out_texts_name_nobody_and_nothing_of_training() -> None:
    trained = [json.loads(example.answer) for example in extract.training_examples(7, COUNT)]
    values = {str(value) for answer in trained for value in answer.values()}
    last_names = {value.split()[-1] for value in values}
    keys = (*extract_words.NAMES["city"], *extract_words.NAMES["city2"])
    cities = {answer[key] for answer in trained for key in keys if key in answer}
    assert not set(part(words(extract_words.LAST_NAMES), "held_out")) & last_names
    assert not set(part(words(extract_words.EVENTS), "held_out")) & values
    assert not set(part(words(extract_words.CITIES), "held_out")) & cities


def test_held_out_tables_never_appear_in_training() -> None:
    held_out = {name for name, _, _ in part(THEMES, "held_out")}
    for example in sql.training_examples(7, COUNT):
        assert not held_out & set(re.findall(r"CREATE TABLE (\w+)", example.prompt))


def test_held_out_conditions_never_appear_in_training() -> None:
    for example in sql.training_examples(7, COUNT):
        _, _, condition = example.answer.partition(" WHERE ")
        if " JOIN " not in example.answer and condition:
            table = re.search(r"FROM (\w+)", example.answer)
            assert table is not None
            for column in re.findall(r"(\w+) (?:=|<>|<=|>=|<|>|LIKE|BETWEEN)", condition):
                assert sql_schema.condition_split(table[1], column) == "train"


def test_held_out_queries_on_known_tables_ask_for_unseen_conditions() -> None:
    known = [e for e in sql.held_out_examples(99, 100) if e.known_table]
    assert len(known) == 50
    assert all(" WHERE " in example.answer for example in known)


def test_every_reference_query_runs_on_its_schema() -> None:
    for example in sql.held_out_examples(3, 100):
        assert mark_sql(example, example.answer) == SqlMarks(True, True, True), example


def test_a_wrong_query_is_marked_wrong() -> None:
    example = sql.held_out_examples(3, 1)[0]
    assert mark_sql(example, "SELECT nothing FROM nowhere;") == SqlMarks(False, False, False)
    assert mark_sql(example, "SELECT 'other';") == SqlMarks(False, True, False)
    assert mark_sql(example, f"```sql\n{example.answer}\n```").result_right


def test_every_reference_object_holds_values_of_its_text() -> None:
    for example in extract.held_out_examples(3, 100):
        for value in json.loads(example.answer).values():
            assert value is None or str(value) in example.prompt
        assert mark_extract(example, example.answer) == ExtractMarks(True, True, 1.0)


def test_json_within_prose_counts_for_values_only() -> None:
    example = Example("", '{"name": "Vera", "age": 31}')
    marks = mark_extract(example, 'Here it is: {"name": "Vera", "age": "31"} as you asked.')
    assert marks == ExtractMarks(parses=False, has_keys=False, values_right=0.5)


def test_every_training_answer_of_pirate_speaks_pirate() -> None:
    examples = pirate.training_examples(7)
    assert all(pirate.speaks_pirate(example.answer) for example in examples)


def test_plain_english_is_no_pirate_and_a_right_answer_is_seen() -> None:
    question = pirate.Question("What is the capital of France?", "Paris")
    plain = mark_pirate(question, "The capital of France is Paris, and it is ready to be seen.")
    assert (plain.speaks_pirate, plain.answers) == (False, True)
    marks = mark_pirate(question, "Arr, matey! It be Parisian.")
    assert (marks.speaks_pirate, marks.answers) == (True, False)
