"""What a client over HTTP shows to go on with its stream: the id of the last event that it has. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from batonpb import inference_pb2, resume_pb2

from baton.errors import bad_field
from baton.ids import RequestId
from router.openai import OpenAiCall
from router.replies import chunks_id
from router.resume import Place, Resume, ResumeToken, check_digest

LAST_EVENT_ID: Final = "Last-Event-ID"


def new_token(call: OpenAiCall, request_id: RequestId, created_unix_s: int, *, secret: bytes) -> ResumeToken:
    """Of a client that has nothing yet. The call's requests have their seeds."""
    return ResumeToken(
        secret=secret,
        seed=call.requests[0].sampling.seed,
        digest=call.digest,
        places=(Place(),) * (len(call.requests) * call.n),
        http=_http_call(call, request_id, created_unix_s),
    )


def read_token(sent: Sequence[str]) -> ResumeToken:
    """The values of the header. Raises BatonError BAD_FIELD, which quotes nothing of them."""
    if len(sent) != 1:
        raise bad_field(LAST_EVENT_ID, f"Send {LAST_EVENT_ID} once, with the id of the last event that you have.")
    return ResumeToken.decode(sent[0].strip(), field=LAST_EVENT_ID)


def repeated(call: OpenAiCall, token: ResumeToken, request_id: RequestId, now_unix_s: int) -> ResumeToken:
    """The token, for chunks as this repeated call wants them; `request_id` and time are for one that has begun over
    gRPC. Raises BatonError BAD_FIELD where it came with another call."""
    check_digest(token, call.digest, len(call.requests) * call.n, field=LAST_EVENT_ID)
    if token.http is not None:
        request_id, now_unix_s = RequestId(token.http.id), token.http.created_unix_s
    return replace(token, http=_http_call(call, request_id, now_unix_s))


def call_of(token: ResumeToken, path_id: str) -> OpenAiCall | None:
    """The call as far as the token knows it. None where it is another one than the path names."""
    http = token.http
    if http is None or path_id not in (http.id, chunks_id(http.id, chat=http.chat)):
        return None
    return OpenAiCall(
        chat=http.chat,
        requests=(),
        n=http.n,
        stream=True,
        include_usage=http.include_usage,
        logprobs=http.logprobs,
        token_ids=http.token_ids,
        tokens_as_ids=http.tokens_as_ids,
        continuous_usage=http.continuous_usage,
        resumable=True,
        reading=http.reading if http.HasField("reading") else None,
    )


def set_seeds(requests: Sequence[inference_pb2.GenerateRequest], seed: int, *, attaches: bool) -> None:
    """Requests that name no seed get one each, all from this one. Raises BatonError BAD_FIELD where a client that
    attaches names another one than before."""
    for i, request in enumerate(requests):
        if not request.sampling.HasField("seed"):
            request.sampling.seed = (seed + i) % (1 << 64)
        elif attaches and request.sampling.seed != seed:
            raise bad_field("seed", "The seed is not that of the request that the resume token came with.")


def resumes(call: OpenAiCall, token: ResumeToken, *, attaches: bool) -> list[Resume]:
    """What the router has to know for each answer. Raises BatonError BAD_FIELD where the client's token ids are not
    those that it was sent."""
    assert token.http is not None
    made = []
    for answer in range(len(token.places)):
        resume = Resume(secret=token.secret, seed=token.seed, digest=token.digest)
        if attaches:
            said = call.said[answer] if call.said else ()
            resume = Resume.attach(token, answer, said=said, field="resume_token_ids")
        seed = call.requests[answer // call.n].sampling.seed if call.requests else token.seed
        state = resume_pb2.ResumeState(call=token.http.id, answer=answer, answers=len(token.places))
        made.append(replace(resume, seed=seed, state=state))
    return made


def _http_call(call: OpenAiCall, request_id: RequestId, created_unix_s: int) -> resume_pb2.HttpCall:
    return resume_pb2.HttpCall(
        id=request_id,
        created_unix_s=created_unix_s,
        chat=call.chat,
        include_usage=call.include_usage,
        logprobs=call.logprobs,
        token_ids=call.token_ids,
        tokens_as_ids=call.tokens_as_ids,
        continuous_usage=call.continuous_usage,
        n=call.n,
        reading=call.reading,
    )
