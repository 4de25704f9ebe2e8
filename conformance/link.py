"""A host that speaks JSON lines over stdio and writes down all it hears.

Unlike an SDK it can claim any revision and any capabilities, keeps every frame
exactly as it came, and never repairs or hides anything.
"""
import asyncio
import itertools
import json
import tempfile

CLIENT_INFO = {"name": "conformance", "version": "1"}

# One line can be a whole image; the shim's own limit is of this size.
LINE_LIMIT = 128 * 1024 * 1024

# Questions that any host can answer without being told how.
DEFAULT_ANSWERS = {"ping": {}}


class LinkClosed(Exception):
    """The other side went away while a request was waiting."""


class Link:
    """One server process and the conversation with it.

    heard     every message that came in, in order, as (message, text of its line)
    answers   request id -> list of the answers that came (there should be one)
    """

    def __init__(self, revision="2025-11-25", capabilities=None, answer=None):
        self.revision = revision
        self.capabilities = capabilities or {}
        self.answer = answer or (lambda method, params: DEFAULT_ANSWERS.get(method))
        self.heard = []
        self.answers = {}
        self.noise = []  # lines that are not JSON-RPC messages
        self.methods = {}  # request id -> (method, params), for whoever checks results
        self.on_message = None  # called with each message as it arrives
        self.thinking_s = 0  # how long the person behind this host takes to answer
        self.closed = asyncio.Event()
        self._ids = itertools.count(1)
        self._waiting = {}

    async def start(self, argv, env, cwd):
        """Launch the server, as a host does; its stderr is kept for a failure report."""
        self.stderr = tempfile.TemporaryFile()
        self.process = await asyncio.create_subprocess_exec(
            *argv,
            env=env,
            cwd=str(cwd),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self.stderr,
            limit=LINE_LIMIT
        )
        self._reader = asyncio.ensure_future(self._read())
        return self

    async def initialize(self, seconds=60):
        """Shake hands; returns the result of initialize."""
        params = {"protocolVersion": self.revision, "capabilities": self.capabilities, "clientInfo": CLIENT_INFO}
        answer = await self.request("initialize", params, seconds)
        self.notify("notifications/initialized")
        return answer["result"]

    # --- sending ------------------------------------------------------------

    def send(self, message):
        """Put one message on the wire (a list is a batch). Does not wait."""
        if not self.process.stdin.is_closing():
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def notify(self, method, params=None):
        message = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        self.send(message)

    def begin(self, method, params=None, request_id=None):
        """Send a request; returns (its id, a future of the whole answer)."""
        request_id = next(self._ids) if request_id is None else request_id
        message = {"jsonrpc": "2.0", "id": request_id, "method": method}
        if params is not None:
            message["params"] = params
        future = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        self.methods[request_id] = (method, params or {})
        self.send(message)
        return request_id, future

    async def request(self, method, params=None, seconds=30):
        """Send a request and return the whole answer, result or error."""
        _request_id, future = self.begin(method, params)
        try:
            return await asyncio.wait_for(future, seconds)
        except asyncio.TimeoutError:
            raise LinkClosed("no answer to %s within %g s" % (method, seconds)) from None

    # --- receiving ----------------------------------------------------------

    async def _read(self):
        try:
            while True:
                line = await self.process.stdout.readline()
                if not line:
                    break
                self._on_line(line)
        finally:
            self.closed.set()
            reason = "the server closed its output; it said %r" % self.complaint()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(LinkClosed(reason))
                    future.exception()  # whoever still waits sees it; nobody else needs to

    def complaint(self):
        """The end of what the server wrote to stderr."""
        self.stderr.seek(0)
        return self.stderr.read()[-400:].decode(errors="replace")

    def _on_line(self, line):
        try:
            message = json.loads(line)
        except ValueError:
            self.noise.append(line)
            return
        for one in message if isinstance(message, list) else [message]:
            self._on_message(one, line)

    def _on_message(self, message, line):
        self.heard.append((message, line))
        if self.on_message:
            self.on_message(message)
        if "method" in message:
            if "id" in message:
                asyncio.get_running_loop().call_later(self.thinking_s, self._answer, message)
            return
        self.answers.setdefault(message.get("id"), []).append(message)
        future = self._waiting.pop(message.get("id"), None)
        if future is not None and not future.done():
            future.set_result(message)

    def _answer(self, question):
        """Answer a request of the server with what the check decided."""
        reply = {"jsonrpc": "2.0", "id": question["id"]}
        result = self.answer(question["method"], question.get("params") or {})
        if result is None:
            reply["error"] = {"code": -32601, "message": "Method not found"}
        else:
            reply["result"] = result
        self.send(reply)

    def notifications(self, method):
        """The params of every notification of that method, in order."""
        return [
            message.get("params") or {}
            for message, _line in self.heard
            if message.get("method") == method and "id" not in message
        ]

    # --- the end ------------------------------------------------------------

    async def close(self, seconds=15):
        """Close stdin, as an orderly host does, and return the exit status."""
        if not self.process.stdin.is_closing():
            self.process.stdin.close()
        try:
            status = await asyncio.wait_for(self.process.wait(), seconds)
        except asyncio.TimeoutError:
            self.process.kill()
            status = await self.process.wait()
        await self._reader
        self.stderr.close()
        return status


async def connect(place, servers, link=None):
    """A link to servers through `mcpx serve`, not yet initialized."""
    return await (link or Link()).start(place.mcpx("serve", *servers), place.env(), place.work)
