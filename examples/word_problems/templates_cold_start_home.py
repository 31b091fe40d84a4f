"""The templates of the cold start's dialogues about people, parties and meals.

Some differ from another one in a word that changes the operation.
"""

from problem_templates import Template

TEMPLATES = (
    # More or fewer, altogether or each
    Template(
        "sharing",
        "{name} has {stickers} stickers. {other} has {more} more stickers than {name}. How many stickers does {other} "
        "have?",
        "stickers + more",
        {"stickers": range(12, 61), "more": range(3, 31)},
    ),
    Template(
        "sharing",
        "{name} has {stickers} stickers. {other} has {fewer} fewer stickers than {name}. How many stickers does "
        "{other} have?",
        "stickers - fewer",
        {"stickers": range(35, 81), "fewer": range(3, 31)},
    ),
    Template(
        "sharing",
        "{name} has {stickers} stickers. {other} has {times} times as many stickers as {name}. How many stickers does "
        "{other} have?",
        "stickers * times",
        {"stickers": range(6, 41), "times": range(2, 9)},
    ),
    Template(
        "sharing",
        "{name} has {stickers} stickers. {other} has {more} more stickers than {name}. How many stickers do they have "
        "altogether?",
        "stickers + stickers + more",
        {"stickers": range(12, 61), "more": range(3, 31)},
    ),
    Template(
        "sharing",
        "{name} has {shells} shells and {other} has {times} times as many. How many shells do the two friends own "
        "together?",
        "shells + shells * times",
        {"shells": range(6, 41), "times": range(2, 8)},
    ),
    Template(
        "savings",
        "{other} saved {saved} dollars. That is {less} dollars less than {name} saved. How many dollars did {name} "
        "save?",
        "saved + less",
        {"saved": range(20, 91), "less": range(4, 31)},
    ),
    Template(
        "family",
        "{name} is {older} years older than {other}. The age of {other} is {age}. How many years old is {name}?",
        "age + older",
        {"older": range(2, 21), "age": range(5, 51)},
    ),
    Template(
        "family",
        "{name} is {younger} years younger than {other}. The age of {other} is {age}. How many years old is {name}?",
        "age - younger",
        {"younger": range(2, 19), "age": range(22, 71)},
    ),
    # Gives or gets
    Template(
        "games",
        "{name} has {marbles} marbles and gives {gives} marbles to {other}. How many marbles does {name} have now?",
        "marbles - gives",
        {"marbles": range(30, 91), "gives": range(4, 29)},
    ),
    Template(
        "games",
        "{name} has {marbles} marbles and gets {new} new marbles from {other}. How many marbles does {name} have now?",
        "marbles + new",
        {"marbles": range(15, 91), "new": range(4, 41)},
    ),
    Template(
        "games",
        "At first {name} has {cards} cards. {She} wins {wins} cards and then loses {loses} cards. How many cards does "
        "{she} have in the end?",
        "cards + wins - loses",
        {"cards": range(30, 81), "wins": range(5, 31), "loses": range(3, 29)},
    ),
    Template(
        "games",
        "At first {name} has {cards} cards. {She} loses {loses} cards and then gives {gives} cards to {other}. How "
        "many cards does {she} have in the end?",
        "cards - loses - gives",
        {"cards": range(60, 121), "loses": range(5, 29), "gives": range(3, 29)},
    ),
    Template(
        "games",
        "{name} lost {lost} coins in a game and has {left} coins left. How many coins did {she} have before the game?",
        "lost + left",
        {"lost": range(4, 41), "left": range(10, 71)},
    ),
    Template(
        "games",
        "A game for {players} players has {cards} cards. All cards are dealt equally to the players, and {name} then "
        "draws {extra} extra cards. How many cards are in the hand of {name}?",
        "cards // players + extra",
        {"players": range(2, 7), "hand": range(5, 16), "extra": range(2, 10), "cards": "players * hand"},
    ),
    # The guests and their plates
    Template(
        "party",
        "There are {tables} tables at a wedding, with {plates} plates on each table. How many plates are there?",
        "tables * plates",
        {"tables": range(4, 21), "plates": range(4, 13)},
    ),
    Template(
        "party",
        "There are {plates} plates at a wedding, shared equally by {tables} tables. How many plates are on each table?",
        "plates // tables",
        {"tables": range(4, 21), "each": range(4, 13), "plates": "tables * each"},
    ),
    Template(
        "party",
        "Set {tables} tables with {plates} plates each and keep {spare} spare plates. Find the total number of plates.",
        "tables * plates + spare",
        {"tables": range(4, 21), "plates": range(4, 13), "spare": range(5, 31)},
    ),
    Template(
        "party",
        "Each of {guests} guests eats {slices} slices of pizza. How many slices do the guests eat altogether?",
        "guests * slices",
        {"guests": range(5, 31), "slices": range(2, 7)},
    ),
    Template(
        "party",
        "Altogether {guests} guests eat {slices} slices of pizza. How many slices does each of them eat if all eat "
        "the same?",
        "slices // guests",
        {"guests": range(5, 31), "each": range(2, 7), "slices": "guests * each"},
    ),
    Template(
        "party",
        "{pizzas} pizzas are cut into {slices} slices each and shared equally among {guests} guests. How many slices "
        "does each guest get?",
        "pizzas * slices // guests",
        {
            "pizzas": range(3, 16),
            "twos": range(2, 5),
            "each": range(2, 5),
            "guests": "pizzas * twos",
            "slices": "twos * each",
        },
    ),
    Template(
        "party",
        "{name} turns {age} and invites {invites} people. {sick} of them are sick, and {other} brings {friends} "
        "friends. How many people come?",
        "invites - sick + friends",
        {"age": range(12, 20), "invites": range(20, 61), "sick": range(2, 13), "friends": range(2, 10)},
    ),
    # In the kitchen
    Template(
        "cooking",
        "A cake needs {eggs} eggs. How many eggs are needed for {cakes} cakes?",
        "eggs * cakes",
        {"eggs": range(2, 10), "cakes": range(3, 26)},
    ),
    Template(
        "cooking",
        "A cake needs {eggs} eggs. How many cakes can {name} bake if {she} has {total} eggs in total?",
        "total // eggs",
        {"eggs": range(2, 10), "cakes": range(3, 26), "total": "eggs * cakes"},
    ),
    Template(
        "cooking",
        "A stew cooks for {hours} hours and then rests for {minutes} minutes. How many minutes does that take in "
        "total?",
        "hours * 60 + minutes",
        {"hours": range(2, 9), "minutes": range(5, 56, 5)},
    ),
    Template(
        "cooking",
        "Of {cookies} cookies, {burnt} are burnt. {name} sells the good ones at a price of {price} dollars each. How "
        "many dollars does {she} get?",
        "(cookies - burnt) * price",
        {"cookies": range(25, 71), "burnt": range(3, 19), "price": range(2, 7)},
    ),
    Template(
        "cooking",
        "The recipe on page {page} takes {flour} grams of flour and {sugar} grams of sugar. How many grams is that "
        "together?",
        "flour + sugar",
        {"page": range(10, 91), "flour": range(200, 701, 10), "sugar": range(50, 301, 10)},
    ),
    Template(
        "cooking",
        "{name} cuts {pies} pies into {pieces} pieces each. Then {eaten} pieces are eaten and {sold} pieces are sold. "
        "Find the number of pieces that remain.",
        "pies * pieces - eaten - sold",
        {"pies": range(5, 13), "pieces": range(6, 13), "eaten": range(3, 15), "sold": range(3, 15)},
    ),
    Template(
        "cooking",
        "{name} sells {cakes} cakes at a price of {price} dollars each. {She} paid {flour} dollars for flour and "
        "{sugar} dollars for sugar. How many dollars has {she} gained?",
        "cakes * price - flour - sugar",
        {"cakes": range(5, 16), "price": range(8, 21), "flour": range(4, 19), "sugar": range(3, 16)},
    ),
    # Several steps
    Template(
        "crafts",
        "Each box contains {red} red, {blue} blue and {green} green crayons. How many crayons are in {boxes} boxes?",
        "(red + blue + green) * boxes",
        {"red": range(2, 13), "blue": range(2, 13), "green": range(2, 13), "boxes": range(3, 16)},
    ),
    Template(
        "cooking",
        "The first bag has {first} nuts, the second has {second} and the third has {third}. All nuts are put into "
        "{bowls} bowls in equal numbers. How many nuts are in one bowl?",
        "(first + second + third) // bowls",
        {
            "bowls": range(3, 7),
            "each": range(12, 26),
            "first": range(10, 17),
            "second": range(8, 18),
            "third": "bowls * each - first - second",
        },
    ),
)
