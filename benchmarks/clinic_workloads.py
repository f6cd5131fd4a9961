"""Workloads for the clinic: deliberately broken ones, each with its repair, and healthy ones.

A seed draws position, length, format, locale and all the text around. `broken` is what a careless
client sends; `fixed` is the same work with the one thing mended.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.clinic_text import LOCALES, Writer, day, stamp, time_formats

BEGIN_SECONDS = 1_790_000_000
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: messages, when, and under which salt."""

    messages: list[Message]
    at_seconds: float
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """`fixed` is None where the repair is not one of the requests (a larger tier, smaller pages:
    `fixed_device_tokens`) or where nothing is broken."""

    broken: list[Ask]
    fixed: list[Ask] | None = None
    page_tokens: int = 16
    device_tokens: int = 4_000_000
    fixed_device_tokens: int | None = None


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Draw:
    """What all kinds draw alike: how many requests, when, and the long text they share."""

    def __init__(self, kind: str, seed: int, requests: int | None = None) -> None:
        self.rng = random.Random(f"{kind} {seed}")
        self.write = Writer(self.rng)
        drawn = self.rng.randint(14, 30)
        self.count = requests or drawn
        self.shared = self.write.text(self.rng.randint(250, 900))
        self.locale = self.rng.choice(LOCALES)
        self._now = float(BEGIN_SECONDS + self.rng.randint(0, 10_000_000))

    def now(self) -> float:
        """The time of the next request."""
        self._now += self.rng.uniform(3, 240)
        return self._now

    def question(self) -> str:
        return self.write.text(self.rng.randint(8, 40))


def _with_line(draw: Draw, lines: list[str], label: str) -> Workload:
    """One line that is different in each request, somewhere before the shared text; mended, it
    stands at the end of the question."""
    place = draw.rng.choice(("head", "after_some", "user"))
    head = draw.write.text(draw.rng.randint(10, 60))
    broken, fixed = [], []
    for line in lines:
        at, question = draw.now(), draw.question()
        text = f"{label}{line}"
        if place == "head":
            messages = [system(f"{text}\n{draw.shared}"), user(question)]
            mended = [system(draw.shared), user(f"{question}\n{text}")]
        elif place == "after_some":
            messages = [system(f"{head}\n{text}\n{draw.shared}"), user(question)]
            mended = [system(f"{head}\n{draw.shared}"), user(f"{question}\n{text}")]
        else:
            messages = [system(head), user(f"{text}\n{draw.shared}\n{question}")]
            mended = [system(head), user(f"{draw.shared}\n{question}\n{text}")]
        broken.append(Ask(messages, at))
        fixed.append(Ask(mended, at))
    return Workload(broken, fixed)


def time_stamp(draw: Draw) -> Workload:
    form = draw.rng.choice(time_formats())
    label = draw.rng.choice(("Current time: ", "Now: ", "[", "Timestamp ", "It is "))
    at = float(BEGIN_SECONDS + draw.rng.randint(0, 10_000_000))
    lines = []
    for _ in range(draw.count):
        at += draw.rng.uniform(61, 900)
        lines.append(stamp(form, draw.locale, at) + ("]" if label == "[" else ""))
    return _with_line(draw, lines, label)


def date(draw: Draw) -> Workload:
    at = float(BEGIN_SECONDS + draw.rng.randint(0, 10_000_000))
    numeric = draw.rng.random() < 0.4
    lines = []
    for _ in range(draw.count):
        at += 86_400 * draw.rng.randint(1, 3)
        lines.append(stamp("iso", draw.locale, at)[:10] if numeric else day(draw.locale, at))
    return _with_line(draw, lines, draw.rng.choice(("Today is ", "Date: ", "As of ")))


def uuid_line(draw: Draw) -> Workload:
    lines = [draw.write.uuid() for _ in range(draw.count)]
    return _with_line(draw, lines, draw.rng.choice(("Request id: ", "trace=", "Session ", "#")))


def counter(draw: Draw) -> Workload:
    first, step = draw.rng.randint(1, 50_000), draw.rng.choice((1, 1, 1, 7))
    lines = [str(first + step * index) for index in range(draw.count)]
    return _with_line(draw, lines, draw.rng.choice(("Request #", "Ticket ", "Turn number: ")))


def user_header(draw: Draw) -> Workload:
    names: list[str] = []
    while len(names) < draw.count // 2:
        name = draw.write.name()
        if name not in names:
            names.append(name)
    form = draw.rng.getstate()
    lines = []
    for name in draw.rng.choices(names, k=draw.count):
        now = draw.rng.getstate()
        draw.rng.setstate(form)  # one way of writing it
        lines.append(draw.write.header_of(name))
        draw.rng.setstate(now)
    return _with_line(draw, lines, "")


def build_hash(draw: Draw) -> Workload:
    length = draw.rng.choice((7, 8, 12, 40))
    stays = draw.rng.choice((1, 1, 2))
    lines: list[str] = []
    while len(lines) < draw.count:
        lines += [draw.write.hash(length)] * stays
    label = draw.rng.choice(("client-build: ", "Powered by agent/", "x-commit=", "Version 1.4+"))
    return _with_line(draw, lines[: draw.count], label)


def few_shot_shuffled(draw: Draw) -> Workload:
    head = draw.write.text(draw.rng.randint(30, 120))
    examples = [
        f"Example\nInput: {draw.write.text(draw.rng.randint(25, 90))}\n"
        f"Output: {draw.write.text(draw.rng.randint(20, 60))}"
        for _ in range(draw.rng.randint(4, 9))
    ]
    broken, fixed = [], []
    for _ in range(draw.count):
        at, question = draw.now(), draw.question()
        order = draw.rng.sample(examples, k=len(examples))
        for asks, parts in ((broken, order), (fixed, examples)):
            asks.append(Ask([system("\n\n".join([head, *parts])), user(question)], at))
    return Workload(broken, fixed)


def tools_re_rendered(draw: Draw) -> Workload:
    """Tool schemas before the instructions: tools or keys in another order, or other spacing."""
    way = draw.rng.choice(("tools", "keys", "spacing"))
    tools = [_tool(draw) for _ in range(draw.rng.randint(3, 8))]
    broken, fixed = [], []
    for _ in range(draw.count):
        at, question = draw.now(), draw.question()
        rendered = {
            "tools": lambda: json.dumps(draw.rng.sample(tools, k=len(tools)), indent=1),
            "keys": lambda: json.dumps(_shuffled(tools, draw.rng), indent=1),
            "spacing": lambda: json.dumps(tools, indent=draw.rng.choice((None, 1, 2, 4))),
        }[way]()
        for asks, text in ((broken, rendered), (fixed, json.dumps(tools, indent=1))):
            asks.append(Ask([system(f"Tools:\n{text}\n{draw.shared}"), user(question)], at))
    return Workload(broken, fixed)


def _tool(draw: Draw) -> dict[str, Any]:
    write = draw.write
    fields = {
        write.words(1): {"type": "string", "description": write.sentence()}
        for _ in range(draw.rng.randint(2, 5))
    }
    return {
        "name": write.words(2).replace(" ", "_"),
        "description": write.text(draw.rng.randint(10, 40)),
        "parameters": {"type": "object", "properties": fields, "required": list(fields)[:1]},
    }


def _shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        items = rng.sample(list(value.items()), k=len(value))
        return {key: _shuffled(item, rng) for key, item in items}
    if isinstance(value, list):
        return [_shuffled(item, rng) for item in value]
    return value


def _turns(draw: Draw, count: int) -> list[Message]:
    turns = []
    for _ in range(count):
        turns.append(user(draw.write.text(draw.rng.randint(50, 120))))
        turns.append(assistant(draw.write.text(draw.rng.randint(50, 140))))
    return turns


def sliding_window(draw: Draw) -> Workload:
    head = system(draw.write.text(draw.rng.randint(40, 200)))
    turns = _turns(draw, draw.count)
    kept = 2 * draw.rng.randint(3, 6)
    broken, fixed = [], []
    for stop in range(1, len(turns), 2):
        at = draw.now()
        history = turns[:stop]
        broken.append(Ask([head, *history[-kept - 1 :]], at))
        fixed.append(Ask([head, *history], at))
    return Workload(broken, fixed)


def template_rewrites(draw: Draw) -> Workload:
    """Earlier turns look different in each later prompt: labelled by age, or without the
    reasoning they had while they were new."""
    head = system(draw.write.text(draw.rng.randint(40, 200)))
    turns = _turns(draw, draw.count)
    thoughts = [draw.write.text(draw.rng.randint(30, 90)) for _ in turns]
    by_age = draw.rng.random() < 0.5
    fresh = 2 * draw.rng.randint(2, 4)
    broken, fixed = [], []
    for stop in range(1, len(turns), 2):
        at, history = draw.now(), turns[:stop]
        if by_age:
            shown = [
                turn | {"content": f"[{(stop - place + 1) // 2} turns ago] {turn['content']}"}
                for place, turn in enumerate(history)
            ]
            mended = history
        else:
            whole = [
                turn | {"content": f"<reasoning>{thoughts[place]}</reasoning>\n{turn['content']}"}
                if turn["role"] == "assistant"
                else turn
                for place, turn in enumerate(history)
            ]
            cut = max(0, stop - fresh)
            shown, mended = [*history[:cut], *whole[cut:]], whole
        broken.append(Ask([head, *shown], at))
        fixed.append(Ask([head, *mended], at))
    return Workload(broken, fixed)


def white_space(draw: Draw) -> Workload:
    """Blanks at the end of a line, or empty lines, that come and go."""
    head = draw.write.text(draw.rng.randint(10, 80))
    blank = draw.rng.choice((" ", "\n", "\t", " \n"))
    broken, fixed = [], []
    for _ in range(draw.count):
        at, question = draw.now(), draw.question()
        extra = blank * draw.rng.randint(0, 9)
        broken.append(Ask([system(f"{head}{extra}\n{draw.shared}"), user(question)], at))
        fixed.append(Ask([system(f"{head}\n{draw.shared}"), user(question)], at))
    return Workload(broken, fixed)


def two_tenants(draw: Draw) -> Workload:
    tenants = [f"tenant-{index}" for index in range(draw.rng.randint(2, 4))]
    broken, fixed = [], []
    for index in range(draw.count):
        at, messages = draw.now(), [system(draw.shared), user(draw.question())]
        broken.append(Ask(messages, at, tenants[index % len(tenants)]))
        fixed.append(Ask(messages, at))
    return Workload(broken, fixed)


def below_one_page(draw: Draw) -> Workload:
    page_tokens = draw.rng.choice((128, 256, 512))
    head = draw.write.text(page_tokens // 16)
    asks = [
        Ask([system(head), user(draw.write.text(draw.rng.randint(2, 8)))], draw.now())
        for _ in range(draw.count)
    ]
    return Workload(asks, None, page_tokens=page_tokens)


def working_set_too_big(draw: Draw) -> Workload:
    """Documents that are asked about in turn, one more than there is room for, and more."""
    documents = [draw.write.text(draw.rng.randint(300, 600)) for _ in range(8)]
    asks = [
        Ask([system(documents[index % 8]), user(draw.question())], draw.now())
        for index in range(4 * 8)
    ]
    room = draw.rng.randint(4_000, 6_000)
    return Workload(asks, None, device_tokens=room, fixed_device_tokens=4_000_000)


def shared_prompt(draw: Draw) -> Workload:
    return Workload(
        [Ask([system(draw.shared), user(draw.question())], draw.now()) for _ in range(draw.count)]
    )


def growing_chats(draw: Draw) -> Workload:
    """Several conversations side by side, each only ever continued."""
    head = system(draw.write.text(draw.rng.randint(40, 200)))
    chats = [_turns(draw, draw.count // 3) for _ in range(3)]
    asks = []
    for stop in range(1, len(chats[0]), 2):
        asks += [Ask([head, *turns[:stop]], draw.now()) for turns in chats]
    return Workload(asks)


def agent_loop(draw: Draw) -> Workload:
    """One task, one tool result after the other, each stamped with its time where it is added."""
    messages = [system(draw.shared), user(draw.question())]
    asks = []
    for _ in range(draw.count):
        at = draw.now()
        asks.append(Ask(list(messages), at))
        messages.append(assistant(f"call {draw.write.words(3)}"))
        result = draw.write.text(draw.rng.randint(40, 200))
        messages.append(user(f"[{stamp('iso', draw.locale, at)}] result: {result}"))
    return Workload(asks)


def unique_documents(draw: Draw) -> Workload:
    task = draw.write.text(20)
    return Workload(
        [
            Ask([user(f"{task}\n{draw.write.text(draw.rng.randint(200, 600))}")], draw.now())
            for _ in range(draw.count)
        ]
    )


def own_prompts(draw: Draw) -> Workload:
    """A few users, each with a long prompt of their own, who come again and again."""
    prompts = [draw.write.text(draw.rng.randint(200, 500)) for _ in range(4)]
    return Workload(
        [
            Ask([system(draw.rng.choice(prompts)), user(draw.question())], draw.now())
            for _ in range(max(20, draw.count))
        ]
    )


def time_at_the_end(draw: Draw) -> Workload:
    """The time of day where it belongs: behind everything that is shared."""
    form = draw.rng.choice(time_formats())
    asks = []
    for _ in range(draw.count):
        at = draw.now()
        text = f"{draw.question()}\n(now: {stamp(form, draw.locale, at)})"
        asks.append(Ask([system(draw.shared), user(text)], at))
    return Workload(asks)


def retrieved_passages(draw: Draw) -> Workload:
    """Each question comes with the passages found for it: they recur, ever in other company."""
    passages = [draw.write.text(draw.rng.randint(60, 140)) for _ in range(30)]
    asks = []
    for _ in range(draw.count):
        found = "\n\n".join(draw.rng.sample(passages, k=draw.rng.randint(3, 5)))
        messages = [system(draw.shared), user(f"{found}\n\n{draw.question()}")]
        asks.append(Ask(messages, draw.now()))
    return Workload(asks)


def quoted_text(draw: Draw) -> Workload:
    """People answer one another and quote a passage of what was said, among words of their own."""
    said = [draw.write.text(150)]
    asks = []
    for _ in range(draw.count):
        words = draw.rng.choice(said).split()
        begin = draw.rng.randint(0, max(0, len(words) - 60))
        quote = "> " + " ".join(words[begin : begin + 60])
        own = draw.write.text(draw.rng.randint(100, 250))
        said.append(own)
        text = f"{draw.question()}\n{quote}\n{own}"
        asks.append(Ask([system(draw.shared), user(text)], draw.now()))
    return Workload(asks)


BROKEN: dict[str, tuple[Callable[[Draw], Workload], frozenset[str]]] = {
    "time stamp": (time_stamp, frozenset({"time"})),
    "date": (date, frozenset({"date"})),
    "uuid": (uuid_line, frozenset({"uuid"})),
    "counter": (counter, frozenset({"counter"})),
    "user header": (user_header, frozenset({"name"})),
    "build hash": (build_hash, frozenset({"hash"})),
    "shuffled examples": (few_shot_shuffled, frozenset({"permutation"})),
    "re-rendered tools": (tools_re_rendered, frozenset({"permutation", "white_space"})),
    "sliding window": (sliding_window, frozenset({"truncated_history"})),
    "rewritten turns": (template_rewrites, frozenset({"re_rendered"})),
    "white space": (white_space, frozenset({"white_space"})),
    "two tenants": (two_tenants, frozenset({"other_namespace"})),
    "below one page": (below_one_page, frozenset({"partial_page"})),
    "working set": (working_set_too_big, frozenset({"evicted"})),
}
"""Kind → how it is made, and the findings that name it."""

HEALTHY: dict[str, Callable[[Draw], Workload]] = {
    "shared prompt": shared_prompt,
    "growing chats": growing_chats,
    "agent loop": agent_loop,
    "unique documents": unique_documents,
    "own prompts": own_prompts,
    "time at the end": time_at_the_end,
    "retrieved passages": retrieved_passages,
    "quoted text": quoted_text,
}
