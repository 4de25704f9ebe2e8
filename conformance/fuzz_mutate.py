"""Mutations for `fuzz.py`: of bytes, of JSON values, of HTTP requests; and a corpus led by coverage.

Everything is drawn from one `random.Random`, so a seed gives the same inputs again.
"""

import copy
import json
import os
import sys

# Pieces that parsers stumble over, as bytes of JSON.
JSON_PIECES = [
    b"1e999",
    b"-1e999",
    b"NaN",
    b"-0",
    b"9" * 5000,
    b"1" + b"0" * 400,
    b"0.1e-400",
    b"18446744073709551616",
    b"9007199254740993",
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b'"\\u0000"',
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b"\x00",
    b"\xef\xbb\xbf",
    b'"\x1b]0;title\x07\x1b[31m"',
    b'"\\u001b[2J\\u009b31m\\u202e"',
    b"[" * 1200,
    b'{"a":' * 1200,
    b"[" * 900 + b"]" * 900,
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"5",
    b'{"id":7}',
    b'"id":9,',
    b'"jsonrpc":"2.0",',
    b'"method":"ping",',
    b"\n",
    b"\r",
    b"\r\n",
    b"\xe2\x80\xa8",
    b'\\u0069d":1,"',
    b'{"jsonrpc":"2.0","id":1,"result":{}}',
]

# The same as values, to put in the place of any node of a message.
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    5,
    1.5,
    2**63,
    10**400,
    -(10**30),
    "",
    "a",
    "\x00",
    "\ud800",
    "\x1b[31m\x07",
    "²",
    "x" * 300,
    "../../etc/passwd",
    "/nonexistent",
    "a,b",
    "%2e%2e",
    [],
    {},
    [[]],
    ["a"],
    [None],
    [{}],
    {"a": 1},
    {"": None},
    [1, "a", None, {}],
    {"id": 1, "method": "ping"},
    "{id}",
    "${HOME}",
    "\u202e",
    "=?base64?!?=",
    "é" * 40,
    "2025-11-25",
    "2026-07-28",
    "\u2028",
]

HTTP_PIECES = [
    b"Content-Length: 5\r\n",
    b"Content-Length: 5\r\nContent-Length: 6\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding: \x0bchunked\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding: chunked\xa0\r\n",
    b"Content-Length: +5\r\n",
    b"Content-Length: 0x5\r\n",
    b"Content-Length: 5 \r\n",
    b"Content-Length: \xb2\r\n",
    b"Content-Length: 5, 5\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b" folded\r\n",
    b"\tfolded\r\n",
    b"\r",
    b"\n",
    b"\r\n\r\n",
    b"\0",
    b"no colon\r\n",
    b": no name\r\n",
    b"a\x0b: b\r\n",
    b"Host: evil.example\r\n",
    b"Host: localhost\r\n",
    b"Expect: 100-continue\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive, Close\r\n",
    b"GET http://localhost/v1/health HTTP/1.1\r\n",
    b"HTTP/1.0\r\n",
    b"HTTP/2.0\r\n",
    b"HTTP/0.9\r\n",
    b"HTTP/9999.1\r\n",
    b"%2e%2e%2f",
    b"/../",
    b"//",
    b"/mcp/%00",
    b"?a=%ff",
    b"#",
    b"0\r\n\r\n",
    b"5\r\nhello\r\n",
    b'5;ext="\r\n"\r\n',
    b"fffffffffffffffff\r\n",
    b"-1\r\n",
    b"0x5\r\n",
    b"5\n",
    b"Last-Event-ID: \xb2\r\n",
    b"Last-Event-ID: 1-1\r\n",
    b"Mcp-Session-Id: \xff\r\n",
    b"MCP-Protocol-Version: 2026-07-28\r\n",
    b"Mcp-Method: tools/call\r\n",
    b"Mcp-Name: =?base64?4pi?=\r\n",
    b"Mcpx-Session: \x85\r\n",
    b"Accept: text/event-stream;q=0\r\n",
    b"a: b\r\n" * 120,
    b"X: " + b"y" * 9000 + b"\r\n",
    b"Origin: http://localhost.evil.example\r\n",
    b"Upgrade: h2c\r\n",
]


def mutate_bytes(rng, data, pieces):
    """Return `data` with one to four small accidents."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        size = min(rng.choice((1, 1, 2, 4, 16, 200)), len(data) - at)
        kind = rng.randrange(7)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[at : at + size]
        elif kind == 2:
            data[at:at] = data[at : at + size] * rng.choice((1, 1, 3, 50))
        elif kind == 3:
            source = rng.randrange(len(data) + 1)
            data[at : at + size] = data[source : source + size]
        elif kind == 4 and len(data) > at:
            data[at] ^= 1 << rng.randrange(8)
        else:
            data[at:at] = rng.choice(pieces)
    return bytes(data)


def nodes_of(value, path=()):
    """Every place in a JSON value, as a path of keys and indices."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from nodes_of(inner, path + (key,))


def mutate_value(rng, value):
    """Return a copy of a JSON value with one to three nodes replaced, removed, doubled or added."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(list(nodes_of(value)))
        if not path:
            continue
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        kind = rng.randrange(6)
        if kind == 0:
            del inner[path[-1]]
        elif kind == 1 and isinstance(inner, dict):
            inner[rng.choice(list(inner) + ["_meta", "params", "task", "id", "", "\ud800"])] = copy.deepcopy(
                rng.choice(VALUES)
            )
        elif kind == 2 and isinstance(inner, list):
            inner[:] = inner * 2
        else:
            inner[path[-1]] = copy.deepcopy(rng.choice(VALUES))
    return value


def mutate_line(rng, message):
    """Return a message, mutated as a value, as bytes, or as both; it may have any number of line ends."""
    value = mutate_value(rng, message) if rng.random() < 0.8 else message
    data = json.dumps(value, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    if rng.random() < 0.35:
        data = mutate_bytes(rng, data, JSON_PIECES)
    elif rng.random() < 0.15:
        # A number that JSON allows and floating point has no value for, anywhere.
        data = data.replace(b"null", b"1e999", 1) if b"null" in data else data.replace(b"[]", b"[1e999]", 1)
    return data


class Coverage:
    """Counts which steps from line to line of one file an input takes.

    `sys.settrace` is slow, but the functions that are looked at here are small, and it is in every Python.
    """

    def __init__(self, path):
        self.path = os.path.realpath(path)
        self.edges = set()
        self._last = 0

    def __enter__(self):
        self.edges = set()
        self._last = 0
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, _event, _argument):
        return self._line if frame.f_code.co_filename == self.path else None

    def _line(self, frame, event, _argument):
        if event == "line":
            self.edges.add((self._last, frame.f_lineno))
            self._last = frame.f_lineno
        return self._line


class Corpus:
    """Inputs that were worth keeping: each took a step that no other had taken."""

    def __init__(self, seeds, pieces):
        self.inputs = list(seeds)
        self.pieces = pieces
        self.seen = set()

    def draw(self, rng):
        """The next input to try."""
        data = rng.choice(self.inputs)
        if rng.random() < 0.15:
            other = rng.choice(self.inputs)
            data = data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
        return mutate_bytes(rng, data, self.pieces)

    def note(self, data, edges):
        """Keep an input that has shown something new."""
        if not edges <= self.seen:
            self.seen |= edges
            if len(data) < 20000:
                self.inputs.append(data)


def minimise(data, fails):
    """Return a smaller input for which `fails(data)` still holds; a few hundred tries at most."""
    tries, size = 400, max(1, len(data) // 2)
    while size and tries > 0:
        at = 0
        while at < len(data) and tries > 0:
            shorter = data[:at] + data[at + size :]
            tries -= 1
            if fails(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data
