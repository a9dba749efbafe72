"""The vocabulary of `tools`: the values of parameters, and the wordings of questions and answers.

The parameters and the operations are tables in `tools_tables.txt`. Of every list, a fifth is held
out (`common.part`).
"""

from __future__ import annotations

from notebooks.demo_adapters import extract_words, sql_themes
from notebooks.demo_adapters.common import words

VALUES: dict[str, str] = {
    "city": extract_words.CITIES,
    "product": extract_words.PRODUCTS,
    "job": extract_words.JOBS,
    "country": sql_themes.COUNTRIES.replace("|", ", "),
    "title": sql_themes.TITLES.replace("|", ", ")
    + ", The Glass Orchard, Harbor Lights, A Map of Rain, Seven Bridges, Cold Harvest",
    "topic": "climate change, machine learning, ancient Rome, renewable energy, gardening, jazz "
    "history, space travel, modern art, nutrition, cyber security, ocean currents, chess openings, "
    "volcanoes, data privacy, urban planning, vaccines, robotics, bird migration, tax law, poetry, "
    "electric cars, black holes, fermentation, philosophy, coral reefs, typography, glaciers",
    "genre": "drama, comedy, thriller, romance, horror, fantasy, jazz, rock, science fiction, "
    "documentary, mystery, folk, adventure, blues, western, opera, biography",
    "cuisine": "Thai, Italian, Mexican, Greek, Indian, Japanese, French, Turkish, Korean, Spanish, "
    "Lebanese, Vietnamese, Peruvian, Ethiopian",
    "language": "German, French, Spanish, Italian, Japanese, Polish, Korean, Turkish, Dutch, "
    "Swedish, Arabic, Hindi, Greek, Portuguese, Finnish, Czech",
    "currency": "USD, EUR, GBP, JPY, CHF, CAD, AUD, NOK, SEK, PLN, INR, BRL, MXN, KRW, TRY, ZAR",
    "animal": "red fox, snow leopard, grey wolf, barn owl, sea otter, monarch butterfly, emperor "
    "penguin, brown bear, blue whale, giant tortoise, honey bee, great white shark, lynx, beaver",
    "team": "the Harbor Hawks, the River Wolves, Northside United, the Iron Bears, Real Costa, the "
    "Silver Comets, Eastfield Rovers, the Desert Kings, Blue Valley FC, the Storm Riders",
    "sport": "tennis, basketball, football, hockey, swimming, rowing, cycling, golf, volleyball, "
    "handball, rugby, badminton, cricket, skiing, judo",
    "color": "red, blue, green, black, white, yellow, purple, orange, grey, turquoise, pink, brown",
    "food": "tomatoes, chicken, rice, lentils, salmon, spinach, mushrooms, eggs, tofu, potatoes, "
    "beans, cheese, garlic, peppers, zucchini, shrimp, carrots, noodles, avocado, beef, onions",
    "instrument": "piano, violin, flute, cello, drums, trumpet, clarinet, harp, saxophone, oboe",
    "material": "steel, copper, glass, oak, aluminium, concrete, water, ice, gold, rubber, marble, "
    "titanium, brass, granite, nylon, silver",
    "landmark": "the Old Lighthouse, Maple Castle, the Stone Bridge, Lake Tarn, the Sky Tower, the "
    "Grand Arcade, Eagle Rock, the Clock Museum, Harbor Park, the Salt Mine, the North Gate",
    "sentence": "I will be ten minutes late, The meeting is moved to Monday, Happy birthday to "
    "you, Please call me back tonight, The parcel has arrived, Dinner is ready at seven, "
    "See you at the station, The report is finished, We won the game, Do not forget the keys, "
    "The service was slow but friendly, I love this product, Thank you for your help, "
    "The train is cancelled, Lunch tomorrow at noon, This film was far too long",
}

# Openings of a question by the kind of its operation; {o} is the object, {v} the verb.
STEMS: dict[str, tuple[str, ...]] = {
    "compute": (
        "Calculate {o}",
        "What is {o}",
        "Compute {o}",
        "Could you work out {o}",
        "Determine {o}",
        "Please calculate {o}",
        "I need to know {o}",
        "Tell me {o}",
        "Find {o}",
        "Help me figure out {o}",
    ),
    "fetch": (
        "What is {o}",
        "Get {o}",
        "Tell me {o}",
        "Show me {o}",
        "I would like to see {o}",
        "Can you look up {o}",
        "Give me {o}",
        "Check {o}",
        "Find {o}",
        "Please fetch {o}",
    ),
    "search": (
        "Find {o}",
        "Search for {o}",
        "Show me {o}",
        "I am looking for {o}",
        "Which {o} are there",
        "Can you find {o}",
        "List {o}",
        "Recommend some {o}",
        "I need {o}",
        "Are there any {o}",
    ),
    "act": (
        "{v} {o}",
        "Please {v} {o}",
        "Can you {v} {o}",
        "I want to {v} {o}",
        "I would like you to {v} {o}",
        "Could you {v} {o}",
        "I need to {v} {o}",
        "Help me {v} {o}",
        "Go ahead and {v} {o}",
        "Would you {v} {o}",
    ),
}
QUESTION_WORDS = ("what", "which", "can", "could", "are", "would")

# A question as a whole: {stem}, and {rest} with the values.
FRAMES: tuple[str, ...] = (
    "{stem} {rest}{mark}",
    "{stem} {rest}{mark}",
    "{stem}, {rest}{mark}",
    "Hi! {stem} {rest}{mark}",
    "Hello, {stem_low} {rest}, please{mark}",
    "{stem} {rest}{mark} Thank you.",
    "{stem}{mark} Details: {rest}.",
    "I have a question: {stem_low} {rest}{mark}",
    "{Rest}: {stem_low}{mark}",
    "Quick one: {stem_low} {rest}{mark}",
)

# Names of functions by kind.
VERBS: dict[str, tuple[str, ...]] = {
    "compute": ("calculate", "compute", "estimate", "determine", "calc", "get", "find", ""),
    "fetch": ("get", "fetch", "lookup", "retrieve", "find", "check", "show", ""),
    "search": ("find", "search", "list", "get", "query", "discover"),
}
# Names that the benchmark's functions have (`tests/benchmarks/bfcl.py`), without separators.
RESERVED = frozenset(
    words(
        "bookflight, calculatefinalprice, calculatepopulationgrowth, "
        "calculatestandarddeviation, checkorderstatus, findflights, generatepassword, "
        "geometrycalculateconevolume, getmovies, getstandarddeviation, getweatherforecast, "
        "playsong, searchhotels, sortlist, sportsmatchschedule, translatetext, "
        "weatherforecast"
    )
)
DESCRIPTIONS: dict[str, tuple[str, ...]] = {
    "compute": ("Calculate {o}.", "Computes {o} from the given values.", "Determine {o}."),
    "fetch": ("Get {o}.", "Retrieve {o}.", "Returns {o} for the given input."),
    "search": ("Find {o}.", "Search for {o} that match the criteria.", "Lists matching {o}."),
    "act": ("{V} {o}.", "Use this to {v} {o}.", "{V} {o} for the user."),
}

# Where none of the functions fits.
REFUSALS: tuple[str, ...] = (
    "None of my functions can do that.",
    "I am sorry, but I have no function for that.",
    "My functions do not cover this request.",
    "I cannot do that with the functions that I have.",
    "There is no function for that, so I cannot help with it.",
)
# The answer from the result of a function.
RESULTS: dict[str, tuple[str, ...]] = {
    "value": (
        "{O} is {r}.",
        "The result: {o} is {r}.",
        "According to the result, {o} is {r}.",
        "It is {r}.",
        "I found that {o} is {r}.",
    ),
    "list": (
        "I found {n} {o}: {r}.",
        "Here are {n} {o}: {r}.",
        "There are {n} {o}: {r}.",
        "These {n} {o} match: {r}.",
        "The search returned {n} {o}: {r}.",
    ),
    "done": (
        "Done. The confirmation number is {r}.",
        "It is done, with the number {r}.",
        "All set: the reference is {r}.",
        "That worked. Your reference is {r}.",
        "The request was successful; its number is {r}.",
    ),
    "error": (
        "That did not work: {r}.",
        "The function reports an error: {r}.",
        "I could not do that, because of an error: {r}.",
        "Sorry, it failed: {r}.",
        "There was a problem: {r}.",
    ),
}
ERRORS: tuple[str, ...] = (
    "the service is not available",
    "nothing was found",
    "the request timed out",
    "the access was denied",
    "the input is not valid",
)
