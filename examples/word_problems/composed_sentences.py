"""The sentences about things in composed templates (templates_composed.py).

`[one|another]` is one of the texts, drawn for each template. `<name>` is a word of that list in WORDS. Words in braces
are drawn once per template, as `{things}` and `{who}`, or once per sentence, as `{boxes}` and `{people}`. The numbers of a
sentence are `{a}` and `{b}`.
"""

from typing import NamedTuple

from composed_words import THINGS


class Sentence(NamedTuple):
    """A sentence, and the new expression of the quantity: `S` is the former one."""

    text: str
    expression: str
    a: range = range(0)  # values of {a}
    b: range = range(0)


class Grammar(NamedTuple):
    family: str
    things: tuple[str, ...]
    starts: tuple[Sentence, ...]
    changes: tuple[Sentence, ...]
    questions: tuple[Sentence, ...]


MANY, FEW, SMALL, MORE, LESS = range(20, 121), range(3, 13), range(2, 10), range(3, 50), range(3, 40)
EACH, PRICE, GOAL = range(4, 26), range(2, 15), range(150, 401)

THINGS_GRAMMAR = Grammar(
    "things",
    THINGS,
    (
        Sentence("{Who} [has|owns|possesses|keeps|starts with] {a} {things}.", "a", MANY),
        Sentence("There are {a} {things} in a {box}.", "a", MANY),
        Sentence("A <place> [owns|has|stores|keeps|offers] {a} {things}.", "a", MANY),
        Sentence("[Yesterday|Today|Last week|On Monday|At first] {who} <gained> {a} {things}.", "a", MANY),
        Sentence("{a} {things} are [on a table|in a hall|in a garage|on a truck|at home|in a cellar].", "a", MANY),
        Sentence(
            "{Who} [buys|carries|orders|fills|opens|moves] {a} {boxes} with {b} {things} each.", "a * b", FEW, EACH
        ),
        Sentence("{Who} [buys|carries|orders|fills|opens|moves] {a} {boxes} of {b} {things}.", "a * b", FEW, EACH),
        Sentence("There are {a} {boxes}, [each with|each holding|and each has] {b} {things}.", "a * b", FEW, EACH),
        Sentence("{a} {boxes} [hold|contain] {b} {things} [each|apiece].", "a * b", FEW, EACH),
        Sentence(
            "{b} {things} [fit into|are in] [one|every|each] {box}, and there are {a} {boxes}.", "a * b", FEW, EACH
        ),
        Sentence("Each of {a} {people} [has|brings|makes|gets|buys|owns] {b} {things}.", "a * b", FEW, EACH),
        Sentence("{Who} [makes|sells|collects|paints|plants] {b} {things} <perday> for {a} days.", "a * b", FEW, EACH),
        Sentence(
            "In {a} [hours|weeks|months], {who} [makes|finds|gets] {b} {things} per [hour|week|month].",
            "a * b",
            FEW,
            EACH,
        ),
        Sentence(
            "{Who} <gains> {a} [red|big|old|cheap|round] {things} and {b} [blue|small|new|costly|square] {things}.",
            "a + b",
            MANY,
            MORE,
        ),
        Sentence("{Who} <gains> {a} {things} on Monday and {b} {things} on Friday.", "a + b", MANY, MORE),
        Sentence(
            "{name} has {a} {things} and {other} has {b} {things}, and they put them together.", "a + b", MANY, MORE
        ),
        Sentence(
            "{a} {things} are <shared> <equally> [among|between] {b} {people}, and {name} takes one part.",
            "a // b",
            MANY,
            SMALL,
        ),
        Sentence("From {a} {things}, {b} <lost>, and the rest [is kept|remains].", "a - b", range(60, 160), LESS),
    ),
    (
        Sentence("<then> {who} <gains> {a} more.", "S + a", MORE),
        Sentence("<then> {who} <gains> {a} [other|extra|further|additional|new] {things}.", "S + a", MORE),
        Sentence("<then> {a} [more|new|further|extra|other] {things} <arrive>.", "S + a", MORE),
        Sentence("Another {a} {things} <arrive>.", "S + a", MORE),
        Sentence("{other} [gives|hands|sends|brings] {who} {a} {things}.", "S + a", MORE),
        Sentence("{a} {things} are [already there|in the cellar|added|lying around] as well.", "S + a", MORE),
        Sentence("<then> {a} {people} <bring> {b} {things} [each|apiece].", "S + a * b", SMALL, FEW),
        Sentence(
            "<then> {a} {boxes} [of|with] {b} {things} [arrive|are bought|are delivered|are added].",
            "S + a * b",
            SMALL,
            EACH,
        ),
        Sentence("<then> {who} <loses> {a} of them.", "S - a", LESS),
        Sentence("{Who} <loses> {a} {things}.", "S - a", LESS),
        Sentence("<sadly> {a} of the {things} <lost>.", "S - a", LESS),
        Sentence("<sadly>, {a} {things} <lost>.", "S - a", LESS),
        Sentence("{other} <takes> {a} of [them|these|the {things}].", "S - a", LESS),
        Sentence("But {a} [of them|of these|{things}] <lost>.", "S - a", LESS),
        Sentence("<then> {a} {people} <take> {b} {things} [each|apiece|per head].", "S - a * b", SMALL, SMALL),
        Sentence(
            "For {a} days, {b} {things} are [used|sold|needed|taken|consumed] <perday>.", "S - a * b", SMALL, SMALL
        ),
        Sentence(
            "{other} has {a} times as many {things}, and {who} [gets|takes over] all of those instead.",
            "S * a",
            range(2, 7),
        ),
    ),
    (
        Sentence(
            "How many {things} [are there now|are left|remain|are there in the end|does {who} have now]?", "S", range(0)
        ),
        Sentence("How many {things} [is that|are there|are that] <total>?", "S"),
        Sentence("<find> the [number|final number|total number] of {things}.", "S"),
        Sentence(
            "[All of them|All {things}|They] are <packed> into {boxes} [of {a}|with {a} in each|of {a} each]. "
            "How many {boxes} [are needed|are there|are used|are filled]?",
            "S // a",
            FEW,
        ),
        Sentence(
            "{a} {people} <share> [them|all {things}|everything] <equally>. How many {things} does [each|every] "
            "{person} [get|receive]?",
            "S // a",
            SMALL,
        ),
        Sentence(
            "They are <shared> <equally> [among|between] {a} {people}. <find> the number of {things} [for "
            "each|per] {person}.",
            "S // a",
            SMALL,
        ),
        Sentence(
            "They are <packed> into {a} {boxes}, [equally many|the same number] in each. How many {things} are "
            "in [a|one|each] {box}?",
            "S // a",
            SMALL,
        ),
        Sentence(
            "If {a} {things} are [used|sold|needed] <perday>, [for|after] how many days [do they last|are all gone]?",
            "S // a",
            SMALL,
        ),
        Sentence(
            "[Making|Building|Decorating] one [wall|chain|garden|tower] takes {a} {things}. How many "
            "[walls|chains|gardens|towers] are possible?",
            "S // a",
            SMALL,
        ),
        Sentence("[Each|One|Every] {thing} costs {a} dollars. How many dollars do they cost <total>?", "S * a", PRICE),
        Sentence(
            "[Each|One|Every] {thing} [weighs {a} grams|has a weight of {a} grams]. How many grams do they weigh "
            "<total>?",
            "S * a",
            EACH,
        ),
        Sentence(
            "[Each|One|Every] {thing} is sold for {a} dollars. How many dollars [come in|does that bring|are earned]?",
            "S * a",
            PRICE,
        ),
        Sentence(
            "[Each|One|Every] {thing} [takes|needs] {a} minutes of work. How many minutes of work is that?",
            "S * a",
            SMALL,
        ),
        Sentence(
            "{Who} [wants|needs] {a} {things}. How many {things} are [missing|still missing|still needed]?",
            "a - S",
            GOAL,
        ),
    ),
)
