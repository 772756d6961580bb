"""One client request, from its check to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field

from batonpb import common_pb2, inference_pb2, resume_pb2

from baton.errors import BatonError
from baton.ids import Attempt, Incarnation, RequestId
from baton.wire import RESUME_STATE_BYTES_MAX
from router.inbox import Inbox
from router.line import Place
from router.request import CheckedRequest, ClientCall, ObservedRequest
from router.resume import Unseen
from router.retries import Retries


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One client request, from its check to its last token."""

    id: RequestId
    """Ours, random: what a client calls its request may be used twice, and grants and tombstones are keyed by this.
    That of another router's, until the attempt is lost that was taken over from it."""
    call: ClientCall
    checked: CheckedRequest
    """Of an attempt that was taken over only what its text needs."""
    began_s: float
    place: Place
    """In the line."""
    retries: Retries
    stats: inference_pb2.RequestStats
    request: inference_pb2.GenerateRequest | None = None
    """As it came; None: the client attaches and did not repeat it."""
    finish: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED
    output: list[int] = field(default_factory=list)
    """What the client has, whichever attempt it came from: the next attempt goes on behind it."""
    avoid: set[Incarnation] = field(default_factory=set)
    """Prefill processes that did not answer this request, or had no decode node for it."""
    too_small: set[Incarnation] = field(default_factory=set)
    """Prefill processes that said that their regions can never hold it, whatever their records say."""
    avoid_decode: set[Incarnation] = field(default_factory=set)
    """Decode processes that this router could not reach with this request; a prefill node may."""
    full_in_a_row: int = 0
    """How often prefill nodes have found all decode nodes full since the last other answer."""
    attempts: int = 0
    nodes: dict[str, None] = field(default_factory=dict)
    """Names of those that it was placed on, in order."""
    token_times_s: list[float] = field(default_factory=list)
    block_size: int = 0
    observed: ObservedRequest = field(default_factory=ObservedRequest)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """Of a resumable request: those of `output`, if it asks for them."""
    inbox: Inbox | None = None
    """The last attempt's."""
    taken_over: bool = False
    """Its attempt was another router's."""
    unseen: Unseen | None = None
    """Of a resumable request: what the client has."""
    text_ended: bool = False
    """A stop string has ended the answer."""
    cut_off_with: BatonError | None = None
    """The error that `call.cut_off` was called with."""

    @property
    def tokens(self) -> int:
        """That the next attempt computes: the prompt, and what the client has of the answer."""
        return len(self.checked.prompt) + len(self.output)

    def take_said(self) -> list[int]:
        """What the client has and this router has not seen yet: it counts as output from now on."""
        new = list(self.checked.said[len(self.output) :])
        self.output += new
        if self.checked.sampling.HasField("logprobs"):
            self.logprobs += [common_pb2.TokenLogprobs()] * len(new)  # the client has them; nobody asks for them again
        return new

    def for_client(self, event: inference_pb2.GenerateEvent) -> inference_pb2.GenerateEvent | None:
        """What is sent of an event of the answer, if anything. Raises BatonError NOT_RESUMABLE."""
        resume, inbox = self.call.resume, self.inbox
        if resume is None or self.unseen is None:
            return event
        new = self.unseen.take(event)
        if new is not None:
            request, attempt = (self.id, Attempt(0)) if inbox is None else inbox.key
            decode = Incarnation(0) if inbox is None else inbox.decode
            if inbox is not None:
                inbox.told = True
            new.resume_token = resume.token(self.unseen.place(request, attempt, decode)).encode()
        return new

    def for_another_router(self) -> common_pb2.Resumable | None:
        """What the node that writes the answer keeps of a resumable request."""
        if (resume := self.call.resume) is None:
            return None
        checked, sampling = self.checked, self.checked.sampling
        state = resume_pb2.ResumeState(
            call=self.call.id,
            stop=checked.stop,
            include_stop=checked.include_stop,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.HasField("logprobs"),
            prompt_tokens=len(checked.prompt),
            output_logprobs=self.logprobs,
            request_digest=resume.digest,
        )
        state.MergeFrom(resume.state)
        if state.ByteSize() > RESUME_STATE_BYTES_MAX:
            state.ClearField("output_logprobs")  # most clients have them by now
        return common_pb2.Resumable(tag=resume.tag(self.call.key_name), state=state.SerializeToString())
