#!/usr/bin/env python3
"""A legacy server over stdio whose tools ask their caller, or never do.

Every tool takes the same arguments, so that whoever calls decides what happens:

    id        goes into the text of every question and into the result
    delays    seconds to wait before each question; one more before the result
    times     how often an asking tool asks (1, or 2)

The result is the JSON object {"id": …, "answers": […]}. Nothing in a question
but its text tells which call it belongs to. A call that is cancelled goes on:
a server that is busy notices too late.
"""
import itertools
import json
import queue
import sys
import threading
import time

REVISION = "2025-11-25"

# What each tool asks, in order; it stops after `times` questions. Those of AT_ONCE
# do not wait for one answer before they ask for the next.
TOOLS = {
    "book": ("elicitation", "elicitation"),
    "translate": ("sampling", "sampling"),
    "plan": ("elicitation", "sampling"),
    "survey": ("elicitation", "sampling"),
    "confirm": ("elicitation", "elicitation"),
    "look": (),
    "count": (),
}

AT_ONCE = ("survey",)

ARGUMENTS = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "delays": {"type": "array", "items": {"type": "number"}},
        "times": {"type": "integer"},
    },
    "required": ["id", "delays"],
}


def question_text(call_id, number):
    return "question %d of call <%s>" % (number, call_id)


def elicitation(text):
    schema = {"type": "object", "properties": {"secret": {"type": "string"}}, "required": ["secret"]}
    return "elicitation/create", {"message": text, "requestedSchema": schema}


def sampling(text):
    return "sampling/createMessage", {
        "messages": [{"role": "user", "content": {"type": "text", "text": text}}],
        "maxTokens": 20,
    }


class Server:
    def __init__(self):
        self.lock = threading.Lock()
        self.ids = itertools.count(1)
        self.waiting = {}  # id of our question -> queue that takes its answer

    def send(self, **message):
        with self.lock:
            sys.stdout.write(json.dumps(dict(message, jsonrpc="2.0")) + "\n")
            sys.stdout.flush()

    def run(self):
        for line in sys.stdin:
            message = json.loads(line)
            if "method" not in message:
                self.waiting.pop(message["id"]).put(message)
            elif message["method"] == "tools/call":
                threading.Thread(target=self.call, args=(message,), daemon=True).start()
            elif "id" in message:
                self.send(id=message["id"], **self.reply(message["method"]))

    def reply(self, method):
        if method == "initialize":
            info = {"name": "asking", "version": "1"}
            return {"result": {"protocolVersion": REVISION, "capabilities": {"tools": {}}, "serverInfo": info}}
        if method == "tools/list":
            return {"result": {"tools": [{"name": name, "inputSchema": ARGUMENTS} for name in TOOLS]}}
        if method == "ping":
            return {"result": {}}
        return {"error": {"code": -32601, "message": "Method not found"}}

    def call(self, message):
        """Serve one call, in a thread of its own."""
        name, arguments = message["params"]["name"], message["params"]["arguments"]
        delays = iter(arguments["delays"])
        asked, answers = [], []
        for kind in TOOLS[name][: arguments.get("times", 0)]:
            time.sleep(next(delays))
            asked.append((kind, self.ask(kind, question_text(arguments["id"], len(asked) + 1))))
            if name not in AT_ONCE:
                answers.append(self.answer_of(*asked[-1]))
        if name in AT_ONCE:
            answers = [self.answer_of(*one) for one in asked]
        time.sleep(next(delays))
        text = json.dumps({"id": arguments["id"], "answers": answers})
        self.send(id=message["id"], result={"content": [{"type": "text", "text": text}]})

    def ask(self, kind, text):
        """Ask the client; returns the queue that takes its answer."""
        method, params = elicitation(text) if kind == "elicitation" else sampling(text)
        number = next(self.ids)
        box = self.waiting[number] = queue.Queue()
        self.send(id=number, method=method, params=params)
        return box

    def answer_of(self, kind, box):
        """Wait for an answer and return what counts of it, or the error."""
        answer = box.get()
        if "error" in answer:
            return {"error": answer["error"]}
        result = answer["result"]
        if kind == "sampling":
            return result["content"]["text"]
        return result["content"]["secret"] if result["action"] == "accept" else {"action": result["action"]}


if __name__ == "__main__":
    Server().run()
