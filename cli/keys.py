"""`baton key`: makes API keys for the router's file of keys."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

import click

from baton.errors import BatonError, Reason
from cli.parameters import check_utf8
from router.keys import LIMIT_MAX, RANDOM_BYTES, new_key, parse_keys

_LIMIT: Final = click.IntRange(1, LIMIT_MAX)
SALT_BYTES: Final = 16


@click.command()
@click.argument("action", type=click.Choice(("new",)))
@click.option("--name", required=True, help="What logs and metrics call the key; unique in its file.")
@click.option("--concurrency", type=_LIMIT, metavar="N", help="Answers at the same time.  [default: no limit]")
@click.option("--requests-per-minute", type=_LIMIT, metavar="N", help="Calls a minute.  [default: no limit]")
@click.option(
    "--tokens-per-minute", type=_LIMIT, metavar="N", help="Tokens of prompts and answers a minute.  [default: no limit]"
)
@click.option(
    "--priority", type=click.Choice(("high", "normal", "low")), default="normal", show_default=True,
    help="Who goes first where requests wait.",
)  # fmt: skip
@click.option(
    "--cache-salt", metavar="TEXT", help="Share cached prefixes with keys of the same salt.  [default: a random one]"
)
@click.option("--shared-cache", is_flag=True, help="Share cached prefixes with all keys that have no salt.")
@click.option("--special-tokens", is_flag=True, help="Special tokens in the contents of its chats are tokens.")
@click.option("--into", type=click.Path(path_type=Path), metavar="FILE.toml", help="Append the entry to this file.")
def key(
    action: str,
    name: str,
    concurrency: int | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    priority: str,
    cache_salt: str | None,
    shared_cache: bool,
    special_tokens: bool,
    into: Path | None,
) -> None:
    """Make an API key: print it, this once, and its entry for the file that the router's api_keys_file names.

    The entry has the key's SHA-256, not the key. Routers take a changed file within seconds. With --into the entry goes
    there and the key alone is printed.

    \b
    Example:
      baton key new --name team-a --concurrency 32 --tokens-per-minute 200000 --into keys.toml > team-a.key
    """
    assert action == "new"
    if shared_cache and cache_salt is not None:
        raise click.UsageError("--shared-cache and --cache-salt exclude each other.")
    for what, text in (("--name", name), ("--cache-salt", cache_salt)):
        check_utf8(text or "", what)
    entry: dict[str, str | int | bool | None] = {
        "name": name,
        "concurrency": concurrency,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "priority": priority,
        "cache_salt": None if shared_cache else cache_salt or secrets.token_urlsafe(SALT_BYTES),
        "special_tokens": special_tokens,
    }
    given = {field: value for field, value in entry.items() if value is not None}
    made, text = new_key(secrets.token_urlsafe(RANDOM_BYTES), given)
    if into is None:
        click.echo(f"{made}\n\n{text}", nl=False)
        return
    try:
        before = into.read_bytes() if into.exists() else b""
        added = f"\n{text}".encode()
        parse_keys(before + added, source=str(into))
        with into.open("ab") as file:
            file.write(added)
    except OSError as error:
        raise BatonError(Reason.BAD_CONFIG, f"{into} cannot be written: {error.strerror}.") from error
    click.echo(made)
