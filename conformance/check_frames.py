"""Every frame that mcpx sends to a host of a revision is one that this revision knows.

A raw host of each legacy revision drives two servers through mcpx: the
reference server, and a fixture that sets every optional field of 2025-11-25.
All it hears is recorded and validated against the revision's published schema,
made strict (schemas.py). What a schema cannot see (was something lost on the
way down?) is in MEANINGS below.
"""
import asyncio
import json
import sys
from pathlib import Path

import everything
import schemas
from check_upstreams import node_entry
from link import Link, LinkClosed, connect
from place import expect

NEWEST = Path(__file__).resolve().parent / "clients" / "newest_server.py"

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
# Driving
# ---------------------------------------------------------------------------


async def perform(link, step):
    """Run one step of a plan (everything.py); returns the answer or None."""
    if "wait" in step:
        return await wait_for(link, step["wait"], step["seconds"])
    if "task" in step:
        return await run_task(link, step)
    params = dict(step["params"]) if step.get("params") is not None else None
    if step.get("progress"):
        params["_meta"] = {"progressToken": "token of %s" % params["name"]}
    return await link.request(step["method"], params)


async def wait_for(link, method, seconds):
    for _ in range(int(seconds * 20)):
        if any(message.get("method") == method for message, _line in link.heard):
            return True
        await asyncio.sleep(0.05)
    raise LinkClosed("no %s within %g s" % (method, seconds))


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


NEWEST_STEPS = {
    "prompt": {"method": "prompts/get", "params": {"name": "rich", "arguments": {"who": "Ada"}}},
    "read": {"method": "resources/read", "params": {"uri": "newest://one"}},
    "read nothing": {"method": "resources/read", "params": {"uri": "elsewhere://x"}},
    "subscribe": {"method": "resources/subscribe", "params": {"uri": "newest://one"}},
    "updated": {"wait": "notifications/resources/updated", "seconds": 8},
    "unsubscribe": {"method": "resources/unsubscribe", "params": {"uri": "newest://one"}},
    "level": {"method": "logging/setLevel", "params": {"level": "debug"}},
    "complete": {
        "method": "completion/complete",
        "params": {
            "ref": {"type": "ref/prompt", "name": "rich"},
            "argument": {"name": "who", "value": "o"},
        },
    },
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
    await asyncio.sleep(0.3)  # what follows an answer (list changes, task status) is on its way
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
    {
        "method": "completion/complete",
        "params": {
            "ref": {"type": "ref/prompt", "name": "newest_rich"},
            "argument": {"name": "who", "value": "o"},
        },
    },
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
    refused = [json.dumps(step) for step, reply in zip(MERGED_STEPS, answers) if reply is not True and "error" in reply]
    expect(all("no_such_tool" in step or "nobody_s" in step for step in refused), "refused: %s", refused)
    expect(len(refused) == 2, "calls of tools that are not there were answered")
    return {}


async def probe(link):
    """Requests that a host should not make; the answers are frames too."""
    found = []
    for method in UNKNOWN_METHODS:
        reply = await link.request(method, {})
        if reply.get("error", {}).get("code") != -32601:
            found.append("%s is answered by %s, not by -32601" % (method, json.dumps(reply)[:200]))
    reply = await link.request("tools/list", {"cursor": "never given out"})
    if reply.get("error", {}).get("code") != -32602:
        found.append("an unknown cursor is answered by %s, not by -32602" % json.dumps(reply)[:200])
    # Ordinary traffic from real hosts: a cancel after the answer (opencode does that).
    link.notify("notifications/cancelled", {"requestId": 1, "reason": "late"})
    link.notify("notifications/no_such_thing", {})
    found += await probe_batch(link)
    await link.request("ping")
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
    ("resource not found stays an error", None, None, lambda a: a["read nothing"]["error"]["code"] == -32002),
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
    ("a URL that must be opened first", "2025-11-25", None, lambda a: a["need_url"]["error"]["code"] == -32042),
    ("sampling with tools is refused", None, "2025-11-25", lambda a: "error" in texts(a["ask_model_tools"])),
    ("sampling with tools reaches the host", "2025-11-25", None, lambda a: "sampled" in texts(a["ask_model_tools"])),
    ("sampling with sound is refused", None, "2025-03-26", lambda a: "error" in texts(a["ask_model_audio"])),
    ("a task's result is the tool's", "2025-11-25", None, lambda a: len(content_of(a["task"])) == 6),
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

DRIVERS = {"everything": drive_everything, "newest": drive_newest, "merged": drive_merged}

# What each driver wants served; several names make one merged server.
SERVED = {"everything": ["everything"], "newest": ["newest"], "merged": ["everything", "newest"]}


def entry_of(server):
    if server == "everything":
        return node_entry("server-everything")
    return {"command": sys.executable, "args": [str(NEWEST)]}


async def sweep(place, server, revision, schema, direct=False):
    """Drive one server as a host of one revision; returns all that is wrong.

    `direct` leaves mcpx out: at the newest revision both servers must pass by
    themselves, which shows that it is not they who break the rules.
    """
    link = Link(revision, CAPABILITIES[revision], answer)
    if direct:
        entry = entry_of(server)
        await link.start([entry["command"]] + entry["args"], place.env(), place.work)
    else:
        await connect(place, SERVED[server], link)
    try:
        greeting = await link.initialize()
        found = []
        if greeting["protocolVersion"] != revision:
            found.append("asked for %s, got %s" % (revision, greeting["protocolVersion"]))
        tasks = revision == "2025-11-25"
        try:
            answers = await DRIVERS[server](link, tasks)
            if answers:
                found += meaning_problems(revision, answers)
            if not direct:
                found += await probe(link)
        except LinkClosed as error:
            found.append(str(error))
    finally:
        await link.close(2 if direct else 15)
    found += ["a line that is not JSON: %r" % line[:80] for line in link.noise]
    heard = [message for message, _line in link.heard]
    found += schemas.problems_of(schema, heard, link.methods)
    twice = [request_id for request_id, replies in link.answers.items() if len(replies) > 1]
    return found + ["request %r was answered more than once" % request_id for request_id in twice]


def check_frames(place, server, revision, schema, direct=False):
    place.configure({name: entry_of(name) for name in SERVED[server]})
    return asyncio.run(sweep(place, server, revision, schema, direct))
