"""The sentences about money, times and other quantities in composed templates (templates_composed.py)."""

from composed_sentences import EACH, FEW, GOAL, LESS, MANY, MORE, PRICE, SMALL, THINGS_GRAMMAR, Grammar, Sentence

_MONEY = Grammar(
    "money",
    ("dollar",),
    (
        Sentence("{Who} has {a} dollars.", "a", MANY),
        Sentence("[There are|Someone finds] {a} dollars in a [purse|jar|drawer|wallet|safe].", "a", MANY),
        Sentence(
            "{Who} [earns|makes|gets|charges] {a} dollars [an|per] hour and works [for|] {b} hours.",
            "a * b",
            EACH,
            FEW,
        ),
        Sentence(
            "{Who} [saves|earns|collects|receives|sets aside] {a} dollars [a|per|every|each] week for {b} weeks.",
            "a * b",
            EACH,
            FEW,
        ),
        Sentence("{Who} sells {a} <thing>s [for|at] {b} dollars [each|apiece].", "a * b", FEW, EACH),
        Sentence("{Who} sells {a} <thing>s, and the price of [one|each] is {b} dollars.", "a * b", FEW, EACH),
        Sentence(
            "{Who} gets {a} dollars from [a friend|the bank|an uncle] and {b} dollars from [a cousin|the "
            "state|an aunt].",
            "a + b",
            MANY,
            MORE,
        ),
        Sentence(
            "{Who} [earns|wins|saves] {a} dollars in [May|spring|winter] and {b} dollars in [July|summer|autumn].",
            "a + b",
            MANY,
            MORE,
        ),
        Sentence(
            "{a} dollars are <shared> <equally> [among|between] {b} {people}, and {name} gets one part.",
            "a // b",
            range(60, 401),
            SMALL,
        ),
    ),
    (
        Sentence(
            "{Who} [pays|spends] {a} dollars [for|on] [a <thing>|rent|food|a ticket|lunch|clothes|a bus ride].",
            "S - a",
            LESS,
        ),
        Sentence("<then> {who} buys a <thing> for {a} dollars.", "S - a", LESS),
        Sentence("<sadly> {a} dollars [get lost|are stolen|fall into a river|go to taxes|are lost].", "S - a", LESS),
        Sentence("{Who} [gives|lends|pays|owes and pays] {other} {a} dollars.", "S - a", LESS),
        Sentence("{Who} buys {a} <thing>s [for|at] {b} dollars [each|apiece].", "S - a * b", SMALL, range(2, 7)),
        Sentence("{Who} buys {a} <thing>s, and [one|each] costs {b} dollars.", "S - a * b", SMALL, range(2, 7)),
        Sentence(
            "<then> {who} [finds|gets|receives|wins|earns] {a} [more dollars|dollars|dollars more].", "S + a", MORE
        ),
        Sentence("{other} [gives|pays|lends] {who} {a} dollars.", "S + a", MORE),
        Sentence("[A tip|A gift|A prize|A bonus] of {a} dollars is added.", "S + a", MORE),
        Sentence("{a} {people} [each give|each add|each pay] {b} dollars.", "S + a * b", FEW, SMALL),
    ),
    (
        Sentence(
            "How many dollars [are left|remain|does {who} have now|are there now|does {who} have in the end]?",
            "S",
        ),
        Sentence("<find> the [sum|amount|final amount] in dollars.", "S"),
        Sentence(
            "[All this money|The whole sum] is [spent on|used for] <thing>s that cost {a} dollars each. How many "
            "are bought?",
            "S // a",
            PRICE,
        ),
        Sentence(
            "{a} {people} <share> the money <equally>. How many dollars does each {person} [get|receive]?",
            "S // a",
            SMALL,
        ),
        Sentence(
            "The money is <shared> <equally> [among|between] {a} {people}. How many dollars [is one part|does "
            "each {person} get]?",
            "S // a",
            SMALL,
        ),
        Sentence(
            "[The same happens|This is repeated] in each of {a} [months|years|weeks]. How many dollars is that "
            "<total>?",
            "S * a",
            SMALL,
        ),
        Sentence(
            "[{a} {people} have|Each of {a} {people} has] this amount. How many dollars do they have <total>?",
            "S * a",
            SMALL,
        ),
        Sentence(
            "A [bike|trip|computer|boat|sofa] costs {a} dollars. How many dollars are [missing|still needed]?",
            "a - S",
            range(200, 601),
        ),
    ),
)
_LITERS = Grammar(
    "measures",
    ("liter", "kilogram", "meter", "kilometer", "page", "point"),
    (
        Sentence("{Who} [begins with|has|measures] {a} {things}.", "a", range(40, 251)),
        Sentence(
            "[The first part|One part|The start] [gives|has|takes] {a} {things} and [the second part|the "
            "rest|the end] {b} {things}.",
            "a + b",
            range(20, 101),
            MORE,
        ),
        Sentence(
            "[Each|Every] [hour|day|week|minute] brings {a} {things}, and this goes on for {b} "
            "[hours|days|weeks|minutes].",
            "a * b",
            EACH,
            FEW,
        ),
        Sentence(
            "{Who} [does|handles|gets|covers] {a} {things} [an hour|a day|per day|per minute] during {b} "
            "[hours|days|minutes].",
            "a * b",
            EACH,
            FEW,
        ),
        Sentence("There are {b} parts of {a} {things} each.", "a * b", EACH, FEW),
    ),
    (
        Sentence(
            "[Then|Later|Soon] [another {a} {things}|{a} more {things}|{a} extra {things}] are added.", "S + a", MORE
        ),
        Sentence("It [increases|grows|rises|goes up] by {a} {things}.", "S + a", MORE),
        Sentence("{other} adds {a} {things}.", "S + a", MORE),
        Sentence("It [decreases|shrinks|falls|goes down] by {a} {things}.", "S - a", LESS),
        Sentence(
            "<sadly> {a} {things} [are lost|are gone|are wasted|do not count|are used up|are taken off].",
            "S - a",
            LESS,
        ),
        Sentence("{other} [removes|takes away|cuts off|uses up] {a} {things}.", "S - a", LESS),
        Sentence("<then> {a} {people} [remove|take away|use up] {b} {things} each.", "S - a * b", SMALL, SMALL),
        Sentence("<then> {a} {people} add {b} {things} each.", "S + a * b", SMALL, FEW),
    ),
    (
        Sentence("How many {things} [is that|are there now|are left|remain|are there in the end]?", "S"),
        Sentence("<find> the [final|total] number of {things}.", "S"),
        Sentence(
            "This is <shared> into {a} equal parts. How many {things} are in each part?",
            "S // a",
            SMALL,
        ),
        Sentence(
            "[One portion|One step|A piece] has {a} {things}. How many [portions|steps|pieces] is that?",
            "S // a",
            SMALL,
        ),
        Sentence(
            "{a} {people} <share> this <equally>. How many {things} does each {person} [get|have]?", "S // a", SMALL
        ),
        Sentence("One {thing} costs {a} dollars. How many dollars is that <total>?", "S * a", SMALL),
        Sentence("The same [happens|is done] {a} times. How many {things} is that <total>?", "S * a", SMALL),
        Sentence(
            "The [goal|limit|maximum] is {a} {things}. How many {things} are [missing|still missing]?", "a - S", GOAL
        ),
    ),
)
_TENS = range(10, 60, 10)
_TIME = Grammar(
    "time",
    ("minute",),
    (
        Sentence("A [lesson|film|game|trip|show] [lasts|takes] {a} minutes.", "a", range(30, 121, 10)),
        Sentence(
            "{Who} [practices|works|reads|waits] for {a} hours and {b} minutes.", "a * 60 + b", range(2, 7), _TENS
        ),
        Sentence("On {a} days {who} [practices|works|reads|sings] for {b} minutes.", "a * b", FEW, _TENS),
        Sentence(
            "For {a} whole weeks {who} [practices|works|reads|sings] {b} minutes a day.",
            "a * 7 * b",
            range(2, 6),
            _TENS,
        ),
    ),
    (
        Sentence(
            "[Another {a} minutes follow|Then {a} minutes are added|It takes {a} minutes longer].", "S + a", _TENS
        ),
        Sentence("[Later|Then] {a} hours are added.", "S + a * 60", range(2, 6)),
        Sentence(
            "[But|In truth,] {a} minutes of this [are a break|are wasted|are skipped|do not count].",
            "S - a",
            range(10, 30, 10),
        ),
    ),
    (
        Sentence("<find> the total time in minutes.", "S"),
        Sentence("How many minutes is that <total>?", "S"),
        Sentence("How many hours is that <total>?", "S // 60"),
        Sentence(
            "The time is <shared> <equally> between {a} [evenings|people|parts]. How many minutes is each part?",
            "S // a",
            range(2, 7),
        ),
    ),
)
_LENGTH = Grammar(
    "length",
    ("meter",),
    (
        Sentence("A [fence|wall|road|hose|cable] [is {a} meters long|has a length of {a} meters].", "a", range(8, 41)),
        Sentence(
            "A [fence|wall|chain|train] [consists of|has] {a} parts with a length of {b} meters each.",
            "a * b",
            SMALL,
            range(3, 8),
        ),
    ),
    (
        Sentence("[Then|Later] {a} meters are [added|built on|attached].", "S + a", range(3, 12)),
        Sentence("[Then|Later] {a} meters are [cut off|torn down|removed].", "S - a", range(2, 8)),
    ),
    (
        Sentence("[How many meters long is it now|How many meters is that]?", "S"),
        Sentence("<find> its length in centimeters.", "S * 100"),
        Sentence("How many centimeters is that?", "S * 100"),
        Sentence(
            "It is [painted|checked|built] in {a} days, every day the same part. How many meters is that a day?",
            "S // a",
            range(2, 8),
        ),
    ),
)
GRAMMARS = (THINGS_GRAMMAR, _MONEY, _LITERS, _TIME, _LENGTH)
WEIGHTS = (6, 3, 2, 1, 1)  # frequencies of the grammars
ASIDES = (  # before a problem: a number that it does not need
    "It is {x} degrees [warm|cold] today.",
    "{name} is {x} years old.",
    "The [shop|school|house|town] is {x} [years old|kilometers away].",
    "[In room|At number|In line] {x} there is work to do.",
)
