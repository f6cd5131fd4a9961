"""What it is that changes between prompts that are otherwise equal.

Small changes are read as text: a time, a date, an id. Large ones are told by their shape: the same
parts in another order, the beginning of a history cut off, turns written anew.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from tiercache.explain.traffic import Change, NearMiss
from tiercache.types import Tokens

Decode = Callable[[Tokens], str]


class ChangeClass(StrEnum):
    """A closed list. `NAME` is words that differ from user to user."""

    TIME = "time"
    DATE = "date"
    UUID = "uuid"
    COUNTER = "counter"
    HASH = "hash"
    NAME = "name"
    WHITE_SPACE = "white_space"
    PERMUTATION = "permutation"
    TRUNCATED_HISTORY = "truncated_history"
    RE_RENDERED = "re_rendered"
    OTHER = "other"


_MONTHS = (
    r"(?:jan|feb|m[aä]r|apr|ma[iy]|jun|jul|aug|sep|o[ck]t|nov|de[cz]|janv|f[eé]v|mars|avr|juin|juil"
    r"|ao[uû]|d[eé]c|ene|abr|ago|dic|gen|mag|giu|lug|set|ott)[a-zéûäß]*\.?"
)
_DAYS = (
    r"(?:mon|tue|wed|thu|fri|sat|sun|mo|di|mi|do|fr|sa|so|lun|mar|mer|mié|jeu|jue|ven|vie|sam|sáb"
    r"|dim|dom)[a-zéáü]*\.?"
)
_TIME = re.compile(
    r"(?<!\d)\d{1,2}:\d{2}(?::\d{2})?(?:[.,]\d+)?(?:\s?[ap]\.?m\b\.?)?"
    r"|(?<!\d)\d{1,2}[.h]\s?\d{2}\s?(?:uhr|min|h)?\b(?![./-]?\d)"
    r"|(?<!\d)\d{1,2}\s?[ap]\.?m\b"
    r"|(?<!\d)\d{1,2}[時时点]\d{1,2}分?"
    r"|(?<!\d)1[5-9]\d{8}(?:\d{3})?(?!\d)",
    re.IGNORECASE,
)
_DATE = re.compile(
    r"(?<!\d)\d{4}[-/.年]\s?\d{1,2}(?:[-/.月]\s?\d{1,2}日?)?(?!\d)"
    r"|(?<!\d)\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}(?!\d)"
    r"|(?<!\d)20\d{2}[01]\d[0-3]\d(?!\d)"
    rf"|(?<!\d)\d{{1,2}}(?:st|nd|rd|th|er|\.)?\s+(?:de\s+)?{_MONTHS}(?:\s+(?:de\s+)?\d{{4}})?\b"
    rf"|\b{_MONTHS}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?\b"
    rf"|\b{_DAYS}(?=,?\s+\d)",
    re.IGNORECASE,
)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_HASH = re.compile(
    r"(?<![0-9A-Za-z])(?:(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{6,64}"
    r"|(?=[0-9A-Za-z_-]*\d)(?=[0-9A-Za-z_-]*[A-Za-z])[0-9A-Za-z_]{14,64})(?![0-9A-Za-z])",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?<![\d])\d{1,12}(?!\d)")
_WORD = re.compile(r"[^\W\d_]{2,}(?:[-.'@ ][^\W\d_]+)*")
_PIECES = re.compile(r"\w+")

_SAME_WORDS = (ChangeClass.WHITE_SPACE, ChangeClass.PERMUTATION)
_SAME_WORDS_SHARE = 0.8
"""Of what changed, for a prompt to count as the same words written otherwise."""

_REMOVED_SHARE = 4
_LEAST_REMOVED_TOKENS = 8
_LEAST_WORDS = 5
_LEAST_MOVED_TOKENS = 6
"""On average at each place; numbers that all count up look like numbers that moved."""


class Reading(NamedTuple):
    """What a near miss was read as. `is_same_words`: what stands between is in both prompts, only
    written otherwise or elsewhere."""

    kind: ChangeClass
    is_same_words: bool = False


def classify(near: NearMiss, decode: Decode) -> Reading:
    """The class of one near miss. `TRUNCATED_HISTORY` stands for any removal until a group of
    them shows whether it is always the beginning that goes; see `report`."""
    if not near.is_in_order:
        whole = near.changes[0]
        return Reading(
            ChangeClass.PERMUTATION, _are_reordered(decode(whole.old), decode(whole.new))
        )
    votes = [_class_of(change, decode) for change in near.changes]
    for kind in _SAME_WORDS:
        if _weight(near, votes, kind) >= _SAME_WORDS_SHARE * _weight(near, votes):
            return Reading(kind, is_same_words=True)
    if _moved_about(near, decode):
        return Reading(ChangeClass.PERMUTATION, is_same_words=True)
    if near.extends and near.gap_count >= 2 and _is_rewriting(Counter(votes)):
        return Reading(ChangeClass.RE_RENDERED)
    named = [kind for kind in votes if kind not in (ChangeClass.OTHER, *_SAME_WORDS)]
    return Reading(named[0] if named else ChangeClass.OTHER)


def _weight(near: NearMiss, votes: list[ChangeClass], kind: ChangeClass | None = None) -> int:
    """Tokens that changed, in places of one kind or in all."""
    return sum(
        max(int(change.old.size), int(change.new.size))
        for change, vote in zip(near.changes, votes, strict=True)
        if kind in (None, vote)
    )


def _is_rewriting(kinds: Counter[ChangeClass]) -> bool:
    """Several places of a conversation changed, and none holds a time or an id."""
    lasting = (ChangeClass.TIME, ChangeClass.DATE, ChangeClass.UUID, ChangeClass.HASH)
    return not any(kinds[kind] for kind in lasting)


def _moved_about(near: NearMiss, decode: Decode) -> bool:
    """What is missing at one place stands at another: parts too short to be seen as equal."""
    tokens = sum(int(change.new.size) for change in near.changes)
    if near.gap_count < 2 or tokens < _LEAST_MOVED_TOKENS * near.gap_count:
        return False
    old = " ".join(decode(change.old) for change in near.changes)
    new = " ".join(decode(change.new) for change in near.changes)
    return _are_reordered(old, new)


def _class_of(change: Change, decode: Decode) -> ChangeClass:
    before, after = decode(change.before), decode(change.after)
    old, new = decode(change.old), decode(change.new)
    line_before = before[before.rfind("\n") + 1 :]
    line_after = after.split("\n", 1)[0]
    if re.sub(r"\s", "", old) == re.sub(r"\s", "", new):
        return ChangeClass.WHITE_SPACE
    if _are_reordered(old, new):
        return ChangeClass.PERMUTATION
    if _is_removed(change):
        return ChangeClass.TRUNCATED_HISTORY
    return _lexical(line_before, old, new, line_after)


def _are_reordered(old: str, new: str) -> bool:
    """The same words, nearly all of them, in another order."""
    left, right = Counter(_PIECES.findall(old)), Counter(_PIECES.findall(new))
    total = max(left.total(), right.total())
    return total >= _LEAST_WORDS and (left & right).total() >= 0.9 * total


def _is_removed(change: Change) -> bool:
    old, new = int(change.old.size), int(change.new.size)
    return old >= _LEAST_REMOVED_TOKENS and new * _REMOVED_SHARE <= old


def _lexical(before: str, old: str, new: str, after: str) -> ChangeClass:
    for kind, pattern in (
        (ChangeClass.UUID, _UUID),
        (ChangeClass.TIME, _TIME),
        (ChangeClass.DATE, _DATE),
        (ChangeClass.HASH, _HASH),
    ):
        was, now = _touched(pattern, before, old, after), _touched(pattern, before, new, after)
        if was and now and was != now:
            return kind
    was, now = _touched(_NUMBER, before, old, after), _touched(_NUMBER, before, new, after)
    if was and now and was != now:
        return ChangeClass.COUNTER if int(now) > int(was) else ChangeClass.OTHER
    was, now = _touched(_WORD, before, old, after), _touched(_WORD, before, new, after)
    return ChangeClass.NAME if was and now and was != now else ChangeClass.OTHER


def _touched(pattern: re.Pattern[str], before: str, middle: str, after: str) -> str:
    """What `pattern` finds across or at the edges of `middle`, within its line."""
    text = before + middle + after
    first, stop = len(before), len(before) + len(middle)
    for match in pattern.finditer(text):
        if match.start() <= stop and match.end() >= first and match.end() > match.start():
            return match.group()
    return ""
