"""Read the parts of a number (a sign, digits or a power) from a text; plain_evaluator combines the parts."""

from fractions import Fraction

DIGITS = "0123456789"


class Scanner:
    """A reader of the parts of a text. A method that cannot read its part returns None and keeps the place."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0

    @property
    def is_at_end(self) -> bool:
        return self.place == len(self.text)

    def take(self, *words: str) -> str | None:
        for word in sorted(words, key=len, reverse=True):
            if self.text.startswith(word, self.place):
                self.place += len(word)
                return word
        return None

    def spaced(self, *words: str) -> str | None:
        """Take a word and the spaces around it, or without the word, only a space."""
        self.take(" ")
        word = self.take(*words)
        self.take(" ")
        return word

    def digits(self) -> str:
        start = self.place
        while not self.is_at_end and self.text[self.place] in DIGITS:
            self.place += 1
        return self.text[start : self.place]

    def sign(self) -> str:
        return self.take("+", "-") or ""

    def integer(self) -> int | None:
        """Read digits, or groups of three digits that are divided by one kind of separator."""
        start, head = self.place, self.digits()
        if not head:
            return None
        groups, separator = [head], self.text[self.place : self.place + 1]
        end = self.place
        while separator in (",", " ") and len(head) < 4 and head[0] != "0" and self.take(separator):
            if len(group := self.digits()) != 3:
                break
            groups.append(group)
            end = self.place
        self.place = end
        if len(groups) > 1 and self.text[end : end + 1].isdigit():
            self.place = start + len(head)
            return int(head)
        return int("".join(groups))

    def exponent(self) -> int | None:
        """Read a whole number, which can be in braces or in brackets."""
        start = self.place
        opening = self.take("{", "(") or ""
        if opening == "{":
            self.take(" ")
        sign, digits = self.sign(), self.digits()
        if opening == "{":
            self.take(" ")
        if not digits or (opening and not self.take({"{": "}", "(": ")"}[opening])):
            self.place = start
            return None
        return int(sign + digits)

    def power(self) -> Fraction | None:
        start = self.place
        if (base := self.integer()) is None:
            return None
        end = self.place
        if self.spaced("^"):
            if (exponent := self.exponent()) is not None and (base or exponent > 0) and abs(exponent) < 500:
                return Fraction(base) ** exponent
            self.place = start
            return None
        self.place = end
        return Fraction(base)

    def side(self, is_digit_allowed: bool = True) -> Fraction | None:
        r"""Read one side of `\frac`: a digit, or braces with a signed power."""
        if self.spaced("{"):
            sign = self.sign()
            value = self.power()
            self.take(" ")
            if value is None or not self.take("}"):
                return None
            return -value if sign == "-" else value
        if is_digit_allowed and not self.is_at_end and self.text[self.place] in DIGITS:
            self.place += 1
            return Fraction(int(self.text[self.place - 1]))
        return None
