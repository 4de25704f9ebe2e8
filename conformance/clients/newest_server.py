#!/usr/bin/env python3
"""A stdio server that offers the newest shape of everything in 2025-11-25.

It speaks that revision only and does not look at what its client can do: every
list, result, question and notification carries every optional field. What
arrives at an older host is then mcpx's own doing. Standard library only.
"""
import json
import sys
import threading

META = {"example.test/kept": {"deep": [1, 2]}}
MODIFIED = "2025-01-12T15:00:58Z"
ANNOTATIONS = {"audience": ["user", "assistant"], "priority": 0.5, "lastModified": MODIFIED}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
SOUND = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA="
ICONS = [
    {"src": "https://example.test/icon.png", "mimeType": "image/png", "sizes": ["48x48", "96x96"], "theme": "light"},
    {"src": "data:image/png;base64," + PIXEL, "sizes": ["any"], "theme": "dark"},
]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
COUNT_SCHEMA = {
    "$schema": DRAFT,
    "type": "object",
    "properties": {"count": {"type": "integer"}},
    "required": ["count"],
}
URL_QUESTION = {"mode": "url", "message": "Open this", "url": "https://example.test/pay", "elicitationId": "pay-1"}

GREETING = {
    "protocolVersion": "2025-11-25",
    "capabilities": {
        "tools": {"listChanged": True},
        "prompts": {"listChanged": True},
        "resources": {"listChanged": True, "subscribe": True},
        "logging": {},
        "completions": {},
        "experimental": {"example.test/feature": {"on": True}},
        "tasks": {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}},
    },
    "serverInfo": {
        "name": "newest",
        "title": "The newest of everything",
        "version": "1.0",
        "description": "Every optional field is set",
        "websiteUrl": "https://example.test/",
        "icons": ICONS,
    },
    "instructions": "Look at the fields.",
    "_meta": META,
}


# ---------------------------------------------------------------------------
# Lists
# ---------------------------------------------------------------------------


def tool(name, **more):
    base = {
        "name": name,
        "title": "Tool " + name,
        "description": "About " + name,
        "icons": ICONS,
        "inputSchema": {"$schema": DRAFT, "type": "object", "properties": {"x": {"type": "string"}}},
        "annotations": {"readOnlyHint": True, "idempotentHint": True, "destructiveHint": False, "openWorldHint": False},
        "execution": {"taskSupport": "optional"},
        "_meta": META,
    }
    return dict(base, **more)


def titled(kind, **fields):
    return dict({"title": "A titled " + kind, "description": "One " + kind, "icons": ICONS, "_meta": META}, **fields)


TOOLS = [
    tool("rich", outputSchema=COUNT_SCHEMA),
    tool("structured_only", outputSchema=COUNT_SCHEMA),
    tool("failing", annotations={"title": "A title of its own", "readOnlyHint": True}),
    tool("progress"),
    tool("log"),
    tool("ask_form"),
    tool("ask_url"),
    tool("need_url"),
    tool("ask_model_plain"),
    tool("ask_model_tools"),
    tool("ask_model_audio"),
    tool("ask_roots"),
    tool("change"),
]

PROMPTS = [
    titled(
        "prompt",
        name="rich",
        arguments=[{"name": "who", "title": "Who", "description": "Whom to greet", "required": True}],
    ),
    titled("prompt", name="plain"),
]

RESOURCES = [
    titled("resource", name="one", uri="newest://one", mimeType="text/plain", size=12, annotations=ANNOTATIONS),
    titled("resource", name="two", uri="newest://two", mimeType="image/png", size=70, annotations=ANNOTATIONS),
]

TEMPLATES = [
    titled(
        "template", name="any", uriTemplate="newest://any/{id}", mimeType="text/plain", annotations=ANNOTATIONS
    ),
    titled("template", name="other", uriTemplate="newest://other/{id}", annotations=ANNOTATIONS),
]


def page(key, items, params):
    """Two pages of every list; the cursor is opaque on purpose."""
    if params.get("cursor") == "second half":
        return {key: items[1:], "_meta": META}
    return {key: items[:1], "nextCursor": "second half", "_meta": META}


# ---------------------------------------------------------------------------
# Content
# ---------------------------------------------------------------------------


def block(kind, **fields):
    return dict({"type": kind, "annotations": ANNOTATIONS, "_meta": META}, **fields)


def every_content():
    text = {"uri": "newest://one", "mimeType": "text/plain", "text": "inside", "_meta": META}
    blob = {"uri": "newest://two", "mimeType": "image/png", "blob": PIXEL, "_meta": META}
    link = {key: RESOURCES[0][key] for key in ("name", "uri", "title", "description", "mimeType", "size", "icons")}
    return [
        block("text", text="words"),
        block("image", data=PIXEL, mimeType="image/png"),
        block("audio", data=SOUND, mimeType="audio/wav"),
        block("resource", resource=text),
        block("resource", resource=blob),
        block("resource_link", **link),
    ]


FORM = {
    "$schema": DRAFT,
    "type": "object",
    "properties": {
        "name": {"type": "string", "title": "Name", "description": "d", "minLength": 1, "default": "Ada"},
        "mail": {"type": "string", "format": "email", "maxLength": 90, "default": "ada@example.test"},
        "count": {"type": "integer", "title": "Count", "minimum": 1, "maximum": 9, "default": 3},
        "ratio": {"type": "number", "minimum": 0.5, "maximum": 1.5, "default": 0.75},
        "sure": {"type": "boolean", "title": "Sure", "default": True},
        "color": {"type": "string", "enum": ["red", "green"], "title": "Color", "default": "red"},
        "pet": {
            "type": "string",
            "title": "Pet",
            "oneOf": [{"const": "c", "title": "Cat"}, {"const": "d", "title": "Dog"}],
            "default": "c",
        },
        "old": {"type": "string", "enum": ["a", "b"], "enumNames": ["Ay", "Bee"], "default": "a"},
    },
    "required": ["name"],
}

# What 2025-06-18 cannot show at all, so it comes as a question of its own.
MANY = {
    "type": "object",
    "properties": {
        "plain": {"type": "array", "minItems": 1, "items": {"type": "string", "enum": ["x", "y"]}, "default": ["x"]},
        "titled": {
            "type": "array",
            "maxItems": 2,
            "items": {"anyOf": [{"const": "1", "title": "One"}, {"const": "2", "title": "Two"}]},
        },
    },
}


def sampling(content, **more):
    base = {
        "messages": [{"role": "user", "content": content, "_meta": META}],
        "maxTokens": 10,
        "systemPrompt": "Be brief.",
        "temperature": 0.5,
        "stopSequences": ["."],
        "includeContext": "none",
        "metadata": {"provider": {"x": 1}},
        "modelPreferences": {"hints": [{"name": "any"}], "costPriority": 0.1, "speedPriority": 1},
    }
    return dict(base, **more)


def sampling_with_tools():
    params = sampling([block("text", text="use it"), block("image", data=PIXEL, mimeType="image/png")])
    use = {"type": "tool_use", "id": "u1", "name": "rich", "input": {"x": "1"}, "_meta": META}
    result = {"type": "tool_result", "toolUseId": "u1", "content": every_content(), "structuredContent": {"count": 1}}
    params["messages"] += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return dict(params, tools=[TOOLS[0]], toolChoice={"mode": "auto"})


# ---------------------------------------------------------------------------
# The wire
# ---------------------------------------------------------------------------


class Server:
    """Answers each request in a thread of its own, so that tools can ask."""

    def __init__(self):
        self.lock = threading.Lock()
        self.asked = 0
        self.answers = {}  # our question's id -> [event, answer]
        self.tasks = {}  # task id -> task

    def send(self, message):
        with self.lock:
            sys.stdout.write(json.dumps(dict(message, jsonrpc="2.0")) + "\n")
            sys.stdout.flush()

    def notify(self, method, params=None):
        self.send({"method": method, "params": params} if params else {"method": method})

    def ask(self, method, params=None):
        """Put a question to the client; returns its whole answer."""
        with self.lock:
            self.asked += 1
            question_id = "question-%d" % self.asked
            self.answers[question_id] = [threading.Event(), None]
        message = {"id": question_id, "method": method}
        if params is not None:
            message["params"] = params
        self.send(message)
        event, _none = self.answers[question_id]
        if not event.wait(20):
            return {"no answer": method}
        answer = self.answers.pop(question_id)[1]
        return {key: answer[key] for key in ("result", "error") if key in answer}

    def on_message(self, message):
        if "method" in message and "id" in message:
            threading.Thread(target=self.on_request, args=(message,), daemon=True).start()
        elif "method" not in message and message.get("id") in self.answers:
            waiting = self.answers[message["id"]]
            waiting[1] = message
            waiting[0].set()

    def on_request(self, message):
        method, params = message["method"], message.get("params") or {}
        try:
            handler = METHODS.get(method)
            if handler is None:
                raise Refused(-32601, "Method not found")
            self.send({"id": message["id"], "result": handler(self, params)})
        except Refused as refusal:
            self.send({"id": message["id"], "error": refusal.error})


class Refused(Exception):
    """A JSON-RPC error as the answer."""

    def __init__(self, code, message, data=None):
        super().__init__(message)
        self.error = {"code": code, "message": message}
        if data is not None:
            self.error["data"] = data


# ---------------------------------------------------------------------------
# Requests
# ---------------------------------------------------------------------------


def text_result(value):
    return {"content": [block("text", text=json.dumps(value, sort_keys=True))], "_meta": META}


def call_tool(server, params):
    name = params["name"]
    if "task" in params:
        return create_task(server, params)
    if name not in {one["name"] for one in TOOLS}:
        raise Refused(-32602, "Unknown tool: " + name)
    return TOOL_RESULTS[name](server, params)


def rich(_server, _params):
    return {"content": every_content(), "structuredContent": {"count": 3}, "isError": False, "_meta": META}


def progress(server, params):
    token = (params.get("_meta") or {}).get("progressToken")
    for step in (1, 2.5) if token is not None else ():
        values = {"progressToken": token, "progress": step, "total": 4, "message": "step %g" % step, "_meta": META}
        server.notify("notifications/progress", values)
    return text_result("done")


def log(server, _params):
    entry = {"level": "error", "logger": "newest", "data": {"what": "an object"}, "_meta": META}
    server.notify("notifications/message", entry)
    return text_result("logged")


def ask_form(server, _params):
    form = {"mode": "form", "message": "Please fill in", "requestedSchema": FORM, "_meta": META}
    many = {"mode": "form", "message": "Choose some", "requestedSchema": MANY}
    return text_result([server.ask("elicitation/create", form), server.ask("elicitation/create", many)])


def ask_url(server, _params):
    answer = server.ask("elicitation/create", URL_QUESTION)
    server.notify("notifications/elicitation/complete", {"elicitationId": URL_QUESTION["elicitationId"]})
    return text_result(answer)


def need_url(_server, _params):
    raise Refused(-32042, "Open a page first", {"elicitations": [URL_QUESTION]})


def change(server, _params):
    for kind in ("tools", "prompts", "resources"):
        server.notify("notifications/%s/list_changed" % kind, {"_meta": META})
    return text_result("changed")


TOOL_RESULTS = {
    "rich": rich,
    "structured_only": lambda s, p: {"content": [], "structuredContent": {"count": 4}},
    "failing": lambda s, p: {"content": every_content()[:1], "isError": True, "_meta": META},
    "progress": progress,
    "log": log,
    "ask_form": ask_form,
    "ask_url": ask_url,
    "need_url": need_url,
    "ask_model_plain": lambda s, p: text_result(s.ask("sampling/createMessage", sampling(block("text", text="hi")))),
    "ask_model_tools": lambda s, p: text_result(s.ask("sampling/createMessage", sampling_with_tools())),
    "ask_model_audio": lambda s, p: text_result(
        s.ask("sampling/createMessage", sampling(block("audio", data=SOUND, mimeType="audio/wav")))
    ),
    "ask_roots": lambda s, p: text_result(s.ask("roots/list", {"_meta": META})),
    "change": change,
}


def create_task(server, params):
    task_id = "task-%d" % (len(server.tasks) + 1)
    task = {
        "taskId": task_id,
        "status": "working",
        "statusMessage": "Just begun",
        "createdAt": MODIFIED,
        "lastUpdatedAt": MODIFIED,
        "ttl": params["task"].get("ttl"),
        "pollInterval": 50,
    }
    server.tasks[task_id] = task
    finished = dict(task, status="completed", statusMessage="Finished")

    def finish():
        if server.tasks[task_id]["status"] == "working":
            server.tasks[task_id] = finished
            server.notify("notifications/tasks/status", dict(finished, _meta=META))

    threading.Timer(0.2, finish).start()
    return {"task": task, "_meta": META}


def task_of(server, params):
    if params.get("taskId") not in server.tasks:
        raise Refused(-32602, "No such task")
    return server.tasks[params["taskId"]]


def task_result(server, params):
    task_id = task_of(server, params)["taskId"]
    related = {"io.modelcontextprotocol/related-task": {"taskId": task_id}}
    return dict(rich(server, params), _meta=dict(META, **related))


def cancel_task(server, params):
    cancelled = dict(task_of(server, params), status="cancelled", statusMessage="Cancelled")
    server.tasks[cancelled["taskId"]] = cancelled
    return dict(cancelled, _meta=META)


def get_prompt(_server, params):
    if params["name"] == "plain":
        return {"messages": [{"role": "assistant", "content": block("text", text="plain")}]}
    messages = [{"role": "user", "content": one} for one in every_content()]
    return {"description": "All content", "messages": messages, "_meta": META}


def read_resource(_server, params):
    uri = params["uri"]
    if not uri.startswith("newest://"):
        raise Refused(-32002, "Resource not found", {"uri": uri})
    inner = {"uri": uri + "/inner", "mimeType": "image/png", "blob": PIXEL, "_meta": META}
    return {"contents": [{"uri": uri, "mimeType": "text/plain", "text": "body", "_meta": META}, inner], "_meta": META}


def subscribe(server, params):
    threading.Timer(
        0.1, server.notify, ("notifications/resources/updated", {"uri": params["uri"], "_meta": META})
    ).start()
    return {"_meta": META}


METHODS = {
    "initialize": lambda s, p: GREETING,
    "ping": lambda s, p: {},
    "tools/list": lambda s, p: page("tools", TOOLS, p),
    "prompts/list": lambda s, p: page("prompts", PROMPTS, p),
    "resources/list": lambda s, p: page("resources", RESOURCES, p),
    "resources/templates/list": lambda s, p: page("resourceTemplates", TEMPLATES, p),
    "tools/call": call_tool,
    "prompts/get": get_prompt,
    "resources/read": read_resource,
    "resources/subscribe": subscribe,
    "resources/unsubscribe": lambda s, p: {"_meta": META},
    "logging/setLevel": lambda s, p: {"_meta": META},
    "completion/complete": lambda s, p: {
        "completion": {"values": ["one", "two"], "total": 9, "hasMore": True},
        "_meta": META,
    },
    "tasks/get": lambda s, p: dict(task_of(s, p), _meta=META),
    "tasks/list": lambda s, p: page("tasks", list(s.tasks.values()) or [], p),
    "tasks/result": task_result,
    "tasks/cancel": cancel_task,
}


if __name__ == "__main__":
    service = Server()
    for line in sys.stdin:
        if line.strip():
            service.on_message(json.loads(line))
