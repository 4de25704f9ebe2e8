"""Every frame that mcpx sends to a host of a revision is one that this revision knows.

A raw host of each revision drives servers of both eras through mcpx (SERVERS
below): the reference server, a fixture that sets every optional field of
2025-11-25, the two fixtures on the official SDK. All it hears is recorded and
validated against the revision's published schema, made strict (schemas.py).
What a schema cannot see (was something lost on the way down?) is in MEANINGS
below. A host of 2026-07-28 comes over HTTP as well.
"""
import asyncio
import json
import sys
from pathlib import Path

import check_eras
import everything
import install
import schemas
from check_asking import Exchange
from check_upstreams import node_entry
from door import open_door
from link import CLIENT_INFO, Link, LinkClosed, connect
from place import expect
from schemas import MODERN, RESERVED_PREFIX, SUBSCRIPTION

HERE = Path(__file__).resolve().parent
NEWEST = HERE / "clients" / "newest_server.py"
SUITE_FIXTURE = HERE / "suite_fixture.py"

TASKS = RESERVED_PREFIX + "tasks"

# What a host of each revision can declare; the newest that it knows.
CAPABILITIES = {
    "2024-11-05": {"roots": {"listChanged": True}, "sampling": {}},
    "2025-03-26": {"roots": {"listChanged": True}, "sampling": {}},
    "2025-06-18": {"roots": {"listChanged": True}, "sampling": {}, "elicitation": {}},
    "2025-11-25": {
        "roots": {"listChanged": True},
        "sampling": {"tools": {}, "context": {}},
        "elicitation": {"form": {}, "url": {}},
        "tasks": {"requests": {"sampling": {"createMessage": {}}, "elicitation": {"create": {}}}},
    },
    MODERN: {
        "roots": {},
        "sampling": {"tools": {}, "context": {}},
        "elicitation": {"form": {}, "url": {}},
        "extensions": {TASKS: {}},
    },
}

ANSWERS = {
    "ping": {},
    "roots/list": {"roots": [{"uri": "file:///project/one", "name": "one"}]},
    "sampling/createMessage": {
        "role": "assistant",
        "model": "scripted",
        "content": {"type": "text", "text": "sampled"},
        "stopReason": "endTurn",
    },
    "elicitation/create": {"action": "accept", "content": {"name": "Ada", "interpretation": "snake"}},
}

UNKNOWN_METHODS = ("server/discover", "no/such/method", "subscriptions/listen")
# Without the handshake there is nothing that these could be about (2026-07-28 changelog). Over stdio
# `initialize` is the beginning of one, whatever else it says.
MODERN_UNKNOWN_METHODS = (
    "ping", "logging/setLevel", "resources/subscribe", "resources/unsubscribe", "tasks/list", "tasks/result",
    "no/such/method",
)


def answer(method, params):
    """What this host answers; a question asked as a task is done at the first look."""
    if method == "tasks/result":
        return ANSWERS.get(params["taskId"])
    if method == "tasks/get":
        return host_task(params["taskId"], "completed")
    if "task" in params:
        return {"task": host_task(method, "working")}
    if method == "elicitation/create" and params.get("mode") == "url":
        return {"action": "accept"}
    return ANSWERS.get(method)


def host_task(method, status):
    """A task of this host; its id is the method of the question."""
    when = "2025-01-01T00:00:00Z"
    return {"taskId": method, "status": status, "createdAt": when, "lastUpdatedAt": when, "ttl": 60000}


# ---------------------------------------------------------------------------
# Hosts of 2026-07-28
# ---------------------------------------------------------------------------


class ModernLink(Link):
    """A host whose every request says all about itself, and which asks again with its answers.

    `level` is what it wants logged for its requests, `listen_id` the subscription
    that it opened last, `faults` what the frames by themselves do not show.
    """

    def __init__(self, answer_):
        super().__init__(MODERN, CAPABILITIES[MODERN], answer_)
        self.level = None
        self.listen_id = None
        self.faults = []

    def meta(self, given):
        meta = {
            RESERVED_PREFIX + "protocolVersion": MODERN,
            RESERVED_PREFIX + "clientInfo": CLIENT_INFO,
            RESERVED_PREFIX + "clientCapabilities": self.capabilities,
        }
        if self.level:
            meta[RESERVED_PREFIX + "logLevel"] = self.level
        return dict(meta, **given)

    def begin(self, method, params=None, request_id=None):
        params = params or {}
        return super().begin(method, dict(params, _meta=self.meta(params.get("_meta") or {})), request_id)

    async def initialize(self, seconds=60):
        """There is no handshake; what it would tell is asked for."""
        found = await self.request("server/discover", None, seconds)
        expect("result" in found, "server/discover: %s", json.dumps(found)[:300])
        return dict(found["result"], protocolVersion=MODERN)

    async def request(self, method, params=None, seconds=30):
        """Send a request, and again with what is asked for, until it has a whole answer."""
        given = params or {}
        while True:
            reply = await super().request(method, given, seconds)
            result = reply.get("result", {})
            if result.get("resultType") != "input_required":
                return reply
            given = dict(params, inputResponses=self.responses(result.get("inputRequests", {})))
            if "requestState" in result:
                given["requestState"] = result["requestState"]

    def responses(self, requests):
        return {key: self.answer(one["method"], one.get("params") or {}) for key, one in requests.items()}

    async def listen(self, **kinds):
        """Open a subscription, and wait until it is acknowledged."""
        self.listen_id, _future = self.begin("subscriptions/listen", {"notifications": kinds})

        def is_acknowledgement(message):
            meta = (message.get("params") or {}).get("_meta") or {}
            return message.get("method", "").endswith("/acknowledged") and meta.get(SUBSCRIPTION) == self.listen_id

        await wait_for(self, is_acknowledgement, 15, "the acknowledgement of a subscription")
        return {}

    def give_up(self, request_id):
        """End a request, in the way that the transport has for it."""
        self.notify("notifications/cancelled", {"requestId": request_id})

    async def stop_listening(self):
        self.give_up(self.listen_id)
        return {}

    # What older hosts have requests for.
    OTHERWISE = {
        "ping": lambda self, _params: self.request("server/discover"),
        "logging/setLevel": lambda self, params: self.set_level(params["level"]),
        "resources/subscribe": lambda self, params: self.listen(resourceSubscriptions=[params["uri"]]),
        "resources/unsubscribe": lambda self, _params: self.stop_listening(),
    }

    async def set_level(self, level):
        self.level = level
        return {}


class HttpLink(ModernLink):
    """The same over HTTP: an exchange for each request. Statuses are checked as they come."""

    def __init__(self, answer_, port, path):
        super().__init__(answer_)
        self.port = port
        self.path = path
        self.other_headers = {}
        self.streams = {}  # a request's id as text -> its exchange, while it is open

    def send(self, message):
        headers = dict(self.headers(message), **self.other_headers)
        key = json.dumps(message["id"]) if "id" in message else object()
        self.streams[key] = asyncio.ensure_future(self.exchange(message, headers))
        self.streams[key].add_done_callback(lambda _done: self.streams.pop(key))

    def begin_as(self, method, params, **other_headers):
        """Begin a request whose headers say something else."""
        self.other_headers = other_headers
        try:
            return self.begin(method, params)
        finally:
            self.other_headers = {}

    def headers(self, message):
        headers = {"Mcpx-Session": "frames", "MCP-Protocol-Version": MODERN, "Mcp-Method": message["method"]}
        params = message.get("params") or {}
        name = params.get("taskId") if message["method"].startswith("tasks/") else params.get("name", params.get("uri"))
        return headers if name is None else dict(headers, **{"Mcp-Name": name})

    async def exchange(self, message, headers):
        async with Exchange(self.port, "POST", self.path, message, headers) as reply:
            async for one in messages_of(reply):
                if "id" in one or "error" in one:
                    self.check_status(one, reply.status)
                self._on_message(one, json.dumps(one))
            if "method" in message and "id" not in message and reply.status != 202:
                self.faults.append("a notification got status %d" % reply.status)

    def give_up(self, request_id):
        self.streams[json.dumps(request_id)].cancel()

    def check_status(self, answer_, status):
        """2026-07-28 basic/transports/streamable-http: which errors are told by the status as well."""
        code = answer_.get("error", {}).get("code")
        wanted = {-32601: 404, -32600: 400, -32700: 400, -32020: 400, -32021: 400, -32022: 400}.get(code, 200)
        if status not in ((200, 400) if code == -32602 else (wanted,)):
            self.faults.append("status %d for %s" % (status, json.dumps(answer_)[:200]))

    async def close(self, seconds=15):
        streams = list(self.streams.values())
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        return 0


async def messages_of(reply):
    """The messages of an exchange; a body of JSON is one, whatever characters are in it."""
    if reply.headers.get("content-type", "").startswith("application/json"):
        yield json.loads(await reply.reader.readexactly(int(reply.headers["content-length"])))
        return
    async for one in reply.messages():
        yield one


# ---------------------------------------------------------------------------
# Driving
# ---------------------------------------------------------------------------


async def perform(link, step):
    """Run one step of a plan (everything.py); returns the answer or None."""
    modern = link.revision == MODERN
    if "wait" in step:
        if modern and step["wait"] == "notifications/message":
            return True  # what no request asked for is not told there
        try:
            return await wait_for(link, lambda one: one.get("method") == step["wait"], step["seconds"], step["wait"])
        except LinkClosed as error:
            if not modern:
                raise
            link.faults.append(str(error))
            return False
    if "task" in step:
        return await run_task(link, step)
    params = dict(step["params"]) if step.get("params") is not None else None
    if step.get("progress"):
        params["_meta"] = {"progressToken": "token of %s" % params["name"]}
    if modern and step["method"] in link.OTHERWISE:
        return await link.OTHERWISE[step["method"]](link, params)
    reply = await link.request(step["method"], params)
    return await follow_task(link, reply) if modern else reply


async def wait_for(link, is_wanted, seconds, what):
    """Until a message that is wanted has been heard."""
    for _ in range(int(seconds * 20)):
        if any(is_wanted(message) for message, _line in link.heard):
            return True
        await asyncio.sleep(0.05)
    raise LinkClosed("%s did not come within %g s" % (what, seconds))


async def follow_task(link, reply, cancel=False):
    """The answer that a call comes to, where the server made a task of it (2026-07-28)."""
    if reply.get("result", {}).get("resultType") != "task":
        return reply
    named = {"taskId": reply["result"]["taskId"]}
    for _ in range(100):
        state = await link.request("tasks/get", named)
        task = state.get("result", {})
        if cancel and task.get("status") == "working":
            await link.request("tasks/cancel", named)
        elif task.get("status") == "input_required":
            answers = link.responses(task["inputRequests"])
            await link.request("tasks/update", dict(named, inputResponses=answers))
        elif task.get("status") != "working":
            return {key: task[key] for key in ("result", "error") if key in task} or state
        await asyncio.sleep(0.1)
    raise LinkClosed("the task did not end: %s" % json.dumps(state)[:300])


async def run_task(link, step):
    """Start a tool as a task; cancel it, or follow it to its result."""
    created = await link.request("tools/call", dict(step["task"], task={"ttl": 60000}))
    expect("result" in created, "no task was made: %s", json.dumps(created)[:300])
    named = {"taskId": created["result"]["task"]["taskId"]}
    if step.get("cancel"):
        return await link.request("tasks/cancel", named)
    result = await link.request("tasks/result", named)
    await link.request("tasks/get", named)
    return result


async def all_pages(link, method, key):
    """Every item of a list, however it is cut into pages."""
    items, params = [], {}
    while True:
        answer_ = await link.request(method, params)
        expect("result" in answer_, "%s: %s", method, json.dumps(answer_)[:300])
        items += answer_["result"][key]
        if "nextCursor" not in answer_["result"]:
            return items
        params = {"cursor": answer_["result"]["nextCursor"]}


async def lists_of(link):
    keys = ("tools", "prompts", "resources", "resourceTemplates")
    return {key: await all_pages(link, method, key) for method, key in zip(everything.LISTS, keys)}


async def drive_everything(link, tasks):
    """All of the reference server that a raw host can reach."""
    lists = await lists_of(link)
    # Elicitation and tasks add tools; what an older host is not offered it cannot call.
    for step in everything.plan(lists, tasks=tasks, slow=False):
        await perform(link, step)
    # These ask the host as a task; together, because each sleeps between looks.
    asking = [tool["name"] for tool in lists["tools"] if tool["name"].endswith("-async")]
    calls = [everything.call(name, everything.TOOL_ARGUMENTS[name][0]) for name in asking]
    for done in await asyncio.gather(*(perform(link, step) for step in calls)):
        expect("[COMPLETED]" in texts(done), "a question asked as a task ended so: %s", json.dumps(done)[:400])
    # Older hosts know no tasks, but a tool that insists on one is still theirs to call.
    if any(tool["name"] == "simulate-research-query" for tool in lists["tools"]) and not tasks:
        done = await perform(link, everything.call("simulate-research-query", {"topic": "bridges"}))
        expect("Research Report" in texts(done), "a tool that must be a task: %s", json.dumps(done)[:400])
    return {}


def completion(prompt):
    reference = {"ref": {"type": "ref/prompt", "name": prompt}, "argument": {"name": "who", "value": "o"}}
    return {"method": "completion/complete", "params": reference}


NEWEST_STEPS = {
    "prompt": {"method": "prompts/get", "params": {"name": "rich", "arguments": {"who": "Ada"}}},
    "read": {"method": "resources/read", "params": {"uri": "newest://one"}},
    "read nothing": {"method": "resources/read", "params": {"uri": "elsewhere://x"}},
    "subscribe": {"method": "resources/subscribe", "params": {"uri": "newest://one"}},
    "updated": {"wait": "notifications/resources/updated", "seconds": 8},
    "unsubscribe": {"method": "resources/unsubscribe", "params": {"uri": "newest://one"}},
    "level": {"method": "logging/setLevel", "params": {"level": "debug"}},
    "complete": completion("rich"),
}


async def drive_newest(link, tasks):
    """All of the fixture; returns the answers by name, for MEANINGS."""
    lists = await lists_of(link)
    answers = {"lists": lists}
    for name, step in NEWEST_STEPS.items():
        answers[name] = await perform(link, step)
    for tool in lists["tools"]:
        call = everything.call(tool["name"], {"x": "1"}, progress=True)
        answers[tool["name"]] = await perform(link, call)
    if tasks:
        one = {"name": "rich", "arguments": {"x": "1"}}
        answers["task"] = await perform(link, {"task": one})
        answers["cancelled task"] = await perform(link, {"task": one, "cancel": True})
        await all_pages(link, "tasks/list", "tasks")
    changed = ["notifications/%s/list_changed" % kind for kind in ("tools", "prompts", "resources")]
    for method in changed:
        await perform(link, {"wait": method, "seconds": 8})
    await asyncio.sleep(0.3)  # what follows an answer (task status) is on its way
    return answers


MERGED_STEPS = [
    everything.call("everything_echo", {"message": "hi"}),
    everything.call("everything_get-resource-links", {"count": 2}),
    everything.call("newest_rich", {}),
    everything.call("newest_progress", {}, progress=True),
    everything.call("newest_log", {}),
    everything.call("newest_ask_form", {}),
    everything.call("newest_ask_model_plain", {}),
    everything.call("newest_no_such_tool", {}),
    everything.call("nobody_s", {}),
    {"method": "logging/setLevel", "params": {"level": "debug"}},
    {"method": "prompts/get", "params": {"name": "newest_rich", "arguments": {"who": "Ada"}}},
    {"method": "prompts/get", "params": {"name": "everything_simple-prompt"}},
    {"method": "resources/read", "params": {"uri": "newest://one"}},
    {"method": "resources/read", "params": {"uri": "demo://resource/static/document/features.md"}},
    {"method": "resources/subscribe", "params": {"uri": "newest://one"}},
    {"wait": "notifications/resources/updated", "seconds": 8},
    completion("newest_rich"),
]


async def drive_merged(link, _tasks):
    """Both servers behind one `serve`: names get the server's name in front, uris stay."""
    lists = await lists_of(link)
    names = {item["name"] for item in lists["tools"] + lists["prompts"]}
    expected = {"everything_echo", "newest_rich", "everything_simple-prompt", "newest_plain"}
    expect(expected <= names, "not listed: %s", sorted(expected - names))
    answers = [await perform(link, step) for step in MERGED_STEPS]
    expect("Echo: hi" in texts(answers[0]), "everything_echo: %s", json.dumps(answers[0])[:300])
    expect(len(content_of(answers[2])) == 6, "newest_rich: %s", json.dumps(answers[2])[:300])
    refused = [
        json.dumps(step) for step, reply in zip(MERGED_STEPS, answers) if isinstance(reply, dict) and "error" in reply
    ]
    expect(all("no_such_tool" in step or "nobody_s" in step for step in refused), "refused: %s", refused)
    expect(len(refused) == 2, "calls of tools that are not there were answered")
    return {}


async def cancel(link, params):
    """Begin a call, and give it up once it is under way; nobody may hear of it again."""
    asked = dict(params, _meta={"progressToken": "to be cancelled"})
    request_id, _future = link.begin("tools/call", asked)

    def is_under_way(message):
        return (message.get("params") or {}).get("progressToken") == "to be cancelled"

    await wait_for(link, is_under_way, 10, "progress of a call")
    if link.revision == MODERN:
        link.give_up(request_id)
    else:
        link.notify("notifications/cancelled", {"requestId": request_id})
    await perform(link, everything.call("cancelled", {}))
    expect(request_id not in link.answers, "a cancelled call was answered: %s", link.answers.get(request_id))


async def drive_eras(link, _tasks):
    """All of the fixture of both eras that a raw host can ask for."""
    await lists_of(link)
    await perform(link, {"method": "resources/subscribe", "params": {"uri": check_eras.WATCHED[0]}})
    for name, step in check_eras.STEPS.items():
        if name == "error reserved for MCP" and link.revision == MODERN:
            continue  # there it is the server that breaks the rules
        if step["do"] == "level":
            await perform(link, {"method": "logging/setLevel", "params": {"level": step["level"]}})
        elif step["do"] == "cancel":
            await cancel(link, step["params"])
        elif step["do"] == "request":
            await perform(link, step)
    await perform(link, {"wait": "notifications/resources/updated", "seconds": 8})
    for method in ("tools", "prompts", "resources"):
        await perform(link, {"wait": "notifications/%s/list_changed" % method, "seconds": 8})
    return {}


# Tool of the suite's fixture, its arguments, and what its task must come to.
TASK_TOOLS = [
    ("slow_compute", {"seconds": 0.3, "label": "a"}, "Computed a"),
    ("confirm_delete", {"filename": "a"}, "Kept"),
    ("multi_input", {}, "accept and accept"),
    ("failing_job", {}, "intentionally fails"),
    ("protocol_error_job", {}, "intentionally breaks"),
    ("test_tool_with_task", {}, "Worked for Ada"),
    ("greet", {"name": "Ada"}, "Hello, Ada!"),
]


async def drive_tasks(link, _tasks):
    """Tools that run as tasks of the extension, whatever the server's own tasks are."""
    await lists_of(link)
    for name, arguments, wanted in TASK_TOOLS:
        done = await perform(link, everything.call(name, arguments))
        expect(wanted in json.dumps(done), "%s came to %s", name, json.dumps(done)[:300])
    begun = await link.request("tools/call", {"name": "slow_compute", "arguments": {"seconds": 20}})
    expect(begun.get("result", {}).get("resultType") == "task", "no task: %s", json.dumps(begun)[:300])
    await link.listen(taskIds=[begun["result"]["taskId"]])
    await follow_task(link, begun, cancel=True)
    await link.request("tasks/cancel", {"taskId": begun["result"]["taskId"]})
    return {}


async def probe(link):
    """Requests that a host should not make; the answers are frames too."""
    modern = link.revision == MODERN
    found = []
    for method in MODERN_UNKNOWN_METHODS if modern else UNKNOWN_METHODS:
        found += wrong_code(method, await link.request(method, {}), -32601)
    found += wrong_code("an unknown cursor", await link.request("tools/list", {"cursor": "never given out"}), -32602)
    # Ordinary traffic from real hosts: a cancel after the answer (opencode does that).
    link.notify("notifications/cancelled", {"requestId": 1, "reason": "late"})
    link.notify("notifications/no_such_thing", {})
    if modern:
        return found + await probe_modern(link)
    found += await probe_batch(link)
    await link.request("ping")
    return found


def wrong_code(what, reply, code):
    if reply.get("error", {}).get("code") == code:
        return []
    return ["%s is answered by %s, not by %d" % (what, json.dumps(reply)[:200], code)]


async def probe_modern(link):
    """Requests whose envelope is wrong, or says that the host cannot have what it asks for."""
    found = []
    version, capabilities = RESERVED_PREFIX + "protocolVersion", RESERVED_PREFIX + "clientCapabilities"
    for missing in (version, capabilities):
        meta = {name: value for name, value in link.meta({}).items() if name != missing}
        _id, future = Link.begin(link, "tools/list", {"_meta": meta})
        found += wrong_code("a request without " + missing, await asyncio.wait_for(future, 10), -32602)
    task = {"taskId": "nobody's"}
    found += wrong_code("a task that is not there", await link.request("tasks/get", task), -32602)
    without = dict(task, _meta={capabilities: {}})
    found += wrong_code("a host without tasks", await link.request("tasks/get", without), -32021)
    if isinstance(link, HttpLink):
        found += wrong_code("initialize", await link.request("initialize"), -32601)
        _id, future = link.begin_as("tools/call", {"name": "one"}, **{"Mcp-Name": "other"})
        found += wrong_code("another name in the header", await asyncio.wait_for(future, 10), -32020)
        wrong, headers = {"_meta": {version: "1999-01-01"}}, {"MCP-Protocol-Version": "1999-01-01"}
        _id, future = link.begin_as("tools/list", wrong, **headers)
        found += wrong_code("an unknown revision", await asyncio.wait_for(future, 10), -32022)
    else:
        wrong = await link.request("tools/list", {"_meta": {version: "1999-01-01"}})
        found += wrong_code("an unknown revision", wrong, -32022)
    return found


async def probe_batch(link):
    """Batches belong to 2025-03-26 alone; there the answers may come in any shape."""
    ids = ["batch-1", "batch-2"]
    for request_id in ids:
        link.methods[request_id] = ("ping", {})
    before = len(link.heard)
    link.send([{"jsonrpc": "2.0", "id": request_id, "method": "ping"} for request_id in ids])
    await link.request("ping")
    await asyncio.sleep(0.2)
    replies = [message for message, _line in link.heard[before:] if "method" not in message]
    if link.revision == "2025-03-26":
        answered = sorted(m["id"] for m in replies if m.get("id") in ids and "result" in m)
        return [] if answered == ids else ["a batch of %s was answered for %s only" % (ids, answered)]
    executed = [message for message in replies if message.get("id") in ids and "result" in message]
    return ["a batch was carried out, which this revision does not have"] if executed else []


# ---------------------------------------------------------------------------
# What must not be lost on the way down. Each row: since when the rule holds
# (hosts before `until` get the older spelling), and what must be true.
# ---------------------------------------------------------------------------


def content_of(answer_):
    return answer_.get("result", {}).get("content", [])


def texts(answer_):
    return " ".join(block.get("text", "") for block in content_of(answer_))


def tool(answers, name):
    return next(one for one in answers["lists"]["tools"] if one["name"] == name)


MEANINGS = [
    # name, first revision, first revision that it no longer concerns, test of the answers
    ("both pages of every list are listed", None, None, lambda a: all(len(v) > 1 for v in a["lists"].values())),
    ("six blocks of content stay six", None, None, lambda a: len(content_of(a["rich"])) == 6),
    ("a prompt's six messages stay six", None, None, lambda a: len(a["prompt"]["result"]["messages"]) == 6),
    ("a link keeps its uri", None, None, lambda a: "newest://one" in json.dumps(content_of(a["rich"])[5])),
    ("sound keeps its bytes", None, None, lambda a: "UklGR" in json.dumps(content_of(a["rich"])[2])),
    ("a failure stays one", None, None, lambda a: a["failing"]["result"].get("isError") is True),
    ("resource not found stays an error", None, MODERN, lambda a: a["read nothing"]["error"]["code"] == -32002),
    ("resource not found is a bad parameter", MODERN, None, lambda a: a["read nothing"]["error"]["code"] == -32602),
    ("sampling reaches the host", None, None, lambda a: "sampled" in texts(a["ask_model_plain"])),
    ("roots reach the server", None, None, lambda a: "file:///project/one" in texts(a["ask_roots"])),
    ("foreign _meta of a result is kept", None, None, lambda a: "example.test/kept" in a["rich"]["result"]["_meta"]),
    ("structured content becomes text", None, "2025-06-18", lambda a: '"count"' in texts(a["structured_only"])),
    ("structured content stays", "2025-06-18", None, lambda a: a["rich"]["result"]["structuredContent"]["count"] == 3),
    (
        "a tool's title goes into its annotations",
        "2025-03-26",
        "2025-06-18",
        lambda a: tool(a, "rich")["annotations"].get("title") == "Tool rich",
    ),
    (
        "a title in the annotations is left alone",
        "2025-03-26",
        "2025-06-18",
        lambda a: tool(a, "failing")["annotations"].get("title") == "A title of its own",
    ),
    ("titles stay", "2025-06-18", None, lambda a: tool(a, "rich")["title"] == "Tool rich"),
    ("icons stay", "2025-11-25", None, lambda a: len(tool(a, "rich")["icons"]) == 2),
    ("forms reach the host", "2025-06-18", None, lambda a: "Ada" in texts(a["ask_form"])),
    ("a URL question is refused", None, "2025-11-25", lambda a: "error" in texts(a["ask_url"])),
    ("a URL question reaches the host", "2025-11-25", None, lambda a: "accept" in texts(a["ask_url"])),
    (
        "a URL that must be opened first is a failed call",
        None,
        "2025-11-25",
        lambda a: a["need_url"].get("result", {}).get("isError") and "example.test/pay" in texts(a["need_url"]),
    ),
    ("a URL that must be opened first", "2025-11-25", MODERN, lambda a: a["need_url"]["error"]["code"] == -32042),
    # The server wants it again and again, whatever the person does.
    ("a URL is not asked for without end", MODERN, None, lambda a: a["need_url"]["error"]["code"] == -32603),
    ("sampling with tools is refused", None, "2025-11-25", lambda a: "error" in texts(a["ask_model_tools"])),
    ("sampling with tools reaches the host", "2025-11-25", None, lambda a: "sampled" in texts(a["ask_model_tools"])),
    ("sampling with sound is refused", None, "2025-03-26", lambda a: "error" in texts(a["ask_model_audio"])),
    ("a task's result is the tool's", "2025-11-25", MODERN, lambda a: len(content_of(a["task"])) == 6),
]


def meaning_problems(revision, answers):
    found = []
    for name, since, until, holds in MEANINGS:
        if (since and revision < since) or (until and revision >= until):
            continue
        try:
            fine = holds(answers)
        except (KeyError, IndexError, TypeError, StopIteration) as error:
            fine, name = False, "%s (%s %s)" % (name, type(error).__name__, error)
        if not fine:
            found.append("not so: %s" % name)
    return found


# ---------------------------------------------------------------------------
# The check
# ---------------------------------------------------------------------------


class Served:
    """What is driven: the servers behind one endpoint, how, and by hosts of which revisions.

    `direct`: the revision at which the server passes by itself, as a control.
    `quick`: which of the revisions, and whether over HTTP ("http"), CI runs.
    """

    def __init__(self, drive, names, peers, revisions=schemas.REVISIONS, direct=None, quick=schemas.REVISIONS):
        self.drive = drive
        self.names = names
        self.peers = peers
        self.revisions = revisions
        self.direct = direct
        self.quick = quick


SERVERS = {
    "everything": Served(drive_everything, ["everything"], ["servers"], direct="2025-11-25"),
    "newest": Served(drive_newest, ["newest"], [], direct="2025-11-25"),
    "merged": Served(drive_merged, ["everything", "newest"], ["servers"]),
    "eras": Served(drive_eras, ["eras"], ["sdk2"], direct=MODERN, quick=("2025-06-18", "http")),
    "tasks": Served(drive_tasks, ["tasks"], ["sdk2"], revisions=(MODERN,), direct=MODERN, quick=("http",)),
    "tasks of 2025-11-25": Served(drive_tasks, ["old_tasks"], ["sdk2"], revisions=(MODERN,), quick=(MODERN,)),
}


def entry_of(name):
    if name == "everything":
        return node_entry("server-everything")
    if name == "newest":
        return {"command": sys.executable, "args": [str(NEWEST)]}
    fixture = check_eras.FIXTURE if name == "eras" else SUITE_FIXTURE
    protocol = "legacy" if name == "old_tasks" else "modern"
    program = install.venv_program("sdk2", "python")
    return {"command": program, "args": [str(fixture)], "mcpx": {"scope": "session", "protocol": protocol}}


async def connected(place, served, revision, direct, url):
    """A link to what is served: by itself, through `mcpx serve`, or at a URL."""
    if url:
        port = int(url.split(":")[2].split("/")[0])
        return HttpLink(answer, port, "/mcp/" + ",".join(served.names))
    link = ModernLink(answer) if revision == MODERN else Link(revision, CAPABILITIES[revision], answer)
    if direct:
        entry = entry_of(served.names[0])
        return await link.start([entry["command"]] + entry["args"], place.env(), place.work)
    return await connect(place, served.names, link)


async def sweep(place, served, revision, schema, direct, url):
    """Drive one server as a host of one revision; returns all that is wrong.

    `direct` leaves mcpx out: at the revision that it speaks each server must
    pass by itself, which shows that it is not the server that breaks the rules.
    """
    link = await connected(place, served, revision, direct, url)
    try:
        greeting = await link.initialize()
        found = []
        if greeting["protocolVersion"] != revision:
            found.append("asked for %s, got %s" % (revision, greeting["protocolVersion"]))
        if revision == MODERN:
            await link.listen(toolsListChanged=True, promptsListChanged=True, resourcesListChanged=True)
        try:
            answers = await served.drive(link, revision == "2025-11-25")
            if answers:
                found += meaning_problems(revision, answers)
            if not direct:
                found += await probe(link)
        except LinkClosed as error:
            found.append(str(error))
    finally:
        await link.close(2 if direct else 15)
    found += ["a line that is not JSON: %r" % line[:80] for line in link.noise]
    found += link.faults if revision == MODERN else []
    heard = [message for message, _line in link.heard]
    found += schemas.problems_of(schema, heard, link.methods)
    twice = [request_id for request_id, replies in link.answers.items() if len(replies) > 1]
    return found + ["request %r was answered more than once" % request_id for request_id in twice]


def check_frames(place, server, revision, schema, direct=False, http=False):
    served = SERVERS[server]
    servers = {name: entry_of(name) for name in served.names}
    if http:
        with open_door(place, servers) as url:
            return asyncio.run(sweep(place, served, revision, schema, direct, url))
    place.configure(servers)
    return asyncio.run(sweep(place, served, revision, schema, direct, None))
