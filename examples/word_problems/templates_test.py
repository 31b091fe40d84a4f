"""The templates that no training sees. This file is frozen: templates_test.sha256 has its digest."""

from problem_templates import Template

TEMPLATES = (
    Template(
        "crafts",
        "{name} has {sheets} sheets of paper. {She} keeps {kept} of them for drawing and staples the others into "
        "booklets with {pages} sheets apiece. How many booklets come out?",
        "(sheets - kept) // pages",
        {"pages": range(4, 13), "booklets": range(5, 20), "kept": range(6, 40), "sheets": "pages * booklets + kept"},
    ),
    Template(
        "shopping",
        "A bicycle with {gears} gears costs {price} dollars. After a deposit of {deposit} dollars, the remaining sum "
        "is paid in {payments} equal monthly payments. How many dollars is one payment?",
        "(price - deposit) // payments",
        {
            "gears": range(6, 28),
            "payments": range(4, 13),
            "each": range(15, 60),
            "deposit": range(50, 150, 10),
            "price": "payments * each + deposit",
        },
    ),
    Template(
        "measures",
        "From a barrel with {liters} liters of juice, {leaked} liters leak away. The remaining juice exactly fills "
        "jugs of {jug} liters. How many jugs can be filled?",
        "(liters - leaked) // jug",
        {"jug": range(2, 7), "jugs": range(8, 30), "leaked": range(5, 25), "liters": "jug * jugs + leaked"},
    ),
    Template(
        "work",
        "During {weeks} weeks, {painters} painters finished {walls} walls in total, all at the same pace. How many "
        "walls did one painter finish per week?",
        "walls // painters // weeks",
        {"weeks": range(2, 7), "painters": range(2, 8), "pace": range(3, 12), "walls": "weeks * painters * pace"},
    ),
    Template(
        "farming",
        "A stable uses {hay} kilograms of hay to feed {horses} horses for {days} days. How many kilograms does a "
        "single horse eat daily?",
        "hay // horses // days",
        {"horses": range(3, 10), "days": range(4, 15), "daily": range(6, 14), "hay": "horses * days * daily"},
    ),
    Template(
        "crafts",
        "A string of {meters} meters is cut into threads of {thread} centimeters. For a necklace {name} uses {used} "
        "of the threads. How many threads does {she} still have?",
        "meters * 100 // thread - used",
        {"meters": range(4, 25), "thread": (20, 25, 50), "used": range(2, 7)},
    ),
    Template(
        "library",
        "{comics} comics are distributed evenly over {boxes} boxes. Out of one box {name} pulls {pulled} comics. How "
        "many comics does this box now contain?",
        "comics // boxes - pulled",
        {"boxes": range(3, 10), "inside": range(14, 35), "pulled": range(3, 12), "comics": "boxes * inside"},
    ),
    Template(
        "sharing",
        "{name} came to dinner with {cash} dollars in {her} pocket. The bill of {bill} dollars is split equally by "
        "all {people} people, {name} included. What remains in the pocket after paying, in dollars?",
        "cash - bill // people",
        {"people": range(3, 9), "part": range(9, 30), "cash": range(35, 90), "bill": "people * part"},
    ),
    Template(
        "travel",
        "A parking lot with {exits} exits has {spaces} spaces. On market day {visitors} visitors arrive, always "
        "{riders} in one car, and every car takes one space. How many spaces stay free?",
        "spaces - visitors // riders",
        {
            "exits": range(2, 6),
            "riders": range(2, 6),
            "cars": range(15, 60),
            "spaces": range(70, 160),
            "visitors": "riders * cars",
        },
    ),
    Template(
        "cooking",
        "{name} bought {kilos} kilograms of sugar and has used {grams} grams of it for jam. How many kilograms of "
        "sugar has {she} not used?",
        "kilos - grams // 1000",
        {"whole": range(2, 15), "rest": range(2, 20), "kilos": "whole + rest", "grams": "1000 * whole"},
    ),
    Template(
        "time",
        "One pipe delivers {first} liters per minute and a second pipe delivers {second} liters per minute. With both "
        "pipes open, after how many minutes is an empty pool of {pool} liters full?",
        "pool // (first + second)",
        {"first": range(12, 40), "second": range(8, 30), "minutes": range(6, 40), "pool": "(first + second) * minutes"},
    ),
    Template(
        "cooking",
        "A cutlery set consists of {forks} forks and {spoons} spoons. The {pieces} pieces in a drawer make up "
        "complete sets with nothing left over. How many sets are in the drawer?",
        "pieces // (forks + spoons)",
        {"forks": range(4, 13), "spoons": range(2, 9), "sets": range(3, 15), "pieces": "(forks + spoons) * sets"},
    ),
    Template(
        "savings",
        "Week after week, {name} earns {income} dollars and spends {lunch} dollars on lunch. The rest goes toward a "
        "guitar that costs {price} dollars. After how many weeks can {name} pay for it?",
        "price // (income - lunch)",
        {"lunch": range(8, 25), "saved": range(6, 30), "weeks": range(4, 15)}
        | {"income": "lunch + saved", "price": "saved * weeks"},
    ),
    Template(
        "measures",
        "A leaking boat takes in {inflow} liters of water per minute, while {name} scoops out {scooped} liters per "
        "minute. The boat was dry at first. After how many minutes does it contain {liters} liters?",
        "liters // (inflow - scooped)",
        {"scooped": range(5, 20), "gain": range(2, 10), "minutes": range(5, 25)}
        | {"inflow": "scooped + gain", "liters": "gain * minutes"},
    ),
    Template(
        "farming",
        "A stall has {nets} nets of {oranges} oranges and {loose} single oranges. All of them are pressed, using "
        "{need} oranges for every glass. How many glasses of juice does this give?",
        "(nets * oranges + loose) // need",
        {"need": (3, 4, 5), "nets": range(3, 9), "oranges": range(6, 13), "few": range(2, 6)}
        | {"loose": "need * few - nets * oranges % need"},
    ),
    Template(
        "time",
        "A course of {hours} hours and {minutes} minutes consists of {parts} parts that are equally long. How many "
        "minutes does one part last?",
        "(hours * 60 + minutes) // parts",
        {"parts": range(4, 9), "length": range(25, 46)}
        | {"hours": "parts * length // 60", "minutes": "parts * length % 60"},
    ),
    Template(
        "sharing",
        "There were {boxes} boxes of {pieces} chocolates. Now that {eaten} chocolates have been eaten, all the others "
        "are handed out to {kids} children in equal parts. How many chocolates does every child receive?",
        "(boxes * pieces - eaten) // kids",
        {"boxes": range(3, 7), "pieces": range(18, 31), "kids": range(3, 8), "few": (1, 2)}
        | {"eaten": "boxes * pieces % kids + kids * few"},
    ),
    Template(
        "travel",
        "Per 100 kilometers a van burns {fuel} liters of fuel. The driver plans a route of {distance} kilometers and "
        "wants {reserve} liters as a reserve. How many liters must be in the tank at the start?",
        "fuel * distance // 100 + reserve",
        {"fuel": range(6, 15), "distance": range(200, 901, 100), "reserve": range(5, 16)},
    ),
    Template(
        "work",
        "All {nurses} nurses and {doctors} doctors of a clinic with {beds} beds want {masks} masks each. The clinic "
        "has only {stock} masks. How many masks are missing?",
        "(nurses + doctors) * masks - stock",
        {"beds": range(40, 120), "nurses": range(12, 30), "doctors": range(4, 11), "masks": range(3, 9)}
        | {"stock": range(15, 45)},
    ),
    Template(
        "work",
        "Yesterday {name} worked {before} hours before noon and {after} hours after noon for {wage} dollars per hour, "
        "but {tax} dollars went to taxes. How many dollars could {she} take home?",
        "(before + after) * wage - tax",
        {"before": range(2, 6), "after": range(2, 6), "wage": range(12, 30), "tax": range(8, 40)},
    ),
    Template(
        "measures",
        "Among the {lamps} lamps of a hall, {dark} lamps are switched off. Every other lamp needs {watts} watts, and "
        "a heater needs {heater} watts. How many watts are needed in all?",
        "(lamps - dark) * watts + heater",
        {"lamps": range(20, 50), "dark": range(3, 16), "watts": range(5, 25), "heater": range(400, 1500, 50)},
    ),
    Template(
        "savings",
        "A club with {members} members asks for a fee of {fee} dollars, but {exempt} members pay nothing. A sponsor "
        "gives {gift} dollars, and {costs} dollars go to the bank. How much money comes together, in dollars?",
        "(members - exempt) * fee + gift - costs",
        {
            "members": range(25, 80),
            "fee": range(5, 20),
            "exempt": range(3, 15),
            "gift": range(50, 300, 10),
            "costs": range(4, 30),
        },
    ),
    Template(
        "shopping",
        "With {budget} dollars in {her} wallet, {name} gets {rolls} rolls of tape for {price} dollars per roll, and a "
        "hammer for {hammer} dollars. How much money goes back into the wallet, in dollars?",
        "budget - rolls * price - hammer",
        {"budget": range(60, 120, 5), "rolls": range(2, 6), "price": range(3, 8), "hammer": range(8, 19)},
    ),
    Template(
        "farming",
        "Out of every crate of {pears} pears, {rotten} are rotten and {small} are too small, while the rest are good. "
        "How many good pears do {crates} crates yield?",
        "(pears - rotten - small) * crates",
        {"pears": range(30, 70), "rotten": range(2, 10), "small": range(3, 12), "crates": range(3, 15)},
    ),
)
