"""Text for made-up workloads: words, names, stamps in several formats and languages."""

from __future__ import annotations

import random
import time
import uuid

_ENDINGS = ("ster", "ment", "tion", "ing", "ung", "keit", "able", "ive", "eur", "euse", "ción")
_SYLLABLES = (*(a + b for a in "bdfgklmnprstvz" for b in "aeiou"), *_ENDINGS)
_FIRST = ("Alice", "Bob", "Chiara", "Dmitri", "Elif", "Farid", "Grace", "Hana", "Jorge", "Léa")
_LAST = ("Smith", "Müller", "García", "Rossi", "Dubois", "Tanaka", "Novak", "Silva", "Okafor")
_MONTHS = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre "
    "diciembre",
}
LOCALES = tuple(_MONTHS)


class Writer:
    """Draws text. Two writers of the same seed write the same."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._words = [
            "".join(rng.choices(_SYLLABLES, k=rng.choice((1, 2, 2, 3)))) for _ in range(900)
        ]

    def words(self, count: int) -> str:
        return " ".join(self.rng.choices(self._words, k=count))

    def sentence(self) -> str:
        return self.words(self.rng.randint(6, 14)).capitalize() + "."

    def text(self, words: int) -> str:
        """About `words` words, in sentences, with a new line now and then."""
        parts: list[str] = []
        while sum(len(part.split()) for part in parts) < words:
            parts.append(self.sentence() + self.rng.choice((" ", " ", " ", "\n")))
        return "".join(parts).strip()

    def name(self) -> str:
        return f"{self.rng.choice(_FIRST)} {self.rng.choice(_LAST)}"

    def header_of(self, name: str) -> str:
        first, last = name.split()
        return self.rng.choice(
            (
                f"User: {name}",
                f"You are talking to {name} <{first.lower()}.{last.lower()}@example.org>.",
                f"Current user: {first} ({last})",
            )
        )

    def uuid(self) -> str:
        made = str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
        return self.rng.choice((made, made.upper()))

    def hash(self, length: int) -> str:
        return "".join(self.rng.choices("0123456789abcdef", k=length))


def time_formats() -> list[str]:
    """Names of the formats of `stamp`."""
    return ["iso", "iso_ms", "us", "log", "epoch", "epoch_ms", "clock", "local"]


def stamp(form: str, locale: str, seconds: float) -> str:
    """A moment, down to seconds or minutes, in one of several ways of writing it."""
    at = time.gmtime(seconds)
    month = _MONTHS[locale].split()[at.tm_mon - 1]
    clock = time.strftime("%H:%M:%S", at)
    if form == "iso":
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", at)
    if form == "iso_ms":
        return time.strftime("%Y-%m-%d %H:%M:%S", at) + f".{int(seconds * 1000) % 1000:03d}"
    if form == "us":
        return time.strftime("%m/%d/%Y, %I:%M %p", at)
    if form == "log":
        return time.strftime("%a %b %d %H:%M:%S %Y", at)
    if form == "epoch":
        return str(int(seconds))
    if form == "epoch_ms":
        return str(int(seconds * 1000))
    if form == "clock":
        return clock
    return day(locale, seconds) + ", " + clock if locale != "en" else f"{month} {clock}"


def day(locale: str, seconds: float) -> str:
    """A date as it is written in `locale`."""
    at = time.gmtime(seconds)
    month = _MONTHS[locale].split()[at.tm_mon - 1]
    return {
        "en": f"{month} {at.tm_mday}, {at.tm_year}",
        "de": f"{at.tm_mday}. {month} {at.tm_year}",
        "fr": f"{at.tm_mday} {month} {at.tm_year}",
        "es": f"{at.tm_mday} de {month} de {at.tm_year}",
    }[locale]
