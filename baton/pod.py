"""The Kubernetes pod that a node runs in: a draining node makes its pod the first that a smaller pool gives up.

A ReplicaSet that shrinks removes pods that are not ready first, and of the others the one with the lowest
`controller.kubernetes.io/pod-deletion-cost`. A draining node sets the lowest cost, and removes it when it takes
requests again. This is a hint: a drain goes on without it.
https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost

The client library is lightkube, the extra `k8s`; it is imported at the first call.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from baton.clock import Clock
from baton.config import fixed, setting
from baton.errors import InvalidField, check_positive
from baton.lifecycle import Lifecycle
from baton.log import get_log
from baton.retry_time import backoff_s
from baton.tasks import end_task, log_failure

if TYPE_CHECKING:
    from lightkube import AsyncClient

log = get_log("pod")

TOKEN_FILE: Final = "token"
CA_FILE: Final = "ca.crt"
NAMESPACE_FILE: Final = "namespace"
"""Files of a mounted service account: https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/."""
FIELD_MANAGER: Final = "baton"
PROBLEM_CHARS_MAX: Final = 200
_AGAIN_LATER: Final = frozenset({401, 408, 409, 429})
"""Refusals that may pass (401 while the token is renewed), as all of 5xx."""
ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
FIRST_TO_GO: Final = "-2147483648"
"""The lowest value that the controller takes."""
COST_LOWERED: Final = "pod deletion cost lowered"
COST_FAILURES: Final = "pod deletion cost: failed calls"
COST_GIVEN_UP: Final = "pod deletion cost: given up"
"""Names of status counters."""


class KubernetesError(Exception):
    """The API server was not reached, or has refused. `may_pass`: another try later may succeed."""

    def __init__(self, problem: str, *, may_pass: bool) -> None:
        super().__init__(problem[:PROBLEM_CHARS_MAX])
        self.may_pass = may_pass


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


async def set_deletion_cost(config: PodConfig, cost: str | None) -> None:
    """Annotate the pod with `cost`; None removes the annotation. Has no time limit.

    Each call reads the files of the service account again: the kubelet renews the token. Raises KubernetesError.
    """
    assert config.name is not None
    try:
        import httpx2
        from lightkube.resources.core_v1 import Pod
    except ImportError as error:
        problem = f"{error.name} is not installed, which pod.name needs: pip install 'baton-serve[k8s]'"
        raise KubernetesError(problem, may_pass=False) from error
    try:
        client = await asyncio.to_thread(_client, config)
    except (OSError, ValueError) as error:
        problem = f"the service account in {config.credentials} is not usable: {error}"
        raise KubernetesError(problem, may_pass=True) from error
    try:
        await client.patch(Pod, config.name, {"metadata": {"annotations": {ANNOTATION: cost}}})
    except httpx2.TransportError as error:
        what = "cannot be called" if isinstance(error, httpx2.ConnectError) else "broke the call off"
        raise KubernetesError(f"{config.api} {what}: {error}", may_pass=True) from error
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
        raise KubernetesError(f"{config.api} answered {status}: {words}", may_pass=may_pass) from error
    finally:
        await client.close()


def _client(config: PodConfig) -> AsyncClient:
    """Raises OSError or ValueError: the service account's files cannot be read."""
    import httpx2
    from lightkube import AsyncClient, KubeConfig
    from lightkube.config.models import Cluster, User

    kube = KubeConfig.from_one(
        cluster=Cluster(server=config.api, certificate_auth=str(config.credentials / CA_FILE)),
        user=User(token=(config.credentials / TOKEN_FILE).read_text().strip()),
        namespace=(config.credentials / NAMESPACE_FILE).read_text().strip(),
    )
    # The API server is reached directly, without a proxy of the environment.
    return AsyncClient(config=kube, timeout=httpx2.Timeout(None), field_manager=FIELD_MANAGER, trust_env=False)


class DeletionCost:
    """Keeps the deletion cost of the node's own pod in step with its lifecycle. One event loop, one task.

    Does nothing if `config.name` is None.
    """

    def __init__(
        self,
        config: PodConfig,
        *,
        clock: Clock,
        rng: random.Random,
        set_cost: Callable[[PodConfig, str | None], Awaitable[None]] = set_deletion_cost,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng
        self._set_cost = set_cost
        # Each is whether the cost is lowered; None: neither of both.
        self._wanted: bool | None = None
        self._applied: bool | None = None
        """As the API server has confirmed it; None: unknown."""
        self._given_up: bool | None = None
        self._failures = 0
        self._working: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def settled(self) -> bool:
        """Nothing is under way: the API server has confirmed the cost, or it was given up, or there is no pod."""
        return self._working is None or self._working.done()

    def follow(self, state: Lifecycle) -> None:
        """The lifecycle is `state` now. Returns at once. A cost that was given up is not tried again.

        Call it once at the start too: the process before this one, in the same pod, may have been drained.
        """
        if self._config.name is None or self._closed:
            return
        self._wanted = state in (Lifecycle.DRAINING, Lifecycle.DRAINED)
        if self._given_up is not self._wanted:
            self._given_up = None
        if self.settled and self._is_to_do():
            self._working = asyncio.create_task(self._work(), name="pod-deletion-cost")
            self._working.add_done_callback(log_failure)

    def retry(self, state: Lifecycle) -> None:
        """As `follow`, on an operator's order: tries again what was given up."""
        self._given_up = None
        self.follow(state)

    def counters(self) -> dict[str, int]:
        """For the node's status; empty without a pod."""
        if self._config.name is None:
            return {}
        return {
            COST_LOWERED: int(self._applied is True),
            COST_FAILURES: self._failures,
            COST_GIVEN_UP: int(self._given_up is not None),
        }

    async def close(self) -> None:
        """Cancel the running call: the pod is about to go, or the next process here starts over. Idempotent."""
        self._closed = True
        await end_task(self._working)

    def _is_to_do(self) -> bool:
        return self._wanted not in (self._applied, self._given_up)

    async def _work(self) -> None:
        config, attempt = self._config, 0
        while self._is_to_do():
            lowered, attempt = self._wanted, attempt + 1
            cost = FIRST_TO_GO if lowered else None
            self._applied = None
            try:
                async with asyncio.timeout(config.call_ms_max / 1e3):
                    await self._set_cost(config, cost)
            except TimeoutError:
                problem, may_pass = f"{config.api} did not answer within {config.call_ms_max} ms", True
            except KubernetesError as error:
                problem, may_pass = str(error), error.may_pass
            else:
                self._applied, attempt = lowered, 0
                log.info("pod deletion cost set", pod=config.name, cost=cost or "none")
                continue
            self._failures += 1
            if may_pass and attempt < config.tries_max:
                await self._clock.sleep_s(backoff_s(attempt - 1, config.retry_ms_min, config.retry_ms_max, self._rng))
            elif self._wanted is lowered:
                log.warning(
                    "pod deletion cost not set: a smaller pool may remove another pod than this one",
                    pod=config.name, cost=cost or "none", tries=attempt, problem=problem,
                )  # fmt: skip
                self._given_up = lowered
            if self._wanted is not lowered:
                attempt = 0
