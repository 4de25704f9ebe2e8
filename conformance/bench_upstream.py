#!/usr/bin/env python3
"""The server that every contestant of bench.py puts its hosts in front of.

A tiny MCP server over stdio of the revisions up to 2025-11-25, standard library only. It
does as little as a server can, so that what is measured is what lies before it. Large
results are encoded once per size.

    echo  text   the same text
    blob  bytes  that many bytes of text

usage: bench_upstream.py [--slow SECONDS]    (wait that long before the first answer)
"""
import json
import os
import sys
import time

REVISIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
METHOD_NOT_FOUND, INVALID_PARAMS = -32601, -32602

encode = json.JSONEncoder(separators=(",", ":")).encode


def tool(name, argument, kind):
    """The declaration of a tool with one argument."""
    schema = {"type": "object", "properties": {argument: {"type": kind}}, "required": [argument]}
    return {"name": name, "description": "See the head of bench_upstream.py.", "inputSchema": schema}


TOOLS = encode({"tools": [tool("echo", "text", "string"), tool("blob", "bytes", "integer")]})
PING = encode({})


def text_result(text):
    """The JSON of a result that is one text."""
    return '{"content":[{"type":"text","text":%s}],"isError":false}' % encode(text)


def initialize_result(params):
    wanted = params.get("protocolVersion")
    return encode({
        "protocolVersion": wanted if wanted in REVISIONS else REVISIONS[-1],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "bench-upstream", "version": "1"},
    })


class Server:
    """Answers one line at a time."""

    def __init__(self):
        self.blobs = {}  # size -> the encoded result

    def blob(self, size):
        if size not in self.blobs:
            self.blobs[size] = text_result(("0123456789abcdefghijklmnopqrstuvwxyz" * (size // 36 + 1))[:size]).encode()
        return self.blobs[size]

    def result(self, method, params):
        """The encoded result, or None for what this server does not have."""
        if method == "tools/call":
            arguments = params.get("arguments") or {}
            if params.get("name") == "echo":
                return text_result(arguments["text"]).encode()
            return self.blob(arguments["bytes"]) if params.get("name") == "blob" else None
        if method == "initialize":
            return initialize_result(params).encode()
        return {"tools/list": TOOLS, "ping": PING}[method].encode() if method in ("tools/list", "ping") else None

    def answer(self, line):
        """The answer to a line, or None where there is none to give."""
        message = json.loads(line)
        if message.get("id") is None or "method" not in message:
            return None
        wire_id = encode(message["id"]).encode()
        result = self.result(message["method"], message.get("params") or {})
        if result is None:
            code = INVALID_PARAMS if message["method"] == "tools/call" else METHOD_NOT_FOUND
            return b'{"jsonrpc":"2.0","id":%s,"error":{"code":%d,"message":"not here"}}\n' % (wire_id, code)
        return b"".join((b'{"jsonrpc":"2.0","id":', wire_id, b',"result":', result, b"}\n"))


def main(arguments):
    if arguments[:1] == ["--slow"]:
        time.sleep(float(arguments[1]))
    server, out = Server(), sys.stdout.buffer
    for line in sys.stdin.buffer:
        answer = server.answer(line)
        if answer is not None:
            out.write(answer)
            out.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    os._exit(0)
