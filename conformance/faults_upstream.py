"""A stateful server that counts and says whom it has served, for `faults.py`. Both eras, standard library only.

Every tool takes `label` (which call this is) and `owner` (who must be alone with this process, as the driver sees
it), and answers with JSON: the label, every owner that this process has served, what process it is. Labels and
owners end with a checksum, so that bytes that were changed on the way are not taken for somebody else. What was
carried out is appended to a ledger before it is answered: a side effect that can be counted.

environment: FAULTS_LEDGER (a file), FAULTS_NAME (the server's name)
"""

import json
import os
import select
import sys
import time
import zlib

META = "io.modelcontextprotocol/"
LEGACY = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN = "2026-07-28"

READ_ONLY, IDEMPOTENT = {"readOnlyHint": True}, {"idempotentHint": True}
HINTS = {
    "note": {},
    "look": READ_ONLY,
    "keep": IDEMPOTENT,
    "wait": {},
    "watch": READ_ONLY,
    "park": {},
    "fat": READ_ONLY,
    "ask": {},
    "die": {},
    "dielook": READ_ONLY,
}

# How often a parked call looks whether it may go on.
LOOK_S = 0.02


def is_genuine(text):
    """Whether a label or owner is as the driver made it."""
    body, _, check = text.rpartition("~") if isinstance(text, str) else ("", "", "")
    return bool(body) and check == "%08x" % zlib.crc32(body.encode("utf-8", "replace"))


class Server:
    """One process: whom it has served, what it is doing, what it has asked."""

    def __init__(self):
        self.name = os.environ.get("FAULTS_NAME", "faults")
        self.born = "%d.%d" % (os.getpid(), time.time_ns())
        self.served, self.count, self.most = [], 0, 0
        self.active = {}  # request id -> label, while it is being worked on
        self.modern = set()  # ids of requests of the modern era
        self.timers = []  # (due, request id, callback)
        self.asked = {}  # id of our question -> (request id, arguments)
        self.questions = 0
        self.buffer = b""

    def run(self):
        while True:
            self.timers.sort(key=lambda timer: timer[0])
            wait = max(0.0, self.timers[0][0] - time.monotonic()) if self.timers else None
            ready, _, _ = select.select([0], [], [], wait)
            if ready:
                data = os.read(0, 1 << 16)
                if not data:
                    os._exit(0)
                *lines, self.buffer = (self.buffer + data).split(b"\n")
                for line in lines:
                    self.take(line)
            while self.timers and self.timers[0][0] <= time.monotonic():
                self.timers.pop(0)[2]()

    def send(self, message):
        data = json.dumps(dict({"jsonrpc": "2.0"}, **message)).encode() + b"\n"
        while data:
            data = data[os.write(1, data) :]

    def take(self, line):
        try:
            message = json.loads(line)
        except ValueError:
            return  # a line that was damaged on its way; nobody can tell whose it was
        if not isinstance(message, dict):
            return
        if "method" not in message:
            self.on_answer(message)
        elif "id" in message:
            self.on_request(message["id"], message["method"], message.get("params") or {})
        elif message["method"] == "notifications/cancelled":
            request_id = (message.get("params") or {}).get("requestId")
            self.active.pop(request_id, None)
            self.timers = [timer for timer in self.timers if timer[1] != request_id]

    def reply(self, request_id, result):
        if request_id in self.modern:
            self.modern.discard(request_id)
            result = dict({"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}, **result)
        self.send({"id": request_id, "result": result})

    def on_request(self, request_id, method, params):
        if META + "protocolVersion" in (params.get("_meta") or {}):
            self.modern.add(request_id)
        capabilities = {"tools": {"listChanged": True}}
        if method == "initialize":
            wanted = params.get("protocolVersion")
            self.reply(
                request_id,
                {
                    "protocolVersion": wanted if wanted in LEGACY else LEGACY[-1],
                    "capabilities": capabilities,
                    "serverInfo": {"name": self.name, "version": "1"},
                },
            )
        elif method == "server/discover":
            self.reply(request_id, {"supportedVersions": [MODERN] + list(LEGACY), "capabilities": capabilities})
        elif method == "ping":
            self.reply(request_id, {})
        elif method == "tools/list":
            tools = [
                {"name": name, "inputSchema": {"type": "object"}, "annotations": hints} for name, hints in HINTS.items()
            ]
            self.reply(request_id, {"tools": tools})
        elif method == "tools/call" and params.get("name") in HINTS:
            self.on_call(request_id, params)
        elif method == "subscriptions/listen":
            self.send(
                {
                    "method": "notifications/subscriptions/acknowledged",
                    "params": {
                        "notifications": params.get("notifications") or {},
                        "_meta": {META + "subscriptionId": request_id},
                    },
                }
            )
        else:
            self.modern.discard(request_id)
            self.send({"id": request_id, "error": {"code": -32601, "message": "Method not found: %s" % method}})

    def on_call(self, request_id, params):
        arguments = params.get("arguments") or {}
        label, owner = arguments.get("label"), arguments.get("owner")
        if not is_genuine(label) or not is_genuine(owner):
            self.reply(request_id, {"content": [{"type": "text", "text": "damaged"}], "isError": True})
            return
        if owner not in self.served:
            self.served.append(owner)
        self.count += 1
        self.active[request_id] = label
        self.most = max(self.most, len(self.active))
        tool = params["name"]
        if "inputResponses" in params:
            self.done(request_id, arguments, {"action": params["inputResponses"].get("it", {})})
            return
        if tool != "ask":
            self.write_down(tool, label)
        getattr(self, "do_" + tool, self.do_note)(
            request_id, arguments, (params.get("_meta") or {}).get("progressToken")
        )

    def write_down(self, tool, label):
        fd = os.open(os.environ["FAULTS_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, ("%s %s %s %s\n" % (label, tool, self.name, self.born)).encode())
        os.close(fd)

    def done(self, request_id, arguments, more=None):
        """Answer a call, unless it was cancelled meanwhile."""
        if self.active.pop(request_id, None) is None:
            return
        pad = arguments.get("pad") or ""
        facts = {
            "label": arguments["label"],
            "server": self.name,
            "served": self.served,
            "pid": os.getpid(),
            "born": self.born,
            "count": self.count,
            "most": self.most,
            "pad": [len(pad), zlib.crc32(pad.encode())],
            "cwd": os.getcwd(),
        }
        content = [{"type": "text", "text": json.dumps(dict(facts, **(more or {})))}]
        self.reply(request_id, {"content": content})

    def do_note(self, request_id, arguments, _token):
        self.done(request_id, arguments)

    def do_fat(self, request_id, arguments, _token):
        body = (arguments["label"] + " ") * (int(arguments.get("size") or 0) // 20 + 1)
        self.done(request_id, arguments, {"body": body, "check": zlib.crc32(body.encode())})

    def do_wait(self, request_id, arguments, token):
        end = time.monotonic() + float(arguments.get("seconds") or 0)
        if token is not None:
            for number, part in enumerate((0.3, 0.6, 0.9)):
                due = time.monotonic() + part * (end - time.monotonic())
                progress = {"progressToken": token, "progress": number + 1, "message": arguments["label"]}
                self.timers.append(
                    (due, request_id, lambda p=progress: self.send({"method": "notifications/progress", "params": p}))
                )
        self.timers.append((end, request_id, lambda: self.done(request_id, arguments)))

    do_watch = do_wait

    def do_park(self, request_id, arguments, token):
        if os.path.exists(arguments.get("gate") or "/"):
            self.done(request_id, arguments)
        else:
            self.timers.append(
                (time.monotonic() + LOOK_S, request_id, lambda: self.do_park(request_id, arguments, token))
            )

    def do_die(self, _request_id, _arguments, _token):
        os._exit(7)

    do_dielook = do_die

    def do_ask(self, request_id, arguments, _token):
        form = {
            "message": arguments["label"],
            "requestedSchema": {"type": "object", "properties": {"answer": {"type": "string"}}},
        }
        if request_id in self.modern:
            self.modern.discard(request_id)
            self.active.pop(request_id, None)
            self.send(
                {
                    "id": request_id,
                    "result": {
                        "resultType": "input_required",
                        "requestState": "s",
                        "inputRequests": {"it": {"method": "elicitation/create", "params": dict(form, mode="form")}},
                    },
                }
            )
            return
        self.questions += 1
        question = "q%d" % self.questions
        self.asked[question] = request_id, arguments
        self.send({"id": question, "method": "elicitation/create", "params": form})

    def on_answer(self, message):
        request_id, arguments = self.asked.pop(message.get("id"), (None, None))
        if request_id is not None:
            self.done(request_id, arguments, {"action": message.get("result") or {"error": message.get("error")}})


if __name__ == "__main__":
    try:
        Server().run()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
