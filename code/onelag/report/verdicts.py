"""Claim → "holds", "does not hold" or "undecided", decided by confidence intervals over paired seeds and nothing else.

A claim is a contrast of losses that must lie above a threshold. It holds when the whole interval does, does not hold when the whole interval lies below,
and is undecided at this n otherwise. The headline claims are few and were fixed before the runs (after a one-seed trial); the rows that repeat one question for every optimizer
carry Holm's correction. A diverged run counts as infinitely bad (see `statistics.contrast`) and is counted in the open. Thresholds are choices of ours.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from onelag.report import summary
from onelag.report.statistics import Estimate, contrast, holm
from onelag.report.study import CORRECTED, DELAYED, HEADLINE, SYNC, Study, label

SMALL_GAP = 0.05  # nats: perplexity up by 5 %
NO_HARM = 0.01  # nats: perplexity up by 1 %
MOST = 0.5  # of a gap
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Verdict:
    """What the results say about one claim.

    Attributes:
        key: stable name within (experiment, tier, protocol), e.g. "adamw-degrades".
        claim: the sentence.
        headline: one of the few claims fixed beforehand, as against a row of the per-optimizer lists.
        verdict: "holds", "does not hold" or "undecided".
        n: seeds behind it.
        quantity: what value, low, high are; unit: theirs.
        p: of the contrast that decides (two-sided, the claim's threshold as null), after Holm where it is one row of several; nan for n < 2.
        diverged: "optimizer mode" → number of diverged seeds, of the cells it rests on.
        note: what a reader must know, or empty.
    """

    tier: str
    experiment: str
    protocol: str
    key: str
    claim: str
    headline: bool
    verdict: str
    n: int
    quantity: str
    value: float
    low: float
    high: float
    unit: str
    p: float
    diverged: dict[str, int]
    note: str = ""

    @property
    def words(self) -> str:
        """The verdict as printed: "undecided at n = 3"."""
        return f"{self.verdict} at n = {self.n}" if self.verdict == UNDECIDED else self.verdict

    @property
    def number(self) -> str:
        """The quantity with its interval, as printed."""
        if self.n == 0:
            return "no results yet"
        share = self.unit == "share"
        show = (lambda x: f"{100 * x:.0f} %".replace("-", "−")) if share else (lambda x: f"{x:+.4f}".replace("-", "−"))
        value = "∞" if self.value == math.inf else "−∞" if self.value == -math.inf else "–" if math.isnan(self.value) else show(self.value)
        ends = [show(end) if math.isfinite(end) else ("∞" if end > 0 else "−∞") for end in (self.low, self.high)]
        interval = f"[{ends[0]}, {ends[1]}]" if any(math.isfinite(end) for end in (self.low, self.high)) else "no bounded interval"
        return f"{value}{'' if share else ' nats'}, {interval}"

    def __str__(self) -> str:
        counts = ", ".join(f"{cell}: {count}" for cell, count in self.diverged.items())
        tail = (f"; diverged seeds: {counts}" if counts else "") + (f"; {self.note}" if self.note else "")
        return f"({self.protocol}) {self.claim}: {self.words} (n = {self.n}; {self.quantity} {self.number}{tail})"


def verdicts(study: Study) -> list[Verdict]:
    """Every verdict of a study, protocol by protocol: the headline claims (also where results are missing: n = 0), then one list per question."""
    found = []
    for protocol in study.protocols:
        judge = _Judge(study, protocol)
        found += judge.degradation()
        if CORRECTED in study.modes:
            found += judge.correction()
    return found


def to_json(found: Iterable[Verdict]) -> list[dict[str, Any]]:
    """Plain JSON values; floats that are not finite become words, since JSON has none."""
    return [
        {key: repr(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in asdict(verdict).items()} for verdict in found
    ]


def from_json(rows: Iterable[dict[str, Any]]) -> list[Verdict]:
    """The inverse of `to_json`."""
    return [
        Verdict(**{key: float(v) if isinstance(v, str) and v in ("inf", "-inf", "nan") else v for key, v in row.items()}) for row in rows
    ]


Terms = dict[tuple[str, str], float]  # (optimizer, mode) → weight of its loss


class _Judge:
    """One protocol of one study."""

    def __init__(self, study: Study, protocol: str):
        self.study, self.protocol = study, protocol

    def degradation(self) -> list[Verdict]:
        adamw, muon = _gap("adamw"), _gap("muon")
        delayed = "under a one-step gradient delay"
        headline = [
            self._above("adamw-degrades", f"AdamW degrades {delayed}", adamw, 0.0, "gap", True),
            self._above("muon-degrades-less", "Muon degrades less than AdamW", _less(adamw, muon), 0.0, "AdamW's gap − Muon's", True),
            self._below("muon-gap-small", f"Muon's gap is small (below {SMALL_GAP} nats; our threshold)", muon, SMALL_GAP, "gap", True),
            self._above(
                "muon-gap-quarter",
                "Muon's gap is less than a quarter of AdamW's (our threshold)",
                _less({cell: 0.25 * weight for cell, weight in adamw.items()}, muon),
                0.0,
                "a quarter of AdamW's gap − Muon's",
                True,
            ),
        ]
        others = [o for o in self.study.optimizers if o != "adamw"]
        return headline + _with_holm([self._above(f"{o}-degrades", f"{label(o)} degrades {delayed}", _gap(o), 0.0, "gap") for o in others])

    def correction(self) -> list[Verdict]:
        harm = [
            self._below(
                f"{o}-not-hurt",
                f"The correction does not cost {label(o)} more than {NO_HARM} nats (our margin)",
                {(o, CORRECTED): 1.0, (o, DELAYED): -1.0},
                NO_HARM,
                "corrected − delayed",
            )
            for o in self.study.optimizers
        ]
        others = [o for o in self.study.optimizers if o not in HEADLINE]
        headline = [*(self._recovery(o, True) for o in HEADLINE), _never_hurts(harm)]
        return headline + _with_holm([self._recovery(o, False) for o in others]) + _with_holm(harm)

    def _recovery(self, optimizer: str, headline: bool) -> Verdict:
        """More than half of the gap: delayed / 2 − corrected + sync / 2 must be positive, which for a sure gap is what Fieller's interval says of the share."""
        half = {(optimizer, DELAYED): MOST, (optimizer, CORRECTED): -1.0, (optimizer, SYNC): 1 - MOST}
        claim = f"The correction closes most (> {100 * MOST:.0f} %) of {label(optimizer)}'s gap"
        verdict = self._above(f"{optimizer}-recovered", claim, half, 0.0, "share recovered", headline)
        share = summary.share(self.study, self.protocol, optimizer)
        shown = {"value": share.value, "low": share.low, "high": share.high, "unit": "share", "note": share.note}
        if not self._contrast(_gap(optimizer)).low > 0:
            shown |= {"verdict": UNDECIDED, "note": share.note or "the gap cannot be told from zero"}
        return replace(verdict, **shown)

    def _above(self, key: str, claim: str, terms: Terms, threshold: float, quantity: str, headline: bool = False) -> Verdict:
        estimate = self._contrast(terms)
        return self._verdict(key, claim, terms, estimate, decide(estimate, threshold), threshold, quantity, headline)

    def _below(self, key: str, claim: str, terms: Terms, threshold: float, quantity: str, headline: bool = False) -> Verdict:
        estimate = self._contrast(terms)
        mirrored = replace(estimate, value=-estimate.value, low=-estimate.high, high=-estimate.low)
        return self._verdict(key, claim, terms, estimate, decide(mirrored, -threshold), threshold, quantity, headline)

    def _contrast(self, terms: Terms) -> Estimate:
        return contrast(list(zip(terms.values(), self.study.paired(self.protocol, *terms))), self.study.uniform_loss)

    def _verdict(
        self, key: str, claim: str, terms: Terms, estimate: Estimate, verdict: str, threshold: float, quantity: str, headline: bool
    ) -> Verdict:
        counts = {}
        for optimizer, mode in terms:
            gone = sum(row.result.diverged for row in self.study.cell(self.protocol, optimizer, mode))
            if gone:
                counts[f"{label(optimizer)} {mode}"] = gone
        return Verdict(
            tier=self.study.tier,
            experiment=self.study.experiment,
            protocol=self.protocol,
            key=key,
            claim=claim,
            headline=headline,
            verdict=verdict,
            n=estimate.n,
            quantity=quantity,
            value=estimate.value,
            low=estimate.low,
            high=estimate.high,
            unit="nats",
            p=estimate.p_against(threshold),
            diverged=counts,
        )


def decide(estimate: Estimate, threshold: float) -> str:
    """Is the mean above the threshold? Only an interval that lies wholly on one side decides."""
    if estimate.n >= 2 and estimate.low > threshold:
        return HOLDS
    if estimate.n >= 2 and estimate.high <= threshold:
        return FAILS
    return UNDECIDED


def _gap(optimizer: str) -> Terms:
    return {(optimizer, DELAYED): 1.0, (optimizer, SYNC): -1.0}


def _less(a: Terms, b: Terms) -> Terms:
    return a | {cell: -weight for cell, weight in b.items()}


def _with_holm(rows: list[Verdict]) -> list[Verdict]:
    """Adjusts the p-values of one family; a row that no longer reaches 5 % is undecided. An interval of no width (bitwise equal runs) needs no test."""
    adjusted = holm([row.p for row in rows])
    return [
        replace(row, p=p, verdict=row.verdict if p < 0.05 or math.isnan(p) or row.low == row.high else UNDECIDED)
        for row, p in zip(rows, adjusted)
    ]


def _never_hurts(harm: list[Verdict]) -> Verdict:
    """Holds when it holds for every optimizer (an intersection needs no adjustment); fails when one is surely hurt, after Holm (a union does)."""
    hurt = [row for row in _with_holm(harm) if row.verdict == FAILS]
    worst = max(hurt or harm, key=lambda row: (row.high, row.value))
    name = worst.key.removesuffix("-not-hurt")
    note = f"over {len(harm)} optimizer{'s' if len(harm) > 1 else ''}, " + (
        f"it costs {', '.join(label(row.key.removesuffix('-not-hurt')) for row in hurt)} more"
        if hurt
        else f"shown: {label(name)}, whose interval reaches highest"
    )
    return replace(
        worst,
        key="correction-never-hurts",
        claim=f"The correction never costs more than {NO_HARM} nats, whatever the optimizer (our margin)",
        headline=True,
        verdict=FAILS if hurt else HOLDS if all(row.verdict == HOLDS for row in harm) else UNDECIDED,
        n=min(row.n for row in harm),
        diverged={cell: count for row in harm for cell, count in row.diverged.items()},
        note=note,
    )
