"""The published JSON schema of each legacy revision, made strict, and what may be sent when.

The schemas come out of a pinned package at run time (see install.py); nothing
of them is kept here. 2024-11-05 is not in that package: it is 2025-03-26
without what 2025-03-26 added, and that list is short (see FIRST_REVISION).

Strict means: an object may hold only the properties that its definition names.
The specification lets most objects grow; a host with a strict parser does not.
"""
import copy
import json
import subprocess
from pathlib import Path

import install
from place import Failed, expect

REVISIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")

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

# Keys of _meta with the specification's own prefix that a revision defines.
RESERVED_PREFIX = "io.modelcontextprotocol/"
RESERVED_META = {"2025-11-25": {"io.modelcontextprotocol/related-task"}}

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


class Schema:
    """One revision: its strict schema and the messages that a server may send."""

    def __init__(self, revision, published):
        self.revision = revision
        self.key = "$defs" if "$defs" in published else "definitions"
        self.definitions = copy.deepcopy(published[self.key])
        self.document = {"$schema": published["$schema"], self.key: strict(self.definitions, self.key)}
        self.requests = self._methods("ServerRequest")
        self.notifications = self._methods("ServerNotification")

    def _methods(self, union):
        """method -> definition, for the members of a union."""
        names = [branch["$ref"].rpartition("/")[2] for branch in self.definitions[union]["anyOf"]]
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
    """{revision: Schema} for every legacy revision."""
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
    return {name: closed(one, definitions, key) for name, one in definitions.items()}


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
    return found


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
        yield from error_problems(message["error"])
        if "id" not in message and schema.revision != "2025-11-25":
            yield "an error without id"
    else:
        extra = set(message) - {"jsonrpc", "id", "result"}
        if "result" not in message:
            yield "neither method, result nor error"
    if extra:
        yield "properties beside the envelope: %s" % sorted(extra)
    if "method" not in message and message.get("id") is not None and message["id"] not in methods:
        yield "an answer to a request that was never made: %r" % message["id"]


def error_problems(error):
    if not isinstance(error, dict) or set(error) - {"code", "message", "data"}:
        yield "the error is %s" % json.dumps(error)[:200]
    elif not isinstance(error.get("code"), int) or not isinstance(error.get("message"), str):
        yield "the error lacks a code or a message: %s" % json.dumps(error)[:200]
    elif error["code"] == -32042 and not (error.get("data") or {}).get("elicitations"):
        yield "a URL elicitation error without elicitations"


def body(schema, message, methods):
    """(definition, value) of what the schema can check, or None."""
    if "method" in message:
        known = schema.requests if "id" in message else schema.notifications
        name = known.get(message["method"])
        return name and (name, {key: message[key] for key in ("method", "params") if key in message})
    method, params = methods.get(message.get("id"), (None, {}))
    if "result" not in message or method not in RESULTS:
        return None
    name = "CreateTaskResult" if method == "tools/call" and "task" in params else RESULTS[method]
    return name, message["result"]


def reserved_keys(revision, node):
    """Keys of any _meta with the reserved prefix that the revision does not define."""
    if isinstance(node, list):
        for item in node:
            yield from reserved_keys(revision, item)
    elif isinstance(node, dict):
        for key in node.get("_meta") or {}:
            if key.startswith(RESERVED_PREFIX) and key not in RESERVED_META.get(revision, ()):
                yield key
        for item in node.values():
            yield from reserved_keys(revision, item)
