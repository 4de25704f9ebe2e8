#!/usr/bin/env python3
"""A server that lies: what it says comes from a seed, and in the end it always says what it should.

usage: fuzz_child.py calm|wild

`calm` is well behaved. `wild` is so until it is asked for a tool with arguments {"seed": S, "count": N}: then it
says N messages drawn from S, some of them about the call itself, and last the true answer, on a line of its own.
A wild one that is started with FUZZ_SEED in its environment lies in its handshake and its lists as well.
"""

import json
import os
import random
import sys

import fuzz_mutate

TOOLS = [
    {
        "name": "say",
        "description": "says what it is told",
        "inputSchema": {"type": "object"},
        "annotations": {"readOnlyHint": True},
    },
    {"name": "wild", "inputSchema": {"type": "object", "properties": {"h": {"type": "integer", "x-mcp-header": "H"}}}},
]
CAPABILITIES = {
    "tools": {"listChanged": True},
    "resources": {"subscribe": True, "listChanged": True},
    "prompts": {},
    "logging": {},
    "completions": {},
    "tasks": {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}},
}
META = "io.modelcontextprotocol/"
LISTEN = {META + "subscriptionId": "ID"}

# What a server may say of itself, or in answer to a call, before it is bent. "ID" stands for the call's id.
SAYINGS = [
    {"method": "notifications/progress", "params": {"progressToken": "ID", "progress": 1, "total": 2, "message": "m"}},
    {"method": "notifications/message", "params": {"level": "error", "logger": "l", "data": {"a": [1, None]}}},
    {"method": "notifications/tools/list_changed"},
    {"method": "notifications/resources/list_changed", "params": {}},
    {"method": "notifications/resources/updated", "params": {"uri": "fuzz://one"}},
    {"method": "notifications/cancelled", "params": {"requestId": "q1", "reason": "r"}},
    {"method": "notifications/elicitation/complete", "params": {"elicitationId": "e"}},
    {
        "method": "notifications/tasks/status",
        "params": {"taskId": "t", "status": "working", "createdAt": "a", "lastUpdatedAt": "b", "ttl": 1},
    },
    {"method": "notifications/tasks", "params": {"taskId": "t", "status": "completed", "result": {}, "_meta": LISTEN}},
    {
        "method": "notifications/subscriptions/acknowledged",
        "params": {"notifications": {"toolsListChanged": True}, "_meta": LISTEN},
    },
    {
        "id": "q1",
        "method": "elicitation/create",
        "params": {
            "message": "m",
            "requestedSchema": {
                "type": "object",
                "properties": {"a": {"type": "string", "enum": ["x"], "default": "x"}},
                "required": ["a"],
            },
        },
    },
    {
        "id": "q2",
        "method": "elicitation/create",
        "params": {"mode": "url", "url": "https://example.test", "elicitationId": "e", "message": "m"},
    },
    {
        "id": "q3",
        "method": "sampling/createMessage",
        "params": {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "t"}]}],
            "maxTokens": 5,
            "tools": [{"name": "n", "inputSchema": {}}],
            "toolChoice": {"mode": "auto"},
        },
    },
    {"id": "q4", "method": "roots/list"},
    {"id": "q5", "method": "ping"},
    {"id": "q6", "method": "tasks/get", "params": {"taskId": "t"}},
    {
        "id": "ID",
        "result": {
            "content": [
                {"type": "text", "text": "t", "annotations": {"priority": 1}},
                {"type": "resource", "resource": {"uri": "fuzz://one", "text": "x"}},
                {"type": "resource_link", "uri": "fuzz://two", "name": "n"},
                {"type": "audio", "data": "", "mimeType": "m"},
            ],
            "structuredContent": {"a": 1},
            "_meta": {"k": None},
            "isError": False,
        },
    },
    {
        "id": "ID",
        "result": {
            "task": {
                "taskId": "t",
                "status": "working",
                "createdAt": "a",
                "lastUpdatedAt": "b",
                "ttl": None,
                "pollInterval": 5,
            },
            "_meta": {META + "related-task": {"taskId": "t"}},
        },
    },
    {
        "id": "ID",
        "result": {
            "resultType": "task",
            "taskId": "t",
            "status": "working",
            "createdAt": "a",
            "lastUpdatedAt": "b",
            "ttlMs": 5,
            "pollIntervalMs": 5,
        },
    },
    {
        "id": "ID",
        "result": {
            "resultType": "input_required",
            "requestState": "s",
            "inputRequests": {
                "k": {
                    "method": "elicitation/create",
                    "params": {"mode": "form", "message": "m", "requestedSchema": {"type": "object", "properties": {}}},
                }
            },
        },
    },
    {
        "id": "ID",
        "error": {
            "code": -32042,
            "message": "m",
            "data": {
                "elicitations": [{"mode": "url", "url": "https://example.test", "elicitationId": "e", "message": "m"}]
            },
        },
    },
    {
        "id": "ID",
        "error": {
            "code": -32602,
            "message": "m",
            "data": {"uri": "u", "requiredCapabilities": {}, "supported": ["2026-07-28"]},
        },
    },
    {"id": "ID", "error": {"code": -32601, "message": "m"}},
    {"id": 99, "result": {}},
]


class Server:
    """One process of it."""

    def __init__(self, kind):
        self.kind = kind
        seed = os.environ.get("FUZZ_SEED")
        self.start = random.Random(seed) if kind == "wild" and seed else None
        # A server that nobody can start proves little: most of what it says is true.
        self.lies = 0.3 if self.start is not None else 0.0

    def write(self, data):
        try:
            sys.stdout.buffer.write(data + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)

    def send(self, message):
        message = dict({"jsonrpc": "2.0"}, **message)
        if self.lies and self.start.random() < self.lies:
            self.write(fuzz_mutate.mutate_line(self.start, message))
        self.write(json.dumps(message).encode())

    def run(self):
        sys.stderr.write("\x1b]0;stolen title\x07\x1b[31mred\x9b2J\u202e\n")
        sys.stderr.flush()
        for line in sys.stdin.buffer:
            try:
                message = json.loads(line)
            except ValueError:
                # mcpx must write messages only, whatever it was told.
                sys.stderr.write("FUZZ not a message: %r\n" % line[:200])
                sys.stderr.flush()
                continue
            if "method" in message and "id" in message:
                self.answer(message["id"], message["method"], message.get("params") or {})

    def answer(self, request_id, method, params):
        if method == "tools/call":
            arguments = params.get("arguments")
            arguments = arguments if isinstance(arguments, dict) else {}
            if self.kind == "wild" and "seed" in arguments:
                self.say(request_id, arguments["seed"], arguments["count"])
            text = json.dumps(arguments.get("text"))
            self.write(
                json.dumps(
                    {"jsonrpc": "2.0", "id": request_id, "result": {"content": [{"type": "text", "text": text}]}}
                ).encode()
            )
            return
        result = self.result_of(method, params)
        self.send(
            {"id": request_id, "result": result}
            if result is not None
            else {"id": request_id, "error": {"code": -32601, "message": "Method not found"}}
        )

    def result_of(self, method, params):
        info = {"name": "\x1b[31mfuzz", "version": "1", "title": "\u202e"}
        if method == "initialize":
            version = params.get("protocolVersion")
            return {"protocolVersion": version, "capabilities": CAPABILITIES, "serverInfo": info, "instructions": "i"}
        if method == "server/discover":
            if os.environ.get("FUZZ_ERA") != "modern":
                return None
            capabilities = {name: value for name, value in CAPABILITIES.items() if name != "tasks"}
            return {
                "resultType": "complete",
                "supportedVersions": ["2026-07-28"],
                "capabilities": capabilities,
                "ttlMs": 0,
                "cacheScope": "private",
                "_meta": {META + "serverInfo": info},
            }
        return {
            "ping": {},
            "tools/list": {"tools": TOOLS},
            "prompts/list": {"prompts": [{"name": "p", "arguments": [{"name": "a"}]}]},
            "resources/list": {"resources": [{"uri": "fuzz://one", "name": "one"}]},
            "resources/templates/list": {"resourceTemplates": [{"uriTemplate": "fuzz://{x}", "name": "t"}]},
            "resources/read": {"contents": [{"uri": params.get("uri"), "text": "t"}]},
            "prompts/get": {"messages": [{"role": "user", "content": {"type": "text", "text": "t"}}]},
            "completion/complete": {"completion": {"values": ["v"]}},
            "resources/subscribe": {},
            "resources/unsubscribe": {},
            "logging/setLevel": {},
        }.get(method)

    def say(self, request_id, seed, count):
        rng = random.Random(seed)
        for _ in range(count):
            message = dict({"jsonrpc": "2.0"}, **rng.choice(SAYINGS))
            data = fuzz_mutate.mutate_line(rng, message)
            self.write(data.replace(b'"ID"', str(request_id).encode()))


if __name__ == "__main__":
    Server(sys.argv[1]).run()
