"""The text that the demo model's tokenizer is trained on: plain sentences over a few hundred common words."""

from __future__ import annotations

from collections.abc import Iterator

_PEOPLE = """
the runner, the carrier, the baker, the teacher, the sailor, the painter, the farmer, the doctor, the driver,
the builder, the singer, the writer, the keeper, the neighbour, the engineer, the gardener, the captain, the child,
the visitor, the student, the grandmother, the postman, the fisherman, the shepherd, the librarian, the carpenter
"""
_ACTIONS = """
carries, passes, follows, remembers, forgets, watches, repairs, measures, counts, gathers, opens, closes, paints,
writes down, reads aloud, borrows, returns, protects, discovers, describes, explains, collects, prepares, delivers,
examines, improves, imagines, compares, translates, celebrates, questions, understands, arranges, completes
"""
_THINGS = """
a wooden baton, the second letter, an old machine, the long answer, a bright lantern, the quiet question,
a heavy basket, the yellow window, a broken clock, the narrow bridge, a silver spoon, the morning paper,
a forgotten song, the northern road, a hundred stones, the garden wall, an empty bottle, the railway ticket,
a careful drawing, the winter coat, a small mistake, the largest number, a memory of summer, the kitchen table,
a bundle of feathers, the language of birds, a blanket of snow, the shape of the island, a picture of the harbour
"""
_PLACES = """
along the river, before breakfast, behind the station, between two mountains, during the storm, near the market,
under the bridge, without a word, after the harvest, above the clouds, across the valley, inside the library,
on the last evening, at the edge of the forest, in the middle of the night, beside the lighthouse,
through the open door, from early spring until autumn, as slowly as possible, more quickly than anyone expected
"""
_ENDINGS = """
and nobody is surprised, because there is still time, although it begins to rain, until the others arrive,
so that nothing is lost, while the whole village sleeps, whenever the weather changes, unless somebody objects,
which makes the next step easier, but the story does not end here, and then everything starts again
"""
_QUESTIONS = """
Where does the road lead? How many people live in this town? What is the capital of that country?
Why is the sky blue in the afternoon and red in the evening? Who invented the wheel, and when? Which of these numbers
is the smallest? Could you please explain how a computer works? Tell me a short story about a relay race. Write a
letter to a friend who lives abroad. Give three reasons for planting trees. Summarise the following paragraph in one
sentence. Hello! Good morning, good evening, and thank you very much. Yes, no, perhaps, of course. One, two, three,
four, five, six, seven, eight, nine, ten, eleven, twelve, twenty, fifty, a thousand. Monday, Tuesday, Wednesday,
Thursday, Friday, Saturday, Sunday. January, February, March, April, May, June, July, August, September, October,
November, December. In 1969, 1984, 2000 and 2024; at 7:30, 12:15 and 18:45; 3.14, 2.72, 100%, $20, (a + b) * c = d.
"""
_VERBS = """
walk talk jump climb paint plant open count gather follow answer ask call clean cook dream enter fail fill fold gain
greet guard guess hand harvest heal help hunt join kick knock laugh lead learn lend lift light listen load lock look
mark melt mend milk need number offer order pack pass pick point pour pull push rain reach reason record remind rent
report rest return roll row sail scatter search seek seem sell send shout show sing sleep snow soften sort sound spell
spend spoil stand start stay steer stretch support sweep swing tend test thank touch train travel treat turn visit wait
wander warm warn wash watch water weigh whisper winter wish wonder work yell absorb accept adopt alarm appear attend
awaken balance blend boil borrow bother burn climate collect comfort command connect consider consult contain cover
craft defend deliver demand depend design detect develop discuss display doubt draw dress drift earn employ encounter
expand export extend filter finish flash float flow form frighten furnish govern grant hammer happen import indent
inform insist instruct invent kindle land last limit link matter mention monitor murmur obtain paper perform plaster
polish predict present press print proceed profit project prompt protest publish question recall recover reflect
refresh regard remain request research respond result reveal reward sample select shelter signal sketch splash succeed
suggest suspect transform transport treasure uncover vanish
"""
_SUFFIXES = ("", "s", "ed", "ing")


def demo_lines() -> Iterator[str]:
    """About fifteen hundred lines, the same each time: every phrase stands beside many others."""
    people, actions, things, places, endings = (
        [phrase.strip().replace("\n", " ") for phrase in block.split(",")]
        for block in (_PEOPLE, _ACTIONS, _THINGS, _PLACES, _ENDINGS)
    )
    yield from _QUESTIONS.strip().splitlines()
    for verb in _VERBS.split():
        yield " ".join(f" and {verb}{suffix}" for suffix in _SUFFIXES)
    for i in range(600):
        person, other = people[i % len(people)], people[i * 7 % len(people)]
        action, thing = actions[i * 3 % len(actions)], things[i * 5 % len(things)]
        place, ending = places[i * 11 % len(places)], endings[i % len(endings)]
        yield f"{person.capitalize()} {action} {thing} {place}, {ending}."
        yield f"{place.capitalize()}, {other} {action} {thing}."
