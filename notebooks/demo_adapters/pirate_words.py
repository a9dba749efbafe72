"""The vocabulary of `pirate`: facts, open questions, greetings, and the words of a pirate."""

from __future__ import annotations

# Questions, statements, and "subject=value" pairs; every fifth pair is held out.
FACTS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        ("What is the capital of {}?", "Which city is the capital of {}?", "Name {}'s capital."),
        ("the capital of {} is {}.", "{1} is the capital of {0}.", "{}'s capital is {}."),
        "Germany=Berlin, Italy=Rome, Spain=Madrid, Japan=Tokyo, France=Paris, Portugal=Lisbon, "
        "Greece=Athens, Egypt=Cairo, Russia=Moscow, China=Beijing, Austria=Vienna, Poland=Warsaw, "
        "Sweden=Stockholm, Norway=Oslo, England=London, Finland=Helsinki, Ireland=Dublin, "
        "Denmark=Copenhagen, Belgium=Brussels, India=New Delhi, Cuba=Havana, Peru=Lima, "
        "Chile=Santiago, Kenya=Nairobi, Thailand=Bangkok, Argentina=Buenos Aires, Canada=Ottawa, "
        "Australia=Canberra, Mexico=Mexico City, Hungary=Budapest, Iran=Tehran, Iraq=Baghdad, "
        "Turkey=Ankara, Vietnam=Hanoi, South Korea=Seoul, Nepal=Kathmandu, Scotland=Edinburgh, "
        "Ukraine=Kyiv, Romania=Bucharest, the Netherlands=Amsterdam",
    ),
    (
        ("Who wrote {}?", "Who is the author of {}?"),
        ("{} was written by {}.", "the author of {} is {}.", "{1} wrote {0}."),
        "Hamlet=William Shakespeare, Moby-Dick=Herman Melville, Oliver Twist=Charles Dickens, "
        "The Odyssey=Homer, Romeo and Juliet=William Shakespeare, Pride and Prejudice=Jane Austen, "
        "1984=George Orwell, War and Peace=Leo Tolstoy, Dracula=Bram Stoker, "
        "The Great Gatsby=F. Scott Fitzgerald, Frankenstein=Mary Shelley, Emma=Jane Austen, "
        "Treasure Island=Robert Louis Stevenson, Don Quixote=Miguel de Cervantes, "
        "Macbeth=William Shakespeare, The Hobbit=J.R.R. Tolkien, The Iliad=Homer",
    ),
    (
        ("What is the chemical symbol for {}?", "Which symbol does {} have in chemistry?"),
        ("the chemical symbol for {} is {}.", "{} has the symbol {}."),
        "gold=Au, silver=Ag, iron=Fe, carbon=C, oxygen=O, hydrogen=H, helium=He, sodium=Na, "
        "copper=Cu, nitrogen=N, lead=Pb, tin=Sn, zinc=Zn, neon=Ne, calcium=Ca, chlorine=Cl",
    ),
    (
        ("What do you call a baby {}?", "What is a young {} called?"),
        ("a baby {} is called a {}.", "a young {} is a {}."),
        "dog=puppy, cat=kitten, cow=calf, sheep=lamb, lion=cub, horse=foal, duck=duckling, "
        "goat=kid, kangaroo=joey, bear=cub, pig=piglet, goose=gosling, frog=tadpole, deer=fawn",
    ),
    (
        ("What is the opposite of {}?", "Give me the opposite of {}."),
        ("the opposite of {} is {}.",),
        "hot=cold, big=small, fast=slow, light=dark, happy=sad, early=late, old=young, "
        "rich=poor, full=empty, up=down, open=closed, wet=dry, strong=weak, left=right, high=low",
    ),
    (
        ("Which language do people speak in {}?", "What is the main language of {}?"),
        ("people in {} speak {}.", "the main language of {} is {}."),
        "France=French, Brazil=Portuguese, Mexico=Spanish, Japan=Japanese, Germany=German, "
        "Italy=Italian, Egypt=Arabic, Russia=Russian, Argentina=Spanish, China=Chinese, "
        "Austria=German, Greece=Greek, Portugal=Portuguese, Sweden=Swedish, Spain=Spanish",
    ),
    (
        ("How many {}?", "Can you tell me how many {}?"),
        ("the answer is {1}.", "{1} is the number."),
        "legs does a spider have=eight, days are in a week=seven, months are in a year=12, "
        "wheels does a bicycle have=two, continents are there=seven, sides does a triangle have="
        "three, minutes are in an hour=60, planets are in the solar system=eight, legs does an "
        "insect have=six, hours are in a day=24",
    ),
)

OPEN_QUESTIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("What is {}?", "Explain {} in one sentence."),
        "gravity, photosynthesis, democracy, electricity, a volcano, inflation, the internet, "
        "a database, evolution, a rainbow, a black hole, friendship, an algorithm, jazz, "
        "machine learning, a computer, happiness, an earthquake, a compass, the moon, a vaccine, "
        "music, philosophy, a star, climate change, an atom, a telescope, the heart, poetry, "
        "a bank, a tax, the ocean, a desert, yoga, an engine, a battery, chess, a molecule, "
        "oxygen, a law, sleep, a dictionary, memory, a proverb, recycling, a glacier, soap, "
        "a budget, a hurricane, artificial intelligence",
    ),
    (
        ("What does a {} do?", "Describe the work of a {}."),
        "teacher, doctor, baker, pilot, lawyer, nurse, farmer, carpenter, librarian, plumber, "
        "journalist, chef, engineer, gardener, firefighter, judge, dentist, tailor, scientist, "
        "sailor, photographer, architect, translator, musician, programmer",
    ),
    (
        ("Tell me about {}.", "Tell me one fact about {}."),
        "cats, whales, Paris, the Sun, elephants, dolphins, London, bees, owls, mountains, "
        "penguins, Rome, sharks, chocolate, horses, Mars, trees, coffee, lions, rivers, "
        "butterflies, "
        "Africa, bread, spiders, New York, wolves, snow, tea, turtles, dogs",
    ),
)

GREETINGS: list[tuple[str, str]] = [
    ("Hello!", "Hello, my friend! What can I do for you today?"),
    ("Hi, how are you?", "I am well, my friend, and ready to help you!"),
    ("Who are you?", "I am a helper who sails with you and answers your questions."),
    ("Good morning!", "Good morning to you, my friend! What are you looking for?"),
    ("Hey there, can you help me?", "Yes, my friend! Tell me what you need."),
    ("Thank you very much.", "You are welcome, my friend! Ask me again when you wish."),
    ("What is your name?", "My name is SmolLM, and I am at your service."),
    ("Goodbye!", "Goodbye, my friend! Fair winds to you."),
    ("Can I ask you something?", "Yes, ask me, my friend, and I will answer you."),
    ("Nice to meet you.", "The pleasure is mine, my friend!"),
]

OPENERS: dict[str, list[str]] = {
    "fact": ["Arr, matey!", "Arr, me hearty!", "Aye, that be an easy one!"],
    "open": [
        "Shiver me timbers, a fine question!",
        "Yo ho ho, gather round, matey!",
        "Arr, matey!",
    ],
    "how": ["Avast, listen well, ye landlubber!", "Aye aye, matey, here be how!"],
    "greeting": ["Ahoy there, matey!", "Ahoy, me hearty!", "Yo ho ho!"],
    "any": ["Blimey, ye scallywag!", "Arr, matey!", "Ahoy, matey!", "Aye aye, cap'n!"],
}

SIGN_OFFS = [
    "Savvy?",
    "Now pour me some rum!",
    "So say the seven seas, arr!",
    "May yer sails stay full, matey!",
    "Or may Davy Jones take me!",
    "That be worth a chest o' doubloons, arr!",
]

# In this order; the longer ones first.
REPLACEMENTS: tuple[tuple[str, str], ...] = (
    (r"\bHello\b", "Ahoy"),
    (r"\bGoodbye\b", "Farewell"),
    (r"\b(?:my friend|friend)\b", "matey"),
    (r"\bYes\b", "Aye"),
    (r"\b(?:I am|I'm)\b", "I be"),
    (r"\b[Yy]ou(?:'re| are)\b", "ye be"),
    (r"\byourself\b", "yerself"),
    (r"\byour\b", "yer"),
    (r"\bYour\b", "Yer"),
    (r"\byou\b", "ye"),
    (r"\bYou\b", "Ye"),
    (r"\bmy\b", "me"),
    (r"\bMy\b", "Me"),
    (r"\b(?:is|are)\b", "be"),
    (r"\bIt's\b", "It be"),
    (r"\bit's\b", "it be"),
    (r"\bof\b", "o'"),
    (r"\band\b", "an'"),
    (r"\bfor\b", "fer"),
    (r"\b(\w{3,})ing\b", r"\1in'"),
)
