"""The templates of the cold start's dialogues about prices and savings."""

from problem_templates import Template

TEMPLATES = (
    # Prices
    Template(
        "shopping",
        "How many dollars do {pens} pens cost if the price of one pen is {price} dollars?",
        "pens * price",
        {"pens": range(3, 31), "price": range(2, 10)},
    ),
    Template(
        "shopping",
        "If {pens} pens cost {dollars} dollars, how many dollars does one pen cost?",
        "dollars // pens",
        {"pens": range(3, 21), "price": range(2, 10), "dollars": "pens * price"},
    ),
    Template(
        "shopping",
        "Find the total cost in dollars of {shirts} shirts at a price of {price} dollars each and a belt at {belt} "
        "dollars.",
        "shirts * price + belt",
        {"shirts": range(2, 10), "price": range(10, 31), "belt": range(8, 41)},
    ),
    Template(
        "shopping",
        "{name} has {dollars} dollars. {She} buys bread for {bread} dollars and cheese for {cheese} dollars. How many "
        "dollars are left?",
        "dollars - bread - cheese",
        {"dollars": range(30, 81), "bread": range(3, 13), "cheese": range(4, 17)},
    ),
    Template(
        "shopping",
        "A jacket costs {jacket} dollars and a scarf costs {scarf} dollars. How many more dollars does the jacket "
        "cost than the scarf?",
        "jacket - scarf",
        {"jacket": range(50, 151), "scarf": range(8, 46)},
    ),
    Template(
        "shopping",
        "A jacket costs {jacket} dollars and a scarf costs {scarf} dollars. How many dollars do they cost together?",
        "jacket + scarf",
        {"jacket": range(50, 151), "scarf": range(8, 46)},
    ),
    Template(
        "shopping",
        "The price of a {item} falls by {falls} dollars from {price} dollars. Find the new price in dollars.",
        "price - falls",
        {"falls": range(5, 31), "price": range(40, 151)},
        {"item": ("radio", "phone", "sofa", "camera")},
    ),
    Template(
        "shopping",
        "The price of a {item} rises by {rises} dollars from {price} dollars. Find the new price in dollars.",
        "price + rises",
        {"rises": range(5, 31), "price": range(40, 151)},
        {"item": ("radio", "phone", "sofa", "camera")},
    ),
    Template(
        "shopping",
        "With a coupon for {coupon} dollars, {name} buys {pairs} pairs of shoes at a price of {price} dollars per "
        "pair. How many dollars does {she} pay?",
        "pairs * price - coupon",
        {"coupon": range(5, 31), "pairs": range(2, 7), "price": range(20, 71)},
    ),
    Template(
        "shopping",
        "The price of every candle is {price} dollars. {name} buys {monday} candles on Monday and {tuesday} candles "
        "on Tuesday. How many dollars do all candles cost?",
        "(monday + tuesday) * price",
        {"monday": range(2, 16), "tuesday": range(2, 16), "price": range(2, 10)},
    ),
    Template(
        "shopping",
        "{name}, who is {age} years old, buys {cups} cups and {spoons} spoons. Each piece has a price of {price} "
        "dollars. How many dollars does {she} pay?",
        "(cups + spoons) * price",
        {"age": range(18, 71), "cups": range(3, 13), "spoons": range(3, 13), "price": range(2, 10)},
    ),
    Template(
        "shopping",
        "A bag of coffee costs {coffee} dollars and a box of tea costs {tea} dollars. How many dollars more do {bags} "
        "bags cost than {boxes} boxes?",
        "bags * coffee - boxes * tea",
        {"coffee": range(12, 21), "tea": range(2, 6), "bags": range(4, 10), "boxes": range(2, 9)},
    ),
    Template(
        "shopping",
        "{adults} adults pay the full price of {full} dollars each, {children} children pay the low price of {low} "
        "dollars each, and a guide costs {guide} dollars. Find the total in dollars.",
        "adults * full + children * low + guide",
        {
            "adults": range(2, 10),
            "full": range(10, 26),
            "children": range(2, 13),
            "low": range(3, 10),
            "guide": range(20, 61),
        },
    ),
    Template(
        "shopping",
        "A zoo sells {tickets} tickets at a price of {price} dollars and {posters} posters at a cost of {cost} "
        "dollars, and it pays {food} dollars for food. How many dollars does the zoo keep?",
        "tickets * price + posters * cost - food",
        {
            "tickets": range(20, 61),
            "price": range(5, 16),
            "posters": range(4, 21),
            "cost": range(2, 10),
            "food": range(30, 91),
        },
    ),
    Template(
        "shopping",
        "A large pack of {pens} pens costs {large} dollars. A small pack of {brushes} brushes costs {small} dollars. "
        "How many more dollars does one pen cost than one brush?",
        "large // pens - small // brushes",
        {
            "pens": range(4, 13),
            "penprice": range(6, 13),
            "brushes": range(3, 10),
            "brushprice": range(2, 5),
            "large": "pens * penprice",
            "small": "brushes * brushprice",
        },
    ),
    # Money that grows or shrinks
    Template(
        "savings",
        "{name} saves {dollars} dollars every week. How many dollars does {she} save in {weeks} weeks?",
        "dollars * weeks",
        {"dollars": range(4, 41), "weeks": range(3, 21)},
    ),
    Template(
        "savings",
        "{name} saves {dollars} dollars every week. How many weeks does {she} need to reach a goal of {goal} dollars?",
        "goal // dollars",
        {"dollars": range(4, 41), "weeks": range(3, 21), "goal": "dollars * weeks"},
    ),
    Template(
        "savings",
        "{name} already owns {owns} dollars and saves {saves} dollars every week. How many dollars does {she} own "
        "after {weeks} weeks?",
        "owns + saves * weeks",
        {"owns": range(20, 151), "saves": range(4, 31), "weeks": range(3, 16)},
    ),
    Template(
        "savings",
        "How many dollars are on a card after {months} months if {start} dollars are there at the start and {paid} "
        "dollars are paid every month?",
        "start - paid * months",
        {"months": range(3, 13), "paid": range(4, 16), "rest": range(10, 91), "start": "paid * months + rest"},
    ),
    Template(
        "savings",
        "{name} wants a bike with a price of {price} dollars. {She} has saved {saved} dollars and gets {gift} dollars "
        "as a gift. How many dollars are missing?",
        "price - saved - gift",
        {"price": range(180, 401), "saved": range(50, 121), "gift": range(10, 51)},
    ),
    Template(
        "savings",
        "A purse holds {ten} ten-dollar notes and {five} five-dollar notes. How many dollars are in it?",
        "ten * 10 + five * 5",
        {"ten": range(2, 21), "five": range(2, 21)},
    ),
    Template(
        "savings",
        "{name} earned {monday} dollars on Monday and {friday} dollars on Friday. {She} gives half of the money to "
        "{other}. How many dollars does {other} get?",
        "(monday + friday) // 2",
        {"half": range(20, 61), "friday": range(5, 36), "monday": "2 * half - friday"},
    ),
)
