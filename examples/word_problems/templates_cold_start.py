"""The templates of the cold start's dialogues. RL trains on them too, with other numbers."""

from problem_templates import Template

TEMPLATES = (
    Template(
        "shopping",
        "{name} buys {count} {item}s at the market. Each {item} costs {price} dollars. How many dollars does {name} "
        "spend?",
        "count * price",
        {"count": range(3, 16), "price": range(2, 20)},
        {"item": ("melon", "cheese", "plant", "hat", "basket")},
    ),
    Template(
        "library",
        "A library owns {books} books, and {lent} of them are out on loan. How many books are on the shelves?",
        "books - lent",
        {"books": range(120, 400), "lent": range(15, 95)},
    ),
    Template(
        "farming",
        "A farmer packs {eggs} eggs into boxes of {size}. How many boxes does that make?",
        "eggs // size",
        {"size": (4, 6, 8, 10, 12, 15), "boxes": range(4, 40), "eggs": "size * boxes"},
    ),
    Template(
        "work",
        "{name} earns {wage} dollars an hour and works {hours} hours. Afterwards a guest adds a tip of {tip} dollars. "
        "What is the total pay in dollars?",
        "wage * hours + tip",
        {"wage": range(9, 25), "hours": range(3, 10), "tip": range(4, 30)},
    ),
    Template(
        "savings",
        "There are {money} dollars in a jar, and {name} takes out {amount} dollars every day. How many dollars are in "
        "the jar after {days} days?",
        "money - amount * days",
        {"amount": range(2, 10), "days": range(3, 12), "rest": range(5, 60), "money": "amount * days + rest"},
    ),
    Template(
        "cooking",
        "One pot of soup needs {carrots} carrots and {onions} onions. How many vegetables go into {pots} pots?",
        "(carrots + onions) * pots",
        {"carrots": range(4, 13), "onions": range(2, 8), "pots": range(3, 13)},
    ),
    Template(
        "travel",
        "A bus leaves with {riders} passengers. At the next stop {on} people get on and {off} people get off. How "
        "many passengers are on the bus now?",
        "riders + on - off",
        {"riders": range(18, 45), "on": range(3, 16), "off": range(2, 14)},
    ),
    Template(
        "time",
        "{name} walks the dog for {minutes} minutes every day. How many hours of walking is that in {days} days?",
        "minutes * days // 60",
        {"minutes": (10, 20, 30, 40, 50), "days": range(6, 151, 6)},
    ),
    Template(
        "shopping",
        "Adult tickets cost {adult} dollars and child tickets cost {child} dollars. What do {adults} adult tickets "
        "and {children} child tickets cost together, in dollars?",
        "adult * adults + child * children",
        {"adult": range(8, 20), "child": range(3, 8), "adults": range(2, 6), "children": range(2, 9)},
    ),
    Template(
        "sharing",
        "{name} is {age} years old and divides {sweets} sweets equally among {friends} friends. How many sweets does "
        "each friend get?",
        "sweets // friends",
        {"age": range(8, 16), "friends": range(3, 10), "each": range(3, 15), "sweets": "friends * each"},
    ),
    Template(
        "measures",
        "A rope is {length} meters long. {name} cuts off {first} meters, and later {second} meters more. How many "
        "meters of rope remain?",
        "length - first - second",
        {"length": range(40, 100), "first": range(5, 20), "second": range(3, 16)},
    ),
    Template(
        "travel",
        "A train with {cars} cars travels at {speed} kilometers per hour. How many kilometers does it cover in "
        "{hours} hours?",
        "speed * hours",
        {"cars": range(4, 13), "speed": range(60, 160, 5), "hours": range(2, 9)},
    ),
    Template(
        "library",
        "{name} reads {pages} pages each evening for {days} evenings, then {extra} pages on Sunday morning. How many "
        "pages is that altogether?",
        "pages * days + extra",
        {"pages": range(8, 30), "days": range(3, 7), "extra": range(5, 40)},
    ),
    Template(
        "farming",
        "A greenhouse has {tables} tables. Each table carries {trays} trays with {plants} plants per tray. How many "
        "plants are in the greenhouse?",
        "tables * trays * plants",
        {"tables": range(3, 10), "trays": range(2, 8), "plants": range(4, 13)},
    ),
    Template(
        "work",
        "A bakery makes {loaves} loaves an hour and is open {hours} hours a day, seven days a week. How many loaves "
        "does it make in one week?",
        "loaves * hours * 7",
        {"loaves": range(8, 40), "hours": range(5, 12)},
    ),
    Template(
        "measures",
        "A tile is {side} centimeters wide. How many meters long is a row of {tiles} tiles?",
        "side * tiles // 100",
        {"side": range(5, 65, 5), "tiles": range(20, 301, 20)},
    ),
    Template(
        "shopping",
        "{name} pays for {count} {item}s with {cash} dollars in cash. One {item} costs {price} dollars. How many "
        "dollars of change are due?",
        "cash - count * price",
        {"cash": range(60, 121, 5), "count": range(2, 7), "price": range(2, 9)},
        {"item": ("notebook", "ball", "mug", "kite", "puzzle")},
    ),
    Template(
        "farming",
        "A trough contains {liters} liters of water. Then {cows} cows drink {each} liters each. How many liters stay "
        "in the trough?",
        "liters - cows * each",
        {"cows": range(3, 10), "each": range(5, 20), "rest": range(8, 70), "liters": "cows * each + rest"},
    ),
    Template(
        "travel",
        "A taxi ride costs {base} dollars plus {rate} dollars per kilometer. What is the price of a ride of "
        "{distance} kilometers, in dollars?",
        "base + rate * distance",
        {"base": range(3, 10), "rate": range(2, 5), "distance": range(4, 30)},
    ),
    Template(
        "school",
        "At a school with {classes} classes, {boys} of the {children} children are boys. How many are girls?",
        "children - boys",
        {"classes": range(8, 20), "boys": range(60, 160), "girls": range(60, 160), "children": "boys + girls"},
    ),
    Template(
        "sharing",
        "{name} collects stamps. {She} has {stamps} stamps, buys {bought} stamps and trades away {traded} stamps. How "
        "many stamps does {she} own at the end?",
        "stamps + bought - traded",
        {"stamps": range(40, 150), "bought": range(8, 40), "traded": range(5, 38)},
    ),
    Template(
        "sports",
        "Every morning {name} runs {run} kilometers and cycles {ride} kilometers. How many kilometers is that over "
        "{days} mornings?",
        "(run + ride) * days",
        {"run": range(2, 9), "ride": range(6, 20), "days": range(3, 20)},
    ),
    Template(
        "measures",
        "A box of pens weighs {pens} grams and a box of chalk weighs {chalk} grams. How many grams do {some} boxes of "
        "pens and {more} boxes of chalk weigh?",
        "pens * some + chalk * more",
        {"pens": range(120, 300, 10), "chalk": range(200, 450, 10), "some": range(2, 8), "more": range(2, 8)},
    ),
    Template(
        "crafts",
        "A ribbon with a width of {width} centimeters and a length of {length} centimeters is cut into pieces with a "
        "length of {piece} centimeters. How many pieces are there?",
        "length // piece",
        {"width": range(2, 6), "piece": range(6, 25), "pieces": range(5, 30), "length": "piece * pieces"},
    ),
)
