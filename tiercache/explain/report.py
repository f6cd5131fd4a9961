"""What is wrong with recent traffic, in words, largest saving first.

Near misses are grouped by what changes and where; other findings come from the reasons themselves.
A finding needs several requests and a share of the missed tokens: traffic that only brings new
content is not to blame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from tiercache.explain.classify import ChangeClass, Decode, Reading, classify
from tiercache.explain.traffic import NearMiss, Seen
from tiercache.types import MissReason

_LEAST_REQUESTS = 3
_LEAST_REQUEST_SHARE = 0.05
_LEAST_SAVED_SHARE = 0.05
_LEAST_OTHER_SHARE = 0.2
"""A finding that can name nothing needs more behind it."""

_LEAST_REASON_SHARE = 0.15
_MOST_BETWEEN_SHARE = 1 / 3
_SAME_PLACE_TOKENS = 32
_CONSTANT_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that costs hits. `kind` is a `ChangeClass` or a `MissReason`, by value.

    `saved_tokens` would not have been computed in the time looked at; `share_of_missed` is that
    share of all missed tokens. `at_token` is where prompts leave what is stored; -1 if that does
    not apply. `examples` are the texts that changed, where they may be shown.
    """

    kind: str
    requests: int
    at_token: int
    stored_tokens: int
    saved_tokens: int
    saved_tokens_per_hour: float
    share_of_missed: float
    text: str
    examples: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Findings over the last `requests` prompts, which took `seconds`."""

    requests: int
    seconds: float
    prompt_tokens: int
    missed_tokens: int
    miss_tokens_by_reason: Mapping[MissReason, int]
    findings: tuple[Finding, ...]


def make_report(
    seen: Sequence[Seen],
    near_misses: Sequence[NearMiss],
    decode: Decode,
    *,
    show_text: bool = False,
) -> Report:
    """Looks at recent prompts. Some 50 µs for each near miss; changes nothing."""
    facts = _facts(seen)
    findings = [
        *_divergences(facts, near_misses, decode, show_text),
        *(found for found in (rule(facts) for rule in _RULES) if found is not None),
    ]
    findings.sort(key=lambda one: -one.saved_tokens)
    reasons: dict[MissReason, int] = defaultdict(int)
    for one in seen:
        for span in one.spans:
            reasons[span.reason] += span.tokens
    return Report(
        requests=len(seen),
        seconds=facts.seconds,
        prompt_tokens=sum(one.prompt_tokens for one in seen),
        missed_tokens=facts.missed_tokens,
        miss_tokens_by_reason=dict(reasons),
        findings=tuple(findings),
    )


class _Facts(NamedTuple):
    seen: Sequence[Seen]
    missed_tokens: int
    seconds: float

    def per_hour(self, tokens: int) -> float:
        return tokens * 3600 / self.seconds if self.seconds > 0 else 0.0


def _facts(seen: Sequence[Seen]) -> _Facts:
    seconds = seen[-1].at_seconds - seen[0].at_seconds if seen else 0.0
    return _Facts(seen, sum(one.missed_tokens for one in seen), seconds)


class _Classed(NamedTuple):
    near: NearMiss
    kind: ChangeClass


def _divergences(
    facts: _Facts, near_misses: Sequence[NearMiss], decode: Decode, show_text: bool
) -> list[Finding]:
    findings = []
    for kind, group in _groups(near_misses, decode):
        saved = sum(_saved(near, kind) for near in group)
        share = saved / facts.missed_tokens if facts.missed_tokens else 0.0
        least = _LEAST_OTHER_SHARE if kind is ChangeClass.OTHER else _LEAST_SAVED_SHARE
        enough = max(_LEAST_REQUESTS, _LEAST_REQUEST_SHARE * len(facts.seen))
        if len(group) >= enough and share >= least:
            findings.append(_finding(facts, kind, group, saved, share, decode, show_text))
    return findings


def _saved(near: NearMiss, kind: ChangeClass) -> int:
    """Where mending means writing the same each time, what stood between is saved as well."""
    same_again = kind in (ChangeClass.PERMUTATION, ChangeClass.WHITE_SPACE)
    return near.saved_whole_tokens if same_again else near.saved_tokens


def _groups(
    near_misses: Sequence[NearMiss], decode: Decode
) -> list[tuple[ChangeClass, list[NearMiss]]]:
    """Near misses that leave at about the same token for the same kind of reason.

    A place where several kinds were read (a hash may look like a number) is of the commonest.
    """
    readings = [(near, classify(near, decode)) for near in near_misses]
    classed = sorted(
        (_Classed(near, reading.kind) for near, reading in readings if _is_near(near, reading)),
        key=lambda one: one.near.prefix_tokens,
    )
    by_kind: dict[ChangeClass, list[NearMiss]] = defaultdict(list)
    for place in _places(classed):
        votes: dict[ChangeClass, int] = defaultdict(int)
        for one in place:
            votes[one.kind] += 1
        commonest = max(votes, key=lambda kind: (votes[kind], kind is not ChangeClass.OTHER))
        by_kind[_settled(commonest, place, len(classed))] += [one.near for one in place]
    return list(by_kind.items())


def _is_near(near: NearMiss, reading: Reading) -> bool:
    """Whether it is a short stretch that differs and a long one that is shared.

    Passages that recur in ever other company, or quotes of what was said before, are no more than
    that: nothing could be moved that would let a prefix grow over them.
    """
    if reading.is_same_words:
        return True
    most = near.again_tokens * _MOST_BETWEEN_SHARE
    most_old = near.again_tokens if near.extends else most
    return near.between_tokens <= most and near.between_old_tokens <= most_old


def _places(classed: Sequence[_Classed]) -> list[list[_Classed]]:
    places: list[list[_Classed]] = []
    for one in classed:
        near_last = places and (
            one.near.prefix_tokens - places[-1][-1].near.prefix_tokens <= _SAME_PLACE_TOKENS
        )
        if near_last:
            places[-1].append(one)
        else:
            places.append([one])
    return places


def _settled(kind: ChangeClass, place: Sequence[_Classed], near_misses: int) -> ChangeClass:
    """Something that is removed at ever the same place is the beginning of a history; where the
    place moves on with the conversation, it is a turn that is written anew."""
    if kind is ChangeClass.TRUNCATED_HISTORY and len(place) < _CONSTANT_SHARE * near_misses:
        spread = place[-1].near.prefix_tokens - place[0].near.prefix_tokens
        if spread > _SAME_PLACE_TOKENS or len(place) < 0.3 * near_misses:
            return ChangeClass.RE_RENDERED
    return kind


_WHAT = {
    ChangeClass.TIME: "a time of day, different in every request",
    ChangeClass.DATE: "a date",
    ChangeClass.UUID: "a UUID, different in every request",
    ChangeClass.COUNTER: "a number that counts up",
    ChangeClass.HASH: "a hash or a random id",
    ChangeClass.NAME: "words that differ from user to user, such as a name",
    ChangeClass.WHITE_SPACE: "white space alone",
    ChangeClass.PERMUTATION: "the same parts in another order",
    ChangeClass.TRUNCATED_HISTORY: "the beginning of the history is cut off",
    ChangeClass.RE_RENDERED: "earlier turns are written in another way than before",
    ChangeClass.OTHER: "something that differs and could not be named",
}

_ADVICE = {
    ChangeClass.WHITE_SPACE: "written with the same white space each time",
    ChangeClass.PERMUTATION: "always in one order",
    ChangeClass.TRUNCATED_HISTORY: "with the history kept whole, or cut in rare large steps,",
    ChangeClass.RE_RENDERED: "with earlier turns left as they were",
}


def _finding(
    facts: _Facts,
    kind: ChangeClass,
    group: Sequence[NearMiss],
    saved: int,
    share: float,
    decode: Decode,
    show_text: bool,
) -> Finding:
    at = int(median(near.prefix_tokens for near in group))
    stored = int(median(near.shared_tokens for near in group))
    per_hour = facts.per_hour(saved)
    advice = _ADVICE.get(kind, "moved after the shared part")
    text = (
        f"{len(group):,} of the last {len(facts.seen):,} requests ({share:.0%} of missed tokens)"
        f" leave a stored {stored:,}-token prefix at token {at:,} ({_WHAT[kind]}); {advice} it"
        f" would save {_amount(facts, saved)}"
    )
    examples = _examples(group, decode) if show_text else ()
    return Finding(kind.value, len(group), at, stored, saved, per_hour, share, text + ".", examples)


def _examples(group: Sequence[NearMiss], decode: Decode) -> tuple[tuple[str, str], ...]:
    changes = [near.changes[0] for near in group if near.changes][:3]
    return tuple((decode(change.old)[:200], decode(change.new)[:200]) for change in changes)


def _amount(facts: _Facts, tokens: int) -> str:
    per_hour = facts.per_hour(tokens)
    return f"{_round(per_hour)} tokens an hour" if per_hour else f"{tokens:,} tokens"


def _round(tokens: float) -> str:
    return f"{tokens / 1e6:.1f} M" if tokens >= 1e6 else f"{tokens:,.0f}"


def _of_reasons(
    facts: _Facts, kind: MissReason, words: str, reasons: Sequence[MissReason], least: float
) -> Finding | None:
    """A finding if at least `least` requests missed enough for one of `reasons`."""
    lost = [n for n in (one.missed_for(*reasons) for one in facts.seen) if n]
    saved = sum(lost)
    share = saved / facts.missed_tokens if facts.missed_tokens else 0.0
    if share < _LEAST_REASON_SHARE or len(lost) < least:
        return None
    text = (
        f"{len(lost):,} of the last {len(facts.seen):,} requests ({share:.0%} of missed tokens)"
        f" {words}; that costs {_amount(facts, saved)}."
    )
    return Finding(kind.value, len(lost), -1, 0, saved, facts.per_hour(saved), share, text)


def _evicted(facts: _Facts) -> Finding | None:
    words = "ask for what was stored and had to make room: the working set is larger than the tiers"
    reasons = (MissReason.EVICTED, MissReason.NOT_WRITTEN)
    least = max(_LEAST_REQUESTS, _LEAST_REQUEST_SHARE * len(facts.seen))
    return _of_reasons(facts, MissReason.EVICTED, words, reasons, least)


def _other_namespace(facts: _Facts) -> Finding | None:
    """A namespace misses once for each content: few requests, but none without a cause."""
    words = "ask for what is stored in another namespace (another cache_salt or tenant)"
    kind = MissReason.OTHER_NAMESPACE
    return _of_reasons(facts, kind, words, (kind,), 1)


def _below_one_page(facts: _Facts) -> Finding | None:
    short = [one for one in facts.seen if one.prompt_tokens < one.page_tokens]
    if len(short) < max(_LEAST_REQUESTS, 0.5 * len(facts.seen)):
        return None
    tokens = sum(one.missed_tokens for one in short)
    share = tokens / facts.missed_tokens if facts.missed_tokens else 0.0
    text = (
        f"{len(short):,} of the last {len(facts.seen):,} requests ({share:.0%} of missed tokens)"
        f" are shorter than one page of {short[0].page_tokens} tokens; only whole pages are stored,"
        " so a smaller cache.page_tokens is what could help."
    )
    kind = MissReason.PARTIAL_PAGE.value
    return Finding(kind, len(short), -1, 0, tokens, facts.per_hour(tokens), share, text)


_RULES: tuple[Callable[[_Facts], Finding | None], ...] = (
    _evicted,
    _other_namespace,
    _below_one_page,
)
