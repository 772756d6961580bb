"""The Kubernetes pod that a node runs in: which pod a smaller pool gives up first.

A ReplicaSet that loses a replica removes pods that are not ready first, and among those alike the one of the lowest
`controller.kubernetes.io/pod-deletion-cost`. A draining node gives its own pod the lowest cost there is, and takes that
back when it takes requests again. It is a hint: a drain goes on without it.
https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost

The API is called by lightkube, the extra `k8s`, which is imported when the first call is made.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from baton.clock import Clock
from baton.config import fixed, setting
from baton.errors import InvalidField, check_positive
from baton.lifecycle import Lifecycle
from baton.log import get_log

if TYPE_CHECKING:
    from lightkube import AsyncClient

TOKEN_FILE: Final = "token"
CA_FILE: Final = "ca.crt"
NAMESPACE_FILE: Final = "namespace"
"""Of a mounted service account, see https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/."""
FIELD_MANAGER: Final = "baton"
PROBLEM_CHARS_MAX: Final = 200
_AGAIN_LATER: Final = frozenset({401, 408, 409, 429})
"""Refusals that may pass: 401 while the token is being renewed. All of 5xx too."""


class KubernetesError(Exception):
    """The API server was not reached, or has refused. `may_pass`: another try later may succeed."""

    def __init__(self, problem: str, *, may_pass: bool) -> None:
        super().__init__(problem[:PROBLEM_CHARS_MAX])
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAddress:
    """One pod, the API server that knows it, and the folder of the service account to speak as."""

    api: str
    """https://host[:port]"""
    credentials: Path
    pod: str


async def patch_annotations(address: PodAddress, annotations: Mapping[str, str | None]) -> None:
    """Set annotations of the pod; None removes one, or leaves it removed. Sets no time limit.

    The files of the service account are read again for each call: the kubelet renews the token. Raises KubernetesError.
    """
    try:
        import httpx2
        from lightkube.resources.core_v1 import Pod
    except ImportError as error:
        problem = f"{error.name} is not installed, which pod.name needs: pip install 'baton-serve[k8s]'"
        raise KubernetesError(problem, may_pass=False) from error
    try:
        # Mounted files, but files: not for the event loop.
        client = await asyncio.to_thread(_client, address)
    except (OSError, ValueError) as error:
        problem = f"the service account in {address.credentials} is not usable: {error}"
        raise KubernetesError(problem, may_pass=True) from error
    try:
        await client.patch(Pod, address.pod, {"metadata": {"annotations": dict(annotations)}})
    except httpx2.ConnectError as error:
        raise KubernetesError(f"{address.api} cannot be called: {error}", may_pass=True) from error
    except httpx2.TransportError as error:
        raise KubernetesError(f"{address.api} broke the call off: {error}", may_pass=True) from error
    except (httpx2.HTTPStatusError, ValueError, TypeError, AttributeError, LookupError) as error:
        # lightkube fails in many ways on a refusal whose body is no Status object.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, httpx2.HTTPStatusError):
            cause = cause.__context__
        if cause is None:
            raise
        status, body = cause.response.status_code, cause.response.text
        words = str(error) if cause is error and type(error) is not httpx2.HTTPStatusError else body or "nothing more"
        may_pass = status in _AGAIN_LATER or status >= 500
        raise KubernetesError(f"{address.api} answered {status}: {words}", may_pass=may_pass) from error
    finally:
        await client.close()


def _client(address: PodAddress) -> AsyncClient:
    """Raises OSError or ValueError: the service account's files cannot be read."""
    import httpx2
    from lightkube import AsyncClient, KubeConfig
    from lightkube.config.models import Cluster, User

    config = KubeConfig.from_one(
        cluster=Cluster(server=address.api, certificate_auth=str(address.credentials / CA_FILE)),
        user=User(token=(address.credentials / TOKEN_FILE).read_text().strip()),
        namespace=(address.credentials / NAMESPACE_FILE).read_text().strip(),
    )
    # No proxy of the environment: the API server is reached directly. The caller sets the time limit.
    return AsyncClient(config=config, timeout=httpx2.Timeout(None), field_manager=FIELD_MANAGER, trust_env=False)


log = get_log("pod")

ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
FIRST_TO_GO: Final = "-2147483648"
"""The lowest value that the controller takes."""
COST_LOWERED: Final = "pod deletion cost lowered"
COST_FAILURES: Final = "pod deletion cost: failed calls"
COST_GIVEN_UP: Final = "pod deletion cost: given up"
"""Names of status counters."""

PatchAnnotations = Callable[[PodAddress, Mapping[str, str | None]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodConfig:
    name: str | None = setting(
        None,
        "Kubernetes pod of this node, whose deletion cost a drain lowers; none: no pod",
        "The node runs in Kubernetes, in a pool that is scaled down.",
    )
    api: str = setting(
        "https://kubernetes.default.svc",
        "https://host[:port] of the Kubernetes API",
        "The API is reached at another address.",
    )
    credentials: Path = setting(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        "folder of the service account: token, namespace, ca.crt",
        "The service account is mounted elsewhere.",
    )
    call_ms_max: int = setting(2_000, "how long one call to the API may take", "The API server is far away or slow.")
    tries_max: int = fixed(4)
    """Calls before the deletion cost is left as it is."""
    retry_ms_min: int = fixed(200)
    """Pause before the second call, doubled for each further."""
    retry_ms_max: int = fixed(2_000)
    """Longest pause between two calls."""

    def __post_init__(self) -> None:
        check_positive(self, "call_ms_max", "tries_max", "retry_ms_min", "retry_ms_max")
        if self.name == "":
            raise InvalidField("name", "must not be empty; leave it out where there is no pod")
        try:
            parts = urlsplit(self.api)
            usable = parts.scheme == "https" and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.path or parts.query or parts.fragment or parts.username is not None:
            raise InvalidField("api", "must be https://host or https://host:port")


class _Cost(Enum):
    """The value is the annotation's."""

    NORMAL = None
    LOWERED = FIRST_TO_GO


class DeletionCost:
    """Keeps the deletion cost of the node's own pod in step with its lifecycle. One event loop, one task.

    Does nothing where `config.name` is None.
    """

    def __init__(
        self,
        config: PodConfig,
        *,
        clock: Clock,
        rng: random.Random,
        patch: PatchAnnotations = patch_annotations,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng
        self._patch = patch
        self._wanted: _Cost | None = None
        self._applied: _Cost | None = None
        """As far as the API server has confirmed it; None: nobody knows."""
        self._given_up: _Cost | None = None
        self._failures = 0
        self._working: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def settled(self) -> bool:
        """Nothing is under way: the API server has confirmed the cost, or it was given up, or there is no pod."""
        return self._working is None or self._working.done()

    def follow(self, state: Lifecycle) -> None:
        """The lifecycle is `state` now. Returns at once; a repeat of what has been given up is not tried again.

        To be called once at the start too: the process before this one, in the same pod, may have been drained.
        """
        if self._config.name is None or self._closed:
            return
        self._wanted = _Cost.LOWERED if state in (Lifecycle.DRAINING, Lifecycle.DRAINED) else _Cost.NORMAL
        if self._given_up is not self._wanted:
            self._given_up = None
        if self.settled and self._is_to_do():
            self._working = asyncio.create_task(self._work(), name="pod-deletion-cost")
            self._working.add_done_callback(_log_failure)

    def retry(self, state: Lifecycle) -> None:
        """As `follow`, on an operator's order: tries again what has been given up."""
        self._given_up = None
        self.follow(state)

    def counters(self) -> dict[str, int]:
        """For the node's status; empty where there is no pod."""
        if self._config.name is None:
            return {}
        return {
            COST_LOWERED: int(self._applied is _Cost.LOWERED),
            COST_FAILURES: self._failures,
            COST_GIVEN_UP: int(self._given_up is not None),
        }

    async def close(self) -> None:
        """Cancel the call that is running: the pod is about to go, or the next process here starts over. Idempotent."""
        self._closed = True
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    def _is_to_do(self) -> bool:
        return self._wanted not in (self._applied, self._given_up)

    async def _work(self) -> None:
        while self._is_to_do():
            wanted = self._wanted
            assert wanted is not None
            if not await self._apply(wanted) and self._wanted is wanted:
                self._given_up = wanted

    async def _apply(self, wanted: _Cost) -> bool:
        """Tell the API server; False when that has failed for good, or something else is wanted by now."""
        config = self._config
        assert config.name is not None
        address = PodAddress(api=config.api, credentials=config.credentials, pod=config.name)
        for attempt in range(1, config.tries_max + 1):
            self._applied = None
            try:
                async with asyncio.timeout(config.call_ms_max / 1e3):
                    await self._patch(address, {ANNOTATION: wanted.value})
            except TimeoutError:
                problem, may_pass = f"{config.api} did not answer within {config.call_ms_max} ms", True
            except KubernetesError as error:
                problem, may_pass = str(error), error.may_pass
            else:
                self._applied = wanted
                log.info("pod deletion cost set", pod=config.name, cost=wanted.value or "none")
                return True
            self._failures += 1
            if not may_pass or attempt == config.tries_max:
                log.warning(
                    "pod deletion cost not set: a smaller pool may remove another pod than this one",
                    pod=config.name, cost=wanted.value or "none", tries=attempt, problem=problem,
                )  # fmt: skip
                return False
            await self._clock.sleep_s(self._pause_s(attempt))
            if self._wanted is not wanted:
                return False
        raise AssertionError("the last try returns")

    def _pause_s(self, attempt: int) -> float:
        """Doubling, capped, with jitter: many pods are drained at the same moment."""
        ceiling_ms = min(self._config.retry_ms_max, self._config.retry_ms_min << (attempt - 1))
        return self._rng.uniform(0.5, 1.0) * ceiling_ms / 1e3


def _log_failure(task: asyncio.Task[None]) -> None:
    failure = None if task.cancelled() else task.exception()
    if failure is not None:
        log.error("ended by a bug of ours", task=task.get_name(), exc_info=failure)
