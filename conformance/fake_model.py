"""A language model that plays a script: an OpenAI-style endpoint on the loopback.

The user's message carries the script: the word PLAY and base64 of a JSON list
of turns, each a list of calls [tool, arguments] made together. The model makes
the calls turn by turn, then says DONE and a JSON list of what the tools
returned. It keeps no state: how far it is can be seen from the conversation.
"""
import base64
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MARK = re.compile(r"PLAY ([A-Za-z0-9+/=]+)")


def prompt(turns):
    """The user message that makes the model play these turns."""
    return "PLAY " + base64.b64encode(json.dumps(turns).encode()).decode()


def plain(content):
    """A message's content as text, whichever of the two forms it has."""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


def next_move(request):
    """(text, calls) that come next in the conversation."""
    if not request.get("tools"):
        return "a title", []  # hosts also ask for titles and summaries
    messages = request.get("messages", [])
    start, script = None, None
    for index, message in enumerate(messages):
        found = MARK.search(plain(message.get("content"))) if message.get("role") == "user" else None
        if found:
            start, script = index, json.loads(base64.b64decode(found.group(1)))
    if script is None:
        return "no script", []
    since = messages[start:]
    played = sum(1 for message in since if message.get("role") == "assistant" and message.get("tool_calls"))
    if played < len(script):
        return "", script[played]
    outputs = [plain(message.get("content")) for message in since if message.get("role") == "tool"]
    return "DONE " + json.dumps(outputs), []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args):
        """Say nothing on stderr."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        request = json.loads(body)
        text, calls = next_move(request)
        self.server.seen.append({"text": text, "calls": calls})
        tool_calls = [
            {
                "index": index,
                "id": "call_%d_%d" % (time.time_ns(), index),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
        self.stream(request, text, tool_calls)

    def stream(self, request, text, tool_calls):
        """Hosts ask for a stream of chunks; a short one does."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        base = {
            "id": "completion-%d" % time.time_ns(),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.get("model", "scripted"),
        }
        delta = {"role": "assistant", "content": text}
        if tool_calls:
            delta["tool_calls"] = tool_calls
        finish = "tool_calls" if tool_calls else "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        chunks = [
            dict(base, choices=[{"index": 0, "delta": delta, "finish_reason": None}]),
            dict(base, choices=[{"index": 0, "delta": {}, "finish_reason": finish}], usage=usage),
        ]
        try:
            for chunk in chunks:
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass  # the host was killed while it listened; checks do that


class FakeModel:
    """The endpoint as a context manager; `url` is what a host is configured with."""

    def __enter__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.seen = []
        self.url = "http://127.0.0.1:%d/v1" % self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_exception):
        self.server.shutdown()
        self.server.server_close()

    def has_called(self, tool):
        """Whether the model has asked for a tool yet."""
        return any(name == tool for move in self.server.seen for name, _arguments in move["calls"])
