"""A question for each of the demo's adapters that shows its effect."""

from __future__ import annotations

EXAMPLES = {
    "pirate": "What is the capital of France?",
    "sql": (
        "CREATE TABLE players (id INTEGER, team TEXT, goals INTEGER, name TEXT);\n\n"
        "How many players are there for each team?"
    ),
    "extract": "Extract name, city and age as JSON: Clara Jones is 41 years old and lives in Oslo.",
}
