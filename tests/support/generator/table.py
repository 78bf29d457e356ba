"""The outcomes of many networks as a table: shares, reasons, and the words that fail most often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from generator.check import EXACT, FOREIGN, REFUSED, WRONG, Outcome
from generator.shrink import kind

VERDICTS = (EXACT, REFUSED, WRONG, FOREIGN)


def share(outcomes: Sequence[Outcome], verdict: str) -> float:
    return sum(one.verdict == verdict for one in outcomes) / max(len(outcomes), 1)


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [f"{len(outcomes)} networks"]
    counts = Counter(one.verdict for one in outcomes)
    lines += [f"{verdict:8} {counts[verdict]:6} {share(outcomes, verdict):7.2%}" for verdict in VERDICTS]
    for verdict in VERDICTS[1:]:
        reasons = Counter(kind(one.reason) for one in outcomes if one.verdict == verdict)
        first = {kind(one.reason): one.seed for one in reversed(outcomes) if one.verdict == verdict}
        lines += ["", f"{verdict}:"] if reasons else []
        lines += [f"{count:6}  {reason}  (seed {first[reason]})" for reason, count in reasons.most_common()]
    noted = Counter(note for one in outcomes for note in one.notes)
    where = {note: one.seed for one in reversed(outcomes) for note in one.notes}
    lines += ["", "seen in exact ones:"] if noted else []
    lines += [f"{count:6}  {note}  (seed {where[note]})" for note, count in noted.most_common()]
    return "\n".join(lines) + "\n"


def by_word(outcomes: Sequence[Outcome]) -> str:
    """For each word of the vocabulary, how many networks contain it and their outcomes, worst first."""
    counts: dict[str, Counter[str]] = {}
    for one in outcomes:
        for name in one.words:
            counts.setdefault(name, Counter())[one.verdict] += 1
    rows = sorted(counts.items(), key=lambda row: row[1][EXACT] / row[1].total())
    lines = [f"{'word':28} networks  " + "  ".join(f"{verdict:>8}" for verdict in VERDICTS)]
    for name, found in rows:
        shares = "  ".join(f"{found[verdict] / found.total():8.1%}" for verdict in VERDICTS)
        lines.append(f"{name:28} {found.total():8}  {shares}")
    return "\n".join(lines) + "\n"
