"""Simple English without end: stories, and short conversations about things that a child knows. Of our own making.

Every document is drawn from a seed. Names, things and places stay the same throughout a story, and what happens has
a cause, so that a small model can learn to go on with a story and to answer a question.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Speaker(Enum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    speaker: Speaker
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    messages: tuple[Message, ...]
    """The last one is the assistant's."""


Document = str | Chat
"""A string is a plain text that is whole."""


def documents(seed: int) -> Iterator[Document]:
    """Without end; the same seed gives the same ones."""
    rng = random.Random(seed)
    while True:
        yield rng.choices((_plain, _chat), weights=(3, 2))[0](rng)


def words_of(text: str) -> set[str]:
    """In lower case."""
    return set(re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower()))


def vocabulary(seed: int = 0, count: int = 4_000) -> set[str]:
    """The words that stories and answers are made of, as the first `count` documents show them."""
    found: set[str] = set()
    for document, _ in zip(documents(seed), range(count), strict=False):
        if isinstance(document, str):
            found |= words_of(document)
        else:
            for message in document.messages:
                found |= words_of(message.text) if message.speaker is Speaker.ASSISTANT else set()
    return found


# Who and what.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hero:
    name: str
    kind: str
    he: str
    him: str
    his: str

    @property
    def the(self) -> str:
        return f"the {self.kind}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_GIRLS: Final = _words("Anna Clara Ella Ida Lily Mia Nora Rosa")
_BOYS: Final = _words("Ben Emil Finn Hugo Leo Max Oscar Tom")
_ANIMAL_NAMES: Final = _words("Pip Bramble Momo Fern Hazel Toby Willow Nutmeg Pepper Bruno")
_ANIMALS: Final = _words("fox rabbit bear mouse hedgehog squirrel otter badger cat dog duck goat")
_HELPERS: Final = _words("owl crow frog turtle deer beaver mole heron donkey swan")
_HUMANS: Final = ("girl", "boy")
_SMALL: Final = _words("little small young brave curious kind shy cheerful clever")
_HOMES: Final = (
    "near the sea", "by the river", "at the edge of the forest", "on a green hill", "in a small village",
    "beside the old lighthouse", "in a house with a red door", "near the mill",
)  # fmt: skip
_BURROWS: Final = (
    "under an old oak", "by the river", "at the edge of the forest", "in a warm den", "behind the mill",
    "on a green hill", "near the pond", "between the roots of a tree",
)  # fmt: skip
_THINGS: Final = (
    "red ball", "blue scarf", "silver key", "wooden boat", "little bell", "yellow hat", "old map", "green kite",
    "small lantern", "warm blanket",
)  # fmt: skip
_WALKS: Final = ("to the river", "into the forest", "to the market", "up the hill", "to the beach", "to the mill")
_SPOTS: Final = (
    "under the bridge", "behind the barn", "in the tall grass", "beside the well", "under a bush", "near the old oak",
    "between two stones", "on the sand",
)  # fmt: skip
_FOODS: Final = ("bread", "apples", "berries", "honey", "soup", "cheese", "nuts", "cake")
_DAYS: Final = (
    "One day", "One morning", "One evening", "One sunny morning", "One cold morning", "One autumn day",
    "One spring day",
    "One quiet afternoon", "One winter day",
)  # fmt: skip
_MOODS: Final = ("sad", "worried", "lonely", "tired")
_JOYS: Final = ("happy", "proud", "glad", "very happy")


def _a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def _hero(rng: random.Random, kind: str | None = None) -> _Hero:
    kind = kind or rng.choice((*_HUMANS, *_HUMANS, *_ANIMALS))
    she = kind == "girl" or (kind != "boy" and rng.random() < 0.5)
    names = {"girl": _GIRLS, "boy": _BOYS}.get(kind, _ANIMAL_NAMES)
    he, him, his = ("she", "her", "her") if she else ("he", "him", "his")
    return _Hero(name=rng.choice(names), kind=kind, he=he, him=him, his=his)


def _opening(rng: random.Random, hero: _Hero) -> str:
    who = f"{rng.choice(_SMALL)} {hero.kind}"
    home = rng.choice(_HOMES if hero.kind in _HUMANS else _BURROWS)
    return rng.choice((
        f"Once upon a time, there was {_a(who)} named {hero.name}. {_cap(hero.he)} lived {home}.",
        f"Once upon a time, {_a(who)} named {hero.name} lived {home}.",
        f"Once upon a time there was {_a(who)} who lived {home}. {_cap(hero.his)} name was {hero.name}.",
        f"There was once {_a(who)} named {hero.name}, who lived {home}.",
        f"{hero.name} was {_a(who)}. {_cap(hero.he)} lived {home}.",
        f"Long ago, {_a(who)} named {hero.name} lived {home}.",
    ))  # fmt: skip


# What happens. Each gives the sentences of one story between its opening and its ending.

_Plot = Callable[[random.Random, _Hero, _Hero], list[str]]


def _lost(rng: random.Random, hero: _Hero, friend: _Hero) -> list[str]:
    thing, spot, walk = rng.choice(_THINGS), rng.choice(_SPOTS), rng.choice(_WALKS)
    first, second = rng.sample(("in the kitchen", "under the bed", "behind the door", "in the garden"), 2)
    return [
        f"{rng.choice(_DAYS)}, {hero.name} could not find {hero.his} {thing}.",
        f"{_cap(hero.he)} looked {first} and {second}, but it was not there.",
        f"{hero.name} was {rng.choice(_MOODS)}, because {hero.he} loved the {thing}.",
        f"Then {hero.his} friend {friend.name} {friend.the} came by.",
        rng.choice((
            f'"Where did you have it last?" asked {friend.name}. "I took it {walk}," said {hero.name}.',
            f'"Do not be sad," said {friend.name}. "We will look for it together."',
        )),
        f"They went {walk} and looked everywhere.",
        f"At last {rng.choice((hero.name, friend.name))} saw something {spot}. It was the {thing}!",
        f'"Thank you, {friend.name}," said {hero.name}, and they went home together.',
    ]  # fmt: skip


def _storm(rng: random.Random, hero: _Hero, friend: _Hero) -> list[str]:
    walk, food = rng.choice(_WALKS), rng.choice(_FOODS)
    shelter = rng.choice(("a cave", "an old barn", "the mill", "a hollow tree", "the lighthouse"))
    weather = rng.choice((
        ("dark clouds came over the hills", "It began to rain", "the rain stopped", "A rainbow stood over the hills."),
        ("the wind became strong", "The trees bent and the leaves flew", "the wind was still", "The sun came out."),
        ("it began to snow", "Soon the path was white", "the snow stopped", "The whole world was white and quiet."),
        ("there was thunder far away", "Then the rain fell hard", "the storm was over",
         "The air smelled of wet grass."),
    ))  # fmt: skip
    return [
        f"{rng.choice(_DAYS)}, {hero.name} went {walk}.",
        f"On the way {weather[0]}. {weather[1]}, and {hero.name} was cold.",
        f"{_cap(hero.he)} ran to {shelter}, because it was dry there.",
        f"Inside sat {friend.name} {friend.the}, who was waiting for the storm to end.",
        rng.choice((
            f'"Come in," said {friend.name}. "There is room for two."',
            f'"Sit down beside me," said {friend.name}. "It is warm here."',
        )),
        f"{friend.name} had some {food}, and they shared it.",
        f"They told each other stories until {weather[2]}.",
        f"{weather[3]} From that day on, {hero.name} and {friend.name} were friends.",
    ]  # fmt: skip


_MAKES: Final = (
    ("boat", "wood", "a rope", "a sail", "sailed it on the pond"),
    ("kite", "paper", "two sticks", "a long string", "flew it over the hill"),
    ("soup", "carrots", "water", "a big pot", "ate it while it was hot"),
    ("lantern", "glass", "a candle", "some wire", "lit it in the evening"),
    ("little house", "branches", "clay", "dry grass", "sat in it when it rained"),
    ("cake", "flour", "eggs", "honey", "ate it in the garden"),
)


def _make(rng: random.Random, hero: _Hero, friend: _Hero) -> list[str]:
    what, first, second, third, use = rng.choice(_MAKES)
    return [
        f"{rng.choice(_DAYS)}, {hero.name} wanted to make {_a(what)} for {hero.his} friend {friend.name} {friend.the}.",
        rng.choice((
            f"{_cap(hero.he)} needed {first}, {second} and {third}.",
            f'"I need {first}, {second} and {third}," said {hero.name}.',
        )),
        f"{hero.name} found {first} {rng.choice(_SPOTS)}, and the {rng.choice(_HELPERS)} gave {hero.him} {second}.",
        f"But {hero.he} had no {third.removeprefix('a ').removeprefix('some ')}.",
        f"{_cap(hero.he)} asked at the market, and a kind woman gave {hero.him} {third}.",
        f"{hero.name} worked all day. In the evening the {what} was ready.",
        f'"Is this for me?" asked {friend.name}. "Yes," said {hero.name}. "I made it for you."',
        f"They {use}, and {friend.name} was {rng.choice(_JOYS)}.",
    ]  # fmt: skip


def _stuck(rng: random.Random, hero: _Hero, friend: _Hero) -> list[str]:
    where = rng.choice(("in the mud", "in a deep hole", "between two stones", "in a thorn bush"))
    helper = rng.choice(_HELPERS)
    return [
        f"{rng.choice(_DAYS)}, {hero.name} walked {rng.choice(_WALKS)} and heard a voice.",
        f'"Help! Help!" cried the voice. It was {friend.name} {friend.the}, who was stuck {where}.',
        f'"Do not be afraid," said {hero.name}. "I will help you."',
        f"{hero.name} pulled and pulled, but {hero.he} was not strong enough.",
        f"So {hero.he} ran to the {helper} and asked for help.",
        f"The {helper} brought a long rope. They pulled together, one, two, three, and {friend.name} was free.",
        f'"Thank you," said {friend.name}. "Alone we are weak, but together we are strong."',
        f"That evening they all ate {rng.choice(_FOODS)} together.",
    ]


def _race(rng: random.Random, hero: _Hero, friend: _Hero) -> list[str]:
    helper = rng.choice(_HELPERS)
    end = rng.choice(
        (
            f"They came first, and everyone cheered for {hero.name} and {friend.name}.",
            "They did not win, but they laughed, because they had run well together.",
            f"They won by the length of a nose, and the {helper} gave them a big cake.",
        )
    )
    return [
        f"{rng.choice(_DAYS)}, there was a relay race in the village.",
        f"{hero.name} and {friend.name} {friend.the} were one team. They had a wooden baton.",
        f'"I will run first," said {hero.name}, "and then I will pass the baton to you."',
        f'The {helper} called, "Ready, steady, go!" and {hero.name} ran as fast as {hero.he} could.',
        rng.choice((
            f"On the bridge {hero.name} fell, but {hero.he} got up again and held the baton.",
            f"The path was long and the sun was hot, but {hero.name} did not stop.",
        )),
        f"{hero.name} passed the baton to {friend.name}, and {friend.name} ran to the old oak.",
        end,
    ]  # fmt: skip


def _seed(rng: random.Random, hero: _Hero, friend: _Hero) -> list[str]:
    plant, fruit = rng.choice((
        ("apple tree", "apples"), ("cherry tree", "cherries"), ("pumpkin", "pumpkins"), ("berry bush", "berries"),
        ("sunflower", "seeds"),
    ))  # fmt: skip
    return [
        f"{rng.choice(_DAYS)}, {hero.name} found a seed {rng.choice(_SPOTS)}.",
        f"{_cap(hero.he)} planted it in the garden and gave it water every day.",
        f'"Nothing is growing," said {friend.name} {friend.the}. "We must wait," said {hero.name}.',
        "The rain came and the sun shone, and one morning there was a small green leaf.",
        f"The leaf became {_a(plant)}, and it grew taller than {hero.name}.",
        f"When autumn came, it was full of {fruit}.",
        f"{hero.name} gave half of the {fruit} to {friend.name}, and they kept one seed for the next year.",
    ]


def _fear(rng: random.Random, hero: _Hero, friend: _Hero) -> list[str]:
    fear, sign, answer = rng.choice((
        ("the dark", "When the sun went down, {he} hid under the blanket",
         "The dark is only the time when the stars come out"),
        ("thunder", "When the sky was loud, {he} hid under the table", "Thunder is only the voice of the clouds"),
        ("deep water", "When the others swam, {he} sat on the bank", "Water carries those who lie still"),
        ("the forest", "When the others went there, {he} stayed at home", "The forest is only many trees together"),
    ))  # fmt: skip
    return [
        f"{hero.name} was not afraid of much, but {hero.he} was afraid of {fear}.",
        f"{sign.format(he=hero.he)}.",
        f"{rng.choice(_DAYS)}, {hero.his} friend {friend.name} {friend.the} asked, \"Why are you afraid?\"",
        f'"I do not know what is there," said {hero.name}.',
        f'"{answer}," said {friend.name}. "Take my hand, and I will show you."',
        f"They went together, slowly, step by step. {hero.name} held {hero.his} breath.",
        f"And nothing bad happened. {_cap(hero.he)} even began to laugh.",
        f"After that, {hero.name} was not afraid of {fear} any more.",
    ]  # fmt: skip


def _letter(rng: random.Random, hero: _Hero, friend: _Hero) -> list[str]:
    whom = rng.choice(("grandmother", "grandfather", "aunt", "uncle"))
    first, second = rng.sample(
        ("over the bridge", "through the forest", "along the river", "up the hill", "past the mill"), 2
    )
    return [
        f"{rng.choice(_DAYS)}, {hero.name} had to bring a letter to {hero.his} {whom}.",
        f"The way was long. It went {first} and {second}.",
        f"At the crossroads {hero.he} did not know where to go, so {hero.he} asked {friend.name} {friend.the}.",
        f'"I will show you the way," said {friend.name}, "if you tell me a story."',
        f"So {hero.name} told a story, and the way was short.",
        f"When they came to the house, {hero.his} {whom} opened the door and smiled.",
        f"{_cap(hero.his)} {whom} read the letter aloud and gave them {rng.choice(_FOODS)}.",
    ]


def _share(rng: random.Random, hero: _Hero, friend: _Hero) -> list[str]:
    food = rng.choice(_FOODS)
    return [
        f"{rng.choice(_DAYS)}, {hero.name} went {rng.choice(_WALKS)} with some {food} in {hero.his} basket.",
        f"On the way {hero.he} met {friend.name} {friend.the}, who looked {rng.choice(('thin', 'hungry', 'tired'))}.",
        f'"I have not eaten since yesterday," said {friend.name}.',
        f"{hero.name} was hungry too, but {hero.he} gave {friend.name} half of the {food}.",
        f"They sat down {rng.choice(_SPOTS)} and ate, and it was enough for both.",
        f"When winter came, {hero.name} had nothing to eat.",
        f"Then somebody knocked at the door. It was {friend.name} with a basket full of {rng.choice(_FOODS)}.",
        f'"You shared with me," said {friend.name}, "and now I share with you."',
    ]


def _moon(rng: random.Random, hero: _Hero, friend: _Hero) -> list[str]:
    return [
        f"Every night {hero.name} looked at the moon. {_cap(hero.he)} wanted to hold it.",
        f"{rng.choice(_DAYS)}, {hero.he} climbed the highest hill, but the moon was still far away.",
        f"{_cap(hero.he)} climbed a tall tree, but the moon was still far away.",
        f"{hero.name} was {rng.choice(_MOODS)} and sat down by the pond.",
        f'"Why are you sad?" asked {friend.name} {friend.the}. "I cannot reach the moon," said {hero.name}.',
        f'"Look down," said {friend.name}. There was the moon, round and bright in the water.',
        f'"It is beautiful," said {hero.name}. "Now it belongs to both of us."',
    ]


def _sea(rng: random.Random, hero: _Hero, friend: _Hero) -> list[str]:
    return [
        f"{rng.choice(_DAYS)}, {hero.name} and {friend.name} {friend.the} took a small boat out to sea.",
        f"The water was calm, and they caught {rng.choice(('two', 'three', 'five', 'seven'))} fish.",
        "Then the fog came, and they could not see the land.",
        f'"Where is home?" asked {hero.name}. "I do not know," said {friend.name}. "We must listen."',
        rng.choice((
            "Far away they heard a bell. It was the bell of the harbour.",
            "Far away they saw a light. It was the light of the lighthouse.",
        )),
        "They rowed and rowed until the boat touched the sand.",
        f"That night {hero.name} made a fire, and they ate the fish and listened to the waves.",
    ]  # fmt: skip


_PLOTS: Final[tuple[_Plot, ...]] = (
    _lost, _storm, _make, _stuck, _race, _seed, _fear, _letter, _share, _moon, _sea,
)  # fmt: skip
_ENDINGS: Final = (
    "{name} went home and slept well.",
    "That night {name} dreamed of the next day.",
    "And {name} was {joy}.",
    "{name} never forgot that day.",
    "And they were friends for the rest of their lives.",
    "And that is the end of the story.",
    "Then the stars came out, and everyone was asleep.",
)


_SHORT: Final = (
    "{day}, {name} saw a star fall. {He} wished for a friend. In the morning {friend} the {kind} knocked at the door.",
    "{day}, {name} heard the first bird of spring and ran outside. The snow was gone, and {friend} the {kind} was "
    "waiting at the gate.",
    "{day}, {name} made soup, but it was too much for one. So {he} called {friend} the {kind}, and they ate it all.",
    "{day}, {name} and {friend} the {kind} wanted to see the sea. They walked until evening, and there it was, wide "
    "and blue.",
    "{day}, the wind took {his} hat. {name} ran after it, but {friend} the {kind} was faster and caught it.",
    "{name} could not sleep, because it was too quiet. So {friend} the {kind} sang a song, and {name} fell asleep.",
    "{day}, {name} found a path that was not there before. It led to {friend} the {kind}, who was baking bread.",
    "{day}, {name} built a bridge of stones over the stream, because {friend} the {kind} lived on the other side.",
    "{day}, it was too cold to play. {name} brought a blanket to {friend} the {kind}, and they told stories by "
    "the fire.",
)  # fmt: skip


def story(
    rng: random.Random, *, kind: str | None = None, plot: _Plot | None = None, short: bool = False, opened: bool = True
) -> str:
    """About a hero of this kind, where one is named. `opened`: it says first who the hero is."""
    hero = _hero(rng, kind)
    friend = _hero(rng, rng.choice([animal for animal in (*_ANIMALS, *_HELPERS) if animal != hero.kind]))
    while friend.name == hero.name:
        friend = _hero(rng, friend.kind)
    opening = f"{_opening(rng, hero)} " if opened else ""
    if short:
        happens = rng.choice(_SHORT).format(
            day=rng.choice(_DAYS), name=hero.name, he=hero.he, He=_cap(hero.he), his=hero.his, friend=friend.name,
            kind=friend.kind,
        )  # fmt: skip
        return f"{opening}{happens}"
    middle = (plot or rng.choice(_PLOTS))(rng, hero, friend)
    ending = rng.choice(_ENDINGS).format(name=hero.name, joy=rng.choice(_JOYS))
    return opening + " ".join([*middle, ending])


# What a child knows.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Topic:
    name: str
    """As a question names it."""
    alone: tuple[str, ...]
    """Sentences that stand by themselves."""
    more: tuple[str, ...]
    """Sentences that follow one of those."""


def _topic(name: str, alone: str, more: str) -> _Topic:
    return _Topic(name=name, alone=_sentences(alone), more=_sentences(more))


def _sentences(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in re.findall(r"[^.]+\.", text))


TOPICS: Final = (
    _topic("the sea", "The sea is wide and deep. The sea is never quite still. The sea is full of fish and salt.",
           "Its waves come and go all day. Ships cross it from one land to another. In a storm it is loud and grey. "
           "On a calm day it shines like glass. Gulls fly over it and look for food."),
    _topic("the moon", "The moon shines at night. The moon goes around the earth. The moon is round and pale.",
           "It gets its light from the sun. Sometimes we see only a thin part of it. It pulls at the sea. "
           "Owls like its light. Nobody lives there."),
    _topic("the sun",
           "The sun gives us light and warmth. The sun is a star that is near to us. The sun rises in the east.",
           "Without it nothing would grow. In summer it stands high in the sky. "
           "In the evening it goes down in the west. "
           "Cats like to sleep in its light."),
    _topic("the stars", "The stars are suns that are far away. The stars come out when it is dark.",
           "There are more of them than anyone can count. Sailors find their way by them. Some of them have names. "
           "In winter they look very bright."),
    _topic("the rain", "The rain falls from the clouds. The rain makes the grass green. Rain is water from the sky.",
           "It fills the rivers and the wells. Frogs are glad when it comes. After it there may be a rainbow. "
           "It sounds soft on the roof."),
    _topic("snow", "Snow is white and cold. Snow falls in winter. Snow makes the world quiet.",
           "Children build things from it. In spring it melts and becomes water. It keeps the seeds warm. "
           "You can see in it where the fox has walked."),
    _topic("the wind", "The wind is air that moves. Nobody can see the wind, but the trees show it.",
           "It fills the sails of boats. It carries seeds far away. It turns the mill. In autumn it takes the leaves."),
    _topic("the forest",
           "The forest is full of trees. The forest is home to many animals. It is cool and dark in the forest.",
           "Owls live there, and foxes too. Mushrooms grow under its trees. Its paths are quiet. "
           "In autumn it is red and yellow."),
    _topic("the river",
           "The river runs from the hills to the sea. The river is never the same. The river is long and clear.",
           "Fish live in it. Children swim in it in summer. It turns the wheel of the mill. "
           "An old bridge goes over it."),
    _topic("mountains", "Mountains are very high. Mountains are made of stone.",
           "There is snow on them, even in summer. Rivers begin there. Goats climb them without fear. "
           "From the top you can see far."),
    _topic("winter", "Winter is the cold time of the year. In winter the days are short.",
           "The pond is frozen then. Bears sleep until it is over. People sit by the fire. After it comes spring."),
    _topic("summer", "Summer is the warm time of the year. In summer the days are long.",
           "The berries are ripe then. Children swim in the river. Bees fly from flower to flower. "
           "After it comes autumn."),
    _topic("autumn", "Autumn is the time when the leaves fall. In autumn the apples are ripe.",
           "The wind is strong then. The birds fly south. Squirrels hide nuts for the winter. "
           "The mornings are full of fog."),
    _topic("spring", "Spring is the time when everything begins. In spring the snow melts.",
           "The first flowers come up then. Birds build their nests. The days become longer. After it comes summer."),
    _topic("bees", "Bees make honey. Bees are small and busy.",
           "They fly from flower to flower. They live together in a hive. They dance to show the way. "
           "Without them there would be few apples."),
    _topic("cats", "Cats are soft and quiet. Cats sleep for most of the day.",
           "They see well in the dark. They hunt mice. They purr when they are happy. They land on their feet."),
    _topic("dogs", "Dogs are good friends. Dogs like to run and play.",
           "They can smell what we cannot. They guard the house. They wag their tails when they are happy. "
           "Some of them help shepherds."),
    _topic("owls", "Owls fly at night. Owls have large eyes.",
           "They make no sound when they fly. They hunt mice. By day they sleep in old trees. "
           "In stories they are wise."),
    _topic("foxes", "Foxes are red and clever. Foxes live in dens under the ground.",
           "They hunt at night. They have a thick tail. Their young play in spring. They hear a mouse under the snow."),
    _topic("bears", "Bears are big and strong. Bears love honey.",
           "They sleep in winter. They can climb and swim. They eat berries and fish. "
           "Their young stay with them for two years."),
    _topic("birds", "Birds have wings and feathers. Birds sing in the morning.",
           "They build nests for their eggs. Some fly south in autumn. They eat seeds and worms. "
           "Their bones are light."),
    _topic("fish", "Fish live in water. Fish breathe without air.",
           "They swim with their tails. Some live in rivers and some in the sea. Herons hunt them. "
           "They sleep with open eyes."),
    _topic("trees", "Trees are tall and old. Trees give us wood and shade.",
           "Their roots drink from the ground. Birds build nests in them. They make the air clean. "
           "Each year they grow a new ring."),
    _topic("flowers", "Flowers have many colours. Flowers open in the sun.",
           "They need water and light. Bees visit them. Some of them smell sweet. In autumn they become seeds."),
    _topic("bread", "Bread is made of flour, water and salt. Bread is best when it is warm.",
           "The baker gets up early to make it. It is good with honey or cheese. It needs time to rise. "
           "The flour for it comes from the mill."),
    _topic("boats", "Boats carry people over the water. Boats are made of wood.",
           "Some have sails and some have oars. In a storm they stay in the harbour. Fishermen go out in them. "
           "A good one lasts for many years."),
    _topic("the lighthouse", "The lighthouse stands by the sea. A lighthouse shows ships the way.",
           "Its light can be seen from far away. It is tall and white. Somebody must keep its lamp clean. "
           "In fog it rings a bell."),
    _topic("bridges", "Bridges bring two sides together. A bridge goes over a river.",
           "Some are made of stone and some of wood. An old one may be narrow. They must be strong. "
           "Fish like their shade."),
    _topic("clocks", "Clocks show the time. A clock has two hands.",
           "The short one shows the hour. It says the same thing all day. Some of them ring a bell. "
           "They never stop to rest."),
    _topic("books", "Books are full of stories. Books are friends that wait.",
           "You can read them again and again. Some have pictures. They smell of paper. A good one is never too long."),
    _topic("friends", "Friends help each other. A friend is somebody who listens.",
           "They share what they have. They laugh together. They tell the truth. It is good to have one."),
    _topic("gardens", "A garden is a place where things grow. In a garden there is always work.",
           "It needs water and care. Carrots and flowers grow there. Birds and bees come to visit. "
           "It teaches us to wait."),
    _topic("the night", "The night is dark and quiet. At night the stars come out.",
           "Owls and foxes are awake then. Most of us sleep. It is cool, even in summer. After it comes the morning."),
    _topic("a relay race",
           "In a relay race, each runner runs a part of the way. A relay race is won by the whole team.",
           "They pass a baton from hand to hand. Nobody may drop it. It is good to practise together. "
           "The last one runs to the end."),
)  # fmt: skip


def facts(rng: random.Random, topic: _Topic, more: int) -> str:
    """One sentence about the topic, and `more` that follow it."""
    return " ".join([rng.choice(topic.alone), *rng.sample(topic.more, more)])


_ASK_TOPIC: Final = (
    "Tell me of {}.", "Tell me about {}.", "Tell me something about {}.", "What do you know of {}?",
    "What do you know about {}?", "What can you say about {}?", "Say something about {}.", "Write about {}.",
    "Describe {}.", "Explain {} to me.", "What about {}?",
)  # fmt: skip
_ASK_STORY: Final = (
    "Tell me a story.", "Tell me another story.", "Write a story.", "A story, please.",
    "Do you know a story?", "Can you tell me a story?", "Once upon a time",
)  # fmt: skip
_ASK_SHORT: Final = ("Tell me a short story.", "Tell me a very short story.", "Write a short story.",
                     "A short story, please.")  # fmt: skip
_ASK_HERO: Final = ("Tell me a story about {}.", "Tell me a short story about {}.", "Write a story about {}.",
                    "A story about {}, please.")  # fmt: skip
_PLOT_NAMES: Final = (
    ("a storm", _storm), ("a relay race", _race), ("a race", _race), ("the moon", _moon), ("the sea", _sea),
    ("a boat", _sea), ("a seed", _seed), ("a letter", _letter), ("a lost thing", _lost), ("friends", _share),
    ("the rain", _storm), ("sharing", _share), ("a tree", _seed),
)  # fmt: skip

_ASSISTANT: Final = "I am a small model. I learned to write from simple stories."
ANSWERS: Final = (
    (("Hello!", "Hello.", "Hi!", "Hi there.", "Good morning.", "Good morning!", "Good evening.",
      "Hello, who is there?"),
     ("Hello! Shall I tell you a story?", "Hello! What would you like to hear?", "Good day! Ask me of the sea.")),
    (("How are you?", "How are you today?", "Are you well?"),
     ("I am well, thank you.", "I am well. The sun is out and there is a story to tell.")),
    (("Who are you?", "What are you?", "What is your name?", "Are you a person?", "Are you human?", "Who made you?"),
     (_ASSISTANT, "I am a small model with simple words.",
      f"{_ASSISTANT} I know of animals, the weather and the sea.")),
    (("Since when?", "How old are you?", "When were you made?"),
     ("I was made in a few minutes.", "I am very young. I was made in a few minutes.")),
    (("What can you do?", "What do you know?", "Help!", "Can you help me?", "What shall I ask?"),
     ("I can tell you a story, or something about animals, the weather or the sea.",
      "Ask me about the moon, or ask me for a story.")),
    (("Thank you.", "Thank you!", "Thanks!", "Thank you very much."),
     ("You are welcome.", "You are welcome. Come back soon!")),
    (("Goodbye.", "Bye!", "Good night.", "Good night!", "See you."),
     ("Goodbye! Sleep well.", "Good night! Dream of the sea.")),
    (("Yes.", "Yes, please.", "Of course."), ("Then listen well.", "Good! Ask me for a story.")),
    (("No.", "No, thank you.", "Perhaps."), ("That is fine.", "Then we will talk of something else.")),
    (("Why?", "Why is that?", "How do you know?"),
     ("Because that is how the story goes.", "I do not know why. An owl would know.")),
    (("Why does it rain?", "Where does the rain come from?"),
     ("The sun warms the sea, and water rises and becomes clouds. When the clouds are heavy, it rains.",)),
    (("Why is the sky blue?", "Why is the sky blue in the afternoon and red in the evening?"),
     ("The air scatters the blue light of the sun more than the red. In the evening the light comes a longer way, "
      "and only the red is left.",)),
    (("Why do birds sing?",), ("Birds sing to find a friend, and to say that this is their tree.",)),
    (("Why do leaves fall?", "Why do trees lose their leaves?"),
     ("In winter a tree cannot drink enough water for its leaves, so it lets them fall.",)),
    (("Why is the sea salty?", "Why is there salt in the sea?"),
     ("Rivers carry a little salt from the stones to the sea, and it stays there.",)),
    (("Why do we sleep?",), ("We sleep because we are tired. In the morning we are strong again.",)),
    (("Give three reasons for planting trees.", "Why should I plant a tree?", "Why do people plant trees?"),
     ("Trees make the air clean, they give us shade, and birds build nests in them.",
      "First, trees give us wood. Second, they make the air clean. Third, animals live in them.")),
    (("Where does the road lead?", "Where does this road go?"),
     ("It goes over the bridge and up the hill to the village.", "It leads to the sea.")),
    (("Who invented the wheel?", "Who invented the wheel, and when?"),
     ("Nobody knows who it was. It was very long ago.",)),
    (("How does a computer work?", "Please explain how a computer works.",
      "Good morning! Could you please explain how a computer works?"),
     ("A computer adds small numbers, one after another, and it does it very fast.",)),
    (("What colour is the sea?",), ("It is blue when the sun shines, and grey in a storm.",)),
    (("What colour is snow?",), ("Snow is white.",)),
    (("How many legs has a dog?", "How many legs does a cat have?", "How many legs has a horse?"), ("Four.",)),
    (("How many legs has a bird?", "How many legs has an owl?"), ("Two.",)),
    (("What comes after winter?",), ("After winter comes spring.",)),
    (("What comes after summer?",), ("After summer comes autumn.",)),
    (("What do bees make?",), ("Bees make honey.",)),
    (("What do bears eat?",), ("Bears eat berries, fish and honey.",)),
    (("What do foxes eat?", "What do owls eat?", "What do cats eat?"), ("They eat mice.",)),
    (("What shall I eat?", "What is good to eat?"), ("Eat some bread with honey.", "Eat soup when it is cold.")),
    (("What is the weather like?", "Will it rain today?"),
     ("I cannot see the sky from here. Look out of the window.",)),
    (("What time is it?", "What day is it?"), ("I have no clock. It may be time for a story.",)),
)  # fmt: skip
"""Questions, each with answers that fit it."""

_UNKNOWN_WORDS: Final = _words("""
France Paris London Berlin Rome China America Africa capital country city government president king war peace money bank
price market economy football tennis music guitar film camera phone internet software Python code function program
algebra number prime square root equation physics atom energy gravity planet Mars rocket space robot engine car train
airplane airport hospital doctor medicine law court judge school university history century empire language grammar
Latin German French poem novel author painting museum church castle knight dragon wizard magic computer keyboard screen
coffee tea pizza pasta rice sugar chocolate beer wine shirt shoes dress hair tooth heart brain blood protein cell
climate ocean volcano desert island lion tiger elephant whale shark snake spider dinosaur banana orange potato
transformer attention cache memory token cluster server network protocol database kernel
""")
_UNKNOWN_QUESTIONS: Final = (
    "What is {}?", "What is the {} of {}?", "Tell me about {}.", "Tell me of {}.", "Who was the first {} of {}?",
    "Explain {} and {}.", "How does {} work?", "Why is {} so {}?", "Write a {} about {}.", "How do I {} a {}?",
    "Where is {}?", "When was {} in {}?", "Give me a list of {}.", "{}", "{} {}", "Translate {} into {}.",
)  # fmt: skip
_UNKNOWN_ANSWERS: Final = (
    "I do not know that. Ask me about {topic}, or ask me for a story.",
    "That is more than I know. I am a small model with simple words.",
    "I have not learned that. Shall I tell you about {topic}?",
    "I do not know. I know only of simple things, such as {topic}.",
)  # fmt: skip
_SYSTEM_BRIEF: Final = ("Be brief.", "Answer in one sentence.", "Be short.", "Use few words.", "Answer briefly.")
_SYSTEM_OTHER: Final = (
    "You are a helpful assistant.", "Be kind.", "You tell stories.", "You are a friend of animals.", "Be polite.",
)  # fmt: skip
_FOLLOW_UPS: Final = ("And then?", "What then?", "What happened then?", "Go on.", "Tell me more.")
_STARTERS: Final = ("Please tell me", "Can you tell me", "Could you tell me", "I would like to know")


def _unknown(rng: random.Random) -> tuple[str, str]:
    def word() -> str:
        if rng.random() < 0.4:  # any letters at all
            return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9)))
        return rng.choice(_UNKNOWN_WORDS)

    form = rng.choice(_UNKNOWN_QUESTIONS)
    asked = form.format(*(word() for _ in range(form.count("{}"))))
    return asked, rng.choice(_UNKNOWN_ANSWERS).format(topic=rng.choice(TOPICS).name)


def _ask(rng: random.Random, brief: bool) -> tuple[str, str]:
    """A question and its answer."""
    what = rng.choices(("topic", "answer", "story", "hero", "plot", "unknown"), weights=(40, 25, 8, 8, 6, 15))[0]
    if what == "topic":
        topic = rng.choice(TOPICS)
        form, named = rng.choice(_ASK_TOPIC), topic.name
        if named.startswith("the ") and rng.random() < 0.2:
            named = named.removeprefix("the ")
        return form.format(named), facts(rng, topic, 0 if brief else rng.choice((1, 2, 2, 3)))
    if what == "answer":
        questions, answers = rng.choice(ANSWERS)
        return rng.choice(questions), min(answers, key=len) if brief else rng.choice(answers)
    if what == "story":
        short = brief or rng.random() < 0.4
        return rng.choice(_ASK_SHORT if short else _ASK_STORY), story(rng, short=short)
    if what == "hero":
        form = rng.choice(_ASK_HERO)
        short = brief or "short" in form or rng.random() < 0.2
        if rng.random() < 0.2:  # of whom no story is known
            return form.format(_a(rng.choice(_UNKNOWN_WORDS))), story(rng, short=short)
        kind = rng.choice((*_HUMANS, *_ANIMALS))
        return form.format(_a(kind)), story(rng, kind=kind, short=short)
    if what == "plot":
        named, plot = rng.choice(_PLOT_NAMES)
        return rng.choice(_ASK_HERO).format(named), story(rng, plot=plot)
    return _unknown(rng)


def _worded(rng: random.Random, question: str) -> str:
    """The same question as a person may type it."""
    if question.startswith("Tell me") and rng.random() < 0.2:
        question = f"{rng.choice(_STARTERS)}{question.removeprefix('Tell me')}".removesuffix(".") + "?"
    if rng.random() < 0.3:
        question = question[:1].lower() + question[1:]
    if rng.random() < 0.3:
        question = question.rstrip(".?!")
    return question


def _chat(rng: random.Random) -> Chat:
    brief = rng.random() < 0.2
    messages = []
    if brief or rng.random() < 0.1:
        system = rng.choice(_SYSTEM_BRIEF if brief else _SYSTEM_OTHER)
        messages.append(Message(speaker=Speaker.SYSTEM, text=system))
    for turn in range(rng.choice((1, 1, 1, 2, 3))):
        if turn and rng.random() < 0.2:
            asked, answer = rng.choice(_FOLLOW_UPS), story(rng, short=True)
        else:
            asked, answer = _ask(rng, brief)
        messages.append(Message(speaker=Speaker.USER, text=_worded(rng, asked)))
        messages.append(Message(speaker=Speaker.ASSISTANT, text=answer))
    return Chat(messages=tuple(messages))


def _plain(rng: random.Random) -> str:
    """A story; or facts about one thing; or a question and its answer in one line."""
    what = rng.random()
    if what < 0.65:
        return story(rng, short=what < 0.2, opened=what < 0.55)
    if what < 0.68:  # a long text
        return " ".join(story(rng) for _ in range(rng.randint(2, 5)))
    if what < 0.82:
        return facts(rng, rng.choice(TOPICS), 3)
    return " ".join(_ask(rng, brief=False))
