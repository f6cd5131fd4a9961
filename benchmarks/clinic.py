"""Does the clinic name what is wrong, accuse nobody who is healthy, and promise what is true?

    python -m benchmarks.clinic [--half seen|unseen] [--seeds 15] [--mended 15] [--show KIND]

Every kind of workload is made from each seed, rendered with the bundled model's chat template and
tokenizer, and diagnosed. Confusion: the finding with the largest saving against the kind. Savings:
tokens that the finding promises against those saved when the mended workload is run.

Odd seeds were looked at while the clinic was built, even ones were not.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.clinic_workloads import BROKEN, HEALTHY, Ask, Draw, Workload
from benchmarks.common import RESULTS, machine
from engine.models import LoadedModel, decode, load_model
from tiercache.keys import fingerprint
from tiercache.replay.clinic import ClinicSettings, Diagnosis, LoggedRequest, diagnose
from tiercache.settings import TierLimits
from tiercache.types import Tier, Tokens

NOTHING = "nothing"


def run(model: LoadedModel, asks: Sequence[Ask], page_tokens: int, device_tokens: int) -> Diagnosis:
    requests = [
        LoggedRequest(
            fingerprint({"salt": ask.salt}),
            rendered(model, ask),
            ask.at_seconds,
        )
        for ask in asks
    ]
    pages = device_tokens // page_tokens
    settings = ClinicSettings(
        page_tokens,
        {Tier.DEVICE: TierLimits(pages, pages, policy="auto")},
    )
    return diagnose(
        requests,
        settings,
        lambda tokens: decode(model, tokens),
        show_text=True,
        index_bytes=8 << 20,
    )


def rendered(model: LoadedModel, ask: Ask) -> Tokens:
    """The prompt of a request, as `render_chat` makes it: turns that came before are not encoded
    again. Markers of turns part what is encoded, so the pieces can be joined."""
    text = model.tokenizer.apply_chat_template(
        ask.messages, tokenize=False, add_generation_prompt=True
    )
    pieces = re.split(r"(?=<\|im_start\|>)", str(text))
    return np.concatenate([_encoded(model.tokenizer, piece) for piece in pieces if piece])


@functools.lru_cache(4096)
def _encoded(tokenizer: Any, piece: str) -> Tokens:
    return np.array(tokenizer.encode(piece, add_special_tokens=False), np.int32)


def diagnosed(model: LoadedModel, work: Workload) -> Diagnosis:
    return run(model, work.broken, work.page_tokens, work.device_tokens)


def repaired(model: LoadedModel, work: Workload) -> Diagnosis | None:
    if work.fixed is None and work.fixed_device_tokens is None:
        return None
    asks = work.fixed if work.fixed is not None else work.broken
    return run(model, asks, work.page_tokens, work.fixed_device_tokens or work.device_tokens)


def measure(
    model: LoadedModel, seeds: Sequence[int], mended_seeds: Sequence[int], show: str | None
) -> dict[str, Any]:
    table: dict[str, Counter[str]] = {}
    savings: dict[str, list[tuple[int, int]]] = defaultdict(list)
    wrong: list[str] = []
    for kind, (make, names) in BROKEN.items():
        table[kind] = Counter()
        for seed in seeds:
            if show not in (None, kind):
                continue
            work = make(Draw(kind, seed))
            found = diagnosed(model, work)
            first = found.report.findings[0].kind if found.report.findings else NOTHING
            table[kind][first] += 1
            if first not in names:
                wrong.append(f"{kind} {seed}: {first}")
            mended = repaired(model, work) if seed in mended_seeds else None
            if mended is not None and first in names:
                saved = found.report.missed_tokens - mended.report.missed_tokens
                savings[kind].append((found.report.findings[0].saved_tokens, saved))
            if show == kind:
                _show(seed, found)
    for kind, healthy in HEALTHY.items():
        table[kind] = Counter()
        for seed in seeds:
            if show not in (None, kind):
                continue
            found = diagnosed(model, healthy(Draw(kind, seed)))
            first = found.report.findings[0].kind if found.report.findings else NOTHING
            table[kind][first] += 1
            if first != NOTHING:
                wrong.append(f"{kind} {seed}: {first}")
            if show == kind:
                _show(seed, found)
    return {
        "confusion": {kind: dict(row) for kind, row in table.items() if row},
        "named_rightly": _share_right(table),
        "healthy_accused": sum(
            n for kind in HEALTHY for label, n in table[kind].items() if label != NOTHING
        ),
        "savings": {kind: _savings(pairs) for kind, pairs in savings.items() if pairs},
        "wrong": wrong,
    }


def _share_right(table: dict[str, Counter[str]]) -> float:
    right = sum(
        n for kind, (_, names) in BROKEN.items() for x, n in table[kind].items() if x in names
    )
    return right / max(1, sum(table[kind].total() for kind in BROKEN))


def _savings(pairs: list[tuple[int, int]]) -> dict[str, Any]:
    """Promised against true, summed over seeds and seed by seed."""
    errors = [abs(promised - true) / true for promised, true in pairs if true > 0]
    promised, true = (sum(column) for column in zip(*pairs, strict=True))
    return {
        "promised_tokens": promised,
        "true_tokens": true,
        "error": round(promised / true - 1, 4) if true else None,
        "median_error_of_a_seed": round(statistics.median(errors), 4) if errors else None,
        "largest_error_of_a_seed": round(max(errors), 4) if errors else None,
    }


def _show(seed: int, found: Diagnosis) -> None:
    print(f"seed {seed}")
    for finding in found.report.findings:
        print("  ", finding.kind, finding.text)
        print("     ", finding.examples[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=("seen", "unseen"), default="seen")
    parser.add_argument("--seeds", type=int, default=15, help="seeds of that half, for each kind")
    parser.add_argument("--mended", type=int, default=15, help="how many are mended and run again")
    parser.add_argument("--show", help="print the findings of this kind alone")
    asked = parser.parse_args()
    first = 1 if asked.half == "seen" else 2
    seeds = [first + 2 * index for index in range(asked.seeds)]
    model = load_model("bundled")
    result = {"half": asked.half, "seeds": seeds, "machine": machine()}
    result |= measure(model, seeds, seeds[: asked.mended], asked.show)
    print(json.dumps({k: v for k, v in result.items() if k != "machine"}, indent=1))
    if asked.half == "unseen" and asked.show is None:
        RESULTS.joinpath("clinic.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
