"""The one call that a node makes to the Kubernetes API: a patch of the annotations of its own pod.

By lightkube, the extra `k8s`, which is imported when the first call is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
