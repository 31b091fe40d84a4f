"""The templates that only RL trains on."""

from problem_templates import Template

TEMPLATES = (
    Template(
        "shopping",
        "A shop assistant unpacks {crates} crates with {bottles} bottles in each. Sadly {broken} bottles turn out to "
        "be broken. How many bottles are fine?",
        "crates * bottles - broken",
        {"crates": range(4, 12), "bottles": range(6, 25), "broken": range(3, 20)},
    ),
    Template(
        "shopping",
        "Usually a {item} costs {price} dollars, but today {off} dollars are taken off. What is the cost of {count} "
        "{item}s today, in dollars?",
        "(price - off) * count",
        {"price": range(15, 50), "off": range(3, 12), "count": range(2, 10)},
        {"item": ("lamp", "chair", "shirt", "clock", "tent")},
    ),
    Template(
        "farming",
        "{name} picked {red} red apples and {green} green apples and put them evenly into {bags} bags. What is the "
        "number of apples per bag?",
        "(red + green) // bags",
        {"bags": range(3, 9), "each": range(8, 20), "green": range(5, 16), "red": "bags * each - green"},
    ),
    Template(
        "school",
        "A class of {pupils} pupils forms teams of {size}. Then {more} teams arrive from another class. How many "
        "teams take part?",
        "pupils // size + more",
        {"size": range(2, 7), "teams": range(3, 10), "more": range(2, 12), "pupils": "size * teams"},
    ),
    Template(
        "work",
        "A cinema sells {tickets} tickets for {price} dollars each. It pays {staff} helpers {wage} dollars each, and "
        "{rent} dollars of rent. What sum does the cinema keep, in dollars?",
        "tickets * price - staff * wage - rent",
        {
            "tickets": range(60, 150),
            "price": range(6, 13),
            "staff": range(2, 6),
            "wage": range(20, 40, 2),
            "rent": range(50, 100, 5),
        },
    ),
    Template(
        "party",
        "For the party, {name} orders {pizzas} pizzas for {price} dollars apiece, one cake for {cake} dollars and "
        "balloons for {balloons} dollars. What does the whole order cost, in dollars?",
        "pizzas * price + cake + balloons",
        {"pizzas": range(3, 10), "price": range(7, 15), "cake": range(12, 40), "balloons": range(4, 12)},
    ),
    Template(
        "farming",
        "A farm with {cows} cows sold {june} sacks of potatoes in June, {july} sacks in July and {august} sacks in "
        "August. How many sacks were sold over the summer?",
        "june + july + august",
        {"cows": range(5, 30), "june": range(20, 90), "july": range(20, 90), "august": range(20, 90)},
    ),
    Template(
        "time",
        "Builders worked on the roof for {days} days without a break and then on the walls for {weeks} weeks. How "
        "many weeks did the job take?",
        "days // 7 + weeks",
        {"whole": range(2, 13), "weeks": range(2, 20), "days": "7 * whole"},
    ),
    Template(
        "time",
        "A video has a length of {hours} hours. {name} has already watched {minutes} minutes of it. How many minutes "
        "are still to come?",
        "hours * 60 - minutes",
        {"hours": range(2, 7), "minutes": range(15, 110)},
    ),
    Template(
        "travel",
        "A convoy has {buses} buses with {seats} seats each. In every bus {empty} seats stay empty. How many seats "
        "are taken in the convoy?",
        "(seats - empty) * buses",
        {"buses": range(3, 12), "seats": range(30, 60, 2), "empty": range(3, 20)},
    ),
    Template(
        "measures",
        "A board has a length of {meters} meters and {rest} centimeters. Give its length in centimeters.",
        "meters * 100 + rest",
        {"meters": range(2, 20), "rest": range(5, 96)},
    ),
    Template(
        "travel",
        "{name} starts a hike of {total} kilometers, walking {speed} kilometers an hour. What distance in kilometers "
        "is ahead of {name} after {hours} hours?",
        "total - speed * hours",
        {"speed": range(3, 7), "hours": range(2, 6), "rest": range(4, 20), "total": "speed * hours + rest"},
    ),
    Template(
        "work",
        "{name} is paid {pay} dollars for each window. Today {she} cleaned {windows} windows and spent {soap} dollars "
        "on soap. What is the profit in dollars?",
        "pay * windows - soap",
        {"pay": range(4, 13), "windows": range(6, 30), "soap": range(3, 20)},
    ),
    Template(
        "sharing",
        "{name} has {own} dollars and {other} has {theirs} dollars. Together they spend everything on {tickets} equal "
        "concert tickets. What does one ticket cost, in dollars?",
        "(own + theirs) // tickets",
        {"tickets": range(2, 7), "price": range(12, 40), "own": range(8, 22), "theirs": "tickets * price - own"},
    ),
    Template(
        "sharing",
        "{name} splits {marbles} marbles fairly between {kids} kids. One of these kids, {other}, already had {had} "
        "marbles. How many marbles does {other} hold now?",
        "marbles // kids + had",
        {"kids": range(3, 9), "share": range(4, 16), "had": range(5, 40), "marbles": "kids * share"},
    ),
    Template(
        "cooking",
        "{name} bakes {trays} trays of {cookies} cookies. Then {guests} guests eat {each} cookies apiece. How many "
        "cookies are left over?",
        "trays * cookies - guests * each",
        {"trays": range(4, 9), "cookies": range(12, 25), "guests": range(3, 10), "each": range(2, 6)},
    ),
    Template(
        "travel",
        "On a tour {name} first drives {daily} kilometers a day for {days} days. After that come {hills} kilometers "
        "of hills and {coast} kilometers of coast. How long is the tour in kilometers?",
        "daily * days + hills + coast",
        {"daily": range(80, 260, 10), "days": range(2, 7), "hills": range(20, 95, 5), "coast": range(30, 150, 5)},
    ),
    Template(
        "savings",
        "Each month {name} receives {pay} dollars of pocket money, but only {spent} dollars of it are spent. How much "
        "has piled up after {months} months, in dollars?",
        "(pay - spent) * months",
        {"pay": range(30, 80), "spent": range(8, 28), "months": range(3, 13)},
    ),
    Template(
        "library",
        "A bookcase has {boards} boards for {volumes} volumes each, and all boards are full. Another {loose} volumes "
        "lie on the floor. How many volumes are there in the room?",
        "boards * volumes + loose",
        {"boards": range(4, 12), "volumes": range(12, 35), "loose": range(5, 40)},
    ),
    Template(
        "travel",
        "A hotel has {floors} floors with {rooms} rooms each. Every room has {beds} beds, and the lobby has {sofas} "
        "sofa beds. How many beds are there, sofa beds included?",
        "floors * rooms * beds + sofas",
        {"floors": range(2, 7), "rooms": range(6, 15), "beds": range(2, 5), "sofas": range(2, 9)},
    ),
    Template(
        "cooking",
        "A meal for {guests} guests takes {cut} minutes of cutting, after this {boil} minutes of boiling and finally "
        "{fry} minutes of frying. How many minutes is the cook busy?",
        "cut + boil + fry",
        {"guests": range(3, 12), "cut": range(8, 30), "boil": range(12, 45), "fry": range(6, 20)},
    ),
    Template(
        "work",
        "A factory with {workers} workers fills {cans} cans of paint per hour. During a shift of {hours} hours, "
        "{spoiled} cans are spoiled. How many usable cans leave the factory?",
        "cans * hours - spoiled",
        {"workers": range(12, 60), "cans": range(30, 90), "hours": range(4, 10), "spoiled": range(5, 40)},
    ),
    Template(
        "measures",
        "A full bucket holds {liters} liters, but {spilled} liters of every bucket get lost on the way. How many "
        "liters of water arrive with {trips} buckets?",
        "(liters - spilled) * trips",
        {"liters": range(9, 21), "spilled": range(2, 7), "trips": range(4, 25)},
    ),
    Template(
        "measures",
        "One sack of rice weighs {grams} grams, another one weighs {kilos} kilograms. What is the weight of both "
        "sacks in kilograms?",
        "grams // 1000 + kilos",
        {"whole": range(2, 25), "kilos": range(2, 30), "grams": "1000 * whole"},
    ),
)
