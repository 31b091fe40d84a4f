"""The templates of the cold start's dialogues about travel, work, farms, schools and units."""

from problem_templates import Template

TEMPLATES = (
    # On the road
    Template(
        "travel",
        "A car drives {kilometers} kilometers every hour. How many kilometers does it drive in {hours} hours?",
        "kilometers * hours",
        {"kilometers": range(40, 121, 5), "hours": range(2, 13)},
    ),
    Template(
        "travel",
        "A car drives {kilometers} kilometers in {hours} hours. How many kilometers does it drive every hour?",
        "kilometers // hours",
        {"hours": range(2, 13), "speed": range(40, 121, 5), "kilometers": "hours * speed"},
    ),
    Template(
        "travel",
        "{name} drives {morning} kilometers in the morning and {evening} kilometers in the evening. How many "
        "kilometers is that in total?",
        "morning + evening",
        {"morning": range(15, 121), "evening": range(15, 121)},
    ),
    Template(
        "travel",
        "On each of {days} days {name} drives {morning} kilometers in the morning and {evening} kilometers in the "
        "evening. How many kilometers is that in total?",
        "(morning + evening) * days",
        {"morning": range(8, 61), "evening": range(8, 61), "days": range(3, 15)},
    ),
    Template(
        "travel",
        "A ferry carries {cars} cars and {trucks} trucks on every trip, and it makes {trips} trips a day. How many "
        "vehicles does it carry in {days} days?",
        "(cars + trucks) * trips * days",
        {"cars": range(10, 31), "trucks": range(3, 10), "trips": range(2, 9), "days": range(3, 8)},
    ),
    Template(
        "travel",
        "A train with a speed of {speed} kilometers per hour has {wagons} wagons with {seats} seats each, and "
        "{people} people are sitting in it. How many seats are free?",
        "wagons * seats - people",
        {"speed": range(81, 161), "wagons": range(4, 11), "seats": range(40, 81, 2), "people": range(30, 151)},
    ),
    Template(
        "travel",
        "{adults} adults and {children} children are on a boat. If {out} people climb out, how many people are still "
        "on the boat?",
        "adults + children - out",
        {"adults": range(15, 41), "children": range(6, 31), "out": range(3, 19)},
    ),
    Template(
        "travel",
        "A bus with {seats} seats picks up {school} children at the school and {station} children at the station. How "
        "many children does it pick up?",
        "school + station",
        {"seats": range(50, 81), "school": range(6, 25), "station": range(5, 23)},
    ),
    # At work
    Template(
        "work",
        "The wage for one hour of work is {wage} dollars. {name} works {monday} hours on Monday and {friday} hours on "
        "Friday. How many dollars does {name} get?",
        "wage * (monday + friday)",
        {"wage": range(9, 31), "monday": range(2, 10), "friday": range(2, 10)},
    ),
    Template(
        "work",
        "A company has {drivers} drivers with a salary of {salary} dollars each and {cleaners} cleaners with a wage "
        "of {wage} dollars each. How many dollars does it pay in total?",
        "drivers * salary + cleaners * wage",
        {"drivers": range(2, 10), "salary": range(100, 241, 10), "cleaners": range(2, 10), "wage": range(50, 191, 10)},
    ),
    Template(
        "work",
        "A machine makes {parts} parts a minute. Find the number of parts that it makes in {hours} hours.",
        "parts * 60 * hours",
        {"parts": range(2, 21), "hours": range(2, 5)},
    ),
    Template(
        "work",
        "Every hour a machine makes {good} good parts and {bad} bad parts. How many more good parts than bad parts "
        "are there after {hours} hours?",
        "(good - bad) * hours",
        {"good": range(40, 91), "bad": range(2, 21), "hours": range(3, 13)},
    ),
    Template(
        "work",
        "{name} types {words} words a minute, and {other} types {more} words a minute more. How many words does "
        "{other} type in {minutes} minutes?",
        "(words + more) * minutes",
        {"words": range(30, 61), "more": range(4, 26), "minutes": range(3, 21)},
    ),
    Template(
        "work",
        "In a hall with {doors} doors, {workers} workers each load {before} boxes before lunch and {after} boxes "
        "after lunch. How many boxes do they load altogether?",
        "workers * (before + after)",
        {"doors": range(2, 10), "workers": range(3, 13), "before": range(8, 31), "after": range(8, 31)},
    ),
    Template(
        "work",
        "A store has {phones} phones and sells {sells} of them. Then {boxes} boxes with {each} phones each arrive. "
        "How many phones does the store have now?",
        "phones - sells + boxes * each",
        {"phones": range(50, 121), "sells": range(10, 46), "boxes": range(2, 10), "each": range(4, 13)},
    ),
    Template(
        "work",
        "A job takes {days} days, and a team has already worked on it for {weeks} weeks. How many days remain?",
        "days - weeks * 7",
        {"weeks": range(2, 9), "rest": range(3, 41), "days": "7 * weeks + rest"},
    ),
    Template(
        "work",
        "{men} men and {women} women each carry {bags} bags and {boxes} boxes. How many pieces do they carry in all?",
        "(men + women) * (bags + boxes)",
        {"men": range(2, 10), "women": range(2, 10), "bags": range(2, 8), "boxes": range(2, 8)},
    ),
    # On the farm
    Template(
        "farming",
        "A hen lays {eggs} eggs a week. How many eggs do {hens} hens lay in {weeks} weeks?",
        "eggs * hens * weeks",
        {"eggs": range(3, 8), "hens": range(4, 21), "weeks": range(2, 13)},
    ),
    Template(
        "farming",
        "A garden has {rows} rows of {trees} trees. After a storm {fallen} trees have fallen. How many trees are left "
        "standing?",
        "rows * trees - fallen",
        {"rows": range(4, 13), "trees": range(6, 21), "fallen": range(3, 19)},
    ),
    Template(
        "farming",
        "In {hours} hours {name} plants {rows} rows with {tulips} tulips each and {beds} beds with {roses} roses "
        "each. What is the total number of flowers?",
        "rows * tulips + beds * roses",
        {
            "hours": range(3, 10),
            "rows": range(3, 10),
            "tulips": range(8, 26),
            "beds": range(2, 9),
            "roses": range(4, 16),
        },
    ),
    Template(
        "farming",
        "A farmer has {sheep} sheep, {goats} goats and {pigs} pigs and sells {sells} animals. How many animals remain?",
        "sheep + goats + pigs - sells",
        {"sheep": range(15, 61), "goats": range(8, 31), "pigs": range(5, 26), "sells": range(4, 21)},
    ),
    Template(
        "farming",
        "A bag holds {bag} plums. {name} has {baskets} baskets with {plums} plums each. How many bags does {she} need "
        "for all plums?",
        "baskets * plums // bag",
        {"bag": range(4, 13), "baskets": range(3, 10), "few": range(2, 7), "plums": "bag * few"},
    ),
    Template(
        "farming",
        "Of {animals} animals in a zoo, {birds} are birds, {fish} are fish and the rest are monkeys. How many monkeys "
        "are there?",
        "animals - birds - fish",
        {"animals": range(120, 251), "birds": range(20, 61), "fish": range(15, 51)},
    ),
    Template(
        "farming",
        "A barn that is {meters} meters high holds {bales} bales of straw, and {used} bales are used. How many bales "
        "are in the barn now?",
        "bales - used",
        {"meters": range(5, 15), "bales": range(80, 301), "used": range(15, 71)},
    ),
    Template(
        "farming",
        "There are {cows} cows on a meadow. The number of sheep is {times} times the number of cows. How many animals "
        "are on the meadow?",
        "cows + cows * times",
        {"cows": range(5, 41), "times": range(2, 8)},
    ),
    # At school
    Template(
        "school",
        "Each group has {group} pupils. How many groups are there if {pupils} pupils come?",
        "pupils // group",
        {"group": range(3, 10), "groups": range(4, 21), "pupils": "group * groups"},
    ),
    Template(
        "school",
        "{girls} girls and {boys} boys form {teams} equal teams. How many children are in each team?",
        "(girls + boys) // teams",
        {"teams": range(3, 9), "each": range(5, 13), "boys": range(6, 15), "girls": "teams * each - boys"},
    ),
    Template(
        "school",
        "On a test, {name} solves {easy} easy tasks and {hard} hard tasks. Every easy task has a low value of {low} "
        "points and every hard task has a high value of {high} points. How many points does {name} get?",
        "easy * low + hard * high",
        {"easy": range(4, 16), "hard": range(2, 10), "low": range(2, 5), "high": range(5, 13)},
    ),
    Template(
        "school",
        "In room {room} there are {desks} desks with {chairs} chairs at each desk. How many chairs are in the room?",
        "desks * chairs",
        {"room": range(10, 91), "desks": range(6, 21), "chairs": range(2, 7)},
    ),
    Template(
        "school",
        "A school with {rooms} rooms buys {packs} packs of {pencils} pencils, and {pupils} pupils take {each} pencils "
        "each. How many pencils are left?",
        "packs * pencils - pupils * each",
        {
            "rooms": range(25, 51),
            "packs": range(8, 21),
            "pencils": range(12, 25),
            "pupils": range(10, 29),
            "each": range(2, 4),
        },
    ),
    # Games and training
    Template(
        "sports",
        "In a match of {minutes} minutes, {name} scores {first} points in the first round, {second} in the second "
        "round and {third} in the third round. What is the total number of points?",
        "first + second + third",
        {"minutes": range(41, 91), "first": range(5, 41), "second": range(5, 41), "third": range(5, 41)},
    ),
    Template(
        "sports",
        "{name} swims {laps} laps of {meters} meters a day. How many kilometers does {she} swim in {days} days?",
        "laps * meters * days // 1000",
        {"laps": (20, 40, 60), "meters": (50, 100), "days": range(2, 31)},
    ),
    Template(
        "sports",
        "A win gives {win} points and a draw gives one point. A team has {wins} wins and {draws} draws. How many "
        "points does it have?",
        "win * wins + draws",
        {"win": range(2, 6), "wins": range(3, 21), "draws": range(2, 16)},
    ),
    Template(
        "sports",
        "How many minutes does {name} train in {weeks} weeks if {she} trains {minutes} minutes on each of {days} days "
        "a week?",
        "minutes * days * weeks",
        {"weeks": range(2, 9), "minutes": range(20, 91, 5), "days": range(2, 7)},
    ),
    # Units
    Template(
        "time",
        "A ship is at sea for {weeks} weeks and {days} more days. How many days is that?",
        "weeks * 7 + days",
        {"weeks": range(2, 31), "days": range(2, 7)},
    ),
    Template(
        "time",
        "A lamp in a house with {rooms} rooms burns for {minutes} minutes. How many hours is that?",
        "minutes // 60",
        {"rooms": range(3, 13), "hours": range(2, 41), "minutes": "60 * hours"},
    ),
    Template(
        "measures",
        "A bag weighs {kilograms} kilograms. {name} takes {grams} grams of flour out of it. How many grams does the "
        "bag weigh now?",
        "kilograms * 1000 - grams",
        {"kilograms": range(2, 6), "grams": range(150, 951, 50)},
    ),
    Template(
        "measures",
        "A wall is {meters} meters long. How many boards with a width of {centimeters} centimeters fit side by side?",
        "meters * 100 // centimeters",
        {"meters": range(2, 31), "centimeters": (10, 20, 25, 50)},
    ),
    # Books and shelves
    Template(
        "library",
        "{name} pays {price} dollars for a book of {book} pages and reads {pages} pages a day. Find the number of "
        "days that {she} needs for the book.",
        "book // pages",
        {"price": range(8, 31), "pages": range(6, 31), "days": range(4, 26), "book": "pages * days"},
    ),
    Template(
        "library",
        "A library that is {years} years old has {rooms} rooms with {shelves} shelves each and {books} books per "
        "shelf, but {lost} books are lost. How many books does it have?",
        "rooms * shelves * books - lost",
        {
            "years": range(20, 100),
            "rooms": range(2, 7),
            "shelves": range(4, 13),
            "books": range(15, 41),
            "lost": range(5, 61),
        },
    ),
    # Several steps
    Template(
        "farming",
        "A bag holds {bag} apples and a box holds {box} pears. How many bags and boxes are needed altogether for "
        "{apples} apples and {pears} pears?",
        "apples // bag + pears // box",
        {
            "bag": range(5, 13),
            "bags": range(4, 16),
            "box": range(2, 10),
            "boxes": range(4, 16),
            "apples": "bag * bags",
            "pears": "box * boxes",
        },
    ),
    Template(
        "school",
        "A school has {halls} halls with {big} big lamps each. On each of its {floors} floors are {rooms} rooms with "
        "{small} small lamps each. How many lamps does the school have?",
        "halls * big + floors * rooms * small",
        {"halls": range(2, 6), "big": range(9, 21), "floors": range(2, 6), "rooms": range(5, 13), "small": range(3, 9)},
    ),
    Template(
        "sports",
        "Of {players} players, {hurt} are hurt. Each of the other players runs {laps} laps a day. How many laps do "
        "they run in {days} days?",
        "(players - hurt) * laps * days",
        {"players": range(14, 31), "hurt": range(2, 9), "laps": range(3, 10), "days": range(2, 10)},
    ),
    Template(
        "time",
        "{name} works for {hours} hours, rests for {rests} minutes and then walks home for {walks} minutes. How many "
        "minutes does all this take?",
        "hours * 60 + rests + walks",
        {"hours": range(2, 10), "rests": range(10, 56, 5), "walks": range(8, 51)},
    ),
)
