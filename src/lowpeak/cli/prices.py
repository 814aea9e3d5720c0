"""`lowpeak plan --prices`: hours and dollars of a run on each priced card, the cheapest first."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowpeak.arguments import load_yaml, show_bytes, show_seconds
from lowpeak.errors import ArgumentError

if TYPE_CHECKING:
    from lowpeak.plan import Plan

QUOTE_FILE = "quote.json"


@dataclass(frozen=True)
class Quote:
    """A run on one card: the plan, dollars per hour of all its GPUs, and (least, most) hours of its steps.

    The hours are a range over the shares of the card's data sheet that kernels and links may reach.
    """

    card: str
    plan: Plan
    hourly_price: float
    hours: tuple[float, float]

    @property
    def dollars(self) -> tuple[float, float]:
        return self.hours[0] * self.hourly_price, self.hours[1] * self.hourly_price

    def as_dict(self) -> dict[str, Any]:
        """Return the quote for JSON."""
        return {
            "gpu": self.card,
            "fits": self.plan.fits,
            "peak": self.plan.peak,
            "steps": self.plan.planned_steps,
            "seconds_per_step": dict(self.plan.seconds),
            "price_per_hour": self.hourly_price,
            "hours": list(self.hours),
            "dollars": list(self.dollars),
        }


def read_prices(text: str) -> dict[str, float]:
    """Return dollars per GPU hour by card, from `name=price,...` or a YAML file of the user's; ArgumentError for a wrong entry."""
    from lowpeak.plan import CARDS

    if Path(text).is_file():
        entries: list[tuple[Any, Any]] = list(load_yaml(text).items())
    else:
        entries = [_entry(part) for part in text.split(",")]
    prices: dict[str, float] = {}
    for name, price in entries:
        card = str(name).lower().replace("_", "-")
        if card in prices:
            raise ArgumentError(f"--prices names {card} twice: give one price for each card.")
        if card not in CARDS:
            raise ArgumentError(f"--prices names {name}, which is not in the table of cards: {', '.join(CARDS)}.")
        try:
            prices[card] = float(price)
        except (TypeError, ValueError):
            prices[card] = 0.0
        if not 0 < prices[card] < float("inf"):
            raise ArgumentError(f"--prices: {name} costs {price!r}, which is not dollars above 0.")
    return prices


def read_quoted_seconds(folder: Path) -> dict[str, float] | None:
    """Return the seconds of a step by phase that the quote of a run planned; None without them, or for a damaged file."""
    try:
        seconds = json.loads((folder / QUOTE_FILE).read_text(encoding="utf-8"))["seconds_per_step"]
        return {phase: float(value) for phase, value in seconds.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def _entry(text: str) -> tuple[str, str]:
    name, separator, price = text.partition("=")
    if not separator:
        raise ArgumentError(f"--prices {text!r} is neither a file nor name=price, such as h100=2.50.")
    return name.strip(), price.strip()


def quote_cards(
    prices: Mapping[str, float], num_gpus: int, plan_on: Callable[[str], Plan | None]
) -> tuple[list[Quote], list[str]]:
    """Return the quotes of cards with a plan, the cheapest that fits first, and the other cards."""
    from lowpeak.plan import seconds_range

    quotes, without = [], []
    for card, price in prices.items():
        plan = plan_on(card)
        if plan is None:
            without.append(card)
            continue
        least, most = seconds_range(plan.work, plan.request.machine)
        hours = (plan.planned_steps * least / 3600, plan.planned_steps * most / 3600)
        quotes.append(Quote(card, plan, num_gpus * price, hours))
    return sorted(quotes, key=lambda quote: (not quote.plan.fits, quote.dollars)), without


def quote_lines(quotes: Sequence[Quote], without: Sequence[str]) -> list[str]:
    """Return a line for each card: hours and dollars, or why the run does not fit."""
    lines = []
    for number, quote in enumerate(quotes):
        machine = quote.plan.request.machine
        where = f"{machine.num_devices} x {quote.card}"
        if not quote.plan.fits:
            lines.append(f"{where}: does not fit: {show_bytes(quote.plan.peak)} of {show_bytes(machine.memory)}.")
            continue
        fast, slow = (show_seconds(3600 * hours) for hours in quote.hours)
        least, most = quote.dollars
        words = f"{where}: {fast} to {slow} for {quote.plan.planned_steps:,} steps, ${least:,.2f} to ${most:,.2f}"
        lines.append(f"{words}{', the cheapest' if number == 0 else ''}.")
    return lines + [f"{card}: no setting fits." for card in without]


def write_quote(folder: Path, quote: Quote) -> None:
    """Write the quote into the run's folder, for its report."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / QUOTE_FILE).write_text(json.dumps(quote.as_dict(), indent=2) + "\n", encoding="utf-8")
