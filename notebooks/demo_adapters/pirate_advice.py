"""Practical questions of `pirate` with plain answers, which the base is too small to give."""

from __future__ import annotations

# Task, answer. Asked as "How do I ...?" and "How can I ...?"; every fifth is held out.
TASKS: list[tuple[str, str]] = [
    (
        "boil an egg",
        "Put the egg into boiling water, wait eight minutes, and cool it in cold water.",
    ),
    (
        "learn a language",
        "Practise a little every day, speak with people, and read simple stories.",
    ),
    (
        "sleep better",
        "Go to bed at the same hour, keep the room dark, and drink no coffee at night.",
    ),
    (
        "save money",
        "Write down what you spend, plan your budget, and put a part of your pay aside.",
    ),
    ("make coffee", "Grind the beans, pour hot water over them, and let it drip into your cup."),
    (
        "plant a tree",
        "Dig a wide hole, set the roots into it, fill it with soil, and water it well.",
    ),
    (
        "write a letter",
        "Begin with a greeting, say what is on your mind, and sign it with your name.",
    ),
    ("clean a window", "Wipe it with warm water and vinegar, and dry it with an old newspaper."),
    ("study for an exam", "Make a plan, read your notes, and test yourself again and again."),
    (
        "bake bread",
        "Mix flour, water, salt and yeast, let the dough rise, and bake it in a hot oven.",
    ),
    ("stay healthy", "Eat plenty of vegetables, walk every day, and sleep for eight hours."),
    (
        "cook rice",
        "Use two cups of water for each cup of rice, and let it simmer until it is soft.",
    ),
    ("make new friends", "Join a club, smile at people, and listen to their stories."),
    (
        "fix a flat tyre",
        "Take off the wheel, find the hole, glue a patch on it, and pump it up again.",
    ),
    ("read faster", "Follow the lines with your finger, and do not stop at every word."),
    (
        "draw a cat",
        "Start with a circle for the head, then add two ears, whiskers and a long tail.",
    ),
    ("train a dog", "Give it a treat when it obeys, and be patient and kind."),
    ("grow tomatoes", "Plant them in a sunny place, water their roots, and tie them to a stick."),
    ("wash a sweater", "Wash it by hand in cold water, and lay it flat while it is drying."),
    ("pack a suitcase", "Make a list, roll your clothes, and put the heavy things at the bottom."),
    (
        "run a marathon",
        "Train for months, run a little farther each week, and rest before the race.",
    ),
    (
        "learn to swim",
        "Begin in shallow water, learn floating first, and take lessons from a teacher.",
    ),
    ("start a garden", "Choose a sunny spot, loosen the soil, and sow seeds that grow easily."),
    ("make tea", "Boil the water, pour it over the leaves, and wait for three minutes."),
    ("cook pasta", "Boil water with salt, add the pasta, and stir it for about ten minutes."),
    ("remember names", "Repeat the name aloud, and think of a picture that goes with it."),
    ("relax after work", "Take a walk, listen to music, and put your phone away."),
    ("find a job", "Write a short resume, ask people you know, and apply to many companies."),
    (
        "keep my house clean",
        "Tidy up for ten minutes every day, and throw away what you do not use.",
    ),
    (
        "prepare for an interview",
        "Read about the company, and practise your answers with a friend.",
    ),
    (
        "get better at chess",
        "Play often, solve puzzles, and look for the mistakes in your old games.",
    ),
    ("take good photos", "Mind the light, hold the camera still, and come close to your subject."),
    ("choose a book", "Read the first page, and take it home if you are curious about the second."),
    ("cross a river safely", "Look for a bridge or shallow water, and test your way with a stick."),
    (
        "light a campfire",
        "Pile dry twigs over paper, light it from below, and add larger wood slowly.",
    ),
]
