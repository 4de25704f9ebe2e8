"""The parts of mcpx that read bytes, fuzzed in this process and led by coverage.

Each part has seeds, the pieces that mutations draw on, and `check(rng, data)`, which raises when one of its
promises is broken. A promise is never "does not raise" alone: what was read must be the same however the bytes
were cut, what is written must read as what was meant, and two parsers must not see two requests.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import fuzz_mutate
import install

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import mcpx  # noqa: E402: it lies one directory up

# h11 is the reference for what a request on the wire is: strict where it matters, and not ours.
install.PIP_SETS["h11"] = {"h11": "0.16.0"}


class Broken(Exception):
    """A promise was not kept; the message says which."""


def promise(kept, text, *details):
    if not kept:
        raise Broken(text % details if details else text)


def pieces_of(rng, data):
    """The data, cut at random places."""
    at, pieces = 0, []
    while at < len(data):
        size = rng.choice((1, 1, 2, 3, 7, 64, 1000))
        pieces.append(data[at : at + size])
        at += size
    return pieces


# ---------------------------------------------------------------------------
# Line framing
# ---------------------------------------------------------------------------

LINE_LIMIT = 64

LINE_SEEDS = [b"", b"\n", b"a\nb\n", b"{}\r\n{}\r\n", b"x" * 64 + b"\n" + b"y" * 65 + b"\nz", b"\n\n\n" + b"w" * 200]


def plainly(line):
    """A line as a value that can be compared: an Oversize by its head and size."""
    return (line.head, line.size) if isinstance(line, mcpx.Oversize) else bytes(line)


def check_lines(rng, data):
    """Every way to cut a stream gives the same lines; over-long ones are told by size and by their beginning."""
    *whole, rest = data.split(b"\n")
    expected = [line if len(line) <= LINE_LIMIT else (line[: mcpx.OVERSIZE_HEAD_BYTES], len(line)) for line in whole]
    buffer, found = mcpx.LineBuffer(LINE_LIMIT, grows=rng.random() < 0.5), []
    for piece in [data] if rng.random() < 0.3 else pieces_of(rng, data):
        found += [plainly(line) for line in buffer.feed(piece)]
        held = sum(len(part) for part in buffer._parts)
        promise(held <= LINE_LIMIT, "%d bytes of an unfinished line are kept", held)
    promise(len(found) == len(expected), "%d lines out of %d", len(found), len(expected))
    for line, wanted in zip(found, expected):
        if isinstance(wanted, tuple):
            # How much of the head is kept depends on the cuts; that it is the beginning does not.
            promise(isinstance(line, tuple) and line[1] == wanted[1], "%r instead of %r", line, wanted)
            promise(line[0] and wanted[0].startswith(line[0][:8]), "the head of %r is %r", wanted, line)
        else:
            promise(line == wanted, "%r instead of %r", line, wanted)
    promise(buffer.partial == len(rest), "%d bytes left instead of %d", buffer.partial, len(rest))


# ---------------------------------------------------------------------------
# JSON-RPC
# ---------------------------------------------------------------------------

JSON_SEEDS = [
    b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a","arguments":{"x":[1,2.50,"\\u00e9"]}}}',
    b'{"id":"a","jsonrpc":"2.0","result":{"content":[{"type":"text","text":"\xc3\xa9"}]}}',
    b'{"result":{},"id":-7,"jsonrpc":"2.0"}',
    b'{"jsonrpc":"2.0","method":"notifications/x","params":{"id":5}}',
    b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"x"}}',
    b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]',
    b'{"jsonrpc":"2.0","id":1e3,"method":"ping"}',
    b'{"jsonrpc":"2.0","id":7,"result":{"content":[{"type":"text","text":"long as \xc3\xa9 be"}],"isError":false}}',
    b'{"result":[["a string that is long","short",-1.5e3],{"k":"another one of them"}], "jsonrpc": "2.0", "id": 12}',
]

# So short a line or string is a long one here.
mcpx.LONG_LINE_BYTES = 30
mcpx.LONG_STRING_BYTES = 10
mcpx.LOOK_BYTES = 3


def check_json(rng, data):
    """What is read can be written again, an id is replaced and nothing else, and only peers' errors are raised."""
    line = data.replace(b"\n", b" ").strip()
    mcpx.guess_id(line[:4096])
    short_ways = [mcpx.parse_answer(bytearray(line), outlined) for outlined in (False, True)]
    try:
        message = mcpx.parse_json(line)
    except mcpx.RpcError as error:
        promise(error.code == mcpx.PARSE_ERROR, "code %s", error.code)
        promise(short_ways == [None, None], "what cannot be read was read: %r", short_ways)
        return
    for found, place in filter(None, short_ways):
        promise(mcpx.parse_json(mcpx.encode_json(found)) == message, "read as %r", found)
        changed = bytes(mcpx.with_id(place, found, "new"))
        promise(mcpx.parse_json(changed) == dict(message, id="new"), "with_id made %r", changed[:300])
    text = mcpx.encode_json(message)  # what came in must be able to leave
    promise(b"\n" not in text and b"\r" not in text, "a written message has a line end")
    promise(mcpx.parse_json(text) == message, "what was written reads differently")
    try:
        kind = mcpx.message_kind(message)
    except mcpx.RpcError as error:
        promise(error.code == mcpx.INVALID_REQUEST, "code %s", error.code)
        return
    if kind == "notification":
        return
    for new_id in (rng.randrange(10**9), 'own \u00e9 "id"'):
        changed = mcpx.with_id(line, message, new_id)
        promise(b"\n" not in changed and b"\r" not in changed, "a line end in %r", changed[:200])
        promise(mcpx.parse_json(changed) == dict(message, id=new_id), "with_id made %r", changed[:300])
        # A peer that takes the first of two equal keys must not see another id, either.
        names = json.loads(changed, object_pairs_hook=lambda pairs: pairs)
        ids = [value for name, value in names if name == "id"]
        promise(ids == [new_id], "ids %r in %r", ids, changed[:300])


# ---------------------------------------------------------------------------
# HTTP: one connection, with everything behind it replaced by a notebook
# ---------------------------------------------------------------------------


class Settings:
    """Stands in for the configuration: small limits, so that they are reached."""

    values = {
        "limits.lineBytes": 5000,
        "http.headBytes": 4096,
        "limits.hostQueueBytes": 1 << 20,
        "http.connections": 9,
        "transport.sessionMetaKeys": [],
    }

    def get(self, name, _server=None):
        return self.values[name]


class Later:
    """Stands in for the loop: what is due at once runs when the bytes have been taken."""

    def __init__(self):
        self.queue = []

    def soon(self, callback):
        self.queue.append(callback)

    def call_later(self, delay, callback):
        if delay < 0.01:
            self.queue.append(callback)
        return mcpx.Timer(0, callback)

    def drain(self):
        while self.queue:
            self.queue.pop(0)()


class Core:
    stopping = None

    def __init__(self):
        self.config, self.loop = Settings(), Later()

    def on_link_gone(self):
        pass


class Front:
    """Stands in for HttpFront: writes down each request and answers it at once."""

    def __init__(self):
        self.core, self.connections, self.requests = Core(), set(), []

    def admit(self, _connection):
        pass

    def remote(self):
        return len(self.connections)

    def handle(self, exchange):
        self.requests.append((exchange.method, exchange.target, exchange.body))
        exchange.respond(200, b"{}")


class Pipe:
    """Stands in for the stream: what is written, and whether it was hung up."""

    queued_bytes = 0

    def __init__(self):
        self.written, self.closed = b"", False

    def write_message(self, *parts):
        self.written += b"".join(map(bytes, parts))

    def write(self, data):
        self.written += data

    def pause(self, _paused):
        pass

    def close(self, _reason=""):
        self.closed = True

    close_when_flushed = close


def serve(pieces):
    """The requests that mcpx reads out of a byte stream, and all that it wrote."""
    front, pipe = Front(), Pipe()
    connection = mcpx.HttpConnection(front, pipe, False, None)
    for piece in pieces:
        if pipe.closed:
            break
        connection._on_data(piece)
        front.core.loop.drain()
    return front.requests, pipe.written


def read_by_reference(data):
    """The requests that h11 reads out of a byte stream, up to the first that it refuses."""
    found = []
    while data:
        # RFC 9112, 2.2: an empty line before a request is nothing; the reference does not know that.
        request, data = read_one(data.lstrip(b"\r\n"))
        if request is None:
            break
        found.append(request)
    return found


def read_one(data):
    """The first request as (method, target, body), or None; and what is left for the next one."""
    import h11

    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 16)
    connection.receive_data(data)
    request, body = None, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                # A proposal to switch protocols is not taken, so the next request follows here, too.
                goes_on = connection.their_state in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)
                left = connection.trailing_data[0] if goes_on else b""
                return (request.method.decode(), request.target.decode("latin-1"), body), left
            else:
                return None, b""
    except h11.ProtocolError:
        return None, b""


def same_request(ours, theirs):
    """http.server shortens a run of slashes at the start of a target; that hides no request."""
    return ours[0] == theirs[0] and ours[2] == theirs[2] and ours[1].lstrip("/") == theirs[1].lstrip("/")


HTTP_SEEDS = [
    b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /mcp/a HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello"
    b"GET / HTTP/1.1\r\nHost: b\r\n\r\n",
    b"POST /mcp/a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    b"GET / HTTP/1.1\r\nHost: b\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;a=b\r\nx\r\n0\r\nTrailer: 1\r\n\r\n"
    b"GET /2 HTTP/1.0\r\n\r\n",
    b"\r\nDELETE /mcp/a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET /not-read HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
]


def check_http(rng, data):
    """However the bytes come, the same requests are read, and no other parser reads more or others of them."""
    at_once, written = serve([data])
    in_pieces, _ = serve(pieces_of(rng, data))
    promise(at_once == in_pieces, "at once %r, in pieces %r", at_once, in_pieces)
    heads = written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    promise(not heads or heads.startswith(b"HTTP/1.1 "), "an answer that is none: %r", heads[:80])
    reference = read_by_reference(data)
    for number, request in enumerate(at_once):
        promise(number < len(reference), "mcpx serves %r, the reference refuses it", request)
        promise(same_request(request, reference[number]), "mcpx reads %r, the reference %r", request, reference[number])


# ---------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------

CONFIG_SEEDS = [
    b'{"mcpServers": {"a": {"command": "x", "args": ["{cwd}", "${HOME:-y}"], "env": {"TOKEN": "${A}"}, "cwd": "~",\n'
    b' "mcpx": {"scope": "cwd", "max": 3, "idleTimeout": "5m", "stop": {"eofGrace": 1}}}}, // c\n'
    b' "mcpx": {"log.level": "info",}, }',
    b'{"mcp": {"servers": {"b": {"command": ["x", "y"], "environment": {}, "enabled": false, "url": ""}}}, /* c */}',
    b'\xef\xbb\xbf{"servers": {}, "mcpx": {"limits": {"hosts": 5}, "transport.sessionMetaKeys": ["a"],'
    b' "http.listen": ":1"}}',
]


def check_config(_rng, data):
    """A file is used or refused with words; what is used can be shown, and every entry expanded or refused."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(data)
        file.flush()
        try:
            config = mcpx.load_config(file.name)
        except mcpx.UsageError as error:
            promise(str(error), "an error without words")
            return
    json.dumps(mcpx.settings_in_force(config))
    env = {"HOME": "/home/x", "PATH": "/bin", "A": "b"}
    for server in config.servers.values():
        promise(server.broken is None or isinstance(server.broken, str), "broken is %r", server.broken)
        if server.broken:
            continue
        identity = mcpx.Identity("process", "s", True, None, mcpx.Place(cwd="/tmp"), 5, "1")
        try:
            key = mcpx.scope_key(config.get("scope", server), identity)
            mcpx.Definition(config, server, identity, key, env, b"x" * 32)
        except (mcpx.RpcError, mcpx.UsageError) as error:
            promise(str(error), "an error without words")


CONFIG_PIECES = fuzz_mutate.JSON_PIECES + [
    b"// c\n",
    b"/* ",
    b" */",
    b",",
    b",,",
    b'"mcpx":',
    b'"scope":"nowhere"',
    b'"max":-1',
    b'"idleTimeout":"5 y"',
    b"${",
    b"${A}",
    b"${A:-${B}}",
    b"{cwd}",
    b"{nothing}",
    b'"env":{"A=B":"c"}',
    b'"env":{"":"x"}',
    b'"envFile":"/dev/zero"',
    b'"envFile":"/"',
    b'"cwd":"\\u0000"',
    b'"command":"\\u0000"',
    b'"command":["a",5]',
    b'"http.listen":"[::1"',
    b'"limits.lineBytes":"9e9"',
    b'"a":1,"a":2',
    b'"idleTimeout":1e400',
    b'"max":' + b"9" * 5000,
]

# name -> (seeds, pieces, check, most bytes of an input)
PARTS = {
    "lines": (LINE_SEEDS, [b"\n", b"\r\n", b"x" * 64, b"y" * 65, b"\n" * 20, b"z" * 5000], check_lines),
    "json": (JSON_SEEDS, fuzz_mutate.JSON_PIECES, check_json),
    "head": (HTTP_SEEDS, fuzz_mutate.HTTP_PIECES, check_http),
    "config": (CONFIG_SEEDS, CONFIG_PIECES, check_config),
}


def prepare():
    """Install the reference parser and make it importable. Raises install.InstallError."""
    install.install("h11")
    pattern = "lib/python%d.%d/site-packages" % sys.version_info[:2]
    sys.path.append(os.path.join(str(install.peers_dir()), "h11", "venv", pattern))
