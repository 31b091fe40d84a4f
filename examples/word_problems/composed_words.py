"""The words of composed templates (composed_sentences.py)."""

THINGS = (
    *("ball", "book", "cup", "card", "coin", "button", "shell", "pear", "lemon", "pencil", "nut", "sticker", "stamp"),
    *("candle", "flower", "rose", "brick", "tile", "plate", "spoon", "bottle", "cookie", "muffin", "cake", "melon"),
    *("carrot", "seed", "tree", "plant", "toy", "doll", "kite", "hat", "shirt", "sock", "glove", "towel", "pillow"),
    *("chair", "lamp", "picture", "poster", "photo", "letter", "notebook", "bead", "stone", "board", "nail", "screw"),
    *("wheel", "bulb", "cable", "phone", "radio", "robot", "puzzle", "badge", "flag", "balloon", "ribbon", "rope"),
    *("duck", "hen", "goat", "rabbit", "bird", "frog", "tulip", "banana", "peach", "mango", "pumpkin", "sandwich"),
)
BOXES = (
    *("box", "bag", "basket", "crate", "jar", "carton", "tray", "tin", "pack", "packet", "chest", "sack", "drawer"),
    *("bucket", "bowl", "case", "cabinet", "van", "room", "row", "pile", "stack", "bundle", "set", "cart", "container"),
)
PEOPLE = (
    *(
        "child",
        "friend",
        "boy",
        "girl",
        "worker",
        "guest",
        "pupil",
        "player",
        "student",
        "neighbor",
        "teacher",
        "cousin",
    ),
    *("customer", "member", "visitor", "farmer", "team", "family", "class", "group"),
)
ROLES = (
    *("teacher", "farmer", "baker", "gardener", "cook", "painter", "carpenter", "florist", "doctor", "driver", "nurse"),
    *("merchant", "builder", "tailor", "waiter", "coach", "potter", "hunter", "sailor", "librarian", "mechanic"),
)
WORDS = {
    "then": (
        "Then",
        "Later",
        "After that",
        "Next",
        "Soon",
        "The next day",
        "After lunch",
        "In the evening",
        "Afterwards",
    ),
    "sadly": ("Sadly", "Unfortunately", "Then", "Later", "During the night", "Soon", "By accident", "On the way"),
    "gains": (
        *("buys", "finds", "gets", "receives", "wins", "makes", "picks", "collects", "orders", "earns", "gathers"),
        *("discovers", "inherits", "builds", "brings", "adds", "acquires", "produces"),
    ),
    "gained": ("bought", "found", "made", "counted", "collected", "received", "ordered", "picked", "won", "prepared"),
    "arrive": (
        *("arrive", "are delivered", "are added", "are brought", "come", "are found", "turn up", "are bought"),
        *("are made", "appear", "are put there", "are ordered", "come in", "follow"),
    ),
    "loses": (
        *("loses", "sells", "gives away", "uses", "throws away", "breaks", "drops", "donates", "lends", "returns"),
        *("hands out", "burns", "removes", "hides", "ruins", "destroys", "trades away", "ships", "forgets"),
    ),
    "lost": (
        *(
            "are lost",
            "are broken",
            "are stolen",
            "get lost",
            "get wet",
            "are sold",
            "are removed",
            "disappear",
            "break",
        ),
        *("are taken away", "are damaged", "are thrown away", "are useless", "are given away", "fall off", "burn"),
        *("are picked up", "go missing", "are eaten by mice", "are returned", "vanish", "are destroyed", "rot"),
    ),
    "takes": ("takes", "borrows", "steals", "buys", "grabs", "gets", "needs", "keeps", "receives", "removes"),
    "take": ("take", "use", "need", "buy", "get", "borrow", "keep", "want", "lose", "receive", "pick up"),
    "bring": ("bring", "add", "give", "contribute", "donate", "send", "make", "find", "leave"),
    "packed": ("packed", "put", "sorted", "placed", "loaded", "laid", "stored", "filled", "arranged"),
    "equally": ("equally", "evenly", "fairly", "in equal parts"),
    "shared": ("shared", "split", "divided", "distributed"),
    "share": ("share", "split", "divide"),
    "perday": ("a day", "every day", "per day", "each day", "daily"),
    "place": ("shop", "club", "school", "museum", "library", "farm", "factory", "hotel", "company", "store", "market"),
    "total": ("altogether", "in total", "in all", "together"),
    "find": ("What is", "Find", "Calculate", "Compute", "Determine", "Give"),
}
