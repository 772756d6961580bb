"""The explorations that are made: a small set with every test run, a large one on demand.

Bounded in every run are the handoffs that are asked for (two, over one block, whichever writer process asks) and the
crashes. Not bounded: losses, duplicates, delays and reorderings of control messages, messages in flight, timers, breaks
of connections, cancels by client, writer or receiver, Resolves, failed calls, revocations, fences.

`handoff-*` is the full bound: two crashes of either side. The other runs add what it leaves out, with fewer crashes.
"""

from __future__ import annotations

from dataclasses import replace

from tests.explorer.bounds import SAME_ATTEMPT, SAME_REQUEST, TWO_REQUESTS, Bounds, Profile

DEFAULT: dict[str, Bounds] = {
    # Two attempts at one request, two crashes.
    "handoff-shm": Bounds(profile=Profile.SHM, keys=SAME_REQUEST, crashes_max=2),
    "handoff-channel": Bounds(profile=Profile.CHANNEL, keys=SAME_REQUEST, crashes_max=2),
    "handoff-rdma": Bounds(profile=Profile.RDMA, keys=SAME_REQUEST, crashes_max=1),
    # Two requests that have nothing to do with each other.
    "requests-channel": Bounds(profile=Profile.CHANNEL, keys=TWO_REQUESTS, crashes_max=0),
    # The directory is wrong about the writer, once; and the writer tries the same attempt again.
    "suspected-shm": Bounds(profile=Profile.SHM, keys=SAME_ATTEMPT, crashes_max=0, suspicions_max=1),
    # The writer takes a living receiver for gone, as it does when it is shutting down.
    "given-up-shm": Bounds(profile=Profile.SHM, keys=SAME_REQUEST, crashes_max=0, writers_give_peers_up=True),
    "given-up-rdma": Bounds(profile=Profile.RDMA, keys=SAME_REQUEST, crashes_max=0, writers_give_peers_up=True),
    # Every Commit carries checksums, and the comparison ends either way.
    "sampled-shm": Bounds(profile=Profile.SHM, keys=SAME_REQUEST, crashes_max=1, samples=True),
    "sampled-channel": Bounds(profile=Profile.CHANNEL, keys=SAME_REQUEST, crashes_max=0, samples=True),
    # Fetches: the block goes into the prefix cache and may be evicted. Owner and receiver die, are fenced, and cancel.
    "fetch-shm": Bounds(profile=Profile.SHM, keys=TWO_REQUESTS, crashes_max=1, fetches=True),
    "fetch-channel": Bounds(profile=Profile.CHANNEL, keys=TWO_REQUESTS, crashes_max=0, fetches=True),
    "fetch-fenced-shm": Bounds(
        profile=Profile.SHM, keys=TWO_REQUESTS[:1], crashes_max=2, suspicions_max=1, fetches=True
    ),
    # The books of a dead writer are dropped. One handoff: a Reserve that comes after is granted to a dead man.
    "forgotten-shm": Bounds(
        profile=Profile.SHM, keys=SAME_REQUEST[:1], crashes_max=2, suspicions_max=1, forgets_pairs=True
    ),
}

QUICK = frozenset({"suspected-shm", "forgotten-shm", "fetch-fenced-shm"})
"""Of those, what `make test` walks: seconds each. The others are for `make test-all`."""

_KEYS = {"attempts": SAME_REQUEST, "requests": TWO_REQUESTS, "same attempt": SAME_ATTEMPT}
_LARGE = {
    f"large-{profile.value}-{name}": Bounds(
        profile=profile,
        keys=keys,
        crashes_max=2,
        suspicions_max=1,
        writes_per_grant=2 if profile is Profile.SHM else 1,
    )
    for profile in Profile
    for name, keys in _KEYS.items()
}
LARGE: dict[str, Bounds] = {
    **DEFAULT,
    "three-crashes-shm": replace(DEFAULT["handoff-shm"], crashes_max=3),
    "three-crashes-channel": replace(DEFAULT["handoff-channel"], crashes_max=3),
    "two-crashes-rdma": replace(DEFAULT["handoff-rdma"], crashes_max=2),
    "two-writes-rdma": replace(DEFAULT["handoff-rdma"], writes_per_grant=2),
    "two-writes-channel": replace(DEFAULT["handoff-channel"], writes_per_grant=2),
    "land-apart-channel": replace(DEFAULT["handoff-channel"], writes_land_apart=True, crashes_max=1),
    "given-up-channel": Bounds(profile=Profile.CHANNEL, keys=SAME_REQUEST, crashes_max=1, writers_give_peers_up=True),
    **_LARGE,
}
