"""The demo: a small base model from a PyPI wheel and the four trained adapters in this folder."""

# A question for each adapter that shows its effect.
EXAMPLES = {
    "pirate": "What is the capital of France?",
    "sql": (
        "CREATE TABLE players (id INTEGER, team TEXT, goals INTEGER, name TEXT);\n\n"
        "How many players are there for each team?"
    ),
    "extract": "Extract name, city and age as JSON: Clara Jones is 41 years old and lives in Oslo.",
}
