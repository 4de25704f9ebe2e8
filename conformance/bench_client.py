"""The measuring client of bench.py: what a host does, and no more than it must.

No SDK: requests are bytes made in advance but for their number, answers are looked through
for a text that only the right one has, and all hosts of a measurement share one poll loop.
So the client costs little, and the same for every contestant.
"""
import json
import os
import re
import select
import socket
import subprocess
import time

# What a pipe holds; a larger buffer costs more to get than it saves.
READ_BYTES = 1 << 16
REVISION, MODERN = "2025-11-25", "2026-07-28"
CLIENT_INFO = {"name": "bench", "version": "1"}
INITIALIZE = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": CLIENT_INFO}
# Nothing that is measured takes this long; a contestant that does hangs.
ANSWER_LIMIT_S = 60
# What the echoed text is made up to: a small call as agents make them.
TEXT_BYTES = 100
PADDING = b"x" * TEXT_BYTES

encode = json.JSONEncoder(separators=(",", ":")).encode


class Broken(Exception):
    """A contestant hung up, hung, or answered wrongly; the message says which."""


class Watch:
    """One poll object, and which host each descriptor in it belongs to."""

    def __init__(self, hosts=()):
        self.poller, self.host_of = select.poll(), {}
        for host in hosts:
            host.join(self)

    def add(self, fd, host):
        self.poller.register(fd, select.POLLIN)
        self.host_of[fd] = host

    def remove(self, fd):
        if self.host_of.pop(fd, None) is not None:
            self.poller.unregister(fd)

    def ready(self, deadline):
        """The descriptors that can be read, waiting for one. Raises Broken after the deadline."""
        events = self.poller.poll(max(0, (deadline - time.monotonic()) * 1000))
        if not events:
            raise Broken("no answer within the limit")
        return events


class Host:
    """What the transports have in common. Subclasses have start, post, read, is_idle and close.

    post(data)   send one message
    read(fd)     the messages that are complete now
    is_idle()    may the next request be posted?
    """

    modern = False

    def __init__(self, number):
        self.number, self.last_id = number, 0
        self.watch = None
        self.fds = set()
        self.names = {}  # "echo" or "blob" -> the tool's name here
        self.strays = 0  # answers that were not for us

    # -- descriptors ----------------------------------------------------------

    def join(self, watch):
        """Be polled by this Watch from now on, and by no other."""
        for fd in self.fds:
            if self.watch is not None:
                self.watch.remove(fd)
            watch.add(fd, self)
        self.watch = watch

    def opened(self, fd):
        self.fds.add(fd)
        if self.watch is not None:
            self.watch.add(fd, self)

    def closed(self, fd):
        self.fds.discard(fd)
        if self.watch is not None:
            self.watch.remove(fd)

    # -- requests -------------------------------------------------------------

    def body(self, method, params):
        """A request as bytes; its id is self.last_id."""
        self.last_id += 1
        if self.modern:
            params = dict(params, _meta=MODERN_META)
        return encode({"jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params}).encode()

    def request(self, method, params, limit=ANSWER_LIMIT_S):
        """Send a request and return its result. Raises Broken."""
        self.post(self.body(method, params))
        wanted, answer, deadline = self.last_id, None, time.monotonic() + limit
        while answer is None or not self.is_idle():
            for fd, _ in self.watch.ready(deadline):
                for data in self.read(fd):
                    message = json.loads(data)
                    if message.get("id") == wanted and "method" not in message:
                        answer = message
                    else:
                        self.other(data)
        if "result" not in answer:
            raise Broken("%s: %s" % (method, str(answer.get("error"))[:300]))
        return answer["result"]

    def other(self, data):
        """A message that nobody waits for: requests are answered, strays are counted."""
        message = json.loads(data)
        if "method" not in message:
            self.strays += 1
        elif "id" in message:
            result = {"result": {}} if message["method"] == "ping" else {"error": {"code": -32601, "message": "no"}}
            self.post(encode(dict({"jsonrpc": "2.0", "id": message["id"]}, **result)).encode())

    def initialize(self, limit=ANSWER_LIMIT_S):
        """Make the handshake, as far as the revision has one."""
        if self.modern:
            self.request("server/discover", {}, limit)
            return
        self.revision = self.request("initialize", INITIALIZE, limit)["protocolVersion"]
        self.post(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
        self.settle()

    def list_tools(self, limit=ANSWER_LIMIT_S):
        """List the tools and note what echo and blob are called here; makes ready for calls."""
        deadline = time.monotonic() + limit
        tools = self.request("tools/list", {}, limit)["tools"]
        while not tools and time.monotonic() < deadline:
            time.sleep(0.02)  # one peer is ready before its server is
            tools = self.request("tools/list", {}, limit)["tools"]
        for tool in tools:
            for name in ("echo", "blob"):
                if tool["name"] == name or re.search(r"[^a-z]%s$" % name, tool["name"]):
                    self.names[name] = tool["name"]
        if len(self.names) != 2:
            raise Broken("echo and blob are not among the tools")
        name = encode(self.names["echo"]).encode()
        meta = b',"_meta":' + encode(MODERN_META).encode() if self.modern else b""
        self.call_format = b"".join((
            b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":', name,
            b',"arguments":{"text":"%s"}', meta, b"}}"))

    def settle(self):
        """Wait until the next request may be posted."""
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while not self.is_idle():
            for fd, _ in self.watch.ready(deadline):
                for data in self.read(fd):
                    self.other(data)

    def post_call(self):
        """Post an echo; returns the text that only its answer has."""
        self.last_id += 1
        token = b"%d.%d." % (self.number, self.last_id)
        self.post(self.call_format % (self.last_id, token + PADDING[len(token):]))
        return token

    def call(self):
        """One echo, from the request's first byte to the answer's last; returns seconds."""
        poll, read = self.watch.poller.poll, self.read
        started = time.perf_counter()
        token = self.post_call()
        while True:
            events = poll(ANSWER_LIMIT_S * 1000)
            if not events:
                raise Broken("no answer to a call")
            for fd, _ in events:
                for data in read(fd):
                    if token in data:
                        seconds = time.perf_counter() - started
                        self.check(data)
                        self.settle()
                        return seconds
                    self.other(data)

    def check(self, data):
        """Is this the answer to our last request?"""
        message = json.loads(data)
        if message.get("id") != self.last_id or "result" not in message:
            raise Broken("a wrong answer: %r" % data[:200])

    def blob(self, size):
        """One large result; returns seconds until it is decoded, as no host can do without. Raises Broken."""
        body = self.body("tools/call", {"name": self.names["blob"], "arguments": {"bytes": size}})
        started = time.perf_counter()
        self.post(body)
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while True:
            for fd, _ in self.watch.ready(deadline):
                for data in self.read(fd):
                    if len(data) > size:
                        self.check(data)
                        seconds = time.perf_counter() - started
                        self.settle()
                        return seconds
                    self.other(data)


MODERN_META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientInfo": CLIENT_INFO,
    "io.modelcontextprotocol/clientCapabilities": {},
}


# ---------------------------------------------------------------------------
# stdio
# ---------------------------------------------------------------------------


class StdioHost(Host):
    """Launches a command, as hosts do, and speaks over its pipes."""

    def start(self, argv, env, cwd, log):
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, cwd=cwd, bufsize=0)
        self.write_fd, self.read_fd = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.pieces = []
        self.opened(self.read_fd)

    def post(self, data):
        try:
            os.write(self.write_fd, data + b"\n")
        except OSError as error:
            raise Broken("it does not read: %s" % error)

    def read(self, fd):
        data = os.read(fd, READ_BYTES)
        if not data:
            raise Broken("it has ended")
        end = data.find(b"\n")
        if end < 0:
            self.pieces.append(data)
            return ()
        if end == len(data) - 1:
            if self.pieces:
                data, self.pieces = b"".join(self.pieces + [data]), []
            return (data,)
        *lines, rest = b"".join(self.pieces + [data]).split(b"\n")
        self.pieces = [rest] if rest else []
        return [line for line in lines if line.strip()]

    def is_idle(self):
        return True

    def close(self):
        if self.read_fd in self.fds:
            self.closed(self.read_fd)
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


# ---------------------------------------------------------------------------
# HTTP
# ---------------------------------------------------------------------------


class Connection:
    """One keep-alive connection: `read` gives (status, headers, messages, whether it is complete)."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), 10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(True)
        self.fd = self.socket.fileno()
        self.buffer = bytearray()
        self.head = None  # of the answer that is being read
        self.busy = False
        self.used_at = time.monotonic()

    def send(self, head, body=b""):
        self.busy, self.head, self.used_at = True, None, time.monotonic()
        self.socket.sendall(head + body)

    def has_ended(self):
        """Has the other end closed it while nobody asked anything? Some do after 5 s."""
        if time.monotonic() - self.used_at < 1:
            return False
        try:
            return not self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def read(self):
        """Read once; returns the messages that are complete now."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise Broken("it hung up in the middle of an answer" if self.busy else "it hung up")
        self.buffer += data
        messages = []
        if self.head is None and not self._take_head():
            return messages
        if self.chunked:
            self._take_chunks(messages)
        elif len(self.buffer) >= self.left:
            body = bytes(self.buffer[:self.left])
            del self.buffer[:self.left]
            self.busy = False
            if self.status >= 300:
                raise Broken("HTTP %d: %s" % (self.status, body[:200].decode("utf-8", "replace")))
            if body and self.status == 200:
                messages += self._events([body]) if self.is_stream else [body]
        return messages

    def header(self, name):
        match = re.search(rb"\r\n%s:[ \t]*([^\r\n]*)" % name, self.head, re.I)
        return match.group(1) if match else None

    def _take_head(self):
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        self.head = bytes(self.buffer[:end])
        del self.buffer[:end + 4]
        self.status = int(self.head[9:12])
        self.chunked = (self.header(b"transfer-encoding") or b"").lower() == b"chunked"
        self.left = int(self.header(b"content-length") or 0)
        self.is_stream = (self.header(b"content-type") or b"").startswith(b"text/event-stream")
        self.pieces = []  # of the event, or the body, that is not complete
        return True

    def _take_chunks(self, messages):
        while True:
            end = self.buffer.find(b"\r\n")
            if end < 0:
                return
            size = int(self.buffer[:end].split(b";")[0], 16)
            if len(self.buffer) < end + 4 + size:
                return
            self.pieces.append(bytes(self.buffer[end + 2:end + 2 + size]))
            del self.buffer[:end + 4 + size]
            if not size:
                self.busy = False
                body = b"".join(self.pieces)
                if self.status >= 300:
                    raise Broken("HTTP %d: %s" % (self.status, body[:200].decode("utf-8", "replace")))
                if self.status == 200:
                    messages += self._events([body]) if self.is_stream else [body]
                return
            if self.is_stream and self.pieces[-1].endswith((b"\n\n", b"\r\n\r\n")):
                messages += self._events(self.pieces)
                self.pieces = []

    def _events(self, pieces):
        """The data of the complete events, and through `on_event` what has another type."""
        messages = []
        for event in b"".join(pieces).replace(b"\r\n", b"\n").split(b"\n\n"):
            lines = event.split(b"\n")
            data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
            kind = next((line[6:].strip() for line in lines if line.startswith(b"event:")), b"message")
            if kind == b"endpoint":
                self.endpoint = data.decode()
            elif data:
                messages.append(data)
        return messages

    def close(self):
        self.socket.close()


class HttpHost(Host):
    """Streamable HTTP: a POST for each message, on one connection that is kept."""

    session = None
    revision = None

    def start(self, port, path):
        self.port, self.path = port, path
        self._connect()

    def _connect(self):
        self.connection = Connection(self.port)
        self.opened(self.connection.fd)
        self._make_head()

    def _make_head(self):
        lines = ["POST %s HTTP/1.1" % self.path, "Host: 127.0.0.1:%d" % self.port, "Content-Type: application/json",
                 "Accept: application/json, text/event-stream"]
        if self.session:
            lines.append("Mcp-Session-Id: " + self.session)
        if self.revision:
            lines.append("MCP-Protocol-Version: " + self.revision)
        self.post_head = "\r\n".join(lines).encode() + b"%s\r\nContent-Length: %d\r\n\r\n"

    def more_headers(self, _data):
        return b""

    def post(self, data):
        if self.connection.busy:
            raise Broken("a request while another is in flight")
        if self.connection.has_ended():
            self._reconnect()
        self.connection.send(self.post_head % (self.more_headers(data), len(data)), data)

    def read(self, fd):
        connection = self.connection
        messages = connection.read()
        if connection.head is not None and not connection.busy:
            if self.session is None and not self.modern:
                session = connection.header(b"mcp-session-id")
                if session:
                    self.session = session.decode()
                    self._make_head()
            if (connection.header(b"connection") or b"").lower() == b"close":
                self._reconnect()
        return messages

    def _reconnect(self):
        self.closed(self.connection.fd)
        self.connection.close()
        self._connect()

    def is_idle(self):
        return not self.connection.busy

    def initialize(self, limit=ANSWER_LIMIT_S):
        super().initialize(limit)
        self._make_head()

    def close(self):
        self.closed(self.connection.fd)
        self.connection.close()


class ModernHttpHost(HttpHost):
    """The same in revision 2026-07-28: no session, and headers that repeat what the body says."""

    modern = True
    revision = MODERN

    def more_headers(self, data):
        if data.find(b'"tools/call"', 0, 100) >= 0:
            name = self.names["blob" if b'"bytes"' in data[:200] else "echo"]
            return b"\r\nMcp-Method: tools/call\r\nMcp-Name: " + name.encode()
        return b"\r\nMcp-Method: " + json.loads(data)["method"].encode()


class SseHost(Host):
    """HTTP with a stream of events of its own, as revision 2024-11-05 had it."""

    connection = None

    def start(self, port, path):
        self.port, self.path = port, path
        self.stream = Connection(port)
        self.stream.endpoint = None
        self.opened(self.stream.fd)
        self.stream.send(("GET %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: text/event-stream\r\n\r\n"
                          % (path, port)).encode())
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while self.stream.endpoint is None:
            for fd, _ in self.watch.ready(deadline):
                self.read(fd)
        target = re.sub(r"^https?://[^/]*", "", self.stream.endpoint)
        self.post_head = ("POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                          % (target, port)).encode() + b"Content-Length: %d\r\n\r\n"
        self.connection = Connection(port)
        self.opened(self.connection.fd)

    def post(self, data):
        if self.connection.has_ended():
            self.closed(self.connection.fd)
            self.connection.close()
            self.connection = Connection(self.port)
            self.opened(self.connection.fd)
        self.connection.send(self.post_head % len(data), data)

    def read(self, fd):
        if fd == self.stream.fd:
            return self.stream.read()
        self.connection.read()  # 202 and a few words
        return ()

    def is_idle(self):
        return not self.connection.busy

    def close(self):
        for connection in {self.stream, self.connection or self.stream}:
            self.closed(connection.fd)
            connection.close()


HOSTS = {"stdio": StdioHost, "http": HttpHost, "modern": ModernHttpHost, "sse": SseHost}


# ---------------------------------------------------------------------------
# Many hosts at once
# ---------------------------------------------------------------------------


def load(hosts, seconds):
    """Every host calls again as soon as it is answered; returns the latencies in seconds."""
    watch = Watch(hosts)
    clock, latencies, open_calls = time.perf_counter, [], {}
    begun = clock()
    end = begun + seconds
    for host in hosts:
        open_calls[host] = [clock(), host.post_call(), False]
    deadline = time.monotonic() + seconds + ANSWER_LIMIT_S
    while open_calls:
        for fd, _ in watch.ready(deadline):
            host = watch.host_of[fd]
            call = open_calls.get(host)
            for data in host.read(fd):
                if call is None or call[1] not in data:
                    host.other(data)
                    continue
                now = clock()
                call[2] = True
                if now < end:
                    latencies.append(now - call[0])
            if call is not None and call[2] and host.is_idle():
                if now < end:
                    open_calls[host] = [clock(), host.post_call(), False]
                else:
                    del open_calls[host]
    for host in hosts:
        host.join(Watch())
    return latencies
