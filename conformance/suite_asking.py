"""How a tool of the suite's fixture asks its caller, whatever the revision.

A tool is written once, as `answers = await call.ask(name=form("Name?", ...))`.
What that means on the wire depends on who calls:

    LegacyCall   until 2025-11-25: one request to the client for each question,
                 all of them at once, and the call waits for the answers;
    ModernCall   2026-07-28: the call ends with `input_required`; the retry
                 runs the tool from its start, and every `ask` that the sealed
                 state already has the answers of returns at once;
    TaskCall     in a task (suite_tasks.py): the task waits.
"""
import asyncio
import base64
import hashlib
import hmac
import json
import secrets

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata

MODERN = "2026-07-28"
META = "io.modelcontextprotocol/"

INVALID_PARAMS = -32602
MISSING_CAPABILITY = -32021

# Signs the state of one process only: a retry has to come back to it.
STATE_KEY = secrets.token_bytes(32)

STRING = {"type": "string"}

RESULT_TYPES = {
    "elicitation/create": types.ElicitResult,
    "sampling/createMessage": types.CreateMessageResult,
    "roots/list": types.ListRootsResult,
}
NEEDED_CAPABILITY = {
    "elicitation/create": "elicitation",
    "sampling/createMessage": "sampling",
    "roots/list": "roots",
}


class MoreInput(Exception):
    """The call ends here; the caller comes back with the answers."""

    def __init__(self, requests, state):
        super().__init__("input required")
        self.result = types.InputRequiredResult(input_requests=requests, request_state=state)


class Refused(Exception):
    """The caller cannot be asked, or refused; a tool error for an older caller."""


# ---------------------------------------------------------------------------
# Questions
# ---------------------------------------------------------------------------


def form(message, required=None, **properties):
    """A question by form; everything in it is required unless said otherwise."""
    schema = {"type": "object", "properties": properties}
    if required is None:
        required = list(properties)
    if required:
        schema["required"] = required
    return types.ElicitRequest(params=types.ElicitRequestFormParams(message=message, requested_schema=schema))


def sampling(prompt, max_tokens=100):
    message = types.SamplingMessage(role="user", content=types.TextContent(text=prompt))
    params = types.CreateMessageRequestParams(messages=[message], max_tokens=max_tokens)
    return types.CreateMessageRequest(params=params)


def roots():
    return types.ListRootsRequest()


def plain(model):
    """A model as the JSON object that it is on the wire."""
    return model.model_dump(by_alias=True, mode="json", exclude_none=True)


# ---------------------------------------------------------------------------
# State that travels through the caller
# ---------------------------------------------------------------------------


def seal(content):
    payload = base64.urlsafe_b64encode(json.dumps(content, separators=(",", ":")).encode()).decode()
    return payload + "." + _signature(payload)


def unseal(state):
    """What seal() was given; refuses a state that was changed or is another process's."""
    payload, _dot, signature = state.rpartition(".")
    if not hmac.compare_digest(signature.encode(), _signature(payload).encode()):
        raise MCPError(INVALID_PARAMS, "requestState: the signature does not match")
    return json.loads(base64.urlsafe_b64decode(payload))


def _signature(payload):
    return hmac.new(STATE_KEY, payload.encode(), hashlib.sha256).hexdigest()


# ---------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------


def is_modern(ctx):
    return ctx.protocol_version >= MODERN


def declared(ctx):
    """The capabilities that the caller declared: per request, or at its start."""
    capabilities = ctx.session.client_capabilities
    return plain(capabilities) if capabilities else {}


class Call:
    """What every tool gets: its arguments, and ways to reach the caller."""

    def __init__(self, ctx, arguments):
        self.ctx = ctx
        self.arguments = arguments or {}
        self.capabilities = declared(ctx)

    def can(self, capability):
        return capability in self.capabilities

    async def log(self, text):
        await self.ctx.session.send_log_message("info", text, "suite", related_request_id=self.ctx.request_id)

    async def progress(self, done, total):
        await self.ctx.session.report_progress(done, total)

    async def ask(self, **requests):
        """Ask; returns the answers as JSON objects under the same names."""
        raise NotImplementedError


class LegacyCall(Call):
    """A call of a client that can be asked while it waits."""

    async def ask(self, **requests):
        answers = await asyncio.gather(*(send_question(self.ctx, request) for request in requests.values()))
        return dict(zip(requests, answers))


async def send_question(ctx, request):
    """One question to a legacy client, on the stream of the request that it belongs to."""
    metadata = ServerMessageMetadata(related_request_id=ctx.request_id)
    try:
        return plain(await ctx.session.send_request(request, RESULT_TYPES[request.method], metadata=metadata))
    except MCPError as error:
        raise Refused("%s was refused: %s" % (request.method, error.message)) from error


class ModernCall(Call):
    """A call that ends whenever it needs an answer, and is made again with it."""

    def __init__(self, ctx, arguments, params):
        super().__init__(ctx, arguments)
        self.retry = params
        state = params.request_state
        # One object of answers for each `ask` so far, the last may be incomplete.
        self.known = unseal(state) if state is not None else []
        self.asked = 0

    async def ask(self, **requests):
        self._require(requests)
        turn = self.asked
        self.asked += 1
        if turn == len(self.known):
            self.known.append({})
        answers = self.known[turn]
        if turn == len(self.known) - 1:
            self._take_answers(answers, requests)
        missing = {name: request for name, request in requests.items() if name not in answers}
        if missing:
            raise MoreInput(missing, seal(self.known))
        return answers

    def _take_answers(self, answers, requests):
        """Move the answers that this retry brought; unknown names are ignored."""
        brought = self.retry.input_responses or {}
        for name in requests:
            if name not in answers and name in brought:
                answers[name] = plain(brought[name])
        self.retry = self.retry.model_copy(update={"input_responses": None})

    def _require(self, requests):
        needed = {NEEDED_CAPABILITY[request.method] for request in requests.values()}
        missing = {name: {} for name in sorted(needed) if not self.can(name)}
        if missing:
            raise MCPError(
                MISSING_CAPABILITY, "needs %s" % ", ".join(missing), data={"requiredCapabilities": missing}
            )


def call_of(ctx, params, arguments):
    """The right kind of call for the revision that is spoken."""
    if is_modern(ctx):
        return ModernCall(ctx, arguments, params)
    return LegacyCall(ctx, arguments)
