"""`baton doctor`: whether RDMA works on this machine, what is missing, and what to do; and what there is of UCX."""

from __future__ import annotations

import click

from cli.invocation import EXIT_ERROR
from cli.output import JSON, format_table, output_option, print_json
from cli.transport_checks import Finding, Machine, Verdict, check_rdma, check_ucx, works
from kvtransfer.transports.settings import UcxConfig


@click.command()
@click.option(
    "--region-bytes", type=click.IntRange(min=0), default=0, show_default=True, metavar="BYTES",
    help="Size of the KV region that is to be registered; 0: not known yet.",
)  # fmt: skip
@click.option("--device", default="", metavar="NAME", help="Ask for this device, such as mlx5_0:1. [default: any]")
@output_option
def doctor(region_bytes: int, device: str, output: str) -> int:
    """Tell whether RDMA works on this machine.

    Each line is one thing that nodes need for the transport rdma, with what to do where it is missing. Ends with 0 if
    RDMA works for a process like this one, else with 1; nodes then use the next best transport. The line "ucx" is about
    the transport of that name, which needs none of the others.

    \b
    Example:
      baton doctor --region-bytes 8000000000
    """
    findings = check_rdma(Machine(), region_bytes=region_bytes, wanted=device)
    ready = works(findings)
    findings.append(check_ucx(UcxConfig().tls))
    if output == JSON:
        print_json({"rdma": ready, "findings": [_data(finding) for finding in findings]})
    else:
        click.echo(_text(findings, ready))
    return 0 if ready else EXIT_ERROR


def _data(finding: Finding) -> dict[str, str]:
    return {"what": finding.what, "verdict": finding.verdict.value, "text": finding.text, "todo": finding.todo}


def _text(findings: list[Finding], ready: bool) -> str:
    rows = [(finding.what, finding.verdict.value, finding.text) for finding in findings]
    lines = [format_table(("CHECK", "VERDICT", "FOUND"), rows), ""]
    lines += [f"To do ({finding.what}): {finding.todo}" for finding in findings if finding.todo]
    slower = any(finding.verdict is Verdict.SLOWER for finding in findings)
    lines.append(
        f"RDMA works here{', though not at its best' if slower else ''}." if ready else "RDMA does not work here."
    )
    return "\n".join(lines)
