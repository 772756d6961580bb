"""States of a grant at its receiver, and the one table of what may lead where (DESIGN: grant states). Pure.

RESERVED   granted, nothing heard from the writer yet          WRITING    renewed or sealed at least once
COMMITTED  sealed and committed: the writer's right is over    REVOKING   the request has let go, the writer has not
QUARANTINED the same, and no evidence came in time             FENCED     evidence came; kept to answer repeats
RELEASED   nobody owns anything; kept to answer repeats
"""

from __future__ import annotations

from enum import Enum


class GrantState(Enum):
    RESERVED = "RESERVED"
    WRITING = "WRITING"
    COMMITTED = "COMMITTED"
    REVOKING = "REVOKING"
    QUARANTINED = "QUARANTINED"
    FENCED = "FENCED"
    RELEASED = "RELEASED"


class RecordCheck(Enum):
    """Of a grant whose Commit carries checksums; the state stays what it is meanwhile."""

    NONE = "none"
    WANTED = "wanted"  # until the seals are here too
    RUNNING = "running"
    CORRUPT = "corrupt"  # the grant is FENCED: seals and commit were evidence enough


class Step(Enum):
    """What can happen to one grant: the columns of the transition table."""

    RENEW = "Renew"
    SEAL = "Seal"
    COMMIT = "Commit"
    CHECKED = "records checked"
    LET_GO = "writer lets go"
    FENCE = "fence"
    SUSPECT = "writer suspected"
    CANCEL = "Cancel"
    END = "request ends"
    LEASE_TIMER = "lease timer"
    REVOKE_TIMER = "revoke timer"


UNCOMMITTED = frozenset({GrantState.RESERVED, GrantState.WRITING, GrantState.REVOKING, GrantState.QUARANTINED})
OPEN = frozenset({GrantState.RESERVED, GrantState.WRITING})

TRANSITIONS: dict[tuple[GrantState, Step], tuple[GrantState, ...]] = {
    **{(state, Step.RENEW): (GrantState.WRITING,) for state in OPEN},
    **{(state, Step.SEAL): (GrantState.WRITING, GrantState.COMMITTED) for state in OPEN},
    (GrantState.RESERVED, Step.COMMIT): (GrantState.RESERVED, GrantState.COMMITTED),
    (GrantState.WRITING, Step.COMMIT): (GrantState.WRITING, GrantState.COMMITTED),
    **{(state, Step.CHECKED): (GrantState.COMMITTED, GrantState.FENCED) for state in OPEN},
    **{(state, Step.CHECKED): (GrantState.FENCED,) for state in UNCOMMITTED - OPEN},
    **{(state, Step.LET_GO): (GrantState.FENCED,) for state in UNCOMMITTED},
    **{(state, Step.FENCE): (GrantState.FENCED,) for state in UNCOMMITTED},
    **{(state, Step.SUSPECT): (GrantState.REVOKING,) for state in OPEN},
    **{(state, Step.CANCEL): (GrantState.REVOKING,) for state in OPEN},
    **{(state, Step.LEASE_TIMER): (GrantState.REVOKING,) for state in OPEN},
    (GrantState.COMMITTED, Step.CANCEL): (GrantState.RELEASED,),
    (GrantState.COMMITTED, Step.END): (GrantState.RELEASED,),
    (GrantState.REVOKING, Step.SEAL): (GrantState.REVOKING, GrantState.FENCED),
    (GrantState.REVOKING, Step.COMMIT): (GrantState.REVOKING, GrantState.FENCED),
    (GrantState.REVOKING, Step.REVOKE_TIMER): (GrantState.REVOKING, GrantState.QUARANTINED),
    (GrantState.QUARANTINED, Step.SEAL): (GrantState.QUARANTINED, GrantState.FENCED),
    (GrantState.QUARANTINED, Step.COMMIT): (GrantState.QUARANTINED, GrantState.FENCED),
    (GrantState.QUARANTINED, Step.REVOKE_TIMER): (GrantState.QUARANTINED,),
    (GrantState.FENCED, Step.LET_GO): (GrantState.RELEASED,),
}
"""Where each step may lead. A step that a state does not list changes nothing there; a question is still answered."""
