"""The sentences of composed templates (templates_composed.py)."""

from typing import NamedTuple


class Sentence(NamedTuple):
    """A sentence, and the new expression of the quantity: `S` is the former one."""

    text: str
    expression: str
    numbers: dict[str, range]


class Grammar(NamedTuple):
    family: str
    nouns: tuple[str, ...]  # for `{noun}`; the plural is the name of the first number, `{many}`
    starts: tuple[Sentence, ...]
    changes: tuple[Sentence, ...]
    questions: tuple[Sentence, ...]


_THINGS = Grammar(
    "things",
    ("ball", "book", "cup", "card", "coin", "button", "shell", "pear", "lemon", "pencil", "nut", "sticker"),
    (
        Sentence("{name} has {many} {noun}s.", "many", {"many": range(20, 121)}),
        Sentence(
            "{name} is {age} years old and owns {many} {noun}s.", "many", {"age": range(6, 60), "many": range(20, 121)}
        ),
        Sentence(
            "A chest contains {many} {noun}s and {toys} toys.", "many", {"many": range(20, 121), "toys": range(3, 30)}
        ),
        Sentence(
            "There are {boxes} boxes with {many} {noun}s each.",
            "boxes * many",
            {"boxes": range(3, 12), "many": range(6, 25)},
        ),
        Sentence(
            "{name} buys {packs} packs, and each pack contains {many} {noun}s.",
            "packs * many",
            {"packs": range(3, 12), "many": range(6, 25)},
        ),
        Sentence(
            "On each of {days} days {name} collects {many} {noun}s.",
            "days * many",
            {"days": range(3, 12), "many": range(6, 25)},
        ),
        Sentence(
            "{name} finds {many} {noun}s on Monday and {tuesday} {noun}s on Tuesday.",
            "many + tuesday",
            {"many": range(15, 70), "tuesday": range(15, 70)},
        ),
        Sentence(
            "{many} {noun}s are dealt equally to {players} players, and {name} is one of them.",
            "many // players",
            {"many": range(40, 201), "players": range(2, 9)},
        ),
        Sentence(
            "A club orders {many} {noun}s and gets {free} {noun}s for free.",
            "many + free",
            {"many": range(15, 90), "free": range(5, 40)},
        ),
    ),
    (
        Sentence("Then {more} more {noun}s arrive.", "S + more", {"more": range(5, 50)}),
        Sentence("{other} brings {brings} further {noun}s.", "S + brings", {"brings": range(5, 50)}),
        Sentence("Later {new} new ones are added.", "S + new", {"new": range(5, 50)}),
        Sentence(
            "In addition {name} gets {bags} bags of {bag} {noun}s.",
            "S + bags * bag",
            {"bags": range(2, 9), "bag": range(4, 15)},
        ),
        Sentence(
            "{friends} friends come, and each of them brings {gift} {noun}s.",
            "S + friends * gift",
            {"friends": range(2, 9), "gift": range(3, 12)},
        ),
        Sentence("Later {broken} of them break.", "S - broken", {"broken": range(3, 40)}),
        Sentence("Unfortunately {lost} {noun}s get lost.", "S - lost", {"lost": range(3, 40)}),
        Sentence("{name} sells {sold} of these.", "S - sold", {"sold": range(3, 40)}),
        Sentence("{other} borrows {borrows} {noun}s.", "S - borrows", {"borrows": range(3, 40)}),
        Sentence("A thief steals {stolen} of the {noun}s.", "S - stolen", {"stolen": range(3, 40)}),
        Sentence(
            "After that {kids} kids take {takes} {noun}s each.",
            "S - kids * takes",
            {"kids": range(2, 9), "takes": range(2, 9)},
        ),
        Sentence("Soon the number is {times} times as large.", "S * times", {"times": range(2, 7)}),
    ),
    (
        Sentence("How many {noun}s are there in the end?", "S", {}),
        Sentence("How many {noun}s is that now?", "S", {}),
        Sentence("Find the final number of {noun}s.", "S", {}),
        Sentence(
            "Now all of them are put into bags, {inside} {noun}s into each bag. How many bags are needed?",
            "S // inside",
            {"inside": range(3, 13)},
        ),
        Sentence(
            "All {noun}s are divided equally by {children} children. How many {noun}s does every child receive?",
            "S // children",
            {"children": range(2, 10)},
        ),
        Sentence(
            "There are {shelves} shelves with the same number of {noun}s on each. How many {noun}s are on a shelf?",
            "S // shelves",
            {"shelves": range(2, 10)},
        ),
        Sentence(
            "If {daily} {noun}s are used daily, how many days do they last?", "S // daily", {"daily": range(2, 10)}
        ),
        Sentence(
            "The value of one {noun} is {price} dollars. How many dollars are all {noun}s worth?",
            "S * price",
            {"price": range(2, 13)},
        ),
        Sentence(
            "One {noun} has a weight of {grams} grams. How many grams do all {noun}s weigh?",
            "S * grams",
            {"grams": range(5, 31)},
        ),
        Sentence(
            "{name} needs {minutes} minutes to clean one {noun}. Find the number of minutes for all of them.",
            "S * minutes",
            {"minutes": range(2, 9)},
        ),
        Sentence("The goal is {goal} {noun}s. How many {noun}s are missing?", "goal - S", {"goal": range(150, 401)}),
    ),
)

_MONEY = Grammar(
    "money",
    ("dollar",),
    (
        Sentence("{name} has {many} dollars.", "many", {"many": range(40, 161)}),
        Sentence(
            "With a horse of {age} years {name} wins {many} dollars.",
            "many",
            {"age": range(3, 15), "many": range(40, 161)},
        ),
        Sentence(
            "{name} earns {many} dollars an hour and works for {hours} hours.",
            "many * hours",
            {"many": range(9, 31), "hours": range(3, 10)},
        ),
        Sentence(
            "For {weeks} weeks {name} saves {many} dollars every week.",
            "weeks * many",
            {"weeks": range(3, 15), "many": range(8, 31)},
        ),
        Sentence(
            "{name} sells {cakes} cakes at {many} dollars each.",
            "cakes * many",
            {"cakes": range(4, 21), "many": range(5, 21)},
        ),
        Sentence(
            "{name} and some friends, {team} people in all, win {many} dollars and divide them equally.",
            "many // team",
            {"many": range(60, 401), "team": range(2, 9)},
        ),
        Sentence(
            "{name} gets {many} dollars from {her} father and {mother} dollars from {her} mother.",
            "many + mother",
            {"many": range(15, 81), "mother": range(15, 81)},
        ),
    ),
    (
        Sentence("{She} pays a bill of {bill} dollars.", "S - bill", {"bill": range(5, 41)}),
        Sentence("A new coat costs {her} {coat} dollars.", "S - coat", {"coat": range(15, 60)}),
        Sentence("Sadly {she} loses {loses} dollars.", "S - loses", {"loses": range(3, 30)}),
        Sentence(
            "{She} buys {pens} pens, and a pen costs {pen} dollars.",
            "S - pens * pen",
            {"pens": range(2, 9), "pen": range(2, 6)},
        ),
        Sentence("An uncle gives {her} {uncle} dollars more.", "S + uncle", {"uncle": range(5, 60)}),
        Sentence("On the street {she} finds {finds} dollars.", "S + finds", {"finds": range(5, 30)}),
        Sentence(
            "Moreover, {customers} customers each leave a tip of {tip} dollars.",
            "S + customers * tip",
            {"customers": range(3, 13), "tip": range(2, 8)},
        ),
    ),
    (
        Sentence("How many dollars does {name} have now?", "S", {}),
        Sentence("Find the amount that {she} has in dollars.", "S", {}),
        Sentence(
            "All this money buys books that cost {book} dollars each. How many books does {name} buy?",
            "S // book",
            {"book": range(4, 16)},
        ),
        Sentence(
            "The money is divided equally by {people} people. How many dollars does each person get?",
            "S // people",
            {"people": range(2, 8)},
        ),
        Sentence(
            "This happens in each of {months} months. How many dollars is that in total?",
            "S * months",
            {"months": range(2, 13)},
        ),
        Sentence(
            "A dream trip costs {trip} dollars. How many dollars does {name} still need?",
            "trip - S",
            {"trip": range(200, 601)},
        ),
    ),
)

_TANK = Grammar(
    "measures",
    ("liter",),
    (
        Sentence("There are {many} liters of water in a tank.", "many", {"many": range(60, 301)}),
        Sentence(
            "A tank that is {years} years old contains {many} liters of oil.",
            "many",
            {"years": range(3, 40), "many": range(60, 301)},
        ),
        Sentence(
            "A truck brings {cans} cans of milk with {many} liters each.",
            "cans * many",
            {"cans": range(4, 16), "many": range(8, 31)},
        ),
        Sentence(
            "Into an empty pot go {many} liters of milk and {cream} liters of cream.",
            "many + cream",
            {"many": range(20, 81), "cream": range(5, 41)},
        ),
        Sentence(
            "Every minute {many} liters flow into an empty tank, and this goes on for {minutes} minutes.",
            "many * minutes",
            {"many": range(6, 31), "minutes": range(4, 21)},
        ),
    ),
    (
        Sentence("Rain adds {rain} liters.", "S + rain", {"rain": range(5, 60)}),
        Sentence("{name} pours in {pours} liters more.", "S + pours", {"pours": range(5, 60)}),
        Sentence("A cow drinks {drinks} liters of it.", "S - drinks", {"drinks": range(5, 40)}),
        Sentence("{name} takes out {out} liters.", "S - out", {"out": range(5, 40)}),
        Sentence(
            "Then {pumps} pumps each remove {removes} liters.",
            "S - pumps * removes",
            {"pumps": range(2, 6), "removes": range(4, 16)},
        ),
        Sentence(
            "{buckets} buckets with {bucket} liters each are emptied into it.",
            "S + buckets * bucket",
            {"buckets": range(2, 10), "bucket": range(5, 16)},
        ),
    ),
    (
        Sentence("How many liters is that in the end?", "S", {}),
        Sentence("Find the final number of liters.", "S", {}),
        Sentence(
            "All of it goes into bottles, and one bottle holds {bottle} liters. How many bottles are needed?",
            "S // bottle",
            {"bottle": range(2, 9)},
        ),
        Sentence(
            "It is divided equally by {farms} farms. How many liters does each farm receive?",
            "S // farms",
            {"farms": range(2, 9)},
        ),
        Sentence(
            "One liter costs {price} dollars. How many dollars are all liters worth?",
            "S * price",
            {"price": range(2, 8)},
        ),
        Sentence("The limit is {limit} liters. How many liters are missing?", "limit - S", {"limit": range(350, 801)}),
    ),
)

_TIME = Grammar(
    "time",
    ("minute",),
    (
        Sentence("A lesson lasts {many} minutes.", "many", {"many": range(30, 121, 10)}),
        Sentence(
            "{name} practices for {hours} hours and {many} minutes.",
            "hours * 60 + many",
            {"hours": range(2, 7), "many": range(10, 60, 10)},
        ),
        Sentence(
            "On {days} days {name} practices for {many} minutes.",
            "days * many",
            {"days": range(3, 13), "many": range(10, 60, 10)},
        ),
        Sentence(
            "For {weeks} whole weeks {name} practices {many} minutes a day.",
            "weeks * 7 * many",
            {"weeks": range(2, 6), "many": range(10, 60, 10)},
        ),
    ),
    (
        Sentence("Another {further} minutes follow.", "S + further", {"further": range(10, 60, 10)}),
        Sentence("Later {extra} hours are added.", "S + extra * 60", {"extra": range(2, 6)}),
        Sentence(
            "{songs} songs with a length of {song} minutes each come next.",
            "S + songs * song",
            {"songs": range(2, 9), "song": range(2, 8)},
        ),
        Sentence("In truth, {idle} minutes of this are idle.", "S - idle", {"idle": range(10, 30, 10)}),
    ),
    (
        Sentence("Find the total time in minutes.", "S", {}),
        Sentence("How many hours is that in total?", "S // 60", {}),
        Sentence(
            "The time is divided equally between {evenings} evenings. How many minutes does each evening get?",
            "S // evenings",
            {"evenings": range(2, 7)},
        ),
    ),
)

_LENGTH = Grammar(
    "length",
    ("meter",),
    (
        Sentence("A fence is {many} meters long.", "many", {"many": range(8, 41)}),
        Sentence(
            "A fence is {high} feet high and {many} meters long.", "many", {"high": range(3, 8), "many": range(8, 41)}
        ),
        Sentence(
            "A fence consists of {parts} parts with a length of {many} meters each.",
            "parts * many",
            {"parts": range(2, 9), "many": range(3, 8)},
        ),
    ),
    (
        Sentence("Then {longer} meters are built.", "S + longer", {"longer": range(3, 12)}),
        Sentence("A storm takes {gone} meters away.", "S - gone", {"gone": range(2, 8)}),
        Sentence(
            "{builders} builders add {adds} meters each.",
            "S + builders * adds",
            {"builders": range(2, 5), "adds": range(2, 5)},
        ),
    ),
    (
        Sentence("How many meters long is the fence now?", "S", {}),
        Sentence("Find its length in centimeters.", "S * 100", {}),
        Sentence(
            "To paint a meter takes {paint} minutes. How many minutes does the whole fence take?",
            "S * paint",
            {"paint": range(4, 21)},
        ),
        Sentence(
            "It is painted in {days} days, every day the same part. How many meters is that a day?",
            "S // days",
            {"days": range(2, 8)},
        ),
    ),
)

GRAMMARS = (_THINGS, _MONEY, _TANK, _TIME, _LENGTH)
WEIGHTS = (4, 2, 2, 1, 1)  # frequencies of the grammars
