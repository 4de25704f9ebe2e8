"""The published JSON schema of each revision, made strict, and what may be sent when.

The schemas come out of a pinned package at run time (see install.py); nothing
of them is kept here. 2024-11-05 is not in that package: it is 2025-03-26
without what 2025-03-26 added, and that list is short (see first_revision). Nor
is the tasks extension of 2026-07-28 in any package; TASKS_EXTENSION restates it.

Strict means: an object may hold only the properties that its definition names.
The specification lets most objects grow; a host with a strict parser does not.
"""
import copy
import json
import subprocess
from pathlib import Path

import install
from place import Failed, expect

LEGACY = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN = "2026-07-28"
REVISIONS = LEGACY + (MODERN,)

HERE = Path(__file__).resolve().parent

# Objects whose properties are somebody else's business, by the property that
# holds them. Each is open by design in every revision that has it.
OPEN_PROPERTIES = {
    "_meta": "anyone may add keys (reserved prefixes are checked apart)",
    "arguments": "the tool's or prompt's own",
    "experimental": "capabilities outside the specification",
    "inputSchema": "a JSON Schema document",
    "outputSchema": "a JSON Schema document",
    "metadata": "the model provider's own",
    "structuredContent": "the tool's own",
    "input": "arguments of a tool that the model wants used",
}

# The same for definitions that 2026-07-28 has made of such properties.
OPEN_DEFINITIONS = {
    "MetaObject": "anyone may add keys (reserved prefixes are checked apart)",
    "RequestMetaObject": "the same",
    "ResultMetaObject": "the same",
    "NotificationMetaObject": "the same",
    "SubscriptionsListenResultMeta": "the same",
}

# Keys of _meta with the specification's own prefix that a revision defines, and where:
# anywhere, or at the top of a result or of a notification's params.
RESERVED_PREFIX = "io.modelcontextprotocol/"
SERVER_INFO = RESERVED_PREFIX + "serverInfo"
SUBSCRIPTION = RESERVED_PREFIX + "subscriptionId"
RESERVED_ANYWHERE = {"2025-11-25": {RESERVED_PREFIX + "related-task"}}
RESERVED_AT_TOP = {MODERN: {"result": {SERVER_INFO, SUBSCRIPTION}, "params": {SUBSCRIPTION}}}

# Result definition of each request that a host sends.
RESULTS = {
    "initialize": "InitializeResult",
    "ping": "EmptyResult",
    "tools/list": "ListToolsResult",
    "tools/call": "CallToolResult",
    "prompts/list": "ListPromptsResult",
    "prompts/get": "GetPromptResult",
    "resources/list": "ListResourcesResult",
    "resources/templates/list": "ListResourceTemplatesResult",
    "resources/read": "ReadResourceResult",
    "resources/subscribe": "EmptyResult",
    "resources/unsubscribe": "EmptyResult",
    "completion/complete": "CompleteResult",
    "logging/setLevel": "EmptyResult",
    "tasks/get": "GetTaskResult",
    "tasks/cancel": "CancelTaskResult",
    "tasks/list": "ListTasksResult",
    # The result of what the task ran, and only tools are run as tasks here.
    "tasks/result": "CallToolResult",
}

MODERN_RESULTS = {
    "server/discover": "DiscoverResult",
    "subscriptions/listen": "SubscriptionsListenResult",
    "tasks/get": "GetTaskResult",
    "tasks/update": "EmptyResult",
    "tasks/cancel": "EmptyResult",
}
MODERN_RESULTS.update(
    (method, RESULTS[method])
    for method in RESULTS
    if method.startswith(("tools/", "prompts/", "resources/", "completion/")) and not method.endswith("ubscribe")
)

# Requests that may be answered by a question (2026-07-28 basic/patterns/mrtr).
MAY_ASK = ("tools/call", "prompts/get", "resources/read")

# Errors whose data 2026-07-28 defines.
MODERN_ERRORS = {
    -32020: "HeaderMismatchError",
    -32021: "MissingRequiredClientCapabilityError",
    -32022: "UnsupportedProtocolVersionError",
}


# ---------------------------------------------------------------------------
# The tasks extension: ext-tasks, schema/draft/schema.ts, as a server's frames
# ---------------------------------------------------------------------------

TEXT = {"type": "string"}
TASK = {
    "taskId": TEXT,
    "status": TEXT,
    "statusMessage": TEXT,
    "createdAt": TEXT,
    "lastUpdatedAt": TEXT,
    "ttlMs": {"type": ["integer", "null"]},
    "pollIntervalMs": {"type": "integer"},
}
TASK_REQUIRED = ["taskId", "status", "createdAt", "lastUpdatedAt", "ttlMs"]
# Status -> what a task of that status has besides.
TASK_STATES = {
    "working": {},
    "input_required": {"inputRequests": {"$ref": "#/$defs/InputRequests"}},
    # The result of what ran; only tools are run as tasks.
    "completed": {"result": {"$ref": "#/$defs/TaskOutcome"}},
    "failed": {"error": {"$ref": "#/$defs/Error"}},
    "cancelled": {},
}


def task(more, required):
    return {"type": "object", "properties": dict(TASK, **more), "required": TASK_REQUIRED + required}


def any_task(more, required):
    """A task in one of its states, with the properties of the message that it is in."""
    states = []
    for status, besides in TASK_STATES.items():
        properties = dict(more, status={"const": status, "type": "string"}, **besides)
        states.append(task(properties, required + list(besides)))
    return {"anyOf": states}


def with_tasks(definitions):
    """The definitions of 2026-07-28, and those of its tasks extension."""
    meta = {"_meta": {"$ref": "#/$defs/ResultMetaObject"}}
    outcome = copy.deepcopy(definitions["CallToolResult"])
    outcome["required"].remove("resultType")
    listened = copy.deepcopy(definitions["SubscriptionFilter"])
    listened["properties"]["taskIds"] = {"type": "array", "items": TEXT}
    method = {"const": "notifications/tasks", "type": "string"}
    told = any_task({"_meta": {"$ref": "#/$defs/NotificationMetaObject"}}, [])
    return dict(
        definitions,
        CreateTaskResult=task(dict(meta, resultType={"const": "task", "type": "string"}), ["resultType"]),
        GetTaskResult=any_task(dict(meta, resultType=TEXT), ["resultType"]),
        TaskOutcome=outcome,
        SubscriptionFilter=listened,
        TaskStatusNotification={
            "type": "object",
            "properties": {"method": method, "params": {"$ref": "#/$defs/TaskStatusNotificationParams"}},
            "required": ["method", "params"],
        },
        TaskStatusNotificationParams=told,
        ServerNotification={"anyOf": definitions["ServerNotification"]["anyOf"] + [TASKS_NOTIFICATION]},
    )


TASKS_NOTIFICATION = {"$ref": "#/$defs/TaskStatusNotification"}


class Schema:
    """One revision: its strict schema and the messages that a server may send."""

    def __init__(self, revision, published):
        self.revision = revision
        self.is_modern = revision == MODERN
        self.key = "$defs" if "$defs" in published else "definitions"
        self.definitions = copy.deepcopy(published[self.key])
        if self.is_modern:
            self.definitions = with_tasks(self.definitions)
        self.document = {"$schema": published["$schema"], self.key: strict(self.definitions, self.key)}
        self.requests = self._methods("ServerRequest")
        self.notifications = self._methods("ServerNotification")
        self.results = MODERN_RESULTS if self.is_modern else RESULTS

    def _methods(self, union):
        """method -> definition, for the members of a union; 2026-07-28 has no ServerRequest."""
        members = self.definitions.get(union, {"anyOf": []})["anyOf"]
        names = [branch["$ref"].rpartition("/")[2] for branch in members]
        return {self.definitions[name]["properties"]["method"]["const"]: name for name in names}

    def validate(self, items):
        """[(definition, value)] -> a list of problems for each."""
        job = {"schema": self.document, "definitions": self.key, "items": items}
        done = subprocess.run(
            [install.venv_program("sdk1", "python"), str(HERE / "clients" / "validate.py")],
            input=json.dumps(job).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            check=False,
        )
        expect(done.returncode == 0, "the validator failed: %s", done.stderr.decode(errors="replace")[-800:])
        return json.loads(done.stdout)


# ---------------------------------------------------------------------------
# Getting the schemas
# ---------------------------------------------------------------------------


def load():
    """{revision: Schema} for every revision."""
    script = install.npm_package("schemas", "@modelcontextprotocol/conformance") / "dist" / "index.js"
    done = subprocess.run(
        ["node", str(HERE / "clients" / "read_schemas.js"), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise Failed("no schemas in the pinned package: %s" % done.stderr.decode(errors="replace")[-500:])
    published = json.loads(done.stdout)
    published["2024-11-05"] = first_revision(published["2025-03-26"])
    return {revision: Schema(revision, correct(published[revision])) for revision in REVISIONS}


def first_revision(second):
    """2024-11-05: the second revision without what its change log says it added."""
    schema = copy.deepcopy(second)
    definitions = schema["definitions"]
    for name in ("AudioContent", "ToolAnnotations", "JSONRPCBatchRequest", "JSONRPCBatchResponse"):
        del definitions[name]
    del definitions["Tool"]["properties"]["annotations"]
    del definitions["ServerCapabilities"]["properties"]["completions"]
    del definitions["ProgressNotification"]["properties"]["params"]["properties"]["message"]
    messages = definitions["JSONRPCMessage"]["anyOf"]
    definitions["JSONRPCMessage"]["anyOf"] = [branch for branch in messages if "$ref" in branch]
    return drop_references(schema, "AudioContent")


def drop_references(node, name):
    """The node without the anyOf branches that refer to a definition."""
    if isinstance(node, dict):
        return {key: drop_references(value, name) for key, value in node.items()}
    if isinstance(node, list):
        kept = [item for item in node if not (isinstance(item, dict) and item.get("$ref", "").endswith("/" + name))]
        return [drop_references(item, name) for item in kept]
    return node


def correct(schema):
    """Undo a known slip of the generator: numbers in forms were declared as integers."""
    definitions = schema.get("$defs") or schema["definitions"]
    for bound in ("minimum", "maximum", "default"):
        field = definitions.get("NumberSchema", {}).get("properties", {}).get(bound)
        if field:
            field["type"] = "number"
    return schema


# ---------------------------------------------------------------------------
# Making them strict
# ---------------------------------------------------------------------------


def strict(definitions, key):
    """All definitions with their objects closed."""
    return {
        name: one if name in OPEN_DEFINITIONS else closed(one, definitions, key) for name, one in definitions.items()
    }


def closed(node, definitions, key):
    """A schema node whose objects allow only the properties they name."""
    if isinstance(node, list):
        return [closed(item, definitions, key) for item in node]
    if not isinstance(node, dict):
        return node
    if "allOf" in node:
        node = merged(node, definitions)
    node = {
        name: {field: open_or_closed(field, value, definitions, key) for field, value in item.items()}
        if name == "properties"
        else closed(item, definitions, key)
        for name, item in node.items()
    }
    if is_closable(node):
        node["additionalProperties"] = False
    return without_envelope(node) if "method" in node.get("properties", {}) else node


def open_or_closed(field, value, definitions, key):
    return value if field in OPEN_PROPERTIES else closed(value, definitions, key)


def is_closable(node):
    """An object with named properties, whatever it says about further ones.

    An object without any named property (`"logging": {}`) is a mark; what it
    holds is not specified and stays open, as does a map of named things.
    """
    return node.get("type") == "object" and bool(node.get("properties"))


def merged(node, definitions):
    """allOf as one object: closing each part by itself would refuse the others."""
    result = {"type": "object", "properties": {}, "required": []}
    for part in node["allOf"]:
        part = definitions[part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        part = merged(part, definitions) if "allOf" in part else part
        result["properties"].update(part.get("properties", {}))
        result["required"] += part.get("required", [])
    return result


def without_envelope(message):
    """A request or notification as the part that its definition is about.

    2025-11-25 repeats jsonrpc and id in each (the envelope is checked apart).
    The params of all of them may carry _meta: JSONRPCRequest and
    JSONRPCNotification say so in every revision, the single ones not always.
    """
    properties = {name: item for name, item in message["properties"].items() if name not in ("jsonrpc", "id")}
    required = [name for name in message.get("required", []) if name not in ("jsonrpc", "id")]
    params = properties.get("params", {})
    if "properties" in params:
        properties["params"] = dict(params, properties=dict({"_meta": {"type": "object"}}, **params["properties"]))
    return dict(message, properties=properties, required=required)


# ---------------------------------------------------------------------------
# Checking frames
# ---------------------------------------------------------------------------


def problems_of(schema, heard, methods):
    """Every way in which what a host heard breaks its revision, as lines.

    heard: messages in order; methods: request id -> (method, params) as sent.
    """
    found, items, names = [], [], []
    for number, message in enumerate(heard):
        name = "frame %d (%s)" % (number, title(message, methods))
        found += ["%s: %s" % (name, problem) for problem in envelope_problems(schema, message, methods)]
        found += ["%s: _meta key %s" % (name, key) for key in reserved_keys(schema.revision, message)]
        item = body(schema, message, methods)
        if item:
            items.append(item)
            names.append(name)
    for name, problems in zip(names, schema.validate(items)):
        found += ["%s: %s" % (name, problem) for problem in problems]
    return found + (list(listening_problems(heard, methods)) if schema.is_modern else [])


def title(message, methods):
    if "method" in message:
        return message["method"]
    method, params = methods.get(message.get("id"), ("nobody's request", {}))
    label = params.get("name") or params.get("uri") or ""
    return " ".join(part for part in ("error" if "error" in message else "result", "of", method, label) if part)


def envelope_problems(schema, message, methods):
    """What JSON-RPC and the table of methods say about a message."""
    if message.get("jsonrpc") != "2.0":
        yield "jsonrpc is %r" % message.get("jsonrpc")
    if "method" in message:
        known = schema.requests if "id" in message else schema.notifications
        if message["method"] not in known:
            yield "no such %s in this revision" % ("request" if "id" in message else "notification")
        extra = set(message) - {"jsonrpc", "id", "method", "params"}
    elif "error" in message:
        extra = set(message) - {"jsonrpc", "id", "error"}
        yield from error_problems(schema, message["error"])
        if "id" not in message and schema.revision not in ("2025-11-25", MODERN):
            yield "an error without id"
    else:
        extra = set(message) - {"jsonrpc", "id", "result"}
        if "result" not in message:
            yield "neither method, result nor error"
        elif schema.is_modern:
            yield from result_problems(message["result"], *methods.get(message.get("id"), (None, {})))
    if extra:
        yield "properties beside the envelope: %s" % sorted(extra)
    if "method" not in message and message.get("id") is not None and message["id"] not in methods:
        yield "an answer to a request that was never made: %r" % message["id"]


def error_problems(schema, error):
    if not isinstance(error, dict) or set(error) - {"code", "message", "data"}:
        yield "the error is %s" % json.dumps(error)[:200]
    elif not isinstance(error.get("code"), int) or not isinstance(error.get("message"), str):
        yield "the error lacks a code or a message: %s" % json.dumps(error)[:200]
    elif schema.is_modern:
        code = error["code"]
        if code in (-32002, -32042) or (-32099 <= code <= -32020 and code not in MODERN_ERRORS):
            yield "the error code %d is one that 2026-07-28 forbids" % code
    elif error["code"] == -32042 and not (error.get("data") or {}).get("elicitations"):
        yield "a URL elicitation error without elicitations"


def result_problems(result, method, params):
    """What 2026-07-28 says of results beyond their definitions."""
    kind = result.get("resultType")
    if kind == "input_required":
        if method not in MAY_ASK:
            yield "%s may not ask" % method
        if "inputRequests" not in result and "requestState" not in result:
            yield "asks for nothing and has no state"
    elif kind == "task":
        if method != "tools/call" or not has_tasks(params):
            yield "a task for a request that does not want one"
    elif kind != "complete":
        yield "resultType is %r" % kind


def has_tasks(params):
    """Does a request declare the tasks extension?"""
    capabilities = params.get("_meta", {}).get(RESERVED_PREFIX + "clientCapabilities", {})
    return RESERVED_PREFIX + "tasks" in capabilities.get("extensions", {})


def listening_problems(heard, methods):
    """What 2026-07-28 says of subscriptions/listen: an acknowledgement first, and its id on all that comes."""
    listens = [request_id for request_id, (method, _params) in methods.items() if method == "subscriptions/listen"]
    acknowledged = set()
    for number, message in enumerate(heard):
        method = message.get("method", "")
        if not (method.endswith("changed") or method.endswith(("/updated", "/acknowledged", "notifications/tasks"))):
            continue
        listen = message.get("params", {}).get("_meta", {}).get(SUBSCRIPTION)
        if listen not in listens:
            yield "frame %d (%s): it is for the subscription %r, which nobody has" % (number, method, listen)
        elif method.endswith("/acknowledged"):
            acknowledged.add(listen)
        elif listen not in acknowledged:
            yield "frame %d (%s): before the subscription was acknowledged" % (number, method)


def body(schema, message, methods):
    """(definition, value) of what the schema can check, or None."""
    if "method" in message:
        known = schema.requests if "id" in message else schema.notifications
        name = known.get(message["method"])
        return name and (name, {key: message[key] for key in ("method", "params") if key in message})
    if "error" in message:
        code = message["error"].get("code")
        return (MODERN_ERRORS[code], message) if schema.is_modern and code in MODERN_ERRORS else None
    method, params = methods.get(message.get("id"), (None, {}))
    name = definition_of(schema, method, params, message["result"]) if "result" in message else None
    return name and (name, message["result"])


def definition_of(schema, method, params, result):
    """The definition of a result, or None where the revision has none for the method."""
    if schema.is_modern:
        kinds = {"input_required": "InputRequiredResult", "task": "CreateTaskResult"}
        return kinds.get(result.get("resultType")) or schema.results.get(method)
    return "CreateTaskResult" if method == "tools/call" and "task" in params else schema.results.get(method)


def reserved_keys(revision, message):
    """Keys of any _meta with the reserved prefix that the revision does not define, or not there."""
    for part in ("result", "params"):
        at_top = RESERVED_AT_TOP.get(revision, {}).get(part, set())
        top = message.get(part) or {}
        yield from (key for key in reserved_below(revision, {"_meta": top.get("_meta")}) if key not in at_top)
        yield from reserved_below(revision, {key: value for key, value in top.items() if key != "_meta"})
    yield from reserved_below(revision, message.get("error"))


def reserved_below(revision, node):
    if isinstance(node, list):
        for item in node:
            yield from reserved_below(revision, item)
    elif isinstance(node, dict):
        for key in node.get("_meta") or {}:
            if key.startswith(RESERVED_PREFIX) and key not in RESERVED_ANYWHERE.get(revision, ()):
                yield key
        for item in node.values():
            yield from reserved_below(revision, item)
