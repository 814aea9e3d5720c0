"""`lowpeak plan`: the memory of a run before it starts, and with --fit the settings that make it fit."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowpeak.cli.job_files import write_run_files
from lowpeak.cli.output import print_once
from lowpeak.cli.plan_request import (
    PLANNED_FOLDER,
    PlanArguments,
    gpus_of,
    machine_of,
    parse_plan,
    plan_request,
    total_hourly_price,
    training_devices,
)
from lowpeak.cli.train import Job
from lowpeak.errors import ArgumentError

if TYPE_CHECKING:
    from lowpeak.plan import Plan, PlanRequest


def run_plan(argv: Sequence[str]) -> int:
    """Plan a run and print the plan; return 0 if it fits, 1 if it does not."""
    from lowpeak.plan import budget_of

    options, job = parse_plan(argv)
    if options.prices is not None:
        return _print_quotes(options, job)
    request = plan_request(options, job, machine_of(options, job))
    plan = (
        _fitted(options, job, _within_budget(request, budget_of(request)))
        if options.fit
        else _print_plan(options, job, request)
    )
    if plan is not None and options.plot is not None:
        from lowpeak.plan import write_plot

        Path(options.plot).parent.mkdir(parents=True, exist_ok=True)
        write_plot(plan, Path(options.plot))
    return 0 if plan is not None and plan.fits else 1


def _print_quotes(options: PlanArguments, job: Job) -> int:
    """Print hours and dollars of the run on each priced card, and keep the cheapest for the run's report; 1 if none fits."""
    from lowpeak.cli.prices import quote_cards, quote_lines, read_prices, write_quote
    from lowpeak.plan import Search, budget_of

    def plan_on(card: str) -> Plan | None:
        request = plan_request(options, job, machine_of(dataclasses.replace(options, gpu=card), job))
        if not options.fit:
            return plan_within_budget(request, _progress)[0]
        keeps_strategy = job.launch.accelerate_config is not None
        return Search(_within_budget(request, budget_of(request)), _progress, keeps_strategy=keeps_strategy).run().plan

    num_gpus = training_devices(options, job) + len(gpus_of(job.given, "vllm_devices"))
    quotes, without = quote_cards(read_prices(options.prices or ""), num_gpus, plan_on)
    _progress("")
    if options.format == "json":
        print(json.dumps({"quotes": [quote.as_dict() for quote in quotes], "without": without}, indent=2))
    else:
        print("\n".join(quote_lines(quotes, without)))
    if not quotes or not quotes[0].plan.fits:
        return 1
    if job.given["output_dir"] != PLANNED_FOLDER:
        write_quote(Path(job.config.output_dir), quotes[0])
    return 0


def _within_budget(request: PlanRequest, budget: int | None) -> PlanRequest:
    """Return the request for a device with no more memory than the run's memory_budget."""
    if budget is None:
        return request
    machine = dataclasses.replace(request.machine, memory=budget, device_memory=request.machine.total)
    return dataclasses.replace(request, machine=machine)


def plan_within_budget(request: PlanRequest, report: Callable[[str], object] = lambda text: None) -> tuple[Plan, str]:
    """Return the plan of a run, and why it exceeds its memory_budget.

    With a memory_budget the plan has the sizes that keep to it, and the budget as the device's memory.
    """
    from lowpeak.plan import budget_of, fit_sizes, make_plan

    budget = budget_of(request)
    if budget is None:
        return make_plan(request, report), ""
    fit = fit_sizes(request, budget, report=report)
    return dataclasses.replace(fit.plan, request=_within_budget(fit.plan.request, budget)), fit.problem


def _print_plan(options: PlanArguments, job: Job, request: PlanRequest) -> Plan:
    """Print a run's plan with its settings, and the changes that would lower its peak."""
    from lowpeak.plan import advise, print_plan

    plan, problem = plan_within_budget(request, _progress)
    if options.journal is not None:
        plan = plan.calibrated(_calibration(options.journal, plan))
    advice = advise(plan)
    _progress("")
    if problem:
        print_once(problem)
    if options.format == "json":
        advised = {"advice": [dataclasses.asdict(each) for each in advice]}
        print(json.dumps({**_plan_document(options, job, plan), **advised}, indent=2))
    else:
        print_plan(plan, advice, hourly_price=total_hourly_price(options, job))
    return plan


def _plan_document(options: PlanArguments, job: Job, plan: Plan) -> dict[str, Any]:
    machine = {"gpu": options.gpu, "price_per_hour": options.price_per_hour}
    return {**machine, **plan.as_dict(total_hourly_price(options, job))}


def _fitted(options: PlanArguments, job: Job, request: PlanRequest) -> Plan | None:
    """Choose settings that fit, print the choice, and write the files of the run."""
    from lowpeak.plan import Search, fit_lines, make_plan

    factors = None if options.journal is None else _calibration(options.journal, make_plan(request, _progress))
    keeps_strategy = job.launch.accelerate_config is not None
    fit = Search(request, _progress, factors, keeps_strategy=keeps_strategy).run()
    _progress("")
    if options.format == "json":
        plan = _plan_document(options, job, fit.plan) if fit.plan else {}
        print(json.dumps({**plan, "fit": fit.as_dict()}, indent=2))
    else:
        print("\n".join(fit_lines(fit, total_hourly_price(options, job))))
    if fit.plan is not None:
        for path in write_run_files(Path(options.output), job, fit, options.emit):
            print(f"wrote {path}", file=sys.stderr)
    return fit.plan


def _calibration(journal: str, plan: Plan) -> Mapping[str, float]:
    """Return measured over planned seconds by phase, of a run with a quote; of another one, as if it had this plan."""
    from lowpeak.cli.prices import read_quoted_seconds
    from lowpeak.journal import read_steps
    from lowpeak.plan import calibration

    rows = read_steps(Path(journal) / "journal")
    if not rows:
        raise ArgumentError(f"--journal {journal} has no journal with steps: name the output_dir of a run.")
    quoted = read_quoted_seconds(Path(journal))
    if quoted is None:
        note = f"{journal} has no quote with seconds: its times are taken for those of this model, lengths and devices"
        print(f"plan: {note}; `lowpeak plan --prices` writes a quote before a run.", file=sys.stderr)
    return calibration(rows, quoted or plan.seconds)


def _progress(text: str) -> None:
    """Show the part that is under way in one line of a terminal, and as a line elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)
    elif text:
        print_once(f"plan: {text}")
