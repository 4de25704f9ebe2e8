#!/bin/sh
""":"
exec "${MCPX_PYTHON:-python3}" -I -S -c 'import sys; exec(open(sys.argv[1], "rb").read(4096).split(b"<boot>")[2])' "$0" "$@"
":"
mcpx: one pool of MCP servers for every coding agent on this machine.

Hosts (opencode, Claude Code, an editor, a script) launch `mcpx.py serve NAME` where
they launched a server before. That process, the *shim*, relays lines to one *daemon*,
which runs the real servers as children and decides for every request which running
copy of a server answers it. The lines above make this file a shell script as well,
and start it from cached byte code by means of these, which Python sees as a docstring:

<boot>
import os, sys
path = os.path.realpath(sys.argv[1])
sys.argv[:2] = [path]
import _frozen_importlib as frozen, _frozen_importlib_external as external
base = os.environ.get("XDG_CACHE_HOME") or ""
if not os.path.isabs(base):
    base = os.path.join(os.path.expanduser("~"), ".cache")
cache = os.path.join(base, "mcpx")
try:
    os.path.isdir(base) or os.makedirs(base, 0o700)
    os.path.isdir(cache) or os.mkdir(cache, 0o700)
    info = os.lstat(cache)
    if info.st_uid != os.getuid() or info.st_mode & 0o170077 != 0o040000:
        raise OSError("not a private directory")
    sys.pycache_prefix = cache
    target = external.cache_from_source(path)
    sys.pycache_prefix = None
    part = target[:-3] + "shim"
    if sys.argv[1:2] == ["serve"] and os.path.exists(part):
        with open(path, "rb") as file, open(part, "rb") as kept:
            source, kept = file.read(), kept.read()
    if not os.path.exists(target):
        import py_compile
        py_compile.compile(path, target, quiet=2,
                           invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        if os.path.exists(target) and hasattr(sys, "orig_argv"):
            # The memory that compiling took is not given back by a process that goes on.
            os.execv(sys.executable, sys.orig_argv)
    sys.pycache_prefix = cache
except OSError:
    pass
loader = external.SourceFileLoader("mcpx", path)
spec = external.spec_from_file_location("mcpx", path, loader=loader)
sys.modules["mcpx"] = module = frozen.module_from_spec(spec)
import _imp as imp, marshal
if "source" in vars() and imp.source_hash(sys.hexversion, source) + imp.source_hash(
        sys.hexversion, kept[16:]) == kept[:16]:
    del source
    define, parts = marshal.loads(kept[16:])
    module.__builtins__ = __builtins__
    type(lambda: 0)(define, vars(module))(parts)
    del kept, define, parts
else:
    loader.exec_module(module)
module.main()
<boot>

How one request travels:

    host -> shim -> LegacyHost  reads the line, tells who asks (Identity)
                 -> Surface     tells which server it is for, or answers from the cache
                 -> Pool        finds or starts the Instance with the caller's scope key
                 -> Upstream    sends it under an id of its own, and takes the answer
    host <- shim <- LegacyHost  spells the answer for the host's revision

The words, each with one meaning:

    host      who asks: the program at the other end of a shim
    shim      the process a host launches; it survives the daemon
    server    a name in the configuration
    instance  one running copy of a server, with one scope key
    child     the process of an instance
    upstream  our client end of an instance
    identity  who a request is from: session, parent session, directory, process
    scope     the setting that turns an identity into a key
    key       what callers of one instance have in common
    slot      the place of one (server, definition, key): its instance and who waits
    call      a request on its way
    question  a request from an upstream, on its way to a host
    lease     a call's hold on an instance: taken when sent, given back when settled

Sections, each using only those above it: constants, errors, wire, revisions, identity
and scopes, settings and config, log, platform, reactor, upstream, children, keeping, pool,
surface, questions, host, HTTP, snapshot, daemon, shim, demo, commands.

Licence: MIT (SPDX-License-Identifier: MIT)

    Copyright (c) 2026 the mcpx authors

    Permission is hereby granted, free of charge, to any person obtaining a copy of this
    software and associated documentation files (the "Software"), to deal in the Software
    without restriction, including without limitation the rights to use, copy, modify,
    merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
    permit persons to whom the Software is furnished to do so, subject to the following
    conditions: The above copyright notice and this permission notice shall be included in
    all copies or substantial portions of the Software. THE SOFTWARE IS PROVIDED "AS IS",
    WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
    WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN
    NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR
    OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT
    OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
from __future__ import annotations

import sys

# The boot code above redirects the byte-code cache for this file alone; left on, every
# standard module would be compiled into our cache as well.
BYTE_CODE_DIRECTORY, sys.pycache_prefix = sys.pycache_prefix, None
# A shim has mostly loaded a part of this file only: see section Shim.
IS_PART = False

import os
import time

__version__ = "0.1.0"
__license__ = "MIT"


class _Later:
    """A standard module that is imported at its first use.

    A shim starts once per server and host and needs almost nothing, so the modules that
    only the daemon and the commands use must cost it nothing. `importlib.util.LazyLoader`
    does the same but imports a good part of the library to do it.
    """

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        __import__(self._name)
        module = sys.modules[self._name]
        # A copy is made in one go, whatever other threads do meanwhile.
        for alias, value in globals().copy().items():
            if value is self:
                globals()[alias] = module
        return getattr(module, attribute)


argparse, codecs, collections, fcntl, fnmatch, gc, glob, hashlib, heapq, hmac, json = map(
    _Later, "argparse codecs collections fcntl fnmatch gc glob hashlib heapq hmac json".split())
re, resource, secrets, select, selectors, shutil, signal, socket, stat, struct, subprocess = map(
    _Later, "re resource secrets select selectors shutil signal socket stat struct subprocess".split())
marshal, mmap, tempfile, threading, traceback, types = map(
    _Later, "marshal mmap tempfile threading traceback types".split())


# ---------------------------------------------------------------------------
# Constants: which numbers and names, and why these
#
# Literals only. What a person may change is in the settings table instead.
# ---------------------------------------------------------------------------

LEGACY_REVISIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN_REVISIONS = ("2026-07-28",)
REVISIONS = LEGACY_REVISIONS + MODERN_REVISIONS
LATEST_LEGACY = LEGACY_REVISIONS[-1]
MODERN = MODERN_REVISIONS[-1]

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
RESOURCE_NOT_FOUND = -32002
HEADER_MISMATCH = -32020
MISSING_CAPABILITY = -32021
UNSUPPORTED_VERSION = -32022
URL_ELICITATION_REQUIRED = -32042
# The code is what several SDKs use for "connection closed"; programs look at the mark.
STREAM_LOST = -32000
STREAM_LOST_DATA = {"mcpxStreamLost": True}
# What clients in the field send when a person refuses a sampling request.
SAMPLING_REFUSED = -1

LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")

# Version of the conversation between shim and daemon; a daemon serves every older one.
LINK_VERSION = 1

# A name that a caller gives itself: long enough for any host's ids, short enough to print.
MAX_NAME_CHARS = 256
# A read of this size stays below malloc's mmap threshold (128 KiB); larger ones cost a
# system call to allocate each time.
READ_BYTES = 65536
# POSIX guarantees an atomic write of 512 bytes; Linux has 4096.
PIPE_BUF = 4096 if sys.platform.startswith("linux") else 512
# A line that so many daemons have died with is not taken up by another.
MAX_LOSSES = 3
# From this size on a line is not read as one text: what is long in it is passed on as it came.
LONG_LINE_BYTES = 256 << 10
LONG_STRING_BYTES = 4096
# How much of a line over the limit is kept, to find the id in it.
OVERSIZE_HEAD_BYTES = 4096
# A chain of pages that is longer than this is a server that repeats itself.
MAX_PAGES = 1000
# sun_path has 108 bytes on Linux and 104 on macOS, with the final NUL.
MAX_SOCKET_PATH = 103
# Environment variable that marks every process of an instance, however deep.
INSTANCE_VARIABLE = "MCPX_INSTANCE"

CONNECTION_PREFIX = "mcp-"
META_PARENT = "dev.mcpx/parent-session"
META_CWD = "dev.mcpx/cwd"
META_RESTARTED = "dev.mcpx/restarted"
META_RELATED_TASK = "io.modelcontextprotocol/related-task"
META_VERSION = "io.modelcontextprotocol/protocolVersion"
META_CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
META_CLIENT_INFO = "io.modelcontextprotocol/clientInfo"
META_LOG_LEVEL = "io.modelcontextprotocol/logLevel"
META_SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"
META_SERVER_INFO = "io.modelcontextprotocol/serverInfo"
TASKS_EXTENSION = "io.modelcontextprotocol/tasks"
# Keys of `_meta` that belong to one hop; everything else crosses untouched.
HOP_META = frozenset("io.modelcontextprotocol/" + name for name in (
    "protocolVersion", "clientInfo", "clientCapabilities", "logLevel", "subscriptionId",
    "serverInfo"))

# Their results are content, which is passed on.
CONTENT_METHODS = frozenset(("tools/call", "resources/read", "prompts/get"))
LIST_METHODS = {"tools/list": "tools", "prompts/list": "prompts", "resources/list": "resources",
                "resources/templates/list": "resourceTemplates"}
# Which declared capability offers a list.
LIST_CAPABILITY = {"tools": "tools", "prompts": "prompts", "resources": "resources",
                   "resourceTemplates": "resources"}


# ---------------------------------------------------------------------------
# Errors: whose fault, and so what happens
#
# Nothing here prints. `assert` is for mistakes of ours and never for input.
# ---------------------------------------------------------------------------

class UsageError(Exception):
    """A person asked for something that cannot be; the text says what to do. Exit status 2."""


class ConfigError(UsageError):
    """The configuration has a mistake. `where` names file, line and key."""

    def __init__(self, where, text):
        super().__init__("%s: %s" % (where, text))


class RpcError(Exception):
    """What a peer is answered: a JSON-RPC error with `code`, message and optional `data`."""

    def __init__(self, code, message, data=None):
        super().__init__(message)
        self.code, self.message, self.data = code, message, data

    def as_object(self):
        """The `error` member of an answer."""
        error = {"code": self.code, "message": self.message}
        if self.data is not None:
            error["data"] = self.data
        return error


class StreamLost(RpcError):
    """A request may or may not have been carried out: its child, daemon or stream is gone.

    The contract with programs is `data.mcpxStreamLost`, never the code or the message.
    """

    def __init__(self, message):
        super().__init__(STREAM_LOST, message, dict(STREAM_LOST_DATA))


class StartFailed(RpcError):
    """A server could not be started, or ended before it was ready; says why."""

    def __init__(self, message, data=None):
        super().__init__(INTERNAL_ERROR, message, data)


class LimitReached(RpcError):
    """A bound was reached; the message names the setting that holds it."""

    def __init__(self, message):
        super().__init__(INTERNAL_ERROR, message)


# ---------------------------------------------------------------------------
# Wire: where a message ends; is it a call, an answer, a notification
#
# Bytes and JSON only: no descriptors, no clock, no method names. Never raises anything
# but RpcError for what a peer sent.
# ---------------------------------------------------------------------------

class Oversize:
    """Stands in for a line over the limit: its first bytes and its whole size so far."""

    __slots__ = ("head", "size")

    def __init__(self, head, size):
        self.head, self.size = head, size


class LineBuffer:
    """Cuts a byte stream into lines; pieces may be cut anywhere.

    A line longer than `limit` bytes is not kept: an `Oversize` takes its place in the
    result once its end has been seen, so memory stays bounded and the next line works.
    With `grows` a line that comes in many pieces is a bytearray: memory that is touched for
    the first time costs several times what copying to it does, so it is not joined at the end.
    """

    ADDED = {"grows": False}

    def __init__(self, limit, grows=False):
        self.limit, self.grows = limit, grows
        self._parts = []
        self._size = 0
        self._oversize = None

    def feed(self, data):
        """Return the lines (bytes or bytearray without line end, or Oversize) that `data` completes."""
        end = data.find(b"\n")
        if end < 0:
            self._keep(data)
            return []
        if end == len(data) - 1 and not self._size and end <= self.limit:
            return [data[:end]]
        first, *rest = data.split(b"\n")
        self._keep(first)
        lines = [self._take()]
        if rest:
            tail = rest.pop()
            lines += rest if len(data) <= self.limit else [self._check(line) for line in rest]
            if tail:
                self._keep(tail)
        return lines

    def rest(self):
        """Return what came after the last line end, once the stream has ended."""
        return self._take() if self._size else b""

    @property
    def partial(self):
        """Bytes of the unfinished line, also those that were not kept."""
        return self._size

    def _keep(self, data):
        self._size += len(data)
        if self._oversize is not None:
            self._oversize.size = self._size
        elif self._size > self.limit:
            self._parts.append(data)
            head = b"".join(part[:OVERSIZE_HEAD_BYTES] for part in self._parts[:8])
            self._oversize = Oversize(head[:OVERSIZE_HEAD_BYTES], self._size)
            self._parts = []
        elif data and self.grows and self._size > LONG_LINE_BYTES:
            if not self._parts or type(self._parts[0]) is not bytearray:
                self._parts = [bytearray().join(self._parts)]
            self._parts[0] += data
        elif data:
            self._parts.append(data)

    def _take(self):
        parts, oversize = self._parts, self._oversize
        self._parts, self._size, self._oversize = [], 0, None
        if oversize is not None:
            return oversize
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check(self, line):
        return line if len(line) <= self.limit else Oversize(line[:OVERSIZE_HEAD_BYTES], len(line))


def _refuse_constant(name):
    raise ValueError("%s is not JSON" % name)


def _finite(text):
    """1e999 is a number to JSON; Python reads it as infinity, which nobody can write down again."""
    value = float(text)
    if value - value != 0:
        raise ValueError("the number %s is out of range" % text[:40])
    return value


_decoder = None


def json_decoder():
    """Return the decoder that every message goes through."""
    global _decoder
    if _decoder is None:
        _decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)
    return _decoder


def parse_json(line):
    """Return the value of one line of JSON. Raises RpcError(PARSE_ERROR) with the reason.

    Stricter than `json.loads`: the bytes must be UTF-8 and NaN, Infinity or a number beyond
    a double's range is refused, as the peer at the other side may be strict. A byte-order
    mark is tolerated.
    """
    try:
        if line[:3] == b"\xef\xbb\xbf":
            line = line[3:]
        text = line.decode("utf-8")
        if text[:1] == "{":
            # The usual line, without white space around it to be looked for.
            value, end = json_decoder().raw_decode(text)
            if end == len(text):
                return value
        return json_decoder().decode(text)
    except UnicodeDecodeError as error:
        raise RpcError(PARSE_ERROR, "Parse error: not UTF-8 at byte %d" % error.start)
    except RecursionError:
        raise RpcError(PARSE_ERROR, "Parse error: nested too deeply")
    except ValueError as error:
        raise RpcError(PARSE_ERROR, "Parse error: %s" % str(error)[:200])


_encode = None


def encode_json(value):
    """Return `value` as one line of compact JSON, as bytes without a line end.

    A lone surrogate, which UTF-8 has no bytes for, goes out as the escape it came in as.
    """
    global _encode
    if _encode is None:
        _encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False,
                                   default=_long_texts.place).encode
    try:
        return _long_texts.fill(_encode(value).encode("utf-8"))
    except UnicodeEncodeError:
        _long_texts.met.clear()
        return _long_texts.fill(json.dumps(value, separators=(",", ":"), allow_nan=False,
                                           default=_long_texts.place).encode("ascii"))
    except (ValueError, RecursionError) as error:
        raise RpcError(INTERNAL_ERROR, "cannot pass this message on: %s" % error)
    finally:
        _long_texts.met.clear()


class LongText:
    """A long string of a message, left where it stands in the line that it came in.

    It has no escapes, so between its quotes stand its very characters.
    """

    __slots__ = ("line", "start", "end")

    def __init__(self, line, start, end):
        self.line, self.start, self.end = line, start, end

    def __str__(self):
        return str(self.raw()[1:-1], "utf-8")

    def raw(self):
        """Return its bytes with the quotes, without a copy."""
        return memoryview(self.line)[self.start:self.end]


class _LongTexts:
    """Those met in the message that is being encoded: their bytes are put in once the rest is text."""

    def __init__(self):
        self.met, self._place = [], None

    def place(self, value):
        """Return what the encoder writes in place of a LongText: a string that nobody else can know."""
        if not isinstance(value, LongText):
            raise TypeError("a %s is no JSON" % type(value).__name__)
        self._place = self._place or os.urandom(16).hex()
        self.met.append(value)
        return self._place

    def fill(self, data):
        """Return encoded JSON with the long texts in their places."""
        if not self.met:
            return data
        first, *others = data.split(b'"%s"' % self._place.encode())
        return b"".join([first] + [piece for pair in zip((text.raw() for text in self.met), others) for piece in pair])


_long_texts = _LongTexts()
# What no string of JSON has in it unescaped, except the line feed, which no line has in it at all.
_CONTROLS = [number for number in range(32) if number != 10]
BACKSLASH = 0x5C
# So much is looked through at a time: it stays in the processor's cache.
LOOK_BYTES = 32 << 10


def _is_plain(line, start, end):
    """Is there nothing but characters that mean themselves? A backslash or an error is not."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    view = memoryview(line)
    for place in range(start, end, LOOK_BYTES):
        piece = bytes(view[place:min(place + LOOK_BYTES, end)])
        if b"\\" in piece or any(map(piece.__contains__, _CONTROLS)):
            return False
        decode(piece)
    decode(b"", True)
    return True


def outline(line, begin):
    """Return (text, decoder) of a long line of JSON: its text without the long strings that come
    after `begin`, and a decoder of this text that gives a LongText for each. Raises ValueError where
    the line is not JSON, or not mostly made of long strings without escapes.

    In the text each long string is the constant NaN, which JSON does not have; a real one is told
    by there being more of them than were put in.
    """
    texts, pieces, done, at, start = [], [], 0, begin, None
    for _ in range(2 * len(line) // LONG_STRING_BYTES):
        quote = line.find(b'"', at)
        if quote < 0:
            break
        at = quote + 1
        if start is None:
            start = quote
            continue
        is_long = at - start > LONG_STRING_BYTES
        if line[quote - 1] == BACKSLASH and not is_long:
            inside = line[start + 1:quote]
            if (len(inside) - len(inside.rstrip(b"\\"))) % 2:
                continue                 # it is one of the string's characters
        if is_long:
            if not _is_plain(line, start + 1, quote):
                raise ValueError("a long string has escapes")
            texts.append(LongText(line, start, at))
            pieces += line[done:start], b"NaN"
            done = at
        start = None
    else:
        raise ValueError("too many strings")
    pieces.append(line[done:])
    following = iter(texts)

    def take(constant):
        text = next(following, None)
        if constant != "NaN" or text is None:
            raise ValueError("%s is not JSON" % constant)
        return text
    return b"".join(pieces).decode("utf-8"), json.JSONDecoder(parse_float=_finite, parse_constant=take)


def is_valid_id(value):
    """Is this a request id of MCP: a string or an integer, never null?

    MCP 2025-11-25, basic/index: requests carry a string or integer id.
    """
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def is_whole(line):
    """Is this line a message, and not the rest of one? No proper end of a message is one itself."""
    try:
        return not isinstance(line, Oversize) and isinstance(parse_json(line.strip()), (dict, list))
    except RpcError:
        return False


def message_kind(message):
    """Return "request", "notification" or "answer". Raises RpcError(INVALID_REQUEST).

    JSON-RPC 2.0, sections 4 and 5.
    """
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        raise RpcError(INVALID_REQUEST, 'Invalid Request: not an object with "jsonrpc": "2.0"')
    if "method" in message:
        if not isinstance(message["method"], str):
            raise RpcError(INVALID_REQUEST, "Invalid Request: method is not a string")
        if not isinstance(message.get("params", {}), dict):
            raise RpcError(INVALID_REQUEST, "Invalid Request: params is not an object")
        if "id" not in message:
            return "notification"
        if not is_valid_id(message["id"]):
            raise RpcError(INVALID_REQUEST, "Invalid Request: id is neither a string nor an integer")
        return "request"
    if "result" in message or "error" in message:
        if "id" not in message:
            raise RpcError(INVALID_REQUEST, "Invalid Request: an answer without id")
        return "answer"
    raise RpcError(INVALID_REQUEST, "Invalid Request: neither method nor result nor error")


_ID_PATTERN = None


def guess_id(head):
    """Return the request id that the start of an unreadable line shows, or None.

    Used only to address an error to the one who waits; a wrong guess would hit another
    request, so nothing but a top-level-looking member near the start counts.
    """
    global _ID_PATTERN
    if _ID_PATTERN is None:
        _ID_PATTERN = re.compile(rb'^\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?(?:"method"\s*:\s*"[^"\\]*"\s*,\s*)?'
                                 rb'"id"\s*:\s*(-?\d+|"[^"\\]*")\s*[,}]')
    match = _ID_PATTERN.match(head)
    if match is None:
        return None
    try:
        return parse_json(match.group(1))
    except RpcError:
        return None


def encode_id(value):
    """Return a request id as JSON."""
    return b"%d" % value if type(value) is int else encode_json(value)


def part_of(data, start, stop=None):
    """Return data[start:stop]: a copy where it is small, else a view."""
    size = (len(data) if stop is None else stop) - start
    return data[start:stop] if size < READ_BYTES else memoryview(data)[start:stop]


class Pieces:
    """A message in pieces that are written one after another: what is long in it is not copied. `bytes` joins it."""

    __slots__ = ("pieces",)

    def __init__(self, *pieces):
        self.pieces = pieces

    def __len__(self):
        return sum(map(len, self.pieces))

    def __bytes__(self):
        return b"".join(self.pieces)


def pieces_of(data):
    """Return what is written for bytes or Pieces."""
    return data.pieces if isinstance(data, Pieces) else (data,)


class Located:
    """A line, and where in it the id stands for certain."""

    __slots__ = ("line", "start", "end")

    def __init__(self, line, start, end):
        self.line, self.start, self.end = line, start, end


_ANSWER_PLACES = None


def parse_answer(line, outlined=False):
    """Return (message, Located) of an answer with a result as servers usually write it, else None.

    The result is parsed where it stands, and nothing but the usual members may be around it:
    so a second "id", which would be the one that counts, cannot hide anywhere, and a large
    answer need not be searched for it. If `outlined`, long strings of the result are LongTexts,
    and None is also returned where they cannot be.
    """
    global _ANSWER_PLACES
    if _ANSWER_PLACES is None:
        _ANSWER_PLACES = (re.compile(rb'\{"jsonrpc": ?"2\.0", ?"id": ?(0|[1-9]\d{0,15}), ?"result": ?').match,
                          re.compile(rb'\{"result": ?').match,
                          re.compile(r', ?"jsonrpc": ?"2\.0", ?"id": ?(0|[1-9][0-9]{0,15})\}').fullmatch)
    before, first, after = _ANSWER_PLACES
    head = before(line)
    begin = head or first(line)
    # A line break inside (white space to JSON) would be two lines to whoever reads them.
    if begin is None or b"\r" in line or b"\n" in line:
        return None
    try:
        text, decoder = outline(line, begin.end()) if outlined else (line.decode("utf-8"), json_decoder())
        result, end = decoder.raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        return None                      # who reads it the long way says what is wrong
    if head is not None:
        if text[end:] != "}":
            return None
        start, stop = head.span(1)
    else:
        tail = after(text, end)
        if tail is None:
            return None
        # What comes after the result has as many bytes as characters.
        start, stop = (len(line) - len(text) + place for place in tail.span(1))
    wire_id = int(line[start:stop])
    return {"jsonrpc": "2.0", "id": wire_id, "result": result}, Located(line, start, stop)


_ID_PLACES = None
# How most writers begin a message, without a space.
_USUAL_HEAD = b'{"jsonrpc":"2.0","id":'


def with_id(line, message, new_id):
    """Return `line` with the message's id replaced, byte for byte the same elsewhere.

    `message` is the parsed line, which may be Located. Numbers keep their spelling and large results are not
    encoded again. Bytes are replaced only where the id member can be told beyond doubt: the
    text `"id"` occurs once, at the head of the object or at its very end (the last brace of
    valid JSON closes the whole), and no key is spelled with an escape that could be it too.
    """
    global _ID_PLACES
    if isinstance(line, Located):
        before, after = part_of(line.line, 0, line.start), part_of(line.line, line.end)
        pieces = (before, encode_id(new_id), after)
        return b"".join(pieces) if len(line.line) < READ_BYTES else Pieces(*pieces)
    # A line break inside (white space to JSON) would be two lines to whoever reads them.
    if b"\n" not in line and b"\r" not in line and line.count(b'"id"') == 1 and not (
            b"\\" in line and b"\\u006" in line):
        old_id = encode_id(message["id"])
        if line.startswith(_USUAL_HEAD):
            end = len(_USUAL_HEAD) + len(old_id)
            if line.startswith(old_id, len(_USUAL_HEAD)) and line[end:end + 1] in (b",", b"}"):
                return b"".join((_USUAL_HEAD, encode_id(new_id), line[end:]))
        if _ID_PLACES is None:
            value = rb'"id"\s*:\s*(-?\d+|"[^"\\]*")\s*'
            version = rb'"jsonrpc"\s*:\s*"2\.0"\s*'
            _ID_PLACES = (re.compile(rb'^\s*\{\s*(?:%s,\s*)?%s[,}]' % (version, value)).match,
                          re.compile(rb',\s*%s(?:,\s*%s)?\}\s*$' % (value, version)).search)
        in_head, at_end = _ID_PLACES
        match = in_head(line) or at_end(line, max(0, len(line) - 1024))
        if match and match.group(1) == old_id:
            return b"".join((line[:match.start(1)], encode_id(new_id), line[match.end(1):]))
    return encode_json(dict(message, id=new_id))


def answer_line(host_id, result_bytes):
    """Return an answer whose `result` is already encoded: lists are kept that way."""
    return b'{"jsonrpc":"2.0","id":%s,"result":%s}' % (encode_id(host_id), result_bytes)


def result_message(host_id, result):
    """Return the answer object that carries `result`."""
    return {"jsonrpc": "2.0", "id": host_id, "result": result}


def error_message(host_id, error):
    """Return the answer object for an RpcError; `host_id` None where no id could be read.

    JSON-RPC 2.0, section 5: the id is null when it could not be told.
    """
    return {"jsonrpc": "2.0", "id": host_id, "error": error.as_object()}


def notification(method, params=None):
    """Return a notification object."""
    message = {"jsonrpc": "2.0", "method": method}
    if params is not None:
        message["params"] = params
    return message


# ---------------------------------------------------------------------------
# Revisions: what does revision R have; how is X spelled there
#
# Pure: a table and copies. A stored value is never edited. Inside mcpx every object has
# the newest shape; an edge spells it for its peer, once, and not at all where both sides
# speak the same revision. The modern column is part of the table.
# ---------------------------------------------------------------------------

R24, R03, R18, R25, RM = range(5)
RANK = {revision: rank for rank, revision in enumerate(REVISIONS)}

# Members by object type: name -> (first revision, last revision, type of the value).
# A type in a list means "array of". Members that every revision has are listed only
# where their value has a type of its own. Read off schema/<revision>/schema.ts.
TYPES = {
    "InitializeResult": {
        "capabilities": (R24, RM, "ServerCapabilities"), "serverInfo": (R24, RM, "Implementation"),
        "resultType": (RM, RM, None)},
    "Implementation": {
        "title": (R18, RM, None), "icons": (R25, RM, None), "description": (R25, RM, None),
        "websiteUrl": (R25, RM, None)},
    "ServerCapabilities": {"completions": (R03, RM, None), "tasks": (R25, R25, None)},
    "ClientCapabilities": {
        "elicitation": (R18, RM, "ElicitationCapability"), "sampling": (R24, RM, "SamplingCapability"),
        "roots": (R24, RM, "RootsCapability"), "tasks": (R25, R25, None)},
    "ElicitationCapability": {"form": (R25, RM, None), "url": (R25, RM, None)},
    "SamplingCapability": {"tools": (R25, RM, None), "context": (R25, RM, None)},
    "RootsCapability": {"listChanged": (R24, R25, None)},
    "Result": {"resultType": (RM, RM, None)},
    "ToolList": {"tools": (R24, RM, ["Tool"]), "ttlMs": (RM, RM, None), "cacheScope": (RM, RM, None),
                 "resultType": (RM, RM, None)},
    "PromptList": {"prompts": (R24, RM, ["Prompt"]), "ttlMs": (RM, RM, None),
                   "cacheScope": (RM, RM, None), "resultType": (RM, RM, None)},
    "ResourceList": {"resources": (R24, RM, ["Resource"]), "ttlMs": (RM, RM, None),
                     "cacheScope": (RM, RM, None), "resultType": (RM, RM, None)},
    "TemplateList": {"resourceTemplates": (R24, RM, ["Resource"]), "ttlMs": (RM, RM, None),
                     "cacheScope": (RM, RM, None), "resultType": (RM, RM, None)},
    "Tool": {
        "title": (R18, RM, None), "outputSchema": (R18, RM, None), "icons": (R25, RM, None),
        "annotations": (R03, RM, None), "execution": (R25, R25, None), "_meta": (R18, RM, None)},
    "Prompt": {
        "title": (R18, RM, None), "icons": (R25, RM, None), "_meta": (R18, RM, None),
        "arguments": (R24, RM, ["PromptArgument"])},
    "PromptArgument": {"title": (R18, RM, None)},
    # Resource, ResourceTemplate and resource_link have the same members.
    "Resource": {
        "title": (R18, RM, None), "icons": (R25, RM, None), "_meta": (R18, RM, None),
        "annotations": (R24, RM, "Annotations")},
    "Annotations": {"lastModified": (R18, RM, None)},
    "CallToolResult": {
        "content": (R24, RM, ["Content"]), "structuredContent": (R18, RM, None),
        "resultType": (RM, RM, None)},
    "PromptResult": {"messages": (R24, RM, ["PromptMessage"]), "resultType": (RM, RM, None)},
    "PromptMessage": {"content": (R24, RM, "Content")},
    "ReadResult": {"contents": (R24, RM, ["ResourceContents"]), "ttlMs": (RM, RM, None),
                   "cacheScope": (RM, RM, None), "resultType": (RM, RM, None)},
    "ResourceContents": {"_meta": (R18, RM, None)},
    "Content": {
        "annotations": (R24, RM, "Annotations"), "_meta": (R18, RM, None),
        "resource": (R24, RM, "ResourceContents"), "icons": (R25, RM, None),
        "title": (R18, RM, None)},
    "ProgressParams": {"message": (R03, RM, None)},
    # Questions, upstream to host.
    "ElicitParams": {"mode": (R25, RM, None), "elicitationId": (R25, R25, None),
                     "task": (R25, R25, None)},
    "SampleParams": {
        "messages": (R24, RM, ["SamplingMessage"]), "tools": (R25, RM, ["Tool"]),
        "toolChoice": (R25, RM, None), "task": (R25, R25, None)},
    "SamplingMessage": {"content": (R24, RM, "SamplingContent"), "_meta": (R25, RM, None)},
    "SamplingContent": {"annotations": (R24, RM, "Annotations"), "_meta": (R18, RM, None)},
    # Requests and answers, host to upstream.
    "CallParams": {"task": (R25, R25, None)},
    "CompleteParams": {"context": (R18, RM, None), "ref": (R24, RM, "PromptReference")},
    "PromptReference": {"title": (R18, RM, None)},
    "RootsResult": {"roots": (R24, RM, ["Root"])},
    "Root": {"_meta": (R18, RM, None)},
    "SampleResult": {"content": (R24, RM, "SamplingContent")},
}

# Which type a result, a request's params or a notification's params has.
RESULT_TYPES = {
    "initialize": "InitializeResult", "tools/list": "ToolList", "prompts/list": "PromptList",
    "resources/list": "ResourceList", "resources/templates/list": "TemplateList",
    "tools/call": "CallToolResult", "prompts/get": "PromptResult", "resources/read": "ReadResult",
    "roots/list": "RootsResult", "sampling/createMessage": "SampleResult"}
PARAMS_TYPES = {
    "tools/call": "CallParams", "completion/complete": "CompleteParams",
    "elicitation/create": "ElicitParams", "sampling/createMessage": "SampleParams",
    "notifications/progress": "ProgressParams"}

# Methods by direction: name -> (first revision, last revision). What is not here, or not
# in a peer's revision, is neither sent to it nor taken from it.
HOST_METHODS = {
    "initialize": (R24, R25), "ping": (R24, R25), "server/discover": (RM, RM),
    "tools/list": (R24, RM), "tools/call": (R24, RM), "prompts/list": (R24, RM),
    "prompts/get": (R24, RM), "resources/list": (R24, RM), "resources/templates/list": (R24, RM),
    "resources/read": (R24, RM), "resources/subscribe": (R24, R25),
    "resources/unsubscribe": (R24, R25), "subscriptions/listen": (RM, RM),
    "completion/complete": (R24, RM), "logging/setLevel": (R24, R25), "tasks/get": (R25, RM),
    "tasks/cancel": (R25, RM), "tasks/result": (R25, R25), "tasks/list": (R25, R25),
    "tasks/update": (RM, RM)}
UPSTREAM_METHODS = {
    "ping": (R24, R25), "roots/list": (R24, R25), "sampling/createMessage": (R24, R25),
    "elicitation/create": (R18, R25), "tasks/get": (R25, R25), "tasks/result": (R25, R25),
    "tasks/cancel": (R25, R25)}
UPSTREAM_NOTIFICATIONS = {
    "notifications/cancelled": (R24, RM), "notifications/progress": (R24, RM),
    "notifications/message": (R24, RM), "notifications/tools/list_changed": (R24, RM),
    "notifications/prompts/list_changed": (R24, RM),
    "notifications/resources/list_changed": (R24, RM),
    "notifications/resources/updated": (R24, RM), "notifications/elicitation/complete": (R25, R25),
    "notifications/tasks/status": (R25, R25), "notifications/tasks": (RM, RM),
    "notifications/subscriptions/acknowledged": (RM, RM)}


def has_method(table, method, revision):
    """Does `revision` have this method in the direction of `table`?"""
    span = table.get(method)
    return span is not None and span[0] <= RANK[revision] <= span[1]


def spell(type_name, value, rank):
    """Return `value`, an object of type `type_name`, without what revision `rank` lacks.

    Nothing is edited: where something has to go, the objects on the way to it are copied.
    Members that no revision defines pass, as results are open objects in all of them.
    """
    if isinstance(value, list):
        # Sampling content is one block or, since 2025-11-25, an array of them.
        return _spell_list(type_name, value, rank)
    if not isinstance(value, dict):
        return value
    fields = TYPES[type_name]
    copy = None
    for name in value.keys() & fields.keys():
        first, last, inner = fields[name]
        if not first <= rank <= last:
            copy = dict(value) if copy is None else copy
            del copy[name]
        elif inner is not None:
            old = value[name]
            new = _spell_list(inner[0], old, rank) if isinstance(inner, list) else spell(inner, old, rank)
            if new is not old:
                copy = dict(value) if copy is None else copy
                copy[name] = new
    substitute = SUBSTITUTES.get(type_name)
    if substitute is None:
        return value if copy is None else copy
    return substitute(value, value if copy is None else copy, rank)


def _spell_list(type_name, values, rank):
    if not isinstance(values, list):
        return values
    spelled = [spell(type_name, value, rank) for value in values]
    return values if all(map(_is, spelled, values)) else spelled


def _is(one, other):
    return one is other


def _tool_for(original, copy, rank):
    """A tool's display name moves into its annotations where `title` is not known yet."""
    title = original.get("title")
    if rank == R03 and title and not (original.get("annotations") or {}).get("title"):
        copy = dict(copy, annotations=dict(copy.get("annotations") or {}, title=title))
    schema = copy.get("outputSchema")
    if rank < RM and schema is not None and (not isinstance(schema, dict) or schema.get("type") != "object"):
        # MCP 2026-07-28, server/tools: any root type; before, the root is an object.
        copy = {name: value for name, value in copy.items() if name != "outputSchema"}
    return copy


def _content_for(original, copy, rank):
    """A content block of a kind that the revision lacks becomes one that it has."""
    kind = original.get("type")
    if kind == "audio" and rank < R03:
        return {"type": "resource", "resource": {
            "uri": "mcpx:audio", "mimeType": original.get("mimeType", "application/octet-stream"),
            "blob": original.get("data", "")}}
    if kind == "resource_link" and rank < R18:
        parts = [original.get(name) for name in ("name", "uri", "mimeType", "description")]
        return {"type": "text", "text": " ".join(str(part) for part in parts if part)}
    return copy


def _call_result_for(original, copy, rank):
    """Structured content that a host cannot see is still there as text."""
    structured = original.get("structuredContent")
    if structured is None:
        return copy
    if RM > rank >= R18 and not isinstance(structured, dict):
        copy = {name: value for name, value in copy.items() if name != "structuredContent"}
    if "structuredContent" in copy:
        return copy
    content = copy.get("content") or []
    if any(isinstance(block, dict) and block.get("type") == "text" for block in content):
        return copy
    text = encode_json(structured).decode("utf-8")
    return dict(copy, content=list(content) + [{"type": "text", "text": text}])


def _elicit_params_for(original, copy, rank):
    """A form for a 2025-06-18 host: plain enums, and defaults for booleans only."""
    schema = copy.get("requestedSchema")
    if rank >= R25 or not isinstance(schema, dict):
        return copy
    schema = {name: value for name, value in schema.items() if name != "$schema"}
    properties = schema.get("properties")
    if isinstance(properties, dict):
        schema["properties"] = {name: _form_field_for_18(field) for name, field in properties.items()}
    return dict(copy, requestedSchema=schema)


def _form_field_for_18(field):
    if not isinstance(field, dict):
        return field
    field = dict(field)
    if field.get("type") != "boolean":
        field.pop("default", None)
    titled = field.pop("oneOf", None)
    if isinstance(titled, list):
        field["enum"] = [choice.get("const") for choice in titled if isinstance(choice, dict)]
        field["enumNames"] = [choice.get("title") for choice in titled if isinstance(choice, dict)]
    return field


def _sample_params_for(original, copy, rank):
    """Several blocks in one message become consecutive messages of the same role."""
    messages = copy.get("messages")
    if rank >= R25 or not isinstance(messages, list):
        return copy
    if not any(isinstance(m, dict) and isinstance(m.get("content"), list) for m in messages):
        return copy
    flat = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        blocks = content if isinstance(content, list) else [content]
        flat += [dict(message, content=block) for block in blocks]
    return dict(copy, messages=flat)


SUBSTITUTES = {
    "Tool": _tool_for, "Content": _content_for, "CallToolResult": _call_result_for,
    "ElicitParams": _elicit_params_for, "SampleParams": _sample_params_for}


def spell_result(method, result, revision):
    """Return the result of `method` as a peer of `revision` knows it."""
    return spell(RESULT_TYPES.get(method, "Result"), result, RANK[revision])


def spell_params(method, params, revision):
    """Return the params of a request or notification as a peer of `revision` knows them."""
    type_name = PARAMS_TYPES.get(method)
    return params if type_name is None else spell(type_name, params, RANK[revision])


def spell_error(method, error, revision):
    """Return the answer's members for an error, as a host of `revision` knows it.

    MCP 2025-11-25, client/elicitation: -32042 asks for URLs. Older hosts have no such code:
    a tool call fails with the addresses as text, other requests with an ordinary error.
    """
    if error.get("code") != -32042 or RANK[revision] >= R25:
        return {"error": error}
    data = error.get("data") if isinstance(error.get("data"), dict) else {}
    urls = [e.get("url") for e in data.get("elicitations") or () if isinstance(e, dict)]
    text = " ".join([str(error.get("message", ""))] + [str(url) for url in urls if url])
    if method == "tools/call":
        return {"result": {"content": [{"type": "text", "text": text}], "isError": True}}
    return {"error": {"code": INTERNAL_ERROR, "message": text}}


def spell_error_down(method, error):
    """Return a modern upstream's error object as legacy hosts know errors.

    MCP 2026-07-28, basic/index: -32020 to -32022 are new; a missing resource was -32002.
    """
    code, data = error.get("code"), error.get("data")
    if code == INVALID_PARAMS and method == "resources/read" and isinstance(data, dict) and "uri" in data:
        return dict(error, code=RESOURCE_NOT_FOUND)
    if code in (HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_VERSION):
        return {"code": INTERNAL_ERROR, "message": "%s %s" % (error.get("message", ""), json.dumps(data))}
    return error


def asks_for_input(message):
    """Is this answer of a modern upstream a question (MCP 2026-07-28, basic/patterns/mrtr)?"""
    result = message.get("result")
    return isinstance(result, dict) and result.get("resultType") == "input_required"


def refusal_of_question(method, params, revision):
    """Return the RpcError for a question that `revision` cannot show at all, or None."""
    rank = RANK[revision]
    if rank >= RM:
        return None                      # questions travel inside results there, in the newest shapes
    if not has_method(UPSTREAM_METHODS, method, revision):
        return RpcError(METHOD_NOT_FOUND, "the host's revision %s has no %s" % (revision, method))
    if method == "elicitation/create" and rank < R25:
        if params.get("mode") == "url":
            return RpcError(INVALID_PARAMS, "the host's revision %s has no URL elicitation" % revision)
        schema = params.get("requestedSchema")
        fields = schema.get("properties") if isinstance(schema, dict) else None
        for field in (fields or {}).values() if isinstance(fields, dict) else ():
            if isinstance(field, dict) and field.get("type") == "array":
                return RpcError(INVALID_PARAMS, "the host's revision %s has no multiple choice" % revision)
    if method == "sampling/createMessage":
        kinds = _sampling_kinds(params)
        if rank < R03 and "audio" in kinds:
            return RpcError(INVALID_PARAMS, "the host's revision %s has no audio" % revision)
        if rank < R25 and (params.get("tools") or kinds & {"tool_use", "tool_result"}):
            return RpcError(INVALID_PARAMS, "the host's revision %s has no tools in sampling" % revision)
    return None


def _sampling_kinds(params):
    kinds = set()
    messages = params.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else [content]:
            if isinstance(block, dict) and isinstance(block.get("type"), str):
                kinds.add(block["type"])
    return kinds


def covers(capabilities, method, params):
    """Can a host with these capabilities be asked this question?

    MCP 2025-11-25, client/elicitation and client/sampling: an empty `elicitation` means
    forms only; tools and context need their own sub-capabilities.
    """
    if method == "roots/list":
        return "roots" in capabilities
    if method == "sampling/createMessage":
        sampling = capabilities.get("sampling")
        return isinstance(sampling, dict) and (not params.get("tools") or "tools" in sampling)
    if method == "elicitation/create":
        elicitation = capabilities.get("elicitation")
        if not isinstance(elicitation, dict):
            return False
        if params.get("mode") == "url":
            return "url" in elicitation
        return "form" in elicitation or "url" not in elicitation
    return False


def strip_hop_meta(params):
    """Return params without the `_meta` members that belong to the hop they came over."""
    meta = params.get("_meta") if isinstance(params, dict) else None
    if not isinstance(meta, dict) or HOP_META.isdisjoint(meta):
        return params
    kept = {name: value for name, value in meta.items() if name not in HOP_META}
    return dict(params, _meta=kept)


def negotiate(requested):
    """Return the revision to answer an `initialize` with.

    MCP 2025-11-25, basic/lifecycle: the requested one if served, else our newest that is
    negotiated by handshake; 2026-07-28 never is.
    """
    return requested if requested in LEGACY_REVISIONS else LATEST_LEGACY


def lift_capabilities(capabilities):
    """Return a host's capabilities as a modern request states them.

    MCP 2026-07-28, basic/index: `roots` has no members; an `elicitation` without members
    meant forms before URLs came.
    """
    lifted = {name: value for name, value in capabilities.items() if isinstance(value, dict) and name != "tasks"}
    if "roots" in lifted:
        lifted["roots"] = {}
    if lifted.get("elicitation") == {}:
        lifted["elicitation"] = {"form": {}}
    return lifted


def strip_modern_result(result):
    """Return a modern upstream's result as older revisions know results: no envelope of its own."""
    meta = result.get("_meta")
    if isinstance(meta, dict) and not HOP_META.isdisjoint(meta):
        result = dict(result)
        result["_meta"] = {name: value for name, value in meta.items() if name not in HOP_META}
        if not result["_meta"]:
            del result["_meta"]
    return result


def declared_capabilities(capabilities, revision, confined):
    """Return what a legacy server is told that its client can do.

    Never more than the starting host declared. `roots` only where the instance is
    `confined` to one host or directory: servers replace what they allow by the roots of
    whoever came first. Not `tasks.list`: a host's list may show tasks of other servers.
    """
    if not capabilities:
        return {}
    declared = {name: value for name, value in spell("ClientCapabilities", capabilities, RANK[revision]).items()
                if isinstance(value, dict) and (confined or name != "roots")}
    if "tasks" in declared:
        declared["tasks"] = {name: value for name, value in declared["tasks"].items() if name != "list"}
    return declared


# ---------------------------------------------------------------------------
# Identity and scopes: who asks; which instance is theirs
#
# Reads `.git` files and directories and nothing else: no processes, no settings. Nothing
# is ever filled in from this process's own pid, cwd or environment.
# ---------------------------------------------------------------------------

SCOPES = ("global", "repo", "worktree", "cwd", "session", "parent-session", "pid", "call")
# Instances of these scopes belong to one host, so they get that host's environment.
PRIVATE_SCOPES = frozenset(("session", "parent-session", "pid", "call"))
# Scopes that confine an instance to one host or one directory.
CONFINED_SCOPES = PRIVATE_SCOPES | {"cwd", "worktree"}


class Place:
    """A directory and what git says of it; None where there is nothing, or it cannot be told.

    `cwd` canonical path; `worktree` top of the work tree; `repo` the common git directory,
    the same for all work trees of a clone; `reason` why something is None.
    """

    __slots__ = ("cwd", "worktree", "repo", "reason")

    def __init__(self, cwd=None, worktree=None, repo=None, reason="no working directory is known"):
        self.cwd, self.worktree, self.repo, self.reason = cwd, worktree, repo, reason

    def as_dict(self):
        """The members by name, as a shim sends them."""
        return {name: getattr(self, name) for name in self.__slots__}


def find_place(path, not_work=()):
    """Return the Place of a directory.

    `not_work` are directories where programs are started rather than where work is (home,
    the temporary directory); they and `/` count as unknown. A git process is never started.
    """
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        return Place(reason="not an absolute path")
    try:
        cwd = os.path.realpath(path)
        if not os.path.isdir(cwd):
            return Place(reason="%s is not a directory" % printable(path))
    except OSError as error:
        return Place(reason="%s cannot be told: %s" % (printable(path), error.strerror))
    if cwd in {"/", "/tmp", "/var/tmp", "/private/tmp"} | {os.path.realpath(p) for p in not_work if p}:
        return Place(reason="%s is where programs are started, not where work is" % printable(cwd))
    try:
        worktree, repo = _find_git(cwd)
    except OSError as error:
        return Place(cwd, reason="the repository cannot be told: %s" % error.strerror)
    reason = None if worktree else ("a bare repository" if repo else "not a repository")
    return Place(cwd, worktree, repo, reason)


def _find_git(cwd):
    """Return (top of the work tree, common git directory), each None where there is none."""
    directory = cwd
    while True:
        if _is_git_directory(directory):
            return None, _common_directory(directory)
        dot_git = os.path.join(directory, ".git")
        if _exists(dot_git):
            git_directory = dot_git if os.path.isdir(dot_git) else _linked_git_directory(directory, dot_git)
            if git_directory and _is_git_directory(git_directory):
                return directory, _common_directory(os.path.realpath(git_directory))
        parent = os.path.dirname(directory)
        if parent == directory:
            return None, None
        directory = parent


def _exists(path):
    try:
        os.stat(path)
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_git_directory(path):
    """A git directory has HEAD and either objects and refs or, linked, a commondir file."""
    if not _exists(os.path.join(path, "HEAD")):
        return False
    return _exists(os.path.join(path, "commondir")) or (
        _exists(os.path.join(path, "objects")) and _exists(os.path.join(path, "refs")))


def _common_directory(git_directory):
    common = _first_line(os.path.join(git_directory, "commondir"))
    return os.path.realpath(os.path.join(git_directory, common)) if common else os.path.realpath(git_directory)


def _linked_git_directory(directory, dot_git):
    """Return where a `.git` file points, if what it points at points back, else None.

    A linked work tree's git directory names the `.git` file; a submodule's names the work
    tree in its config. Without that check anybody's `.git` file could claim a repository.
    """
    line = _first_line(dot_git)
    if not line.startswith("gitdir:"):
        return None
    git_directory = os.path.realpath(os.path.join(directory, line[len("gitdir:"):].strip()))
    back = _first_line(os.path.join(git_directory, "gitdir"))
    if back:
        back = os.path.realpath(os.path.join(git_directory, back))
        return git_directory if back == os.path.realpath(dot_git) else None
    worktree = _core_worktree(os.path.join(git_directory, "config"))
    if worktree and os.path.realpath(os.path.join(git_directory, worktree)) == os.path.realpath(directory):
        return git_directory
    return None


def _first_line(path):
    try:
        if os.stat(path).st_mode & 0o170000 != 0o100000:
            return ""                    # a pipe, say, which would never say anything
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.readline(8192).strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""


def _core_worktree(config_path):
    try:
        with open(config_path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read(65536).splitlines()
    except FileNotFoundError:
        return None
    section = ""
    for line in lines:
        line = line.strip()
        if line.startswith("["):
            section = line.strip("[]").strip().lower()
        elif section == "core" and "=" in line:
            name, value = line.split("=", 1)
            if name.strip().lower() == "worktree":
                return value.strip().strip('"')
    return None


def printable(text):
    """Return text with everything that could steer a terminal shown as an escape."""
    return "".join(c if c.isprintable() else "\\x%02x" % ord(c) if ord(c) < 256 else "\\u%04x" % ord(c)
                   for c in str(text))


def check_session_name(name, where):
    """Return `name` if a caller may call itself that. Raises RpcError that says what is wrong."""
    if len(name) > MAX_NAME_CHARS:
        raise RpcError(INVALID_PARAMS, "%s: a session name has at most %d characters" % (where, MAX_NAME_CHARS))
    if not name.isprintable():
        raise RpcError(INVALID_PARAMS, "%s: a session name has printable characters only" % where)
    if name.startswith(CONNECTION_PREFIX):
        raise RpcError(INVALID_PARAMS, "%s: names that start with %s belong to connections; choose another"
                       % (where, CONNECTION_PREFIX))
    return name


class Identity:
    """Who a request is from. One per request; `call` is fresh for each.

    source  "process", "command" or "named"
    session the session's id, or None; `named` says a caller chose it, so that it may be
            met from elsewhere, where an id made from a connection ends with that
    parent  the parent session's id, or None
    place   the Place; pid and started from the peer's credentials, or None
    """

    __slots__ = ("source", "session", "named", "parent", "place", "pid", "started", "call")

    def __init__(self, source, session=None, named=False, parent=None, place=None, pid=None,
                 started=None, call=None):
        self.source, self.session, self.named, self.parent = source, session, named, parent
        self.place, self.pid, self.started, self.call = place or Place(), pid, started, call

    def with_meta(self, meta, session_keys, call, place=None):
        """Return the identity of one request on this connection, given its `_meta`.

        `session_keys` in order: the first whose value is a non-empty string names the
        session; anything else counts as absent. `place` is the Place of the directory that
        `dev.mcpx/cwd` names, if it does. Raises RpcError for a name that nobody may use.
        """
        session, named, source, parent = self.session, self.named, self.source, self.parent
        for key in session_keys:
            value = meta.get(key)
            if isinstance(value, str) and value:
                session, named, source = check_session_name(value, key), True, "named"
                # The connection's parent is that of the connection's own session.
                parent = None
                break
        value = meta.get(META_PARENT)
        if isinstance(value, str) and value:
            parent = check_session_name(value, META_PARENT)
        return Identity(source, session, named, parent, place or self.place, self.pid, self.started, call)

    def as_dict(self):
        """What `mcpx why` and `status` show."""
        return {"source": self.source, "session": self.session, "named": self.named,
                "parent": self.parent, "cwd": self.place.cwd, "worktree": self.place.worktree,
                "repo": self.place.repo, "pid": self.pid, "started": self.started}


class Key:
    """A scope key, and `degraded`: why it is narrower than the scope asked for, or None."""

    __slots__ = ("text", "degraded")

    def __init__(self, text, degraded=None):
        self.text, self.degraded = text, degraded


def scope_key(scope, identity):
    """Return the Key of the instance that serves `identity` under `scope`.

    Degrades only towards `call`: a process too many costs memory, sharing by accident
    corrupts somebody's work.
    """
    return _SCOPE_RULES[scope](identity)


def _call_key(identity, reason=None):
    return Key("call:%s" % identity.call, reason)


def _cwd_key(identity, reason=None):
    if identity.place.cwd is None:
        return _call_key(identity, identity.place.reason)
    return Key("cwd:" + identity.place.cwd, reason)


def _git_key(kind):
    def rule(identity):
        path = getattr(identity.place, kind)
        return Key("%s:%s" % (kind, path)) if path else _cwd_key(identity, identity.place.reason)
    return rule


def _session_key(identity):
    if identity.session is None:
        return _call_key(identity, "the caller has no session")
    return Key("session:" + identity.session)


def _parent_key(identity):
    return Key("session:" + identity.parent) if identity.parent else _session_key(identity)


def _pid_key(identity):
    if identity.pid is None or identity.started is None:
        return _call_key(identity, "the caller's process is not known")
    # Process ids are used again; the start time makes them unique.
    return Key("pid:%d@%s" % (identity.pid, identity.started))


_SCOPE_RULES = {
    "global": lambda identity: Key("global"), "repo": _git_key("repo"),
    "worktree": _git_key("worktree"), "cwd": _cwd_key, "session": _session_key,
    "parent-session": _parent_key, "pid": _pid_key, "call": _call_key}


# ---------------------------------------------------------------------------
# Settings and config: what is in force, and where was it said
#
# One row per setting feeds checking, `mcpx settings`, the README's table and the reports
# of the daemon; the rest of the code reads settings in force and never repeats a default.
# May read files and the environment that it is given; opens no sockets.
# ---------------------------------------------------------------------------

class Setting:
    """One row: name, kind of value, default, whether a change applies at once, meaning.

    `per_server` settings may stand in a server's own `mcpx` object, or in the top one as
    the default for all servers.
    """

    __slots__ = ("name", "kind", "default", "hot", "per_server", "meaning")

    def __init__(self, name, kind, default, meaning, per_server=False, hot=True):
        self.name, self.kind, self.default, self.meaning = name, kind, default, meaning
        self.per_server, self.hot = per_server, hot


SETTINGS = {row.name: row for row in (
    Setting("scope", SCOPES, "session", "what callers of one instance have in common", True),
    Setting("sharing", ("shared", "exclusive"), "shared",
            "exclusive: one call at a time on an instance, the others queue", True),
    Setting("idleTimeout", "duration", "15m",
            "an instance without call, subscription or open task ends after this", True),
    Setting("min", "count", 0, "instances of the server that idleTimeout leaves running", True),
    Setting("max", "count", 16, "instances of the server at a time", True),
    Setting("warm", "count", 0, "started processes kept ready for the next key", True),
    Setting("coldWait", "duration", "20s",
            "how long initialize and lists wait for a server never seen before", True),
    Setting("startTimeout", "duration", "120s", "a server must have answered initialize by then", True),
    Setting("queueTimeout", "duration", "60s",
            "how long a call waits for an instance, or its turn on an exclusive one", True),
    Setting("callTimeout", "duration", "24h",
            "a call without answer or progress for this long is cancelled", True),
    Setting("cancelGrace", "duration", "10s",
            "how long a cancelled call still counts on an exclusive instance", True),
    Setting("pingAfter", "duration", "60s",
            "silence with calls in flight after which a server is pinged", True),
    Setting("pingTimeout", "duration", "0",
            "an unanswered ping ends the instance after this; 0 only shows it in status", True),
    Setting("protocol", ("auto", "follow", "modern", "legacy"), "auto",
            "which era of MCP an instance is spoken to in", True),
    Setting("inheritEnv", "names", [], "variables of the caller that shared instances get too", True),
    Setting("envFile", "text", "", "file of NAME=VALUE lines for the environment", True),
    Setting("keepProcesses", "names", [],
            "patterns of command lines that are left alone when an instance ends", True),
    Setting("question.timeout", "duration", "10m",
            "an unanswered question of a server is cancelled after this", True),
    Setting("transport.sessionMetaKeys", "names", ["dev.mcpx/session", "ai.opencode/sessionID"],
            "names in _meta that name the session, in order"),
    Setting("maxInstances", "count", 64, "instances of all servers together"),
    Setting("keep", "duration", "15m",
            "an instance whose session was named is not evicted for this long after its last use"),
    Setting("idleExit", "duration", "10m",
            "a daemon that was started by a shim ends after this without host and instance"),
    Setting("crashKeep", "duration", "10s",
            "children of a daemon that was killed wait so long for the next one; 0 ends them with it", hot=False),
    Setting("upgrade", ("auto", "manual"), "auto", "whether a newer `serve` has the daemon go on with its code"),
    Setting("upgradeTimeout", "duration", "20s", "new code must have proved itself by then"),
    Setting("drainTimeout", "duration", "5s", "how long an ending daemon waits for calls in flight"),
    Setting("stop.eofGrace", "duration", "3s", "after closing a child's stdin, before SIGTERM"),
    Setting("stop.termGrace", "duration", "3s", "after SIGTERM, before SIGKILL"),
    Setting("backoff.first", "duration", "0.5s", "pause after a first failed start, doubled each time"),
    Setting("backoff.max", "duration", "60s", "longest pause between starts"),
    Setting("list.pageSize", "count", 1000, "entries of a list in one answer; 0 for all"),
    Setting("limits.lineBytes", "size", "128MiB", "longest message, either direction"),
    Setting("limits.hostQueueBytes", "size", "512MiB",
            "a host that does not read is cut off at this much unread"),
    Setting("limits.childQueueBytes", "size", "256MiB",
            "a server that does not read gets no more calls at this much unread"),
    Setting("limits.inFlight", "count", 2000, "requests of one host at a time"),
    Setting("limits.waiting", "count", 2000, "calls that wait for one instance"),
    Setting("limits.hosts", "count", 1024, "hosts over stdio, and as many HTTP sessions"),
    Setting("http.listen", "text", "", "address and port of the TCP door, such as 127.0.0.1:7337; closed when empty"),
    Setting("http.auth", ("token", "none"), "token", "whether the TCP door wants the bearer token"),
    Setting("http.allowedHosts", "names", [], "names besides localhost that Host and Origin may have"),
    Setting("http.headBytes", "size", "64KiB", "longest head of an HTTP request"),
    Setting("http.readTimeout", "duration", "30s", "an HTTP request must have arrived by then"),
    Setting("http.idleTimeout", "duration", "5m", "an HTTP connection without a request is closed after this"),
    Setting("http.sessionTimeout", "duration", "1h", "an HTTP session ends after this without use"),
    Setting("http.connections", "count", 1024, "HTTP connections at a time"),
    Setting("shim.drainTimeout", "duration", "10s",
            "a script that closed stdin before it read an answer: a shim waits this long for them"),
    Setting("shim.closeTimeout", "duration", "1.5s",
            "a host that closes stdin in mid-call: a shim waits this long; hosts wait 2 s for it"),
    Setting("shim.keepBytes", "size", "64MiB",
            "unanswered requests a shim can repeat after the daemon died"),
    Setting("log.level", ("debug", "info", "warning", "error"), "info", "what the daemon's log tells"),
    Setting("log.maxBytes", "size", "5MiB", "a log file is rotated at this size", hot=False),
    Setting("log.files", "count", 3, "files of a log that are kept, with the one in use", hot=False),
)}

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZES = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
          "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "kb": 1000, "mb": 10 ** 6, "gb": 10 ** 9}


def parse_setting(row, value):
    """Return a setting's value in its unit (seconds, bytes). Raises ValueError that says what it takes."""
    kind = row.kind
    if isinstance(kind, tuple):
        if value in kind:
            return value
        raise ValueError("takes one of %s" % ", ".join(kind))
    if kind == "names":
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return list(value)
        raise ValueError("takes a list of strings")
    if kind == "text":
        if isinstance(value, str):
            return value
        raise ValueError("takes a string")
    if kind == "count":
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        raise ValueError("takes a whole number, 0 or more")
    units, example = (_UNITS, '"500ms", "2s", "15m", "1h"') if kind == "duration" else (_SIZES, '"64MiB"')
    amount = _parse_amount(value, units, "s" if kind == "duration" else "")
    if amount is None:
        raise ValueError("takes a %s such as %s" % (kind, example))
    return amount if kind == "duration" else int(amount)


def _parse_amount(value, units, default_unit):
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if 0 <= value < 1e15 else None
    if not isinstance(value, str):
        return None
    match = re.match(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$", value)
    if not match or (match.group(2).lower() or default_unit) not in units:
        return None
    return float(match.group(1)) * units[match.group(2).lower() or default_unit]


class ServerConfig:
    """One entry of `mcpServers`, as written: nothing in it is expanded yet.

    `broken` is the text of a mistake in this entry alone, or None; `own` the per-server
    settings that it states.
    """

    __slots__ = ("name", "command", "args", "env", "cwd", "url", "headers", "env_file", "disabled",
                 "own", "broken", "directory")

    def __init__(self, name, directory):
        self.name, self.directory = name, directory
        self.command, self.args, self.env, self.cwd = "", [], {}, None
        self.url, self.headers, self.env_file, self.disabled = None, {}, "", False
        self.own, self.broken = {}, None

    def comparable(self):
        """Everything that, when it differs after a reload, makes it another server."""
        return (self.command, self.args, self.env, self.cwd, self.url, self.headers, self.env_file,
                self.disabled, self.own)


class Config:
    """A parsed configuration file: servers by name, and the settings it states."""

    def __init__(self, path, servers=None, own=None):
        self.path, self.servers, self.own = path, servers or {}, own or {}
        self.notes = []      # what `config --check` mentions without calling it wrong
        self._defaults = {}

    def get(self, name, server=None):
        """Return the value in force of a setting, in its unit."""
        if server is not None and name in server.own:
            return server.own[name]
        if name in self.own:
            return self.own[name]
        if name not in self._defaults:
            # Asked for with every call, and parsing costs more than all the rest of this.
            self._defaults[name] = parse_setting(SETTINGS[name], SETTINGS[name].default)
        return self._defaults[name]

    def source(self, name):
        """Return where the value in force was said."""
        return self.path if name in self.own else "default"


def config_path(option, env):
    """Return the absolute path of the configuration file; it need not exist."""
    path = option or env.get("MCPX_CONFIG")
    if not path:
        path = os.path.join(xdg_directory("XDG_CONFIG_HOME", ".config", env), "mcpx", "config.json")
    # The last part may be a link that is swapped (stow, home-manager): it stays the same file.
    directory, name = os.path.split(os.path.abspath(os.path.expanduser(path)))
    return os.path.join(os.path.realpath(directory), name)


def xdg_directory(variable, fallback, env):
    """Return an XDG base directory. Relative values are ignored, as its specification says."""
    value = env.get(variable) or ""
    if os.path.isabs(value):
        return value
    home = env.get("HOME") or ""
    return os.path.join(home if os.path.isabs(home) else os.path.expanduser("~"), fallback)


def state_directory(env):
    """Return the directory of state: the same from a terminal, ssh, cron and a service."""
    return os.path.join(xdg_directory("XDG_STATE_HOME", os.path.join(".local", "state"), env), "mcpx")


def short_hash(text):
    """Return 16 hex digits that tell paths apart (FNV-1a, 64 bits).

    Not for secrets. `hashlib` would load OpenSSL into every shim for a file name.
    """
    value = 0xcbf29ce484222325
    for byte in text.encode("utf-8", "surrogateescape"):
        value = (value ^ byte) * 0x100000001b3 & 0xffffffffffffffff
    return "%016x" % value


def socket_path(config, env):
    """Return where the daemon of a configuration listens when this environment starts it."""
    runtime = env.get("XDG_RUNTIME_DIR") or ""
    name = short_hash(config)[:12] + ".sock"
    if os.path.isabs(runtime) and _is_private(runtime):
        path = os.path.join(runtime, "mcpx", name)
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return path
    temporary = env.get("TMPDIR") or "/tmp"
    path = os.path.join(temporary, "mcpx-%d" % os.getuid(), name)
    if not os.path.isabs(path) or len(os.fsencode(path)) > MAX_SOCKET_PATH:
        path = os.path.join("/tmp", "mcpx-%d" % os.getuid(), name)
    return path


def _is_private(directory):
    """Is this a directory of ours that nobody else may write to?"""
    try:
        info = os.stat(directory)
    except OSError:
        return False
    return info.st_uid == os.getuid() and not info.st_mode & 0o022


_COMMENT = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'
_TRAILING_COMMA = r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])'


def parse_config_text(text, path):
    """Return the value of JSON with comments and trailing commas.

    What is dropped is replaced by blanks, so that an error names the right line. Raises
    ConfigError.
    """
    def blank(match):
        token = match.group(0)
        return token if token[0] == '"' else re.sub(r"[^\n]", " ", token)

    def pairs(items):
        names = [name for name, _ in items]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("%s, line %d, key %s" % (path, line_of(text, [name]), name),
                                  "stands twice in one object; remove one")
        return dict(items)

    def parse(plain):
        return json.loads(plain, object_pairs_hook=pairs)

    text = text.lstrip("\ufeff")
    try:
        try:
            return parse(text)
        except json.JSONDecodeError:
            # Mostly it is plain JSON, and a command need not compile the patterns.
            plain = re.sub(_COMMENT, blank, text, flags=re.S)
            return parse(re.sub(_TRAILING_COMMA, blank, plain))
    except json.JSONDecodeError as error:
        raise ConfigError("%s, line %d, column %d" % (path, error.lineno, error.colno),
                          "not valid JSON: %s" % error.msg)
    except RecursionError:
        raise ConfigError(path, "not valid JSON: nested too deeply")
    except ValueError as error:
        raise ConfigError(path, "not valid JSON: %s" % error)


def line_of(text, keys):
    """Return the line on which a chain of keys stands, as well as it can be told."""
    position = 0
    for key in keys:
        found = text.find(json.dumps(key, ensure_ascii=False), position)
        if found < 0:
            break
        position = found + 1
    return text.count("\n", 0, position) + 1


# Nobody writes that much by hand, and a device or a pipe would have no end.
PERSON_FILE_BYTES = 4 << 20


def read_person_file(path):
    """Return the text of a file that a person wrote, without waiting for anybody.

    Raises OSError or ValueError, also where it is no file or longer than PERSON_FILE_BYTES.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("not a regular file")
        data = b""
        while len(data) <= PERSON_FILE_BYTES:
            more = os.read(fd, PERSON_FILE_BYTES + 1 - len(data))
            if not more:
                return data.decode("utf-8").lstrip("\ufeff")
            data += more
    finally:
        os.close(fd)
    raise OSError("longer than %d bytes" % PERSON_FILE_BYTES)


def load_config(path):
    """Read a configuration file.

    A mistake in one server's entry breaks that entry alone (`ServerConfig.broken`); every
    other one raises ConfigError with file, line and key. A missing file is an error that
    says what to write.
    """
    try:
        text = read_person_file(path)
    except FileNotFoundError:
        raise ConfigError(path, 'there is no configuration; write one such as {"mcpServers": {"time": '
                          '{"command": "uvx", "args": ["mcp-server-time"]}}}')
    except (OSError, ValueError) as error:
        raise ConfigError(path, "cannot be read: %s" % error)
    return build_config(parse_config_text(text, path), path, text)


def build_config(value, path, text=""):
    """Check a parsed configuration and return the Config. Raises ConfigError."""
    def where(*keys):
        return "%s, line %d, key %s" % (path, line_of(text, keys), ".".join(keys))

    if not isinstance(value, dict):
        raise ConfigError(path, "the whole file must be one object")
    servers_key, entries = _server_entries(value)
    config = Config(path)
    if not isinstance(entries, dict):
        raise ConfigError(where(servers_key), "takes an object of servers by name")
    top = value.get("mcpx", {})
    if not isinstance(top, dict):
        raise ConfigError(where("mcpx"), "takes an object of settings")
    for name, setting in _flatten(top):
        config.own[name] = _checked_setting(name, setting, where("mcpx", name), any_level=True)
    for name, entry in entries.items():
        server = ServerConfig(name, os.path.dirname(path))
        config.servers[name] = server
        try:
            _fill_server(server, entry, lambda *keys: where(servers_key, name, *keys), config.notes)
        except ConfigError as error:
            server.broken = str(error)
    return config


def _server_entries(value):
    """Return the object of servers and its key, in the dialects that hosts use."""
    for key in ("mcpServers", "servers", "mcp"):
        if key in value:
            entries = value[key]
            if key == "mcp" and isinstance(entries, dict) and isinstance(entries.get("servers"), dict):
                entries = entries["servers"]
            return key, entries
    return "mcpServers", {}


def _flatten(settings, prefix=""):
    """Settings may be written "a.b": 1 or "a": {"b": 1}."""
    for name, value in settings.items():
        if isinstance(value, dict) and prefix + name not in SETTINGS:
            yield from _flatten(value, prefix + name + ".")
        else:
            yield prefix + name, value


def _checked_setting(name, value, where, any_level):
    row = SETTINGS.get(name)
    if row is None:
        import difflib
        close = difflib.get_close_matches(name, SETTINGS, 1)
        raise ConfigError(where, "there is no setting %s%s; `mcpx settings` lists them"
                          % (name, "; did you mean %s?" % close[0] if close else ""))
    if not any_level and not row.per_server:
        raise ConfigError(where, "is a setting of the whole daemon; put it in the top \"mcpx\" object")
    try:
        return parse_setting(row, value)
    except ValueError as error:
        raise ConfigError(where, "%s, not %s" % (error, json.dumps(value)[:80]))


_SERVER_KEYS = {"command", "args", "env", "environment", "cwd", "url", "headers", "envFile", "disabled",
                "enabled", "mcpx", "type"}


def _fill_server(server, entry, where, notes):
    if not isinstance(entry, dict):
        raise ConfigError(where(), "takes an object with command and args")
    if not server.name or not server.name.isprintable() or set(server.name) & set("/,"):
        raise ConfigError(where(), "a server's name is printable and has no / or ,")
    command = entry.get("command", "")
    if isinstance(command, list):
        command, extra = (command[0] if command else ""), command[1:]
    else:
        extra = []
    server.command, server.args = command, list(extra) + _typed(entry, "args", list, [], where)
    server.env = _typed(entry, "env" if "env" in entry else "environment", dict, {}, where)
    server.cwd, server.url = _typed(entry, "cwd", str, None, where), _typed(entry, "url", str, None, where)
    server.headers = _typed(entry, "headers", dict, {}, where)
    server.env_file = _typed(entry, "envFile", str, "", where)
    server.disabled = bool(entry.get("disabled", False)) or entry.get("enabled") is False
    settings = _typed(entry, "mcpx", dict, {}, where)
    for name, value in _flatten(settings):
        server.own[name] = _checked_setting(name, value, where("mcpx", name), any_level=False)
    for name in sorted(entry.keys() - _SERVER_KEYS):
        notes.append("%s: is not used by mcpx" % where(name))
    for name, value in list(server.env.items()) + list(server.headers.items()):
        if not isinstance(value, (str, int, float)):
            raise ConfigError(where(name), "takes a string")
    server.env = {name: str(value) for name, value in server.env.items()}
    if not isinstance(command, str) or not all(isinstance(arg, str) for arg in server.args):
        raise ConfigError(where("args"), "command and arguments are strings")
    if not command and not server.url:
        raise ConfigError(where(), "has neither command nor url")
    if server.url:
        raise ConfigError(where("url"), "servers behind a URL are not supported by this version; use a command")


def _typed(entry, key, kind, default, where):
    value = entry.get(key, default)
    if value is not default and not isinstance(value, kind):
        names = {list: "a list", dict: "an object", str: "a string"}
        raise ConfigError(where(key), "takes %s" % names[kind])
    return value


_VARIABLE = r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\{env:([A-Za-z_][A-Za-z0-9_]*)\}"


def expand_variables(text, env):
    """Return `text` with ${VAR}, ${VAR:-default}, ${env:VAR} and {env:VAR} filled in.

    Any other `$` stays. Raises StartFailed that names a variable which is not set.
    """
    def value(match):
        name = match.group(1) or match.group(3)
        if env.get(name):
            return env[name]
        if match.group(2) is not None:
            return match.group(2)
        if name in env:
            return ""
        raise StartFailed("environment variable %s is not set where the call came from; "
                          "set it, or write ${%s:-default}" % (name, name))
    return re.sub(_VARIABLE, value, text) if "{" in text else text


def read_env_file(path):
    """Return the variables of a file of NAME=VALUE lines; quotes around a value are dropped."""
    try:
        lines = read_person_file(path).splitlines()
    except (OSError, ValueError) as error:
        raise StartFailed("envFile %s cannot be read: %s" % (path, error))
    result = {}
    for line in lines:
        line = line.strip()
        if line.startswith("export "):
            line = line[7:]
        name, equals, value = line.partition("=")
        if equals and name.strip() and not line.startswith("#"):
            value = value.strip()
            if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
                value = value[1:-1]
            result[name.strip()] = value
    return result


_BASE_NAMES = frozenset((
    "HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR PATH DISPLAY WAYLAND_DISPLAY XAUTHORITY "
    "DBUS_SESSION_BUS_ADDRESS SSH_AUTH_SOCK HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY http_proxy "
    "https_proxy no_proxy all_proxy SSL_CERT_FILE SSL_CERT_DIR NODE_EXTRA_CA_CERTS "
    "REQUESTS_CA_BUNDLE CURL_CA_BUNDLE").split())


def base_environment(env):
    """Return the part of an environment that children shared by several hosts may see."""
    return {name: value for name, value in env.items()
            if name in _BASE_NAMES or name.startswith(("LC_", "XDG_"))}


def safe_file_name(text):
    """Return `text` in a form that is safe as one file name, and different for different texts."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:80]
    if safe != text or safe.startswith((".", "-")) or not safe:
        safe = "%s-%s" % (safe.lstrip(".-")[:60], short_hash(text)[:8])
    return safe


class Definition:
    """A server's entry expanded for one caller and key: what is started, and its digest.

    digest  HMAC over everything that makes callers differ, so that two callers with other
            tokens, arguments or directories never meet; {tmpdir}, {port} and {id} stay out
    shape   the same with every placeholder left as written: the schema cache's key
    Reading `envFile` is its only IO.
    """

    __slots__ = ("server", "argv", "env", "cwd", "digest", "shape", "secrets", "era")

    def __init__(self, config, server, identity, key, caller_env, secret, era="legacy"):
        self.server = server
        protocol = config.get("protocol", server)
        # The era that an instance is spoken to in, if it is started for this caller.
        self.era = protocol if protocol in ("legacy", "modern") else era
        scope = config.get("scope", server)
        directory = scope_directory(scope, key.text, identity)
        values = {"key": safe_file_name(key.text), "cwd": directory,
                  "session": safe_file_name(identity.session) if identity.session else None}
        own = {}
        env_file = config.get("envFile", server) or server.env_file
        if env_file:
            own.update(read_env_file(self._path(expand_variables(env_file, caller_env))))
        own.update((name, expand_variables(value, caller_env)) for name, value in server.env.items())
        argv = [expand_variables(part, caller_env) for part in [server.command] + server.args]
        cwd = expand_variables(server.cwd, caller_env) if server.cwd else None
        inherited = {name: caller_env[name] for name in config.get("inheritEnv", server) if name in caller_env}
        self.shape = _digest(secret, [argv, cwd, sorted(own.items()), sorted(inherited.items())])
        self.argv = [fill_placeholders(part, values, server.name) for part in argv]
        self.argv[0] = self._command(self.argv[0])
        self.env = {name: fill_placeholders(value, values, server.name) for name, value in own.items()}
        if cwd:
            self.cwd = self._path(fill_placeholders(cwd, values, server.name))
        elif scope == "global" or directory is None:
            self.cwd = None
        else:
            self.cwd = directory
        self.digest = _digest(secret, [self.argv, self.cwd if cwd else None, sorted(self.env.items()),
                                       sorted(inherited.items()), self.era if protocol == "follow" else ""])
        self.secrets = secret_values(list(self.env.items()) + list(inherited.items()), argv, server, caller_env)
        private = scope in PRIVATE_SCOPES
        self.env = dict(caller_env if private else base_environment(caller_env), **dict(inherited, **self.env))

    @classmethod
    def known(cls, server, digest, facts):
        """Return the definition of an instance that another daemon has started; nobody is started from it."""
        self = cls.__new__(cls)
        self.server, self.digest, self.shape, self.era = server, digest, facts["shape"], facts["era"]
        self.argv, self.cwd, self.env = facts["argv"], facts["cwd"], None
        self.secrets = secret_values(list(server.env.items()), self.argv, server, {})
        return self

    def _path(self, path):
        return os.path.normpath(os.path.join(self.server.directory, os.path.expanduser(path)))

    def _command(self, command):
        """A command with a slash is a path, relative to the configuration; else PATH finds it."""
        return self._path(command) if "/" in command else command

    def placeholders(self):
        """Which placeholders are left for the moment of the start."""
        text = " ".join(self.argv + list(self.env.values()) + [self.cwd or ""])
        return {name for name in ("id", "tmpdir", "port") if "{%s}" % name in text}


def _digest(secret, value):
    return hmac.digest(secret, json.dumps(value).encode("utf-8", "surrogateescape"), "sha256").hex()[:24]


def secret_values(variables, argv, server, caller_env):
    """Return the values that must not be shown: of variables and options whose names say so."""
    found = [value for name, value in variables if is_secret_name(name)]
    for part in [server.command, server.cwd or ""] + server.args + list(server.env.values()):
        for match in re.finditer(_VARIABLE, part):
            name = match.group(1) or match.group(3)
            if is_secret_name(name) and caller_env.get(name):
                found.append(caller_env[name])
    for option, following in zip(argv, argv[1:] + [""]):
        name, equals, value = option.partition("=")
        if name.startswith("-") and is_secret_name(name):
            found.append(value if equals else following)
    # The longest first: one may be the beginning of another.
    return sorted({value for value in found if len(value) > 3}, key=len, reverse=True)


def hide_secrets(text, secrets):
    """Return `text` with every secret value replaced by ***."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def is_secret_name(name):
    """Does a variable or header of this name usually hold a secret?"""
    return bool(re.search(r"(?i)key|token|secret|pass|credential|auth|cookie|private", name))


def fill_placeholders(text, values, server_name):
    """Return `text` with {key}, {session}, {cwd} and so on filled in from `values`.

    A name that `values` does not have stays as it is; one that is None there cannot be
    told for this caller. Raises StartFailed.
    """
    def value(match):
        name = match.group(1)
        if name not in values:
            return match.group(0)
        if values[name] is None:
            raise StartFailed("server %s uses {%s}, which is not known for this caller; call it from a "
                              "directory or session that mcpx can tell, or change its entry" % (server_name, name))
        return str(values[name])
    return re.sub(r"\{(key|id|session|cwd|tmpdir|port)\}", value, text) if "{" in text else text


def scope_directory(scope, key, identity):
    """Return the directory that belongs to a key, or the caller's where the key names none."""
    kind, _, path = key.partition(":")
    if kind in ("cwd", "worktree"):
        return path
    if kind == "repo":
        return os.path.dirname(path) if os.path.basename(path) == ".git" else path
    return identity.place.cwd


def masked(value, name=""):
    """Return configuration with values that may be secret replaced by ***."""
    if isinstance(value, dict):
        hide = name in ("env", "environment", "headers")
        return {key: "***" if hide else masked(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(?i)((?:key|token|secret|password)[\w-]*[=:]\s*)\S+", r"\1***", value)
    return value


# ---------------------------------------------------------------------------
# Log: what happened, to whom
#
# One line per event in a bounded, rotated file of mode 0600, or on stderr. Never raises:
# a full disk must not stop a call.
# ---------------------------------------------------------------------------

_LOG_RANK = {"debug": 0, "info": 1, "warning": 2, "error": 3}


class RotatedFile:
    """An append-only file that starts anew at `max_bytes`, keeping `files` older ones."""

    def __init__(self, path, max_bytes, files):
        self.path, self.max_bytes, self.files = path, max_bytes, files
        self._fd, self._size, self._checked_at = None, 0, 0.0

    def write(self, data):
        """Append bytes; drops them when the file cannot be written."""
        try:
            self._ensure_open()
            if self._size + len(data) > self.max_bytes and self._size:
                self._rotate()
            self._size += os.write(self._fd, data)
        except OSError:
            self.close()

    def taken_along(self):
        """What other code needs of it: it opens the file anew."""
        return dict(self.__dict__, _fd=None)

    def close(self):
        """Close the file; the next write opens it again."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _ensure_open(self):
        now = time.monotonic()
        if self._fd is not None and now - self._checked_at > 1:
            self._checked_at = now
            try:
                gone = os.stat(self.path).st_ino != os.fstat(self._fd).st_ino
            except OSError:
                gone = True
            if gone:
                # Deleted or moved by hand: a new file, not a hidden one.
                self.close()
        if self._fd is None:
            os.makedirs(os.path.dirname(self.path), 0o700, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._fd).st_size

    def _rotate(self):
        self.close()
        for number in range(self.files - 1, 0, -1):
            source = self.path if number == 1 else "%s.%d" % (self.path, number - 1)
            if os.path.exists(source):
                os.replace(source, "%s.%d" % (self.path, number))
        if self.files <= 1:
            os.unlink(self.path)
        self._ensure_open()


class Log:
    """The daemon's log. Lines that repeat are folded into a count."""

    def __init__(self, sink=None, level="info", echo=False):
        self.sink, self.level, self.echo = sink, level, echo
        self._last, self._repeats = None, 0

    def debug(self, text, *args):
        """Something that only helps to understand mcpx itself."""
        self._line("debug", text, args)

    def info(self, text, *args):
        """A state change."""
        self._line("info", text, args)

    def warning(self, text, *args):
        """Something a person may want to change."""
        self._line("warning", text, args)

    def error(self, text, *args):
        """Something that went wrong in mcpx or with a server."""
        self._line("error", text, args)

    def _line(self, level, text, args):
        if _LOG_RANK[level] < _LOG_RANK[self.level]:
            return
        text = "%-7s %s" % (level, printable(text % args if args else text)[:4000])
        if text == self._last:
            self._repeats += 1
            return
        if self._repeats:
            self._write("%-7s the last line came %d more times" % ("info", self._repeats))
        self._last, self._repeats = text, 0
        self._write(text)

    def _write(self, text):
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now)) + ".%03d" % (now % 1 * 1000)
        data = ("%s %s\n" % (stamp, text)).encode("utf-8", "replace")
        if self.sink is not None:
            self.sink.write(data)
        if self.echo:
            try:
                os.write(2, data)
            except OSError:
                self.echo = False


# ---------------------------------------------------------------------------
# Platform: what differs between Linux and macOS
#
# Everything else in this file is the same on both. Tested with fakes where a system is not
# at hand; what has not been run on macOS is listed in the README.
# ---------------------------------------------------------------------------

IS_LINUX = sys.platform.startswith("linux")


def boot_id():
    """Return text that differs between boots: process ids mean nothing across one."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return _output(["sysctl", "-n", "kern.boottime"])


def process_start(pid):
    """Return when a process started, in a form that only compares for equality; None if gone.

    A zombie counts as gone.
    """
    if IS_LINUX:
        fields = _proc_stat(pid)
        return None if fields is None or fields[0] in "ZX" else fields[19]
    return _output(["ps", "-o", "lstart=", "-p", str(pid)]) or None


def _proc_stat(pid):
    """Return the fields of /proc/PID/stat after the command's name, or None."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii").split()
    except (OSError, ValueError):
        return None


def _output(argv):
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, timeout=5).stdout.decode("utf-8", "replace").strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def peer_credentials(connection):
    """Return (pid, uid) of the process at the other end of a unix socket; pid may be None."""
    if IS_LINUX:
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", data)
        return pid or None, uid
    # macOS <sys/un.h>: SOL_LOCAL 0, LOCAL_PEERCRED 1 (struct xucred), LOCAL_PEERPID 2.
    uid = struct.unpack_from("2i", connection.getsockopt(0, 1, 76))[1]
    try:
        return connection.getsockopt(0, 2), uid
    except OSError:
        return None, uid


class ProcessTable:
    """One look at all processes of this user: pid -> (parent, group, session, start, marked).

    `marked` is the instance id in the process's environment, or None. A look costs a few
    milliseconds, so one serves everything that ends in the same turn.
    """

    def __init__(self):
        self.rows = {}
        if IS_LINUX:
            self._read_proc()
        else:
            self._read_ps()

    def _read_proc(self):
        uid = os.getuid()
        marker = ("\0%s=" % INSTANCE_VARIABLE).encode()
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            pid = int(name)
            try:
                if os.stat("/proc/" + name).st_uid != uid:
                    continue
                fields = _proc_stat(pid)
                if fields is None or fields[0] in "ZX":
                    continue
                with open("/proc/%s/environ" % name, "rb") as file:
                    _, found, rest = (b"\0" + file.read()).partition(marker)
            except OSError:
                found, rest = b"", b""
                if fields is None:
                    continue
            mark = rest.split(b"\0", 1)[0].decode("utf-8", "replace") if found else None
            self.rows[pid] = (int(fields[1]), int(fields[2]), int(fields[3]), fields[19], mark)

    def _read_ps(self):
        text = _output(["ps", "-x", "-o", "pid=,ppid=,pgid=,sess=,lstart="])
        environments = _output(["ps", "-x", "-E", "-w", "-w", "-o", "pid=,command="])
        marks = dict(re.findall(r"(?m)^\s*(\d+) .*\b%s=(\S+)" % INSTANCE_VARIABLE, environments))
        for line in text.splitlines():
            parts = line.split(None, 4)
            if len(parts) == 5:
                pid = int(parts[0])
                self.rows[pid] = (int(parts[1]), int(parts[2]), 0, parts[4].strip(), marks.get(parts[0]))

    def family(self, pid, mark):
        """Return {pid: start} of everything that descends from an instance's child.

        By the mark in the environment (found also after a double fork), by process group and
        session, and by parent; never this process itself.
        """
        members = {p for p, row in self.rows.items()
                   if row[4] == mark or p == pid or pid in (row[1], row[2])}
        while True:
            more = {p for p, row in self.rows.items() if row[0] in members and p not in members}
            if not more:
                break
            members |= more
        members.discard(os.getpid())
        return {p: self.rows[p][3] for p in members if p in self.rows}


def command_line(pid):
    """Return a process's command line as one string, "" if it cannot be told."""
    if IS_LINUX:
        try:
            with open("/proc/%d/cmdline" % pid, "rb") as file:
                return file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            return ""
    return _output(["ps", "-o", "command=", "-p", str(pid)])


def memory_bytes(pid):
    """Return the resident memory of a process, 0 if it cannot be told."""
    if IS_LINUX:
        try:
            with open("/proc/%d/statm" % pid) as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            return 0
    text = _output(["ps", "-o", "rss=", "-p", str(pid)])
    return int(text) * 1024 if text.isdigit() else 0


def raise_descriptor_limit():
    """Raise the soft limit of open files to the hard one: launchd starts with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return


# ---------------------------------------------------------------------------
# Reactor: what is ready, what is due
#
# The only section that knows `selectors`. One loop, one thread. Callbacks run from the
# loop only; a stream that must close is marked and closed at the end of the turn, so the
# caller's object is still valid on return. Knows nothing of JSON or MCP.
# ---------------------------------------------------------------------------

class Timer:
    """A callback that is due at a monotonic time; `cancel` any time."""

    __slots__ = ("at", "callback", "cancelled")

    def __init__(self, at, callback):
        self.at, self.callback, self.cancelled = at, callback, False

    def __lt__(self, other):
        return self.at < other.at

    def cancel(self):
        """Do not call it any more."""
        self.cancelled, self.callback = True, None


MAX_THREADS = 32


class Loop:
    """The selector loop: descriptors, timers, signals, exits of children, threads' results."""

    def __init__(self, log):
        self.log = log
        self.turn_hooks = []             # called once at the end of each turn, before streams flush
        self._timers = []
        self._soon = collections.deque()
        self._dirty = []                 # streams with something to write
        self._closing = []               # streams to close at the end of the turn
        self._children = {}              # pid -> callback(wait status), until it was reaped
        self._open()

    def _open(self):
        self.between_turns = None        # called once, when a turn is over and nobody waits for a thread
        self._selector = selectors.DefaultSelector()
        self._signals = {}               # number -> callback
        self._old_handlers = {}
        self._old_wakeup = None
        self._threads_left = MAX_THREADS
        self._unsettled = 0              # runs that somebody still waits for
        self._thread_queue = collections.deque()      # runs that wait for a thread
        self._stopped = False
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)

    def taken_along(self):
        """What other code needs of it; the rest is opened by `resumed`."""
        names = ("log", "turn_hooks", "_timers", "_soon", "_dirty", "_closing", "_children")
        return {name: getattr(self, name) for name in names}

    def resumed(self):
        """Go on in other code: everybody registers anew, children that have ended meanwhile are found."""
        self._open()
        if self._children:
            self.on_signal(signal.SIGCHLD, self.reap)
            self._soon.append(self.reap)

    # -- time -----------------------------------------------------------------

    def call_later(self, delay, callback):
        """Call back after `delay` seconds; returns the Timer."""
        timer = Timer(time.monotonic() + delay, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def soon(self, callback):
        """Call back in this turn, after what runs now has returned."""
        self._soon.append(callback)

    # -- descriptors ----------------------------------------------------------

    def watch(self, fd, callback):
        """Call back whenever `fd` is readable."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def change(self, fd, events, callback):
        """Set what is waited for on a descriptor: bits 1 readable, 2 writable, 0 nothing."""
        mask = (selectors.EVENT_READ if events & 1 else 0) | (selectors.EVENT_WRITE if events & 2 else 0)
        known = fd in self._selector.get_map()
        if not mask:
            if known:
                self._selector.unregister(fd)
        elif known:
            self._selector.modify(fd, mask, callback)
        else:
            self._selector.register(fd, mask, callback)

    def unwatch(self, fd):
        """Forget a descriptor; one that is not watched is fine."""
        try:
            self._selector.unregister(fd)
        except (KeyError, ValueError):
            return

    def mark_dirty(self, stream):
        """Have `stream.flush()` called at the end of this turn."""
        self._dirty.append(stream)

    def mark_closing(self, stream):
        """Have `stream.finish_close()` called at the end of this turn."""
        self._closing.append(stream)

    # -- signals, children, threads ------------------------------------------

    def on_signal(self, number, callback):
        """Call back from the loop when a signal has come; the handler itself only wakes it."""
        if not self._signals:
            self._old_wakeup = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self._signals[number] = callback
        self._old_handlers[number] = signal.signal(number, lambda *_: None)

    def on_exit(self, pid, callback):
        """Call back with the wait status once the child `pid` has ended; reaps it.

        One reaper, by known pid: waiting for any child would steal statuses from others.
        """
        if signal.SIGCHLD not in self._signals:
            self.on_signal(signal.SIGCHLD, self.reap)
            self._soon.append(self.reap)     # it may have ended before anybody asked for the signal
        self._children[pid] = callback

    def reap(self):
        """Collect the children that have ended."""
        for pid in list(self._children):
            try:
                done, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                done, status = pid, 0
            if done:
                self.guard(self._children.pop(pid), status)

    def in_thread(self, work, on_done, timeout):
        """Run `work()` in a thread; `on_done(value, error)` is called from the loop.

        For what the system offers in blocking form only, such as a path on a dead network
        mount. `work` must touch nothing of ours. After `timeout` seconds the error is a
        TimeoutError and the result is dropped; at most MAX_THREADS run at a time, the others wait.
        """
        settled = []
        self._unsettled += 1

        def settle(value, error):
            if not settled:
                settled.append(True)
                self._unsettled -= 1
                timer.cancel()
                on_done(value, error)

        def returned(value, error):
            self._threads_left += 1
            self._start_threads()
            settle(value, error)

        def run():
            try:
                value, error = work(), None
            except Exception as caught:
                value, error = None, caught
            self._soon.append(lambda: returned(value, error))
            try:
                self._wake_write.send(b"\0")
            except OSError:
                return                   # the loop has closed; nobody waits any more
        timer = self.call_later(timeout, lambda: settle(None, TimeoutError("no answer in %gs" % timeout)))
        self._thread_queue.append(run)
        self._start_threads()

    def _start_threads(self):
        while self._thread_queue and self._threads_left > 0:
            self._threads_left -= 1
            threading.Thread(target=self._thread_queue.popleft(), daemon=True).start()

    # -- the loop -------------------------------------------------------------

    def run(self):
        """Turn until `stop`."""
        while not self._stopped:
            self.turn()
            if self.between_turns is not None and not self._unsettled and not self._stopped:
                callback, self.between_turns = self.between_turns, None
                self.guard(callback)

    def turn(self, max_wait=None):
        """Wait for something, call what is ready and due, then write and close."""
        timeout = self._wait_time(max_wait)
        try:
            events = self._selector.select(timeout)
        except InterruptedError:
            events = []
        for key, mask in events:
            callback = key.data
            if callback is not None:
                try:
                    callback(mask)
                except Exception:
                    self._note_mistake(callback)
        if self._timers and self._timers[0].at <= time.monotonic():
            self._run_due()
        while self._soon:
            self.guard(self._soon.popleft())
        for hook in self.turn_hooks:
            self.guard(hook)
        self._finish_turn()

    def flush(self):
        """Write what is queued now, not at the end of the turn: somebody waits for it, and the rest is ours to do."""
        dirty, self._dirty = self._dirty, []
        for stream in dirty:
            self.guard(stream.flush)

    def stop(self):
        """Leave `run` at the end of this turn."""
        self._stopped = True

    def close(self):
        """Give back signals and descriptors; for tests and for the end of a process."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        if self._signals:
            signal.set_wakeup_fd(self._old_wakeup if self._old_wakeup is not None else -1)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _wait_time(self, max_wait):
        if self._soon or self._dirty or self._closing:
            return 0
        while self._timers and self._timers[0].cancelled:
            heapq.heappop(self._timers)
        wait = max_wait
        if self._timers:
            due = max(0.0, self._timers[0].at - time.monotonic())
            wait = due if wait is None else min(wait, due)
        return wait

    def _run_due(self):
        now = time.monotonic()
        while self._timers and self._timers[0].at <= now:
            timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                self.guard(timer.callback)

    def _finish_turn(self):
        for _ in range(8):
            if not (self._dirty or self._closing or self._soon):
                return
            self.flush()
            closing, self._closing = self._closing, []
            for stream in closing:
                self.guard(stream.finish_close)
            while self._soon:
                self.guard(self._soon.popleft())

    def _on_wake(self, _mask):
        try:
            numbers = self._wake_read.recv(4096)
        except BlockingIOError:
            return
        for number in set(numbers):
            callback = self._signals.get(number)
            if callback is not None:
                self.guard(callback)

    def guard(self, callback, *args):
        """A mistake in one callback must not end the loop: log it and go on."""
        try:
            callback(*args)
        except Exception:
            self._note_mistake(callback)

    def _note_mistake(self, callback):
        self.log.error("internal error, please report it: %s", traceback.format_exc())
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, Stream):
            owner.close("internal error")


# So many lines of one stream are handed on in a turn; the others' turn comes before the rest.
LINES_A_TURN = 200
# So many pieces go out with one system call; POSIX guarantees 16, Linux and macOS take 1,024.
WRITE_PIECES = 64
# Large messages cross a pipe of this size in fewer turns than one of 64 KiB. Linux lets a user
# have 64 MiB of pipes before it gives out tiny ones, so it is asked for when it is needed only.
PIPE_BYTES = 256 << 10


def enlarge_pipe(fd):
    """Let a pipe hold more, where the system lets us."""
    if sys.platform.startswith("linux"):
        f_setpipe_sz, f_getpipe_sz = 1031, 1032      # in the module since Python 3.10
        try:
            if fcntl.fcntl(fd, f_getpipe_sz) < PIPE_BYTES:
                fcntl.fcntl(fd, f_setpipe_sz, PIPE_BYTES)
        except OSError:
            return                       # no pipe, or more than this user may have


# A peer that does not take the rest of an answer for this long does not want it.
CLOSE_WAIT_S = 30.0


class Stream:
    """A non-blocking byte stream in the loop, read in lines and written in whole messages.

    on_lines(lines)  called with the complete lines of one read
    on_rest(bytes)   called with what came after the last line end, if the peer ended there
    on_close(reason) called once, after the last line, when either side has ended it
    Reading and writing ends may be the same descriptor. One read and one write of bounded
    size per turn, so that a busy stream cannot starve the others.
    """

    DESCRIPTORS = ("read_fd", "write_fd")
    ADDED = {"_close_timer": None}

    def __init__(self, loop, read_fd, write_fd, limit, on_lines, on_close, on_rest=None, grows=False):
        self.loop, self.read_fd, self.write_fd = loop, read_fd, write_fd
        self.on_lines, self.on_close, self.on_rest = on_lines, on_close, on_rest
        self.lines = LineBuffer(limit, grows)
        self.queued_total = self.written_total = 0    # bytes since the beginning
        self.unread_from = None          # once the reader has gone: the offset from which it read nothing
        self.on_data = None              # takes the bytes as they come, instead of lines
        self.on_deaf = None              # told when the peer has closed its reading end alone
        self.marks = None                # PipeMarks, for a child that may outlive this process
        self.queued_bytes = 0
        self.received_at = time.monotonic()
        self._queue = collections.deque()
        self._read_size = READ_BYTES
        self._dirty = self._wants_write = self._closed = self._read_ended = False
        self._end_when_flushed = self._paused = False
        self._backlog = []               # lines that are left for the next turns; nothing is read meanwhile
        self._close_reason = None        # why it closes once all is written
        self._close_timer = None         # bounds the wait for that
        self._reason = None
        for fd in {read_fd, write_fd} - {None}:
            os.set_blocking(fd, False)
        if read_fd is not None:
            loop.watch(read_fd, self._on_ready)

    def resumed(self):
        """Go on in other code, with what was queued and half read."""
        for fd in {self.read_fd, self.write_fd} - {None}:
            os.set_inheritable(fd, False)
        self._watch_reading()
        if self._wants_write and self.write_fd is not None and self.write_fd != self.read_fd:
            self.loop.change(self.write_fd, 2, self._on_writable)

    @property
    def closed(self):
        """Has it been closed, or will it be at the end of this turn?"""
        return self._closed

    def write(self, data):
        """Queue bytes; they are written at the end of the turn. After `close` they are dropped."""
        if self._closed or self.write_fd is None:
            return
        self._queue.append(data)
        self.queued_bytes += len(data)
        self.queued_total += len(data)
        if not self._dirty:
            self._dirty = True
            self.loop.mark_dirty(self)

    def write_message(self, *parts):
        """Queue what consists of these bytes and Pieces, in few pieces, and without a copy of what is large."""
        if max(map(len, parts)) < READ_BYTES:
            self.write(b"".join(parts))
        else:
            for part in parts:
                for piece in pieces_of(part):
                    self.write(piece)

    def flush(self):
        """Write what the descriptor takes now; wait for it to take more."""
        self._dirty = False
        if self.write_fd is None:
            return
        try:
            while self._queue:
                pieces = self._pieces()
                if self.marks is not None:
                    size = sum(map(len, pieces))
                    self.marks.before_write(self.written_total + size, size)
                written = os.write(self.write_fd, pieces[0]) if len(pieces) == 1 else os.writev(self.write_fd, pieces)
                whole = self._take_written(written)
                if self.marks is not None:
                    self.marks.after_write(self.written_total, whole)
                if not whole:
                    break
        except BlockingIOError:
            if self.marks is not None:
                self.marks.after_write(self.written_total, None)
            self._wait_writable(bool(self._queue))
            return
        except OSError as error:
            self._write_failed(error)
            return
        self._wait_writable(bool(self._queue))
        if not self._queue:
            if self._end_when_flushed:
                self.end_output()
            elif self._close_reason is not None:
                self.close(self._close_reason)

    def _pieces(self):
        """Return the first pieces of the queue, for one write."""
        queue = self._queue
        return list(queue) if len(queue) <= WRITE_PIECES else [queue[place] for place in range(WRITE_PIECES)]

    def _take_written(self, count):
        """Take so many bytes off the queue; returns whether the pieces they are of were written whole."""
        queue = self._queue
        self.queued_bytes -= count
        self.written_total += count
        while queue and count >= len(queue[0]):
            count -= len(queue.popleft())
        if count:
            queue[0] = part_of(queue[0], count)
            if self.write_fd != self.read_fd:
                enlarge_pipe(self.write_fd)
        return not count

    def end_output_when_flushed(self):
        """Close the writing side once what is queued has been written."""
        if self._queue:
            self._end_when_flushed = True
        else:
            self.end_output()

    def end_output(self):
        """Close the writing side now; what the peer still says is read."""
        if self.write_fd is None or self.write_fd == self.read_fd:
            return
        self.note_unread()
        self._queue.clear()
        self.queued_bytes = 0
        if self._wants_write:
            self.loop.unwatch(self.write_fd)
        os.close(self.write_fd)
        self.write_fd, self._wants_write = None, False

    def note_unread(self):
        """Note from which byte on the reader of our pipe has read nothing, if it has gone.

        A pipe keeps what was written and not read, and Linux tells how much at either end.
        While somebody can still read it, and elsewhere, everything counts as read.
        """
        if self.unread_from is not None:
            return
        self.unread_from = self.written_total
        if IS_LINUX and self.write_fd is not None and self.write_fd != self.read_fd:
            poller = select.poll()
            poller.register(self.write_fd, 0)
            if poller.poll(0):           # POLLERR: the last reader has closed
                fionread = 0x541B        # <asm-generic/ioctls.h>
                unread = struct.unpack("i", fcntl.ioctl(self.write_fd, fionread, b"\0" * 4))[0]
                self.unread_from -= unread

    def close(self, reason="closed"):
        """Close at the end of the turn; `on_close` is called then, once."""
        if not self._closed:
            self._closed, self._reason = True, reason
            self.loop.mark_closing(self)

    def close_when_flushed(self, reason="closed"):
        """Close once everything queued has been written, or after a while; read no more."""
        if not self._queue:
            self.close(reason)
            return
        self._close_reason = reason
        self.pause(True)
        self._close_timer = self.loop.call_later(CLOSE_WAIT_S, lambda: self.close(reason))

    def finish_close(self):
        """Called by the loop: write what is left without waiting, then let go of everything."""
        if self.read_fd is None and self.write_fd is None:
            return
        if self._close_timer is not None:
            self._close_timer.cancel()
        self._backlog = []
        self.note_unread()
        if self._queue and self.write_fd is not None:
            try:
                os.writev(self.write_fd, self._pieces())
            except OSError:
                self.queued_bytes = 0
        for fd in {self.read_fd, self.write_fd} - {None}:
            self.loop.unwatch(fd)
            os.close(fd)
        self.read_fd = self.write_fd = None
        self._queue.clear()
        self.queued_bytes = 0
        # Without these it and its owner are free at once; a cycle would wait for the collector.
        on_close, self.on_lines, self.on_close, self.on_rest = self.on_close, None, None, None
        self.on_data = self.on_deaf = None
        if on_close is not None:
            on_close(self._reason)

    def read_rest(self):
        """Read what a dead peer has left in the descriptor, without waiting, to the last byte.

        Something else may hold the other end open, so there may be no end of stream.
        """
        while self.read_fd is not None and not self._read_ended:
            before = self.received_at
            self._read()
            if self.received_at == before:
                break
        backlog, self._backlog = self._backlog, []
        if backlog:
            self.on_lines(backlog)
        self._give_rest()

    def _wait_writable(self, wanted):
        if wanted == self._wants_write:
            return
        self._wants_write = wanted
        if self.write_fd == self.read_fd:
            self._watch_reading()
        else:
            self.loop.change(self.write_fd, 2 if wanted else 0, self._on_writable)

    def _write_failed(self, error):
        if self.write_fd == self.read_fd or self.read_fd is None:
            self.close("write failed: %s" % error.strerror)
        else:
            # The peer's other end may still hold answers: stop writing, keep reading.
            self._queue.clear()
            self.queued_bytes = 0
            self.end_output()
            if self.on_deaf is not None:
                self.on_deaf()

    def _on_writable(self, _mask):
        if not self._closed:
            self.flush()

    def _on_ready(self, mask):
        if self._closed:
            return
        if mask & 2 and self.write_fd == self.read_fd:
            self.flush()
        if mask & 1 and not self._closed:
            self._read()

    def _read(self):
        if self.marks is not None:
            self.marks.reading(True)
        try:
            data = os.read(self.read_fd, self._read_size)
        except (BlockingIOError, InterruptedError):
            if self.marks is not None:
                self.marks.reading(bool(self.lines.partial or self._backlog))
            return
        except OSError as error:
            self._ended("read failed: %s" % error.strerror)
            return
        if not data:
            self._ended("end of stream")
            return
        # A full buffer promises more: larger reads pay off only then (see READ_BYTES).
        if len(data) < READ_BYTES:
            self._read_size = READ_BYTES
        elif self._read_size == READ_BYTES:
            self._read_size = READ_BYTES * 4
            if self.write_fd is not None and self.write_fd != self.read_fd:
                enlarge_pipe(self.read_fd)
        self.received_at = time.monotonic()
        self.feed(data)
        if self.marks is not None and not self._backlog:
            self.marks.reading(bool(self.lines.partial))

    def feed(self, data):
        """Hand bytes on, as lines or as they are."""
        if self.on_data is not None:
            self.on_data(data)
            return
        lines = self.lines.feed(data)
        if self._backlog:
            self._backlog += lines
        elif len(lines) > LINES_A_TURN:
            self._backlog = lines
            self._hand_on()
        elif lines:
            self.on_lines(lines)

    def _hand_on(self):
        """Hand on what one turn may take of the backlog; reading goes on when it is empty."""
        if self._closed:
            return
        lines, self._backlog = self._backlog[:LINES_A_TURN], self._backlog[LINES_A_TURN:]
        if self._backlog:
            self.loop.call_later(0, self._hand_on)
        self._watch_reading()
        if lines:
            self.on_lines(lines)
        if self.marks is not None and not self._backlog:
            self.marks.reading(bool(self.lines.partial))

    def pause(self, paused):
        """Stop or go on reading: what comes faster than it is taken waits at its sender."""
        if self.read_fd is None or self._closed or paused == self._paused:
            return
        self._paused = paused
        self._watch_reading()

    def _watch_reading(self):
        if self.read_fd is not None:
            reads = 0 if self._paused or self._backlog or self._read_ended else 1
            writes = 2 if self._wants_write and self.write_fd == self.read_fd else 0
            self.loop.change(self.read_fd, reads | writes, self._on_ready)

    def _ended(self, reason):
        if not self._read_ended:
            self._read_ended = True
            self._give_rest()
            self.close(reason)

    def _give_rest(self):
        rest = self.lines.rest()
        if rest and not isinstance(rest, Oversize) and self.on_rest is not None:
            self.on_rest(rest)


# ---------------------------------------------------------------------------
# Upstream: what is in flight there; what did it answer
#
# The client half of MCP toward one server, over a stream it is given. Knows nothing of
# hosts or processes. Every request goes out under an id of ours: ascending integers, never
# used twice on a connection. A progress token is the id of the request it belongs to.
# ---------------------------------------------------------------------------

class Call:
    """A request on its way, from whoever asked to an upstream and back.

    on_finish(call, message, line) is called exactly once, unless the call was cancelled:
    `message` is the answer as the upstream gave it (or an error of ours), `line` its bytes
    where they are at hand. A call without `host` is mcpx's own.
    """

    FORMER = {"turn_timer": "timer"}
    __slots__ = ("method", "params", "line", "message", "on_finish", "host", "host_id", "seq",
                 "identity", "token", "may_repeat", "attempts", "cancelled", "done", "slot", "instance",
                 "wire_id", "sent_at", "active_at", "last_progress", "losses", "sent_offset", "opts_in", "has_asked",
                 "has_logged", "may_have_asked", "mark", "timer", "route_stamp", "turn_over",
                 "over", "schema", "task", "asks", "may_ask", "logs", "rounds")

    def __init__(self, method, params, on_finish, host=None, host_id=None, seq=None, identity=None):
        self.method, self.params, self.on_finish = method, params, on_finish
        self.host, self.host_id, self.seq, self.identity = host, host_id, seq, identity
        # The host's own line and its parsed form, where the params go out unchanged.
        self.line = self.message = None
        self.token = None                # the host's progress token
        self.may_repeat = False          # may be sent a second time when its answer was lost
        self.attempts = 0
        self.cancelled = self.done = False
        self.slot = self.instance = self.wire_id = self.sent_at = self.active_at = None
        self.last_progress = self.schema = self.task = None
        self.sent_offset = 0             # where its bytes begin in the stream to the server
        self.losses = 0                  # how often a daemon died with it
        self.timer = None                # bounds its wait, for other hosts' questions or for an answer
        self.route_stamp = None          # what its way to its instance depends on: see LegacyHost._note_route
        self.over = False                # the server has answered it, be it late: it asks nothing more
        self.has_asked = 0               # how many questions were told to be its
        self.may_have_asked = False      # one came while it was in flight that may be its
        self.opts_in = False             # mcpx itself follows a task, so the tasks extension is declared
        self.rounds = 0                  # how often its upstream has answered with questions
        self.asks = False                # its tool has been seen to ask its host something
        self.may_ask = False             # nor has it been seen to end without
        self.logs = False                # its tool has been seen to log
        self.has_logged = False          # a log message came while it was in flight
        self.mark = None                 # its entry in the journal
        self.turn_over = False           # it has waited long enough for others' log messages

    @property
    def party(self):
        """Who has made it, as far as that shows: all requests of one pipe, or of one named session, are one's.

        A modern host's requests have each an object of their own, and so has a held call.
        """
        pipe = getattr(self.host, "pipe", None)
        if pipe is not None:
            return pipe
        if self.identity is not None and self.identity.named and self.host.era == "modern":
            return "session " + self.identity.session
        return self.host

    @property
    def subject(self):
        """What can be learned of: a tool or a prompt by its name, else the method."""
        name = self.params.get("name") if self.method in ("tools/call", "prompts/get") and self.params else None
        return "%s %s" % (self.method, name) if isinstance(name, str) else self.method

    def finish(self, message, line=None):
        """Settle the call; later calls of this are ignored."""
        if not self.done:
            self.done = True
            if self.timer is not None:
                self.timer.cancel()      # else it would keep all that hangs on the call
            self.on_finish(self, message, line)

    def fail(self, error):
        """Settle the call with an RpcError."""
        self.finish({"error": error.as_object()})


# A legacy server that ignores unknown methods never answers a probe; package runners take
# long to start. After this, `initialize` is sent as well, and the first answer decides.
PROBE_WAIT_S = 5.0
# Requests of mcpx's own (lists, pings) are given up after this.
OWN_WAIT_S = 60.0


class Upstream:
    """The requests in flight at one server, and what else it says.

    owner.on_question(message)      it asks us something (its pings are answered here)
    owner.on_notification(message)  it tells us something (progress is handled here)
    owner.on_settled(call, lease)   a request of ours is no longer in flight
    owner.on_noise(text)            a line that is no MCP message
    owner.on_mistake(text)          something of ours went wrong with one line
    owner.on_ghost_gone()           a cancelled call is surely over
    owner.on_sending(call)          a request of a host is about to be queued under its wire id
    owner.on_taken(call)            its answer has been taken from the pipe
    owner.on_finished()             the only answer of a read is on its way to who waits for it
    owner.call_later(delay, callback)   returns a Timer
    """

    ADDED = {"is_alone": False}

    def __init__(self, stream, owner, counters):
        self.stream, self.owner, self.counters = stream, owner, counters
        self.in_flight = {}              # wire id -> Call, until answered or given up
        self.is_alone = False            # the line at hand is the only one of a read
        self.task_tokens = {}            # wire id -> Call whose progress goes on as a task
        # Cancelled calls that the server may still be at: what it asks or logs may be theirs.
        self.ghosts = {}                 # wire id -> Call, until a late answer or for cancelGrace
        self._rest_timers = {}           # wire id -> Timer that ends the ghost
        self.era, self.revision = "legacy", LATEST_LEGACY
        self.only_era = None             # the era that it turned out to speak alone
        self.probing = False             # it has not yet shown which era it speaks
        self.first_is_torn = False       # its next line may be the rest of one
        self.wanted_tasks = set()        # tasks that a modern server is to tell of
        self.wanted_uris = set()         # what a modern server is to tell changes of
        self.listens = {}                # wire id of a subscriptions/listen -> calls that wait for its ack
        self.info, self.capabilities, self.instructions = {}, {}, None
        self._last_id = 0

    def handshake(self, capabilities, on_ready, is_settled=None):
        """Send `initialize`; `on_ready(error)` is called with None or the reason it failed.

        MCP 2025-11-25, basic/lifecycle: nothing else is sent before the answer.
        """
        def answered(_call, message, _line):
            if is_settled is not None and is_settled():
                return                   # a late answer to a probe has shown the other era meanwhile
            error = self._take_initialize(message)
            if error is None:
                self.notify("notifications/initialized")
            on_ready(error)
        params = {"protocolVersion": LATEST_LEGACY, "capabilities": capabilities,
                  "clientInfo": {"name": "mcpx", "version": __version__}}
        self.send(Call("initialize", params, answered))

    def discover(self, capabilities, on_ready):
        """Ask a server of unknown era with `server/discover`; `on_ready(error)` as in `handshake`.

        PROTOCOL 6.1: nothing else is sent before the verdict. Only the codes that modern
        servers alone use prove a modern one; any other error means legacy. A server that
        says nothing for a while may be one that ignores what it does not know.
        """
        self.era, self.revision, self.probing = "modern", MODERN, True
        settled = []

        def legacy(reason):
            self.era, self.revision = "legacy", LATEST_LEGACY
            self.handshake(capabilities, finish, lambda: bool(settled))

        def finish(error):
            if not settled:
                settled.append(True)
                self.probing = False
                # One that ignores what it does not know would be waited for for ever.
                self.drop(call)
                if self.era == "legacy" and error is None:
                    self.only_era = "legacy"
                on_ready(error)

        def answered(_call, message, _line):
            if settled:
                return
            result, error = message.get("result"), message.get("error")
            versions = result.get("supportedVersions") if isinstance(result, dict) else None
            if isinstance(versions, list) and MODERN in versions:
                self._take_discover(result)
                finish(None)
            elif isinstance(error, dict) and error.get("code") in (
                    HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_VERSION):
                data = error.get("data") if isinstance(error.get("data"), dict) else {}
                supported = data.get("supported")
                if isinstance(supported, list) and any(version in LEGACY_REVISIONS for version in supported):
                    legacy("it supports legacy revisions")
                else:
                    finish(StartFailed("it speaks %s; mcpx speaks %s" % (data.get("supported"), ", ".join(REVISIONS))))
            elif self.era == "modern":
                legacy("it does not know server/discover")
        call = Call("server/discover", {}, answered)
        self.send(call)
        call.timer = self.owner.call_later(
            PROBE_WAIT_S, lambda: None if settled or call.done else self._stop_probing(call, legacy))

    def _stop_probing(self, call, legacy):
        if self.in_flight.get(call.wire_id) is call:
            legacy("it did not answer the probe")

    def _take_discover(self, result):
        self.era, self.revision = "modern", MODERN
        self.capabilities = result["capabilities"] if isinstance(result.get("capabilities"), dict) else {}
        meta = result.get("_meta") if isinstance(result.get("_meta"), dict) else {}
        info = meta.get(META_SERVER_INFO)
        self.info = info if isinstance(info, dict) else {}
        self.instructions = result.get("instructions")
        # Which older revisions it has is not told by what it lists here: SDKs list modern ones alone.
        self.listen()

    # -- toward a modern server ---------------------------------------------------

    def listen(self, waiting=()):
        """Open a subscription to all that is wanted now; the one before it is cancelled after.

        MCP 2026-07-28, basic/patterns/subscriptions. `waiting` are calls that want the answer
        of this acknowledgement.
        """
        wanted = {member: True for member, name in (("toolsListChanged", "tools"), ("promptsListChanged", "prompts"),
                                                    ("resourcesListChanged", "resources"))
                  if isinstance(self.capabilities.get(name), dict) and self.capabilities[name].get("listChanged")}
        if self.wanted_uris:
            wanted["resourceSubscriptions"] = sorted(self.wanted_uris)
        if self.wanted_tasks:
            wanted["taskIds"] = sorted(self.wanted_tasks)
        old = list(self.listens)
        if wanted:
            self._last_id += 1
            if self.stream.marks is not None:
                self.stream.marks.sending(self._last_id)
            self.listens[self._last_id] = list(waiting)
            extensions = {"extensions": {TASKS_EXTENSION: {}}} if self.wanted_tasks else {}
            meta = {META_VERSION: MODERN, META_CAPABILITIES: extensions,
                    META_CLIENT_INFO: {"name": "mcpx", "version": __version__}}
            self.stream.write(encode_json({"jsonrpc": "2.0", "id": self._last_id, "method": "subscriptions/listen",
                                           "params": {"notifications": wanted, "_meta": meta}}) + b"\n")
        for wire_id in old:
            if not self.listens[wire_id]:
                del self.listens[wire_id]
                self.notify("notifications/cancelled", {"requestId": wire_id})

    def _on_acknowledged(self, params):
        meta = params.get("_meta") if isinstance(params.get("_meta"), dict) else {}
        wire_id = meta.get(META_SUBSCRIPTION)
        waiting = (self.listens.get(wire_id) if is_valid_id(wire_id) else None) or []
        honoured = params.get("notifications") if isinstance(params.get("notifications"), dict) else {}
        uris = honoured.get("resourceSubscriptions")
        uris = uris if isinstance(uris, list) else ()
        calls, waiting[:] = list(waiting), []
        for call in calls:
            uri = call.params.get("uri")
            if uri in uris:
                self._settle_here(call, {"result": {}})
            else:
                self.wanted_uris.discard(uri)
                self._settle_here(call, {"error": RpcError(INVALID_PARAMS, "the server does not tell changes of this "
                                                           "resource", {"uri": uri}).as_object()})

    def _settle_here(self, call, message):
        """Answer a request that a modern server has no method for."""
        if self.in_flight.pop(call.wire_id, None) is not None:
            self.owner.on_settled(call)
            call.finish(message)

    def _send_modern(self, call):
        """Send a request as 2026-07-28 has it; what it has not is done in its way, or here."""
        if call.method == "resources/subscribe":
            self.wanted_uris.add(call.params.get("uri"))
            self.listen([call])
            return
        if call.method == "resources/unsubscribe":
            self.wanted_uris.discard(call.params.get("uri"))
            self.listen()
        if call.method in ("resources/unsubscribe", "logging/setLevel"):
            self._settle_here(call, {"result": {}})
            return
        method = "server/discover" if call.method == "ping" else call.method
        params = dict(call.params or {})
        meta = {name: value for name, value in (params.get("_meta") or {}).items() if name != "progressToken"}
        meta[META_VERSION] = MODERN
        meta[META_CLIENT_INFO] = {"name": "mcpx", "version": __version__}
        capabilities = lift_capabilities(call.host.capabilities) if call.host is not None else {}
        if call.opts_in:
            capabilities["extensions"] = dict(capabilities.get("extensions") or {}, **{TASKS_EXTENSION: {}})
        meta[META_CAPABILITIES] = capabilities
        if call.host is not None and call.host.level is not None:
            meta[META_LOG_LEVEL] = call.host.level
        if call.token is not None:
            meta["progressToken"] = call.wire_id
        params["_meta"] = meta
        self.stream.write(encode_json({"jsonrpc": "2.0", "id": call.wire_id, "method": method,
                                       "params": params}) + b"\n")

    def _take_initialize(self, message):
        if "error" in message:
            error = message["error"] if isinstance(message["error"], dict) else {}
            return RpcError(error.get("code", INTERNAL_ERROR), str(error.get("message", "initialize failed")),
                            error.get("data"))
        result = message.get("result")
        revision = result.get("protocolVersion") if isinstance(result, dict) else None
        if revision not in LEGACY_REVISIONS:
            return StartFailed("it answered initialize with protocol version %s; mcpx speaks %s"
                               % (json.dumps(revision), ", ".join(LEGACY_REVISIONS)))
        self.revision = revision
        self.capabilities = result["capabilities"] if isinstance(result.get("capabilities"), dict) else {}
        self.info = result["serverInfo"] if isinstance(result.get("serverInfo"), dict) else {}
        self.instructions = result.get("instructions")
        return None

    def send(self, call):
        """Send a request; it is in flight from here on."""
        self._last_id += 1
        call.wire_id = wire_id = self._last_id
        call.attempts += 1
        call.sent_at = call.active_at = time.monotonic()
        call.sent_offset = self.stream.queued_total
        self.in_flight[wire_id] = call
        self.owner.on_sending(call)
        if call.host is None and call.method not in ("initialize", "server/discover"):
            # Nobody waits for our own requests; a server that never answers must not be held up by one.
            call.timer = self.owner.call_later(OWN_WAIT_S, lambda: self._give_up_own(call))
        self._write_request(call)
        if call.mark is not None and self.in_flight.get(wire_id) is call:
            self.stream.marks.queued(self.stream.queued_total, call)

    def _write_request(self, call):
        wire_id = call.wire_id
        if self.era == "modern":
            self._send_modern(call)
            return
        if call.line is not None:
            self.stream.write(with_id(call.line, call.message, wire_id) + b"\n")
            return
        message = {"jsonrpc": "2.0", "id": wire_id, "method": call.method}
        params = call.params
        if call.token is not None:
            params = dict(params, _meta=dict(params.get("_meta") or {}, progressToken=wire_id))
        if params is not None:
            message["params"] = params
        self.stream.write(encode_json(message) + b"\n")

    def notify(self, method, params=None):
        """Send a notification; to a modern server only the one that it takes."""
        if self.era == "modern" and method != "notifications/cancelled":
            return
        self.stream.write(encode_json(notification(method, params)) + b"\n")

    def answer(self, question_id, message):
        """Answer a question; `message` has `result` or `error`."""
        body = {name: message[name] for name in ("result", "error") if name in message}
        self.stream.write(encode_json(dict({"jsonrpc": "2.0", "id": question_id}, **body)) + b"\n")

    def cancel(self, call, reason):
        """Tell the server that an answer is not wanted any more.

        The call stays in flight, marked, until the server answers all the same or `drop`.
        MCP 2025-11-25, basic/utilities/cancellation: never for `initialize`.
        """
        call.cancelled = True
        if call.wire_id in self.in_flight and call.method != "initialize":
            params = {"requestId": call.wire_id}
            if reason:
                params["reason"] = reason
            self.notify("notifications/cancelled", params)

    def drop(self, call, grace=0.0):
        """Forget a cancelled call; its late answer will be counted and ignored.

        For `grace` seconds it still counts when it has to be told whose a question is.
        """
        if self.in_flight.pop(call.wire_id, None) is not None:
            if grace:
                self.haunt(call, grace)
            self.owner.on_settled(call)

    def haunt(self, call, grace):
        """Let a cancelled call count for some time when it has to be told whose a question is."""
        earlier = self._rest_timers.pop(call.wire_id, None)
        if earlier is not None:
            earlier.cancel()
        self.ghosts[call.wire_id] = call
        self._rest_timers[call.wire_id] = self.owner.call_later(grace, lambda: self._lay_to_rest(call))

    def _give_up_own(self, call):
        if self.in_flight.get(call.wire_id) is call:
            self._settle_here(call, {"error": LimitReached(
                "no answer to %s in %gs" % (call.method, OWN_WAIT_S)).as_object()})

    def _lay_to_rest(self, call):
        if self.ghosts.pop(call.wire_id, None) is not None:
            # Else it would keep the call, and all that hangs on it, for the rest of its time.
            self._rest_timers.pop(call.wire_id).cancel()
            self.owner.on_ghost_gone()

    def facts(self):
        """Return what another daemon must know to go on with this server."""
        return {"era": self.era, "revision": self.revision, "capabilities": self.capabilities, "info": self.info,
                "instructions": self.instructions, "onlyEra": self.only_era, "listens": list(self.listens)}

    def take_facts(self, facts, last_id):
        """Go on with a server that another daemon has made the handshake with."""
        self.era, self.revision, self.only_era = facts["era"], facts["revision"], facts.get("onlyEra")
        self.capabilities, self.info = facts["capabilities"], facts["info"]
        self.instructions = facts.get("instructions")
        self.listens = {wire_id: [] for wire_id in facts.get("listens") or ()}
        self._last_id = max([last_id] + list(self.listens))

    def expect(self, wire_id, call):
        """Take the answer to a request that another daemon has sent."""
        call.wire_id, call.attempts = wire_id, 1
        call.sent_offset = -1            # it was read long ago, whatever our own stream says
        call.sent_at = call.active_at = time.monotonic()
        self._last_id = max(self._last_id, wire_id)
        self.in_flight[wire_id] = call

    def take_all(self):
        """Return and forget everything in flight: the stream has ended."""
        calls = list(self.in_flight.values())
        self.in_flight.clear()
        self.task_tokens.clear()
        self.listens.clear()
        return calls

    # -- what the server says -------------------------------------------------

    def on_lines(self, lines):
        """Take the lines of one read."""
        self.is_alone = len(lines) == 1
        for line in lines:
            if self.first_is_torn:
                self.first_is_torn = False
                if not is_whole(line):
                    self.owner.on_noise("the rest of a line that a dead daemon had begun to read")
                    continue
            if isinstance(line, Oversize):
                self._on_oversize(line)
                continue
            line = line.strip(b"\r\n\t ")
            if line and line != b"\xef\xbb\xbf":
                try:
                    self._on_line(line)
                except Exception:
                    # A mistake of ours in one line must not cost everybody the server.
                    self.owner.on_mistake(traceback.format_exc())

    def on_rest(self, data):
        """Take what came last, without a line end: a whole message, or half of one."""
        try:
            parse_json(data)
        except RpcError:
            self.owner.on_noise(data[:500].decode("utf-8", "replace"))
            return
        self.on_lines([data])

    def _on_line(self, line):
        if len(line) > LONG_LINE_BYTES:
            outlined = parse_answer(line, outlined=True)
            if outlined is not None and self._passes_on(outlined[0]):
                self._on_answer(*outlined)
                return
        usual = parse_answer(line)
        if usual is not None:
            self._on_answer(*usual)
            return
        try:
            message = parse_json(line)
            if isinstance(message, list) and message and all(isinstance(member, dict) for member in message):
                # MCP 2025-03-26, basic/index: a server may answer in a batch.
                for member in message:
                    self._on_line(encode_json(member))
                return
            kind = message_kind(message)
        except RpcError as error:
            line, message = self._rescue(line)
            if message is None:
                self._on_unreadable(line, error)
                return
            kind = "answer"
        if kind == "answer":
            self._on_answer(message, line)
        elif kind == "request" and self.era == "modern":
            # MCP 2026-07-28, basic/transports/stdio: servers send no requests, and we no answers.
            self.owner.on_noise("a request, which servers of 2026-07-28 do not send: %s" % message["method"])
        elif kind == "request":
            if message["method"] == "ping":
                self.answer(message["id"], {"result": {}})
            else:
                self.owner.on_question(message)
        elif message["method"] == "notifications/progress":
            self._on_progress(message)
        elif message["method"] == "notifications/subscriptions/acknowledged":
            self._on_acknowledged(message.get("params") or {})
        else:
            self.owner.on_notification(message)

    def _passes_on(self, message):
        """Is this a result that nobody here has to read the long strings of?"""
        call, result = self.in_flight.get(message["id"]), message["result"]
        return (call is not None and call.host is not None and call.method in CONTENT_METHODS and
                isinstance(result, dict) and result.get("resultType", "complete") == "complete" and
                "task" not in result)

    def _on_answer(self, message, line):
        wire_id, error = message["id"], message.get("error")
        if isinstance(error, dict) and not isinstance(error.get("message"), str):
            message, line = dict(message, error=dict(error, message=str(error.get("message", "no message")))), None
        call = self.in_flight.pop(wire_id, None) if is_valid_id(wire_id) else None
        if call is None and is_valid_id(wire_id) and wire_id in self.listens:
            for waiting in self.listens.pop(wire_id):
                self._settle_here(waiting, {"error": message.get("error") or RpcError(
                    INTERNAL_ERROR, "the server ended the subscription").as_object()})
            return
        if call is None:
            # Normal after a cancel: the answer and the cancel crossed on the wire.
            self.counters["lateAnswers"] += 1
            if is_valid_id(wire_id) and wire_id in self.ghosts:
                self.ghosts[wire_id].over = True
                self._lay_to_rest(self.ghosts[wire_id])
            return
        self.owner.on_taken(call)
        # First the answer, then the lease: what the answer leaves open (a task, a question to be
        # answered by a retry) must hold the instance before it can come to rest.
        lease, call.instance = call.instance, None
        call.over = True
        try:
            if not call.cancelled:
                call.finish(message, line)
                if self.is_alone:
                    self.owner.on_finished()
        except Exception:
            # Whatever there is in it that we cannot take: who asked gets an answer.
            self.owner.on_mistake(traceback.format_exc())
            call.on_finish(call, {"error": RpcError(
                INTERNAL_ERROR, "the server's answer cannot be passed on; mcpx's log has more").as_object()}, None)
        finally:
            self.owner.on_settled(call, lease)

    def _on_progress(self, message):
        params = message.get("params") or {}
        token = params.get("progressToken")
        call = self.in_flight.get(token) if is_valid_id(token) else None
        if call is None and is_valid_id(token):
            call = self.task_tokens.get(token)
        if call is None or call.cancelled or call.token is None:
            self.counters["droppedProgress"] += 1
            return
        call.active_at = time.monotonic()
        # MCP 2025-11-25, basic/utilities/progress: the value must increase.
        value = params.get("progress")
        if not isinstance(value, (int, float)) or (
                call.last_progress is not None and value <= call.last_progress):
            self.counters["droppedProgress"] += 1
            return
        call.last_progress = value
        call.host.on_progress(call, params)

    def _rescue(self, line):
        """An answer that noise was glued to, without a line end between, is still an answer."""
        for start in (b'{"jsonrpc"', b'{"result"', b'{"id"'):
            position = line.find(start, 1)
            if position > 0:
                try:
                    message = parse_json(line[position:])
                    if message_kind(message) == "answer":
                        self.owner.on_noise(line[:position].decode("utf-8", "replace"))
                        return line[position:], message
                except RpcError:
                    continue
        return line, None

    def _on_unreadable(self, line, error):
        self.owner.on_noise(line[:500].decode("utf-8", "replace"))
        self._fail_guessed(line[:OVERSIZE_HEAD_BYTES], line[-OVERSIZE_HEAD_BYTES:],
                           RpcError(INTERNAL_ERROR, "the server's answer cannot be read: %s" % error.message))

    def _on_oversize(self, line):
        self.owner.on_noise("a line of more than %d bytes" % line.size)
        self._fail_guessed(line.head, b"", LimitReached(
            "the server's answer has more than %d bytes; raise limits.lineBytes" % self.stream.lines.limit))

    def _fail_guessed(self, head, tail, error):
        wire_id = guess_id(head)
        if wire_id is None:
            match = re.search(rb'"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d+)\s*\}$', tail)
            wire_id = int(match.group(1)) if match else None
        call = self.in_flight.get(wire_id)
        if call is not None and not call.cancelled:
            del self.in_flight[wire_id]
            self.owner.on_settled(call)
            call.fail(error)


# ---------------------------------------------------------------------------
# Children: is the process alive; how does it end
#
# The only section that starts and signals processes. Knows nothing of messages. A child
# and everything that descends from it are gone when `on_gone` is called.
# ---------------------------------------------------------------------------

# (state, event) -> (next state, method called on the way). "exit" comes from the system,
# "stop" from the pool, "deadline" from the timer of the state, "clear" when nothing of
# the family is left.
CHILD_STEPS = {
    ("running", "stop"): ("closing", "_close_input"),
    ("running", "exit"): ("sweeping", "_sweep"),
    ("running", "kill"): ("killing", "_signal_kill"),
    ("closing", "deadline"): ("terminating", "_signal_term"),
    ("closing", "exit"): ("sweeping", "_sweep"),
    ("closing", "kill"): ("killing", "_signal_kill"),
    ("terminating", "deadline"): ("killing", "_signal_kill"),
    ("terminating", "exit"): ("sweeping", "_sweep"),
    ("terminating", "kill"): ("killing", "_signal_kill"),
    ("killing", "deadline"): ("killing", "_signal_kill"),
    ("killing", "exit"): ("sweeping", "_sweep"),
    ("sweeping", "deadline"): ("sweeping", "_sweep_harder"),
    ("sweeping", "clear"): ("gone", "_let_go"),
}
# Pairs that are fine and change nothing: being asked to stop twice, a timer that was due.
CHILD_IGNORED = {(state, "stop") for state in ("closing", "terminating", "killing", "sweeping", "gone")} | {
    (state, "kill") for state in ("killing", "sweeping", "gone")} | {("gone", "deadline")}


# The exit status of a process that is not our child.
UNKNOWN_STATUS = "unknown"
# How often an adopted process is looked at where the system cannot tell of its end.
ADOPTED_LOOK_S = 0.5


class Child:
    """The process of an instance, its pipes, its descendants and its record on disk."""

    DESCRIPTORS = ("pidfd",)

    def __init__(self, loop, instance_id, server_log, keep_patterns, graces, record_path):
        self.loop, self.instance_id, self.log = loop, instance_id, server_log
        self.keep_patterns, self.graces, self.record_path = keep_patterns, graces, record_path
        self.state, self.status, self.pid, self.start = "running", None, None, None
        self.stdout = self.stderr = None         # Streams; stdout's writing end is stdin
        self.stderr_tail = collections.deque(maxlen=20)
        self.secrets = ()                        # what is not to be written down of what it says
        self.family = {}                         # pid -> start, as far as seen
        self.hardest = None                      # strongest thing that was needed to end it
        self.on_exit = self.on_gone = None       # callbacks: (status), ()
        self.tmpdir = self.facts = None
        self.let_go_input = lambda then: then()  # have everybody else give up the writing end of its stdin
        self.program = None                      # what PATH found for its starter
        self.pidfd = None                        # of one that another daemon has started
        self._timer = None
        self._swept = 0

    def spawn(self, argv, env, cwd, limit, on_lines, on_stdout_end, on_rest):
        """Start the process. Raises StartFailed that names the command, the directory or PATH."""
        program = self._find_program(argv[0], env, cwd)
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        stderr_read, stderr_write = os.pipe()
        ours = (stdin_write, stdout_read, stderr_read)
        theirs = (stdin_read, stdout_write, stderr_write)
        try:
            # A session of its own: a Ctrl-C in some terminal does not reach it, and its
            # process group is its own pid.
            process = subprocess.Popen(argv, executable=program, stdin=stdin_read, stdout=stdout_write,
                                       stderr=stderr_write, env=env, cwd=cwd, start_new_session=True)
        except (OSError, ValueError) as error:
            for fd in ours:
                os.close(fd)
            raise StartFailed("%s cannot be started: %s" % (program, getattr(error, "strerror", None) or error))
        finally:
            for fd in theirs:
                os.close(fd)
        # We reap by pid; the object must neither wait nor warn.
        process.returncode = 0
        self.pid, self.program = process.pid, program
        self.start = process_start(self.pid)
        self.family = {self.pid: self.start}
        self.loop.on_exit(self.pid, self._exited)
        self.stdout = Stream(self.loop, stdout_read, stdin_write, limit, on_lines, on_stdout_end, on_rest, grows=True)
        self.stderr = Stream(self.loop, stderr_read, None, 65536, self._on_stderr, None,
                             lambda rest: self._on_stderr([rest]))

    def adopt(self, record, fds, limit, on_lines, on_stdout_end, on_rest):
        """Take over a running process that a dead daemon started; `fds` are our ends of its pipes."""
        stdin_write, stdout_read, stderr_read = fds
        self.pid, self.start, self.tmpdir = record["pid"], record["start"], record.get("tmpdir")
        self.program = record["ready"].get("program")
        self.family = {self.pid: self.start}
        self.family.update((pid, start) for pid, start in record.get("family") or ())
        self.stdout = Stream(self.loop, stdout_read, stdin_write, limit, on_lines, on_stdout_end, on_rest, grows=True)
        self.stderr = Stream(self.loop, stderr_read, None, 65536, self._on_stderr, None,
                             lambda rest: self._on_stderr([rest]))
        try:
            self.pidfd = os.pidfd_open(self.pid)
            self._watch_pidfd()
        except (AttributeError, OSError):
            self.loop.soon(self._watch_adopted)

    def resumed(self):
        """Go on in other code."""
        if self.pidfd is not None:
            os.set_inheritable(self.pidfd, False)
            self._watch_pidfd()

    def _watch_pidfd(self):
        self.loop.change(self.pidfd, 1, lambda _mask: self._adopted_exited())

    def _watch_adopted(self):
        """Where a process that is no child of ours can only be looked at."""
        if process_start(self.pid) != self.start:
            self._adopted_exited()
        else:
            self.loop.call_later(ADOPTED_LOOK_S, self._watch_adopted)

    def _adopted_exited(self):
        if self.pidfd is not None:
            self.loop.unwatch(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = None
        self._exited(UNKNOWN_STATUS)

    def _find_program(self, command, env, cwd):
        if cwd is not None and not os.path.isdir(cwd):
            raise StartFailed("the working directory %s does not exist; create it or change `cwd`" % cwd)
        path = env.get("PATH") or os.defpath
        program = shutil.which(command, path=path)
        if program is None and "/" in command and os.path.exists(command):
            raise StartFailed("%s is not executable; chmod +x it or name its interpreter as the command" % command)
        if program is None and "/" in command:
            raise StartFailed("the command %s does not exist" % command)
        if program is None:
            raise StartFailed("the command %s was not found in PATH (%s); install it or write its whole path"
                              % (command, path))
        return program

    def record(self, facts):
        """Write down what a later daemon must end if this one dies. Failing is not fatal."""
        self.facts = facts
        facts = dict(facts, id=self.instance_id, pid=self.pid, start=self.start, tmpdir=self.tmpdir,
                     family=sorted(self.family.items()))
        try:
            write_private_file(self.record_path, json.dumps(facts).encode("utf-8"))
        except OSError as error:
            self.loop.log.warning("the record of child %s cannot be written: %s", self.instance_id, error)

    def _on_stderr(self, lines):
        for line in lines:
            text = (line.head if isinstance(line, Oversize) else line).decode("utf-8", "replace").rstrip("\r")
            text = hide_secrets(text, self.secrets)
            self.stderr_tail.append(text[:500])
            self.log.write(text.encode("utf-8", "replace") + b"\n")

    # -- its end ---------------------------------------------------------------

    def stop(self):
        """End it politely: close stdin, then SIGTERM, then SIGKILL, each after its grace."""
        self._step("stop")

    def kill(self):
        """End it at once."""
        self._step("kill")

    def descriptors(self):
        """Return our ends of its pipes: stdin, stdout, stderr; () where one is closed."""
        fds = (self.stdout.write_fd, self.stdout.read_fd, self.stderr.read_fd)
        return () if None in fds else fds

    def look(self, table):
        """Remember the descendants that a process table shows while the child lives."""
        before = len(self.family)
        self.family.update(table.family(self.pid, self.instance_id))
        if len(self.family) != before and self.facts is not None and self.state == "running":
            self.record(self.facts)

    def _step(self, event):
        step = CHILD_STEPS.get((self.state, event))
        if step is None:
            assert (self.state, event) in CHILD_IGNORED, (self.state, event)
            return
        self.state, method = step
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        getattr(self, method)()

    def _deadline_in(self, seconds):
        self._timer = self.loop.call_later(seconds, lambda: self._step("deadline"))

    def _close_input(self):
        self.look(ProcessTable())
        self.let_go_input(self.stdout.end_output_when_flushed)
        self._deadline_in(self.graces[0])

    def _signal_term(self):
        self.hardest = "SIGTERM"
        self.look(ProcessTable())
        self._signal(signal.SIGTERM, self._survivors())
        self._deadline_in(self.graces[1])

    def _signal_kill(self):
        self.hardest = "SIGKILL"
        self.look(ProcessTable())
        self._signal(signal.SIGKILL, self._survivors())
        self._deadline_in(1.0)

    def _exited(self, status):
        self.status = status
        for stream in (self.stdout, self.stderr):
            stream.read_rest()
        self._step("exit")
        self.on_exit(status)

    def _sweep(self):
        """The child has exited; whatever descends from it must not stay."""
        self.stdout.close("the process has exited")
        self.stderr.close("the process has exited")
        self.look(ProcessTable())
        survivors = self._survivors()
        if not survivors:
            self.loop.soon(lambda: self._step("clear"))
            return
        self._signal(signal.SIGTERM, survivors)
        self._swept = time.monotonic()
        self._deadline_in(0.05)

    def _sweep_harder(self):
        survivors = self._survivors()
        waited = time.monotonic() - self._swept
        if not survivors or waited > self.graces[1] + 5:
            if survivors:
                self.loop.log.error("processes %s of %s cannot be ended", sorted(survivors), self.instance_id)
            self.loop.soon(lambda: self._step("clear"))
            return
        if waited > self.graces[1]:
            self.hardest = "SIGKILL"
            self._signal(signal.SIGKILL, survivors)
        self._deadline_in(0.1)

    def _survivors(self):
        """Return the pids of the family that still live and are not excluded by keepProcesses."""
        alive = []
        for pid, start in self.family.items():
            if process_start(pid) == start and start is not None:
                line = command_line(pid) if self.keep_patterns and pid != self.pid else ""
                if not any(fnmatch.fnmatch(line, pattern) for pattern in self.keep_patterns):
                    alive.append(pid)
        return alive

    def _signal(self, number, pids):
        for pid in pids:
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue

    def _let_go(self):
        if self.tmpdir:
            # A browser's profile has thousands of files: not in the loop.
            directory, self.tmpdir = self.tmpdir, None
            self.loop.in_thread(lambda: shutil.rmtree(directory, ignore_errors=True), lambda *_: self._let_go(), 60.0)
            return
        try:
            os.unlink(self.record_path)
        except OSError:
            # The state directory may be read-only or gone; a later daemon checks the pid.
            self.loop.log.debug("the record of %s was not removed", self.instance_id)
        self.on_gone()

    def describe_end(self):
        """Return how it ended, in words: "exit status 3", "signal SIGKILL"."""
        return describe_status(self.status)


def describe_status(status):
    """Return a wait status in words."""
    if status is None:
        return "still running"
    if status == UNKNOWN_STATUS:
        return "exit status unknown (adopted)"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return "signal %s" % signal.Signals(number).name
        except ValueError:
            return "signal %d" % number
    return "exit status %d" % os.WEXITSTATUS(status)


def start_helper(loop, command, keep, output, on_exit, text=b""):
    """Start a process of mcpx's own that gets the descriptors `keep`; returns its pid. Raises OSError.

    `output` is a descriptor for what it says, or None; `text` its whole input, which must fit
    into a pipe; on_exit(status) is called once.
    """
    output = subprocess.DEVNULL if output is None else output
    read_fd, write_fd = os.pipe()
    try:
        os.write(write_fd, text)
        process = subprocess.Popen(command, stdin=read_fd, stdout=output, stderr=output, pass_fds=keep, cwd="/",
                                   start_new_session=True)
    finally:
        os.close(read_fd)
        os.close(write_fd)
    process.returncode = 0               # reaped by pid, see Child.spawn
    loop.on_exit(process.pid, on_exit)
    return process.pid


def kill_helper(pid):
    """End a helper at once."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def write_private_file(path, data):
    """Write a file of mode 0600 so that a reader sees the old or the new content, whole."""
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        os.makedirs(directory, 0o700, exist_ok=True)
    temporary = "%s.%d.tmp" % (path, os.getpid())
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data) if len(data) < READ_BYTES else _write_all(fd, data)
    finally:
        os.close(fd)
    os.replace(temporary, path)


def _write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


class Orphans:
    """What daemons that died have left: found by their records, ended, and waited for.

    Only processes that a record names by pid, start time and boot, or that carry a
    recorded instance id in their environment, are ever signalled.
    """

    def __init__(self, loop, directory, graces, on_cleared):
        self.loop, self.directory, self.graces, self.on_cleared = loop, directory, graces, on_cleared
        self.pending = {}                # instance id -> (record, family) not yet gone
        self._started = time.monotonic()

    def remove_halves(self):
        """Remove files that a process was writing when it was killed."""
        for path in glob.glob(os.path.join(os.path.dirname(self.directory), "**", "*.tmp"), recursive=True):
            pid = path.split(".")[-2]
            if pid.isdigit() and (int(pid) == os.getpid() or process_start(int(pid)) is None):
                try:
                    os.unlink(path)
                except OSError:
                    continue

    def records(self):
        """Return the records of what dead daemons started."""
        boot, found = boot_id(), []
        for path in glob.glob(os.path.join(self.directory, "*.json")):
            record = self._read(path)
            if record is not None and not self._owner_lives(record, boot):
                found.append(dict(record, path=path))
        return found

    def find(self, adopted=()):
        """Begin to end what dead daemons have left, except the instances that were `adopted`."""
        self.remove_halves()
        boot, table = boot_id(), None
        for record in self.records():
            if record["id"] in adopted:
                continue
            family = {}
            if record.get("boot") == boot:
                table = table or ProcessTable()
                family = self._family(record, table)
            if family:
                self.pending[record["id"]] = (record, family)
                self.loop.log.info("ending what a dead daemon left of %s: pids %s", record["id"], sorted(family))
                self._signal(family, signal.SIGTERM)
            else:
                self._forget(record)
        if self.pending:
            self.loop.call_later(0.05, self._check)

    def holds(self, server):
        """Is something of this server still to be ended, so that nothing may take its place?"""
        return any(record.get("server") == server for record, _ in self.pending.values())

    def _read(self, path):
        try:
            with open(path, encoding="utf-8") as file:
                record = json.load(file)
            if isinstance(record, dict) and isinstance(record.get("id"), str):
                return record
        except (OSError, ValueError):
            self.loop.log.warning("the record %s cannot be read; removing it", path)
        try:
            os.unlink(path)
        except OSError:
            self.loop.log.debug("the record %s was not removed", path)
        return None

    def _owner_lives(self, record, boot):
        owner = record.get("owner") or [None, None]
        return (record.get("boot") == boot and isinstance(owner[0], int) and owner[0] != os.getpid()
                and process_start(owner[0]) == owner[1])

    def _family(self, record, table):
        pid, start = record.get("pid"), record.get("start")
        row = table.rows.get(pid)
        known = row is not None and row[3] == start
        family = table.family(pid if known else -1, record["id"])
        for pair in record.get("family") or ():
            # What had left the family in every visible way was seen while it had not.
            if isinstance(pair, list) and len(pair) == 2 and pair[0] in table.rows and (
                    table.rows[pair[0]][3] == pair[1]):
                family[pair[0]] = pair[1]
        keep = record.get("keep") or []
        return {p: s for p, s in family.items()
                if p == pid or not any(fnmatch.fnmatch(command_line(p), pattern) for pattern in keep)}

    def _signal(self, family, number):
        for pid, start in family.items():
            if process_start(pid) == start:
                try:
                    os.kill(pid, number)
                except OSError:
                    continue

    def _check(self):
        waited = time.monotonic() - self._started
        for name, (record, family) in list(self.pending.items()):
            left = {pid: start for pid, start in family.items() if process_start(pid) == start}
            if left and waited > self.graces[1]:
                self._signal(left, signal.SIGKILL)
            if not left or waited > self.graces[1] + 5:
                del self.pending[name]
                self._forget(record)
        if self.pending:
            self.loop.call_later(0.1, self._check)
        else:
            self.on_cleared()

    def _forget(self, record):
        if record.get("tmpdir"):
            shutil.rmtree(record["tmpdir"], ignore_errors=True)
        try:
            os.unlink(record["path"])
        except OSError:
            self.loop.log.debug("the record %s was not removed", record["path"])


# ---------------------------------------------------------------------------
# Keeping: what outlives a daemon that is killed
#
# Two things that SIGKILL cannot take away. A holder, a tiny process that has copies of our
# ends of the children's pipes and never reads them; it ends them all when no daemon comes
# back. And a journal, a file in shared memory that says which requests were in flight: a
# store into it is done even if the next instruction never runs. Knows no hosts; what is
# made of it is the pool's business.
# ---------------------------------------------------------------------------

# Runs by itself, from its stdin: what it imports is what it weighs. Messages have 65 bytes: a letter
# and a name. h hold (with descriptors), d drop, g give all. One owner at a time; a second
# one waits in the backlog, as the kernel may close a dead owner's descriptors after its lock.
HOLDER_CODE = '''
import _socket, posix, select, sys, time
listener, grace = _socket.socket(fileno=int(sys.argv[2])), float(sys.argv[3])
rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)
held, owner, had_owner, deadline = {}, None, False, time.monotonic() + grace
def receive():
    data, fds = b"", ()
    while len(data) < 65:
        piece, ancillary, _, _ = owner.recvmsg(65 - len(data), _socket.CMSG_SPACE(64))
        for level, kind, packed in ancillary:
            fds = tuple(int.from_bytes(packed[n:n + 4], sys.byteorder) for n in range(0, len(packed) // 4 * 4, 4))
        if not piece:
            raise OSError
        data += piece
    return data[:1], data[1:], fds
def forget(name):
    for fd in held.pop(name, ()):
        posix.close(fd)
def serve():
    letter, name, fds = receive()
    if letter == b"g":
        for name, fds in list(held.items()):
            owner.sendmsg([b"e" + name], [rights + (b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds),)])
            owner.recv(1)
        owner.sendall(b"z" + bytes(64))
        return
    forget(name)
    if letter == b"h":
        held[name] = fds
    owner.sendall(b"k")
while owner is not None or (time.monotonic() < deadline and (held or not had_owner)):
    poller = select.poll()
    poller.register(owner if owner is not None else listener, select.POLLIN)
    for fds in held.values():
        poller.register(fds[0], 0)
    wait = None if owner is not None else max(0, int((deadline - time.monotonic()) * 1000) + 1)
    for fd, _ in poller.poll(wait):
        for name in [name for name, fds in held.items() if fds[0] == fd]:
            forget(name)
        if owner is None and fd == listener.fileno():
            owner, had_owner = _socket.socket(fileno=listener._accept()[0]), True
        elif owner is not None and fd == owner.fileno():
            try:
                serve()
            except OSError:
                owner.close()
                owner, deadline = None, time.monotonic() + grace
'''
HOLDER_NAME_BYTES = 64
# What a holder is given to answer when a daemon starts and asks for everything.
HOLDER_WAIT_S = 2.0


class Holder:
    """Our side of the process that keeps copies of the children's pipes."""

    ADDED = {"_sent": 0}

    def __init__(self, loop, log, path, grace):
        self.loop, self.log, self.path, self.grace = loop, log, path, grace
        self.connection = None
        self.held = {}                   # name -> who tells our descriptors that it has copies of
        self._queue = collections.deque()             # (letter, name, child, callback), until it is done
        self._sent = 0                   # how many of these are on their way
        self._failures = 0

    def take(self):
        """At a start: connect to the holder of a dead daemon and return {name: descriptors}.

        Blocks, bounded: nothing is served before it is known what there is.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(HOLDER_WAIT_S)
        found = {}
        try:
            connection.connect(self.path)
            connection.sendall(b"g" + bytes(HOLDER_NAME_BYTES))
            while True:
                data, fds = self._receive(connection)
                if data[:1] == b"z":
                    break
                found[data[1:].rstrip(b"\0").decode("ascii")] = fds
                connection.sendall(b"k")
        except OSError as error:
            for fds in found.values():
                for fd in fds:
                    os.close(fd)
            connection.close()
            self.log.debug("no holder of a dead daemon: %s", error)
            return {}
        self.connection = connection
        self._watch()
        self.held = dict.fromkeys(found)
        return found

    def _receive(self, connection):
        data, fds = b"", []
        while len(data) < 1 + HOLDER_NAME_BYTES:
            piece, more, _, _ = socket.recv_fds(connection, 1 + HOLDER_NAME_BYTES - len(data), 8)
            for fd in more:
                os.set_inheritable(fd, False)
            fds += more
            if not piece:
                raise OSError("it hung up")
            data += piece
        return data, tuple(fds)

    def hold(self, name, child):
        """Give it copies of a child's pipes."""
        known, self.held[name] = name in self.held, child
        if not known:
            self._ask(b"h", name, child, None)

    def drop(self, name, then=None):
        """Have it close its copies; `then()` when that is done, or there is none."""
        if name not in self.held:
            if then is not None:
                then()
            return
        del self.held[name]
        self._ask(b"d", name, None, then)

    def close(self):
        """It ends by itself when it has nothing and nobody."""
        if self.connection is not None:
            self.loop.unwatch(self.connection.fileno())
            self.connection.close()
            self.connection = None
        try:
            os.unlink(self.path)
        except OSError:
            self.log.debug("there was no door of a holder to remove")

    def resumed(self):
        """Go on in other code."""
        if self.connection is not None:
            self.connection.set_inheritable(False)
            self._watch()

    def renew(self):
        """The next daemon would not find the door of this one: another gets everything."""
        if self.connection is not None and not os.path.exists(self.path):
            self._lost("its door was removed")

    def _ask(self, letter, name, child, then):
        if self.grace <= 0 or self._failures > 3:
            if then is not None:
                then()
            return
        self._queue.append((letter, name, child, then))
        if self.connection is None:
            self._start()
        else:
            self._send()

    def _start(self):
        """Start a holder and connect to it; the connection waits in its backlog until it is up."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if os.path.exists(self.path):
                os.unlink(self.path)
            old_mask = os.umask(0o177)
            try:
                listener.bind(self.path)
            finally:
                os.umask(old_mask)
            listener.listen(8)
            command = [sys.executable, "-I", "-S", "-c", "import sys; exec(sys.stdin.read())", "mcpx-holder",
                       str(listener.fileno()), str(self.grace)]
            start_helper(self.loop, command, (listener.fileno(),), None, self._ended, HOLDER_CODE.encode())
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(self.path)
        except OSError as error:
            self._failures = 99
            self.log.warning("children will not outlive a crash of this daemon: no holder (%s)", error)
            self._give_up()
            return
        finally:
            listener.close()
        self.connection = connection
        self._watch()
        self._send()

    def _ended(self, status):
        self.log.debug("a holder has ended: %s", describe_status(status))

    def _watch(self):
        self.connection.setblocking(False)
        self.loop.change(self.connection.fileno(), 1, lambda _mask: self._on_ready())

    def _send(self):
        """Send what the connection takes: no child waits for those before it, as the daemon may die meanwhile."""
        while self._sent < len(self._queue):
            letter, name, child, _ = self._queue[self._sent]
            fds = child.descriptors() if child is not None else ()
            # What has closed a pipe meanwhile is not kept.
            message = (letter if fds else b"d") + name.encode("ascii").ljust(HOLDER_NAME_BYTES, b"\0")
            try:
                socket.send_fds(self.connection, [message], list(fds)) if fds else self.connection.send(message)
            except BlockingIOError:
                return                   # the rest when it has done some
            except OSError as error:
                self._lost(error)
                return
            self._sent += 1

    def _on_ready(self):
        try:
            data = self.connection.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost("it has ended")
            return
        self._failures = 0
        done = [self._queue.popleft()[3] for _ in data if self._queue]
        self._sent = max(0, self._sent - len(done))
        self._send()
        for then in done:
            if then is not None:
                then()

    def _lost(self, reason):
        """Losing it costs nothing as long as we live: another one gets everything anew."""
        self.log.warning("the holder is gone (%s); another one is started", reason)
        self.loop.unwatch(self.connection.fileno())
        self.connection.close()
        self.connection = None
        self._failures += 1
        self._give_up()
        for name, child in list(self.held.items()):
            if child is not None:
                self._ask(b"h", name, child, None)

    def _give_up(self):
        queue, self._queue, self._sent = self._queue, collections.deque(), 0
        for _, _, _, then in queue:
            if then is not None:
                then()


# States of an entry of the journal. What is on its way into the pipe while the daemon dies may
# have arrived or not; an answer that was taken from the pipe may not have been delivered.
FREE, QUEUED, WRITING, WRITTEN, TAKEN, UNCERTAIN = range(6)
NO_TOKEN = bytes(8)
NO_CHILD = 0xFFFF
JOURNAL_MAGIC = b"mcpx-1"
# Magic, boot, from byte 64 on who writes it, and last whether there ever was no room.
JOURNAL_HEAD, JOURNAL_WRITER = 128, 64
JOURNAL_CHILDREN, CHILD_FORMAT = 512, "<40sQBB14x"
JOURNAL_CALLS, CALL_FORMAT = 8192, "<BBHBxxxQ8s8s"


class Journal:
    """Which requests of hosts are at which child, under which id: one entry each, in shared memory."""

    def __init__(self, path, boot, writer, log):
        self.path, self.boot, self.writer, self.log = path, boot, writer, log
        self.former = None               # the incarnation of the daemon that wrote it before
        self.child_size, self.call_size = struct.calcsize(CHILD_FORMAT), struct.calcsize(CALL_FORMAT)
        self.calls_at = JOURNAL_HEAD + JOURNAL_CHILDREN * self.child_size
        self.size = self.calls_at + JOURNAL_CALLS * self.call_size
        self.map = None
        self.is_new = True               # there was none of this boot
        self.children = {}               # instance id -> number
        self.free = []                   # numbers of entries, to be used from the end
        self.open()

    def taken_along(self):
        """The map is opened anew by other code."""
        return dict(self.__dict__, map=None)

    def resumed(self):
        """Go on in other code."""
        self._map()

    def open(self):
        """Open the journal; what it says of an earlier boot means nothing."""
        if not self._map():
            return
        head = JOURNAL_MAGIC + self.boot.encode()[:40]
        self.is_new = self.map[:len(head)] != head
        if self.is_new:
            self.map[:] = bytes(self.size)
            self.map[:len(head)] = head
        self.former = self.map[JOURNAL_WRITER:JOURNAL_HEAD - 1].rstrip(b"\0").decode("ascii", "replace")
        self.children = {child[0]: number for number, child in self._children() if child[0]}
        self.free = [n for n in reversed(range(JOURNAL_CALLS)) if self.map[self.calls_at + n * self.call_size] == FREE]

    def _map(self):
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(fd).st_size != self.size:
                    os.ftruncate(fd, 0)
                    # A hole would be SIGBUS at the first store, where the file system is full.
                    _write_all(fd, bytes(self.size))
                self.map = mmap.mmap(fd, self.size)
            finally:
                os.close(fd)
            return True
        except (OSError, ValueError) as error:
            self.log.warning("there is no journal (%s): after a crash, calls in flight count as lost", error)
            return False

    def renew(self):
        """The file was removed under us: what it says goes into another one."""
        if self.map is not None and not os.path.exists(self.path):
            old = self.map
            if self._map():
                self.map[:] = old[:]
                old.close()

    def remove(self):
        """An orderly end leaves nothing to look up."""
        if self.map is not None:
            self.map.close()
            self.map = None
        try:
            os.unlink(self.path)
        except OSError:
            self.log.debug("there was no journal to remove")

    def take_over(self):
        """From here on it is this daemon's: what it does not say was never handed on by this one."""
        if self.map is not None:
            name = self.writer.encode()[:JOURNAL_HEAD - 1 - JOURNAL_WRITER]
            self.map[JOURNAL_WRITER:JOURNAL_HEAD - 1] = name.ljust(JOURNAL_HEAD - 1 - JOURNAL_WRITER, b"\0")

    def clear(self):
        """Begin anew with the calls; the children stay."""
        self.map[self.calls_at:] = bytes(self.size - self.calls_at)
        self.map[JOURNAL_HEAD - 1] = 0
        self.free = list(reversed(range(JOURNAL_CALLS)))

    def overflowed(self):
        """Was there ever a call without room here? Then what is not in it proves nothing."""
        return self.map[JOURNAL_HEAD - 1] == 1

    # -- children -------------------------------------------------------------------

    def _children(self):
        for number in range(JOURNAL_CHILDREN):
            name, next_id, torn, reading = struct.unpack_from(CHILD_FORMAT, self.map,
                                                              JOURNAL_HEAD + number * self.child_size)
            yield number, (name.rstrip(b"\0").decode("ascii"), next_id, torn, reading)

    def child(self, name):
        """Return (last id, torn, reading) of a child, or None."""
        number = self.children.get(name)
        if number is None or self.map is None:
            return None
        return struct.unpack_from(CHILD_FORMAT, self.map, JOURNAL_HEAD + number * self.child_size)[1:]

    def add_child(self, name):
        """Return the number of a child's entry, made if there is none; None where there is no room."""
        if self.map is None:
            return None
        if name not in self.children:
            # Nor one that entries name which are not settled yet: they are of a child before.
            used = set(self.children.values()) | {call[2] for _, call in self.calls()}
            number = next((n for n in range(JOURNAL_CHILDREN) if n not in used), None)
            if number is None:
                self.map[JOURNAL_HEAD - 1] = 1
                return None
            struct.pack_into(CHILD_FORMAT, self.map, JOURNAL_HEAD + number * self.child_size, name.encode(), 0, 0, 0)
            self.children[name] = number
        return self.children[name]

    def remove_child(self, name):
        """A child has gone."""
        number = self.children.pop(name, None)
        if number is None or self.map is None:
            return
        struct.pack_into(CHILD_FORMAT, self.map, JOURNAL_HEAD + number * self.child_size, b"", 0, 0, 0)

    # -- calls ------------------------------------------------------------------------

    def calls(self):
        """Yield (mark, (state, plain, child's number, times sent, wire id, token, key)) of all entries in use."""
        for mark in range(JOURNAL_CALLS):
            if self.map[self.calls_at + mark * self.call_size] != FREE:
                yield mark, struct.unpack_from(CALL_FORMAT, self.map, self.calls_at + mark * self.call_size)

    def enter(self, number, wire_id, token, key, plain, sends):
        """Write a call down before its bytes are queued for the `sends`th time; returns its mark, None without room."""
        if self.map is None:
            return None
        if not self.free:
            self.map[JOURNAL_HEAD - 1] = 1
            return None
        mark = self.free.pop()
        struct.pack_into(CALL_FORMAT, self.map, self.calls_at + mark * self.call_size, QUEUED, plain, number, sends,
                         wire_id, token, key)
        return mark

    def set(self, mark, state):
        """Note how far a call has come."""
        if self.map is not None:
            self.map[self.calls_at + mark * self.call_size] = state

    def orphan(self, mark):
        """The child of an entry has gone: from here on its number says nothing."""
        if mark is not None and self.map is not None:
            struct.pack_into("<H", self.map, self.calls_at + mark * self.call_size + 2, NO_CHILD)

    def settle(self, call):
        """Free the entry of a call that has its answer, or needs none."""
        mark, call.mark = call.mark, None
        self.release(mark)

    def release(self, mark):
        """Free an entry."""
        if mark is not None and self.map is not None and self.map[self.calls_at + mark * self.call_size] != FREE:
            self.map[self.calls_at + mark * self.call_size] = FREE
            self.free.append(mark)


def journal_key(host_id):
    """Return 8 bytes for a request id of a host."""
    if type(host_id) is int and 0 <= host_id < 1 << 56:
        return b"n" + host_id.to_bytes(7, "little")
    return hashlib.blake2b(encode_json(host_id), digest_size=8).digest()


class PipeMarks:
    """What the journal says of one child's pipes, kept right by its stream."""

    def __init__(self, journal, name):
        self.journal, self.name = journal, name
        self.number = journal.add_child(name)
        self.unwritten = collections.deque()          # (offset of the end in the stream, call)
        self._torn = self._reading = None    # what a daemon before has left there is not known
        self._writing = 0                # how many of them are on their way

    def _at(self, offset):
        return JOURNAL_HEAD + self.number * self.journal.child_size + offset

    def sending(self, wire_id):
        """An id is used from here on, whatever happens."""
        if self.number is not None and self.journal.map is not None:
            struct.pack_into("<Q", self.journal.map, self._at(40), wire_id)

    def queued(self, end, call):
        """A call's bytes end at this offset."""
        self.unwritten.append((end, call))

    def before_write(self, end, size):
        """Bytes up to an offset are about to go into the pipe; more than PIPE_BUF may go in half."""
        for last, call in self.unwritten:
            self._set(call, WRITING)
            self._writing += 1
            if last >= end:
                break
        if size > PIPE_BUF:
            self._set_torn(1)

    def after_write(self, total, whole):
        """So many bytes have gone in; `whole` says that they end with a line, None that nothing was written."""
        while self.unwritten and self.unwritten[0][0] <= total:
            self._set(self.unwritten.popleft()[1], WRITTEN)
            self._writing -= 1
        for number in range(max(0, self._writing)):
            self._set(self.unwritten[number][1], QUEUED)
        self._writing = 0
        if whole is not None:
            self._set_torn(0 if whole else 1)

    def _set(self, call, state):
        if call.mark is not None:
            self.journal.set(call.mark, state)

    def _set_torn(self, value):
        if value != self._torn and self.number is not None and self.journal.map is not None:
            self._torn = value
            self.journal.map[self._at(48)] = value

    def reading(self, value):
        """Answers are in our hands, or half of one is."""
        if value != self._reading and self.number is not None and self.journal.map is not None:
            self._reading = value
            self.journal.map[self._at(49)] = 1 if value else 0

    def forget_reading(self):
        """What was half read by a dead daemon has been dealt with."""
        self._reading = True
        self.reading(False)


# ---------------------------------------------------------------------------
# Pool: which instance, now, later or never
#
# Owns every Slot, Instance and waiting call; nobody else keeps a reference across a turn of
# the loop. An instance is in exactly one of the states of INSTANCE_STEPS. `submit` and
# `_settled` are the only doors of a lease, so at rest, leases held == calls in flight == 0.
# Knows hosts only as opaque owners, and never words a result.
# ---------------------------------------------------------------------------

# A server has mostly ended its work this soon after a cancel; tools that are known to ask
# count for all of cancelGrace.
GHOST_S = 2.0
# A call whose log messages could be taken for another host's waits this long, and then goes all the same.
LOG_TURN_S = 2.0
# A package launcher that has its server up this soon did not install anything.
QUICK_LAUNCH_S = 2.0
# Between two looks at the descendants of all children, while there are calls.
LOOK_EVERY_S = 5.0
# After its stdout ended, a process mostly exits; its status makes the better message.
EXIT_WAIT_S = 0.3
# A server that ran this long is not failing to start, however it ended.
LONG_UPTIME_S = 60.0

INSTANCE_STEPS = {
    ("warm", "take"): "starting",
    ("warm", "stop"): "stopping",
    ("warm", "exit"): "down",
    ("starting", "ready"): "idle",
    ("starting", "stop"): "stopping",
    ("starting", "exit"): "down",
    ("idle", "lease"): "busy",
    ("busy", "rest"): "idle",
    ("idle", "stop"): "stopping",
    ("busy", "stop"): "stopping",
    ("idle", "exit"): "down",
    ("busy", "exit"): "down",
    ("stopping", "exit"): "down",
}


class FairQueue:
    """Waiting calls, taken in turn by host, in order within a host."""

    def __init__(self):
        self._by_host = collections.OrderedDict()
        self._count = 0

    def __len__(self):
        return self._count

    def push(self, call, first=False):
        """Add a call at the end (or the start) of its host's line."""
        line = self._by_host.setdefault(call.party, collections.deque())
        line.appendleft(call) if first else line.append(call)
        self._count += 1

    def pop(self):
        """Return the next call; the host it came from goes to the end of the round."""
        host, line = next(iter(self._by_host.items()))
        call = line.popleft()
        self._count -= 1
        if line:
            self._by_host.move_to_end(host)
        else:
            del self._by_host[host]
        return call

    def remove(self, call):
        """Take a call out; returns whether it was in."""
        line = self._by_host.get(call.party)
        if line is None or call not in line:
            return False
        line.remove(call)
        self._count -= 1
        if not line:
            del self._by_host[call.party]
        return True

    def drain(self):
        """Return all calls and empty the queue."""
        calls = [call for line in self._by_host.values() for call in line]
        self._by_host.clear()
        self._count = 0
        return calls


class Instance:
    """One running copy of a server: a child, the upstream on its pipes, and its lease count."""

    def __init__(self, pool, instance_id, definition, capabilities):
        self.pool, self.id, self.definition, self.capabilities = pool, instance_id, definition, capabilities
        self.slot = None
        self.state = "warm"
        self.child = self.upstream = None
        self.started_at, self.started_wall = time.monotonic(), time.time()
        self.used_at = self.started_at
        self.calls = 0                   # calls that were ever sent, mcpx's own not counted
        self.answered = 0
        self.leases = 0                  # calls in flight, mcpx's own not counted
        self.users = set()               # sessions that it holds state for
        self.callers = set()             # hosts that ever called it, as far as two
        self.noise = 0
        self.first_noise = None
        self.stop_reason = None
        self.unresponsive = False
        self.schema = self.schema_era = None          # see SchemaStore.of_instance
        self.own_schema = None           # once it has said that its lists changed: see SchemaStore
        self.rechecks = {}               # change notification -> came again meanwhile
        self.questions = 0               # how many of its questions are open
        self.orphans = 0                 # calls of a dead daemon whose hosts are not back
        self.change_due = False          # see Pool.note_change
        self.was_reading = False         # that daemon had something of its output in its hands
        self.check_due = False           # exclusive: its lists are fetched between two calls
        self.waits_for_check = False     # its lists are being fetched for the schema cache
        self._watch = None
        self._pinged_at = None

    def step(self, event):
        """Change the state; a pair that is not in the table is a mistake of ours."""
        self.state = INSTANCE_STEPS[(self.state, event)]

    @property
    def pid(self):
        """The child's process id."""
        return self.child.pid

    def call_later(self, delay, callback):
        """Call back after a while; returns the Timer."""
        return self.pool.loop.call_later(delay, callback)

    # -- callbacks of the upstream ---------------------------------------------

    def on_question(self, message):
        """The server asks something; whose question it is, is told elsewhere."""
        self.pool.listener.on_question(self, message)

    def on_notification(self, message):
        """The server tells something."""
        self.pool.listener.on_notification(self, message)

    def on_sending(self, call):
        """A request is about to be queued: write it down for who comes after a crash."""
        marks = self.child.stdout.marks
        if marks is None:
            return
        marks.sending(call.wire_id)
        if call.host is not None and marks.number is not None:
            token = token_of(call)
            plain = (call.message is not None and call.message.get("method") == call.method and not call.rounds
                     and not call.opts_in)
            key = journal_key(call.host_id) if call.host_id is not None else NO_TOKEN
            old = call.mark              # of its first sending, which a dead daemon has seen
            call.mark = marks.journal.enter(marks.number, call.wire_id, token, key, plain, call.attempts)
            marks.journal.release(old)
            if call.mark is not None and token != NO_TOKEN:
                call.host.link.note_marked(call)

    def on_taken(self, call):
        """An answer has been taken from the pipe."""
        if call.mark is not None:
            self.pool.journal.set(call.mark, TAKEN)

    def on_finished(self):
        """An answer is queued: it need not wait until the lease is given back."""
        self.pool.loop.flush()

    def on_settled(self, call, lease=None):
        """A request is no longer in flight: give its lease back (`lease`, where the call is on its way again)."""
        if (lease or call.instance) is self:
            self.pool.give_back(self, call)
        else:
            self.pool.wake(self.slot)

    def on_mistake(self, text):
        """Something of ours went wrong with one line of the server."""
        self.pool.log.error("internal error, please report it: %s", text)

    def on_ghost_gone(self):
        """A cancelled call is surely over: it may now be plain whose a question is."""
        if self.slot is not None:
            self.pool.listener.on_lease_back(self)

    def on_noise(self, text):
        """A line on stdout that is not MCP: logged and skipped."""
        self.noise += 1
        text = hide_secrets(text, self.definition.secrets)
        self.pool.counters["noiseLines"] += 1
        if self.first_noise is None:
            self.first_noise = text
        if self.noise <= 100:
            self.pool.log.warning("server %s wrote a line that is no MCP message: %s",
                                  self.definition.server.name, text[:200])
        if self.state == "starting" and text.lower().startswith("content-length:"):
            self.pool.start_failed(self, StartFailed(
                "it frames messages with Content-Length headers; MCP over stdio wants one JSON object per line"))


class Slot:
    """The place of one (server, definition, key): its instance, if any, and who waits for it."""

    def __init__(self, pool, definition, key, scope, config_generation):
        self.pool, self.definition, self.key, self.scope = pool, definition, key, scope
        # Unique among slots; what is in it never changes.
        self.name = (definition.server.name, definition.digest, key.text)
        self.generation = config_generation
        self.server = definition.server
        self.queue = FairQueue()
        self.askers = FairQueue()        # calls of tools that ask or log, while another host's is in flight
        self.waiters = []                # callbacks(error) of those who want it started only
        self.instance = None
        self.leaving = None              # the instance before this one, until it is gone
        self.capabilities = {}           # what the next start declares
        self.hosts = set()               # connected hosts that have used it
        self.subscriptions = {}          # uri -> set of hosts
        self.level = None                # most verbose log level that somebody wants
        self.tasks = set()               # upstream ids of tasks that have not ended
        self.named = False               # its session was named by a caller
        self.next_era = None             # the era of the next start, after the other one did not do
        self.eras_tried = set()          # since the last start that worked
        self.launch_repeated = False     # another installation of its package was met, and it was tried again
        self.held = False                # no new calls while it is found out who was asked
        self.ended = None                # why no new call comes, once nothing may
        self.last_error = None
        self.used_at = time.monotonic()
        self.idle_timer = self.capacity_timer = self.start_timer = None

    def waiting(self):
        """How many calls wait for the instance, or for their turn on it."""
        return len(self.queue) + len(self.askers)

    def at_rest(self):
        """Is nothing going on or open here?"""
        return not (self.queue or self.askers or self.waiters or self.subscriptions or self.tasks
                    or (self.instance and (self.instance.leases or self.instance.waits_for_check
                                           or self.instance.check_due)))


def token_of(call):
    """Return what tells the shim that a call came from, also to another daemon; NO_TOKEN where there is none."""
    return NO_TOKEN if call.seq is None else getattr(getattr(call.host, "link", None), "token", NO_TOKEN)


_NAME, _TEXT, _LIST, _DICT = (str,), (str, type(None)), (list,), (dict,)
# What the record of an instance must say, so that another daemon can go on with it: member -> types.
RECORD_SHAPE = {"id": _NAME, "server": _NAME, "key": _NAME, "digest": _NAME, "pid": (int,), "ready": _DICT}
READY_SHAPE = {"shape": _NAME, "argv": _LIST, "cwd": _TEXT, "era": _TEXT, "entry": _NAME,
               "scope": _NAME, "named": (bool,),
               "level": _TEXT, "subscriptions": _LIST, "declared": _DICT, "upstream": _DICT, "users": _LIST,
               "calls": (int,), "started": (int, float), "questions": _LIST}
UPSTREAM_SHAPE = {"era": _NAME, "revision": _NAME, "capabilities": _DICT, "info": _DICT, "instructions": _TEXT}
# An open question: its id and method; where it waits for a person its params, why, and until when.
QUESTION_SHAPES = (((str, int), _NAME), ((str, int), _NAME, _DICT, _NAME, (int, float)))


def has_shape(value, shape):
    """Has an object all these members, and has each one of the types?"""
    return isinstance(value, dict) and all(
        name in value and isinstance(value[name], types) for name, types in shape.items())


def is_adoptable(record):
    """Does a record say all that it takes to go on with an instance? Another version may have written it."""
    if not (has_shape(record, RECORD_SHAPE) and has_shape(record["ready"], READY_SHAPE)
            and has_shape(record["ready"]["upstream"], UPSTREAM_SHAPE)):
        return False
    ready = record["ready"]
    return all(isinstance(text, str) for name in ("subscriptions", "users", "argv") for text in ready[name]) and all(
        isinstance(question, list) and any(
            len(question) == len(shape) and all(map(isinstance, question, shape)) for shape in QUESTION_SHAPES)
        for question in ready["questions"])


# So long the calls that a dead daemon had in flight wait for their hosts to come back.
ORPHAN_WAIT_S = 10.0


class Orphan:
    """A call that a dead daemon had in flight: where it is, how sure that is, its answer if that came early."""

    ADDED = {"sends": 1}

    def __init__(self, instance, wire_id, state, plain, call, sends=1):
        self.instance, self.wire_id, self.state, self.plain, self.call = instance, wire_id, state, plain, call
        self.sends = sends               # how often it was handed on, this time included
        self.answer = None

    def answered(self, _call, message, line):
        """Its answer came before its host was back."""
        self.answer = (message, line)


COUNTERS = ("lateAnswers", "noiseLines", "degraded", "droppedLogs", "droppedProgress", "droppedNotifications",
            "droppedTaskStatus", "unsolicitedAnswers")


class Backoff:
    """When a definition that keeps failing may be started again."""

    __slots__ = ("failures", "next_at", "error")

    def __init__(self):
        self.failures, self.next_at, self.error = 0, 0.0, None


class Pool:
    """Instances by (server, definition, key): lease, queue, idle, caps, back-off, health.

    listener.on_question / on_notification / on_ready / on_gone(instance) are told what
    happens on instances; listener.waiting_hosts(instance) tells whose calls wait for answers,
    listener.asking_parties(instance) who was asked a moment ago.
    """

    def __init__(self, loop, log, config, incarnation, directories):
        self.loop, self.log, self.config = loop, log, config
        self.incarnation, self.directories = incarnation, directories
        self.listener = None
        self.slots = {}                  # Slot.name -> Slot
        self.by_server = {}              # server name -> set of Slot
        self.instances = {}              # instance id -> Instance, until its family is gone
        self.warm = {}                   # (server, digest) -> [Instance]
        self.backoffs = {}               # (server, digest) -> Backoff
        self.counters = collections.Counter(dict.fromkeys(COUNTERS, 0))
        self.lost_state = collections.OrderedDict()   # (server, key) -> (reason, sessions)
        self.waiting_for_capacity = []   # slots, oldest first
        self.generations = collections.Counter()      # server -> how often its entry changed
        self.cold_launches = {}          # package launcher key -> slot that starts first
        self.launched = set()            # launcher keys that have come up once
        self.logs = {}                   # server -> RotatedFile
        self.deaths = collections.Counter()           # server -> instances that ended by themselves
        self.last_errors = {}            # server -> how the last start or instance failed
        self.draining = None             # reason, once nothing may be started any more
        self.holder = self.journal = None
        self.recovered = None            # (token, key) -> Orphan, after a crash of the daemon before
        self._next_instance = 0
        self._looked_at, self._looks = 0.0, False
        graces = (config.get("stop.eofGrace"), config.get("stop.termGrace"))
        self.orphans = Orphans(loop, directories["children"], graces, self._orphans_cleared)

    # -- doors -----------------------------------------------------------------

    def slot_for(self, definition, key, capabilities, identity):
        """Return the slot of a caller, made if there is none."""
        name = (definition.server.name, definition.digest, key.text)
        slot = self.slots.get(name)
        if slot is None:
            scope = self.config.get("scope", definition.server)
            slot = Slot(self, definition, key, scope, self.generations[definition.server.name])
            self.slots[name] = slot
            self.by_server.setdefault(definition.server.name, set()).add(slot)
        if slot.instance is None:
            # The next start is for this caller: its environment and what it can be asked.
            slot.definition, slot.capabilities = definition, capabilities
            slot.server, slot.scope = definition.server, self.config.get("scope", definition.server)
            slot.generation = self.generations[definition.server.name]
        elif slot.definition.env is None:
            # Should the adopted instance end, the next start is for this caller; it has the same secrets.
            slot.definition = slot.instance.definition = definition
            slot.instance.child.secrets = definition.secrets
        slot.named = slot.named or identity.named
        if slot.generation == self.generations[definition.server.name]:
            slot.ended = None            # else its instance ends as soon as it is idle, with the old entry
        slot.used_at = time.monotonic()
        return slot

    def keep_slot(self, slot):
        """Return the slot of that name, putting this one back if it was removed meanwhile."""
        slot = self.slots.setdefault(slot.name, slot)
        self.by_server.setdefault(slot.server.name, set()).add(slot)
        for host in slot.hosts:
            host.slots.add(slot)
        return slot

    def renew_unused(self, slot, capabilities):
        """An instance that nobody has called yet gives way to a caller who can be asked more.

        Most instances are first started to be listed; what that caller declared must not bind
        those who come to work.
        """
        instance = slot.instance
        if (instance is not None and not instance.calls and instance.state == "idle" and slot.at_rest()
                and instance.upstream.era == "legacy" and not set(capabilities) <= set(instance.capabilities)):
            self.stop(instance, "a caller came who can be asked more")
            slot.capabilities = capabilities

    def submit(self, call, slot):
        """Have a call sent on the slot's instance: now, after a start, or after waiting."""
        waiting = slot.waiting()
        if waiting and waiting >= self.config.get("limits.waiting", slot.server):
            call.fail(LimitReached("%d calls already wait for server %s; try later, or raise limits.waiting"
                                   % (waiting, slot.server.name)))
            return
        if slot.key.text.startswith("call:") and slot.instance is None and (
                slot.leaving is not None or self.slots.get(slot.name) is not slot) and not slot.queue:
            # Another instance under its key would know nothing of what this one is about.
            call.fail(StreamLost("the instance of server %s for this one call has ended" % slot.server.name))
            return
        if self.slots.get(slot.name) is not slot:
            slot = self.keep_slot(slot)
        call.slot = slot
        if call.host is not None and not call.host.closed:
            slot.hosts.add(call.host)
            call.host.slots.add(slot)
        instance = slot.instance
        if instance is not None and self._is_free(slot, instance) and not overlaps(instance, call):
            self._lease(slot, instance, call)
            return
        slot.queue.push(call)
        if call.timer is None and self.config.get("sharing", slot.server) == "exclusive":
            self._bound_turn(slot, call)
        self.wake(slot)

    def _bound_turn(self, slot, call):
        timeout = self.config.get("queueTimeout", slot.server)
        call.timer = self.loop.call_later(timeout, lambda: self._waited_enough(slot, call, timeout))

    def _waited_enough(self, slot, call, timeout):
        """A call has waited for its turn on an exclusive instance; that this starts has a bound of its own."""
        instance = slot.instance
        if instance is None or instance.state not in ("idle", "busy"):
            self._bound_turn(slot, call)
        elif slot.queue.remove(call) or slot.askers.remove(call):
            others = hosts_of(instance.upstream.in_flight.values())
            whose = " with a call of " + others if others else ""
            call.fail(LimitReached("server %s takes one call at a time (sharing: exclusive) and was busy for %gs%s; "
                                   "call again later, or raise queueTimeout" % (slot.server.name, timeout, whose)))
            self._rested(slot)

    def prepare(self, slot, on_ready):
        """Have the slot's instance started without a call; `on_ready(error)` says how it went."""
        if slot.instance is not None and slot.instance.state in ("idle", "busy"):
            on_ready(None)
            return
        slot.waiters.append(on_ready)
        self.wake(slot)

    def cancel(self, call, reason):
        """Give up a call: out of the queue, or a cancel for the one the server knows."""
        if call.done or call.cancelled:
            return
        call.cancelled = call.done = True
        slot, instance = call.slot, call.instance
        if instance is not None and call.wire_id in instance.upstream.in_flight:
            instance.upstream.cancel(call, reason)
            grace = self.config.get("cancelGrace", slot.server)
            if self.config.get("sharing", slot.server) == "exclusive":
                # The next call must not start while the server may still be at this one.
                self.loop.call_later(grace, lambda: instance.upstream.drop(call))
            else:
                instance.upstream.drop(call, grace if call.asks else min(grace, GHOST_S))
        elif slot is not None and (slot.queue.remove(call) or slot.askers.remove(call)):
            self._rested(slot)

    def give_back(self, instance, call):
        """A lease comes back: the call was answered, or its cancelled work is over."""
        if call.mark is not None and token_of(call) == NO_TOKEN and call.method and call.instance in (None, instance):
            self.journal.settle(call)
        if call.instance is instance:
            call.instance = None
        instance.leases -= 1
        instance.answered += 1
        instance.used_at = instance.slot.used_at = time.monotonic()
        self._look_later()
        if instance.answered == 1:
            self.backoffs.pop((instance.slot.server.name, instance.definition.digest), None)
        if not instance.leases and instance.state == "busy":
            instance.step("rest")
        self.listener.on_lease_back(instance)
        self.wake(instance.slot)

    def leave(self, slot, host):
        """A host is gone or no longer uses the slot."""
        slot.hosts.discard(host)
        for uri in [uri for uri, hosts in slot.subscriptions.items() if host in hosts]:
            self.unsubscribe(slot, uri, host)
        self._rested(slot)

    def end(self, slot, reason):
        """Nothing more will come for this slot: end its instance when its calls are settled."""
        slot.ended = reason
        slot.subscriptions.clear()
        self._rested(slot)

    def retire(self, server_name, reason):
        """A server's entry changed or went: its instances end as soon as they are idle."""
        self.generations[server_name] += 1
        for key in [key for key in self.warm if key[0] == server_name]:
            for instance in self.warm.pop(key):
                self.stop(instance, reason)
        for key in [key for key in self.backoffs if key[0] == server_name]:
            del self.backoffs[key]
        for slot in list(self.by_server.get(server_name, ())):
            self.end(slot, reason)

    def stop(self, instance, reason):
        """End an instance; what is in flight on it is settled as lost once it has gone."""
        if instance.state in ("stopping", "down"):
            return
        instance.stop_reason = instance.stop_reason or reason
        self.log.info("instance %s of %s ends: %s", instance.id, instance.definition.server.name, reason)
        instance.step("stop")
        self._disarm(instance)
        slot = instance.slot
        if slot is not None and slot.instance is instance:
            slot.instance, slot.leaving = None, instance
            self._forget_timer(slot, "start_timer")
            self._forget_timer(slot, "idle_timer")
        instance.child.stop()

    def subscribe(self, slot, uri, host):
        """Count a subscription."""
        hosts = slot.subscriptions.setdefault(uri, set())
        hosts.add(host)
        slot.hosts.add(host)
        host.slots.add(slot)
        if len(hosts) == 1:
            self.note_change(slot.instance)

    def unsubscribe(self, slot, uri, host):
        """Uncount a subscription, and tell the server when it was the last."""
        hosts = slot.subscriptions.get(uri)
        if hosts is None or host not in hosts:
            return
        hosts.discard(host)
        if not hosts:
            del slot.subscriptions[uri]
            self.note_change(slot.instance)
            if slot.instance is not None and slot.instance.state in ("idle", "busy"):
                slot.instance.upstream.send(Call("resources/unsubscribe", {"uri": uri}, lambda *_: None))
        self._rested(slot)

    def set_level(self, slot, level):
        """Have the server log at `level` from now on, also after a restart."""
        if level is not None and level != slot.level:
            slot.level = level
            instance = slot.instance
            self.note_change(instance)
            if instance is not None and instance.state in ("idle", "busy"):
                self._send_level(instance, level)

    def _send_level(self, instance, level):
        if "logging" in instance.upstream.capabilities:
            instance.upstream.send(Call("logging/setLevel", {"level": level}, lambda *_: None))

    # -- the one place that decides what happens next in a slot ------------------

    def wake(self, slot):
        """Send what can be sent, start what must be started, let end what may end."""
        if slot is None:
            return
        instance = slot.instance
        if instance is not None and instance.state in ("idle", "busy"):
            self._send_waiting(slot, instance)
        elif instance is None and (slot.queue or slot.askers or slot.waiters):
            self._want_start(slot)
        self._rested(slot)

    def _is_free(self, slot, instance):
        """Is there nothing that a call to this instance must wait for, as far as calls before it go?"""
        return (instance.state in ("idle", "busy") and not slot.held and not slot.queue and not slot.askers
                and self.config.get("sharing", slot.server) == "shared")

    def _send_waiting(self, slot, instance):
        if self._is_free(slot, instance):
            return                       # nobody waits
        exclusive = self.config.get("sharing", slot.server) == "exclusive"
        if exclusive and instance.answered and not instance.upstream.in_flight:
            self._check(instance)
        if slot.askers and not slot.held and not (exclusive and instance.upstream.in_flight):
            for call in reversed(slot.askers.drain()):
                slot.queue.push(call, first=True)
        while slot.queue and not slot.held and not (exclusive and instance.upstream.in_flight):
            call = slot.queue.pop()
            if overlaps(instance, call):
                # Two hosts' calls that both ask, or both log, could not be told apart.
                self._wait_for_turn(slot, instance, call)
            else:
                self._lease(slot, instance, call)

    def _lease(self, slot, instance, call):
        """Send a call on an instance; until it is settled it counts there."""
        if instance.child.stdout.queued_bytes > self.config.get("limits.childQueueBytes"):
            call.fail(LimitReached("server %s does not read its input; %d bytes wait (limits.childQueueBytes)"
                                   % (slot.server.name, instance.child.stdout.queued_bytes)))
            return
        self._forget_timer(call, "timer")
        call.instance = instance
        instance.leases += 1
        instance.calls += 1
        instance.used_at = slot.used_at = time.monotonic()
        if instance.state == "idle":
            instance.step("lease")
            self._arm(instance)
        if len(instance.callers) < 2 and call.host is not None:
            caller = getattr(call.host, "pipe", None) or call.host
            if caller not in instance.callers:
                instance.callers.add(caller)
                self.note_change(instance)
        if call.identity is not None and call.identity.session is not None:
            instance.users.add(call.identity.session)
        try:
            instance.upstream.send(call)
        except RpcError as error:
            # It is nested too deeply to be written down again.
            instance.upstream.in_flight.pop(call.wire_id, None)
            call.fail(error)
            self.give_back(instance, call)

    def _wait_for_turn(self, slot, instance, call):
        slot.askers.push(call)
        timeout = self.config.get("queueTimeout", slot.server) if call.asks else LOG_TURN_S

        def give_up():
            if not slot.askers.remove(call):
                return
            if not call.asks:
                # Not for messages that can be dropped (see SchemaStore.loggers), nor for what it may not ask.
                call.turn_over = True
                slot.queue.push(call, first=True)
                self.wake(slot)
            else:
                others = hosts_of(other for other in instance.upstream.in_flight.values() if other.asks)
                call.fail(LimitReached("server %s is asking another host something (%s); call %s again later, or "
                                       "raise queueTimeout" % (slot.server.name, others, call.params.get("name"))))
                self._rested(slot)
        if call.timer is None:
            call.timer = self.loop.call_later(timeout, give_up)

    def _rested(self, slot):
        """If nothing goes on in a slot, end it, or have it end after its idle time."""
        if slot.name not in self.slots or not slot.at_rest():
            return
        instance = slot.instance
        if instance is None:
            if slot.leaving is None:
                self._remove(slot)
            return
        if instance.state != "idle" or instance.upstream.in_flight:
            return
        if slot.ended or slot.key.text.startswith("call:"):
            self.stop(instance, slot.ended or "its call is over")
        elif slot.idle_timer is None:
            self._arm_idle(slot, self.config.get("idleTimeout", slot.server))
        if self.waiting_for_capacity:
            self.loop.soon(self._retry_capacity)

    def settings_changed(self):
        """Look again at what waits, and for how long what is idle may be."""
        for slot in list(self.slots.values()):
            self._forget_timer(slot, "idle_timer")
            self._rested(slot)
            self.wake(slot)

    def _arm_idle(self, slot, delay):
        def due():
            slot.idle_timer = None
            instance = slot.instance
            if instance is None or not slot.at_rest() or instance.state != "idle":
                return
            timeout = self.config.get("idleTimeout", slot.server)
            left = instance.used_at + timeout - time.monotonic()
            running = sum(1 for s in self.by_server.get(slot.server.name, ()) if s.instance is not None)
            if left <= 0.001 and running > self.config.get("min", slot.server):
                self.stop(instance, "idle for %gs" % timeout)
            else:
                # Also where `min` keeps it: look again, as others may have come.
                self._arm_idle(slot, left if left > 0.001 else max(timeout, 1.0))
        slot.idle_timer = self.loop.call_later(max(delay, 0.001), due)

    def _remove(self, slot):
        self._forget_timer(slot, "idle_timer")
        self._forget_timer(slot, "capacity_timer")
        self.slots.pop(slot.name, None)
        siblings = self.by_server.get(slot.server.name)
        if siblings is not None:
            siblings.discard(slot)
            if not siblings:
                del self.by_server[slot.server.name]
        for host in slot.hosts:
            host.slots.discard(slot)
        # A slot of an older entry may have held the place of this key.
        for other in list(self.by_server.get(slot.server.name, ())):
            if other.instance is None and (other.waiting() or other.waiters):
                self.loop.soon(lambda other=other: self.wake(other))

    # -- starting ----------------------------------------------------------------

    def _want_start(self, slot):
        if self.draining:
            self._fail_slot(slot, StartFailed("mcpx is ending: %s" % self.draining))
        elif slot.definition.env is None:
            self._fail_slot(slot, StartFailed("nobody has used server %s since mcpx was interrupted"
                                              % slot.server.name))
        elif slot.leaving is not None or self._place_taken(slot) or self.orphans.holds(slot.server.name):
            self._bound_wait(slot)       # woken again when that has gone
        elif self._backing_off(slot):
            return
        elif not self._has_capacity(slot):
            self._wait_for_capacity(slot)
        elif self._another_launch_first(slot):
            return
        else:
            self._start(slot)

    def _bound_wait(self, slot):
        """What must go first may not go; the callers hear of it then."""
        if slot.capacity_timer is None:
            timeout = self.config.get("queueTimeout", slot.server)

            def give_up():
                slot.capacity_timer = None
                self._fail_slot(slot, LimitReached(
                    "the instance of server %s that has to end first (%s) has not ended in %gs; see `mcpx status`, end "
                    "it with `mcpx stop`, or raise queueTimeout" % (slot.server.name, slot.key.text, timeout)))
            slot.capacity_timer = self.loop.call_later(timeout, give_up)

    def _place_taken(self, slot):
        """Does an instance of the same key, started from an older entry, still live?"""
        return any(other is not slot and other.key.text == slot.key.text and other.generation < slot.generation
                   and (other.instance or other.leaving)
                   for other in self.by_server.get(slot.server.name, ()))

    def _backing_off(self, slot):
        backoff = self.backoffs.get((slot.server.name, slot.definition.digest))
        if backoff is None or slot.start_timer is not None:
            return slot.start_timer is not None
        wait = backoff.next_at - time.monotonic()
        if wait <= 0:
            return False
        if wait <= 2.0:
            # So short that the caller is better served by waiting than by an error.
            def again():
                slot.start_timer = None
                self.wake(slot)
            slot.start_timer = self.loop.call_later(wait, again)
            return True
        self._fail_slot(slot, StartFailed(
            "server %s has failed %d times and is started again in %.0fs at the earliest. The last time: %s"
            % (slot.server.name, backoff.failures, wait + 0.5, backoff.error)))
        return True

    def _has_capacity(self, slot):
        """Is there room under `max` and `maxInstances`, if need be after an eviction?"""
        limit = self.config.get("max", slot.server)
        mine = [i for i in self.instances.values() if i.slot is not None and i.slot.server.name == slot.server.name]
        if limit and len(mine) >= limit:
            self._evict(mine)
            return False
        total = self.config.get("maxInstances")
        if total and len(self.instances) - sum(map(len, self.warm.values())) >= total:
            self._evict(list(self.instances.values()))
            return False
        return True

    def _evict(self, candidates):
        """End the least recently used idle instance that may go, unless one is going already."""
        if any(instance.state == "stopping" for instance in candidates):
            return
        free = [instance for instance in candidates if self._may_evict(instance)]
        if free:
            self.stop(min(free, key=lambda instance: instance.used_at), "evicted: others wait for an instance")

    def _may_evict(self, instance):
        slot = instance.slot
        if slot is None or instance.state != "idle" or not slot.at_rest():
            return False
        if not instance.calls:
            return True                  # it holds nobody's state
        if slot.hosts:
            return False
        return not (slot.named and time.monotonic() - instance.used_at < self.config.get("keep"))

    def _wait_for_capacity(self, slot):
        if slot in self.waiting_for_capacity:
            return
        self.waiting_for_capacity.append(slot)
        timeout = self.config.get("queueTimeout", slot.server)

        def give_up():
            slot.capacity_timer = None
            self._stop_waiting(slot)
            self._fail_slot(slot, LimitReached(self._capacity_text(slot, timeout)))
        slot.capacity_timer = self.loop.call_later(timeout, give_up)

    def _capacity_text(self, slot, timeout):
        limit = self.config.get("max", slot.server)
        mine = [i for i in self.instances.values() if i.slot is not None and i.slot.server.name == slot.server.name]
        if limit and len(mine) >= limit:
            holders, setting, bound = mine, "max", limit
        else:
            holders, setting, bound = list(self.instances.values()), "maxInstances", self.config.get("maxInstances")
        names = ", ".join("%s (%s, %s)" % (i.slot.key.text, i.slot.server.name, i.state)
                          for i in holders[:8] if i.slot is not None)
        return ("no instance of server %s became free in %gs: all %d are in use by %s%s. Raise `%s` (now %d) or "
                "queueTimeout, or shorten idleTimeout" % (slot.server.name, timeout, len(holders), names,
                                         " and others" if len(holders) > 8 else "", setting, bound))

    def _stop_waiting(self, slot):
        if slot in self.waiting_for_capacity:
            self.waiting_for_capacity.remove(slot)
        self._forget_timer(slot, "capacity_timer")

    def _retry_capacity(self):
        for slot in list(self.waiting_for_capacity):
            if not (slot.waiting() or slot.waiters):
                self._stop_waiting(slot)
                self._rested(slot)
            elif self._has_capacity(slot):
                self._stop_waiting(slot)
                self.wake(slot)
            else:
                # A slot whose server has room may still go; one whose server has none waits.
                continue

    def _another_launch_first(self, slot):
        """Starts of one package through npx or uvx run one after the other, until one was quick.

        npm's per-package directory is not locked: parallel installs corrupt it.
        """
        key = launcher_key(slot.definition.argv)
        if key is None or key in self.launched:
            return False
        first = self.cold_launches.setdefault(key, slot)
        return first is not slot and first.instance is not None

    def _launch_over(self, slot, is_installed):
        key = launcher_key(slot.definition.argv)
        if key is None or self.cold_launches.get(key) is not slot:
            return
        del self.cold_launches[key]
        if is_installed:
            self.launched.add(key)
        for other in list(self.slots.values()):
            if other.instance is None and (other.waiting() or other.waiters):
                self.loop.soon(lambda other=other: self.wake(other))

    def _start(self, slot):
        self._stop_waiting(slot)
        instance = self._take_warm(slot)
        try:
            if instance is None:
                instance = self._spawn(slot.definition, slot.capabilities, slot.key.text)
        except StartFailed as error:
            self._note_failure(slot.definition, error.message)
            self._launch_over(slot, False)
            self._fail_slot(slot, StartFailed("server %s: %s" % (slot.server.name, error.message)))
            return
        instance.slot, instance.capabilities = slot, slot.capabilities
        instance.step("take")
        slot.instance = instance
        self._record(instance)
        timeout = self.config.get("startTimeout", slot.server)
        slot.start_timer = self.loop.call_later(timeout, lambda: self.start_failed(instance, StartFailed(
            "it did not answer initialize within %gs (startTimeout)" % timeout)))
        era = slot.next_era or self.listener.era_of(slot.definition)
        begin = instance.upstream.discover if era == "modern" else instance.upstream.handshake
        begin(slot.capabilities, lambda error: self._handshaken(instance, error))

    def _spawn(self, definition, capabilities, key_text):
        self._next_instance += 1
        instance_id = "%s-%d" % (self.incarnation, self._next_instance)
        server = definition.server
        instance = Instance(self, instance_id, definition, capabilities)
        graces = (self.config.get("stop.eofGrace"), self.config.get("stop.termGrace"))
        child = Child(self.loop, instance_id, self.server_log(server.name),
                      self.config.get("keepProcesses", server), graces,
                      os.path.join(self.directories["children"], instance_id + ".json"))
        instance.child, child.secrets = child, definition.secrets
        values, port_holder = {"id": instance_id}, None
        try:
            wanted = definition.placeholders()
            if "tmpdir" in wanted:
                values["tmpdir"] = child.tmpdir = tempfile.mkdtemp(prefix="mcpx-%s-" % safe_file_name(server.name))
            if "port" in wanted:
                port_holder = socket.socket()
                port_holder.bind(("127.0.0.1", 0))
                values["port"] = port_holder.getsockname()[1]
            argv = [fill_placeholders(part, values, server.name) for part in definition.argv]
            env = {name: fill_placeholders(value, values, server.name) if "{" in value else value
                   for name, value in definition.env.items()}
            env[INSTANCE_VARIABLE] = instance_id
            cwd = fill_placeholders(definition.cwd, values, server.name) if definition.cwd else None
            child.record(self._facts(definition, key_text))
            if port_holder is not None:
                port_holder.close()
            limit = self.config.get("limits.lineBytes")
            child.on_exit = lambda status: self._exited(instance)
            child.on_gone = lambda: self._gone(instance)
            child.spawn(argv, env, cwd or os.path.expanduser("~"), limit,
                        lambda lines: instance.upstream.on_lines(lines),
                        lambda reason: self._stdout_ended(instance),
                        lambda rest: instance.upstream.on_rest(rest))
        except (StartFailed, OSError) as error:
            if port_holder is not None:
                port_holder.close()
            self._unrecord(child)
            raise error if isinstance(error, StartFailed) else StartFailed(str(error))
        self._connect(instance)
        self.listener.on_event("instance", {"id": instance_id, "server": server.name, "key": key_text,
                                            "state": "started"})
        self.log.info("server %s started for %s: instance %s, pid %d", server.name, key_text, instance_id, child.pid)
        return instance

    def _connect(self, instance):
        child = instance.child
        child.stdout.on_deaf = lambda: self.loop.call_later(EXIT_WAIT_S,
                                                            lambda: self._went(instance, "closed its stdin"))
        if self.journal is not None:
            child.stdout.marks = PipeMarks(self.journal, instance.id)
        instance.upstream = Upstream(child.stdout, instance, self.counters)
        self.instances[instance.id] = instance

    def _facts(self, definition, key_text):
        return {"server": definition.server.name, "digest": definition.digest, "key": key_text,
                "command": definition.argv[0], "boot": self.directories["boot"],
                "owner": self.directories["owner"],
                "keep": self.config.get("keepProcesses", definition.server)}

    def _record(self, instance):
        key_text = instance.slot.key.text if instance.slot is not None else ""
        facts = self._facts(instance.definition, key_text)
        if instance.state in ("idle", "busy") and self.holder is not None:
            facts["ready"] = self._ready_facts(instance)
        instance.child.record(facts)

    def note_change(self, instance):
        """Something has changed that another daemon must know of this instance.

        It is written down in the next turn: once, and after the answers of this one are in the pipe.
        """
        if instance is None or self.holder is None or instance.change_due:
            return
        instance.change_due = True

        def write():
            instance.change_due = False
            if instance.state in ("idle", "busy"):
                self._record(instance)
        self.loop.call_later(0, write)

    def _ready_facts(self, instance):
        slot, definition = instance.slot, instance.definition
        return {"shape": definition.shape, "program": instance.child.program, "argv": definition.argv,
                "cwd": definition.cwd, "era": definition.era,
                "entry": _digest(b"", repr(definition.server.comparable())), "scope": slot.scope, "named": slot.named,
                "level": slot.level, "subscriptions": list(slot.subscriptions), "declared": instance.capabilities,
                "upstream": instance.upstream.facts(), "users": sorted(instance.users), "calls": instance.calls,
                "started": instance.started_wall,
                "callers": len(instance.callers), "questions": self.listener.open_questions(instance)}

    def _keep(self, instance):
        """From here on the instance outlives a crash of this daemon."""
        if self.holder is not None:
            self._record(instance)
            self.holder.hold(instance.id, instance.child)
            instance.child.let_go_input = lambda then: self.holder.drop(instance.id, then)

    # -- after a crash of the daemon before ----------------------------------------------

    def adopt_all(self):
        """Take over what a dead daemon has left and a holder has kept; returns the ids of those instances."""
        kept = self.holder.take()
        records = {record["id"]: record for record in self.orphans.records()}
        adopted = {}
        for name, fds in kept.items():
            try:
                if name not in records:
                    raise StartFailed("there is no record of it")
                adopted[name] = self._adopt(records[name], fds)
            except Exception as error:
                # Whatever another version has written there: this child ends, the others go on.
                self.log.warning("instance %s of a dead daemon is not taken over: %r", name, error)
                for fd in fds:
                    try:
                        os.close(fd)
                    except OSError:
                        continue         # a stream had it already
                self.holder.drop(name)
        self._recover(adopted)
        for name in [name for name in self.journal.children if name not in adopted]:
            self.journal.remove_child(name)
        self.journal.take_over()
        return adopted

    def _adopt(self, record, fds):
        """Take over one instance. Raises StartFailed that says why not."""
        if not is_adoptable(record):
            raise StartFailed("it was not ready")
        ready, server = record["ready"], self.config.servers.get(record["server"])
        if record.get("boot") != self.directories["boot"] or process_start(record["pid"]) != record.get("start"):
            raise StartFailed("it has ended")
        if server is None or server.broken or server.disabled:
            raise StartFailed("its server is not configured any more")
        # From the first stream on nothing may go wrong any more.
        key, scope, named, level, uris, facts, questions = Key(record["key"]), *(ready[name] for name in (
            "scope", "named", "level", "subscriptions", "upstream", "questions"))
        users, calls, started, entry = (ready[name] for name in ("users", "calls", "started", "entry"))
        definition = Definition.known(server, record["digest"], ready)
        instance = Instance(self, record["id"], definition, ready["declared"])
        child = instance.child = Child(
            self.loop, instance.id, self.server_log(server.name), self.config.get("keepProcesses", server),
            (self.config.get("stop.eofGrace"), self.config.get("stop.termGrace")), record["path"])
        child.on_exit, child.on_gone = lambda status: self._exited(instance), lambda: self._gone(instance)
        child.adopt(record, fds, self.config.get("limits.lineBytes"),
                    lambda lines: instance.upstream.on_lines(lines), lambda reason: self._stdout_ended(instance),
                    lambda rest: instance.upstream.on_rest(rest))
        self._connect(instance)
        last_id, torn, reading = self.journal.child(instance.id) or (time.time_ns() // 1000, 1, 1)
        instance.upstream.take_facts(facts, last_id)
        slot = Slot(self, definition, key, scope, self.generations[server.name])
        slot.named, slot.level, slot.instance = named, level, instance
        slot.subscriptions = {uri: set() for uri in uris}
        if entry != _digest(b"", repr(server.comparable())):
            slot.generation, slot.ended = -1, "its entry was changed"
        self.slots[slot.name] = slot
        self.by_server.setdefault(server.name, set()).add(slot)
        instance.slot, instance.state = slot, "idle"
        instance.users, instance.calls, instance.started_wall = set(users), calls, started
        child.secrets = definition.secrets
        if ready.get("callers", 2) and not (scope in PRIVATE_SCOPES and not named):
            # Who they were cannot be told any more, so the first that is back is not the only one.
            instance.callers = {0, 1}
        instance.answered, instance.was_reading = 1, bool(reading)
        instance.upstream.first_is_torn = bool(reading)
        if torn:
            # Half a request may be in the pipe; without this the next one would be taken for its rest.
            child.stdout.write(b"\n")
        for question_id, method, *waiting in questions:
            if waiting:
                self.listener.reopen_question(instance, question_id, method, *waiting)
                continue
            answer = {"result": {"action": "cancel"}} if method == "elicitation/create" else {
                "error": RpcError(SAMPLING_REFUSED, "no answer: mcpx was interrupted").as_object()}
            instance.upstream.answer(question_id, answer)
        if instance.upstream.era == "modern":
            instance.upstream.wanted_uris = set(slot.subscriptions)
            instance.upstream.listen()
        self._keep(instance)
        instance.check_due = True
        self.loop.soon(lambda: self._check_between(instance))
        self.log.info("server %s for %s is taken over from a dead daemon: instance %s, pid %d", server.name,
                      slot.key.text, instance.id, child.pid)
        return instance

    def _recover(self, adopted):
        """Find out from the journal what was in flight; what is not sure is written down as that first."""
        by_number = {number: adopted.get(name) for name, number in self.journal.children.items()}
        if self.journal.map is None or self.journal.is_new:
            return
        if self.journal.overflowed():
            self.journal.clear()
            return
        self.recovered = {}
        for mark, (state, plain, number, sends, wire_id, token, key) in list(self.journal.calls()):
            instance = by_number.get(number)
            if instance is None:
                self.journal.orphan(mark)
            if state == WRITING or (state == WRITTEN and (instance is None or instance.was_reading)):
                self.journal.set(mark, UNCERTAIN)
                state = UNCERTAIN
            call = Call("", {}, None)
            call.mark = mark
            orphan = Orphan(instance, wire_id, state, bool(plain), call, max(1, sends))
            call.on_finish = orphan.answered
            if instance is not None and state in (WRITTEN, UNCERTAIN) and wire_id not in instance.upstream.in_flight:
                # Its answer is still to come, for all we know.
                instance.upstream.expect(wire_id, call)
                call.slot, call.instance = instance.slot, instance
                instance.leases += 1
                instance.orphans += 1
                if instance.state == "idle":
                    instance.step("lease")
                    self._arm(instance)
            if token != NO_TOKEN:
                if (token, key) in self.recovered:
                    self.let_go(self.recovered[(token, key)])    # an earlier round of the same request
                self.recovered[(token, key)] = orphan
            elif call.instance is None:
                self.journal.settle(call)
        for instance in adopted.values():
            instance.child.stdout.marks.forget_reading()
        self.loop.call_later(ORPHAN_WAIT_S, lambda: self._give_up_orphans(list(adopted.values())))

    def claim(self, call):
        """A host that is back repeats a request: return its Orphan, or None if no daemon ever took it up."""
        orphan = self.recovered.pop((token_of(call), journal_key(call.host_id)), None)
        if orphan is not None and orphan.call.slot is not None:
            orphan.instance.orphans -= 1
        return orphan

    def take_up(self, call, slot, orphan):
        """Let a host's request go on where the dead daemon had it; returns whether that can be."""
        instance, old = orphan.instance, orphan.call
        if instance is None or slot.instance is not instance or not orphan.plain:
            return False
        if orphan.answer is None and (orphan.state != WRITTEN or
                                      instance.upstream.in_flight.get(orphan.wire_id) is not old):
            return False
        call.slot, call.mark, old.mark = slot, old.mark, None
        slot.hosts.add(call.host)
        call.host.slots.add(slot)
        call.host.link.note_marked(call)
        if call.identity.session is not None:
            instance.users.add(call.identity.session)
        if orphan.answer is not None:
            message, line = orphan.answer
            call.instance = None
            call.finish(message, line)
            return True
        call.instance, call.line = instance, None
        instance.upstream.expect(orphan.wire_id, call)
        call.attempts = orphan.sends
        return True

    def let_go(self, orphan):
        """Nobody waits for the answer of an orphan; the server is told."""
        instance, call = orphan.instance, orphan.call
        if instance is not None and orphan.answer is None and instance.upstream.in_flight.get(call.wire_id) is call:
            call.on_finish = lambda *_: None
            self.cancel(call, "mcpx was interrupted")
        self.journal.settle(call)

    def _give_up_orphans(self, instances):
        """Hosts that are not back by now do not come back."""
        # A shim that comes later than this is served by what it says itself.
        orphans, self.recovered = list(self.recovered.values()), None
        for orphan in orphans:
            self.let_go(orphan)
        for instance in instances:
            instance.orphans = 0
            slot = instance.slot
            if slot is None or slot.instance is not instance:
                continue
            for call in [call for call in instance.upstream.in_flight.values() if call.method == ""]:
                self.let_go(Orphan(instance, call.wire_id, WRITTEN, False, call))
            for uri in [uri for uri, hosts in slot.subscriptions.items() if not hosts]:
                del slot.subscriptions[uri]
                instance.upstream.send(Call("resources/unsubscribe", {"uri": uri}, lambda *_: None))
            self.listener.on_adopted(slot)
            self._rested(slot)

    def _unrecord(self, child):
        if child.tmpdir:
            shutil.rmtree(child.tmpdir, ignore_errors=True)
        try:
            os.unlink(child.record_path)
        except OSError:
            self.log.debug("the record of %s was not removed", child.instance_id)

    def server_log(self, name):
        """Return the log file of a server's stderr."""
        if name not in self.logs:
            path = os.path.join(self.directories["logs"], safe_file_name(name) + ".log")
            self.logs[name] = RotatedFile(path, self.config.get("log.maxBytes"), self.config.get("log.files"))
        return self.logs[name]

    def _handshaken(self, instance, error):
        if instance.state != "starting":
            return
        if error is not None:
            self.start_failed(instance, error)
            return
        slot = instance.slot
        only = instance.upstream.only_era or slot.next_era
        if only is not None:
            # Noted only now that it has worked.
            self.listener.note_era(instance.definition, only)
        slot.next_era, slot.eras_tried, slot.launch_repeated = None, set(), False
        self._forget_timer(slot, "start_timer")
        self._launch_over(slot, time.monotonic() - instance.started_at < QUICK_LAUNCH_S)
        instance.step("ready")
        slot.last_error = None
        waiters, slot.waiters = slot.waiters, []
        if slot.level is not None:
            self._send_level(instance, slot.level)
        for uri in slot.subscriptions:
            instance.upstream.send(Call("resources/subscribe", {"uri": uri}, lambda *_: None))
        self._keep(instance)
        for waiter in waiters:
            waiter(None)
        # The check of its lists comes behind the calls that wait for this start.
        instance.check_due = True
        self.wake(slot)
        self._check_between(instance)

    def _check_between(self, instance):
        """Check the lists of an instance; those of an exclusive one not before its calls are over."""
        exclusive = self.config.get("sharing", instance.slot.server) == "exclusive"
        if not (exclusive and instance.upstream.in_flight):
            self._check(instance)

    def _check(self, instance):
        if instance.check_due and instance.state in ("idle", "busy"):
            instance.check_due = False
            self.listener.on_ready(instance)
            self._rested(instance.slot)

    def start_failed(self, instance, error):
        """A start came to nothing: tell those who wait, with everything that explains it."""
        slot = instance.slot
        if instance.state != "starting":
            return
        if self._other_era(instance, error) or self._met_installation(instance):
            return
        error = self.explain(instance, error)
        self._note_failure(instance.definition, error.message)
        self._forget_timer(slot, "start_timer")
        slot.instance, slot.leaving = None, instance
        instance.stop_reason = "its start failed"
        instance.step("stop")
        if instance.child.status is None:
            instance.child.stop()
        self._fail_slot(slot, error)
        self._launch_over(slot, False)

    def _other_era(self, instance, error):
        """Some servers speak one era only, or end when they are probed: start them anew in the other.

        PROTOCOL 6.1: a server that answers `initialize` with -32022 is modern only; one that
        ends on the probe is legacy. Never change the era on a live child.
        """
        slot, upstream = instance.slot, instance.upstream
        if error.code == UNSUPPORTED_VERSION and upstream.era == "legacy":
            era = "modern"
        elif upstream.era == "modern" and upstream.probing and instance.child.status is not None:
            era = "legacy"
        else:
            return False
        if self.config.get("protocol", slot.server) in ("legacy", "modern") or era in slot.eras_tried:
            return False
        slot.eras_tried |= {era, upstream.era}
        slot.next_era = era
        self._start_anew(instance, "it speaks the %s era only" % era)
        return True

    def _met_installation(self, instance):
        """Another program was installing the same package, which npm cannot bear: once more, at once."""
        slot = instance.slot
        if slot.launch_repeated or launcher_key(slot.definition.argv) is None or not any(
                "ENOTEMPTY" in line for line in instance.child.stderr_tail):
            return False
        slot.launch_repeated = True
        self._start_anew(instance, "another installation of its package was under way")
        return True

    def _start_anew(self, instance, reason):
        """Let a start that came to nothing go; those who wait for it wait for the next."""
        slot = instance.slot
        self._forget_timer(slot, "start_timer")
        slot.instance, slot.leaving = None, instance
        instance.stop_reason = reason
        instance.step("stop")
        if instance.child.status is None:
            instance.child.stop()

    def explain(self, instance, error):
        """Return the error of a failed or dead instance with command, exit status and stderr."""
        server = instance.definition.server
        lines = [line for line in instance.child.stderr_tail if line.strip()][-6:]
        text = hide_secrets("\n".join(lines), instance.definition.secrets)
        parts = ["server %s (%s): %s" % (server.name, instance.definition.argv[0], error.message)]
        if instance.first_noise is not None and instance.state == "starting":
            parts.append("its stdout had %d lines that are no MCP messages, the first: %s"
                         % (instance.noise, printable(instance.first_noise[:200])))
        if text:
            parts.append("its last words on stderr: " + text)
        data = {"server": server.name, "status": instance.child.describe_end(), "stderr": text}
        if not isinstance(error, StartFailed):
            # The server's own answer to initialize is passed on as it is.
            return error
        return StartFailed("; ".join(parts), data)

    def _fail_slot(self, slot, error):
        slot.last_error = error.message
        slot.next_era, slot.eras_tried, slot.launch_repeated = None, set(), False
        self._stop_waiting(slot)
        waiters, slot.waiters = slot.waiters, []
        for waiter in waiters:
            waiter(error)
        for call in slot.queue.drain() + slot.askers.drain():
            call.fail(error)
        self._rested(slot)

    def _note_failure(self, definition, text):
        backoff = self.backoffs.setdefault((definition.server.name, definition.digest), Backoff())
        backoff.failures += 1
        pause = self.config.get("backoff.first") * 2 ** min(backoff.failures - 1, 20)
        backoff.next_at = time.monotonic() + min(pause, self.config.get("backoff.max"))
        backoff.error = self.last_errors[definition.server.name] = text
        self.log.warning("server %s failed (%d in a row): %s", definition.server.name, backoff.failures, text)

    # -- ending --------------------------------------------------------------------

    def _stdout_ended(self, instance):
        """It can answer nothing any more, whether or not the process goes on."""
        if instance.child.status is None and instance.state in ("warm", "starting", "idle", "busy"):
            if instance.state == "starting":
                self.loop.call_later(EXIT_WAIT_S, lambda: self.start_failed(
                    instance, StartFailed("it closed its stdout before it was ready")))
                return
            self.loop.call_later(EXIT_WAIT_S, lambda: self._went(instance, "closed its stdout"))

    def _went(self, instance, what):
        """A pipe of a process that has not exited is closed: nothing more can come of it."""
        if instance.state == "starting":
            self.start_failed(instance, StartFailed("it %s before it was ready" % what))
        elif instance.child.status is None and instance.state in ("warm", "idle", "busy"):
            self.deaths[instance.definition.server.name] += 1
            self.last_errors[instance.definition.server.name] = what
            self._settle_lost(instance, what)
            self.stop(instance, "it " + what)

    def _exited(self, instance):
        """The process has ended: settle what was in flight, make room for the next."""
        ended = instance.child.describe_end()
        if self.holder is not None:
            self.holder.drop(instance.id)
        if instance.state == "starting":
            self.start_failed(instance, StartFailed("it ended before it was ready, %s" % ended))
        expected = instance.state == "stopping"
        if not expected:
            self.log.warning("instance %s of %s ended by itself: %s", instance.id,
                             instance.definition.server.name, ended)
            instance.stop_reason = "the server ended: %s" % ended
            self.deaths[instance.definition.server.name] += 1
            self.last_errors[instance.definition.server.name] = "ended: %s" % ended
            if time.monotonic() - instance.started_at > LONG_UPTIME_S:
                self.backoffs.pop((instance.definition.server.name, instance.definition.digest), None)
            elif instance.state != "warm" and not instance.answered:
                self._note_failure(instance.definition, self.explain(instance, StartFailed(ended)).message)
        slot = instance.slot
        self._disarm(instance)
        instance.step("exit")
        if slot is not None and slot.instance is instance:
            slot.instance, slot.leaving = None, instance
            slot.last_error = "ended: %s" % ended
            self._forget_timer(slot, "idle_timer")
        self._settle_lost(instance, "ended: %s" % ended)

    def _settle_lost(self, instance, what):
        """Everything in flight on a dead instance is sent once more, or reported lost.

        Once more, with a new id: every method but tools/call, and tools/call where the tool's
        listed hints allow it (`may_repeat`). A cancelled call never; a second loss is told.
        """
        calls = instance.upstream.take_all() if instance.upstream is not None else []
        if not calls:
            return
        error = self.explain(instance, StartFailed(what))
        stream = instance.child.stdout
        stream.note_unread()
        for call in calls:
            if call.instance is not instance:
                call.fail(StreamLost(error.message))
                continue
            call.instance = None
            instance.leases -= 1
            never_read = call.sent_offset >= stream.unread_from
            if call.mark is not None:
                self._note_lost(call, never_read)
            if call.cancelled or call.done:
                continue
            call.over = False
            if never_read:
                call.attempts -= 1       # it has not been sent in any way that counts
            if (call.may_repeat or never_read) and call.attempts < 2 and not self.draining and call.slot.ended is None:
                call.slot.queue.push(call, first=True)
            else:
                call.fail(StreamLost("%s; whether the request was carried out is not known" % error.message))

    def _note_lost(self, call, never_read):
        """The child of a call has gone. Until its host knows, the journal says that it was handed on.

        A daemon that comes after a crash would send it again as one that nobody has seen.
        """
        if never_read or call.cancelled or call.done or token_of(call) == NO_TOKEN:
            self.journal.settle(call)
        else:
            self.journal.set(call.mark, UNCERTAIN)
            self.journal.orphan(call.mark)

    def _gone(self, instance):
        """Nothing of the instance is left: its key is free again."""
        self.listener.on_event("instance", {"id": instance.id, "server": instance.definition.server.name,
                                            "state": "gone", "reason": instance.stop_reason})
        self.instances.pop(instance.id, None)
        if self.journal is not None:
            self.journal.remove_child(instance.id)
        if instance.users and not instance.slot.key.text.startswith("call:"):
            name = (instance.definition.server.name, instance.slot.key.text)
            _, others = self.lost_state.pop(name, (None, set()))
            self.lost_state[name] = (instance.stop_reason, others | instance.users)
            while len(self.lost_state) > 1000:
                self.lost_state.popitem(last=False)
        if instance.child.hardest == "SIGKILL":
            self.log.warning("instance %s of %s needed SIGKILL", instance.id, instance.definition.server.name)
        for warm in self.warm.values():
            if instance in warm:
                warm.remove(instance)
        slot = instance.slot
        self.loop.guard(self.listener.on_gone, instance)
        if slot is not None and slot.leaving is instance:
            slot.leaving = None
            if slot.subscriptions and not slot.ended and not self.draining:
                # Somebody listens: events would be missed until the next call.
                slot.waiters.append(lambda error: None)
            self.wake(slot)
        if self.waiting_for_capacity:
            self.loop.soon(self._retry_capacity)
        if self.draining is None:
            for other in list(self.by_server.get(instance.definition.server.name, ())):
                if other is not slot and other.instance is None and (other.waiting() or other.waiters):
                    self.loop.soon(lambda other=other: self.wake(other))
        self.listener.on_free()

    def _orphans_cleared(self):
        for slot in list(self.slots.values()):
            self.wake(slot)

    def lost_state_of(self, server_name, key_text, session):
        """Return, once, why an instance that this session had used was replaced; else None."""
        if not self.lost_state:
            return None
        reason, sessions = self.lost_state.get((server_name, key_text), (None, ()))
        if session not in sessions:
            return None
        sessions.discard(session)
        if not sessions:
            del self.lost_state[(server_name, key_text)]
        return reason

    # -- warm processes --------------------------------------------------------------

    def keep_warm(self, definitions):
        """Have `warm` started processes per definition, as far as the settings ask for them."""
        for definition in definitions:
            wanted = self.config.get("warm", definition.server)
            key = (definition.server.name, definition.digest)
            ready = self.warm.setdefault(key, [])
            while len(ready) < wanted and not self.draining and not self.orphans.holds(definition.server.name):
                backoff = self.backoffs.get(key)
                if backoff is not None and backoff.next_at > time.monotonic():
                    return
                try:
                    ready.append(self._spawn(definition, {}, "(warm)"))
                except StartFailed as error:
                    self._note_failure(definition, error.message)
                    return

    def _take_warm(self, slot):
        ready = self.warm.get((slot.server.name, slot.definition.digest))
        if not ready:
            return None
        instance = ready.pop(0)
        self.loop.soon(lambda: self.keep_warm([instance.definition]))
        return instance

    # -- health ------------------------------------------------------------------------

    def _arm(self, instance):
        if instance._watch is None:
            instance._watch = self.loop.call_later(self._watch_delay(instance), lambda: self._watched(instance))

    def _disarm(self, instance):
        if instance._watch is not None:
            instance._watch.cancel()
            instance._watch = None
        instance.unresponsive, instance._pinged_at = False, None

    def _watch_delay(self, instance):
        server = instance.definition.server
        delays = [self.config.get("pingAfter", server), self.config.get("callTimeout", server)]
        if instance._pinged_at is not None and self.config.get("pingTimeout", server):
            delays.append(self.config.get("pingTimeout", server))
        return max(0.05, min(delay for delay in delays if delay) / 2 if any(delays) else 3600)

    def _watched(self, instance):
        """Look after the calls in flight: one timer per busy instance, none for idle ones."""
        instance._watch = None
        if instance.state != "busy":
            self._disarm(instance)
            return
        now, server = time.monotonic(), instance.definition.server
        timeout = self.config.get("callTimeout", server)
        for call in list(instance.upstream.in_flight.values()):
            if timeout and call.host is not None and not call.cancelled and now - call.active_at >= timeout:
                self._time_out(instance, call, timeout)
        self._check_silence(instance, now)
        if instance.state == "busy":
            self._arm(instance)
        self._look_later()

    def _look_later(self):
        """Have the descendants of all children noted soon: those of one that is killed cannot be told any more."""
        if not self._looks:
            self._looks = True
            self.loop.call_later(max(0.1, self._looked_at + LOOK_EVERY_S - time.monotonic()), self._look)

    def _look(self):
        self._looks, self._looked_at = False, time.monotonic()
        try:
            table = ProcessTable()
        except OSError as error:
            self.log.warning("the processes cannot be listed: %s", error.strerror)
            return
        for instance in self.instances.values():
            if instance.child.status is None:
                instance.child.look(table)

    def _time_out(self, instance, call, timeout):
        finish = call.on_finish
        self.cancel(call, "callTimeout of %gs" % timeout)
        finish(call, {"error": LimitReached(
            "server %s gave neither answer nor progress for %gs; the call was cancelled. Raise callTimeout if it "
            "may take longer" % (instance.definition.server.name, timeout)).as_object()}, None)

    def _check_silence(self, instance, now):
        server = instance.definition.server
        silent = now - instance.child.stdout.received_at
        if silent < self.config.get("pingAfter", server):
            instance.unresponsive, instance._pinged_at = False, None
            return
        if instance._pinged_at is None:
            instance._pinged_at = now
            instance.upstream.send(Call("ping", None, lambda *_: None))
            return
        limit = self.config.get("pingTimeout", server)
        instance.unresponsive = True
        if limit and now - instance._pinged_at >= limit:
            self._settle_lost(instance, "did not answer a ping for %gs" % limit)
            self.stop(instance, "it did not answer a ping for %gs (pingTimeout)" % limit)
            instance.child.kill()

    # -- the whole -----------------------------------------------------------------------

    def busy(self):
        """Is any caller's request in flight or waiting?"""
        return any(slot.waiting() or (slot.instance and slot.instance.leases) for slot in self.slots.values())

    def stop_all(self, reason):
        """End every instance; `draining` keeps new ones from starting."""
        self.draining = reason
        for slot in list(self.slots.values()):
            slot.subscriptions.clear()
            slot.tasks.clear()
            if slot.waiting() or slot.waiters:
                self._fail_slot(slot, StreamLost("mcpx is ending: %s" % reason))
        for instance in list(self.instances.values()):
            self.stop(instance, reason)

    def _forget_timer(self, owner, name):
        timer = getattr(owner, name)
        if timer is not None:
            timer.cancel()
            setattr(owner, name, None)


def hosts_of(calls):
    """Return whose calls these are, for a message; "" where they are mcpx's own."""
    return ", ".join(sorted({"host %s" % call.host.id for call in calls if call.host is not None}))


def overlaps(instance, call):
    """Is a call of another host in flight whose questions or log messages could be taken for this one's?

    Log messages count for a caller that has asked for them. A call that waits for an answer
    asks nothing meanwhile, so that a person who thinks holds up nobody; but what a server
    asks at once comes within a moment, and nothing that may ask is started in that.
    """
    if instance.questions and call.may_ask and not call.turn_over and (
            instance.pool.listener.asking_parties(instance) - {call.party}):
        return True
    logs = call.logs and call.host.level is not None and not call.turn_over
    others = [other for other in instance.upstream.in_flight.values()
              if (call.asks and other.asks or logs and other.logs) and other.party != call.party and not other.cancelled
              ] if call.asks or logs else ()
    if not others:
        return False
    waiting = instance.pool.listener.waiting_hosts(instance)
    return any(logs and other.logs or other.host not in waiting for other in others)


def launcher_key(argv):
    """Return what identifies the package of a package launcher's command line, or None."""
    launcher = os.path.basename(argv[0])
    if launcher not in ("npx", "uvx", "bunx", "pnpx", "pipx"):
        return None
    for part in argv[1:]:
        if not part.startswith("-") and part != "run":
            return launcher, part
    return None


# ---------------------------------------------------------------------------
# Surface: what does a host see
#
# The schema cache (what each server answered to initialize and its lists, in memory and on
# disk) and the names under which a host reaches it: as they are where one server is passed
# through, `<server>_<name>` where several are merged. Streams and processes are elsewhere.
# ---------------------------------------------------------------------------

LIST_KINDS = ("tools", "prompts", "resources", "resourceTemplates")
# How long hosts may keep a list whose server tells of changes.
LIST_TTL_MS = 60000
KIND_METHODS = {kind: method for method, kind in LIST_METHODS.items()}
# Which list a change notification is about.
CHANGED_KINDS = {"notifications/tools/list_changed": ("tools",),
                 "notifications/prompts/list_changed": ("prompts",),
                 "notifications/resources/list_changed": ("resources", "resourceTemplates")}
KIND_CHANGED = {kind: method for method, kinds in CHANGED_KINDS.items() for kind in kinds}


class Schema:
    """What one definition answered, given what it was told its client can do.

    `known` once it has answered initialize and its lists; `generation` counts changes, so
    that a cursor into an older list can be told. `watchers` are the hosts that were shown
    it; `waiters` callbacks(error) of those who wait for it to become known.
    """

    def __init__(self, key, path):
        self.key, self.path = key, path
        self.known = False
        self.revision, self.capabilities, self.info, self.instructions = LATEST_LEGACY, {}, {}, None
        self.lists = {kind: [] for kind in LIST_KINDS}
        self.generation = 0
        self.verified_at = -1e9
        self.watchers = set()
        self.waiters = []
        self.filling = False
        self.suspects = {}               # those of `asking` not seen for sure -> clean calls that clear them
        self.clean = set()               # tools and prompts a call of which has ended without a question
        self.at_once = set()             # those that have asked again long after a question that was still open
        self.asking = {}                 # tool or prompt that was seen to ask -> until when, wall clock
        self.heard = {}                  # Call.subject -> [whether it logs, until when that counts]
        self.ttl_ms = {}                 # list -> how long a modern server lets it be cached
        self._encoded = {}               # (kind, revision, offset) -> result bytes
        self._tools = None               # name -> tool

    def tool(self, name):
        """Return the listed tool of that name, or None."""
        if self._tools is None:
            self._tools = {tool.get("name"): tool for tool in self.lists["tools"]}
        return self._tools.get(name) if isinstance(name, str) else None

    def asks(self, name):
        """Has a tool (or prompt) of that name been seen to ask its host something, lately?"""
        return isinstance(name, str) and self.asking.get(name, 0) > time.time()

    def logs(self, subject):
        """Does a tool, prompt or method log? None where nobody has watched it lately."""
        logs, until = self.heard.get(subject, (None, 0))
        return logs if until > time.time() else None

    def cache_ms(self, kind):
        """Return for how long a host may keep a list (PROTOCOL 7.2)."""
        if self.revision in MODERN_REVISIONS:
            return min(LIST_TTL_MS, self.ttl_ms.get(kind, 0))
        capability = self.capabilities.get(LIST_CAPABILITY[kind])
        return LIST_TTL_MS if isinstance(capability, dict) and capability.get("listChanged") else 0

    def offers(self, kind):
        """Does the server declare the capability that this list belongs to?"""
        return LIST_CAPABILITY[kind] in self.capabilities

    def set_list(self, kind, items):
        """Replace a list; returns whether it differs from before."""
        if self.lists[kind] == items:
            return False
        self.lists[kind] = items
        self.generation += 1
        self._encoded.clear()
        self._tools = None
        return True

    def page(self, kind, revision, offset, size):
        """Return one page of a list for a host of `revision`, as encoded result bytes."""
        data = self._encoded.get((kind, revision, offset, size))
        if data is None:
            data = encode_page(kind, self.lists[kind], self.revision, revision, offset, size, self.generation)
            self._encoded[(kind, revision, offset, size)] = data
        return data

    def as_dict(self):
        """What is kept on disk."""
        return {"revision": self.revision, "capabilities": self.capabilities, "serverInfo": self.info,
                "instructions": self.instructions, "lists": self.lists, "asking": self.asking,
                "heard": self.heard, "ttlMs": self.ttl_ms,
                "asksAtOnce": sorted(self.at_once)}


def encode_page(kind, items, from_revision, revision, offset, size, generation):
    """Return a list result with `size` items from `offset` on, spelled for `revision`."""
    part = items[offset:offset + size] if size else items
    result = {kind: part}
    if from_revision != revision:
        result = spell_result(KIND_METHODS[kind], result, revision)
    if size and offset + size < len(items):
        result = dict(result, nextCursor=make_cursor(generation, offset + size))
    return encode_json(result)


def make_cursor(generation, offset):
    """Return an opaque cursor into a list of one generation."""
    return "%x.%x" % (generation, offset)


def read_cursor(cursor, generation):
    """Return the offset of a cursor. Raises RpcError(INVALID_PARAMS) for one of another list."""
    if cursor is None:
        return 0
    match = re.match(r"^([0-9a-f]{1,12})\.([0-9a-f]{1,12})$", cursor) if isinstance(cursor, str) else None
    if match is None or int(match.group(1), 16) != generation:
        raise RpcError(INVALID_PARAMS, "the cursor is not of the list as it is now; list again from the start")
    return int(match.group(2), 16)


class SchemaStore:
    """All schemas, by definition and declared capabilities; kept on disk, checked at each start."""

    # An instance of `call` scope does not live long enough for a check at every start.
    CALL_SCOPE_CHECK_S = 60.0
    # An empty list may be a server that is still warming up: look again after these.
    SECOND_LOOKS_S = (1.0, 2.0, 4.0)
    # A tool that has not asked for this long may have changed.
    ASKING_KEPT_S = 30 * 86400.0
    # So many calls without a question clear a tool that was only suspected.
    CLEAN_CALLS = 3

    def __init__(self, loop, log, directory, secret):
        self.loop, self.log, self.directory, self.secret = loop, log, directory, secret
        self._schemas = {}
        self._eras_path = os.path.join(directory, "eras.json")
        self.eras = self._load_eras()    # definition's shape -> the only era that it speaks

    def era_of(self, definition):
        """Return the era that an instance of this definition will speak, as far as it is known."""
        return self.eras.get(definition.shape, definition.era)

    def note_era(self, definition, era):
        """A server has shown that it speaks one era only: nobody need probe it again."""
        if self.eras.get(definition.shape) != era:
            self.eras[definition.shape] = era
            try:
                write_private_file(self._eras_path, json.dumps(self.eras).encode("utf-8"))
            except OSError as error:
                self.log.warning("the eras of servers cannot be written: %s", error)

    def _load_eras(self):
        try:
            with open(self._eras_path, encoding="utf-8") as file:
                eras = json.load(file)
            return {shape: era for shape, era in eras.items() if era in ("legacy", "modern")}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def get(self, definition, capabilities, era=None):
        """Return the Schema of a definition that is told `capabilities`; it may not be known yet."""
        era = era or self.era_of(definition)
        key = _digest(self.secret, [definition.shape, era, capability_kinds(capabilities)])
        schema = self._schemas.get(key)
        if schema is None:
            for old in [k for k, v in self._schemas.items() if not (v.watchers or v.waiters or v.filling)][:-500]:
                del self._schemas[old]
            name = "%s-%s.json" % (safe_file_name(definition.server.name), key)
            schema = self._schemas[key] = Schema(key, os.path.join(self.directory, name))
            self._load(schema)
        return schema

    def of_instance(self, instance):
        """Return the Schema that an instance's answers belong to."""
        if instance.own_schema is not None:
            return instance.own_schema
        if instance.schema is None or instance.schema_era != instance.upstream.era:
            instance.schema_era = instance.upstream.era
            instance.schema = self.get(instance.definition, instance.capabilities, instance.upstream.era)
        return instance.schema

    def detach(self, instance):
        """Give an instance of one host a schema of its own, which is not kept on disk.

        Lists that a server changes for one connection (tools after a login, files of a
        session) say nothing of what the next start will list.
        """
        shared = self.of_instance(instance)
        if instance.own_schema is None:
            instance.own_schema = own = Schema(shared.key, None)
            own.known, own.revision, own.capabilities = shared.known, shared.revision, shared.capabilities
            own.info, own.instructions, own.lists = shared.info, shared.instructions, dict(shared.lists)
            own.generation, own.verified_at = shared.generation, shared.verified_at
        return instance.own_schema

    def _load(self, schema):
        try:
            with open(schema.path, encoding="utf-8") as file:
                data = json.load(file)
            lists = {kind: data["lists"][kind] for kind in LIST_KINDS}
            if not (isinstance(data["capabilities"], dict) and isinstance(data["serverInfo"], dict)
                    and data["revision"] in REVISIONS
                    and all(isinstance(items, list) and all(isinstance(item, dict) for item in items)
                            for items in lists.values())):
                raise ValueError("not a schema")
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.log.warning("the cached schema %s is not usable (%s); it is fetched again", schema.path, error)
            return
        schema.revision, schema.capabilities = data["revision"], data["capabilities"]
        schema.info, schema.instructions, schema.lists = data["serverInfo"], data["instructions"], lists
        asking = data.get("asking")
        schema.asking = {name: until for name, until in asking.items() if isinstance(until, (int, float))} if (
            isinstance(asking, dict)) else {}
        heard = data.get("heard")
        schema.heard = {subject: pair for subject, pair in heard.items() if isinstance(pair, list) and len(pair) == 2
                        and isinstance(pair[1], (int, float))} if isinstance(heard, dict) else {}
        if isinstance(data.get("asksAtOnce"), list):
            schema.at_once.update(name for name in data["asksAtOnce"] if isinstance(name, str))
        ttl = data.get("ttlMs")
        schema.ttl_ms = {kind: ms for kind, ms in ttl.items() if isinstance(ms, (int, float))} if (
            isinstance(ttl, dict)) else {}
        schema.known = True

    def save(self, schema):
        """Write a schema to disk; a failure costs the next start time, nothing else."""
        if schema.path is None:
            return
        try:
            write_private_file(schema.path, json.dumps(schema.as_dict()).encode("utf-8"))
        except OSError as error:
            self.log.warning("the schema cache cannot be written: %s", error)

    # -- checks ------------------------------------------------------------------

    def check(self, instance, kinds=LIST_KINDS, announce=False, looks=0):
        """Fetch lists of a ready instance, every page, and take over what differs.

        `announce`: the server said that they changed, so hosts are told in any case.
        """
        schema = self.of_instance(instance)
        upstream = instance.upstream
        facts = (upstream.revision, upstream.capabilities, upstream.info, upstream.instructions)
        if facts != (schema.revision, schema.capabilities, schema.info, schema.instructions):
            schema.revision, schema.capabilities, schema.info, schema.instructions = facts
            schema._encoded.clear()
            schema.verified_at = -1e9
        wanted = [kind for kind in kinds if schema.offers(kind)]
        instance.waits_for_check = True
        fetched, left = {}, set(wanted)

        def got(kind, items):
            fetched[kind] = items
            left.discard(kind)
            if not left:
                self._checked(instance, schema, fetched, announce, looks)
        if not wanted:
            self._checked(instance, schema, {}, announce, looks)
        for kind in wanted:
            self._fetch(instance, kind, lambda items, kind=kind: got(kind, items))

    def _fetch(self, instance, kind, on_done):
        """Fetch one list; `on_done(items)`, or None where the server gave no usable answer."""
        items, cursors, schema = [], set(), self.of_instance(instance)

        def page(call, message, _line):
            result = message.get("result")
            part = result.get(kind) if isinstance(result, dict) else None
            if not isinstance(part, list):
                error = message.get("error")
                missing = isinstance(error, dict) and error.get("code") == METHOD_NOT_FOUND
                on_done([] if missing and not items else None)
                return
            ttl = result.get("ttlMs")
            if isinstance(ttl, (int, float)) and not isinstance(ttl, bool):
                schema.ttl_ms[kind] = min(max(ttl, 0), schema.ttl_ms.get(kind, ttl)) if items else max(ttl, 0)
            items.extend(item for item in part if isinstance(item, dict))
            cursor = result.get("nextCursor")
            # MCP 2025-11-25, server/utilities/pagination: any string is a cursor, "" as well.
            if isinstance(cursor, str) and cursor not in cursors and len(cursors) < MAX_PAGES:
                cursors.add(cursor)
                ask({"cursor": cursor})
            else:
                on_done(items)

        def ask(params):
            if instance.state in ("idle", "busy"):
                instance.upstream.send(Call(KIND_METHODS[kind], params, page))
            else:
                on_done(None)
        ask(None)

    def _checked(self, instance, schema, fetched, announce, looks):
        instance.waits_for_check = False
        alive = instance.state in ("idle", "busy")
        empty_again = [kind for kind, items in fetched.items() if items is None or (
            not items and (schema.lists[kind] or not schema.known or looks))]
        changed = []
        for kind, items in fetched.items():
            if items is None or (not items and schema.lists[kind] and not looks):
                # Never replace a list by nothing on one look alone.
                continue
            if schema.set_list(kind, items) or announce:
                changed.append(kind)
        was_known, failed = schema.known, [kind for kind, items in fetched.items() if items is None]
        if not alive and failed and not was_known:
            self.settle(schema, StreamLost("the server ended while it was listed"))
            return
        schema.known = True
        schema.verified_at = time.monotonic()
        if changed or not was_known:
            self.save(schema)
        self.settle(schema, None)
        for method in sorted({KIND_CHANGED[kind] for kind in changed}):
            for host in list(schema.watchers):
                if was_known or host.answered_without:
                    host.on_list_changed(method)
        if empty_again and alive and looks < len(self.SECOND_LOOKS_S):
            def again():
                if instance.state in ("idle", "busy"):
                    self.check(instance, empty_again, False, looks + 1)
            self.loop.call_later(self.SECOND_LOOKS_S[looks], again)
        instance.pool.wake(instance.slot)

    def note_asking(self, instance, name, suspected=False):
        """A tool or prompt has asked: from now on calls of it by different hosts do not overlap.

        One that is only `suspected` (it was in flight when a question could not be attributed)
        is forgotten again once some calls of it have ended without asking.
        """
        schema = self.of_instance(instance)
        if not isinstance(name, str):
            return
        if not suspected:
            schema.suspects.pop(name, None)
        elif not schema.asks(name):
            schema.suspects[name] = self.CLEAN_CALLS
        if not schema.asks(name):
            schema.asking[name] = time.time() + self.ASKING_KEPT_S
            self.save(schema)

    def note_at_once(self, schema, name):
        """A tool has asked again long after a question that was still open: it may do so at any time."""
        if name is not None and name not in schema.at_once and len(schema.at_once) < 10000:
            schema.at_once.add(name)
            self.save(schema)

    def note_clean(self, schema, name):
        """A call of a tool has ended without asking."""
        if len(schema.clean) < 10000 and name is not None:
            schema.clean.add(name)
        left = schema.suspects.get(name)
        if left is not None:
            schema.suspects[name] = left - 1
            if left <= 1:
                del schema.suspects[name]
                schema.asking.pop(name, None)
                self.save(schema)

    def loggers(self, instance, calls):
        """Return those of the calls in flight that a log message can be of, and learn from it.

        What has been seen to end without a message is quiet, until it must have sent one.
        """
        schema = self.of_instance(instance)
        subjects = {call.subject for call in calls}
        for call in calls:
            call.has_logged = True
        if len(subjects) == 1:
            self._note_heard(schema, subjects.pop(), True)
            return calls
        left = [call for call in calls if schema.logs(call.subject) is not False]
        if not left:
            for subject in subjects:
                schema.heard.pop(subject, None)
        return left or calls

    def note_quiet(self, call):
        """A call has ended; if no log message came meanwhile, it is of a kind that does not log."""
        if not call.has_logged and (call.host.level is not None or call.slot.level is not None) and (
                call.schema.logs(call.subject) is None):
            self._note_heard(call.schema, call.subject, False)

    def _note_heard(self, schema, subject, logs):
        if schema.logs(subject) is not logs and len(schema.heard) < 2000:
            schema.heard[subject] = [logs, time.time() + self.ASKING_KEPT_S]
            self.save(schema)

    def settle(self, schema, error):
        """Tell those who wait for a schema that it is known, or why it cannot be."""
        schema.filling = False
        waiters, schema.waiters = schema.waiters, []
        for waiter in waiters:
            waiter(error)

    def is_fresh(self, schema):
        """Was it checked so lately that an instance for one call need not check it again?"""
        return schema.known and time.monotonic() - schema.verified_at < self.CALL_SCOPE_CHECK_S


def capability_kinds(capabilities):
    """Return what servers vary their lists by: the capabilities and members that revisions define.

    Anything else a caller may state freely, and each would be another schema to fetch and keep.
    """
    members = {"roots": ("listChanged",), "sampling": ("tools", "context"), "elicitation": ("form", "url"),
               "tasks": ("requests",), "extensions": (TASKS_EXTENSION,)}
    return [(name, [member for member in known if member in capabilities[name]])
            for name, known in sorted(members.items()) if isinstance(capabilities.get(name), dict)]


_NOT_IN_NAMES = r"[^A-Za-z0-9_-]"
# Model APIs take tool names of up to 64 of these characters.
MAX_TOOL_NAME = 64


def merged_name(server_name, name):
    """Return the name under which a merged endpoint offers a tool or prompt.

    `<server>_<name>` where that is a legal name for model APIs; else a shortened form that
    ends in a hash of both, so that it is the same every time and cannot collide.
    """
    plain = "%s_%s" % (server_name, name)
    safe = re.sub(_NOT_IN_NAMES, "_", plain)
    if safe == plain and len(plain) <= MAX_TOOL_NAME:
        return plain
    return "%s_%s" % (safe[:MAX_TOOL_NAME - 9], short_hash(server_name + "\0" + name)[:8])


class Surface:
    """The servers of one endpoint as one host sees them.

    schemas  server name -> Schema, for the servers of the endpoint that are in use
    """

    def __init__(self, names):
        self.names = names
        self.schemas = {}
        self._merged = {}                # kind -> (generations, generation, items, exposed -> (server, name))
        self._generation = 0

    @property
    def single(self):
        """Is one server passed through, as if the host had launched it?"""
        return len(self.names) == 1

    def known(self):
        """Return the schemas that can be shown."""
        return [(name, self.schemas[name]) for name in self.names
                if name in self.schemas and self.schemas[name].known]

    def capabilities(self, revision):
        """Return the server capabilities to show; all kinds while nothing is known.

        mcpx itself can tell of changes (a server added, a config reloaded), so lists are
        always declared to change.
        """
        known = self.known()
        if not known:
            return {"tools": {"listChanged": True}, "prompts": {"listChanged": True},
                    "resources": {"listChanged": True, "subscribe": True}, "logging": {}}
        merged = {}
        for _, schema in known:
            for name, value in schema.capabilities.items():
                value = value if isinstance(value, dict) else {}
                merged[name] = dict(merged.get(name, {}), **value) if self.single or name not in (
                    "experimental", "extensions", "tasks") else merged.get(name, {})
        if not self.single:
            for name in ("experimental", "extensions", "tasks"):
                merged.pop(name, None)
        for name in ("tools", "prompts", "resources"):
            if name in merged:
                merged[name] = dict(merged[name], listChanged=True)
        return merged

    def initialize_result(self, revision):
        """Return the result of initialize for a host of `revision`."""
        known = self.known()
        info, instructions = {"name": "mcpx", "version": __version__}, None
        if self.single and known:
            _, schema = known[0]
            info, instructions = schema.info or info, schema.instructions
        elif known:
            parts = ["# %s\n%s" % (name, schema.instructions) for name, schema in known if schema.instructions]
            instructions = "\n\n".join(parts) or None
        capabilities = self.capabilities(revision)
        if revision in LEGACY_REVISIONS and TASKS_EXTENSION in (capabilities.get("extensions") or {}):
            # Undefined before 2026-07-28; others pass, as some hosts read them all the same (D-29).
            others = {name: value for name, value in capabilities["extensions"].items() if name != TASKS_EXTENSION}
            capabilities = {name: value for name, value in capabilities.items() if name != "extensions"}
            if others:
                capabilities["extensions"] = others
        result = {"protocolVersion": revision, "capabilities": capabilities, "serverInfo": info}
        if instructions is not None:
            result["instructions"] = instructions
        return spell_result("initialize", result, revision)

    def offers(self, capability):
        """May a host use methods behind this capability? Yes while nothing is known."""
        known = self.known()
        return not known or any(capability in schema.capabilities for _, schema in known)

    def page(self, kind, revision, cursor, size):
        """Return one page of a list as encoded result bytes. Raises RpcError for a bad cursor."""
        if self.single:
            schema = self.schemas.get(self.names[0])
            if schema is None or not schema.known:
                return encode_json({kind: []})
            return schema.page(kind, revision, read_cursor(cursor, schema.generation), size)
        generation, items, _ = self._merge(kind)
        # The pieces may have different revisions; spelling from the newest fits all.
        return encode_page(kind, items, RM, revision, read_cursor(cursor, generation), size, generation)

    def _merge(self, kind):
        stamp = [(name, id(schema), schema.generation) for name, schema in self.known()]
        cached = self._merged.get(kind)
        if cached is None or cached[0] != stamp:
            self._generation += 1
            items, names = [], {}
            for server_name, schema in self.known():
                for item in schema.lists[kind]:
                    if kind in ("tools", "prompts"):
                        exposed = merged_name(server_name, item.get("name"))
                        if exposed in names:
                            continue
                        names[exposed] = (server_name, item.get("name"))
                        item = dict(item, name=exposed)
                    items.append(item)
            cached = self._merged[kind] = (stamp, self._generation, items, names)
        return cached[1:]

    def resolve(self, kind, name):
        """Return (server, its own name) of a tool or prompt. Raises RpcError for an unknown one."""
        if self.single:
            return self.names[0], name
        found = self._merge(kind)[2].get(name)
        if found is None:
            raise RpcError(INVALID_PARAMS, "Unknown %s: %s" % (kind[:-1], name))
        return found

    def servers_for_uri(self, uri, seen):
        """Return the servers that may own a URI, the likeliest first.

        By listing, by template, by having been seen in a result of the server; then all, in
        the order of the endpoint.
        """
        if self.single:
            return list(self.names)
        known = [(name, schema) for name, schema in self.known() if schema.offers("resources")]
        for name, schema in known:
            if any(item.get("uri") == uri for item in schema.lists["resources"]):
                return [name]
        first = [name for name, schema in known
                 if any(template_matches(item.get("uriTemplate"), uri)
                        for item in schema.lists["resourceTemplates"])]
        first += [seen[uri]] if uri in seen else []
        return list(dict.fromkeys(first + [name for name, _ in known]))


# Longer ones are not matched against templates: patterns cost more than their length.
MAX_MATCHED_URI = 2000


def template_matches(template, uri):
    """Could `uri` be an expansion of a URI template (RFC 6570, matched loosely)?"""
    if not isinstance(template, str) or not isinstance(uri, str) or len(uri) > MAX_MATCHED_URI:
        return False
    pattern = "".join(".*" if re.match(r"\{[+#/.;?&]", part) else "[^/]*" if part.startswith("{") else re.escape(part)
                      for part in re.split(r"(\{[^}]*\})", template) if part)
    return re.fullmatch(pattern, uri, re.S) is not None


# ---------------------------------------------------------------------------
# Questions: whose question is this; who may answer
#
# A question goes to the one host whose call is on the instance, or to nobody. It is never
# guessed, never shown to two hosts, and never answered from data of another.
# ---------------------------------------------------------------------------

# Requests during which a server may ask something (PROTOCOL 8.2).
CARRIES_QUESTIONS = frozenset(("tools/call", "prompts/get", "resources/read", "completion/complete"))
# How long other calls are held back while it is found out whose question it is.
QUIESCE_S = 2.0
# A server that asks several things at once has asked them all within this; one that was seen to
# take longer, within the second.
ASKED_ALL_S, ASKED_LATE_S = 1.0, 5.0
# A model's turn cannot be taken by a person later: sampling without a host is refused soon.
OPEN_SAMPLING_S = 10.0

QUESTION_CAPABILITY = {"elicitation/create": "elicitation", "sampling/createMessage": "sampling",
                       "roots/list": "roots", "tasks/get": "tasks", "tasks/result": "tasks", "tasks/cancel": "tasks"}


class Question:
    """A request from an upstream on its way to a host, or waiting for somebody to answer it."""

    __slots__ = ("id", "instance", "upstream_id", "method", "params", "host", "call", "asked_wall", "asked_at",
                 "deadline_at", "timer", "settled", "why_open", "on_answer", "candidates", "reply")

    def __init__(self, question_id, instance, upstream_id, method, params):
        self.id, self.instance, self.upstream_id = question_id, instance, upstream_id
        self.method, self.params = method, params
        self.host = self.call = self.timer = self.deadline_at = self.why_open = None
        self.on_answer = None            # takes the answer instead of the upstream
        self.candidates = []             # calls that can have asked, while it is not known which did
        self.asked_wall, self.asked_at = time.time(), time.monotonic()
        self.settled = False
        self.reply = None                # the answer, while it is not the upstream's turn to get it


class Questions:
    """All questions that are not answered yet, by our id and by the upstream's."""

    def __init__(self, loop, log, config, new_id, schemas):
        self.loop, self.log, self.config, self.new_id, self.schemas = loop, log, config, new_id, schemas
        self.owner_of_task = lambda instance, task_id: None     # set by who knows the tasks
        self.by_id = {}                  # our id -> Question
        self.by_upstream = {}            # (instance id, upstream's id) -> Question
        self._unattributed = []          # questions of instances that are being quiesced
        # Tasks that hosts made of questions: (instance id, our task id) -> (host, its task id).
        self.host_tasks = collections.OrderedDict()

    def ask(self, instance, message):
        """Take a question from an upstream."""
        method, params = message["method"], message.get("params") or {}
        if (instance.id, message["id"]) in self.by_upstream:
            # One answer can come to one id; a second question would be left over, and taken for another host's.
            instance.on_noise("a second %s under the id %s" % (method, json.dumps(message["id"])))
            return
        capability = QUESTION_CAPABILITY.get(method)
        if capability is None or capability not in instance.capabilities:
            # Never declared, so it must not be asked; nobody would be there to answer.
            instance.upstream.answer(message["id"], {"error": RpcError(
                METHOD_NOT_FOUND, "the client does not offer %s" % method).as_object()})
            return
        question = self._take_in(instance, message["id"], method, params)
        instance.pool.note_change(instance)
        if method.startswith("tasks/"):
            self._about_task(question)
        else:
            self._attribute(question)

    def _take_in(self, instance, upstream_id, method, params):
        question = Question(self.new_id(), instance, upstream_id, method, params)
        self.by_id[question.id] = self.by_upstream[(instance.id, upstream_id)] = question
        instance.questions += 1
        return question

    def _put_to_hosts(self, instance):
        """Return the questions of an instance that are known to be of a host's call."""
        return [question for question in self.by_id.values()
                if question.instance is instance and question.call is not None and question.on_answer is None]

    def open_of(self, instance):
        """Return what another daemon must know of the questions that an instance waits for.

        Upstream's id and method; of those that wait for a person also params, why, and until when.
        """
        found = []
        for question in self.by_id.values():
            if question.instance is instance and question.on_answer is None:
                found.append([question.upstream_id, question.method])
                if question.why_open and question.host is None:
                    until = time.time() + question.deadline_at - time.monotonic()
                    found[-1] += [question.params, question.why_open, until]
        return found

    def reopen(self, instance, upstream_id, method, params, why, until):
        """Let a question wait for a person that already did when the daemon before was killed."""
        question = self._take_in(instance, upstream_id, method, params)
        question.why_open = why
        self._set_deadline(question, max(0.1, until - time.time()))

    def ask_for(self, instance, host, call, method, params, on_answer):
        """Ask a host something that a modern upstream wants in a retry; it is plain whose it is."""
        question = Question(self.new_id(), instance, None, method, params)
        question.on_answer, question.call = on_answer, call
        self.by_id[question.id] = question
        refusal = refusal_of_question(method, params, host.revision or LATEST_LEGACY)
        if refusal is not None:
            self._refuse(question, refusal)
        elif not host.can_answer(question):
            self._refuse(question, RpcError(INTERNAL_ERROR, "the host cannot be asked this: %s" % method))
        else:
            self._hand_over(question, host)

    def place_again(self, question):
        """Find another call for a question whose call, as it seemed, has ended without an answer to it.

        Only of the same party: it was known to be of theirs.
        """
        party = question.call.party if question.call is not None else None
        question.host.withdraw_question(question, None)
        question.host = question.call = None
        question.timer.cancel()

        def place():
            calls = [call for call in possible_calls(question.instance) if call.party == party]
            if question.settled:
                return
            if calls and question.on_answer is None:
                self._found(question, calls)
            else:
                self.give_up(question, "the request that this belonged to is over")
        self.loop.soon(place)

    def _about_task(self, question):
        """The upstream asks about a task that a host made of an earlier question."""
        host, task_id = self.host_tasks.get((question.instance.id, question.params.get("taskId")), (None, None))
        if host is None or host.closed:
            self._refuse(question, RpcError(INVALID_PARAMS, "unknown task"))
            return
        question.params = dict(question.params, taskId=task_id)
        self._hand_over(question, host)

    def _note_task(self, question, result):
        """Give the task that a host made of a question an id of ours toward the upstream."""
        inner = result.get("task")
        if isinstance(inner, dict) and isinstance(inner.get("taskId"), str):
            our_id = "t%d" % self.new_id()
            self.host_tasks[(question.instance.id, our_id)] = (question.host, inner["taskId"])
            while len(self.host_tasks) > 10000:
                self.host_tasks.popitem(last=False)
            return dict(result, task=dict(inner, taskId=our_id))
        return result

    def _task_for_upstream(self, instance, host, value):
        """Return a result or params with the host's task id, if any, as the upstream knows it."""
        for (instance_id, our_id), (owner, task_id) in self.host_tasks.items():
            if instance_id != instance.id or owner is not host:
                continue
            if value.get("taskId") == task_id:
                value = dict(value, taskId=our_id)
            meta = value.get("_meta")
            related = meta.get(META_RELATED_TASK) if isinstance(meta, dict) else None
            if isinstance(related, dict) and related.get("taskId") == task_id:
                value = dict(value, _meta=dict(meta, **{META_RELATED_TASK: {"taskId": our_id}}))
        return value

    def on_host_task_status(self, host, params):
        """A host tells how its task is doing: to the upstream that it belongs to."""
        for (instance_id, _), (owner, task_id) in list(self.host_tasks.items()):
            if owner is host and params.get("taskId") == task_id:
                instance = host.core.pool.instances.get(instance_id)
                if instance is not None and instance.state in ("idle", "busy"):
                    instance.upstream.notify("notifications/tasks/status",
                                             self._task_for_upstream(instance, host, params))

    def _attribute(self, question):
        if question.settled:
            return
        if question.instance.orphans:
            # It may be of a call whose host is not back yet; that is a matter of a moment.
            self.loop.call_later(0.1, lambda: self._attribute(question))
            return
        related = (question.params.get("_meta") or {}).get(META_RELATED_TASK) if isinstance(
            question.params.get("_meta"), dict) else None
        owner = self.owner_of_task(question.instance, related.get("taskId")) if isinstance(related, dict) else None
        if owner is not None:
            self._to_host(question, owner)
            return
        candidates = possible_calls(question.instance)
        for other in self.by_id.values():
            # A cancelled call that may have asked before may ask again.
            if other.instance is question.instance:
                candidates += [call for call in other.candidates
                               if call.cancelled and not call.over and call not in candidates]
        question.candidates = candidates = self._without_waiting(question.instance, candidates)
        parties = {call.party for call in candidates}
        if len(parties) == 1:
            self._found(question, candidates)
        elif len(parties) > 1:
            self._quiesce(question)
        else:
            bound = only_host(question.instance)
            if bound is not None:
                self._to_host(question, bound)
            else:
                # MCP SEP-2260: a question belongs to a request that is being processed.
                self._refuse(question, RpcError(INVALID_PARAMS, "no request is in progress that this could belong to"))

    def waiting_hosts(self, instance):
        """Return the hosts all of whose calls on an instance wait for an answer: they ask nothing more.

        A server may ask several things at once: they count when it has had the time for that,
        and has not been seen to take more.
        """
        asked = collections.Counter()
        newest = {}
        for question in self._put_to_hosts(instance):
            asked[question.call.host] += 1
            newest[question.call.host] = question.asked_at
        if not asked:
            return set()
        calls, at_once = possible_calls(instance), self.schemas.of_instance(instance).at_once
        now, hosts = time.monotonic(), set()
        for host, count in asked.items():
            mine = [call for call in calls if call.host is host]
            patience = ASKED_LATE_S if any(name_of(call) in at_once for call in mine) else ASKED_ALL_S
            if len(mine) <= count and now - newest[host] >= patience:
                hosts.add(host)
        return hosts

    def asking_parties(self, instance):
        """Return who was asked so short a time ago that the server may not have asked all yet."""
        now = time.monotonic()
        return {question.call.party for question in self._put_to_hosts(instance)
                if now - question.asked_at < ASKED_ALL_S}

    def _without_waiting(self, instance, calls):
        """Leave out the calls that wait for an answer, where another one can have asked."""
        waiting = self.waiting_hosts(instance)
        schema = self.schemas.of_instance(instance)
        active = [call for call in calls if call.host not in waiting]
        if any(call.asks or name_of(call) not in schema.clean for call in active):
            return active
        return calls

    def _others_may_ask(self, question):
        """Does another host's call run that asks, so that what this one asks next could be taken for its?"""
        call, instance = question.call, question.instance
        if call is None or question.on_answer is not None or not call.asks:
            return False
        others = [other for other in instance.upstream.in_flight.values()
                  if other.asks and other.party != call.party and not other.cancelled]
        return bool(others) and not {other.host for other in others} <= self.waiting_hosts(instance)

    def _turn_is_free(self, instance):
        """A call that asks has ended, or waits: the next one goes on, with its answer or from the start."""
        for question in list(self.by_id.values()):
            if question.reply is not None and question.instance is instance and not self._others_may_ask(question):
                self._settle(question, question.reply)
        if instance.slot is not None and instance.slot.askers:
            instance.pool.wake(instance.slot)

    def _found(self, question, calls):
        """It is known whose question it is: one of these calls has asked."""
        question.candidates = []
        names = {name_of(call) for call in calls}
        if len(names) == 1:
            self.schemas.note_asking(question.instance, next(iter(names)))
        active = [call for call in calls if not call.cancelled and not call.host.closed]
        able = [call for call in active if call.host.can_answer(question)] or active or calls
        if able[0].host.era == "modern":
            # PROTOCOL 8.2: the oldest that can be asked; each request is a host of its own. One that was
            # asked before may never come back with its answer, so it comes after those that wait.
            able.sort(key=lambda call: not call.host.is_there)
            self._to_host(question, able[0].host, [call for call in calls if call.host is able[0].host])
        else:
            self._to_host(question, able[0].host, calls)

    def _quiesce(self, question):
        """Hold new calls back and let those finish that can: a call that asked cannot."""
        slot = question.instance.slot
        self._unattributed.append(question)
        slot.held = True
        for call in question.candidates:
            call.may_have_asked = True

        def give_up():
            if question in self._unattributed:
                self._unattributed.remove(question)
                for call in self._left(question):
                    # What could not finish has perhaps asked; who proves otherwise is forgotten.
                    self.schemas.note_asking(question.instance, name_of(call), suspected=True)
                self._release(slot)
                self._leave_open(question, "calls of several hosts are in flight on a shared instance")
        self.loop.call_later(QUIESCE_S, give_up)

    def _left(self, question):
        """Return the calls that can still have asked: one that asked cannot have been answered.

        A cancelled call whose answer never came stays one of them, however long ago.
        """
        return [call for call in question.candidates if not call.over]

    def on_lease_back(self, instance):
        """A call on an instance is over: perhaps it can now be told whose its questions are.

        Also for those that are open already; who came after a question cannot have asked it.
        """
        if not self.by_id:
            return
        for question in [q for q in self.by_id.values() if q.instance is instance and q.candidates]:
            left = self._left(question)
            if left and all(call.cancelled or call.host.closed for call in left):
                # Whoever's it was, nobody waits for it any more.
                self.give_up(question, "the requests that this may belong to were cancelled")
                continue
            if len({call.party for call in left}) > 1:
                continue
            clean = self.schemas.of_instance(instance).clean
            if left and any(call.asks for call in question.candidates if call.over) and not any(
                    call.asks or name_of(call) not in clean for call in left):
                # More likely a call of the tool that asks did not wait for the answer than that one of these asks.
                left = []
            if question in self._unattributed:
                self._unattributed.remove(question)
                self._release(instance.slot)
            if question.timer is not None:
                question.timer.cancel()
                question.why_open = None
            if left:
                self._found(question, left)
            else:
                self._refuse(question, RpcError(INVALID_PARAMS, "the request that this belonged to is over"))
        self._turn_is_free(instance)

    def _release(self, slot):
        if not any(q.instance.slot is slot for q in self._unattributed):
            slot.held = False
            self.loop.soon(lambda: slot.pool.wake(slot))

    def _to_host(self, question, host, calls=()):
        active = [call for call in calls if not call.cancelled]
        if host.closed or (calls and not active):
            self.give_up(question, "the request that this belongs to was cancelled")
            return
        # Where it is one of several calls of this host, rather one of a tool that asks.
        question.call = ([call for call in active if call.asks] or active or [None])[-1]
        if question.call is not None:
            call, schema = question.call, self.schemas.of_instance(question.instance)
            call.has_asked, call.asks, call.may_ask = call.has_asked + 1, True, True
            if any(q.call is call and q is not question and question.asked_at - q.asked_at >= ASKED_ALL_S
                   for q in self.by_id.values()):
                self.schemas.note_at_once(schema, name_of(call))
            for patience in (ASKED_ALL_S, ASKED_LATE_S):
                self.loop.call_later(patience + 0.001, lambda: self._turn_is_free(question.instance))
        refusal = refusal_of_question(question.method, question.params, host.revision or LATEST_LEGACY)
        if refusal is not None:
            self._refuse(question, refusal)
            return
        if not host.can_answer(question):
            self._leave_open(question, "the host whose call it is cannot be asked")
            return
        self._hand_over(question, host)

    def _hand_over(self, question, host):
        question.host = host
        host.questions[question.id] = question
        self._set_deadline(question, self.config.get("question.timeout", question.instance.definition.server))
        host.send_question(question)

    def _leave_open(self, question, why):
        """Nobody can be asked: wait for a person where that makes sense, else refuse at once."""
        if question.method == "roots/list":
            self._refuse(question, RpcError(INTERNAL_ERROR, "roots are not available: %s" % why))
            return
        timeout = self.config.get("question.timeout", question.instance.definition.server)
        if question.method == "sampling/createMessage":
            timeout = min(timeout, OPEN_SAMPLING_S)
        question.why_open = why
        self._set_deadline(question, timeout)
        question.instance.pool.note_change(question.instance)
        self.log.warning("a question of server %s is open: %s (%s)", question.instance.definition.server.name,
                         question.method, why)

    def _set_deadline(self, question, seconds):
        question.deadline_at = time.monotonic() + seconds
        question.timer = self.loop.call_later(seconds, lambda: self.give_up(question, "its deadline has passed"))

    def give_up(self, question, reason):
        """Nobody answered: tell the upstream in the form that it can work with, and the host."""
        if question.settled:
            return
        if question.host is not None:
            question.host.withdraw_question(question, reason)
        if question.method == "elicitation/create":
            self._settle(question, {"result": {"action": "cancel"}})
        elif question.method == "sampling/createMessage":
            self._settle(question, {"error": RpcError(SAMPLING_REFUSED, "no answer: %s" % reason).as_object()})
        else:
            self._settle(question, {"error": RpcError(INTERNAL_ERROR, "no answer: %s" % reason).as_object()})

    def answer(self, question, message):
        """A host (or a person) has answered."""
        result = message.get("result")
        if self.host_tasks or (isinstance(result, dict) and "task" in result):
            if isinstance(result, dict):
                result = self._task_for_upstream(question.instance, question.host, self._note_task(question, result))
                message = {"result": result}
        if self._others_may_ask(question):
            # Two that ask must not go on at once: a moment for the other to ask or to end.
            question.reply = message
            if question.host is not None:
                question.host.questions.pop(question.id, None)
            question.timer.cancel()
            question.timer = self.loop.call_later(QUIESCE_S, lambda: self._settle(question, message))
            return
        self._settle(question, message)

    def _refuse(self, question, error):
        self._settle(question, {"error": error.as_object()})

    def _settle(self, question, message):
        if question.settled:
            return
        self._forget(question)
        for call in question.candidates:
            if call.cancelled and not call.over and question.instance.state in ("idle", "busy"):
                # The answer sets it going again, if it was its question.
                question.instance.upstream.haunt(call, self.config.get(
                    "cancelGrace", question.instance.definition.server))
        if question.on_answer is not None:
            question.on_answer(message)
        elif question.instance.state in ("starting", "idle", "busy"):
            question.instance.upstream.answer(question.upstream_id, message)

    def _forget(self, question):
        question.settled = True
        if question.timer is not None:
            question.timer.cancel()
        self.by_id.pop(question.id, None)
        if self.by_upstream.pop((question.instance.id, question.upstream_id), None) is not None:
            question.instance.questions -= 1
        question.instance.pool.note_change(question.instance)
        if question in self._unattributed:
            self._unattributed.remove(question)
            self._release(question.instance.slot)
        if question.host is not None:
            question.host.questions.pop(question.id, None)

    def on_cancelled(self, instance, params):
        """The upstream does not want an answer any more."""
        upstream_id = params.get("requestId")
        question = self.by_upstream.get((instance.id, upstream_id)) if is_valid_id(upstream_id) else None
        if question is not None:
            self._forget(question)
            if question.host is not None:
                question.host.withdraw_question(question, params.get("reason") or "cancelled by the server")

    def on_gone(self, instance):
        """An instance has ended: nobody waits for its answers."""
        for name in [name for name in self.host_tasks if name[0] == instance.id]:
            del self.host_tasks[name]
        for question in [q for q in self.by_id.values() if q.instance is instance]:
            self._forget(question)
            if question.host is not None:
                question.host.withdraw_question(question, "the server has ended")
            if question.on_answer is not None:
                question.on_answer({"error": StreamLost(
                    "the server has ended while its question was open").as_object()})


def name_of(call):
    """Return what a call is of: a tool, a prompt, or the URI of a resource; None where it names none."""
    name = call.params.get("name") or call.params.get("uri")
    return name if isinstance(name, str) else None


def only_host(instance):
    """Return the one host that has ever used an instance, if it is still there; else None."""
    hosts = instance.slot.hosts
    return next(iter(hosts)) if len(hosts) == 1 and len(instance.callers) < 2 else None


def possible_calls(instance):
    """Return the hosts' calls that a server may be at: in flight, or cancelled a moment ago."""
    upstream = instance.upstream
    return [call for calls in (upstream.ghosts, upstream.in_flight) for call in calls.values() if call.host is not None]


# ---------------------------------------------------------------------------
# Host: the server half of MCP, one object per connection
#
# Reads what a host sends, tells who asks, and gives every request exactly one answer. Its
# link carries lines; processes and sockets are not its business.
# ---------------------------------------------------------------------------

def wants_tasks(call, error):
    """Does a modern server refuse this call because it runs as a task only?"""
    data = error.get("data") if isinstance(error.get("data"), dict) else {}
    required = data.get("requiredCapabilities") if isinstance(data.get("requiredCapabilities"), dict) else {}
    extensions = required.get("extensions")
    return (error.get("code") == MISSING_CAPABILITY and not call.opts_in and call.slot is not None
            and call.method == "tools/call" and isinstance(extensions, dict) and TASKS_EXTENSION in extensions)


# How often a task is looked at where the server names no interval, and the bounds of what it names.
TASK_POLL_S = (0.2, 1.0, 10.0)


class TaskFollower:
    """Follows a modern server's task to its end for a legacy host that knows of none."""

    def __init__(self, host, call, result):
        self.host, self.call, self.core = host, call, host.core
        self.task_id = result.get("taskId")
        self.interval = result.get("pollIntervalMs")
        self.asked = set()               # keys of inputRequests that the host has been asked
        self.instance = next((i for i in host.core.pool.instances.values() if i.slot is call.slot), None)

    def start(self):
        """Look at it now and then; the instance stays for it."""
        self.call.slot.tasks.add(self.task_id)
        self._later()

    def is_wanted(self):
        """Does the host still wait?"""
        return self.host.calls.get(self.call.host_id) is self.call and not self.host.closed

    def _later(self):
        named = self.interval / 1000.0 if isinstance(self.interval, (int, float)) else TASK_POLL_S[1]
        self.core.loop.call_later(min(max(named, TASK_POLL_S[0]), TASK_POLL_S[2]), self._look)

    def _look(self):
        if not self.is_wanted():
            self._send("tasks/cancel", {}, lambda *_: None)
            self._leave()
            return
        self._send("tasks/get", {}, self._seen)

    def _send(self, method, params, on_answer):
        inner = Call(method, dict(params, taskId=self.task_id), on_answer, self.host, None, None, self.call.identity)
        inner.opts_in, inner.may_repeat = True, method == "tasks/get"
        self.core.pool.submit(inner, self.call.slot)

    def _seen(self, _call, message, _line):
        state = message.get("result")
        if not self.is_wanted():
            self._look()                 # which cancels it
        elif not isinstance(state, dict):
            self._finish(message if "error" in message else {"error": RpcError(
                INTERNAL_ERROR, "the task's state is no object").as_object()})
        elif state.get("status") == "completed":
            self._finish({"result": state.get("result")})
        elif state.get("status") in ("failed", "cancelled"):
            self._finish({"error": state.get("error") or RpcError(
                INTERNAL_ERROR, "the task was %s" % state["status"]).as_object()})
        else:
            requests = state.get("inputRequests")
            for key, entry in (requests.items() if isinstance(requests, dict) else ()):
                if key not in self.asked and isinstance(entry, dict):
                    self.asked.add(key)
                    self._ask(key, entry)
            self._later()

    def _ask(self, key, entry):
        def answered(message):
            result = message.get("result") if isinstance(message.get("result"), dict) else {"action": "cancel"}
            reply = {name: value for name, value in result.items() if name not in ("_meta", "resultType")}
            self._send("tasks/update", {"inputResponses": {key: reply}}, lambda *_: None)
        params = entry.get("params") if isinstance(entry.get("params"), dict) else {}
        self.core.questions.ask_for(self.instance, self.host, self.call, entry.get("method"), params, answered)

    def _finish(self, message):
        self._leave()
        if self.is_wanted():
            self.call.opts_in = self.call.done = False
            self.call.finish(message)

    def _leave(self):
        self.call.slot.tasks.discard(self.task_id)
        self.core.pool.wake(self.call.slot)


# A server that asks more often than this within one call does not come to an end.
MAX_INPUT_ROUNDS = 10


class InputLoop:
    """A modern upstream answered a legacy host's request with questions: ask, then retry.

    PROTOCOL 7.4. The host's request stays open meanwhile; every question is an ordinary
    server request to it, all at once.
    """

    def __init__(self, host, call, result):
        self.host, self.call, self.core = host, call, host.core
        self.instance = next((i for i in host.core.pool.instances.values() if i.slot is call.slot), None)
        self.requests = result.get("inputRequests") if isinstance(result.get("inputRequests"), dict) else {}
        self.state = result.get("requestState")
        self.responses = {}
        self.left = set(self.requests)
        # The server's state is good for this very instance, which stays until the retry.
        self.hold = "input %d" % host.core.new_id()
        call.slot.tasks.add(self.hold)

    def release(self):
        """The instance need not stay for this any more."""
        self.call.slot.tasks.discard(self.hold)
        self.core.pool.wake(self.call.slot)

    def ask(self):
        """Ask everything at once; with nothing to ask, retry after a moment."""
        rounds = self.call.rounds = self.call.rounds + 1
        if rounds > MAX_INPUT_ROUNDS or (not self.requests and self.state is None):
            self.fail(RpcError(INTERNAL_ERROR, "the server asked %d times without an answer" % rounds))
            return
        if not self.requests:
            self.core.loop.call_later(0.05 * min(rounds, 5), self.retry)
        for key, entry in self.requests.items():
            method = entry.get("method") if isinstance(entry, dict) else None
            params = entry.get("params") if isinstance(entry, dict) and isinstance(entry.get("params"), dict) else {}
            if method not in ("elicitation/create", "sampling/createMessage", "roots/list"):
                self.fail(RpcError(INTERNAL_ERROR, "the server asked for %s, which no host answers" % method))
                return
            if method == "elicitation/create" and params.get("mode") == "url":
                params = dict(params, elicitationId="e%d" % self.core.new_id())
            self.core.questions.ask_for(self.instance, self.host, self.call, method, params,
                                        lambda message, key=key, method=method: self.on_answer(key, method, message))

    def is_wanted(self):
        """Does the host still wait for this request?"""
        return self.host.calls.get(self.call.host_id) is self.call and not self.host.closed

    def on_answer(self, key, method, message):
        """One question is answered, or refused."""
        if not self.is_wanted():
            self.release()
            return
        lost = isinstance(message.get("error"), dict) and message["error"].get("code") == STREAM_LOST
        if "error" in message and (lost or method != "elicitation/create"):
            # There is no way to tell a modern server that it is refused: the request fails.
            error = message["error"]
            self.fail(RpcError(error.get("code", INTERNAL_ERROR), str(error.get("message", "")), error.get("data")))
            return
        result = message.get("result") if isinstance(message.get("result"), dict) else {"action": "cancel"}
        self.responses[key] = {name: value for name, value in result.items() if name not in ("_meta", "resultType")}
        self.left.discard(key)
        if not self.left:
            self.retry()

    def retry(self):
        """Send the request again with the answers, under a new id."""
        call = self.call
        if not self.is_wanted():
            self.release()
            return
        params = {name: value for name, value in call.params.items() if name not in ("inputResponses", "requestState")}
        if self.responses:
            params["inputResponses"] = self.responses
        if self.state is not None:
            params["requestState"] = self.state
        again = Call(call.method, params, self.host._finished, self.host, call.host_id, call.seq, call.identity)
        again.token, again.schema, again.rounds, again.message = call.token, call.schema, call.rounds, call.message
        self.host.calls[call.host_id] = again
        self.core.pool.submit(again, call.slot)
        self.release()

    def fail(self, error):
        """The request ends here."""
        self.release()
        if self.is_wanted():
            self.call.done = False
            self.call.fail(error)


class Batch:
    """A 2025-03-26 batch: its answers go out together once all are there."""

    __slots__ = ("seq", "left", "answers")

    def __init__(self, seq, left):
        self.seq, self.left, self.answers = seq, left, []


class Task:
    """A core task of 2025-11-25: the id that a host knows it by, and where it really is."""

    __slots__ = ("id", "upstream_id", "slot", "session", "host", "last", "call", "timer")

    def __init__(self, task_id, upstream_id, slot, call):
        self.id, self.upstream_id, self.slot, self.call = task_id, upstream_id, slot, call
        self.session, self.host = call.identity.session, call.host
        self.last = self.timer = None


TERMINAL_STATUSES = ("completed", "failed", "cancelled")
# A task of a server that names no ttl is remembered this long.
DEFAULT_TASK_TTL_S = 3600.0


class Host:
    """What hosts of every revision have in common: who asks, which instance, which answer.

    `era` is that of its own messages: an instance started for it is spoken to in the same.

    `link` carries lines: answer(seq, data), message(data, call), settled(seq), refuse(seq,
    data, code) and keep_state(state). `names` are the servers of its endpoint; `identity`
    is the connection's own; `env` its environment, for children that are started for it.
    """

    era = "legacy"
    is_there = True                      # a question can be put to it right now

    def __init__(self, core, link, names, identity, env, definitions=None):
        self.core, self.link, self.identity, self.env = core, link, identity, env
        self.surface = Surface(names)
        self.id = "h%d" % core.new_id()
        self.revision = None
        self.capabilities, self.info = {}, {}
        self._declared = {}              # see declared
        self.level = None
        self.calls = {}                  # host id -> Call, until answered
        self.slots = set()               # slots that it has used and that still exist
        self.questions = {}              # our id -> Question that it was asked
        self.subscriptions = {}          # uri -> slot
        self.seen_uris = collections.OrderedDict()    # uri -> (server, identity of the named call)
        self.closed = False
        self.version = None              # of its shim
        self.roots_changes = 0           # how often it has said that they changed
        self.roots = None                # Place of its first root, once asked
        self.connected_wall = time.time()
        # See slot_for -> (config generation, Definition); may be shared by hosts of one environment.
        self._definitions = {} if definitions is None else definitions
        self.answered_without = False    # a list or its handshake was answered before all was known
        self.schema_errors = {}          # server name -> why it has no schema

    # -- who asks ------------------------------------------------------------------

    def own_identity(self):
        """Return who its lists are for: the connection, with a fresh id of a call."""
        keys = self.core.config.get("transport.sessionMetaKeys")
        return self.identity.with_meta(self.link.named_by(None, None), keys, self.core.new_id())

    def with_identity(self, call, scope, on_identity):
        """Find out who a request is from, then `on_identity()`; `call.identity` is set then."""
        meta = self.link.named_by(call.seq, call.params.get("_meta"))
        named_cwd = meta.get(META_CWD)
        if isinstance(named_cwd, str) and named_cwd:
            self.core.find_place(named_cwd, lambda place: self._guarded(
                call, lambda: self._with_place(call, scope, on_identity, meta, place)))
        else:
            self._with_place(call, scope, on_identity, meta, None)

    def _with_place(self, call, scope, on_identity, meta, place):
        # No function that calls itself by a name of its own: such a circle would keep the call's
        # message until the collector comes.
        keys = self.core.config.get("transport.sessionMetaKeys")
        call.identity = self.identity.with_meta(meta, keys, self.core.new_id(), place)
        needs_cwd = scope in ("cwd", "worktree", "repo") and call.identity.place.cwd is None
        if needs_cwd and place is None and self.roots is None and self.can_tell_roots():
            self._ask_roots(call, lambda: self._guarded(
                call, lambda: self._with_place(call, scope, on_identity, meta, self.roots)))
        else:
            if needs_cwd and place is None and self.roots is not None and self.roots.cwd:
                call.identity.place = self.roots
            on_identity()

    def _guarded(self, call, step):
        """Take a step of a request; its errors are its answer.

        Also mistakes of ours: every request has an answer, and its link goes on.
        """
        if call.done or self.closed:
            return
        try:
            step()
        except RpcError as error:
            call.fail(error)
        except Exception:
            self.core.log.error("internal error, please report it: %s", traceback.format_exc())
            call.fail(RpcError(INTERNAL_ERROR, "internal error of mcpx; its log has more"))

    # -- what it asks for -------------------------------------------------------------

    def slot_for(self, server, identity, for_lists=False):
        """Return the slot of a server for one identity of this host. Raises RpcError.

        `for_lists`: it is started to be listed only, so a narrower scope harms nobody.
        """
        core = self.core
        scope = core.config.get("scope", server)
        key = scope_key(scope, identity)
        if key.degraded and not for_lists:
            core.note_degraded(server.name, scope, key.degraded)
        return core.pool.slot_for(self.definition_for(server, identity, key), key, self.declared(server), identity)

    def definition_for(self, server, identity, key):
        """Return the Definition of a server for one identity of this host. Raises RpcError."""
        core = self.core
        # All that a definition takes from an identity: {session} and {cwd} may stand in its entry.
        name = (server.name, key.text, identity.session, identity.place.cwd, self.era)
        cached = self._definitions.get(name)
        if cached is not None and cached[0] == core.config_generation:
            return cached[1]
        definition = Definition(core.config, server, identity, key, self.env, core.secret, self.era)
        if not key.text.startswith("call:"):         # no other request has that key
            if len(self._definitions) > 500:
                self._definitions.clear()
            self._definitions[name] = (core.config_generation, definition)
        return definition

    def declared(self, server):
        """Return the capabilities that a server started for this host is told of."""
        confined = self.core.config.get("scope", server) in CONFINED_SCOPES
        known = self._declared.get(confined)
        if known is None or known[0] is not self.capabilities:
            known = (self.capabilities, declared_capabilities(self.capabilities, LATEST_LEGACY, confined))
            self._declared[confined] = known
        return known[1]

    def name_by_uri(self, call, server_name):
        """Let an unnamed request for a URI that a named call was shown be that session's."""
        uri = call.params.get("uri")
        server, identity = self.seen_uris.get(uri, (None, None)) if isinstance(uri, str) else (None, None)
        if identity is None or server != server_name or call.identity.named:
            return
        meta = call.params.get("_meta")
        place = call.identity.place if isinstance(meta, dict) and meta.get(META_CWD) else identity.place
        call.identity = Identity("named", identity.session, True, identity.parent, place, call.identity.pid,
                                 call.identity.started, call.identity.call)

    def forward(self, call, server_name):
        """Send a request to the instance of a server that this request's identity reaches."""
        server = self.core.server(server_name)

        def identified():
            if call.method.startswith("resources/"):
                self.name_by_uri(call, server_name)
            slot = self.slot_for(server, call.identity)
            schema = self.core.schema_for(self, server, slot.definition, slot)
            self._submit(call, slot, schema)
        self.with_identity(call, self.core.config.get("scope", server), identified)

    def _submit(self, call, slot, schema):
        try:
            self._submit_to(call, slot, schema)
        except RpcError:
            self.core.pool.wake(slot)    # which forgets a slot that nothing came of
            raise

    def _submit_to(self, call, slot, schema):
        call.schema = schema
        call.route_stamp = (self.core.config_generation, self.roots_changes)
        tool = schema.tool(call.params.get("name")) if call.method == "tools/call" else None
        hints = tool.get("annotations") if tool and isinstance(tool.get("annotations"), dict) else {}
        call.may_repeat = call.method != "tools/call" or bool(
            hints.get("readOnlyHint") or hints.get("idempotentHint"))
        orphan = None
        if call.losses and self.core.pool.recovered is not None and token_of(call) != NO_TOKEN:
            orphan = self.core.pool.claim(call)
            if orphan is not None:
                # The shim counts daemons; that a child died with it as well only the journal knows.
                call.losses = orphan.sends - 1 if orphan.state == QUEUED else max(call.losses, orphan.sends)
            elif self.link.was_journalled:
                call.losses = 0          # no daemon has ever handed it on
        call.params = params = self._params_for_upstream(call, schema)
        if orphan is not None and self.core.pool.take_up(call, slot, orphan):
            return
        if orphan is not None:
            # It counts as lost, whatever comes of it; its entry stays until that is told, or it is sent anew.
            call.mark, orphan.call.mark = orphan.call.mark, None
            self.link.note_marked(call)
            self.core.pool.let_go(orphan)
        if call.losses and (not call.may_repeat or call.losses > 1):
            raise StreamLost("mcpx was interrupted while this request was in flight; whether it was carried out "
                             "is not known")
        call.attempts = call.losses      # it is sent once more, whoever sent it before
        call.asks = schema.asks(name_of(call))
        call.may_ask = call.asks or (call.method in CARRIES_QUESTIONS and name_of(call) not in schema.clean)
        call.logs = bool(schema.logs(call.subject))
        if call.line is not None and (params is not call.message.get("params") or call.token is not None):
            call.line = None
        if self.level is not None:
            self.core.pool.set_level(slot, self.core.wanted_level(slot, self))
        self.core.pool.renew_unused(slot, self.declared(slot.server))
        self.core.pool.submit(call, slot)

    def _params_for_upstream(self, call, schema):
        params = strip_hop_meta(call.params)
        meta = params.get("_meta")
        if isinstance(meta, dict) and is_valid_id(meta.get("progressToken")):
            call.token = meta["progressToken"]
        if self.revision != schema.revision:
            params = spell_params(call.method, params, schema.revision)
        if "task" in params and "tasks" not in schema.capabilities:
            params = {name: value for name, value in params.items() if name != "task"}
        return params

    def on_progress(self, call, params):
        """Pass progress on under this host's own token."""
        params = spell_params("notifications/progress", dict(params, progressToken=call.token), self.revision)
        self.tell("notifications/progress", params, call)

    def cancel(self, call, reason):
        """Give up a request of this host; it gets no answer."""
        self.calls.pop(call.host_id, None)
        for question in [q for q in self.questions.values() if q.call is call and q.on_answer is not None]:
            self.core.questions.give_up(question, "the request was cancelled")
        if call.slot is not None:
            self.core.pool.cancel(call, reason)
        else:
            call.cancelled = call.done = True
        self._settled(call.seq)

    # -- what it is answered ------------------------------------------------------------

    def _send(self, seq, message):
        self._send_line(seq, encode_json(message))

    def _send_line(self, seq, data):
        if isinstance(seq, Batch):
            seq.answers.append(bytes(data))
            self._batch_step(seq)
        elif not self.closed:
            self.link.answer(seq, data)

    def _settled(self, seq):
        """A line needs no answer (any more)."""
        if isinstance(seq, Batch):
            self._batch_step(seq)
        elif not self.closed:
            self.link.settled(seq)

    def _batch_step(self, batch):
        batch.left -= 1
        if batch.left or self.closed:
            return
        if batch.answers:
            self.link.answer(batch.seq, b"[" + b",".join(batch.answers) + b"]")
        else:
            self.link.settled(batch.seq)

    def _note_end(self, call):
        """What it did not do is learned too: its tool may have been suspected of asking."""
        if call.schema is not None and call.slot is not None:
            self.core.schemas.note_quiet(call)
            if not call.has_asked and not call.may_have_asked:
                self.core.schemas.note_clean(call.schema, name_of(call))

    def _mark_restarted(self, call, result):
        """State is not lost in silence: say once that another instance answers now, and why."""
        reason = self.core.pool.lost_state_of(call.slot.server.name, call.slot.key.text, call.identity.session)
        if reason is None:
            return result
        meta = result.get("_meta") if isinstance(result.get("_meta"), dict) else {}
        return dict(result, _meta=dict(meta, **{META_RESTARTED: {"reason": reason}}))

    def keep_state(self):
        """Hosts that live as long as their connection have nothing to keep."""

    def _note_uris(self, call, result):
        """Some hosts name the session on tools/call only: reads of what it showed go there too."""
        for block in result.get("content") or ():
            if isinstance(block, dict):
                inner = block.get("resource")
                uri = block.get("uri") or (inner.get("uri") if isinstance(inner, dict) else None)
                if isinstance(uri, str):
                    before = self.seen_uris.get(uri)
                    if before is not None and before[1] is not None and before[1].session != call.identity.session:
                        # Two sessions were shown it: a read without a name is the connection's own.
                        self.seen_uris[uri] = (call.slot.server.name, None)
                    elif before is None or before[1] is not None:
                        self.seen_uris[uri] = (call.slot.server.name, call.identity)
                    while len(self.seen_uris) > 1000:
                        self.seen_uris.popitem(last=False)

    # -- its end -------------------------------------------------------------------------

    def close(self):
        """The host has gone: cancel its work, drop its subscriptions, end what was its alone."""
        if self.closed:
            return
        self.closed = True
        for call in list(self.calls.values()):
            if call.slot is not None:
                self.core.pool.cancel(call, "the host has gone")
            call.done = True
        self.calls.clear()
        for question in list(self.questions.values()):
            self.core.questions.give_up(question, "the host has gone")
        for schema in self.surface.schemas.values():
            schema.watchers.discard(self)
        for slot in list(self.slots):
            self.core.pool.leave(slot, self)
        self.surface.schemas.clear()
        self.core.host_gone(self)


class LegacyHost(Host):
    """One host of a revision with handshake: its handshake, its requests, its subscriptions."""

    def __init__(self, core, link, names, identity, env, definitions=None):
        super().__init__(core, link, names, identity, env, definitions)
        self.init_params = None
        self.initialized = False
        self.used = {}                   # (server, key) -> (session, instance id): for the shim to remember
        self.modern = {}                 # host id -> ModernRequest on the same pipe
        self._roots_waiters = []
        self._routes = {}                # tool -> see _take_route
        self._greeting = None            # its initialize, until that is answered
        self._early = []                 # what it asked before: (seq, message, line, losses)
        self._told = {}                  # change notification -> has changed again since it was told
        self._cancelled_ids = set()      # while repeated lines are gone through

    # -- from the link ---------------------------------------------------------

    def on_line(self, seq, line, losses=0):
        """Take one line. `losses`: how often a daemon died with it.

        A mistake of ours in one line costs that line: its link goes on, as a shim would
        repeat it on the next one.
        """
        try:
            self._take_line(seq, line, losses)
        except Exception:
            self.core.log.error("internal error, please report it: %s", traceback.format_exc())
            host_id = None if isinstance(line, Oversize) else guess_id(line[:OVERSIZE_HEAD_BYTES])
            if host_id is None:
                self.link.settled(seq)
            else:
                self.calls.pop(host_id, None)
                self._send(seq, error_message(host_id, RpcError(
                    INTERNAL_ERROR, "internal error of mcpx; its log has more")))

    def _take_line(self, seq, line, losses):
        if isinstance(line, Oversize):
            error = LimitReached("the message has more than %d bytes; raise limits.lineBytes"
                                 % self.core.config.get("limits.lineBytes"))
            self._reject(seq, guess_id(line.head), error)
            return
        line = line.strip(b"\r\n\t ")
        if not line or line == b"\xef\xbb\xbf":
            self.link.settled(seq)
            return
        try:
            message = parse_json(line)
        except RpcError as error:
            self._reject(seq, guess_id(line[:OVERSIZE_HEAD_BYTES]), error)
            return
        if isinstance(message, list):
            self._on_batch(seq, message, losses)
        else:
            self._on_message(seq, message, line, losses)

    def resume(self, lines):
        """Go through the lines that a shim repeats after its daemon died: (seq, line, losses)."""
        for _, line, _ in lines:
            try:
                message = parse_json(line) if not isinstance(line, Oversize) else {}
            except RpcError:
                continue
            if isinstance(message, dict) and message.get("method") == "notifications/cancelled":
                params = message.get("params")
                wanted = params.get("requestId") if isinstance(params, dict) else None
                if is_valid_id(wanted):
                    self._cancelled_ids.add(wanted)
        for seq, line, losses in lines:
            self.on_line(seq, line, losses)
        self._cancelled_ids = set()

    def _on_batch(self, seq, members, losses):
        # MCP 2025-03-26, basic/index: batches are received there, and in no other revision.
        if self.revision != "2025-03-26" or not members:
            text = "Invalid Request: an empty batch" if not members else (
                "Invalid Request: batches exist in revision 2025-03-26 only")
            self._reject(seq, None, RpcError(INVALID_REQUEST, text))
            return
        batch = Batch(seq, len(members))
        for member in members:
            self._on_message(batch, member, None, losses)

    def _on_message(self, seq, message, line, losses):
        try:
            kind = message_kind(message)
        except RpcError as error:
            host_id = message.get("id") if isinstance(message, dict) else None
            self._reject(seq, host_id if is_valid_id(host_id) else None, error)
            return
        if kind == "request":
            self._on_request(seq, message, line, losses)
            return
        if losses >= MAX_LOSSES:
            self.core.log.warning("%d daemons ended with a %s of host %s; it is dropped", losses, kind, self.id)
        elif kind == "notification":
            self._on_notification(message)
        else:
            self._on_answer(message)
        self._settled(seq)

    def _on_request(self, seq, message, line, losses):
        host_id, method = message["id"], message["method"]
        if not isinstance((message.get("params") or {}).get("_meta", {}), dict):
            self._send(seq, error_message(host_id, RpcError(INVALID_PARAMS, "params._meta is no object")))
            return
        if host_id in self.calls or host_id in self.modern:
            # The first one is not disturbed: MCP forbids using an id twice in a session.
            self._send(seq, error_message(host_id, RpcError(
                INVALID_REQUEST, "the id %s is in use by a request that is not answered yet" % json.dumps(host_id))))
            return
        if host_id in self._cancelled_ids and method != "initialize":
            self._settled(seq)
            return
        under_way = len(self.calls) + len(self.modern) + len(self._early)
        if under_way >= self.core.config.get("limits.inFlight"):
            self._send(seq, error_message(host_id, LimitReached(
                "%d requests of this host are in flight; wait for answers, or raise limits.inFlight" % under_way)))
            return
        if losses >= MAX_LOSSES:
            # Perhaps it is what the daemons die of.
            self._send(seq, error_message(host_id, StreamLost(
                "mcpx lost its daemon while this request was in flight; it is not tried again")))
            return
        if is_modern(message):
            self._on_modern(seq, message, line, losses)
            return
        if self._greeting is not None and method != "ping":
            # MCP 2025-11-25, basic/lifecycle: the answer to initialize comes first.
            self._early.append((seq, message, line, losses))
            return
        call = Call(method, message.get("params") or {}, self._finished, self, host_id, seq)
        call.message, call.line = message, line
        call.losses = losses
        self.calls[host_id] = call
        if not losses and method == "tools/call" and self._take_route(call):
            return
        self._guarded(call, lambda: self._handler(method)(self, call))

    def _take_route(self, call):
        """Send a call the way that the one before of the same tool went; returns whether that is known to hold.

        It does while neither the configuration nor the instance nor its lists have changed,
        for calls that say nothing about who they are from.
        """
        params = call.params
        name = params.get("name")
        route = self._routes.get(name) if isinstance(name, str) else None
        if route is None or self.level is not None or "_meta" in params or "task" in params or (
                self.link.named_by(call.seq, None)):
            return False
        generation, slot, instance, schema, lists, identity, may_repeat = route
        if generation != self.core.config_generation or slot.instance is not instance or instance.state not in (
                "idle", "busy") or schema.generation != lists or slot.ended or (
                instance.own_schema not in (None, schema)):
            del self._routes[name]
            return False
        call.identity, call.schema, call.may_repeat = identity, schema, may_repeat
        call.asks, call.logs = schema.asks(name), bool(schema.logs(call.subject))
        call.may_ask = call.asks or name not in schema.clean
        self._guarded(call, lambda: self.core.pool.submit(call, slot))
        return True

    def _note_route(self, call):
        """A call has been answered: the next one of its tool may go the same way."""
        instance, name = call.slot.instance, call.params.get("name")
        if (self.surface.single and call.method == "tools/call"
                and call.route_stamp == (self.core.config_generation, self.roots_changes) and
                instance is not None and isinstance(name, str)
                and "_meta" not in call.params and "task" not in call.params and instance.upstream.era == "legacy"
                and not runs_as_task(call.schema, call.schema.tool(name))
                and not call.slot.key.text.startswith("call:") and not call.identity.named
                and not self.link.named_by(call.seq, None)):
            if len(self._routes) > 500:
                self._routes.clear()
            self._routes[name] = (self.core.config_generation, call.slot, instance, call.schema, call.schema.generation,
                                  call.identity, call.may_repeat)

    def greeted(self):
        """Its initialize is answered: what it asked meanwhile is taken up."""
        self._greeting = None
        early, self._early = self._early, []
        for entry in early:
            self._on_request(*entry)

    def give_up_early(self, host_id):
        """Drop a request that waits for the answer to initialize; it was cancelled."""
        for entry in [entry for entry in self._early if entry[1]["id"] == host_id]:
            self._early.remove(entry)
            self._settled(entry[0])

    def _on_modern(self, seq, message, line, losses):
        """A request of 2026-07-28 on the same pipe: it stands alone (PROTOCOL 5.4)."""
        request = ModernRequest(self.core, self.link, self.surface.names, self.identity, self.env, self._definitions)
        request.pipe = self
        self.modern[message["id"]] = request
        request.on_over = lambda _request: self.modern.pop(message["id"], None)
        request.take(seq, message, line, losses)

    def _handler(self, method):
        handler = HOST_HANDLERS.get(method)
        if self.revision is None and method not in ("initialize", "ping"):
            if method == "server/discover":
                raise RpcError(METHOD_NOT_FOUND, "Method not found: server/discover")
            raise RpcError(INVALID_PARAMS, "not initialized: send initialize first (%s are served), or name %s and %s "
                           "in params._meta (%s)" % (", ".join(LEGACY_REVISIONS), META_VERSION, META_CAPABILITIES,
                                                     ", ".join(MODERN_REVISIONS)))
        if handler is None or (self.revision and not has_method(HOST_METHODS, method, self.revision)):
            raise RpcError(METHOD_NOT_FOUND, "Method not found: %s" % method)
        return handler

    def _reject(self, seq, host_id, error):
        """Answer something that is no request. D-1: newest revision without id, older with null."""
        message = error_message(host_id, error)
        if host_id is None and self.revision == LATEST_LEGACY:
            del message["id"]
        if isinstance(seq, Batch):
            self._send(seq, message)
        else:
            self.link.refuse(seq, encode_json(message), error.code)

    # -- answers -----------------------------------------------------------------

    def _finished(self, call, message, line):
        """Every request ends here: spell the answer for this host and send it."""
        if self.calls.get(call.host_id) is call and not asks_for_input(message) and not call.opts_in:
            del self.calls[call.host_id]
        self._note_end(call)
        if self.closed:
            return
        if "result" not in message:
            error = message.get("error")
            if not isinstance(error, dict) or not isinstance(error.get("code"), int):
                error = RpcError(INTERNAL_ERROR, "the server's answer has neither result nor error").as_object()
            self._note_elicitations(call, error)
            if wants_tasks(call, error):
                self._opt_in(call)
                return
            self.calls.pop(call.host_id, None)
            if call.schema is not None and call.schema.revision in MODERN_REVISIONS:
                error = spell_error_down(call.method, error)
            body = spell_error(call.method, error, self.revision or LATEST_LEGACY)
            self._send(call.seq, dict({"jsonrpc": "2.0", "id": call.host_id}, **body))
            return
        result = new = message["result"]
        if isinstance(result, dict) and result.get("resultType") == "input_required" and call.slot is not None:
            InputLoop(self, call, result).ask()
            return
        if call.opts_in and isinstance(result, dict) and result.get("resultType") == "task":
            TaskFollower(self, call, result).start()
            return
        if not isinstance(result, dict):
            self._send(call.seq, error_message(call.host_id, RpcError(
                INTERNAL_ERROR, "the server's result is not an object")))
            return
        self.calls.pop(call.host_id, None)
        if call.slot is not None:
            new = self._result_for_host(call, result)
        if new is result and line is not None:
            self._send_line(call.seq, with_id(line, message, call.host_id))
        else:
            try:
                self._send(call.seq, result_message(call.host_id, new))
            except RpcError as error:
                self._send(call.seq, error_message(call.host_id, error))

    def _opt_in(self, call):
        """A modern server runs this tool as a task only: repeat it, and follow the task (PROTOCOL 7.7)."""
        again = Call(call.method, call.params, self._finished, self, call.host_id, call.seq, call.identity)
        again.token, again.schema, again.message, again.opts_in = call.token, call.schema, call.message, True
        self.calls[call.host_id] = again
        self.core.pool.submit(again, call.slot)

    def _result_for_host(self, call, result):
        """Return an upstream's result as this host must see it; the same object if unchanged."""
        schema = call.schema
        if schema is not None and schema.revision in MODERN_REVISIONS:
            result = strip_modern_result(result)
        if call.method == "tools/call":
            if is_core_task(result):
                result = self.core.tasks.created(call, result)
            elif call.identity.named:
                self._note_uris(call, result)
        elif call.method.startswith("tasks/"):
            result = self.core.tasks.answered(call, result)
        if self.revision != (schema.revision if schema is not None else None):
            result = spell_result(call.method, result, self.revision)
        result = self._mark_restarted(call, result)
        self._note_use(call)
        if call.method == "tools/call" and call.params.get("name") not in self._routes:
            self._note_route(call)
        return result

    def _note_use(self, call):
        """Have the shim remember which state this host relies on, across a dead daemon."""
        name = (call.slot.server.name, call.slot.key.text)
        used = self.used.get(name)
        instance = call.slot.instance
        if instance is None or (used is not None and used[1] == instance.id) or name[1].startswith("call:"):
            return
        if used is not None or len(self.used) < 1000:
            self.used[name] = (call.identity.session, instance.id)
            # Behind the answer, which may say that the state before is gone: if a crash takes that, it is said again.
            self.core.loop.soon(self.keep_state)

    def _note_elicitations(self, call, error):
        if error.get("code") == -32042 and isinstance(error.get("data"), dict):
            elicitations = error["data"].get("elicitations")
            for elicitation in elicitations if isinstance(elicitations, list) else ():
                if isinstance(elicitation, dict) and call.slot is not None:
                    self.core.note_elicitation(call.slot, elicitation.get("elicitationId"), self)

    def can_tell_roots(self):
        """May it be asked where it works?"""
        return "roots" in self.capabilities

    def tell(self, method, params=None, call=None):
        """Send a notification; `call` is the request that it belongs to, if it does."""
        if not self.closed:
            self.link.message(encode_json(notification(method, params)), call)

    def keep_state(self):
        """Have the shim keep what the next daemon must know of this host."""
        if self.init_params is not None:
            self.link.keep_state({
                "initialize": self.init_params, "revision": self.revision, "initialized": self.initialized,
                "level": self.level, "subscriptions": list(self.subscriptions), "questions": list(self.questions),
                "used": [[server, key, session, instance] for (server, key), (session, instance) in self.used.items()]})

    def take_state(self, state):
        """Take over what an earlier daemon had the shim keep."""
        params = state.get("initialize")
        if isinstance(params, dict) and state.get("revision") in LEGACY_REVISIONS:
            self._take_initialize(params, state["revision"])
            self.initialized = bool(state.get("initialized"))
            self.level = state.get("level")
            for question_id in state.get("questions") or ():
                self.tell("notifications/cancelled", {"requestId": question_id, "reason": "mcpx was interrupted"})
            for server, key, session, instance in state.get("used") or ():
                self.used[(server, key)] = (session, instance)
                self.core.note_use(self, server, key, session, instance)
            self.core.attach(self)
            for uri in state.get("subscriptions") or ():
                call = Call("resources/subscribe", {"uri": uri}, lambda *_: None, self)
                try:
                    _subscribe(self, call)
                except RpcError as error:
                    self.core.log.warning("a subscription was not resumed: %s", error.message)
            self.keep_state()

    def _ask_roots(self, call, on_done):
        """Ask the host for its roots, on behalf of `call`; the first file:// one says where it works."""
        self._roots_waiters.append(on_done)
        if len(self._roots_waiters) > 1:
            return

        def answered(place):
            self.roots = place
            waiters, self._roots_waiters = self._roots_waiters, []
            for waiter in waiters:
                waiter()
        self.core.ask_roots(self, call, answered)

    def on_list_changed(self, method):
        """A list that it was shown has changed. Told at once, then at most every 0.3 s.

        MCP 2025-11-25, basic/lifecycle: not before the host has said that it is initialized.
        """
        if not self.initialized or method in self._told:
            self._told[method] = True    # again, later
            return
        self._told[method] = False
        self.tell(method)

        def over():
            if self._told.pop(method, False):
                self.on_list_changed(method)
        self.core.loop.call_later(0.3, over)

    def on_ready(self):
        """Its handshake is over: tell it what has changed meanwhile."""
        owed, self._told = self._told, {}
        for method in owed:
            self.on_list_changed(method)

    def on_log(self, params, call=None):
        """A log message that belongs to it, at the level that it asked for."""
        level = params.get("level")
        if self.level is not None and level in LOG_LEVELS and LOG_LEVELS.index(level) < LOG_LEVELS.index(self.level):
            return
        self.tell("notifications/message", params, call)

    # -- questions ---------------------------------------------------------------------

    def list_page(self, kind, cursor):
        """Return one page of a list as encoded result bytes. Raises RpcError for a bad cursor."""
        return self.surface.page(kind, self.revision, cursor, self.core.config.get("list.pageSize"))

    def answered_here(self, call, data):
        """A list was answered from the cache, as bytes."""
        self.calls.pop(call.host_id, None)
        call.done = True
        self._send_line(call.seq, answer_line(call.host_id, data))

    def can_answer(self, question):
        """Has it declared that it can be asked this?"""
        return covers(self.capabilities, question.method, question.params)

    def send_question(self, question):
        """Ask the host what an upstream asks, under an id of ours."""
        params = spell_params(question.method, question.params, self.revision or LATEST_LEGACY)
        meta = params.get("_meta") if isinstance(params.get("_meta"), dict) else None
        if meta is not None:
            meta = {name: value for name, value in meta.items() if name not in HOP_META}
            if "progressToken" in meta:
                meta["progressToken"] = question.id
            params = dict(params, _meta=self.core.tasks.meta_for_host(question.instance, meta))
        if question.method == "elicitation/create":
            self.core.note_elicitation(question.instance.slot, params.get("elicitationId"), self)
            if not self.surface.single and isinstance(params.get("message"), str):
                # The host cannot know which of several servers asks.
                params = dict(params, message="[%s] %s" % (question.instance.definition.server.name, params["message"]))
        message = {"jsonrpc": "2.0", "id": question.id, "method": question.method}
        if params:
            message["params"] = params
        self.link.message(encode_json(message), question.call)
        self.keep_state()

    def withdraw_question(self, question, reason):
        """The host need not answer any more."""
        self.questions.pop(question.id, None)
        self.keep_state()
        self.tell("notifications/cancelled", {"requestId": question.id, "reason": reason}, question.call)

    def _on_answer(self, message):
        question = self.questions.get(message["id"]) if is_valid_id(message["id"]) else None
        if question is None:
            if not self.core.roots_answered(self, message):
                self.core.pool.counters["unsolicitedAnswers"] += 1
            return
        body = {}
        if "result" in message:
            result = message["result"]
            revision = question.instance.upstream.revision if question.instance is not None else MODERN
            body["result"] = spell_result(question.method, result, revision) if (
                isinstance(result, dict) and revision != self.revision) else result
        else:
            body["error"] = message["error"]
        self.core.questions.answer(question, body)

    def _on_notification(self, message):
        params = message.get("params") or {}
        handler = HOST_NOTIFICATIONS.get(message["method"])
        if handler is not None:
            handler(self, params)
        elif self.surface.single and len(self.slots) == 1:
            # One server, one instance: as if the host had launched it.
            instance = next(iter(self.slots)).instance
            if instance is not None and instance.state in ("idle", "busy"):
                instance.upstream.notify(message["method"], message.get("params"))

    def close(self):
        """The host has gone, and every request on its pipe with it."""
        for request in list(self.modern.values()):
            request.close()
        for held in [held for held in self.core.held.by_id.values() if held.pipe is self]:
            held.drop("the host has gone")
        super().close()

    def _take_initialize(self, params, revision):
        self.init_params, self.revision = params, revision
        self.capabilities = params["capabilities"] if isinstance(params.get("capabilities"), dict) else {}
        self.info = params["clientInfo"] if isinstance(params.get("clientInfo"), dict) else {}


def _initialize(host, call):
    """MCP 2025-11-25, basic/lifecycle. Answered from the cache; waits for a server never seen."""
    if host.revision is not None:
        raise RpcError(INVALID_REQUEST, "already initialized")
    params = call.params
    if not isinstance(params.get("protocolVersion"), str):
        raise RpcError(INVALID_PARAMS, "initialize needs protocolVersion; served are %s" % ", ".join(LEGACY_REVISIONS),
                       {"supported": list(LEGACY_REVISIONS), "requested": params.get("protocolVersion")})
    revision = negotiate(params["protocolVersion"])
    kept = {name: params[name] for name in ("protocolVersion", "capabilities", "clientInfo") if name in params}
    host._take_initialize(kept, revision)

    def ready(errors):
        if call.done or host.closed:
            return
        if host.surface.single and errors and not host.surface.known():
            host.revision = None         # it may try again
            call.fail(errors[0])
        else:
            host.keep_state()
            host.calls.pop(call.host_id, None)
            call.done = True
            host._send(call.seq, result_message(call.host_id, host.surface.initialize_result(revision)))
        host.greeted()
    host._greeting = call
    host.core.attach(host)
    host.core.with_schemas(host, ready)


def _ping(host, call):
    call.finish({"result": {}})


def _list(host, call):
    """The four lists, from the cache: a list never costs an instance."""
    kind = LIST_METHODS[call.method]
    cursor = call.params.get("cursor")

    def ready(errors):
        if call.done or host.closed:
            return
        if errors and host.surface.single and not host.surface.known():
            call.fail(errors[0])
            return
        if not host.surface.offers(LIST_CAPABILITY[kind]):
            call.fail(RpcError(METHOD_NOT_FOUND, "Method not found: %s (the server has no %s)"
                               % (call.method, LIST_CAPABILITY[kind])))
            return
        try:
            data = host.list_page(kind, cursor)
        except RpcError as error:
            call.fail(error)
            return
        host.answered_here(call, data)
    host.core.with_schemas(host, ready)


def _named(kind):
    """Requests that name a tool or prompt: tools/call, prompts/get."""
    def handler(host, call):
        name = call.params.get("name")
        if not isinstance(name, str):
            raise RpcError(INVALID_PARAMS, "%s needs a name" % call.method)

        def ready(_errors):
            server_name, own_name = host.surface.resolve(kind, name)
            if own_name != name:
                call.params, call.line = dict(call.params, name=own_name), None
            if call.method == "tools/call" and host.core.tasks.must_augment(host, call, server_name):
                host.core.tasks.augment(host, call, server_name)
            else:
                host.forward(call, server_name)
        if host.surface.single:
            ready(None)
        else:
            host.core.with_schemas(host, lambda errors: host._guarded(call, lambda: ready(errors)))
    return handler


def _complete(host, call):
    reference = call.params.get("ref")
    if not isinstance(reference, dict):
        raise RpcError(INVALID_PARAMS, "completion/complete needs a ref")
    if not host.surface.offers("completions") and not host.surface.offers("prompts"):
        raise RpcError(METHOD_NOT_FOUND, "Method not found: completion/complete")
    if reference.get("type") == "ref/prompt":
        server_name, own_name = host.surface.resolve("prompts", reference.get("name"))
        if own_name != reference.get("name"):
            call.params, call.line = dict(call.params, ref=dict(reference, name=own_name)), None
    else:
        if not isinstance(reference.get("uri"), str):
            raise RpcError(INVALID_PARAMS, "the ref needs a uri")
        seen = {uri: server for uri, (server, _) in host.seen_uris.items()}
        servers = host.surface.servers_for_uri(reference["uri"], seen)
        if not servers:
            raise RpcError(INVALID_PARAMS, "no server completes %s" % reference.get("uri"))
        server_name = servers[0]
    host.forward(call, server_name)


def _read(host, call):
    """resources/read: to the server that lists the URI, else asked in turn."""
    uri = call.params.get("uri")
    if not isinstance(uri, str):
        raise RpcError(INVALID_PARAMS, "resources/read needs a uri")
    seen = {known: server for known, (server, _) in host.seen_uris.items()}
    servers = host.surface.servers_for_uri(uri, seen)
    if not servers:
        raise RpcError(RESOURCE_NOT_FOUND, "Resource not found", {"uri": uri})
    if len(servers) > 1:
        _try_in_turn(host, call, servers)
    else:
        host.forward(call, servers[0])


def _try_in_turn(host, call, servers):
    finish, line, params = call.on_finish, call.line, call.params

    def finished(_call, message, answer):
        error = message.get("error")
        if servers and isinstance(error, dict) and error.get("code") in (
                RESOURCE_NOT_FOUND, INVALID_PARAMS, METHOD_NOT_FOUND) and not call.cancelled:
            call.done = False
            call.line, call.params, call.attempts = line, params, 0
            host._guarded(call, lambda: host.forward(call, servers.pop(0)))
        else:
            finish(call, message, answer)
    call.on_finish = finished
    servers = list(servers)
    host.forward(call, servers.pop(0))


def _subscribe(host, call):
    """Counted over all hosts of an instance; only the first is sent."""
    uri = call.params.get("uri")
    if not isinstance(uri, str):
        raise RpcError(INVALID_PARAMS, "resources/subscribe needs a uri")
    if not host.surface.offers("resources"):
        raise RpcError(METHOD_NOT_FOUND, "Method not found: resources/subscribe")
    servers = host.surface.servers_for_uri(uri, {u: s for u, (s, _) in host.seen_uris.items()})
    if not servers:
        raise RpcError(RESOURCE_NOT_FOUND, "Resource not found", {"uri": uri})
    finish = call.on_finish

    def finished(_call, message, line):
        if "result" in message and call.slot is not None:
            host.core.pool.subscribe(call.slot, uri, host)
            host.subscriptions[uri] = call.slot
            if host.closed:
                host.core.pool.leave(call.slot, host)     # it went while the server was thinking
            else:
                host.keep_state()
        finish(call, message, line)

    server = host.core.server(servers[0])

    def identified():
        host.name_by_uri(call, servers[0])
        slot = host.slot_for(server, call.identity)
        call.slot = slot
        if uri in slot.subscriptions:
            call.on_finish = finished
            call.finish({"result": {}})
            return
        call.on_finish = finished
        host._submit(call, slot, host.core.schema_for(host, server, slot.definition, slot))
    host.with_identity(call, host.core.config.get("scope", server), identified)


def _unsubscribe(host, call):
    uri = call.params.get("uri")
    slot = host.subscriptions.pop(uri, None) if isinstance(uri, str) else None
    if slot is not None:
        host.core.pool.unsubscribe(slot, uri, host)
        host.keep_state()
    call.finish({"result": {}})


def _set_level(host, call):
    """Kept per host; upstreams get the most verbose level of those that use them."""
    level = call.params.get("level")
    if level not in LOG_LEVELS:
        raise RpcError(INVALID_PARAMS, "level takes one of %s" % ", ".join(LOG_LEVELS))
    if not host.surface.offers("logging"):
        raise RpcError(METHOD_NOT_FOUND, "Method not found: logging/setLevel (the server has no logging)")
    host.level = level
    host.keep_state()
    for slot in host.slots:
        host.core.pool.set_level(slot, host.core.wanted_level(slot, host))
    call.finish({"result": {}})


def _task(host, call):
    host.core.tasks.request(host, call)


HOST_HANDLERS = {
    "initialize": _initialize, "ping": _ping, "tools/call": _named("tools"), "prompts/get": _named("prompts"),
    "completion/complete": _complete, "resources/read": _read, "resources/subscribe": _subscribe,
    "resources/unsubscribe": _unsubscribe, "logging/setLevel": _set_level,
    "tasks/get": _task, "tasks/result": _task, "tasks/cancel": _task, "tasks/list": _task}
HOST_HANDLERS.update((method, _list) for method in LIST_METHODS)


def _on_initialized(host, _params):
    host.initialized = True
    host.keep_state()
    host.on_ready()
    host.core.on_initialized(host)


def _on_cancelled(host, params):
    """MCP 2025-11-25, basic/utilities/cancellation: unknown and finished ids are ignored.

    opencode 1.18 cancels every call right after its answer, so that is ordinary traffic.
    """
    host_id = params.get("requestId")
    call = host.calls.get(host_id) if is_valid_id(host_id) else None
    if call is not None and call.method != "initialize":
        host.cancel(call, params.get("reason"))
    host.give_up_early(host_id)
    request = host.modern.pop(host_id, None) if is_valid_id(host_id) else None
    if request is not None:
        request.close()
        host._settled(request.call.seq)


def _on_host_progress(host, params):
    """Progress of a host about a question: back under the token that the upstream gave."""
    token = params.get("progressToken")
    question = host.questions.get(token) if is_valid_id(token) else None
    meta = question.params.get("_meta") if question is not None else None
    if isinstance(meta, dict) and "progressToken" in meta:
        question.instance.upstream.notify("notifications/progress", dict(params, progressToken=meta["progressToken"]))


def _on_roots_changed(host, _params):
    host.roots = None
    host.roots_changes += 1
    host._routes.clear()
    for slot in host.slots:
        instance = slot.instance
        if instance is not None and instance.state in ("idle", "busy") and "roots" in instance.capabilities:
            instance.upstream.notify("notifications/roots/list_changed")


def _on_host_task_status(host, params):
    host.core.questions.on_host_task_status(host, params)


HOST_NOTIFICATIONS = {
    "notifications/tasks/status": _on_host_task_status,
    "notifications/initialized": _on_initialized, "notifications/cancelled": _on_cancelled,
    "notifications/progress": _on_host_progress, "notifications/roots/list_changed": _on_roots_changed}


def runs_as_task(schema, tool):
    """Does a legacy server run this tool as a core task only?"""
    execution = tool.get("execution") if tool is not None else None
    return (isinstance(execution, dict) and execution.get("taskSupport") == "required"
            and "tasks" in schema.capabilities)


class Tasks:
    """Core tasks of 2025-11-25: our ids toward hosts, the upstream's toward instances.

    MCP 2025-11-25, basic/utilities/tasks. A task belongs to the session that made it; to
    everybody else its id is unknown.
    """

    def __init__(self, core):
        self.core = core
        self.by_id = {}                  # our id -> Task
        self._early = {}                 # instance id -> status params that came before their task

    def created(self, call, result):
        """A tools/call became a task: give it an id of ours."""
        inner = result["task"]
        task = Task(secrets.token_urlsafe(18), inner.get("taskId"), call.slot, call)
        self.by_id[task.id] = task
        call.slot.tasks.add(task.upstream_id)
        instance = call.slot.instance
        if call.token is not None and instance is not None:
            instance.upstream.task_tokens[call.wire_id] = call
        ttl = inner.get("ttl")
        seconds = ttl / 1000.0 if isinstance(ttl, (int, float)) and not isinstance(ttl, bool) else DEFAULT_TASK_TTL_S
        task.timer = self.core.loop.call_later(min(seconds, 86400.0) + 5, lambda: self._forget(task))
        task.last = dict(inner, taskId=task.id)
        result = dict(result, task=task.last)
        for params in self._early.pop(instance.id, ()) if instance is not None else ():
            # Behind the answer that tells the host of the task.
            self.core.loop.soon(lambda params=params: self.on_status(instance, params))
        return self._with_meta(result, task)

    def _with_meta(self, result, task):
        meta = result.get("_meta")
        if isinstance(meta, dict) and META_RELATED_TASK in meta:
            result = dict(result, _meta=dict(meta, **{META_RELATED_TASK: {"taskId": task.id}}))
        return result

    def request(self, host, call):
        """tasks/get, tasks/result, tasks/cancel go to the task's instance; tasks/list is ours."""
        if not host.surface.offers("tasks"):
            raise RpcError(METHOD_NOT_FOUND, "Method not found: %s" % call.method)
        if call.method == "tasks/list":
            read_cursor(call.params.get("cursor"), 0)
            mine = [task.last for task in self.by_id.values() if task.host is host and task.last]
            call.finish({"result": {"tasks": mine}})
            return
        task = self.by_id.get(call.params.get("taskId")) if isinstance(call.params.get("taskId"), str) else None
        if task is None or (task.host is not host and task.session != host.identity.session):
            raise RpcError(INVALID_PARAMS, "unknown task")
        call.identity = task.call.identity
        call.params = dict(call.params, taskId=task.upstream_id)
        call.line = None
        call.task = task
        call.may_repeat = call.method != "tasks/cancel"
        call.schema = self.core.schema_for(host, task.slot.server, task.slot.definition, task.slot)
        self.core.pool.submit(call, task.slot)

    def answered(self, call, result):
        """Give an answer about a task its id of ours back."""
        task = call.task
        if task is None:
            return result                # mcpx's own: it made a task for a host that has none
        if result.get("taskId") == task.upstream_id:
            result = dict(result, taskId=task.id)
            task.last = {name: value for name, value in result.items() if name != "_meta"}
        result = self._with_meta(result, task)
        if call.method == "tasks/result" or (result.get("status") in TERMINAL_STATUSES and
                                             call.method == "tasks/cancel"):
            self._rest(task)
        return result

    def _rest(self, task):
        """Its result has been fetched: the instance need not stay for it."""
        task.slot.tasks.discard(task.upstream_id)
        if task.slot.instance is not None:
            task.slot.instance.upstream.task_tokens.pop(task.call.wire_id, None)
        self.core.pool.wake(task.slot)

    def _forget(self, task):
        self.by_id.pop(task.id, None)
        self._rest(task)

    def find(self, instance, upstream_id):
        """Return the Task of an instance by the upstream's id, or None."""
        for task in self.by_id.values():
            if task.upstream_id == upstream_id and task.slot is instance.slot:
                return task
        return None

    def on_status(self, instance, params):
        """notifications/tasks/status goes to the host whose task it is, and to nobody else."""
        task = self.find(instance, params.get("taskId"))
        if task is None:
            # Some servers tell of a task before they have answered the call that made it.
            if any(t.upstream_id == params.get("taskId") and t.slot is instance.slot
                   for t in self.core.modern_tasks.by_id.values()):
                self.core.modern_tasks.on_state(instance, params)
                return
            early = self._early.setdefault(instance.id, [])
            if len(early) < 100 and any("task" in call.params for call in instance.upstream.in_flight.values()
                                        if call.method == "tools/call"):
                early.append(params)
            else:
                self.core.pool.counters["droppedTaskStatus"] += 1
            return
        params = dict(params, taskId=task.id)
        task.last = {name: value for name, value in params.items() if name != "_meta"}
        if params.get("status") in TERMINAL_STATUSES:
            instance.upstream.task_tokens.pop(task.call.wire_id, None)
        if not task.host.closed:
            task.host.tell("notifications/tasks/status", params)

    def meta_for_host(self, instance, meta):
        """Return `_meta` with a related task named as the host knows it."""
        related = meta.get(META_RELATED_TASK)
        task = self.find(instance, related.get("taskId")) if isinstance(related, dict) else None
        return dict(meta, **{META_RELATED_TASK: {"taskId": task.id}}) if task is not None else meta

    def on_gone(self, instance):
        """An instance has ended, and its tasks with it."""
        self._early.pop(instance.id, None)
        for task in [t for t in self.by_id.values() if t.slot is instance.slot]:
            del self.by_id[task.id]
            task.timer.cancel()
            task.slot.tasks.discard(task.upstream_id)

    def must_augment(self, host, call, server_name):
        """Does the tool insist on a task that this host does not ask for?"""
        if not host.surface.schemas:
            host.core.attach(host)
        schema = host.surface.schemas.get(server_name)
        tool = schema.tool(call.params.get("name")) if schema is not None else None
        if isinstance(host, ModernRequest) and host.declares_tasks():
            return False                 # it gets a task of its own
        return schema is not None and runs_as_task(schema, tool) and "task" not in call.params

    def augment(self, host, call, server_name):
        """Make a task of a call for a host that has none, wait for it, return its result."""
        finish = call.on_finish

        def finished(_call, message, line):
            result = message.get("result")
            if not isinstance(result, dict) or not is_core_task(result):
                finish(call, message, line)
                return
            follow = Call("tasks/result", {"taskId": result["task"]["taskId"]}, fetched, host, call.host_id, call.seq,
                          call.identity)
            follow.schema = call.schema
            self.core.pool.submit(follow, call.slot)

        def fetched(_follow, message, _line):
            result = message.get("result")
            if isinstance(result, dict) and isinstance(result.get("_meta"), dict):
                meta = {name: value for name, value in result["_meta"].items() if name != META_RELATED_TASK}
                message = dict(message, result=dict(result, _meta=meta))
            finish(call, message, None)
        call.on_finish = finished
        call.line, call.params = None, dict(call.params, task={})
        host.forward(call, server_name)


# -- hosts of 2026-07-28 -----------------------------------------------------------------

# MCP 2026-07-28, basic/patterns/mrtr: the only methods whose result may be a question.
MAY_ASK = frozenset(("tools/call", "prompts/get", "resources/read"))
# Several questions of one call that come within this time travel together.
SIBLING_WAIT_S = 0.02
# After so many rounds of the same question a call is given up.
MAX_RERUNS = 3


class EnvelopeError(RpcError):
    """A modern request that is refused before its method is looked at: HTTP status 400."""


def is_modern(message):
    """Is this request of 2026-07-28? It says so itself; `initialize` never is (D-2)."""
    params = message.get("params") if isinstance(message, dict) else None
    meta = params.get("_meta") if isinstance(params, dict) else None
    return isinstance(meta, dict) and META_VERSION in meta and message.get("method") != "initialize"


def check_envelope(message, headers=None):
    """Check a modern request up to its method. Raises EnvelopeError.

    MCP 2026-07-28, basic/index and basic/transports/streamable-http; the order of the checks
    is that of the official suite: `_meta`, then headers, then the version, then the method.
    """
    params = message.get("params")
    meta = params.get("_meta") if isinstance(params, dict) else None
    if not isinstance(meta, dict):
        raise EnvelopeError(INVALID_PARAMS, "params._meta is missing")
    if not isinstance(meta.get(META_VERSION), str):
        raise EnvelopeError(INVALID_PARAMS, "params._meta lacks %s" % META_VERSION)
    if not isinstance(meta.get(META_CAPABILITIES), dict):
        raise EnvelopeError(INVALID_PARAMS, "params._meta lacks %s, or it is no object" % META_CAPABILITIES)
    if headers is not None:
        check_headers(message, meta, headers)
    if meta[META_VERSION] not in MODERN_REVISIONS:
        # D-4: who names a legacy revision in a modern envelope is offered modern ones only.
        legacy = [] if meta[META_VERSION] in LEGACY_REVISIONS else list(reversed(LEGACY_REVISIONS))
        raise EnvelopeError(UNSUPPORTED_VERSION, "Unsupported protocol version",
                            {"supported": list(MODERN_REVISIONS) + legacy, "requested": meta[META_VERSION]})
    method = message.get("method")
    if method not in MODERN_HANDLERS or not has_method(HOST_METHODS, method, MODERN):
        raise EnvelopeError(METHOD_NOT_FOUND, "Method not found: %s" % method)
    level = meta.get(META_LOG_LEVEL)
    if level is not None and level not in LOG_LEVELS:
        raise EnvelopeError(INVALID_PARAMS, "%s takes one of %s" % (META_LOG_LEVEL, ", ".join(LOG_LEVELS)))


NAME_HEADER_MEMBER = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri", "tasks/get": "taskId",
                      "tasks/update": "taskId", "tasks/cancel": "taskId"}


def check_headers(message, meta, headers):
    """The standard headers must say what the body says. Raises EnvelopeError(HEADER_MISMATCH)."""
    method, params = message.get("method"), message["params"]
    wanted = [("MCP-Protocol-Version", meta[META_VERSION]), ("Mcp-Method", method)]
    member = NAME_HEADER_MEMBER.get(method)
    if member is not None and isinstance(params.get(member), str):
        wanted.append(("Mcp-Name", params[member]))
    for name, value in wanted:
        values = headers.get_all(name) or []
        if len(values) != 1:
            raise EnvelopeError(HEADER_MISMATCH, "the header %s %s"
                                % (name, "stands twice" if values else "is missing"))
        given = decode_header(values[0].strip()) if name == "Mcp-Name" else values[0].strip()
        if given != value:
            raise EnvelopeError(HEADER_MISMATCH, "%s header %r differs from the body's %r" % (name, given, value))


def decode_header(text):
    """Return a header's value; `=?base64?…?=` stands for UTF-8. Raises EnvelopeError."""
    if not (text.startswith("=?base64?") and text.endswith("?=") and len(text) >= 11):
        return text
    import base64
    import binascii
    try:
        return base64.b64decode(text[9:-2], validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        raise EnvelopeError(HEADER_MISMATCH, "a header has a bad base64 form")


HEADER_ANNOTATION = "x-mcp-header"
# Members of a JSON schema whose values are data, not schemas.
SCHEMA_DATA = frozenset(("default", "const", "enum", "examples"))


def named_header(schema):
    """Return the header that a property's schema names by a valid `x-mcp-header`, in lower case, or None.

    MCP 2026-07-28, server/tools: a token of RFC 9110, on strings, integers and booleans.
    """
    header = schema.get(HEADER_ANNOTATION)
    if isinstance(header, str) and re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", header) and schema.get("type") in (
            "string", "integer", "boolean"):
        return header.lower()
    return None


def header_parameters(schema, path=(), found=None):
    """Return {header name in lower case: (path, type)} of a tool's `x-mcp-header` annotations.

    MCP 2026-07-28, server/tools: those that are reachable through `properties` alone, and
    unique; others are ignored here.
    """
    found = {} if found is None else found
    properties = schema.get("properties") if isinstance(schema, dict) else None
    for name, inner in (properties or {}).items() if isinstance(properties, dict) else ():
        if isinstance(inner, dict):
            header = named_header(inner)
            if header is not None:
                found.setdefault("mcp-param-" + header, (path + (name,), inner["type"]))
            header_parameters(inner, path + (name,), found)
    return found


def without_bad_headers(schema, seen, reachable=True):
    """Return a tool's input schema without the `x-mcp-header` annotations that are not valid.

    One of them would make an HTTP client drop the whole tool (D-23). `seen` collects the
    headers that are taken; `reachable` says that only `properties` lead here.
    """
    if isinstance(schema, list):
        return [without_bad_headers(part, seen, False) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for member, value in schema.items():
        if member == HEADER_ANNOTATION:
            header = named_header(schema)
            if not reachable or header is None or header in seen:
                continue
            seen.add(header)
        elif member == "properties" and isinstance(value, dict):
            value = {name: without_bad_headers(inner, seen, reachable) for name, inner in value.items()}
        elif member not in SCHEMA_DATA:
            value = without_bad_headers(value, seen, False)
        kept[member] = value
    return kept


def check_parameter_headers(tool, arguments, headers):
    """`Mcp-Param-*` headers must say what the arguments say. Raises EnvelopeError."""
    for header, (path, kind) in header_parameters(tool.get("inputSchema")).items():
        value = arguments
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        values = headers.get_all(header) or []
        if value is None and not values:
            continue
        if value is None or len(values) != 1:
            raise EnvelopeError(HEADER_MISMATCH, "the header %s %s" % (header, "has no argument" if value is None else
                                                                      "is missing" if not values else "stands twice"))
        given = decode_header(values[0].strip())
        if not _same_parameter(given, value, kind):
            raise EnvelopeError(HEADER_MISMATCH, "the header %s differs from the argument %s"
                                % (header, ".".join(path)))


def _same_parameter(text, value, kind):
    if isinstance(value, bool):
        return text == ("true" if value else "false")
    if isinstance(value, (int, float)):
        try:
            return float(text) == float(value)
        except ValueError:
            return False
    return text == value


class ModernRequest(Host):
    """One request of 2026-07-28. Each stands alone: it is a host of its own in every respect.

    MCP 2026-07-28, basic/index: nothing of an earlier request, connection or process is used.
    """

    era = "modern"

    def __init__(self, core, link, names, identity, env, definitions=None):
        super().__init__(core, link, names, identity, env, definitions)
        self.revision = MODERN
        self.headers = None              # of its HTTP request
        self.call = None
        self.pipe = None                 # the host on whose stdio it came
        self.held = None                 # the HeldCall that it is attached to
        self.runs = 0                    # how often it was run again for URLs to be visited
        self.wanted_kinds = set()        # of a subscriptions/listen
        self.wanted_tasks = set()        # ids of tasks that it wants to hear of
        self.acknowledged = None         # the honoured filter of a subscriptions/listen
        self._before_ack = []
        self.on_over = None              # told once the request has its answer
        core.requests.add(self)

    def take(self, seq, message, line=None, losses=0, headers=None):
        """Serve one request; its answer goes to the link as that of `seq`."""
        self.headers = headers
        call = self.call = Call(message.get("method"), message.get("params") or {}, self._finished, self,
                                message["id"], seq)
        call.message, call.line, call.losses = message, line, losses
        self.calls[call.host_id] = call
        try:
            check_envelope(message, headers)
        except EnvelopeError as error:
            self._refuse(call, error)
            return
        meta = call.params["_meta"]
        self.capabilities, self.level = meta[META_CAPABILITIES], meta.get(META_LOG_LEVEL)
        self._guarded(call, lambda: MODERN_HANDLERS[call.method](self, call))

    def own_identity(self):
        """Return who its lists are for: whom this very request names."""
        if self.call is None:
            return super().own_identity()
        meta = self.link.named_by(self.call.seq, self.call.params.get("_meta"))
        return self.identity.with_meta(meta, self.core.config.get("transport.sessionMetaKeys"), self.core.new_id())

    # -- answers -------------------------------------------------------------------

    def _refuse(self, call, error):
        """Answer with an error that has an HTTP status of its own."""
        call.done = True
        self.calls.pop(call.host_id, None)
        if not self.closed:
            data = encode_json(error_message(call.host_id, error))
            if isinstance(call.seq, Batch):
                self._send_line(call.seq, data)
            else:
                self.link.refuse(call.seq, data, error.code)
        self._over()

    def _finished(self, call, message, line):
        if self.calls.get(call.host_id) is call:
            del self.calls[call.host_id]
        self._note_end(call)
        if self.closed:
            return
        if "result" in message and isinstance(message["result"], dict):
            result = self._result_for_host(call, message["result"])
            self._send(call.seq, result_message(call.host_id, result))
            self._over()
            return
        error = message.get("error")
        if not isinstance(error, dict) or not isinstance(error.get("code"), int):
            error = RpcError(INTERNAL_ERROR, "the server's answer has neither a result object nor an error").as_object()
        self._fail(call, error)

    def _fail(self, call, error):
        if error["code"] == URL_ELICITATION_REQUIRED:
            outcome = self.core.held.ask_for_urls(self, call, error)
            if outcome is not None:
                self._send(call.seq, outcome)
                self._over()
                return
        error = spell_error_up(error, call)
        if error["code"] in (METHOD_NOT_FOUND, MISSING_CAPABILITY):
            self._refuse(call, RpcError(error["code"], error["message"], error.get("data")))
            return
        self._send(call.seq, {"jsonrpc": "2.0", "id": call.host_id, "error": error})
        self._over()

    def _over(self):
        """The request is answered: whatever it held is given back."""
        self.core.requests.discard(self)
        if self.on_over is not None:
            self.on_over(self)
        self.close()

    def _result_for_host(self, call, result):
        if asks_for_input({"result": result}) and call.slot is not None:
            return self.core.held.wrap(self, call, result)
        if call.method == "tools/call" and call.slot is not None and is_task_result(result):
            result = self.core.modern_tasks.created(self, call, result)
        result = spell_result(call.method, result, MODERN)
        if call.method.startswith("tasks/") and call.slot is not None:
            result = self.core.modern_tasks.answered(call, result)
        elif call.slot is not None:
            result = self._mark_restarted(call, result)
        meta = result.get("_meta") if isinstance(result.get("_meta"), dict) else {}
        meta = {name: value for name, value in meta.items() if name not in HOP_META and name != META_RELATED_TASK}
        meta[META_SERVER_INFO] = self.server_info(call.schema)
        result = dict(result, _meta=meta)
        result.setdefault("resultType", "complete")
        if call.method == "resources/read":
            result.setdefault("ttlMs", 0)
            result.setdefault("cacheScope", "private")
        return result

    def server_info(self, schema=None):
        """Whose server it is (D-3): the upstream's where one is passed through, else mcpx."""
        if self.surface.single:
            schema = schema or self.surface.schemas.get(self.surface.names[0])
            if schema is not None and schema.info:
                return {name: value for name, value in schema.info.items()}
        return {"name": "mcpx", "version": __version__}

    def answer_input_required(self, call, requests, state):
        """Answer with questions: the request is over, a retry brings the answers."""
        self.calls.pop(call.host_id, None)
        call.done = True
        if not self.closed:
            result = {"resultType": "input_required", "inputRequests": requests, "requestState": state,
                      "_meta": {META_SERVER_INFO: self.server_info(call.schema)}}
            self._send(call.seq, result_message(call.host_id, result))
        self._over()

    def list_page(self, kind, cursor):
        """Return one page of a list as encoded result bytes, with caching hints."""
        size = self.core.config.get("list.pageSize")
        data = self.surface.page(kind, MODERN, cursor, size)
        page = parse_json(data)
        if self.headers is not None and kind == "tools" and HEADER_ANNOTATION.encode() in data:
            page["tools"] = [dict(tool, inputSchema=without_bad_headers(tool.get("inputSchema"), set()))
                             for tool in page["tools"]]
        ttl = min([schema.cache_ms(kind) for _, schema in self.surface.known()], default=0)
        page.update(resultType="complete", ttlMs=ttl, cacheScope="private",
                    _meta={META_SERVER_INFO: self.server_info()})
        return encode_json(page)

    def answered_here(self, call, data):
        """A list was answered from the cache, as bytes."""
        self.calls.pop(call.host_id, None)
        call.done = True
        self._send_line(call.seq, answer_line(call.host_id, data))
        self._over()

    # -- what comes meanwhile ----------------------------------------------------------

    def _submit(self, call, slot, schema):
        if "inputResponses" in call.params and schema.revision not in MODERN_REVISIONS:
            raise RpcError(INVALID_PARAMS, "inputResponses without requestState: the call would run again; "
                           "start it anew")
        tool = schema.tool(call.params.get("name")) if call.method == "tools/call" else None
        if tool is not None and schema.revision not in MODERN_REVISIONS and runs_as_task(schema, tool) and (
                self.declares_tasks()):
            call.params = dict(call.params, task={})
        super()._submit(call, slot, schema)

    def declares_tasks(self):
        """Does this request declare the tasks extension?"""
        extensions = self.capabilities.get("extensions")
        return isinstance(extensions, dict) and TASKS_EXTENSION in extensions

    def can_tell_roots(self):
        """Roots travel inside results here: nobody is asked before a call is sent."""
        return False

    def tell(self, method, params=None, call=None):
        """Send a notification of this request; on a listen stream, tagged with its id."""
        if self.closed:
            return
        if self.acknowledged is not None or self._listens():
            meta = dict((params or {}).get("_meta") or {}, **{META_SUBSCRIPTION: self.call.host_id})
            params = dict(params or {}, _meta=meta)
            if self.acknowledged is None and method != "notifications/subscriptions/acknowledged":
                self._before_ack.append((method, params))
                return
        self.link.message(encode_json(notification(method, params)), self.call)

    def _listens(self):
        return self.call is not None and self.call.method == "subscriptions/listen"

    def on_list_changed(self, method):
        """A list has changed: only a listen stream that asked for its kind is told."""
        if self._listens() and method in self.wanted_kinds:
            self.tell(method)

    def on_log(self, params, call=None):
        """Log messages only for a request that asked for them, at its level."""
        level = params.get("level")
        if self.level is None or self._listens() or level not in LOG_LEVELS:
            self.core.pool.counters["droppedLogs"] += 1
        elif LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.level):
            self.tell("notifications/message", params, call)

    def can_answer(self, question):
        """Does this very request say that it can be asked this, and may its method ask?"""
        return self.call.method in MAY_ASK and covers(self.capabilities, question.method, question.params)

    def send_question(self, question):
        """A question of the upstream ends this request; the call is held for the retry."""
        self.questions.pop(question.id, None)
        self.core.held.hold(self, self.call).send_question(question)

    def withdraw_question(self, question, _reason):
        """It was not asked yet."""
        self.questions.pop(question.id, None)

    def acknowledge(self, honoured):
        """Open the listen stream: first the acknowledgement, then what came meanwhile."""
        self.tell("notifications/subscriptions/acknowledged", {"notifications": honoured})
        self.acknowledged = honoured
        early, self._before_ack = self._before_ack, []
        for method, params in early:
            self.link.message(encode_json(notification(method, params)), self.call)

    def end_listen(self):
        """End a listen stream from our side: the result says that it ended well (D-5)."""
        call = self.call
        if not call.done and not self.closed:
            meta = {META_SUBSCRIPTION: call.host_id}
            call.finish({"result": {"_meta": meta}})

    def close(self):
        """It is answered, cancelled, or its host has gone."""
        self.core.requests.discard(self)
        if self.held is not None and self.held.request is self:
            self.held.drop("the host has gone")
        super().close()


def spell_error_up(error, call):
    """Return an upstream's error object as a modern host may see it.

    MCP 2026-07-28, basic/index: -32002 is gone, -32020 to -32099 are reserved. What a server of
    that revision means by one of those is its host's matter, but for the version and the headers,
    which were ours; of a legacy server only a missing capability can be meant so.
    """
    code = error["code"]
    if code == RESOURCE_NOT_FOUND:
        data = error.get("data") if isinstance(error.get("data"), dict) else {}
        data.setdefault("uri", call.params.get("uri"))
        return {"code": INVALID_PARAMS, "message": error.get("message", "Resource not found"), "data": data}
    instance = call.slot.instance if call.slot is not None else None
    kept = code == MISSING_CAPABILITY or (
        instance is not None and instance.upstream.era == "modern" and
        code not in (HEADER_MISMATCH, UNSUPPORTED_VERSION))
    if -32099 <= code <= -32020 and not kept:
        return {"code": INTERNAL_ERROR, "message": str(error.get("message", "")), "data": {"upstreamCode": code}}
    return error


# A retry that comes so much too late still hears what its call has come to without an answer.
LATE_RETRY_S = 60.0


class HeldCall:
    """A call that goes on upstream while its modern host has to answer questions.

    MCP 2026-07-28, basic/patterns/mrtr. Takes the host's place for the pool and for
    Questions; `request` is the retry that is attached, or None between two rounds.
    """

    revision, era = MODERN, "modern"
    level = None

    @property
    def is_there(self):
        """Is a request attached that a question can be an answer to?"""
        return self.request is not None

    def __init__(self, core, held_id, request, call):
        self.core, self.id, self.call, self.pipe = core, "held%d" % held_id, call, request.pipe
        self.names, self.capabilities = request.surface.names, request.capabilities
        self.request, self.request_call = request, request.call
        self.digest = digest_of_request(call.method, call.message["params"])
        self.questions = {}              # our question id -> Question
        self.keys = {}                   # key in inputRequests -> Question
        self.round = 0
        self.slots = set()
        self.closed = False
        self.result = None               # (message, line) that came while nobody was attached
        self.timer = self.ask_timer = None

    # -- in the host's place -----------------------------------------------------------

    def can_answer(self, question):
        """Can the request that was answered last be asked this?"""
        return covers(self.capabilities, question.method, question.params)

    def send_question(self, question):
        """Put a question into the next answer of the request that is attached."""
        question.host, question.call = self, self.call
        self.questions[question.id] = question
        self.keys["q%d" % question.id] = question
        if self.request is not None and self.ask_timer is None:
            self.ask_timer = self.core.loop.call_later(SIBLING_WAIT_S, self.ask)

    def withdraw_question(self, question, _reason):
        """The upstream does not want an answer any more."""
        self.questions.pop(question.id, None)
        self.keys.pop("q%d" % question.id, None)

    def on_progress(self, call, params):
        """Progress goes to the request that is attached; between rounds nobody may hear of it."""
        if self.request is not None and self.request_call.token is not None:
            self.request.on_progress(self.request_call, params)

    def on_log(self, params, _call=None):
        """Log messages go to the request that is attached."""
        if self.request is not None:
            self.request.on_log(params, self.request_call)

    def tell(self, _method, _params=None, _call=None):
        """Nothing else can be told to a host that has no request open."""

    def on_list_changed(self, _method):
        """A held call has no lists."""

    # -- rounds ---------------------------------------------------------------------------

    def ask(self):
        """Answer the attached request with the open questions."""
        self.ask_timer = None
        request, call = self.request, self.request_call
        if request is None or not self.keys:
            return
        self.request = self.request_call = None
        self.round += 1
        timeout = self.core.question_timeout(self.call) + LATE_RETRY_S
        self._expire_in(timeout)
        requests = {key: {"method": q.method, "params": params_of_question(q, self.names)} if q.params or
                    q.method != "roots/list" else {"method": q.method} for key, q in self.keys.items()}
        state = self.core.sign({"h": self.id, "r": self.round, "e": time.time() + timeout, "d": self.digest,
                                "by": self.core.incarnation})
        request.answer_input_required(call, requests, state)

    def attach(self, request, call, responses):
        """Take a retry: give the upstream its answers, and the call to the new request."""
        for key, value in responses.items():
            if key in self.keys and not isinstance(value, dict):
                raise RpcError(INVALID_PARAMS, "inputResponses.%s is no object" % key)
        self._expire_in(None)
        self.round += 1                  # a state is good for one retry
        self.request, self.request_call = request, call
        self.capabilities = request.capabilities
        request.call, request.held = call, self
        call.slot, call.identity, call.schema = self.call.slot, self.call.identity, self.call.schema
        meta = call.params.get("_meta") or {}
        if is_valid_id(meta.get("progressToken")):
            call.token = meta["progressToken"]
        for key in [key for key in responses if key in self.keys]:
            question = self.keys.pop(key)
            self.core.questions.answer(question, {"result": responses[key]})
        if self.result is not None:
            self._deliver()
        elif self.keys:
            self.ask()

    def finished(self, _call, message, line):
        """The upstream has answered the call."""
        self.result = (message, line)
        if self.request is not None:
            self._deliver()

    def _deliver(self):
        request, call, (message, line) = self.request, self.request_call, self.result
        self.request = self.request_call = None
        for question in list(self.keys.values()):
            # Its call has ended without an answer to this: another one has asked.
            self.core.questions.place_again(question)
        self.forget()
        if not request.closed:
            call.finish(message, line)

    def _expire_in(self, seconds):
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None if seconds is None else self.core.loop.call_later(seconds, lambda: self.drop("no retry came"))

    def drop(self, reason):
        """Nobody will come back: answer the upstream's questions, cancel its call."""
        for question in list(self.questions.values()):
            self.core.questions.give_up(question, reason)
        if not self.call.done:
            self.core.pool.cancel(self.call, reason)
        self.forget()

    def forget(self):
        """Leave every table."""
        self.closed = True
        self._expire_in(None)
        if self.ask_timer is not None:
            self.ask_timer.cancel()
        self.core.held.by_id.pop(self.id, None)
        for slot in list(self.slots):
            self.core.pool.leave(slot, self)


def params_of_question(question, names):
    """Return a question's params as an entry of `inputRequests` carries them."""
    # They are no requests of their own there, so they have no `_meta`.
    params = {name: value for name, value in spell_params(question.method, question.params, MODERN).items()
              if name not in ("task", "elicitationId", "_meta")}
    if question.method == "elicitation/create":
        params.setdefault("mode", "form")
        if len(names) > 1 and isinstance(params.get("message"), str):
            params["message"] = "[%s] %s" % (question.instance.definition.server.name, params["message"])
    return params


def digest_of_request(method, params):
    """Return a digest of what a retry must repeat: method, name or uri, and arguments."""
    kept = {name: value for name, value in params.items() if name not in ("_meta", "inputResponses", "requestState")}
    return hashlib.sha256(json.dumps([method, kept], sort_keys=True).encode("utf-8")).hexdigest()[:32]


class HeldCalls:
    """All held calls, and the states that lead back to them."""

    def __init__(self, core):
        self.core = core
        self.by_id = {}

    def hold(self, request, call):
        """Return the HeldCall in the place of a request's host; made at its first question."""
        if isinstance(call.host, HeldCall):
            return call.host
        held = HeldCall(self.core, self.core.new_id(), request, call)
        self.by_id[held.id] = held
        # The request gets a call of its own to be answered by; the old one goes on upstream.
        mine = Call(call.method, call.message["params"], request._finished, request, call.host_id,
                    call.seq, call.identity)
        mine.slot, mine.schema, mine.token, mine.message = call.slot, call.schema, call.token, call.message
        request.calls[call.host_id] = request.call = held.request_call = mine
        call.host, call.on_finish, request.held = held, held.finished, held
        call.may_repeat = False          # answers were given: it is another call by now
        for slot in list(request.slots):
            slot.hosts.add(held)
            held.slots.add(slot)
        return held

    def resume(self, request, call):
        """Take a retry that carries a requestState. Raises RpcError that says what is wrong with it."""
        state = self.core.unsign(call.params.get("requestState"), digest_of_request(call.method, call.params))
        responses = call.params.get("inputResponses")
        if responses is None:
            responses = {}
        if not isinstance(responses, dict):
            raise RpcError(INVALID_PARAMS, "inputResponses is no object")
        if "u" in state:
            self._rerun(request, call, state, responses)
            return
        if "i" in state:
            request.core.attach(request)
            self._unwrap(request, call, state)
            return
        held = self.by_id.get(state.get("h"))
        if held is None and state.get("by") != self.core.incarnation:
            raise StreamLost("mcpx lost its daemon while this call was in flight; whether it was carried out "
                             "is not known")
        if held is None:
            raise RpcError(INVALID_PARAMS, "requestState: the call is gone; start it again")
        if state.get("r") != held.round or held.request is not None:
            raise RpcError(INVALID_PARAMS, "requestState: it was used already")
        held.attach(request, call, responses)

    def wrap(self, request, call, result):
        """A modern upstream asks: its state goes inside one of ours, which leads the retry back.

        PROTOCOL 7.3: SDKs seal the state with a key of their process, so a retry must reach
        the instance that made it. A `call`-scoped instance stays until the state expires.
        """
        timeout = self.core.question_timeout(call)
        instance = next((i for i in self.core.pool.instances.values() if i.slot is call.slot), None)
        number = self.core.new_id()
        if call.slot is not None and call.slot.key.text.startswith("call:"):
            call.slot.tasks.add(number)

            def expire():
                call.slot.tasks.discard(number)
                self.core.pool.wake(call.slot)
            self.core.loop.call_later(timeout, expire)
        payload = {"i": instance.id if instance is not None else "", "n": number, "e": time.time() + timeout,
                   "d": digest_of_request(call.method, call.message["params"])}
        if result.get("requestState") is not None:
            payload["s"] = result["requestState"]
        meta = result.get("_meta") if isinstance(result.get("_meta"), dict) else {}
        meta = dict(meta, **{META_SERVER_INFO: request.server_info(call.schema)})
        return dict(result, requestState=self.core.sign(payload), _meta=meta)

    def _unwrap(self, request, call, state):
        """Send a retry to the instance that asked, with its own state, byte for byte."""
        params = {name: value for name, value in call.params.items() if name != "requestState"}
        if "s" in state:
            params["requestState"] = state["s"]
        call.line, call.params = None, params
        instance = self.core.pool.instances.get(state["i"])
        if instance is None or instance.slot is None or instance.slot.ended:
            MODERN_FRESH[call.method](request, call)
            return
        slot = instance.slot
        slot.tasks.discard(state.get("n"))
        name = call.params.get("name")
        if isinstance(name, str) and call.method != "resources/read":
            kind = "tools" if call.method == "tools/call" else "prompts"
            call.params = dict(call.params, name=request.surface.resolve(kind, name)[1])

        def identified():
            schema = self.core.schemas.of_instance(instance)
            request._submit(call, slot, schema)
            call.may_repeat = False
        request.with_identity(call, slot.scope, identified)

    def ask_for_urls(self, request, call, error):
        """A 2025-11-25 upstream wants URLs visited first (-32042): ask, and run the call again then.

        Returns the answer to send, or None where the error has to do.
        """
        data = error.get("data") if isinstance(error.get("data"), dict) else {}
        entries = [e for e in data.get("elicitations") or () if isinstance(e, dict) and isinstance(e.get("url"), str)]
        if call.method not in MAY_ASK or not entries:
            return None
        elicitation = request.capabilities.get("elicitation")
        if not isinstance(elicitation, dict) or "url" not in elicitation:
            return error_message(call.host_id, RpcError(MISSING_CAPABILITY, str(error.get("message", "")), {
                "requiredCapabilities": {"elicitation": {"url": {}}}}))
        if request.runs >= MAX_RERUNS:
            return error_message(call.host_id, RpcError(
                INTERNAL_ERROR, "the server asked for URLs %d times in a row" % request.runs))
        requests = {"u%d" % n: {"method": "elicitation/create", "params": {
            "mode": "url", "message": str(entry.get("message", "")), "url": entry["url"]}}
            for n, entry in enumerate(entries)}
        timeout = self.core.question_timeout(call)
        state = self.core.sign({"u": request.runs + 1, "e": time.time() + timeout, "n": self.core.new_id(),
                                "d": digest_of_request(call.method, call.message["params"])})
        return result_message(call.host_id, {"resultType": "input_required", "inputRequests": requests,
                                             "requestState": state,
                                             "_meta": {META_SERVER_INFO: request.server_info(call.schema)}})

    def _rerun(self, request, call, state, responses):
        self.core.use_once(state.get("n"))
        refused = [value for value in responses.values() if not isinstance(value, dict) or
                   value.get("action") != "accept"]
        if refused or not responses:
            text = "the user did not visit the address"
            if call.method != "tools/call":
                raise RpcError(INVALID_PARAMS, text)
            call.finish({"result": dict(text_result(text), isError=True)})
            return
        request.runs = state["u"]
        call.params = {name: value for name, value in call.params.items()
                       if name not in ("inputResponses", "requestState")}
        call.line = None
        MODERN_HANDLERS[call.method](request, call)


def is_core_task(result):
    """Is this the creation of a core task of 2025-11-25?"""
    inner = result.get("task")
    return isinstance(inner, dict) and isinstance(inner.get("taskId"), str) and "content" not in result


def is_task_result(result):
    """Is this the creation of a task: flat as in the extension, or nested as in 2025-11-25?"""
    return is_core_task(result) or (result.get("resultType") == "task" and isinstance(result.get("taskId"), str))


class ModernTask:
    """A task of the extension as modern hosts know it. For a legacy upstream's core task it takes
    the host's place for the questions that the task asks."""

    revision, era = MODERN, "modern"
    is_there = True                      # whoever looks at it is told what it asks
    level = None

    def __init__(self, core, task_id, upstream_id, call, capabilities, is_core):
        self.core, self.id, self.upstream_id, self.call = core, task_id, upstream_id, call
        self.slot, self.identity, self.capabilities, self.is_core = call.slot, call.identity, capabilities, is_core
        self.questions, self.keys = {}, {}
        self.slots = {self.slot}
        self.closed = False
        self.result_call = None          # the open tasks/result of a core task
        self.outcome = None              # ("result" or "error", value) of a core task that is over
        self.final = None                # what tasks/get shows once it is over, also when its instance has gone
        self.state = {}                  # what the server has said of a core task last
        self.timer = None

    def can_answer(self, question):
        """Did the request that made the task say that its host can be asked this?"""
        return covers(self.capabilities, question.method, question.params)

    def send_question(self, question):
        """Shown by the next tasks/get, answered by tasks/update."""
        question.host = self
        self.questions[question.id] = question
        self.keys["q%d" % question.id] = question

    def withdraw_question(self, question, _reason):
        """The server does not want an answer any more."""
        self.questions.pop(question.id, None)
        self.keys.pop("q%d" % question.id, None)

    def on_progress(self, _call, _params):
        """The extension has no progress for tasks."""

    def on_log(self, _params, _call=None):
        """The extension has no log messages for tasks."""

    def tell(self, _method, _params=None, _call=None):
        """Hosts of a task ask for news themselves."""

    def on_list_changed(self, _method):
        """A task has no lists."""


class ModernTasks:
    """The tasks extension toward modern hosts, over both kinds of upstreams (PROTOCOL 7.7)."""

    def __init__(self, core):
        self.core = core
        self.by_id = {}                  # our id -> ModernTask

    def created(self, request, call, result):
        """A tools/call became a task: register it first, then return the flat result with our id."""
        is_core = is_core_task(result)
        inner = result["task"] if is_core else result
        task = ModernTask(self.core, secrets.token_urlsafe(18), inner.get("taskId"), call,
                          request.capabilities, is_core)
        self.by_id[task.id] = task
        task.slot.tasks.add(task.upstream_id)
        shown = flat_task(inner, task.id, is_core)
        ttl = shown.get("ttlMs")
        seconds = ttl / 1000.0 if isinstance(ttl, (int, float)) and not isinstance(ttl, bool) else DEFAULT_TASK_TTL_S
        task.timer = self.core.loop.call_later(min(seconds, 86400.0) + 5, lambda: self.forget(task))
        kept = {} if is_core else {name: value for name, value in result.items() if name not in shown}
        return dict(kept, resultType="task", **shown)

    def request(self, request, call):
        """tasks/get, tasks/update, tasks/cancel."""
        if not request.declares_tasks():
            raise RpcError(MISSING_CAPABILITY, "%s needs the extension %s" % (call.method, TASKS_EXTENSION),
                           {"requiredCapabilities": {"extensions": {TASKS_EXTENSION: {}}}})
        task_id = call.params.get("taskId")
        task = self.by_id.get(task_id) if isinstance(task_id, str) else None
        if task is None or not self._may_see(request, call, task):
            raise RpcError(INVALID_PARAMS, "unknown task")
        call.line, call.identity, call.task = None, task.identity, task
        if task.final is not None:
            call.finish({"result": task.final if call.method == "tasks/get" else {"resultType": "complete"}})
            return
        if task.is_core:
            CORE_TASK_STEPS[call.method](self, request, call, task)
            return
        call.params = dict(call.params, taskId=task.upstream_id)
        call.may_repeat = call.method == "tasks/get"
        self.core.pool.submit(call, task.slot)

    def _may_see(self, request, call, task):
        """A named session's task is its own; who has no name proves it by the id, which cannot be guessed."""
        meta = request.link.named_by(call.seq, call.params.get("_meta"))
        identity = request.identity.with_meta(meta, self.core.config.get("transport.sessionMetaKeys"), 0)
        return not task.identity.named or identity.session == task.identity.session

    def watch(self, request, call, task_ids):
        """Have a listen stream told of these tasks; returns those that it may hear of."""
        if not isinstance(task_ids, list) or not task_ids:
            return []
        if not request.declares_tasks():
            raise RpcError(MISSING_CAPABILITY, "taskIds needs the extension %s" % TASKS_EXTENSION,
                           {"requiredCapabilities": {"extensions": {TASKS_EXTENSION: {}}}})
        good = []
        for task_id in task_ids:
            task = self.by_id.get(task_id) if isinstance(task_id, str) else None
            if task is not None and self._may_see(request, call, task):
                good.append(task_id)
                request.wanted_tasks.add(task_id)
                instance = task.slot.instance
                if not task.is_core and instance is not None and task.upstream_id not in instance.upstream.wanted_tasks:
                    instance.upstream.wanted_tasks.add(task.upstream_id)
                    instance.upstream.listen()
        return good

    def on_state(self, instance, params):
        """A server tells how a task is doing: the listen streams that want to hear of it are told."""
        task = next((t for t in self.by_id.values() if t.upstream_id == params.get("taskId")
                     and t.slot is instance.slot), None)
        if task is None:
            self.core.pool.counters["droppedTaskStatus"] += 1
            return
        shown = {name: value for name, value in params.items() if name != "_meta"}
        shown = flat_task(shown, task.id, True) if task.is_core else dict(shown, taskId=task.id)
        for request in list(self.core.requests):
            if task.id in request.wanted_tasks:
                request.tell("notifications/tasks", shown)

    def answered(self, call, result):
        """Give a modern upstream's answer about a task our id."""
        if call.method != "tasks/get":
            return {"resultType": "complete"}
        result = dict(result, resultType="complete")
        if result.get("taskId") == call.task.upstream_id:
            result["taskId"] = call.task.id
        self._note_final(call.task, result)
        return result

    def _note_final(self, task, shown):
        """A task that is over needs its instance no longer."""
        if shown.get("status") in TERMINAL_STATUSES:
            task.final = shown
            task.slot.tasks.discard(task.upstream_id)
            self.core.pool.wake(task.slot)

    # -- core tasks ----------------------------------------------------------------------

    def core_get(self, request, call, task):
        """tasks/get: the state now; a task that is over comes with its result or error."""
        def got(_call, message, _line):
            result = message.get("result")
            if not isinstance(result, dict):
                call.finish({"error": message.get("error") or RpcError(INTERNAL_ERROR, "no state").as_object()})
                return
            status, task.state = result.get("status"), result
            if status in ("completed", "failed") and task.outcome is None:
                self._fetch(task, lambda: self._show(call, task, result))
            elif status == "input_required" and task.result_call is None:
                # Its questions come to who waits for the result.
                self._fetch(task, lambda: None)
                self.core.loop.call_later(0.1, lambda: self._show(call, task, result))
            else:
                self._show(call, task, result)
        self._ask(task, "tasks/get", got)

    def _ask(self, task, method, on_answer):
        inner = Call(method, {"taskId": task.upstream_id}, on_answer, task, None, None, task.identity)
        inner.may_repeat = method != "tasks/cancel"
        self.core.pool.submit(inner, task.slot)
        return inner

    def _fetch(self, task, then):
        def fetched(_call, message, _line):
            result = message.get("result")
            if isinstance(result, dict):
                meta = {n: v for n, v in (result.get("_meta") or {}).items() if n != META_RELATED_TASK}
                result = {name: value for name, value in result.items() if name != "_meta"}
                task.outcome = ("result", dict(result, _meta=meta) if meta else result)
            else:
                task.outcome = ("error", message.get("error"))
            shown = self._shown(task, dict(task.state, status="completed"))
            then()
            # Only now: its instance may go at once.
            self._note_final(task, shown)
        task.result_call = self._ask(task, "tasks/result", fetched)

    def _show(self, call, task, state):
        shown = self._shown(task, state)
        self._note_final(task, shown)
        call.finish({"result": shown})

    def _shown(self, task, state):
        """Return a core task's state as tasks/get of the extension shows it."""
        shown = flat_task(state, task.id, True)
        if task.outcome is not None and shown["status"] in ("completed", "failed"):
            # The extension: a result with isError is a completed task, an error a failed one.
            kind, value = task.outcome
            shown["status"] = "completed" if kind == "result" else "failed"
            shown[kind] = value
        if task.keys and shown["status"] in ("working", "input_required"):
            shown["status"] = "input_required"
            shown["inputRequests"] = {key: {"method": q.method, "params": params_of_question(q, ["one"])}
                                      for key, q in task.keys.items()}
        return dict(shown, resultType="complete")

    def core_update(self, _request, call, task):
        """tasks/update: answers to the task's questions; keys that are not open are ignored."""
        responses = call.params.get("inputResponses")
        if not isinstance(responses, dict):
            raise RpcError(INVALID_PARAMS, "tasks/update needs inputResponses")
        for key in [key for key in responses if key in task.keys and isinstance(responses[key], dict)]:
            self.core.questions.answer(task.keys.pop(key), {"result": responses[key]})
        call.finish({"result": {"resultType": "complete"}})

    def core_cancel(self, _request, call, task):
        """tasks/cancel: cooperative; acknowledged also for a task that is over."""
        self._ask(task, "tasks/cancel", lambda *_: call.finish({"result": {"resultType": "complete"}}))

    def forget(self, task):
        """Its time is over."""
        self.by_id.pop(task.id, None)
        task.closed = True
        if task.timer is not None:
            task.timer.cancel()
        for question in list(task.questions.values()):
            self.core.questions.give_up(question, "the task is gone")
        task.slot.tasks.discard(task.upstream_id)
        self.core.pool.leave(task.slot, task)
        self.core.pool.wake(task.slot)

    def on_gone(self, instance):
        """An instance has ended, and its tasks with it."""
        for task in [t for t in self.by_id.values() if t.slot is instance.slot and t.final is None]:
            self.forget(task)


CORE_TASK_STEPS = {"tasks/get": ModernTasks.core_get, "tasks/update": ModernTasks.core_update,
                   "tasks/cancel": ModernTasks.core_cancel}


def flat_task(inner, task_id, is_core):
    """Return a task's state in the members of the extension, with our id."""
    shown = {"taskId": task_id, "status": inner.get("status", "working"), "createdAt": inner.get("createdAt"),
             "lastUpdatedAt": inner.get("lastUpdatedAt"), "ttlMs": inner.get("ttl" if is_core else "ttlMs")}
    if inner.get("statusMessage") is not None:
        shown["statusMessage"] = inner["statusMessage"]
    interval = inner.get("pollInterval" if is_core else "pollIntervalMs")
    if interval is not None:
        shown["pollIntervalMs"] = interval
    return shown


def _modern_task(request, call):
    request.core.modern_tasks.request(request, call)


def _discover(request, call):
    """MCP 2026-07-28, server/discover. Answered from the cache, as `initialize` is."""
    def ready(errors):
        if call.done or request.closed:
            return
        if request.surface.single and errors and not request.surface.known():
            call.fail(errors[0])
            return
        shown = request.surface.initialize_result(MODERN)
        capabilities = shown["capabilities"]
        if any("tasks" in schema.capabilities for _, schema in request.surface.known()):
            # A legacy server's core tasks are shown as those of the extension.
            extensions = dict(capabilities.get("extensions") or {}, **{TASKS_EXTENSION: {}})
            capabilities = dict(capabilities, extensions=extensions)
        result = {"supportedVersions": list(MODERN_REVISIONS) + list(reversed(LEGACY_REVISIONS)),
                  "capabilities": capabilities, "ttlMs": LIST_TTL_MS, "cacheScope": "private"}
        if "instructions" in shown:
            result["instructions"] = shown["instructions"]
        call.finish({"result": result})
    request.core.attach(request)
    request.core.with_schemas(request, ready)


def _modern_list(request, call):
    request.core.attach(request)
    _list(request, call)


def _modern_carrier(handler):
    """Requests that may end in questions: a retry finds its held call, others start one."""
    def serve(request, call):
        if "requestState" in call.params:
            request.core.held.resume(request, call)
            return
        if "inputResponses" in call.params and "requestState" not in call.params and not isinstance(
                call.params["inputResponses"], dict):
            raise RpcError(INVALID_PARAMS, "inputResponses is no object")
        call.line = None
        if request.headers is not None and call.method == "tools/call" or not request.surface.single:
            request.core.attach(request)
            request.core.with_schemas(request, lambda errors: request._guarded(call, lambda: checked(request, call)))
        else:
            handler(request, call)

    def checked(request, call):
        if request.headers is not None and call.method == "tools/call" and isinstance(call.params.get("name"), str):
            server_name, own_name = request.surface.resolve("tools", call.params["name"])
            schema = request.surface.schemas.get(server_name)
            tool = schema.tool(own_name) if schema is not None else None
            arguments = call.params.get("arguments")
            try:
                if tool is not None:
                    check_parameter_headers(tool, arguments if isinstance(arguments, dict) else {}, request.headers)
            except EnvelopeError as error:
                request._refuse(call, error)
                return
        handler(request, call)
    return serve


def _modern_complete(request, call):
    call.line = None
    request.core.attach(request)
    request.core.with_schemas(request, lambda errors: request._guarded(call, lambda: _complete(request, call)))


def _listen(request, call):
    """MCP 2026-07-28, basic/patterns/subscriptions: one stream of the changes that it names."""
    wanted = call.params.get("notifications")
    if not isinstance(wanted, dict):
        raise RpcError(INVALID_PARAMS, "subscriptions/listen needs a notifications object")
    uris = wanted.get("resourceSubscriptions")
    uris = [uri for uri in uris if isinstance(uri, str)] if isinstance(uris, list) else []
    request.wanted_kinds = set()
    request.core.attach(request)

    def ready(_errors):
        honoured = {}
        for member, capability in (("toolsListChanged", "tools"), ("promptsListChanged", "prompts"),
                                   ("resourcesListChanged", "resources")):
            if wanted.get(member) is True and request.surface.offers(capability):
                honoured[member] = True
                request.wanted_kinds.add("notifications/%s/list_changed" % capability)
        task_ids = request.core.modern_tasks.watch(request, call, wanted.get("taskIds"))
        if task_ids:
            honoured["taskIds"] = task_ids
        left = set(uris) if request.surface.offers("resources") else set()
        good = []

        def done(uri, message):
            left.discard(uri)
            if "result" in message:
                good.append(uri)
            if not left:
                acknowledge()

        def acknowledge():
            if good:
                honoured["resourceSubscriptions"] = [uri for uri in uris if uri in good]
            if not request.closed:
                request.acknowledge(honoured)
        if not left:
            acknowledge()
        for uri in list(left):
            inner = Call("resources/subscribe", {"uri": uri, "_meta": call.params["_meta"]},
                         lambda _call, message, _line, uri=uri: done(uri, message), request, None, call.seq)
            try:
                _subscribe(request, inner)
            except RpcError as error:
                inner.fail(error)
    request.core.with_schemas(request, lambda errors: request._guarded(call, lambda: ready(errors)))


# The same without the look at retries: for one whose instance is gone.
MODERN_FRESH = {"tools/call": _named("tools"), "prompts/get": _named("prompts"), "resources/read": _read}

MODERN_HANDLERS = {
    "server/discover": _discover, "tools/call": _modern_carrier(_named("tools")),
    "prompts/get": _modern_carrier(_named("prompts")), "resources/read": _modern_carrier(_read),
    "completion/complete": _modern_complete, "subscriptions/listen": _listen, "tasks/get": _modern_task,
    "tasks/update": _modern_task, "tasks/cancel": _modern_task}
MODERN_HANDLERS.update((method, _modern_list) for method in LIST_METHODS)


# ---------------------------------------------------------------------------
# HTTP: is this request acceptable; which host object is it for
#
# Bytes come from a stream of the loop; heads are parsed by `http.server` over memory, after
# the raw bytes were checked. Opens no thread and no socket of its own. An exchange is one
# request and its answer: a JSON body, or a stream of events that may last.
# ---------------------------------------------------------------------------

# A comment at least this often on a quiet stream, so that nothing in between cuts it.
SSE_KEEP_ALIVE_S = 15.0
# A request that is still quiet after this gets its headers, so that clients see it is alive.
# In 2026-07-28 later: some errors there have a status, which could not be given any more.
LEGACY_COMMIT_S, SSE_COMMIT_S = 0.5, 10.0
# Between two looks at all open exchanges.
HTTP_SWEEP_S = 2.5
# Events kept for a stream that may be resumed, and messages for a GET stream not yet opened.
MAX_KEPT_EVENTS = 1000
MAX_KEPT_BYTES = 32 << 20
# How long a finished stream can still be resumed.
RESUME_S = 300.0
# Pieces (heads, bodies, chunks) that are taken from one connection in a turn.
HTTP_STEPS_A_TURN = 64
ACCEPTED_STATUS = 202
# So many beyond http.connections are told so; the rest is hung up on.
SURPLUS_CONNECTIONS = 64
HTTP_REASONS = {200: "OK", 202: "Accepted", 204: "No Content", 400: "Bad Request", 401: "Unauthorized",
                403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 406: "Not Acceptable",
                408: "Request Timeout", 409: "Conflict", 413: "Content Too Large", 415: "Unsupported Media Type",
                417: "Expectation Failed", 429: "Too Many Requests", 431: "Request Header Fields Too Large",
                500: "Internal Server Error", 501: "Not Implemented", 503: "Service Unavailable",
                505: "HTTP Version Not Supported"}
# JSON-RPC errors with an HTTP status of their own (PROTOCOL: everything else is 200).
STATUS_OF_CODE = {PARSE_ERROR: 400, INVALID_REQUEST: 400, INVALID_PARAMS: 400, METHOD_NOT_FOUND: 404,
                  HEADER_MISMATCH: 400, MISSING_CAPABILITY: 400, UNSUPPORTED_VERSION: 400}


class HttpError(Exception):
    """A request that is refused: status, text, and headers to go with it."""

    def __init__(self, status, text, headers=()):
        super().__init__(text)
        self.status, self.text, self.headers = status, text, tuple(headers)


def check_raw_head(head):
    """Refuse a head that two parsers could read in two ways. Raises HttpError(400).

    `http.server` is lenient: a bare CR starts a header for it, a line without a colon ends
    them silently. Whoever stands in front of us may see it differently.
    """
    lines = head.split(b"\r\n")
    if b"\0" in head or any(b"\r" in line or b"\n" in line for line in lines):
        raise HttpError(400, "the head has a bare CR or LF, or a NUL")
    # RFC 9112, 3: a token, a target, a version, with one space between.
    if not re.fullmatch(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [!-~]+ HTTP/1\.[01]", lines[0]):
        raise HttpError(400, "the request line is malformed")
    check_header_lines(lines[1:])


def check_header_lines(lines):
    """The same for the fields of a head, or the trailers of a body. Raises HttpError(400)."""
    for line in lines:
        if line[:1] in (b" ", b"\t"):
            raise HttpError(400, "a folded header line")
        name, colon, value = line.partition(b":")
        if not colon or not re.fullmatch(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise HttpError(400, "a header line without a name that is a token, or with a space before its colon")
        # White space is SP and HTAB (RFC 9110, 5.6.3); Python strips more than that.
        if value.translate(None, CONTROL_BYTES) != value:
            raise HttpError(400, "a header has a control character in its value")


CONTROL_BYTES = bytes(byte for byte in list(range(32)) + [127] if byte != 9)


class Headers:
    """The header fields of a request, found by their names in any case."""

    __slots__ = ("_values",)

    def __init__(self, pairs):
        self._values = {}
        for name, value in pairs:
            self._values.setdefault(name.lower(), []).append(value.strip(" \t"))

    def get_all(self, name):
        """Return all values of a field, or None."""
        return self._values.get(name.lower())

    def get(self, name, default=None):
        """Return the first value of a field."""
        values = self._values.get(name.lower())
        return values[0] if values else default

    def joined(self, name):
        """Return all values of a field that is a list as one (RFC 9110, 5.3), or None."""
        values = self._values.get(name.lower())
        return ", ".join(values) if values else None

    def __getitem__(self, name):
        return self._values[name.lower()][0]


_plain_request = _plain_field = None


def parse_plain_head(head):
    """Return what `parse_head` does for a head as clients usually write it, else None.

    `http.server` takes ten times as long; it has the last word on everything unusual.
    """
    global _plain_request, _plain_field
    if _plain_request is None:
        _plain_request = re.compile(rb"(GET|POST|DELETE) (/[!-~]*) HTTP/1\.1").fullmatch
        _plain_field = re.compile(rb"([0-9A-Za-z!#$%&'*+.^_`|~-]+):[ \t]*([ -~]*)").fullmatch
    first, *lines = head.split(b"\r\n")
    request = _plain_request(first)
    fields = [_plain_field(line) for line in lines]
    if request is None or None in fields or b"//" == request.group(2)[:2]:
        return None
    headers = Headers([(field.group(1).decode("ascii"), field.group(2).decode("ascii")) for field in fields])
    return request.group(1).decode("ascii"), request.group(2).decode("ascii"), "HTTP/1.1", headers


_head_parser = None


def parse_head(head):
    """Return (method, target, HTTP version, Headers) of a request's head. Raises HttpError."""
    command, path, version, headers = parse_plain_head(head) or parse_any_head(head)
    if version == "HTTP/1.1" and headers.get("Host") is None:
        raise HttpError(400, "the header Host is missing")
    for name in ("Host", "Content-Length", "Transfer-Encoding"):
        if len(headers.get_all(name) or ()) > 1:
            raise HttpError(400, "the header %s stands twice" % name)
    if headers.get("Content-Length") is not None and headers.get("Transfer-Encoding") is not None:
        raise HttpError(400, "both Content-Length and Transfer-Encoding")
    return command, path, version, headers


def parse_any_head(head):
    """Parse a head with `http.server`, after its bytes were checked. Raises HttpError."""
    global _head_parser
    check_raw_head(head)
    if _head_parser is None:
        import http.server
        import io

        class HeadParser(http.server.BaseHTTPRequestHandler):
            """Parses over memory; never sends anything."""

            def __init__(self, data):
                self.rfile, self.error = io.BytesIO(data), None
                self.raw_requestline = self.rfile.readline(65537)
                self.good = self.parse_request()

            def send_error(self, code, message=None, explain=None):
                self.error = (code, message or explain or "bad request")

            def handle_expect_100(self):
                return True              # answered once it is known that the body is wanted
        _head_parser = HeadParser
    parser = _head_parser(head + b"\r\n\r\n")
    if not parser.good or parser.error:
        status, text = parser.error or (400, "not an HTTP request")
        raise HttpError(status if status in HTTP_REASONS else 400, str(text))
    headers = parser.headers
    if headers.defects:
        raise HttpError(400, "the headers are malformed")
    return parser.command, parser.path, parser.request_version, Headers(headers.items())


# A chunk's size and extensions, and all trailers of a body: nobody has use for longer ones.
CHUNK_LINE_BYTES = 1024
TRAILER_BYTES = 64 << 10
# RFC 9110, 6.5.1: what frames or routes a message is no trailer.
NO_TRAILERS = (b"transfer-encoding", b"content-length", b"host")


class HttpConnection:
    """One connection: requests in order, one at a time; bounded in head, body and time."""

    ADDED = {"surplus": False}

    def __init__(self, front, stream, local, pid):
        self.front, self.stream, self.local, self.pid = front, stream, local, pid
        stream.on_data, stream.on_close = self._on_data, self._on_close
        self.buffer = bytearray()
        self.exchange = None             # the request that is being answered
        self.head = None                 # parsed head whose body is not complete yet
        self.body, self.left, self.chunked = [], 0, False
        self.body_size = 0
        self.since = time.monotonic()    # when the request that is being read began
        self.closing = self.advances = False
        # Came when there were as many as may be: it is told so at its first request.
        self.surplus = not local and front.remote() >= front.core.config.get("http.connections")
        front.connections.add(self)

    def _on_data(self, data):
        if not self.buffer and self.head is None and self.exchange is None:
            self.since = time.monotonic()
        self.buffer += data
        limit = self.front.core.config.get("limits.lineBytes")
        if self.exchange is not None and len(self.buffer) > 1 << 20:
            self.stream.pause(True)      # pipelined faster than it is answered
        if not self.advances:
            self._advance(limit)

    def _advance(self, limit):
        try:
            for _ in range(HTTP_STEPS_A_TURN):
                if self.exchange is not None or self.closing or not self._step(limit):
                    return
        except HttpError as error:
            self.refuse(error)
            return
        self._advance_later()

    def _advance_later(self):
        """The others' turn comes first."""
        if not self.advances:
            self.advances = True
            self.stream.pause(True)
            self.front.core.loop.call_later(0, self._advance_now)

    def _advance_now(self):
        self.advances = False
        if not self.stream.closed:
            self.stream.pause(False)
            self._advance(self.front.core.config.get("limits.lineBytes"))

    def _step(self, limit):
        """Take the next piece of a request out of the buffer; False where more bytes are needed."""
        if self.head is None:
            return self._take_head()
        if self.chunked:
            return self._take_chunk(limit)
        taken = bytes(self.buffer[:self.left])
        del self.buffer[:self.left]
        self.left -= len(taken)
        self.body.append(taken)
        if self.left:
            return False
        self._complete()
        return True

    def _take_head(self):
        while self.buffer[:2] == b"\r\n":
            del self.buffer[:2]          # RFC 9112, 2.2: an empty line before a request is ignored
        end = self.buffer.find(b"\r\n\r\n")
        limit = self.front.core.config.get("http.headBytes")
        if end < 0 and len(self.buffer) > limit or end > limit:
            raise HttpError(431, "the head has more than %d bytes (http.headBytes)" % limit)
        if end < 0:
            if b"\n\n" in self.buffer:
                raise HttpError(400, "the head has a bare LF")
            return False
        raw = bytes(self.buffer[:end])
        del self.buffer[:end + 4]
        self.head = parse_head(raw)
        self._prepare_body()
        return True

    def _prepare_body(self):
        _, _, _, headers = self.head
        self.body, self.body_size, self.left, self.chunked = [], 0, 0, False
        coding = headers.get("Transfer-Encoding")
        if coding is not None:
            if coding.lower() != "chunked":
                raise HttpError(501, "the only transfer coding served is chunked")
            self.chunked = True
        else:
            text = headers.get("Content-Length", "0")
            if not text.isascii() or not text.isdigit() or len(text) > 15:
                raise HttpError(400, "Content-Length is no number")
            self.left = int(text)
        self._check_body_size(self.left)
        self.front.admit(self)
        if (headers.joined("Expect") or "").strip().lower() == "100-continue":
            self.stream.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _check_body_size(self, size):
        limit = self.front.core.config.get("limits.lineBytes")
        if size > limit:
            raise HttpError(413, "the body has more than %d bytes (limits.lineBytes)" % limit)

    def _take_chunk(self, limit):
        end = self.buffer.find(b"\r\n")
        # However it comes: the same whether its end is here yet or not.
        if (end if end >= 0 else len(self.buffer) - 1) > CHUNK_LINE_BYTES:
            raise HttpError(400, "a chunk's size line is too long")
        if end < 0:
            return False
        line = bytes(self.buffer[:end])
        if b"\r" in line or b"\n" in line:
            raise HttpError(400, "a chunk's size line has a bare CR or LF")
        text = line.split(b";")[0].strip(b" \t")
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,12}", text):
            raise HttpError(400, "a chunk's size is no number")
        size = int(text, 16)
        self._check_body_size(self.body_size + size)
        if size == 0:
            if self.buffer[end:end + 4] == b"\r\n\r\n":
                del self.buffer[:end + 4]
            else:
                trailers = self.buffer.find(b"\r\n\r\n", end)
                if (trailers if trailers >= 0 else len(self.buffer) - 3) > TRAILER_BYTES:
                    raise HttpError(431, "the trailers are too long")
                if trailers < 0:
                    return False
                lines = bytes(self.buffer[end + 2:trailers]).split(b"\r\n")
                if any(b"\r" in line or b"\n" in line for line in lines):
                    raise HttpError(400, "the trailers have a bare CR or LF")
                check_header_lines(lines)
                if any(line.partition(b":")[0].lower() in NO_TRAILERS for line in lines):
                    raise HttpError(400, "a trailer that belongs into the head")
                del self.buffer[:trailers + 4]
            self._complete()
            return True
        if len(self.buffer) < end + 2 + size + 2:
            return False
        if self.buffer[end + 2 + size:end + 4 + size] != b"\r\n":
            raise HttpError(400, "a chunk has not the size it says")
        self.body.append(bytes(self.buffer[end + 2:end + 2 + size]))
        self.body_size += size
        del self.buffer[:end + 4 + size]
        return True

    def _complete(self):
        method, target, version, headers = self.head
        self.head = None
        body = b"".join(self.body)
        self.body = []
        options = [option.strip(" \t") for option in (headers.joined("Connection") or "").lower().split(",")]
        keep = "close" not in options and version != "HTTP/1.0"
        self.exchange = HttpExchange(self, method, target, headers, body, keep)
        try:
            self.front.handle(self.exchange)
        except HttpError as error:
            self.exchange.respond_error(error)

    def refuse(self, error):
        """Answer a request that could not even be read, and hang up: we are out of step."""
        exchange = HttpExchange(self, "", "", None, b"", False)
        self.exchange = exchange
        exchange.respond_error(error)

    def exchange_over(self, keep):
        """An exchange has been answered: the next request, or the end."""
        self.exchange = None
        self.since = time.monotonic()
        if not keep or self.front.core.stopping:
            self.closing = True
            self.stream.close_when_flushed("answered")
            return
        self.stream.pause(False)
        if self.buffer:
            self._advance_later()

    def _on_close(self, _reason):
        self.front.connections.discard(self)
        if self.exchange is not None:
            self.exchange.peer_closed()
        self.front.core.on_link_gone()


class HttpExchange:
    """One request and its answer. Also the link of a ModernRequest.

    The answer is a JSON body until something has to go before it; then it becomes a stream
    of events. A status of its own can only be given while nothing was written.
    """

    def __init__(self, connection, method, target, headers, body, keep):
        self.connection, self.method, self.headers, self.body, self.keep = connection, method, headers, body, keep
        self.target = target
        self.path, _, self.query = target.partition("?")
        self.front = connection.front
        self.started = time.monotonic()
        self.written_at = self.started
        self.streaming = False           # events have begun
        self.over = False
        self.on_gone = None              # told when the peer hangs up before the answer
        self.commit = self.begin_stream  # how a quiet exchange becomes a stream
        self.stream_id = None            # EventStream whose events go out here
        self.extra_headers = []
        self.json_only = False

    # -- answers ------------------------------------------------------------------------

    def respond(self, status, body=b"", content_type="application/json", headers=()):
        """Answer with a whole body."""
        if self.over:
            return
        lines = ["HTTP/1.1 %d %s" % (status, HTTP_REASONS.get(status, "Status"))]
        if body or status not in (202, 204):
            lines.append("Content-Type: " + content_type)
        if status != 204:
            lines.append("Content-Length: %d" % len(body))
        lines += ["%s: %s" % pair for pair in tuple(headers) + tuple(self.extra_headers)]
        if not self.keep:
            lines.append("Connection: close")
        self._write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace"), body)
        self._end()

    def respond_json(self, status, value, headers=()):
        """Answer with a JSON body."""
        self.respond(status, encode_json(value), headers=headers)

    def respond_error(self, error):
        """Answer with a refusal, in the one shape that all errors have."""
        value = {"jsonrpc": "2.0", "error": {"code": INVALID_REQUEST, "message": error.text}}
        self.respond_json(error.status, value, error.headers)

    def begin_stream(self):
        """Commit to a stream of events; headers and a first comment go out at once."""
        if self.streaming or self.over:
            return
        self.streaming = True
        lines = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream", "Cache-Control: no-cache",
                 "X-Accel-Buffering: no", "Transfer-Encoding: chunked"]
        if not self.keep:
            lines.append("Connection: close")
        lines += ["%s: %s" % pair for pair in self.extra_headers]
        self._write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace"))
        self._chunk(b":\n\n")

    def event(self, data, event_id=None):
        """Write one event with a JSON message."""
        self.begin_stream()
        prefix = b"event: message\n" if event_id is None else b"event: message\nid: %s\n" % event_id.encode()
        self._chunk(prefix + b"data: ", data, b"\n\n")

    def raw_event(self, text):
        """Write an event as it is."""
        self.begin_stream()
        self._chunk(text)

    def end_stream(self):
        """End a stream of events."""
        if self.streaming and not self.over:
            self._write(b"0\r\n\r\n")
            self._end()

    def _chunk(self, *parts):
        if not self.over:
            self._write(b"%x\r\n" % sum(map(len, parts)), *parts, b"\r\n")

    def _write(self, *parts):
        stream = self.connection.stream
        limit = self.front.core.config.get("limits.hostQueueBytes")
        if stream.queued_bytes > limit:
            stream.close("does not read")
            return
        self.written_at = time.monotonic()
        stream.write_message(*parts)

    def _end(self):
        self.over = True
        self._let_go()
        self.connection.exchange_over(self.keep)

    def _let_go(self):
        """Break the circles through this exchange: what it carried is large, and a collector comes late."""
        self.commit, self.body = None, b""

    def peer_closed(self):
        """The peer has hung up before the answer was complete."""
        self.over = True
        on_gone, self.on_gone = self.on_gone, None
        self._let_go()
        if on_gone is not None:
            on_gone()

    def sweep(self, now):
        """Keep a quiet exchange alive: its headers after a while, then comments."""
        if self.over:
            return
        if self.streaming:
            if now - self.written_at >= SSE_KEEP_ALIVE_S - HTTP_SWEEP_S:
                self._chunk(b":\n\n")
        elif now - self.started >= SSE_COMMIT_S and self.on_gone is not None and not self.json_only:
            self.commit()

    def commit_if_quiet(self):
        """Send the head of an answer that takes its time."""
        if not self.over and not self.streaming:
            self.commit()

    # -- as the link of a ModernRequest -----------------------------------------------------

    def answer(self, _seq, data):
        """The answer of the request."""
        if self.streaming:
            self.event(data)
            self.end_stream()
        else:
            self.respond(200, data)

    def refuse(self, _seq, data, code):
        """An answer with an HTTP status of its own, where that can still be given."""
        if self.streaming:
            self.answer(None, data)
        else:
            self.respond(STATUS_OF_CODE.get(code, 200), data)

    def message(self, data, _call=None):
        """A notification of this request, before its answer."""
        if not self.json_only:
            self.event(data)

    def settled(self, _seq):
        """Nothing will be answered: a notification was taken, or the request was cancelled."""
        if self.streaming:
            self.end_stream()
        else:
            self.respond(ACCEPTED_STATUS)

    def keep_state(self, _state):
        """Nothing is remembered between requests."""

    def named_by(self, _seq, meta):
        """Return what names the caller: `_meta`, and headers where it says nothing."""
        return with_named_headers(meta, self.headers, self.front.core.config.get("transport.sessionMetaKeys"))


def with_named_headers(meta, headers, session_keys):
    """Return `_meta` with what the Mcpx-* headers name, for hosts that can only set headers."""
    meta = dict(meta) if isinstance(meta, dict) else {}
    if headers.get("Mcpx-Session") and not any(isinstance(meta.get(key), str) and meta[key] for key in session_keys):
        meta.update((key, headers["Mcpx-Session"]) for key in session_keys[:1])
    for header, key in (("Mcpx-Parent-Session", META_PARENT), ("Mcpx-Cwd", META_CWD)):
        if headers.get(header) and not isinstance(meta.get(key), str):
            meta[key] = headers[header]
    return meta


class EventStream:
    """The messages of one POST or of the GET stream of a session, numbered, so that a dropped
    connection can be taken up again (2025-11-25, basic/transports)."""

    def __init__(self, session, number):
        self.session, self.number = session, number
        self.events = collections.deque(maxlen=MAX_KEPT_EVENTS)      # (n, data)
        self.count = self.bytes = 0
        self.exchange = None
        self.finished = None             # when the answer went out

    def send(self, data, last=False):
        """Write a message where somebody is connected, and keep it for a resumption."""
        self.count += 1
        if len(self.events) == self.events.maxlen:
            self.bytes -= len(self.events[0][1])
        self.events.append((self.count, data))
        self.bytes += len(data)
        if last:
            self.finished = time.monotonic()
        if self.exchange is not None and not self.exchange.over:
            self.exchange.event(data, "%d-%d" % (self.number, self.count))
            if last:
                self.exchange.end_stream()
                self.exchange = None

    def connect(self, exchange, after):
        """Connect an exchange: what came after event number `after` first."""
        self.exchange = exchange
        exchange.begin_stream()
        for number, data in list(self.events):
            if number > after:
                exchange.event(data, "%d-%d" % (self.number, number))
        if self.finished is not None:
            exchange.end_stream()
            self.exchange = None


class HttpSession:
    """A legacy Streamable HTTP session: the link of its LegacyHost.

    Messages that belong to a request go on that request's stream, all others on the GET
    stream. A dropped connection is no cancel: the work goes on.
    """

    def __init__(self, front, session_id, credential, names, headers=None):
        self.front, self.id, self.names = front, session_id, names
        self.headers = headers or {}     # of its initialize: they name who its lists are for
        self.credential = credential     # digest of the header that made it: it is nobody else's
        self.core = front.core
        identity = Identity("http session", CONNECTION_PREFIX + session_id)
        self.host = LegacyHost(self.core, self, names, identity, front.env, front.definitions)
        self.pid = None
        self.streams = {}                # number -> EventStream of a POST
        self.numbers = 0
        self.get = EventStream(self, 0)
        self.used_at = time.monotonic()
        self.by_exchange = {}            # exchange -> EventStream that it became
        self.pending = set()             # exchanges that have no answer yet
        self.state = None                # see keep_state

    def answer(self, seq, data):
        """The answer to a POST."""
        self.pending.discard(seq)
        if self.host.revision is None:
            # Its initialize has failed: over HTTP nobody can come back to this session.
            seq.extra_headers = []
            self.front.core.loop.soon(lambda: self.front.end_session(self, "initialize failed"))
        stream = self.by_exchange.pop(seq, None)
        if stream is not None:
            stream.send(data, last=True)
            self.trim()
        else:
            seq.respond(200, data)

    def refuse(self, seq, data, code):
        """An answer with an HTTP status of its own: only for what is no request."""
        if seq in self.by_exchange or code not in (PARSE_ERROR, INVALID_REQUEST):
            self.answer(seq, data)
        else:
            self.pending.discard(seq)
            seq.respond(400, data)

    def settled(self, seq):
        """A notification was taken, or a request was cancelled."""
        self.pending.discard(seq)
        stream = self.by_exchange.pop(seq, None)
        if stream is not None:
            stream.finished = time.monotonic()
            if stream.exchange is not None:
                stream.exchange.end_stream()
        else:
            seq.respond(ACCEPTED_STATUS)

    def message(self, data, call=None):
        """A notification or question: on the stream of the request that it belongs to."""
        seq = call.seq if call is not None else None
        seq = seq.seq if isinstance(seq, Batch) else seq
        if isinstance(seq, HttpExchange) and (seq in self.by_exchange or not seq.over):
            if seq.json_only:
                return
            self.stream_of(seq).send(data)
        else:
            self.get.send(data)
            self.trim()

    def stream_of(self, exchange):
        """Return the EventStream of a POST, which becomes one now if it was none."""
        stream = self.by_exchange.get(exchange)
        if stream is None:
            self.numbers += 1
            stream = self.by_exchange[exchange] = self.streams[self.numbers] = EventStream(self, self.numbers)
            stream.exchange = exchange
            exchange.begin_stream()
            if self.host.revision == LATEST_LEGACY and not exchange.over:
                # Older SDKs feed the empty data of a priming event to their JSON parser.
                exchange.raw_event(b"id: %d-0\nretry: 1000\ndata: \n\n" % stream.number)
        return stream

    def keep_state(self, state):
        """What the next daemon must know of this session, after an orderly restart."""
        self.state = state

    def named_by(self, seq, meta):
        """Return what names the caller of a request."""
        seq = seq.seq if isinstance(seq, Batch) else seq
        headers = seq.headers if isinstance(seq, HttpExchange) else self.headers
        return with_named_headers(meta, headers, self.core.config.get("transport.sessionMetaKeys"))

    def control(self, _text):
        """There is no shim."""

    def close(self, reason):
        """End the session."""
        self.front.end_session(self, reason)

    def sweep(self, now):
        """Forget streams that nobody resumed in time."""
        for number, stream in list(self.streams.items()):
            if stream.finished is not None and now - stream.finished > RESUME_S:
                del self.streams[number]
        self.trim()

    def trim(self):
        """Keep what can be resumed within bounds: the oldest answers go first."""
        kept = self.get.bytes + sum(stream.bytes for stream in self.streams.values())
        for number in sorted(self.streams):
            if kept <= MAX_KEPT_BYTES:
                return
            if self.streams[number].finished is not None:
                kept -= self.streams.pop(number).bytes
        while kept > MAX_KEPT_BYTES and self.get.events:
            size = len(self.get.events.popleft()[1])
            kept -= size
            self.get.bytes -= size


class HttpFront:
    """All HTTP connections: what is acceptable, and which host object a request is for."""

    def __init__(self, core):
        self.core = core
        self.connections = set()
        self.sessions = {}               # Mcp-Session-Id -> HttpSession
        self.definitions = {}            # shared by all hosts over HTTP: they have one environment
        self.env = base_environment(core.env)
        self._timer = None

    def adopt(self, stream, first, local, pid=None):
        """Take over a stream that speaks HTTP; `local` says that it is the unix socket, `pid` who is at its end."""
        connection = HttpConnection(self, stream, local, pid)
        if self._timer is None:
            self._timer = self.core.loop.call_later(HTTP_SWEEP_S, self._sweep)
        connection._on_data(first)
        return connection

    def remote(self):
        """Return how many connections there are through the TCP door."""
        return sum(not connection.local for connection in self.connections)

    def _sweep(self):
        now, config = time.monotonic(), self.core.config
        for connection in list(self.connections):
            if connection.exchange is not None:
                connection.exchange.sweep(now)
            elif now - connection.since > config.get("http.idleTimeout" if not (
                    connection.buffer or connection.head or connection.surplus) else "http.readTimeout"):
                if connection.buffer or connection.head:
                    connection.refuse(HttpError(408, "the request did not arrive in time (http.readTimeout)"))
                else:
                    connection.stream.close("idle")
        for session in list(self.sessions.values()):
            session.sweep(now)
            busy = session.host.calls or (session.get.exchange is not None and not session.get.exchange.over)
            if busy:
                session.used_at = now
            elif now - session.used_at > config.get("http.sessionTimeout"):
                self.end_session(session, "not used for a while")
        alive = self.connections or self.sessions
        self._timer = self.core.loop.call_later(HTTP_SWEEP_S, self._sweep) if alive else None

    # -- who may ----------------------------------------------------------------------------

    def admit(self, connection):
        """Check who asks, before the body is read. Raises HttpError."""
        method, _, _, headers = connection.head
        if connection.surplus:
            raise HttpError(503, "too many connections (http.connections)")
        if connection.local:
            return                       # the socket's mode and the peer's uid have been checked
        self._check_names(headers)
        if self.core.config.get("http.auth") != "none":
            self._check_token(headers)

    def _check_names(self, headers):
        """Against pages in a browser that reach us under a name of theirs (DNS rebinding)."""
        allowed = {"localhost", "127.0.0.1", "[::1]"} | {
            name.lower() for name in self.core.config.get("http.allowedHosts")}
        host = headers.get("Host")
        if host is not None and _host_name(host) not in allowed:
            raise HttpError(403, "the Host header names another host (http.allowedHosts)")
        origin = headers.get("Origin")
        if origin is not None:
            scheme, separator, rest = origin.partition("://")
            if not separator or scheme not in ("http", "https") or _host_name(rest) not in allowed:
                raise HttpError(403, "requests from this origin are not served (http.allowedHosts)")

    def _check_token(self, headers):
        scheme, _, token = (headers.get("Authorization") or "").partition(" ")
        good = hmac.compare_digest(token.strip().encode("utf-8", "replace"), self.core.token().encode())
        if scheme.lower() != "bearer" or not good:
            raise HttpError(401, "a bearer token is needed; `mcpx url` shows it",
                            [("WWW-Authenticate", 'Bearer realm="mcpx"')])

    # -- what for -----------------------------------------------------------------------------

    def handle(self, exchange):
        """Serve one request. Raises HttpError."""
        self.core.check_config()
        path = exchange.path
        if path == "/mcp" or path.startswith("/mcp/"):
            self._handle_mcp(exchange, path[5:])
        elif path.startswith("/v1/"):
            self.core.api.handle(exchange)
        else:
            raise HttpError(404, "there is nothing here; servers are at /mcp/<name>")

    def _names(self, text):
        servers = self.core.config.servers
        if text in servers and not servers[text].disabled and "%" not in text:
            return [text]
        from urllib.parse import unquote
        names = [unquote(name) for name in text.split(",") if name]
        if not names:
            raise HttpError(404, "name a server: /mcp/<%s>" % "|".join(sorted(servers)))
        for name in names:
            if name not in servers or servers[name].disabled:
                raise HttpError(404, unknown_servers_text([name], self.core.config))
        return list(dict.fromkeys(names))

    def _handle_mcp(self, exchange, text):
        names, headers = self._names(text), exchange.headers
        session_id = headers.get("Mcp-Session-Id")
        version = headers.get("MCP-Protocol-Version")
        modern = version is not None and version.strip() not in LEGACY_REVISIONS
        if exchange.method in ("GET", "DELETE") and not modern:
            self._handle_session(exchange, session_id, names)
        elif exchange.method != "POST":
            raise HttpError(405, "POST only", [("Allow", "POST")])
        else:
            self._handle_post(exchange, names, session_id, modern)

    def _handle_post(self, exchange, names, session_id, modern):
        kind = (exchange.headers.get("Content-Type") or "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, "Content-Type must be application/json")
        accepts_json, accepts_events = accepted(exchange.headers.joined("Accept"))
        if not accepts_json and not accepts_events:
            raise HttpError(406, "Accept must allow application/json or text/event-stream")
        exchange.json_only = not accepts_events
        try:
            message = parse_json(exchange.body)
        except RpcError as error:
            exchange.respond_json(400, self._error(error, None))
            return
        if modern or is_modern(message):
            self._handle_modern(exchange, names, message)
        else:
            self._handle_legacy(exchange, names, message, session_id)

    def _error(self, error, host_id):
        value = error_message(host_id, error)
        if host_id is None:
            del value["id"]              # D-1
        return value

    def _handle_modern(self, exchange, names, message):
        if not isinstance(message, dict) or "method" not in message:
            exchange.respond_json(400, self._error(RpcError(
                INVALID_REQUEST, "Invalid Request: one request or notification object"), None))
            return
        try:
            kind = message_kind(message)
        except RpcError as error:
            host_id = message.get("id")
            exchange.respond_json(400, self._error(error, host_id if is_valid_id(host_id) else None))
            return
        if kind == "notification":
            # No client notification exists here; ids of different hosts would collide.
            exchange.respond(ACCEPTED_STATUS)
            return
        request = ModernRequest(self.core, exchange, names, Identity("none"), self.env, self.definitions)
        exchange.on_gone = request.close
        if exchange.json_only is False and not accepted(exchange.headers.joined("Accept"))[0]:
            exchange.begin_stream()
        request.take(exchange, message, None, 0, exchange.headers)

    def _handle_legacy(self, exchange, names, message, session_id):
        is_initialize = isinstance(message, dict) and message.get("method") == "initialize" and "id" in message
        version = exchange.headers.get("MCP-Protocol-Version")
        if version is not None and version.strip() not in LEGACY_REVISIONS:
            raise HttpError(400, "MCP-Protocol-Version %s is not served" % printable(version))
        if is_initialize:
            session = self._new_session(exchange, names)
        elif session_id is None:
            self._without_session(exchange, names, message)
            return
        else:
            session = self._session(session_id, exchange, names)
        session.used_at = time.monotonic()
        exchange.on_gone = lambda: None  # a dropped connection is no cancel
        if is_initialize:
            # Nobody has been told of this session, and so nobody would ever end it.
            exchange.on_gone = lambda: exchange.streaming or self.end_session(session, "its client left before it began")
        exchange.commit = lambda: session.stream_of(exchange)
        session.pending.add(exchange)
        if not accepted(exchange.headers.joined("Accept"))[0]:
            exchange.commit()
        session.host.on_line(exchange, exchange.body)
        if not exchange.over and not exchange.json_only:
            # Clients and proxies give up what shows no head for long.
            self.core.loop.call_later(LEGACY_COMMIT_S, exchange.commit_if_quiet)

    def _without_session(self, exchange, names, message):
        if isinstance(message, dict) and message.get("method") == "server/discover":
            # A probe of a newer client without its envelope.
            exchange.respond_json(200, self._error(RpcError(METHOD_NOT_FOUND, "Method not found: server/discover"),
                                                   message.get("id")))
            return
        raise HttpError(400, "Mcp-Session-Id is missing: send initialize first")

    def _new_session(self, exchange, names):
        if len(self.sessions) >= self.core.config.get("limits.hosts"):
            raise HttpError(503, "too many sessions (limits.hosts)")
        session = HttpSession(self, secrets.token_urlsafe(24), self._credential(exchange), names, exchange.headers)
        self._add(session)
        exchange.extra_headers.append(("Mcp-Session-Id", session.id))
        return session

    def _credential(self, exchange):
        """Return a digest of what a session is bound to; the credential itself is never kept."""
        header = exchange.headers.get("Authorization") or ""
        return hmac.digest(self.core.secret, header.encode("utf-8", "replace"), "sha256").hex()

    def _add(self, session):
        self.sessions[session.id] = session
        self.core.hosts.add(session.host)
        if self._timer is None:
            self._timer = self.core.loop.call_later(HTTP_SWEEP_S, self._sweep)

    def save_sessions(self, path):
        """Write the sessions down at an orderly end: their hosts go on with the next daemon."""
        kept = [{"id": s.id, "credential": s.credential, "names": s.names, "state": s.state,
                 "numbers": s.numbers, "events": s.get.count} for s in self.sessions.values() if s.state is not None]
        if kept:
            try:
                write_private_file(path, json.dumps({"saved": time.time(), "sessions": kept}).encode("utf-8"))
            except OSError as error:
                self.core.log.warning("the http sessions cannot be kept: %s", error)

    def load_sessions(self, path):
        """Take over the sessions of a daemon that ended in good order; each file counts once."""
        try:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
            os.unlink(path)
            if time.time() - data["saved"] > self.core.config.get("http.sessionTimeout"):
                return
            for kept in data["sessions"]:
                session = HttpSession(self, kept["id"], kept["credential"], list(kept["names"]))
                # Event ids go on, so that a Last-Event-ID of before means what it meant.
                session.numbers, session.get.count = int(kept["numbers"]), int(kept["events"])
                self._add(session)
                session.host.take_state(kept["state"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.core.log.warning("the http sessions of before cannot be read: %s", error)

    def _session(self, session_id, exchange, names):
        session = self.sessions.get(session_id)
        if session is None or session.names != names or not hmac.compare_digest(
                session.credential, self._credential(exchange)):
            raise HttpError(404, "there is no such session (any more): initialize again")
        return session

    def _handle_session(self, exchange, session_id, names):
        """GET opens the session's stream or resumes one; DELETE ends the session."""
        if session_id is None:
            raise HttpError(405 if exchange.method == "GET" else 400, "Mcp-Session-Id is missing",
                            [("Allow", "POST")])
        session = self._session(session_id, exchange, names)
        session.used_at = time.monotonic()
        if exchange.method == "DELETE":
            self.end_session(session, "ended by its host")
            exchange.respond(204)
            return
        if not accepted(exchange.headers.joined("Accept"))[1]:
            raise HttpError(406, "Accept must allow text/event-stream")
        exchange.on_gone = lambda: None
        stream, after = session.get, session.get.count
        last = exchange.headers.get("Last-Event-ID")
        match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", last) if last else None
        if match and int(match.group(1)):
            stream, after = session.streams.get(int(match.group(1))), int(match.group(2))
            if stream is None:
                raise HttpError(404, "that stream cannot be resumed any more")
        elif match:
            after = int(match.group(2))
        elif stream.exchange is None:
            after = 0                    # what came before anybody listened
        if stream.exchange is not None and not stream.exchange.over:
            if not last:
                raise HttpError(409, "this session has a GET stream already")
            stream.exchange.end_stream()
        stream.connect(exchange, after)

    def end_session(self, session, reason):
        """A session has ended: its host goes, and later use of its id is 404."""
        if self.sessions.pop(session.id, None) is None:
            return
        self.core.log.info("http session of host %s ends: %s", session.host.id, reason)
        for exchange in list(session.pending):
            if exchange.streaming:
                exchange.end_stream()
            else:
                exchange.respond_error(HttpError(404, "the session has ended: %s" % reason))
        session.pending.clear()
        if session.get.exchange is not None:
            session.get.exchange.end_stream()
        session.host.close()
        session.streams.clear()
        session.by_exchange.clear()
        session.get = EventStream(session, 0)

    def close(self):
        """The daemon ends: so do all streams."""
        for request in list(self.core.requests):
            # Those over stdio are kept by their shims and go on with the next daemon.
            if request.acknowledged is not None and isinstance(request.link, HttpExchange):
                request.end_listen()
        for session in list(self.sessions.values()):
            self.end_session(session, "mcpx ends")
        for connection in list(self.connections):
            connection.stream.close("mcpx ends")


def _host_name(text):
    """Return the name in a Host header or an origin, without its port, in lower case."""
    text = text.strip().lower()
    if text.startswith("["):
        return text[:text.find("]") + 1]
    return text.partition(":")[0]


def accepted(header):
    """Return whether an Accept header allows (JSON, an event stream); both where there is none."""
    if header is None or not header.strip() or header == "application/json, text/event-stream":
        return True, True                # the last is what MCP 2025-11-25, basic/transports, has clients send
    kinds = set()
    for part in header.lower().split(","):
        kind, *parameters = [piece.strip() for piece in part.split(";")]
        if not any(re.fullmatch(r"q=0(\.0*)?", parameter) for parameter in parameters):
            kinds.add(kind)
    every = "*/*" in kinds
    return (every or bool(kinds & {"application/json", "application/*"}),
            every or bool(kinds & {"text/event-stream", "text/*"}))


# ---------------------------------------------------------------------------
# Snapshot: what must the next code know; how is it written down
#
# Turns the daemon's objects into bytes and back, for code that takes over in the same
# process: by class and attribute, with cycles, bound methods and closures. Code itself is
# not written down: a function is found again by its name, a lambda by what it does. So an
# attribute that is added to a class needs a default in the class's body, and a nested
# function that waits for something keeps its name, or the code before cannot be followed.
# Pure: descriptors are listed, never touched.
# ---------------------------------------------------------------------------

# What cannot be told from classes and names alone: raised when old snapshots mislead.
SNAPSHOT_VERSION = 1


class SnapshotError(Exception):
    """The state cannot be written down, or this code cannot take it over; says what is in the way."""


def code_by_place():
    """Return {place: code} of all functions of this file; a place is a tuple of names.

    Functions inside functions count on within one name; lambdas are told by what they do, so
    that one that was changed is not taken for the one that was meant.
    """
    places = {}

    def add(place, code):
        places[place] = code
        counts = collections.Counter()
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                if inner.co_name == "<lambda>":
                    add(place + ("lambda " + code_digest(inner),), inner)
                else:
                    counts[inner.co_name] += 1
                    add(place + ("%s %d" % (inner.co_name, counts[inner.co_name]),), inner)

    def look(prefix, value):
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, types.FunctionType) and value.__module__ == __name__ and (
                "<locals>" not in value.__qualname__):
            add((prefix + value.__name__,), value.__code__)
    for name, value in list(globals().items()):
        if isinstance(value, type) and value.__module__ == __name__:
            for inner in vars(value).values():
                look(name + ".", inner)
        else:
            look("", value)
    return places


def code_digest(code):
    """Return text that is equal for code that does the same, wherever it stands in the file."""
    constants = [code_digest(value) if isinstance(value, types.CodeType) else
                 sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value) for value in code.co_consts]
    facts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants)
    return hashlib.sha256(repr(facts).encode("utf-8", "backslashreplace")).hexdigest()[:16]


_places = None


def known_places():
    """Return `code_by_place()`, made once: the code of this process does not change."""
    global _places
    if _places is None:
        _places = code_by_place()
    return _places


_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_SEQUENCES = {}


def _sequence_kinds():
    if not _SEQUENCES:
        _SEQUENCES.update({list: "list", tuple: "tuple", set: "set", frozenset: "frozenset",
                           collections.deque: "deque"})
        _SEQUENCES.update({dict: "dict", collections.OrderedDict: "ordered", collections.Counter: "counter"})
    return _SEQUENCES


class SnapshotWriter:
    """Writes objects down as numbered nodes, breadth first, so that no depth is too deep.

    A plain value stands for itself, (number,) for a node. `descriptors` are those that the
    objects own: they must stay open for whoever reads this.
    """

    def __init__(self):
        self.nodes, self.descriptors = [], []
        self._numbers = {}               # id of an object -> its number
        self._kept = []                  # the objects, so that no id is used twice
        self._todo = collections.deque()
        self._places = {code: place for place, code in known_places().items()}

    def dump(self, root):
        """Return everything that `root` leads to, as bytes. Raises SnapshotError."""
        first = self._value(root)
        while self._todo:
            number, value = self._todo.popleft()
            self.nodes[number] = self._node(value)
        return marshal.dumps((SNAPSHOT_VERSION, self.nodes, first, self.descriptors))

    def _value(self, value):
        if type(value) in _PLAIN:
            return value
        if type(value) is memoryview:
            return bytes(value)
        if isinstance(value, int):
            return int(value)            # constants of `socket` and `signal` have classes of their own
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.nodes)
            self.nodes.append(None)
            self._kept.append(value)
            self._todo.append((number, value))
        return (number,)

    def _node(self, value):
        kind = type(value)
        name = _sequence_kinds().get(kind)
        if name in ("dict", "ordered", "counter"):
            return (name, [self._value(part) for pair in value.items() for part in pair])
        if name == "deque":
            return (name, [self._value(part) for part in value], value.maxlen)
        if name is not None:
            return (name, [self._value(part) for part in value])
        if kind is bytearray:
            return ("bytearray", bytes(value))
        if kind is types.MethodType:
            return ("method", self._value(value.__self__), value.__func__.__name__)
        if kind is types.FunctionType:
            return self._function(value)
        if kind is types.CellType:
            try:
                return ("cell", [self._value(value.cell_contents)])
            except ValueError:
                return ("cell", [])
        if isinstance(value, type) and value.__module__ == __name__:
            return ("class", value.__qualname__)
        if kind is socket.socket:
            self.descriptors.append(value.fileno())
            return ("socket", value.fileno())
        if kind.__module__ == __name__:
            return self._object(value)
        raise SnapshotError("a %s cannot be taken along: %s" % (kind.__name__, repr(value)[:200]))

    def _function(self, function):
        # Not by its __qualname__: before 3.11 one that a snapshot has made has lost it.
        place = self._places.get(function.__code__)
        if place is None:
            raise SnapshotError("the function %s is not of this file" % function.__qualname__)
        if len(place) == 1:
            return ("function", place, [], None, None)
        cells = [part for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())
                 for part in (name, self._value(cell))]
        return ("function", place, cells, self._value(function.__defaults__), self._value(function.__kwdefaults__))

    def _object(self, value):
        attributes = value.taken_along() if hasattr(value, "taken_along") else attributes_of(value)
        for name in getattr(value, "DESCRIPTORS", ()):
            if attributes.get(name) is not None and attributes[name] not in self.descriptors:
                self.descriptors.append(attributes[name])
        pairs = [part for name, inner in attributes.items() for part in (name, self._value(inner))]
        arguments = self._value(value.args) if isinstance(value, BaseException) else None
        return ("object", type(value).__qualname__, pairs, arguments)


def attributes_of(value):
    """Return an object's attributes by name, those in slots as well."""
    found = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return found


class SnapshotReader:
    """Makes the objects of a snapshot again. With `dry` no descriptor is touched.

    After `load`, `resume` lets those with a `resumed` method open what cannot be written
    down. Raises SnapshotError where this code has not what the other one meant.

    The code that has written it may be older. A class says in ADDED which attributes that one did
    not know, with a plain value each, and in FORMER what some were called, by their former names.
    """

    def __init__(self, data, dry=False):
        try:
            self.version, self.nodes, self.root, self.descriptors = marshal.loads(data)
        except (ValueError, TypeError, EOFError) as error:
            raise SnapshotError("the snapshot cannot be read: %s" % error)
        if self.version != SNAPSHOT_VERSION:
            raise SnapshotError("the snapshot has version %s, this code reads %d" % (self.version, SNAPSHOT_VERSION))
        self.dry = dry
        self.made = [None] * len(self.nodes)
        self._is_made = [False] * len(self.nodes)
        self._places = known_places()

    def load(self):
        """Return the root object, with everything that it leads to."""
        for number in range(len(self.nodes)):
            self._get(number)
        for number, node in enumerate(self.nodes):
            self._fill(self.made[number], node)
        return self._value(self.root)

    def resume(self):
        """Let the loop, and then all others, open what they need."""
        able = [value for value in self.made if hasattr(type(value), "resumed")]
        for value in sorted(able, key=lambda value: not isinstance(value, Loop)):
            value.resumed()

    def _value(self, value):
        return self._get(value[0]) if type(value) is tuple else value

    def _values(self, values):
        return [self._value(value) for value in values]

    def _get(self, number):
        if not self._is_made[number]:
            self.made[number] = self._make(self.nodes[number])
            self._is_made[number] = True
        return self.made[number]

    def _make(self, node):
        """Make what can be made before everything it holds is: the rest is filled in later."""
        kind = node[0]
        if kind in ("list", "set", "dict", "ordered", "counter"):
            return {"list": list, "set": set, "dict": dict, "ordered": collections.OrderedDict,
                    "counter": collections.Counter}[kind]()
        if kind in ("tuple", "frozenset"):
            return (tuple if kind == "tuple" else frozenset)(self._values(node[1]))
        if kind == "deque":
            return collections.deque(maxlen=node[2])
        if kind == "bytearray":
            return bytearray(node[1])
        if kind == "cell":
            return types.CellType()
        if kind == "class":
            return self._named(node[1])
        if kind == "socket":
            return None if self.dry else socket.socket(fileno=node[1])
        if kind == "object":
            made = self._named(node[1])
            return made.__new__(made)
        if kind == "method":
            owner = self._value(node[1])
            function = getattr(type(owner), node[2], None)
            if function is None:
                raise SnapshotError("%s has no method %s any more" % (type(owner).__name__, node[2]))
            return types.MethodType(function, owner)
        return self._function(node)

    def _named(self, name):
        value = globals().get(name)
        if not isinstance(value, type):
            raise SnapshotError("there is no class %s any more" % name)
        return value

    def _function(self, node):
        _, place, cells, _, _ = node
        if len(place) == 1 and not cells:
            owner, _, name = place[0].rpartition(".")
            function = getattr(globals().get(owner), name, None) if owner else globals().get(name)
            if not isinstance(function, types.FunctionType):
                raise SnapshotError("there is no function %s any more" % place[0])
            return function
        code = self._places.get(tuple(place))
        if code is None:
            raise SnapshotError("there is no function %s any more" % " in ".join(reversed(place)))
        known = dict(zip(cells[::2], cells[1::2]))
        missing = [name for name in code.co_freevars if name not in known]
        if missing:
            raise SnapshotError("the function %s needs %s now" % (" in ".join(reversed(place)), ", ".join(missing)))
        closure = tuple(self._value(known[name]) for name in code.co_freevars)
        return types.FunctionType(code, globals(), code.co_name, None, closure)

    def _fill(self, made, node):
        kind = node[0]
        if kind == "list":
            made.extend(self._values(node[1]))
        elif kind == "deque":
            made.extend(self._values(node[1]))
        elif kind == "set":
            made.update(self._values(node[1]))
        elif kind in ("dict", "ordered", "counter"):
            values = self._values(node[1])
            dict.update(made, zip(values[::2], values[1::2])) if kind != "ordered" else made.update(
                zip(values[::2], values[1::2]))
        elif kind == "cell" and node[1]:
            made.cell_contents = self._value(node[1][0])
        elif kind == "function" and (node[3] is not None or node[4] is not None):
            made.__defaults__, made.__kwdefaults__ = self._value(node[3]), self._value(node[4])
        elif kind == "object":
            former = getattr(type(made), "FORMER", {})
            for name, value in zip(node[2][::2], self._values(node[2][1::2])):
                try:
                    object.__setattr__(made, former.get(name, name), value)
                except AttributeError:
                    continue             # a slot that this code has not any more
            for name, value in getattr(type(made), "ADDED", {}).items():
                if not hasattr(made, name):
                    object.__setattr__(made, name, value)
            if node[3] is not None:
                made.args = self._value(node[3])


# ---------------------------------------------------------------------------
# Daemon: how the parts start, reload and stop
#
# Puts the sections above together: directories, lock, socket, links to shims, the watched
# configuration, what commands ask. Touches no selector; descriptors only to open doors.
# ---------------------------------------------------------------------------

class DaemonPaths:
    """Where the daemon of one configuration keeps its things."""

    def __init__(self, config_file, env):
        name = short_hash(config_file)[:12]
        self.config = config_file
        self.state = state_directory(env)
        self.lock = os.path.join(self.state, "daemon-%s.lock" % name)
        self.starter = os.path.join(self.state, "starter-%s.lock" % name)
        self.record = os.path.join(self.state, "daemon-%s.json" % name)
        self.sessions = os.path.join(self.state, "sessions-%s.json" % name)
        self.log = os.path.join(self.state, "logs", "daemon-%s.log" % name)
        self.code = os.path.join(self.state, "code-%s" % name)
        self.socket = socket_path(config_file, env)

    def recorded_socket(self):
        """Return the socket that the daemon's record names, or None."""
        try:
            with open(self.record, encoding="utf-8") as file:
                record = json.load(file)
            return record["socket"] if isinstance(record["socket"], str) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def make_private_directory(path):
    """Create a directory of mode 0700, or check that it is one of ours. Raises UsageError."""
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass                         # checked below, whoever made it
        info = os.lstat(path)
    except OSError as error:
        raise UsageError("%s cannot be created: %s" % (path, error.strerror))
    if not stat.S_ISDIR(info.st_mode):
        raise UsageError("%s is not a directory; remove what is there" % path)
    if info.st_uid != os.getuid():
        raise UsageError("%s belongs to user %d; remove it, or set XDG_RUNTIME_DIR to a directory of yours"
                         % (path, info.st_uid))
    if info.st_mode & 0o077:
        os.chmod(path, 0o700)
    return path


class ApiLink:
    """The link of a request that came through the control API: its answer is the API's."""

    def __init__(self, exchange, body):
        self.exchange, self.body = exchange, body

    def answer(self, _seq, data):
        """The JSON-RPC answer becomes the API's."""
        message = parse_json(bytes(data))
        if "error" in message:
            self.exchange.respond_json(400 if message["error"].get("code") == INVALID_PARAMS else 502,
                                       {"error": message["error"]})
        else:
            self.exchange.respond_json(200, {"result": message["result"]})

    def refuse(self, seq, data, _code):
        """The same for errors that have a status of their own elsewhere."""
        self.answer(seq, data)

    def message(self, _data, _call=None):
        """Nobody listens for notifications here."""

    def settled(self, _seq):
        """The request was cancelled."""
        self.exchange.respond_json(503, {"error": {"code": INTERNAL_ERROR, "message": "cancelled"}})

    def keep_state(self, _state):
        """Nothing is remembered."""

    def named_by(self, _seq, meta):
        """Return what names the caller: members of the body, else headers."""
        meta, keys = dict(meta), self.exchange.front.core.config.get("transport.sessionMetaKeys")
        members = [("session", key) for key in keys[:1]] + [("parentSession", META_PARENT), ("cwd", META_CWD)]
        for member, key in members:
            if isinstance(self.body.get(member), str):
                meta[key] = self.body[member]
        return with_named_headers(meta, self.exchange.headers, keys)


API_STATUS = {METHOD_NOT_FOUND: 404, INVALID_PARAMS: 400, INVALID_REQUEST: 400}
# Past this many events the oldest are forgotten; a client that comes back later has missed some.
MAX_EVENTS = 1000


class Api:
    """The control API under /v1: JSON in and out, one shape of errors, described by itself."""

    def __init__(self, core):
        self.core = core
        self.events = collections.deque(maxlen=MAX_EVENTS)           # (number, type, data)
        self.watchers = set()            # exchanges that show events
        self.count = 0

    def handle(self, exchange):
        """Serve one request."""
        path = exchange.path[3:]
        route = API_ROUTES.get((exchange.method, path))
        if route is None and exchange.method == "POST" and path.startswith("/asks/"):
            route, exchange.question = API_ROUTES[("POST", "/asks/{id}")], path[len("/asks/"):]
        if route is None:
            known = [method for method, known_path in API_ROUTES if known_path == path]
            self.fail(exchange, 405 if known else 404,
                      "there is no %s /v1%s; GET /v1/openapi.json describes what there is"
                      % (exchange.method, printable(path)))
            return
        try:
            body = parse_json(exchange.body) if exchange.body else {}
            if not isinstance(body, dict):
                raise RpcError(INVALID_REQUEST, "the body is no object")
            from urllib.parse import parse_qsl
            body = dict(parse_qsl(exchange.query), **body)
            result = route[0](self, exchange, body)
        except RpcError as error:
            self.fail(exchange, API_STATUS.get(error.code, 500), error.message, error.code, error.data)
            return
        if result is not None:
            exchange.respond_json(200, result)

    def fail(self, exchange, status, text, code=INVALID_REQUEST, data=None):
        """Answer with an error in the one shape that they all have."""
        exchange.respond_json(status, {"error": RpcError(code, text, data).as_object()})

    def emit(self, kind, data):
        """Something happened: keep it for a while, and show it to who watches."""
        self.count += 1
        self.events.append((self.count, kind, data))
        for exchange in list(self.watchers):
            if exchange.over:
                self.watchers.discard(exchange)
            else:
                self._show(exchange, self.count, kind, data)

    def _show(self, exchange, number, kind, data):
        exchange.raw_event(b"event: %s\nid: %d\ndata: %s\n\n" % (kind.encode(), number, encode_json(data)))

    # -- routes ----------------------------------------------------------------------------

    @staticmethod
    def control_route(operation):
        """Return a route that does what the command of the same name does."""
        def route(self, exchange, body):
            def respond(message):
                if "error" in message:
                    self.fail(exchange, API_STATUS.get(message["error"]["code"], 500), message["error"]["message"],
                              message["error"]["code"])
                else:
                    exchange.respond_json(200, message["result"])
            caller = body.pop("caller", None)
            hello = dict(caller if isinstance(caller, dict) else {}, args=body)
            if exchange.connection.local:
                hello["pid"] = exchange.connection.pid
            Control(self.core, respond).run(operation, hello)
        return route

    def health(self, _exchange, _body):
        """Is the daemon up, and does it use its configuration as it is?"""
        core = self.core
        return {"status": "stopping" if core.stopping else "ok", "version": __version__, "pid": os.getpid(),
                "configError": core._config_error}

    def protocol(self, _exchange, _body):
        """Revisions served, what was negotiated with each upstream, the settings in force."""
        pool = self.core.pool
        upstreams = [{"server": i.definition.server.name, "instance": i.id, "era": i.upstream.era,
                      "revision": i.upstream.revision, "capabilities": i.upstream.capabilities,
                      "declared": i.capabilities} for i in pool.instances.values() if i.upstream is not None]
        return {"revisions": {"legacy": list(LEGACY_REVISIONS), "modern": list(MODERN_REVISIONS)},
                "transports": ["stdio", "streamable-http"], "upstreams": upstreams,
                "settings": {row["name"]: row["value"] for row in settings_in_force(self.core.config)},
                "sessionMetaKeys": self.core.config.get("transport.sessionMetaKeys")}

    def tools(self, exchange, body):
        """The tools of one server, from the cache."""
        self._request(exchange, body, "tools/list", {})

    def call(self, exchange, body):
        """Call a tool: server, tool, arguments; session, parentSession, cwd name the caller."""
        self._request(exchange, body, "tools/call", {"name": body.get("tool"),
                                                     "arguments": body.get("arguments") or {}})

    def resource(self, exchange, body):
        """Read a resource: server, uri."""
        self._request(exchange, body, "resources/read", {"uri": body.get("uri")})

    def prompt(self, exchange, body):
        """Get a prompt: server, prompt, arguments."""
        self._request(exchange, body, "prompts/get", {"name": body.get("prompt"),
                                                      "arguments": body.get("arguments") or {}})

    def complete(self, exchange, body):
        """Complete an argument: server, ref, argument, context."""
        params = {name: body[name] for name in ("ref", "argument", "context") if name in body}
        self._request(exchange, body, "completion/complete", params)

    def _request(self, exchange, body, method, params):
        server = self.core.server(body.get("server"))
        request = ModernRequest(self.core, ApiLink(exchange, body), [server.name], Identity("none"),
                                self.core.http.env, self.core.http.definitions)
        exchange.on_gone, exchange.json_only = request.close, True
        meta = {META_VERSION: MODERN, META_CAPABILITIES: {}}
        request.take(exchange, {"jsonrpc": "2.0", "id": 1, "method": method, "params": dict(params, _meta=meta)})

    def asks(self, _exchange, _body):
        """Questions that are open: whose they are, until when, what they ask."""
        return {"questions": [describe_question(q) for q in self.core.questions.by_id.values()]}

    def answer(self, exchange, body):
        """Answer an open question: a result object, or an action with content."""
        number = exchange.question
        question = self.core.questions.by_id.get(read_number(number))
        if question is None:
            raise RpcError(INVALID_PARAMS, "there is no open question %s; `mcpx asks` lists them" % printable(number))
        return answer_question(self.core, question, body)

    def events_stream(self, exchange, _body):
        """What happens, as it happens; `Last-Event-ID` replays what was missed."""
        after = read_number(exchange.headers.get("Last-Event-ID") or "")
        after = self.count if after is None else after
        exchange.on_gone = lambda: self.watchers.discard(exchange)
        exchange.begin_stream()
        for number, kind, data in list(self.events):
            if number > after:
                self._show(exchange, number, kind, data)
        self.watchers.add(exchange)

    def openapi(self, _exchange, _body):
        """This API, described."""
        paths = {}
        for (method, path), (_, text, members) in API_ROUTES.items():
            operation = {"summary": text, "responses": {"200": {"description": "done"},
                                                        "default": {"description": "error: {error: {code, message, data}}"}}}
            if members and method == "POST":
                schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in members.items()}}
                operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
            elif members:
                operation["parameters"] = [{"name": name, "in": "query", "schema": {"type": kind}}
                                           for name, kind in members.items()]
            if "{id}" in path:
                operation.setdefault("parameters", []).append(
                    {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
            paths.setdefault("/v1" + path, {})[method.lower()] = operation
        return {"openapi": "3.1.0", "info": {"title": "mcpx", "version": __version__}, "paths": paths}


_CALLER = {"session": "string", "parentSession": "string", "cwd": "string"}
API_ROUTES = {
    ("GET", "/health"): (Api.health, "is the daemon well", {}),
    ("GET", "/status"): (Api.control_route("status"), "everything that is going on", {}),
    ("GET", "/protocol"): (Api.protocol, "revisions, eras and settings in force", {}),
    ("GET", "/servers"): (Api.control_route("servers"), "the configured servers", {}),
    ("GET", "/tools"): (Api.tools, "the tools of a server", {"server": "string"}),
    ("POST", "/call"): (Api.call, "call a tool", dict(_CALLER, server="string", tool="string", arguments="object")),
    ("POST", "/resource"): (Api.resource, "read a resource", dict(_CALLER, server="string", uri="string")),
    ("POST", "/prompt"): (Api.prompt, "get a prompt", dict(_CALLER, server="string", prompt="string",
                                                           arguments="object")),
    ("POST", "/complete"): (Api.complete, "complete an argument",
                            dict(_CALLER, server="string", ref="object", argument="object")),
    ("GET", "/asks"): (Api.asks, "open questions", {}),
    ("POST", "/asks/{id}"): (Api.answer, "answer a question",
                             {"action": "string", "content": "object", "result": "object"}),
    ("GET", "/events"): (Api.events_stream, "what happens, as events", {}),
    ("POST", "/stop"): (Api.control_route("stop"), "end an instance, a server or the daemon", {"name": "string"}),
    ("POST", "/restart"): (Api.control_route("restart"), "end and start anew", {"name": "string"}),
    ("POST", "/reload"): (Api.control_route("reload"), "read the configuration again", {}),
    ("POST", "/why"): (Api.control_route("why"), "which instance a caller would reach, and why", {"server": "string",
                                                                                               "caller": "object"}),
    ("GET", "/settings"): (Api.control_route("settings"), "every setting, its value and where it was said", {}),
    ("GET", "/token"): (Api.control_route("token"), "the token of the TCP door; on the socket only", {}),
    ("POST", "/upgrade"): (Api.control_route("upgrade"), "go on with a file's code; on the socket only",
                           {"file": "string"}),
    ("GET", "/openapi.json"): (Api.openapi, "this description", {}),
}


def read_number(text):
    """Return the number that ASCII digits name, else None: `isdigit` alone takes a superscript two as well."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def describe_question(question):
    """Return what a person needs to know of an open question."""
    left = question.deadline_at - time.monotonic() if question.deadline_at else None
    return {"id": question.id, "server": question.instance.definition.server.name, "instance": question.instance.id,
            "method": question.method, "params": question.params, "host": question.host.id if question.host else None,
            "why": question.why_open, "asked": question.asked_wall,
            "deadline": round(left, 3) if left is not None else None}


def answer_question(core, question, body):
    """Answer an open question for a person. Raises RpcError for what is no answer to it."""
    if isinstance(body.get("result"), dict):
        result = body["result"]
    elif question.method == "elicitation/create" and body.get("action") in ("accept", "decline", "cancel"):
        result = {"action": body["action"]}
        if body["action"] == "accept":
            result["content"] = body.get("content") if isinstance(body.get("content"), dict) else {}
    else:
        raise RpcError(INVALID_PARAMS, "answer with an action (accept, decline, cancel) and content, "
                       "or a result object")
    if question.host is not None:
        question.host.withdraw_question(question, "answered elsewhere")
    core.questions.answer(question, {"result": result})
    return {"answered": question.id}


# So long after a link has ended its calls stay in the journal: a shim is back within seconds.
LINGER_S = 30.0


class ShimLink:
    """One connection on the socket: a shim's, or a command's that speaks MCP. Others speak HTTP there.

    The first line is a hello; what follows are the host's own lines, numbered from 1 by both
    sides. Toward the shim every line has a tag: `a<n> ` an answer to line n, `d<n>` line n
    needs no answer, `m ` any other message, `s ` state for the shim to keep, `c ` control.
    """

    def __init__(self, core, connection):
        self.core = core
        self.pid, self.uid = peer_credentials(connection)
        self.host = None
        self.seq = 0
        self.token = NO_TOKEN            # names the shim, also to the daemon after this one
        self.was_journalled = False      # the daemon that it lost has written the journal that was read
        self._marked = {}                # line number -> its calls that are in the journal
        self._settling = collections.deque()          # (offset in our stream, calls) of answers on their way
        self._resent = []                # losses of the lines still to be repeated
        self._resuming = []
        fd = connection.detach()
        self.stream = Stream(core.loop, fd, fd, core.config.get("limits.lineBytes"), self._on_lines, self._on_close)
        self.stream.on_data = self._on_first

    def _on_first(self, data):
        """The first byte tells: JSON lines begin with a brace, HTTP with a letter."""
        if data[:1] == b"{":
            self.stream.on_data = None
            self.stream.feed(data)
        else:
            self.core.links.discard(self)
            self.core.http.adopt(self.stream, data, True, self.pid)

    def _on_lines(self, lines):
        self.core.check_config()
        if self.host is None:
            hello, lines = lines[0], lines[1:]
            self.core.on_hello(self, hello)
        if self.host is None:
            return
        for line in lines:
            self.seq += 1
            if self._resent:
                self._resuming.append((self.seq, line, self._resent.pop(0)))
                if not self._resent:
                    resuming, self._resuming = self._resuming, []
                    self.host.resume(resuming)
            else:
                self.host.on_line(self.seq, line)

    def _on_close(self, _reason):
        self.core.links.discard(self)
        if self.host is not None:
            self.host.close()
        self._linger()
        self.core.on_link_gone()

    def _linger(self):
        """Keep what was in flight in the journal for a while: its shim may come back to the daemon after this one.

        Without an entry there, that one would take a repeated call for one that was never handed on.
        """
        pool = self.core.pool
        calls = [call for _, calls in list(self._settling) + list(self._marked.items()) for call in calls]
        if not calls:
            return
        for call in calls:
            if call.mark is not None:
                pool.journal.set(call.mark, TAKEN)
        self.core.loop.call_later(LINGER_S, lambda: [pool.journal.settle(call) for call in calls])

    def note_marked(self, call):
        """A call of this host is in the journal, until its answer has reached the shim."""
        seq = call.seq.seq if isinstance(call.seq, Batch) else call.seq
        self._marked.setdefault(seq, []).append(call)

    def _settle_marks(self, calls):
        for call in calls:
            # A call that is held for an answer goes on without this line.
            if token_of(call) != NO_TOKEN or call.done:
                self.core.pool.journal.settle(call)

    def expect_repeated(self, losses):
        """The next lines are repeated ones: how often a daemon died with each."""
        self._resent = [count for count in losses if isinstance(count, int)]

    def answer(self, seq, data):
        """Send the answer to the host's line number `seq`."""
        self._write(b"a%d " % seq, data)
        while self._settling and self._settling[0][0] <= self.stream.written_total:
            self._settle_marks(self._settling.popleft()[1])
        calls = self._marked.pop(seq, None)
        if calls is not None:
            self._settling.append((self.stream.queued_total, calls))

    def refuse(self, seq, data, _code):
        """Answer a line that is no request."""
        self.answer(seq, data)

    def named_by(self, _seq, meta):
        """Return what names the caller of a request: its `_meta` only."""
        return meta if isinstance(meta, dict) else {}

    def message(self, data, _call=None):
        """Send a message that is no answer."""
        self._write(b"m ", data)

    def settled(self, seq):
        """Tell the shim that a line needs no answer."""
        self.stream.write(b"d%d\n" % seq)
        self._settle_marks(self._marked.pop(seq, ()))

    def keep_state(self, state):
        """Have the shim keep this for the next daemon."""
        self._write(b"s ", encode_json(state))

    def control(self, text):
        """Tell the shim something that is not for its host."""
        self._write(b"c ", text.encode("utf-8", "replace"))

    def close(self, reason):
        """Close the connection at the end of the turn."""
        self.stream.close(reason)

    def _write(self, tag, data):
        limit = self.core.config.get("limits.hostQueueBytes")
        if self.stream.queued_bytes > limit:
            self.core.log.warning("host %s does not read: cut off with %d bytes unread (limits.hostQueueBytes)",
                                  self.host.id if self.host else "?", self.stream.queued_bytes)
            self.stream.close("does not read")
            return
        self.stream.write_message(tag, data, b"\n")


class StdioLink:
    """The host's own stdin and stdout, when a shim has taken the daemon's role."""

    def __init__(self, core, writer, read_fd):
        self.core, self.writer, self.read_fd = core, writer, read_fd
        self.host = None
        self.pid = os.getpid()
        self.seq = 0
        self._lines = LineBuffer(core.config.get("limits.lineBytes"))
        self._waiting = False
        core.loop.turn_hooks.append(self._flush)
        self._poll()

    def feed(self, data):
        """Take bytes that the host has written."""
        for line in self._lines.feed(data):
            self.seq += 1
            self.host.on_line(self.seq, line)

    def _poll(self):
        # Not in the selector: epoll refuses plain files, and the host's descriptors must
        # stay blocking. A thread waits for readability and wakes the loop.
        def wait():
            poller = select.poll()
            poller.register(self.read_fd, select.POLLIN)
            poller.poll()
            return os.read(self.read_fd, READ_BYTES)
        self.core.loop.in_thread(wait, self._on_data, 10 ** 8)

    def _on_data(self, data, error):
        if error is not None or not data:
            self.core.shutdown("the host has ended its stdin")
            return
        self.core.check_config()
        self.feed(data)
        self._poll()

    def answer(self, _seq, data):
        """Send an answer to the host."""
        self.writer.put(bytes(data) + b"\n")

    def refuse(self, _seq, data, _code):
        """Answer a line that is no request."""
        self.writer.put(data + b"\n")

    def named_by(self, _seq, meta):
        """Return what names the caller of a request: its `_meta` only."""
        return meta if isinstance(meta, dict) else {}

    def message(self, data, _call=None):
        """Send a message that is no answer."""
        self.writer.put(data + b"\n")

    def settled(self, _seq):
        """Nothing to tell: the host's own pipe needs no bookkeeping."""

    def keep_state(self, _state):
        """Nothing to keep: this process lives as long as its host."""

    def control(self, _text):
        """Nothing to tell: there is no shim."""

    def close(self, _reason):
        """The host's pipe is never closed by mcpx."""

    def _flush(self):
        if self.writer.pending and not self._waiting and not self.writer.flush():
            self._waiting = True
            self.core.loop.call_later(0.005, self._retry)

    def _retry(self):
        self._waiting = False


# A look at the configuration's file counts for what comes so soon after it.
CONFIG_LOOK_S = 0.01


class Daemon:
    """The core: everything hosts and commands reach goes through here, by method."""

    DESCRIPTORS = ("lock_fd",)
    ADDED = {"_tidying": False}

    def __init__(self, config_file, env, log, standalone=False):
        self.env, self.log, self.standalone = env, log, standalone
        self.paths = DaemonPaths(config_file, env)
        self.config = load_config(config_file)
        self.config_generation = 1
        self._config_stamp = self._stamp()
        self._config_error = None
        self._config_seen_at = 0.0
        self.loop = Loop(log)
        self.log.level = self.config.get("log.level")
        if self.log.sink is not None:
            self.log.sink.max_bytes, self.log.sink.files = self.config.get("log.maxBytes"), self.config.get("log.files")
        self.started_wall, self.started_at = time.time(), time.monotonic()
        self.secret = self._read_secret()
        # Above every id that an earlier daemon can have used: microseconds since 1970 grow
        # faster than a daemon can mint ids, and stay below 2**53, which JavaScript can count.
        self._next_id = time.time_ns() // 1000
        self.incarnation = "i%x" % self._next_id
        directories = {"children": os.path.join(self.paths.state, "children"),
                       "logs": os.path.join(self.paths.state, "logs"), "boot": boot_id(),
                       "owner": [os.getpid(), process_start(os.getpid())]}
        self.pool = Pool(self.loop, log, self.config, self.incarnation, directories)
        self.pool.listener = self
        self.schemas = SchemaStore(self.loop, log, os.path.join(self.paths.state, "cache"), self.secret)
        self.questions = Questions(self.loop, log, self.config, self.new_id, self.schemas)
        self.tasks = Tasks(self)
        self.questions.owner_of_task = self.owner_of_task
        self.links, self.hosts, self.requests = set(), set(), set()
        self.held, self.modern_tasks = HeldCalls(self), ModernTasks(self)
        self.http, self.api = HttpFront(self), Api(self)
        self._used_states = collections.OrderedDict()
        self._token = None
        self._tcp = {}                                # (family, address) -> listening socket
        self._tcp_wanted = ("", "")                   # http.listen and http.auth that it was opened for
        self._tcp_retry = None
        self.degraded = collections.Counter()         # (server, scope, reason) -> count
        self.stopping = None
        self.idle_exit = False
        self._places = {}                             # path -> (Place, monotonic time)
        self._places_wanted = {}                      # path -> callbacks of a look-up under way
        self._elicitations = collections.OrderedDict()   # (slot name, id) -> host
        self._roots_asked = {}                        # our id -> (host, callback, timer)
        self._idle_timer = None
        self._tidying = False            # it will be looked whether anybody is here
        self._listener = None
        self._socket_inode = None
        self._on_stopped = []
        self.lock_fd = None
        self.source = os.path.realpath(__file__)      # where this code came from
        with open(self.source, "rb") as file:
            self.started_from = hashlib.sha256(file.read()).digest()
        self.upgrades, self.upgrade = 0, None         # the Upgrade that is under way
        self._refused_code = None                     # (path, mtime, size) that did not prove itself
        self._newer_links = []                        # (link, hello) that need newer code

    def taken_along(self):
        """All of it: what is not here would be lost with an upgrade."""
        return self.__dict__

    def resumed(self):
        """Go on in other code."""
        if self.lock_fd is not None:
            os.set_inheritable(self.lock_fd, False)
        self._watch_doors()
        self._take_signals()
        self._write_record()

    def new_id(self):
        """Return a number that no incarnation of the daemon has used or will use."""
        self._next_id += 1
        return self._next_id

    def _read_secret(self):
        path = os.path.join(self.paths.state, "secret")
        try:
            with open(path, "rb") as file:
                data = file.read()
            if len(data) == 32:
                return data
        except OSError:
            data = b""
        data = secrets.token_bytes(32)
        try:
            write_private_file(path, data)
        except OSError as error:
            self.log.warning("the secret cannot be kept (%s); the schema cache starts anew each time", error)
        return data

    # -- doors ------------------------------------------------------------------

    def start(self):
        """Open the socket, then look after what a dead daemon left. Nothing else waits."""
        raise_descriptor_limit()
        adopted = ()
        if not self.standalone:
            make_private_directory(os.path.dirname(self.paths.socket))
            self.pool.journal = Journal(self.paths.socket[:-len(".sock")] + ".journal", self.pool.directories["boot"],
                                        self.incarnation, self.log)
            self.pool.holder = Holder(self.loop, self.log, self.paths.socket[:-len(".sock")] + ".hold",
                                      self.config.get("crashKeep"))
            adopted = self.pool.adopt_all()
            self._listen()
            self._write_record()
        self._take_signals()
        self.pool.orphans.find(adopted)
        if not self.standalone:
            self.http.load_sessions(self.paths.sessions)
        self._open_tcp()
        self._watch_config()
        self._keep_warm()
        self.log.info("mcpx %s serves %s, pid %d", __version__, self.paths.config, os.getpid())

    def _take_signals(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.on_signal(number, lambda number=number: self.shutdown(signal.Signals(number).name))
        self.loop.on_signal(signal.SIGHUP, lambda: self.check_config(force=True))

    def _watch_doors(self):
        """Look after the listening sockets, new ones and those that were taken over."""
        for listener in ([self._listener] if self._listener is not None else []) + list(self._tcp.values()):
            listener.setblocking(False)
            listener.set_inheritable(False)
            self._watch_door(listener)

    def _watch_door(self, listener):
        if listener is self._listener:
            self.loop.change(listener.fileno(), 1, lambda _mask: self._accept())
        elif listener in self._tcp.values():
            self.loop.change(listener.fileno(), 1, lambda _mask: self._accept_tcp(listener))

    def _leave_door(self, listener, error):
        """Out of descriptors: leave the door for a moment instead of spinning at it."""
        self.log.error("a connection cannot be accepted: %s", error.strerror)
        self.loop.unwatch(listener.fileno())
        self.loop.call_later(0.5, lambda: self._watch_door(listener))

    def _listen(self):
        path = self.paths.socket
        make_private_directory(os.path.dirname(path))
        try:
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise UsageError("%s is in the way of the socket and is not one; remove it" % path)
            # We hold the lock, so whoever listened there has gone.
            os.unlink(path)
        except FileNotFoundError:
            pass                         # the usual case: nothing is in the way
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_mask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(old_mask)
        listener.listen(512)
        self._socket_inode = os.lstat(path).st_ino
        self._listener = listener
        self._watch_doors()

    def _open_tcp(self):
        """Open, move or close the TCP door, as `http.listen` and `http.auth` say; never fatal."""
        wanted = (self.config.get("http.listen"), self.config.get("http.auth"))
        if self.standalone or self.stopping:
            return
        if wanted != self._tcp_wanted:
            self._close_tcp()
            self._tcp_wanted = wanted
        if self._tcp_retry is not None:
            self._tcp_retry.cancel()
            self._tcp_retry = None
        try:
            addresses = listen_addresses(*wanted) if wanted[0] else []
        except UsageError as error:
            self.log.error("http.listen: %s", error)
            return
        fresh = [pair for pair in addresses if pair not in self._tcp]
        failed = [pair for pair in fresh if not self._listen_tcp(*pair)]
        if failed:
            # One timer for all that failed; what is open stays open.
            self._tcp_retry = self.loop.call_later(TCP_RETRY_S, self._open_tcp)
        if len(failed) < len(fresh):
            self.token()
            if wanted[1] == "none":
                self.log.warning("http.auth is none: every local user and program can call as you on %s", wanted[0])
            self.log.info("http on %s", wanted[0])

    def _listen_tcp(self, family, address):
        """Listen on one address; returns whether it worked."""
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self.log.error("http.listen %s: %s", address[0], error.strerror)
            return False
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(512)
        except OSError as error:
            listener.close()
            self.log.error("http.listen %s:%d: %s; hosts over stdio are served, it is tried again",
                           address[0], address[1], error.strerror)
            return False
        self._tcp[(family, address)] = listener
        self._watch_doors()
        return True

    def _close_tcp(self):
        for listener in self._tcp.values():
            self.loop.unwatch(listener.fileno())
            listener.close()
        self._tcp = {}

    def _accept_tcp(self, listener):
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._leave_door(listener, error)
            return
        connection.setblocking(False)
        if self.http.remote() >= self.config.get("http.connections") + SURPLUS_CONNECTIONS:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = connection.detach()
        stream = Stream(self.loop, fd, fd, READ_BYTES, None, None)
        self.http.adopt(stream, b"", False)
        self._cancel_idle_exit()

    def _accept(self):
        for _ in range(64):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._leave_door(self._listener, error)
                return
            connection.setblocking(False)
            if peer_credentials(connection)[1] != os.getuid():
                connection.close()
                continue
            self.links.add(ShimLink(self, connection))
            self._cancel_idle_exit()

    def _write_record(self):
        record = {"pid": os.getpid(), "start": process_start(os.getpid()), "socket": self.paths.socket,
                  "version": __version__, "link": LINK_VERSION, "config": self.paths.config,
                  "started": self.started_wall}
        write_private_file(self.paths.record, json.dumps(record).encode("utf-8"))

    def on_hello(self, link, line):
        """A connection says what it is."""
        try:
            hello = parse_json(line) if not isinstance(line, Oversize) else None
            if not isinstance(hello, dict) or not isinstance(hello.get("mcpx"), int):
                raise RpcError(INVALID_REQUEST, "not a hello")
        except RpcError:
            self.log.warning("a connection did not begin with a hello; closed")
            link.close("no hello")
            return
        newer = self._is_newer(hello)
        if newer:
            self._upgrade_to(hello["file"])
        if hello["mcpx"] > LINK_VERSION:
            if newer and self.upgrade is not None:
                # It is greeted by the code that knows its words.
                self._newer_links.append((link, line))
                link.stream.pause(True)
            else:
                self._refuse_newer(link, hello.get("version"))
            return
        self._welcome(link, hello)

    # -- other code ---------------------------------------------------------------------

    def _is_newer(self, hello):
        """Does a shim or command of this user come from a newer file than this daemon?"""
        return (self.config.get("upgrade") == "auto" and not self.standalone and isinstance(hello.get("file"), str)
                and version_numbers(hello.get("version")) > version_numbers(__version__))

    def _refuse_newer(self, link, version):
        link.control("fail this daemon (mcpx %s) is older than the shim (%s); run `mcpx reload --upgrade` or "
                     "`mcpx stop`, the next request starts the new one" % (__version__, version))
        link.close("newer shim")

    def _upgrade_to(self, path):
        """Go on with a newer file, unless it was tried before."""
        try:
            info = os.stat(path)
            stamp = (path, info.st_mtime_ns, info.st_size)
        except OSError:
            return
        if self.upgrade is not None or self.stopping or stamp == self._refused_code:
            return

        def done(message):
            if "error" in message:
                self._refused_code = stamp
                self.log.error("the code of %s is not used: %s", path, message["error"]["message"])
        try:
            self.begin_upgrade(path, done)
        except RpcError as error:
            done({"error": error.as_object()})

    def begin_upgrade(self, path, on_done):
        """Take over the code of a file; `on_done(message)` once that has succeeded or failed. Raises RpcError."""
        if self.upgrade is not None:
            raise RpcError(INVALID_REQUEST, "an upgrade is under way already")
        if self.stopping or self.standalone:
            raise RpcError(INVALID_REQUEST, "mcpx is ending" if self.stopping else "there is no daemon")
        self.upgrade = Upgrade(self, path, on_done)
        try:
            self.upgrade.begin()
        except Exception as error:
            self.upgrade = None
            raise RpcError(INVALID_PARAMS, "%s: %s" % (path, error))

    def upgrade_over(self):
        """The upgrade has succeeded or failed: who needed it is served, or told."""
        self.upgrade = None
        waiting, self._newer_links = self._newer_links, []
        for link, line in waiting:
            link.stream.pause(False)
            self.on_hello(link, line)

    def _welcome(self, link, hello):
        names = [name for name in hello.get("names") or () if isinstance(name, str)]
        unknown = [name for name in names if name not in self.config.servers or self.config.servers[name].disabled]
        resumed = isinstance(hello.get("state"), dict)
        if not names or (unknown and not resumed):
            link.control("fail " + unknown_servers_text(unknown, self.config))
            link.close("unknown server")
            return
        if len(self.links) > self.config.get("limits.hosts"):
            link.control("fail %d hosts are connected; raise limits.hosts" % (len(self.links) - 1))
            link.close("too many hosts")
            return
        host = self.make_host(link, names, hello)
        link.control("welcome %s %d %g %g %d %s" % (
            __version__, self.config.get("shim.keepBytes"), self.config.get("shim.drainTimeout"),
            self.config.get("shim.closeTimeout"), self.config.get("limits.lineBytes"), self.incarnation))
        if resumed:
            try:
                host.take_state(hello["state"])
            except Exception:
                # The state of another version, say: the host is served without it.
                self.log.error("the state of host %s cannot be taken over: %s", host.id, traceback.format_exc())
        losses = hello.get("resent")
        if isinstance(losses, list) and losses:
            link.expect_repeated(losses)

    def make_host(self, link, names, hello):
        """Return the host object of a connection, with the identity that it has by itself."""
        token = hello.get("token")
        if isinstance(token, str) and re.fullmatch(r"[0-9a-f]{16}", token):
            link.token = bytes.fromhex(token)
            # What is not in the journal proves something only for a link that its writer had.
            former = self.pool.journal.former if self.pool.journal is not None else None
            link.was_journalled = bool(former) and hello.get("incarnation") == former
        identity, env = self.caller_of(link.pid, hello)
        host = LegacyHost(self, link, list(dict.fromkeys(names)), identity, env)
        host.version = hello["version"] if isinstance(hello.get("version"), str) else None
        link.host = host
        self.hosts.add(host)
        self.api.emit("host", {"id": host.id, "state": "connected", "servers": host.surface.names})
        return host

    def caller_of(self, pid, hello):
        """Return (Identity, environment) of a shim or command, from its hello and its socket."""
        session, role = hello.get("session"), hello.get("role")
        named = isinstance(session, str) and bool(session)
        if not named:
            session = "%s%s" % (CONNECTION_PREFIX, pid if role == "serve" else "c%d" % self.new_id())
        place = hello.get("place")
        place = Place(**{name: place.get(name) for name in Place.__slots__}) if isinstance(place, dict) else Place()
        parent = hello.get("parent") if isinstance(hello.get("parent"), str) and hello.get("parent") else None
        identity = Identity("process" if role == "serve" else "command", session, named, parent, place, pid,
                            process_start(pid) if pid else None)
        env = {str(name): str(value) for name, value in (hello.get("env") or {}).items()}
        return identity, env

    # -- what hosts ask of the core -------------------------------------------------

    def question_timeout(self, call):
        """Return how long what the server of a call asks may stay unanswered, in seconds."""
        return self.config.get("question.timeout", call.slot.server if call.slot is not None else None)

    def server(self, name):
        """Return the entry of a server in use. Raises RpcError that says why there is none."""
        server = self.config.servers.get(name) if isinstance(name, str) else None
        if server is None or server.disabled:
            raise RpcError(INVALID_PARAMS, unknown_servers_text([str(name)], self.config))
        if server.broken:
            raise StartFailed("server %s: %s" % (name, server.broken))
        return server

    def attach(self, host):
        """Give a host the schemas of its endpoint, as they are now."""
        host.schema_errors = {}
        for name in host.surface.names:
            old = host.surface.schemas.pop(name, None)
            if old is not None:
                old.watchers.discard(host)
            try:
                server = self.server(name)
                identity = host.own_identity()
                key = scope_key(self.config.get("scope", server), identity)
                definition = host.definition_for(server, identity, key)
                slot = self.pool.slots.get((name, definition.digest, key.text))
                self.use_schema(host, name, self.schema_for(host, server, definition, slot))
            except RpcError as error:
                host.schema_errors[name] = error

    def schema_for(self, host, server, definition, slot):
        """Return the schema that holds for a host on a slot: that of what runs, if it runs.

        An instance declares what its starter can do; others who share it see its lists.
        """
        if slot is not None and slot.instance is not None:
            return self.schemas.of_instance(slot.instance)
        return self.schemas.get(definition, host.declared(server))

    def use_schema(self, host, name, schema):
        """Let a host see a server through this schema from now on."""
        old = host.surface.schemas.get(name)
        if old is not None:
            old.watchers.discard(host)
        host.surface.schemas[name] = schema
        schema.watchers.add(host)

    def with_schemas(self, host, ready):
        """Call `ready(errors)` once the schemas of a host's endpoint are known.

        At once where they are; else servers are started and waited for, up to coldWait. The
        start goes on when nobody waits any more, and is announced then.
        """
        errors = list(host.schema_errors.values())
        missing = {name: schema for name, schema in host.surface.schemas.items() if not schema.known}
        if not missing:
            ready(errors)
            return
        left, finished = set(missing), []

        def finish():
            if not finished:
                finished.append(True)
                timer.cancel()
                ready(errors)

        def one(name, error):
            left.discard(name)
            if error is not None:
                errors.append(error)
            if not left:
                finish()
        def late():
            host.answered_without = True
            finish()
        wait = max(self.config.get("coldWait", self.config.servers.get(name)) for name in missing)
        timer = self.loop.call_later(wait, late)
        for name, schema in missing.items():
            self._fill(host, name, schema, lambda error, name=name: one(name, error))

    def _fill(self, host, name, schema, on_done):
        schema.waiters.append(on_done)
        if schema.filling:
            return
        schema.filling = True
        try:
            slot = host.slot_for(self.server(name), host.own_identity(), for_lists=True)
        except RpcError as error:
            self.schemas.settle(schema, error)
            return
        slot.hosts.add(host)
        host.slots.add(slot)

        def started(error):
            if error is not None:
                self.schemas.settle(schema, error)
                return
            # Another host's start may have come first, with other capabilities declared.
            actual = self.schemas.of_instance(slot.instance)
            if actual is schema and not schema.known:
                return                   # settled when its lists have been fetched
            if not host.closed and actual is not schema:
                self.use_schema(host, name, actual)
            if actual.known:
                self.schemas.settle(schema, None)
            else:
                actual.waiters.append(lambda error: self.schemas.settle(schema, error))
        self.pool.prepare(slot, started)

    def find_place(self, path, on_place):
        """Find the Place of a directory that a caller names; in a thread, as it may hang."""
        known = self._places.get(path)
        now = time.monotonic()
        if known is not None and now - known[1] < 2.0:
            on_place(known[0])
            return

        if path in self._places_wanted:
            self._places_wanted[path].append(on_place)
            return
        self._places_wanted[path] = [on_place]

        def done(place, error):
            if error is not None:
                place = Place(reason="%s cannot be told: %s" % (printable(path), error))
            if len(self._places) > 1000:
                self._places.clear()
            self._places[path] = (place, time.monotonic())
            for callback in self._places_wanted.pop(path):
                callback(place)
        not_work = (self.env.get("HOME"), tempfile.gettempdir())
        self.loop.in_thread(lambda: find_place(path, not_work), done, 5.0)

    def ask_roots(self, host, call, on_place):
        """Ask a host where it works; `on_place(Place)`, unknown after 5 s."""
        question_id = self.new_id()

        def unknown(reason):
            self._roots_asked.pop(question_id, None)
            on_place(Place(reason=reason))
        timer = self.loop.call_later(5.0, lambda: unknown("the host did not tell its roots"))
        self._roots_asked[question_id] = (host, on_place, timer)
        host.link.message(encode_json({"jsonrpc": "2.0", "id": question_id, "method": "roots/list"}), call)

    def roots_answered(self, host, message):
        """Take an answer of a host if it is to our own roots/list; returns whether it was."""
        asked = self._roots_asked.get(message["id"]) if is_valid_id(message["id"]) else None
        if asked is None or asked[0] is not host:
            return False
        del self._roots_asked[message["id"]]
        asked[2].cancel()
        result = message.get("result")
        roots = result.get("roots") if isinstance(result, dict) else None
        for root in roots if isinstance(roots, list) else ():
            uri = root.get("uri") if isinstance(root, dict) else None
            if isinstance(uri, str) and uri.startswith("file://"):
                from urllib.parse import unquote, urlsplit
                self.find_place(unquote(urlsplit(uri).path), asked[1])
                return True
        asked[1](Place(reason="the host has no file:// root"))
        return True

    def note_degraded(self, server_name, scope, reason):
        """Count a scope that could not be told; logged once per server and reason."""
        # A path in the reason would make every directory a reason of its own.
        name = (server_name, scope, reason)
        if name not in self.degraded and len(self.degraded) >= 1000:
            name = (server_name, scope, "other reasons")
        elif name not in self.degraded:
            self.log.warning("scope %s of server %s is narrower than asked for: %s", scope, server_name, reason)
        self.degraded[name] += 1
        self.pool.counters["degraded"] += 1

    def note_use(self, host, server, key, session, instance_id):
        """A host relied on state that an earlier daemon had: it is there, or its loss is told."""
        instance = self.pool.instances.get(instance_id)
        if instance is not None and instance.slot is not None and instance.slot.instance is instance:
            instance.slot.hosts.add(host)
            host.slots.add(instance.slot)
            instance.users.add(session)
            return
        reason, sessions = self.pool.lost_state.get((server, key), ("mcpx was restarted", set()))
        sessions.add(session)
        self.pool.lost_state[(server, key)] = (reason, sessions)

    def note_elicitation(self, slot, elicitation_id, host):
        """Remember whom a URL elicitation was shown to: only that host hears of its end."""
        if isinstance(elicitation_id, str):
            self._elicitations[(slot.name, elicitation_id)] = host
            while len(self._elicitations) > 1000:
                self._elicitations.popitem(last=False)

    def wanted_level(self, slot, host):
        """Return the most verbose log level that a host of the slot asked for."""
        levels = [LOG_LEVELS.index(h.level) for h in slot.hosts | {host} if h.level in LOG_LEVELS]
        return LOG_LEVELS[min(levels)] if levels else None

    def on_initialized(self, host):
        """A host has finished its handshake."""
        self.log.info("host %s is ready: %s, pid %s, %s, servers %s", host.id, host.info.get("name", "?"),
                      host.identity.pid, host.revision, ", ".join(host.surface.names))

    def host_gone(self, host):
        """A host has gone: end what only its connection could name."""
        if host not in self.hosts:
            return                       # a single request: it could name nothing by a connection
        self.hosts.discard(host)
        self.api.emit("host", {"id": host.id, "state": "gone"})
        for question_id in [i for i, asked in self._roots_asked.items() if asked[0] is host]:
            self._roots_asked.pop(question_id)[2].cancel()
        own = "session:%s" % host.identity.session
        for slot in list(self.pool.slots.values()):
            if slot.key.text == own and not host.identity.named and not slot.hosts:
                slot.tasks.clear()       # nobody can name this session again
                self.pool.end(slot, "its session has ended")
            elif slot.key.text.startswith("pid:"):
                self._end_with_process(slot)

    def _end_with_process(self, slot):
        """An instance of `pid` scope ends when that process does."""
        pid, _, start = slot.key.text[len("pid:"):].partition("@")
        if process_start(int(pid)) != start:
            self.pool.end(slot, "its process has ended")
        elif not slot.hosts and slot.name in self.pool.slots:
            self.loop.call_later(1.0, lambda: self._end_with_process(slot))

    # -- states that hosts carry for us --------------------------------------------------------

    def sign(self, payload):
        """Return a requestState: a payload that nobody else can make or change."""
        import base64
        body = base64.urlsafe_b64encode(encode_json(payload)).rstrip(b"=").decode()
        mac = hmac.new(self.secret, b"state " + body.encode(), "sha256").hexdigest()[:40]
        return "v1.%s.%s" % (body, mac)

    def unsign(self, state, digest):
        """Return the payload of a requestState. Raises RpcError that says which check failed."""
        import base64
        import binascii
        parts = state.split(".") if isinstance(state, str) else []
        if len(parts) != 3 or parts[0] != "v1":
            raise RpcError(INVALID_PARAMS, "requestState: it was not made here")
        mac = hmac.new(self.secret, b"state " + parts[1].encode("utf-8", "replace"), "sha256").hexdigest()[:40]
        if not hmac.compare_digest(mac.encode(), parts[2].encode("utf-8", "replace")):
            raise RpcError(INVALID_PARAMS, "requestState: its signature is wrong; it was changed or not made here")
        try:
            payload = parse_json(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        except (binascii.Error, ValueError, RpcError):
            raise RpcError(INVALID_PARAMS, "requestState: it cannot be read")
        if payload.get("e", 0) < time.time():
            raise RpcError(INVALID_PARAMS, "requestState: it has expired; start the call again")
        if payload.get("d") != digest:
            raise RpcError(INVALID_PARAMS, "requestState: it belongs to another request (method, name or "
                           "arguments differ)")
        return payload

    def use_once(self, number):
        """Remember that a state was used. Raises RpcError when it was before."""
        if number in self._used_states:
            raise RpcError(INVALID_PARAMS, "requestState: it was used already")
        self._used_states[number] = True
        while len(self._used_states) > 10000:
            self._used_states.popitem(last=False)

    def token(self):
        """Return the bearer token of the TCP door; made at its first use, kept in a file of 0600."""
        if self._token is None:
            path = os.path.join(self.paths.state, "token")
            try:
                with open(path, encoding="ascii") as file:
                    text = file.read().strip()
            except (OSError, ValueError):
                text = ""
            if not 32 <= len(text) <= 256 or not text.isprintable():
                text = secrets.token_urlsafe(32)
                try:
                    write_private_file(path, text.encode() + b"\n")
                except OSError as error:
                    self.log.warning("the token cannot be kept (%s); the next daemon will have another", error)
            self._token = text
        return self._token

    # -- what the pool tells -----------------------------------------------------------

    def era_of(self, definition):
        """The era that an instance of a definition is to be spoken to in."""
        if self.config.get("protocol", definition.server) in ("legacy", "modern"):
            return definition.era
        return self.schemas.era_of(definition)

    def note_era(self, definition, era):
        """A server has shown that it speaks one era only."""
        self.schemas.note_era(definition, era)

    def open_questions(self, instance):
        """Return what an instance waits for, for the daemon after this one."""
        return self.questions.open_of(instance)

    def reopen_question(self, instance, *facts):
        """A question of an adopted instance waits for a person."""
        self.questions.reopen(instance, *facts)

    def on_adopted(self, slot):
        """Hosts that used an instance of a dead daemon are back by now, or gone: who else could name it?"""
        if slot.key.text.startswith("pid:"):
            self._end_with_process(slot)
        elif slot.key.text.startswith("session:" + CONNECTION_PREFIX) and not slot.hosts and not slot.named:
            slot.tasks.clear()
            self.pool.end(slot, "its session has ended")

    def on_event(self, kind, data):
        """Something happened that a person may want to watch."""
        self.api.emit(kind, data)

    def waiting_hosts(self, instance):
        """Return the hosts whose calls on an instance wait for an answer to what they asked."""
        return self.questions.waiting_hosts(instance)

    def asking_parties(self, instance):
        """Return who was asked something by an instance a moment ago."""
        return self.questions.asking_parties(instance)

    def on_question(self, instance, message):
        """A server asks something."""
        self.questions.ask(instance, message)
        self.api.emit("question", {"server": instance.definition.server.name, "method": message["method"]})

    def owner_of_task(self, instance, upstream_id):
        """Return who is to be asked what a task asks, or None."""
        task = self.tasks.find(instance, upstream_id)
        if task is not None:
            return None if task.host.closed else task.host
        return next((t for t in self.modern_tasks.by_id.values()
                     if t.upstream_id == upstream_id and t.slot is instance.slot), None)

    def on_lease_back(self, instance):
        """A call on an instance is over."""
        self.questions.on_lease_back(instance)

    def on_ready(self, instance):
        """An instance has made its handshake: check the schema cache against it."""
        schema = self.schemas.of_instance(instance)
        if instance.slot.key.text.startswith("call:") and self.schemas.is_fresh(schema):
            self.schemas.settle(schema, None)
            return
        self.schemas.check(instance)

    def on_gone(self, instance):
        """Nothing of an instance is left."""
        self.questions.on_gone(instance)
        if instance.slot is not None:
            self.tasks.on_gone(instance)
            self.modern_tasks.on_gone(instance)
        if instance.own_schema is not None:
            self._leave_own_schema(instance)
        for host in self.hosts:
            for name in [name for name, route in host._routes.items() if route[2] is instance]:
                del host._routes[name]

    def on_free(self):
        """An instance has left every table."""
        self._maybe_stopped()
        self._maybe_idle_exit()

    def _leave_own_schema(self, instance):
        """Hosts that saw the lists of one instance see those of the definition again."""
        own, instance.own_schema = instance.own_schema, None
        shared = self.schemas.of_instance(instance)
        for host in list(own.watchers):
            self.use_schema(host, instance.definition.server.name, shared)
            for kind in LIST_KINDS:
                if own.lists[kind] != shared.lists[kind]:
                    host.on_list_changed(KIND_CHANGED[kind])

    def on_notification(self, instance, message):
        """A server tells something: it goes where it belongs, or nowhere."""
        method, params = message["method"], strip_hop_meta(message.get("params") or {})
        if method == "notifications/message":
            self._on_log(instance, params)
        elif method in CHANGED_KINDS:
            self._on_list_changed(instance, method)
        elif method == "notifications/resources/updated":
            self._on_updated(instance, params)
        elif method == "notifications/cancelled":
            self.questions.on_cancelled(instance, params)
        elif method == "notifications/tasks/status":
            self.tasks.on_status(instance, params)
        elif method == "notifications/tasks":
            self.modern_tasks.on_state(instance, params)
        elif method == "notifications/elicitation/complete":
            elicitation_id = params.get("elicitationId")
            host = self._elicitations.pop((instance.slot.name, elicitation_id), None) if (
                isinstance(elicitation_id, str)) else None
            if host is not None and host.revision == LATEST_LEGACY:
                host.tell(method, params)
        elif only_host(instance) is not None:
            only_host(instance).tell(method, params if "params" in message else None)
        else:
            self.pool.counters["droppedNotifications"] += 1

    def _on_log(self, instance, params):
        """To the one host with a call that can have logged, else to the only host there is; never to all."""
        calls = possible_calls(instance)
        if instance.upstream.era == "modern":
            # MCP 2026-07-28, server/utilities/logging: only for a request that set a level.
            calls = [call for call in calls if call.host.level is not None]
        if calls:
            calls = self.schemas.loggers(instance, calls)
        alone = only_host(instance) if not calls else None
        wanting = [call for call in calls if not call.cancelled and not call.host.closed]
        if len({call.party for call in calls}) == 1 and wanting:
            call = ([call for call in wanting if call.host.level is not None] or wanting)[-1]
            call.host.on_log(params, call)
        elif alone is not None and not alone.closed:
            alone.on_log(params)
        else:
            self.pool.counters["droppedLogs"] += 1
            self.pool.server_log(instance.definition.server.name).write(
                b"[message] " + json.dumps(params).encode("utf-8")[:4000] + b"\n")

    def _on_list_changed(self, instance, method):
        """Fetch the list anew, then tell the hosts. A storm becomes one fetch at a time."""
        if method in instance.rechecks:
            instance.rechecks[method] = True
            return
        instance.rechecks[method] = False
        self.loop.call_later(0.05, lambda: self._recheck(instance, method))

    def _recheck(self, instance, method):
        if instance.state not in ("idle", "busy"):
            return
        again = instance.rechecks.pop(method, False)
        # Before its first call a server is still setting itself up, the same way every time.
        if instance.slot.scope in PRIVATE_SCOPES and instance.calls and self.schemas.of_instance(instance).known:
            shared = self.schemas.of_instance(instance)
            own = self.schemas.detach(instance)
            for host in {host for host in instance.slot.hosts if isinstance(host, Host)} | {
                    host for host in shared.watchers if self._is_for(host, instance.slot)}:
                self.use_schema(host, instance.slot.server.name, own)
        self.schemas.check(instance, CHANGED_KINDS[method], announce=True)
        if again:
            self._on_list_changed(instance, method)

    def _is_for(self, host, slot):
        """Is this slot the one that a host's requests reach, though none has yet?"""
        try:
            return scope_key(slot.scope, host.own_identity()).text == slot.key.text
        except RpcError:
            return False                 # it calls itself what nobody may

    def _on_updated(self, instance, params):
        uri, subscriptions = params.get("uri"), instance.slot.subscriptions
        hosts = set(subscriptions.get(uri, ())) if isinstance(uri, str) else set()
        if not hosts and isinstance(uri, str):
            # MCP 2025-11-25, server/resources: it may name a part of what was subscribed to.
            parents = [u for u in subscriptions if uri.startswith(u.rstrip("/") + "/")]
            hosts = set(subscriptions[max(parents, key=len)]) if parents else set()
        everybody = set().union(*subscriptions.values()) if subscriptions else set()
        if not hosts and len(everybody) == 1:
            hosts = everybody
        for host in hosts:
            host.tell("notifications/resources/updated", params)

    # -- configuration --------------------------------------------------------------------

    def _stamp(self):
        try:
            info = os.stat(self.paths.config)
            return info.st_mtime_ns, info.st_size, info.st_ino
        except OSError:
            return None

    def _watch_config(self):
        self.check_config()
        self._open_again()
        self.loop.call_later(5.0, self._watch_config)

    def _open_again(self):
        """Whoever cleans up may take the runtime directory away, as the end of a login does: make it anew."""
        old = self._listener
        if old is None or os.path.lexists(self.paths.socket):
            return
        try:
            self._listen()
        except (OSError, UsageError) as error:
            self.log.error("the socket %s has gone and cannot be made again: %s", self.paths.socket, error)
            return
        self.log.warning("the socket %s had gone; it was made again", self.paths.socket)
        self.loop.unwatch(old.fileno())
        old.close()
        self.pool.journal.renew()
        self.pool.holder.renew()

    def check_config(self, force=False):
        """Apply the configuration if the file has changed. Returns the error text, or None."""
        now = time.monotonic()
        if now - self._config_seen_at < CONFIG_LOOK_S and not force:
            return self._config_error    # looked at with the message before this one
        self._config_seen_at = now
        stamp = self._stamp()
        if stamp == self._config_stamp and not force:
            return self._config_error
        self._config_stamp = stamp
        try:
            new = load_config(self.paths.config)
            for server in new.servers.values():
                if server.broken:
                    raise UsageError(server.broken)
        except UsageError as error:
            self._config_error = str(error)
            self.log.error("the changed configuration is not used: %s", error)
            return self._config_error
        self._config_error = None
        self._apply(new)
        return None

    def _apply(self, new):
        old = self.config
        changed = {name for name in old.servers.keys() | new.servers.keys()
                   if name not in old.servers or name not in new.servers
                   or old.servers[name].comparable() != new.servers[name].comparable()}
        self.config = self.pool.config = self.questions.config = new
        self.config_generation += 1
        self.log.level = new.get("log.level")
        self._open_tcp()
        self.api.emit("config", {"changed": sorted(changed)})
        self.log.info("configuration applied; changed servers: %s", ", ".join(sorted(changed)) or "none")
        for name in changed & old.servers.keys():
            what = "changed" if name in new.servers else "removed"
            self.pool.retire(name, "its entry was %s" % what)
        for host in list(self.hosts):
            if host.revision is not None:
                before = host.surface.capabilities(host.revision)
                self.attach(host)
                if changed & set(host.surface.names):
                    for kind in ("tools", "prompts", "resources"):
                        if kind in before or kind in host.surface.capabilities(host.revision):
                            host.on_list_changed(KIND_CHANGED[kind])
        self.pool.settings_changed()
        self._keep_warm()

    def _keep_warm(self):
        definitions = []
        for server in self.config.servers.values():
            if not self.config.get("warm", server) or server.broken or server.disabled:
                continue
            problem = warm_problem(self.config, server)
            if problem:
                self.log.warning("server %s is not kept warm: %s", server.name, problem)
                continue
            identity = Identity("process", call=0)
            try:
                definitions.append(Definition(self.config, server, identity, Key("warm"), self.env, self.secret))
            except StartFailed as error:
                self.log.warning("server %s is not kept warm: %s", server.name, error.message)
        self.pool.keep_warm(definitions)

    # -- the end -----------------------------------------------------------------------------

    def shutdown(self, reason, on_stopped=None):
        """Let calls in flight finish (bounded), end all children, then leave the loop."""
        if on_stopped is not None:
            self._on_stopped.append(on_stopped)
        if self.stopping:
            return
        self.stopping = reason
        self.log.info("mcpx ends: %s", reason)
        self._close_door()
        for link in list(self.links):
            if link.host is not None:
                link.control("bye " + reason)
        deadline = time.monotonic() + self.config.get("shim.drainTimeout" if self.standalone else "drainTimeout")

        def drained():
            if self.pool.busy() and time.monotonic() < deadline:
                self.loop.call_later(0.02, drained)
                return
            self.pool.stop_all(reason)
            self._maybe_stopped()
        self.loop.soon(drained)

    def _close_door(self):
        self._close_tcp()
        if self._listener is None:
            return
        self.loop.unwatch(self._listener.fileno())
        self._listener.close()
        self._listener = None
        try:
            # Never the socket of a successor.
            if os.lstat(self.paths.socket).st_ino == self._socket_inode:
                os.unlink(self.paths.socket)
            os.unlink(self.paths.record)
        except OSError as error:
            self.log.debug("the socket was not removed: %s", error)

    def _maybe_stopped(self):
        if not self.pool.draining or self.pool.instances or self.pool.orphans.pending:
            if self.pool.draining and self.pool.orphans.pending:
                self.loop.call_later(0.1, self._maybe_stopped)
            return
        callbacks, self._on_stopped = self._on_stopped, []
        for callback in callbacks:
            callback()
        self.loop.soon(self._leave)

    def _leave(self, deadline=None):
        deadline = deadline or time.monotonic() + LEAVE_WAIT_S
        streams = [link.stream for link in self.links] + [connection.stream for connection in self.http.connections]
        if any(stream.queued_bytes for stream in streams) and time.monotonic() < deadline:
            # The last answers are on their way.
            self.loop.call_later(0.02, lambda: self._leave(deadline))
            return
        for link in list(self.links):
            link.close("mcpx has ended")
        self.http.save_sessions(self.paths.sessions)
        self.http.close()
        if self.pool.holder is not None:
            self.pool.holder.close()
            self.pool.journal.remove()
        self.loop.call_later(0.0, self.loop.stop)

    def on_link_gone(self):
        """A connection has closed."""
        self._maybe_idle_exit()
        if not (self.links or self.http.connections or self._tidying):
            self._tidying = True
            self.loop.call_later(TIDY_S, self._tidy)

    def _tidy(self):
        """Give back what hosts have left behind in cycles: it takes milliseconds, which now nobody waits for."""
        self._tidying = False
        if not (self.links or self.http.connections):
            gc.collect()

    def _cancel_idle_exit(self):
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _is_used(self):
        return bool(self.links or self.http.connections or self.http.sessions or self.pool.instances)

    def _maybe_idle_exit(self):
        """A daemon that a shim started goes when nobody has used it for a while."""
        if not self.idle_exit or self._idle_timer is not None or self.stopping or self._is_used():
            return

        def due():
            self._idle_timer = None
            if not self._is_used():
                self.shutdown("idle")
        self._idle_timer = self.loop.call_later(self.config.get("idleExit"), due)


def version_numbers(text):
    """Return a version as numbers that compare; () for what is none."""
    parts = text.split(".") if isinstance(text, str) else []
    return tuple(int(part) for part in parts) if all(part.isascii() and part.isdigit() for part in parts) else ()


# Signals that must not be lost between two codes in one process.
UPGRADE_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGCHLD")
# The new code ends the process if it does not get to its loop: then it is as after a crash.
EXEC_WAIT_S = 20


def read_code(path):
    """Return the code of a file that may run as us: ours, and writable by nobody else. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            info, data = os.fstat(file.fileno()), file.read()
    except OSError as error:
        raise UsageError("cannot be read: %s" % error.strerror)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise UsageError("is not a file that belongs to you and that only you can write; chmod go-w it")
    return data


def keep_code(directory, data):
    """Keep a copy of code under a name made of its hash, so that what was checked is what runs; returns its path."""
    make_private_directory(directory)
    path = os.path.join(directory, "mcpx-%s.py" % hashlib.sha256(data).hexdigest()[:16])
    try:
        with open(path, "rb") as file:
            if file.read() == data:
                return path
    except OSError:
        data = bytes(data)               # the usual case: it is not there yet
    write_private_file(path, data)
    return path


def forget_code(directory, keep):
    """Remove the copies of code that nobody runs any more."""
    for path in glob.glob(os.path.join(directory, "mcpx-*.py")):
        if path not in keep:
            try:
                os.unlink(path)
            except OSError:
                continue


def memory_file(data):
    """Return a descriptor of a nameless file with this content, at its start."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("mcpx-snapshot")
    else:
        fd, path = tempfile.mkstemp(prefix="mcpx-snapshot-")
        os.unlink(path)
    _write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def read_all(fd):
    """Return the content of a descriptor from its start."""
    os.lseek(fd, 0, os.SEEK_SET)
    pieces = []
    while True:
        piece = os.read(fd, 1 << 20)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)


class Upgrade:
    """One exchange of the daemon's code, in the same process: copy, check the copy, write all down, exec.

    The check is an ordinary child that takes over a copy of the state and looks at all of
    it. Up to the exec a failure changes nothing; after it the code before takes over again.
    """

    def __init__(self, core, path, on_done):
        self.core, self.path, self.on_done = core, path, on_done
        self.copy = self.previous = self.pid = self.timer = self.stream = None
        self.output = collections.deque(maxlen=20)
        self.started = time.monotonic()

    def begin(self):
        """Start the check. Raises UsageError, SnapshotError or OSError."""
        core = self.core
        self.copy = keep_code(core.paths.code, read_code(self.path))
        self.previous = running_copy(core.paths.code, core.started_from)
        snapshot = memory_file(SnapshotWriter().dump(core))
        read_fd, write_fd = os.pipe()
        try:
            command = code_command(self.copy, "daemon", "--config", core.paths.config, "--check-fd", str(snapshot))
            self.pid = start_helper(core.loop, command, (snapshot,), write_fd, self._checked)
        except OSError:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
            os.close(snapshot)
        self.stream = Stream(core.loop, read_fd, None, 65536, self._on_output, None)
        timeout = core.config.get("upgradeTimeout")
        self.timer = core.loop.call_later(timeout, lambda: self._too_slow(timeout))

    def _on_output(self, lines):
        self.output += [line.decode("utf-8", "replace") for line in lines if isinstance(line, bytes)]

    def _too_slow(self, timeout):
        self.output.append("it did not prove itself in %gs (upgradeTimeout)" % timeout)
        kill_helper(self.pid)

    def _checked(self, status):
        self.stream.read_rest()
        self.stream.close("the check is over")
        self.stream = None
        self.timer.cancel()
        if status != 0 or not any(line.startswith("ok ") for line in self.output):
            self.fail("the new code does not take over (%s): %s" % (
                describe_status(status), " ".join(self.output)[-1000:] or "it said nothing"))
        elif self.core.stopping:
            self.fail("mcpx is ending")
        else:
            self.core.loop.between_turns = self._exec
            timeout = self.core.config.get("upgradeTimeout")
            self.timer = self.core.loop.call_later(timeout, lambda: self._no_moment(timeout))

    def _no_moment(self, timeout):
        if self.core.loop.between_turns is not None:
            self.core.loop.between_turns = None
            self.fail("there was no moment without work in a thread in %gs (upgradeTimeout)" % timeout)

    def _exec(self):
        """Become the new code; returns only if that did not work."""
        self.timer.cancel()
        writer, fd, problem = SnapshotWriter(), None, None
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in UPGRADE_SIGNALS])
        try:
            snapshot = writer.dump(self.core)
            # What this code cannot read itself would leave no way back.
            SnapshotReader(snapshot, dry=True).load()
            fd = memory_file(snapshot)
            for descriptor in writer.descriptors + [fd]:
                os.set_inheritable(descriptor, True)
            signal.alarm(EXEC_WAIT_S)
            exec_daemon(self.copy, self.core.paths.config, fd, self.previous)
        except Exception as error:
            problem = "%s: %s" % (type(error).__name__, error)
            signal.alarm(0)
            for descriptor in writer.descriptors:
                os.set_inheritable(descriptor, False)
            if fd is not None:
                os.close(fd)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        self.fail(problem)

    def fail(self, text):
        """The code goes on that ran before."""
        self.core.log.error("the upgrade to %s failed: %s", self.path, text)
        self.on_done({"error": RpcError(
            INTERNAL_ERROR, "the daemon goes on with the code it has: " + text).as_object()})
        self.core.upgrade_over()

    def succeed(self):
        """Called in the new code."""
        core = self.core
        core.upgrades, core.source = core.upgrades + 1, self.path
        core.log.info("mcpx %s goes on, with the code of %s; it took %.2f s", __version__, self.path,
                      time.monotonic() - self.started)
        forget_code(core.paths.code, (self.copy, self.previous))
        core.api.emit("upgrade", {"version": __version__, "upgrades": core.upgrades})
        core.upgrade_over()
        self.on_done({"result": {"upgraded": __version__, "pid": os.getpid(), "file": self.path}})


def running_copy(directory, started_from):
    """Return a file with the code that runs now, to go back to; None where it cannot be had any more.

    `started_from` is the digest that the file had when this daemon was started from it.
    """
    path = os.path.realpath(__file__)
    if os.path.dirname(path) == os.path.realpath(directory):
        return path
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    return keep_code(directory, data) if hashlib.sha256(data).digest() == started_from else None


def code_command(path, *arguments):
    """Return the command line that runs a copy of this file from cached byte code."""
    return [sys.executable, "-I", "-S", "-c", boot_code(), path] + list(arguments)


def exec_daemon(path, config, fd, previous, failed=None):
    """Become the daemon of the code at `path`, with the snapshot in `fd`. Raises OSError."""
    arguments = ["daemon", "--config", config, "--resume-fd", str(fd)]
    arguments += ["--previous", previous] if previous else []
    arguments += ["--failed", failed] if failed else []
    command = code_command(path, *arguments)
    os.execv(command[0], command)


def check_snapshot(fd):
    """Prove that this code can take over: restore a copy of the state, and look at all of it.

    Returns the exit status.
    """
    core = SnapshotReader(read_all(fd), dry=True).load()
    json.dumps(Control(core, print).op_status({}, {}))
    sys.stdout.write("ok %s\n" % __version__)
    return 0


def resume_daemon(config, fd, previous, failed):
    """Take over from other code in this process. Returns the Daemon; does not return where that fails."""
    descriptors = []
    try:
        reader = SnapshotReader(read_all(fd))
        descriptors = reader.descriptors
        core = reader.load()
        reader.resume()
    except BaseException as error:
        paths = DaemonPaths(config, os.environ)
        Log(RotatedFile(paths.log, 1 << 30, 1)).error("mcpx %s could not take over: %s", __version__,
                                                      traceback.format_exc())
        if previous is None or failed:
            raise
        for descriptor in descriptors + [fd]:
            os.set_inheritable(descriptor, True)
        signal.alarm(EXEC_WAIT_S)
        exec_daemon(previous, config, fd, None, "%s: %s" % (type(error).__name__, error))
    os.close(fd)
    signal.alarm(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [getattr(signal, name) for name in UPGRADE_SIGNALS])
    upgrade = core.upgrade
    core.loop.soon(lambda: upgrade.fail(failed) if failed else upgrade.succeed())
    return core


def listen_addresses(text, auth):
    """Return [(family, address)] of `http.listen`. Raises UsageError for what must not be.

    `localhost` means both loopback families. Without a token only loopback is allowed.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError("takes an address and a port such as 127.0.0.1:7337, not %s" % text)
    host = host.strip("[]")
    pairs = {"localhost": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]}.get(
        host, [(socket.AF_INET6 if ":" in host else socket.AF_INET, host)])
    for family, address in pairs:
        try:
            socket.inet_pton(family, address)
        except OSError:
            raise UsageError("%s is no address; write one in digits, or localhost" % host)
        if auth == "none" and not (address.startswith("127.") or address == "::1"):
            raise UsageError("http.auth none is refused on %s, which others can reach" % address)
    return [(family, (address, int(port))) for family, address in pairs]


# Between two tries to listen on an address that is taken.
TCP_RETRY_S = 5.0
# So long after the last one has gone, nobody is likely to come at this very moment.
TIDY_S = 1.0
# How long an ended daemon waits for hosts to take their last answers.
LEAVE_WAIT_S = 2.0


def unknown_servers_text(unknown, config):
    """Return what to say where servers are named that are not configured, or disabled, or where none is named."""
    names = sorted(name for name, server in config.servers.items() if not server.disabled)
    disabled = [name for name in unknown if name in config.servers]
    missing = [name for name in unknown if name not in config.servers]
    problems = ["server %s is disabled in %s" % (", ".join(disabled), config.path)] if disabled else []
    problems += ["there is no server %s in %s" % (", ".join(missing), config.path)] if missing else []
    return "%s; configured are: %s" % (" and ".join(problems) or "name a server", ", ".join(names) or "none")


def warm_problem(config, server):
    """Return why processes of a server cannot be kept warm, or None.

    They are started before it is known for whom, so nothing may depend on the caller.
    """
    text = " ".join([server.command] + server.args + list(server.env.values()))
    if re.search(r"\{(key|id|session|cwd|tmpdir|port)\}", text):
        return "its entry has placeholders, which depend on the caller"
    if not server.cwd:
        return "set its cwd, so that it does not depend on the caller"
    if "inheritEnv" not in server.own:
        return "set inheritEnv (an empty list is fine), so that its environment does not depend on the caller"
    return None


class Control:
    """One control request of a command: an operation, its arguments, one answer."""

    def __init__(self, core, respond):
        self.core, self.reply = core, respond

    def run(self, operation, hello):
        """Do what was asked and answer, at once or when it is done."""
        method = getattr(self, "op_%s" % operation, None) if isinstance(operation, str) else None
        try:
            if method is None:
                raise RpcError(METHOD_NOT_FOUND, "this daemon (mcpx %s) has no operation %s" % (__version__, operation))
            result = method(hello.get("args") or {}, hello)
            if result is not None:
                self.reply({"result": result})
        except RpcError as error:
            self.reply({"error": error.as_object()})

    def op_status(self, _args, _hello):
        """Everything that is going on."""
        core, pool, now = self.core, self.core.pool, time.monotonic()
        return {
            "daemon": {"pid": os.getpid(), "version": __version__, "config": core.paths.config,
                       "configError": core._config_error, "socket": core.paths.socket,
                       "started": core.started_wall, "uptime": round(now - core.started_at, 3),
                       "memory": memory_bytes(os.getpid()), "state": "stopping" if core.stopping else "running",
                       "incarnation": core.incarnation, "upgrades": core.upgrades},
            "instances": [self._instance(i) for i in pool.instances.values() if i.slot is not None],
            "warm": [{"id": i.id, "server": i.definition.server.name, "pid": i.pid}
                     for ready in pool.warm.values() for i in ready],
            "hosts": [self._host(host) for host in core.hosts],
            "servers": [self._server(server) for server in core.config.servers.values()],
            "degradations": [{"server": server, "scope": scope, "reason": reason, "count": count}
                             for (server, scope, reason), count in core.degraded.items()],
            "questions": [describe_question(q) for q in core.questions.by_id.values()],
            "tables": self._tables(),
            "counters": dict(pool.counters)}

    def _instance(self, instance):
        slot, now = instance.slot, time.monotonic()
        oldest = min((call.sent_at for call in instance.upstream.in_flight.values()), default=None)
        return {"id": instance.id, "server": slot.server.name, "scope": slot.scope, "key": slot.key.text,
                "why": slot.key.degraded or "scope %s" % slot.scope, "state": instance.state,
                "unresponsive": instance.unresponsive, "pid": instance.pid, "memory": memory_bytes(instance.pid),
                "uptime": round(now - instance.started_at, 3), "calls": instance.calls, "inFlight": instance.leases,
                "oldestInFlight": round(now - oldest, 3) if oldest is not None else None,
                "waiting": slot.waiting(), "hosts": len(slot.hosts),
                "restarts": self.core.pool.deaths[slot.server.name],
                "revision": instance.upstream.revision, "lastError": slot.last_error, "noise": instance.noise,
                "subscriptions": len(slot.subscriptions), "tasks": len(slot.tasks)}

    def _host(self, host):
        return {"id": host.id, "pid": host.identity.pid, "source": host.identity.source,
                "session": host.identity.session, "parent": host.identity.parent, "cwd": host.identity.place.cwd,
                "servers": host.surface.names, "client": host.info.get("name"), "revision": host.revision,
                "version": host.version, "inFlight": len(host.calls), "connected": host.connected_wall}

    def _server(self, server):
        core = self.core
        slots = core.pool.by_server.get(server.name, ())
        backoffs = [b for (name, _), b in core.pool.backoffs.items() if name == server.name]
        next_at = max((b.next_at for b in backoffs), default=0) - time.monotonic()
        return {"name": server.name, "scope": core.config.get("scope", server),
                "sharing": core.config.get("sharing", server), "disabled": server.disabled,
                "instances": sum(1 for slot in slots if slot.instance),
                "restarts": core.pool.deaths[server.name],
                "lastError": server.broken or core.pool.last_errors.get(server.name),
                "nextTry": round(next_at, 3) if next_at > 0 else None,
                "waiting": sum(slot.waiting() for slot in slots)}

    def _tables(self):
        core, pool = self.core, self.core.pool
        upstreams = [i.upstream for i in pool.instances.values() if i.upstream is not None]
        return {"calls": sum(len(host.calls) for host in core.hosts | core.requests),
                "requests": len(core.requests), "held": len(core.held.by_id), "sessions": len(core.http.sessions),
                "connections": core.http.remote(),
                "waiting": sum(slot.waiting() for slot in pool.slots.values()),
                "leases": sum(i.leases for i in pool.instances.values()),
                "questions": len(core.questions.by_id),
                "tokens": sum(len(u.in_flight) for u in upstreams), "hosts": len(core.hosts),
                "instances": len(pool.instances), "slots": len(pool.slots),
                "tasks": len(core.tasks.by_id) + len(core.modern_tasks.by_id)}

    def op_why(self, args, hello):
        """For this caller: who it is, and which instance of a server it would reach."""
        core = self.core
        server = core.server(args.get("server"))
        scope = core.config.get("scope", server)
        own, env = core.caller_of(hello.get("pid"), hello)
        identity = own.with_meta({}, (), core.new_id())
        key = scope_key(scope, identity)
        definition = Definition(core.config, server, identity, key, env, core.secret)
        slot = core.pool.slots.get((server.name, definition.digest, key.text))
        others = [s for s in core.pool.by_server.get(server.name, ()) if s.key.text == key.text
                  and s.definition.digest != definition.digest]
        evidence = ["session %s: %s" % (identity.session, "named by the caller" if identity.named
                                        else "made for this connection"),
                    "directory %s: %s" % (identity.place.cwd, identity.place.reason or "work tree %s, repository %s"
                                          % (identity.place.worktree, identity.place.repo)),
                    "process %s, started %s: from the socket's credentials" % (identity.pid, identity.started)]
        if others:
            evidence.append("%d other instance(s) have the same key but another definition (command, arguments, "
                            "environment or directory differ)" % len(others))
        if identity.parent:
            evidence.append("parent session %s: named by the caller" % identity.parent)
        program = shutil.which(definition.argv[0], path=definition.env.get("PATH") or os.defpath)
        running = slot.instance if slot is not None else None
        return {"server": server.name, "scope": scope, "identity": identity.as_dict(), "evidence": evidence,
                "key": key.text, "degraded": key.degraded, "definition": definition.digest,
                "program": running.child.program if running is not None else program, "callersProgram": program,
                "instance": self._instance(running) if running is not None else None}

    def op_servers(self, _args, _hello):
        """The configured servers."""
        return {"servers": [self._server(server) for server in self.core.config.servers.values()]}

    def _targets(self, name):
        pool = self.core.pool
        if not isinstance(name, str):
            raise RpcError(INVALID_PARAMS, "name takes the name of a server or an instance")
        if name in pool.instances:
            return [pool.instances[name]]
        if name in self.core.config.servers or name in pool.by_server:
            return [i for i in pool.instances.values() if i.definition.server.name == name]
        raise RpcError(INVALID_PARAMS, "there is no server or instance %s; `mcpx status` lists them" % name)

    def op_stop(self, args, _hello):
        """End an instance, a server's instances, or the daemon and all it runs."""
        name, core = args.get("name"), self.core
        if name is None:
            pids = [i.pid for i in core.pool.instances.values()]
            forced = []

            def stopped():
                self.reply({"result": {"stopped": "daemon", "pid": os.getpid(), "children": pids, "killed": forced}})
            for instance in core.pool.instances.values():
                self._note_killed(instance, forced)
            core.shutdown("mcpx stop", stopped)
            return None
        self._end_and_wait(self._targets(name), "mcpx stop", "stopped")
        return None

    def op_restart(self, args, _hello):
        """End an instance or a server's instances, and start again those whose hosts are there."""
        targets = self._targets(args.get("name"))
        slots = [i.slot for i in targets if i.slot is not None and i.slot.hosts]
        pool = self.core.pool

        def start_again():
            for slot in slots:
                if slot.hosts:
                    pool.prepare(pool.keep_slot(slot), lambda error: None)
        self._end_and_wait(targets, "mcpx restart", "restarted", start_again)

    def _note_killed(self, instance, forced):
        gone = instance.child.on_gone

        def on_gone():
            if instance.child.hardest == "SIGKILL":
                forced.append({"server": instance.definition.server.name, "id": instance.id, "pid": instance.pid})
            gone()
        instance.child.on_gone = on_gone

    def _end_and_wait(self, targets, reason, word, then=None):
        forced, left = [], set(targets)
        pids = [instance.pid for instance in targets]

        def check():
            if then is not None:
                then()
            self.reply({"result": {word: pids, "killed": forced}})
        for instance in targets:
            self._note_killed(instance, forced)
            gone = instance.child.on_gone

            def on_gone(instance=instance, gone=gone):
                gone()
                left.discard(instance)
                if not left:
                    check()
            instance.child.on_gone = on_gone
            self.core.pool.stop(instance, reason)
        if not targets:
            check()

    def op_reload(self, _args, _hello):
        """Read the configuration again."""
        error = self.core.check_config(force=True)
        if error:
            raise RpcError(INVALID_PARAMS, "the configuration is not used, the last good one stays: %s" % error)
        return {"reloaded": self.core.paths.config, "servers": sorted(self.core.config.servers)}

    def op_upgrade(self, args, hello):
        """Go on with the code of a file; for commands of the same user alone."""
        if "pid" not in hello:
            raise RpcError(METHOD_NOT_FOUND, "not here")
        path = args.get("file")
        if not isinstance(path, str) or not os.path.isabs(path):
            raise RpcError(INVALID_PARAMS, "file takes an absolute path")
        self.core.begin_upgrade(path, self.reply)

    def op_token(self, _args, hello):
        """The token of the TCP door, for a command of the same user."""
        if "pid" not in hello:
            raise RpcError(METHOD_NOT_FOUND, "not here")
        return {"token": self.core.token()}

    def op_settings(self, _args, _hello):
        """The settings in force."""
        return {"settings": settings_in_force(self.core.config)}


def settings_in_force(config):
    """Return one row per setting: value in force, default, where it was said, meaning."""
    return [{"name": row.name, "value": config.get(row.name), "default": row.default,
             "from": config.source(row.name), "perServer": row.per_server, "hot": row.hot,
             "meaning": row.meaning, "servers": {name: server.own[row.name] for name, server in
                                                 config.servers.items() if row.name in server.own}}
            for row in SETTINGS.values()]


def sd_notify(env, text):
    """Tell systemd about our state, if it started us."""
    address = env.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            try:
                notifier.sendto(text.encode(), "\0" + address[1:] if address[0] == "@" else address)
            except OSError:
                return


def run_daemon(config_file, env, started_by_shim=False, ready_fd=None):
    """Be the daemon of a configuration until it is told to end. Returns the exit status."""
    paths = DaemonPaths(config_file, env)
    lock = None

    def ready(text):
        if ready_fd is not None:
            try:
                os.write(ready_fd, text.encode("utf-8", "replace"))
            except OSError:
                return                   # the shim that started us has gone; others will come
            finally:
                os.close(ready_fd)
    try:
        lock = take_daemon_lock(paths, env, started_by_shim)
        if lock is None:
            ready("ok another daemon runs\n")
            return 0
        log = Log(RotatedFile(paths.log, parse_setting(SETTINGS["log.maxBytes"], SETTINGS["log.maxBytes"].default),
                              SETTINGS["log.files"].default), echo=not started_by_shim)
        daemon = Daemon(config_file, env, log)
        daemon.idle_exit, daemon.lock_fd = started_by_shim, lock
        daemon.start()
    except (UsageError, OSError) as error:
        ready("failed %s\n" % error)
        if not started_by_shim:
            raise error if isinstance(error, UsageError) else UsageError(str(error))
        return 2
    ready("ok\n")
    # What reports mistakes must be there when nothing can be opened any more.
    getattr(traceback, "format_exc")
    daemon.loop.call_later(IMPORT_LATER_S, import_all)
    sd_notify(env, "READY=1")
    daemon._maybe_idle_exit()
    return turn_until_stopped(daemon)


# A daemon imports what it has not needed yet when its first callers are served.
IMPORT_LATER_S = 0.3


def import_all():
    """Import every module that may be needed later: out of descriptors, nothing can be imported any more."""
    for value in list(globals().values()):
        if isinstance(value, _Later):
            getattr(value, "__name__")
    for name in ("base64", "http.server", "urllib.parse", "encodings.idna", "traceback"):
        __import__(name)


def turn_until_stopped(daemon):
    """Run the loop of a daemon to its end. Returns the exit status."""
    try:
        daemon.loop.run()
    except BaseException:
        # Nobody reads the stderr of a detached process.
        daemon.log.error("mcpx ends by a mistake of its own, please report it: %s", traceback.format_exc())
        raise
    sd_notify(daemon.env, "STOPPING=1")
    os.close(daemon.lock_fd)
    return 0


def take_daemon_lock(paths, env, started_by_shim):
    """Return the descriptor of the held lock, or None when a shim's daemon is not needed.

    The file is never removed. A service manager's daemon waits for a shim's to end: failing
    would use up the manager's restart limit.
    """
    os.makedirs(paths.state, 0o700, exist_ok=True)
    fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    managed = "INVOCATION_ID" in env or "XPC_SERVICE_NAME" in env
    said, tries = False, 0
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError:
            if not started_by_shim and not managed:
                raise UsageError("a daemon for %s runs already; see `mcpx status`, or end it with `mcpx stop`"
                                 % paths.config)
            if started_by_shim and (tries > 400 or _is_listening(paths)):
                os.close(fd)
                return None
        if managed and not said:
            os.write(2, b"mcpx: another daemon of this configuration runs; waiting for it to end\n")
            said = True
        tries += 1
        # An ending daemon holds the lock until its last child has gone.
        time.sleep(0.05)


def _is_listening(paths):
    for path in (paths.recorded_socket(), paths.socket):
        if path:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                    return True
                except OSError:
                    continue
    return False


# ---------------------------------------------------------------------------
# Shim: what must survive the daemon
#
# What a host launches. Relays whole lines, keeps each request until it is answered, finds or
# starts a daemon, and ends with its host. Loads C modules only and parses nothing that it
# can pass on: it runs once per server and host. Never touches the sections above from
# "upstream" on, except to take the daemon's role when none can be had.
# ---------------------------------------------------------------------------

# Used until the daemon has told its settings.
SHIM_KEEP_BYTES = 64 << 20
SHIM_DRAIN_S = 10.0
SHIM_CLOSE_S = 1.5
SHIM_LINE_BYTES = 128 << 20
# A daemon that accepts and says nothing for this long is none.
HELLO_WAIT_S = 5.0
# A start takes 0.1 to 0.3 s; a machine under load ten times that.
START_WAIT_S = 15.0
# Requests wait this long for a daemon to come back before they get an error.
PATIENCE_S = 5.0
# A link that lasted shorter is taken up again with a pause.
UP_FOR_GOOD_S = 0.5
# What accepts and hangs up so often without a welcome is no daemon that is starting or ending.
MAX_HANG_UPS = 40
# As <poll.h> has them on Linux and macOS: for the loop of the shim, which runs twice for each call.
POLLIN, POLLOUT, POLLERR, POLLHUP, POLLNVAL = 1, 4, 8, 16, 32
# Stop reading from a side when this much waits for the other.
SHIM_HIGH_WATER = 4 << 20


class HostWriter:
    """Writes to a descriptor of the host without ever blocking and without changing its flags.

    The flags belong to the open file, which the host may share. Sockets take a flag per
    call; a pipe is opened once more where that can be, else it takes PIPE_BUF bytes when it
    polls writable; files, terminals and /dev/null are written as they are.
    """

    def __init__(self, fd):
        self.fd = fd
        self.pending = []
        self.pending_bytes = 0
        self.broken = False
        mode = os.fstat(fd).st_mode & 0o170000
        self._socket = self._own_fd = None
        self._is_pipe = mode == 0o010000
        if self._is_pipe:
            try:
                # The same pipe under an open file of our own, whose flags are ours alone.
                self._own_fd = os.open("/proc/self/fd/%d" % fd, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                self._own_fd = None      # not on this system, or not ours to open
        if mode == 0o140000:
            import _socket
            self._socket = _socket.socket(fileno=os.dup(fd))
            self._flag = _socket.MSG_DONTWAIT

    def put(self, data):
        """Queue bytes; `flush` writes them."""
        self.pending.append(data)
        self.pending_bytes += len(data)

    def flush(self):
        """Write what can be written now; returns whether all is written."""
        while self.pending and not self.broken:
            try:
                written = self._write(self.pending[:WRITE_PIECES])
            except BlockingIOError:
                return False
            except OSError:
                self.broken = True
                self.pending, self.pending_bytes = [], 0
                break
            self.pending_bytes -= written
            whole = 0
            while whole < len(self.pending) and written >= len(self.pending[whole]):
                written -= len(self.pending[whole])
                whole += 1
            del self.pending[:whole]
            if written:
                self.pending[0] = part_of(self.pending[0], written)
                enlarge_pipe(self.fd)
            if not (written or whole):
                return False
        return True

    def _write(self, pieces):
        if self._socket is not None:
            return self._socket.sendmsg(pieces, (), self._flag)
        if self._own_fd is not None or not self._is_pipe:
            fd = self.fd if self._own_fd is None else self._own_fd
            return os.writev(fd, pieces) if len(pieces) > 1 else os.write(fd, pieces[0])
        data = pieces[0]
        poller = select.poll()
        poller.register(self.fd, select.POLLOUT)
        written = 0
        while written < len(data):
            if not any(event & select.POLLOUT for _, event in poller.poll(0)):
                break
            written += os.write(self.fd, data[written:written + PIPE_BUF])
        return written


class Shim:
    """One host's stdin and stdout on one side, the daemon's socket on the other.

    State "down" (looking for a daemon), "starting" (one is being started), "hello" (it has
    been greeted), "up", "asleep" (it was told to end: only a new request starts another).
    """

    def __init__(self, names, config_file, env):
        self.names, self.config_file, self.env = names, config_file, env
        self.state = "down"
        self.socket = None
        self.writer = HostWriter(1)
        # Lines of the host by running number: [line, losses].
        self.kept = {}
        self.kept_bytes = 0
        self.first_seq = 1               # the running number that is line 1 on this link
        self.next_seq = 1
        self.unsent = []                 # (seq, line) not yet handed to the socket whole
        self.unsent_offset = 0
        self.hello = b""                 # what is left to send of it; lines wait for the welcome
        self.partial, self.partial_bytes = [], 0      # the unfinished line of the host
        self.skipping = False            # the rest of a line that was cut off
        self.incoming = []               # the unfinished line of the daemon
        self.session_state = None        # what the daemon wants the next one to know, as JSON
        self.was_up = False
        self.host_ended = False
        self.drain_until = None
        self.down_since = time.monotonic()
        self.retry_at, self.retry_delay = 0.0, 0.02
        self.start_after = 0.0
        self.ready_fd = self.starter_lock = None
        self.ready_text = b""
        self.deadline = None
        self.incarnation = ""            # of the daemon that has said welcome last
        self.token = os.urandom(8).hex()     # by which a daemon knows what it is told of this shim's calls
        self.up_since = 0.0
        self.hang_ups = 0                # links since the last welcome that ended without one
        self.problem = "no daemon answers"
        self.keep_limit, self.line_limit = SHIM_KEEP_BYTES, SHIM_LINE_BYTES
        self.drain_s, self.close_s = SHIM_DRAIN_S, SHIM_CLOSE_S
        self.has_answered = False        # the host has been given an answer
        self.poller = self.polled = None     # what was waited for at the last turn
        self.parent = os.getppid()

    # -- the loop ---------------------------------------------------------------

    def run(self):
        """Relay until the host has ended. Returns the exit status, or None to go on standalone."""
        while True:
            if self.state == "down":
                outcome = self._look_for_daemon()
                if outcome is not None:
                    return outcome[0]
            self._poll()
            if self.state == "refused":
                return None
            if self.writer.broken:
                return 0
            if self.host_ended and self._drained():
                self.writer.flush()
                return 0
            outcome = self._check_deadlines()
            if outcome is not None:
                return outcome[0]

    def _poll(self):
        reads_host = not self.host_ended and (not self.unsent or self._may_read_host())
        events = 0
        if self.socket is not None:
            events = POLLIN if self.writer.pending_bytes < SHIM_HIGH_WATER else 0
            if self.hello or (self.unsent and self.state == "up"):
                events |= POLLOUT
        wanted = (reads_host, bool(self.writer.pending), self.socket, events, self.ready_fd)
        if wanted != self.polled:
            # Mostly it is what it was at the last turn.
            self.polled, self.poller = wanted, select.poll()
            self.poller.register(1, POLLOUT if self.writer.pending else 0)
            if reads_host:
                self.poller.register(0, POLLIN)
            if self.socket is not None:
                self.poller.register(self.socket.fileno(), events)
            if self.ready_fd is not None:
                self.poller.register(self.ready_fd, POLLIN)
        timeout = None
        if self.state != "up" or self.drain_until is not None or self.deadline is not None:
            timeout = self._timeout()
        for fd, event in self.poller.poll(None if timeout is None else max(0, int(timeout * 1000) + 1)):
            if fd == 0:
                self._read_host()
            elif fd == 1:
                if event & (POLLERR | POLLNVAL) or (event & POLLHUP and not event & POLLOUT):
                    self.writer.broken = True
                else:
                    self.writer.flush()
            elif fd == self.ready_fd:
                self._read_ready()
            elif self.socket is not None and fd == self.socket.fileno():
                if event & POLLOUT:
                    self._send_hello() if self.hello else self._send()
                if event & (POLLIN | POLLHUP | POLLERR):
                    self._read_daemon()

    def _may_read_host(self):
        """Stop reading the host when too much waits for the daemon."""
        waiting = sum(len(line) for _, line in self.unsent) if len(self.unsent) < 64 else SHIM_HIGH_WATER
        return waiting < SHIM_HIGH_WATER or (self.state != "up" and self.kept_bytes < self.keep_limit)

    def _timeout(self):
        times = [at for at in (self.deadline, self.drain_until) if at is not None]
        if self.drain_until is not None:
            times.append(time.monotonic() + 0.5)      # to see whether the host still lives
        if self.state == "down":
            times.append(self.retry_at)
        if self.state in ("down", "starting") and self.kept and self.was_up:
            times.append(self.down_since + PATIENCE_S)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _check_deadlines(self):
        now = time.monotonic()
        if self.drain_until is not None and (now >= self.drain_until or os.getppid() != self.parent):
            return (0,)
        if self.deadline is not None and now >= self.deadline:
            return self._no_daemon("the daemon does not answer" if self.state == "hello" else
                                   "the daemon did not come up in %gs" % START_WAIT_S)
        # Not in a hello: it has its own deadline, and the daemon expects what it says is repeated.
        if self.was_up and self.kept and self.state in ("down", "starting") and (
                now - self.down_since > PATIENCE_S):
            self._answer_with_errors()
        return None

    def _drained(self):
        """After the host's stdin ended: is there nothing left to answer, or nobody to answer it?"""
        return not self.kept and not self.unsent and not self.writer.pending

    # -- the host's side ----------------------------------------------------------

    def _read_host(self):
        try:
            data = os.read(0, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._host_has_ended()
            return
        if self.state == "up" and not (self.unsent or self.partial or self.skipping) and (
                data.find(b"\n") == len(data) - 1):
            self._take_line(data)        # one whole line, as hosts mostly write it
            self._send()
            return
        if self.state == "asleep":
            self.state, self.down_since, self.retry_at = "down", time.monotonic(), 0.0
        end = data.rfind(b"\n")
        if end < 0:
            self._keep_partial(data)
            return
        first, start = data.find(b"\n"), 0
        if self.partial or self.skipping:
            self._end_partial(data[:first + 1])
            start = first + 1
        while start <= end:
            stop = data.index(b"\n", start) + 1
            self._take_line(data[start:stop])
            start = stop
        if end + 1 < len(data):
            self._keep_partial(data[end + 1:])
        if self.state == "up":
            self._send()

    def _keep_partial(self, data):
        if self.skipping:
            return
        self.partial.append(data)
        self.partial_bytes += len(data)
        if self.partial_bytes > self.line_limit:
            # One byte over the limit is enough for the daemon to refuse the line, in the words of the host's revision.
            self._take_line(b"".join(self.partial)[:self.line_limit + 1] + b"\n")
            self.partial, self.partial_bytes, self.skipping = [], 0, True
            self._send_if_up()

    def _send_if_up(self):
        if self.state == "up":
            self._send()

    def _end_partial(self, data):
        if self.skipping:
            self.skipping = False
            return
        self.partial.append(data)
        line = self.partial[0] if len(self.partial) == 1 else b"".join(self.partial)
        self.partial, self.partial_bytes = [], 0
        self._take_line(line)

    def _take_line(self, line):
        seq = self.next_seq
        self.next_seq += 1
        self.kept[seq] = [line, 0]
        self.kept_bytes += len(line)
        self.unsent.append((seq, line))
        if self.kept_bytes > self.keep_limit and self.state == "up":
            self._shorten_kept()

    def _shorten_kept(self):
        """Past the bound, large requests are kept as a stub: enough to say that they were lost."""
        unsent = {seq for seq, _ in self.unsent}
        for seq, entry in sorted(self.kept.items(), key=lambda item: -len(item[1][0])):
            if self.kept_bytes <= self.keep_limit // 2:
                return
            if seq in unsent or len(entry[0]) < 4096:
                continue
            stubs = [{"jsonrpc": "2.0", "id": request["id"], "method": "tools/call", "params": {"name": ""}}
                     for request in self._requests_in(entry[0])]
            text = to_json(stubs if len(stubs) > 1 else stubs[0]) if stubs else ""
            line = text.encode("ascii") + b"\n"
            self.kept_bytes += len(line) - len(entry[0])
            # No daemon may take it for a request that can be repeated.
            entry[:2] = line, MAX_LOSSES

    def _host_has_ended(self):
        self.host_ended = True
        if self.partial:
            # A last line without its end: half a request is none, a whole one counts.
            self._take_line(b"".join(self.partial) + b"\n")
            self.partial = []
            self._send_if_up()
        # A live host has read answers before it closes; a script has written all it has to say.
        self.drain_until = time.monotonic() + (self.close_s if self.has_answered else self.drain_s)
        if os.getppid() != self.parent:
            self.writer.broken = True    # nobody is left to read an answer
        if self.state == "asleep":
            self._forget_all()

    # -- the daemon's side ----------------------------------------------------------

    def _send(self):
        """Hand lines to the socket; a line counts as sent once its last byte is."""
        if len(self.unsent) == 1 and not self.unsent_offset:
            seq, line = self.unsent[0]
            try:
                sent = self.socket.send(line)
            except OSError:              # full, or gone: see below
                return
            if sent == len(line):
                self.unsent.clear()
                if seq in self.kept:
                    self.kept[seq].append(True)
            else:
                self.unsent_offset = sent
            return
        while self.unsent:
            batch, size = [], 0
            for _, line in self.unsent:
                if batch and size + len(line) > READ_BYTES:
                    break
                batch.append(line)
                size += len(line)
            data = batch[0] if len(batch) == 1 else b"".join(batch)
            if self.unsent_offset:
                data = memoryview(data)[self.unsent_offset:]
            try:
                sent = self.socket.send(data)
            except BlockingIOError:
                return
            except OSError:
                # Answers may still lie in the receive buffer: the loss is noticed by reading.
                return
            sent += self.unsent_offset
            while self.unsent and sent >= len(self.unsent[0][1]):
                seq, line = self.unsent.pop(0)
                sent -= len(line)
                if seq in self.kept:
                    self.kept[seq].append(True)       # handed over whole
            self.unsent_offset = sent
            if sent:
                return

    def _read_daemon(self):
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost_daemon()
            return
        if b"\n" not in data:
            self.incoming.append(data)
            return
        if self.incoming:
            data = self._end_incoming(data)
        start = 0
        while start < len(data):
            end = data.find(b"\n", start) + 1
            if not end:
                break
            try:
                self._on_daemon_line(data[start:end] if start or end < len(data) else data)
            except (ValueError, IndexError):
                self._not_mcpx()
            start = end
            if self.socket is None:
                return
        if start < len(data):
            self.incoming = [data[start:]]
        self.writer.flush()

    def _end_incoming(self, data):
        """Pass on the line that came in pieces; returns what comes after it, or all of it to be read as usual.

        A large answer goes to the host in the pieces in which it came.
        """
        pieces, self.incoming = self.incoming + [data], []
        end, first = data.find(b"\n") + 1, pieces[0]
        if first[:1] not in (b"a", b"m") or first.find(b" ", 0, 24) < 0 or not first[1:first.find(b" ")].isdigit():
            return b"".join(pieces)
        pieces[-1] = data[:end]
        self._on_daemon_line(first)
        for piece in pieces[1:]:
            self.writer.put(piece)
        return data[end:]

    def _on_daemon_line(self, line):
        tag = line[:1]
        if tag == b"a":
            space = line.index(b" ")
            self._forget(int(line[1:space]))
            self.has_answered = True
            self.writer.put(line[space + 1:])
        elif tag == b"m":
            self.writer.put(line[2:])
        elif tag == b"d":
            self._forget(int(line[1:]))
        elif tag == b"s":
            self.session_state = line[2:].decode("utf-8")
        elif tag == b"c":
            self._on_control(line[2:].decode("utf-8", "replace").rstrip("\n"))
        else:
            self._not_mcpx()

    def _not_mcpx(self):
        self.problem = "what listens on the daemon's socket is not mcpx"
        self.hang_ups = MAX_HANG_UPS
        self._lost_daemon()

    def _forget(self, number):
        entry = self.kept.pop(number + self.first_seq - 1, None)
        if entry is not None:
            self.kept_bytes -= len(entry[0])

    def _forget_all(self):
        self.kept.clear()
        self.unsent, self.unsent_offset, self.kept_bytes = [], 0, 0

    def _on_control(self, text):
        word, _, rest = text.partition(" ")
        if word == "welcome":
            parts = rest.split()
            self.keep_limit, self.line_limit = int(parts[1]), int(parts[4])
            self.drain_s, self.close_s = float(parts[2]), float(parts[3])
            self.incarnation = parts[5] if len(parts) > 5 else ""
            self.state, self.was_up, self.deadline, self.hang_ups = "up", True, None, 0
            self.up_since = time.monotonic()
            self._release_starter()
            self._send()
        elif word == "bye":
            # Lines that were not handed over yet are for the next daemon.
            self.state = "leaving"
        elif word == "fail":
            self.problem = rest
            self.state = "failed"

    def _lost_daemon(self):
        """The link has ended, read to its end: what is unanswered goes to the next daemon."""
        asked_to_leave, failed = self.state == "leaving", self.state == "failed"
        if self.socket is not None:
            self.socket.close()
        self.socket, self.deadline = None, None
        self.incoming = []
        self.hello = b""
        for entry in self.kept.values():
            if len(entry) > 2:           # it was handed over whole
                entry[1] += 1
                del entry[2]
        self._requeue()
        now = time.monotonic()
        if self.state == "hello":
            # Whatever it is, it has not said welcome: slower each time.
            self.hang_ups += 1
            if self.hang_ups > 5:
                self.session_state = None    # perhaps it is that which it cannot read
        elif now - self.up_since < UP_FOR_GOOD_S:
            self.down_since = now            # it was there for a moment only: slower each time as well
        else:
            self.down_since, self.retry_at, self.retry_delay = now, now, 0.02
        self.state = "down"
        if failed:
            self.retry_at = self.start_after = now + 2.0
            self.state = "down" if self.was_up else "refused"
        elif asked_to_leave and not self.kept:
            self.state = "asleep"

    def _requeue(self):
        """Number the unanswered lines anew, in their order: the next link counts from 1."""
        entries = [self.kept[seq] for seq in sorted(self.kept)]
        self.first_seq = self.next_seq
        self.kept, self.unsent, self.unsent_offset = {}, [], 0
        for entry in entries:
            self.kept[self.next_seq] = entry
            self.unsent.append((self.next_seq, entry[0]))
            self.next_seq += 1

    # -- finding or starting a daemon ----------------------------------------------------

    def _look_for_daemon(self):
        now = time.monotonic()
        if now < self.retry_at:
            return None
        self.retry_delay = min(self.retry_delay * 1.5, 1.0 if self.was_up else 0.1)
        self.retry_at = now + self.retry_delay
        if self.hang_ups >= MAX_HANG_UPS and not self.was_up:
            return self._no_daemon(self.problem)
        if self._connect():
            return None
        if self.starter_lock is None and now >= self.start_after and not self._start():
            return None                  # somebody else is starting one
        if self.state == "down" and not self.was_up and now - self.down_since > START_WAIT_S:
            return self._no_daemon(self.problem)
        return None

    def _connect(self):
        import _socket
        paths = [socket_path(self.config_file, self.env)]
        for attempt in range(2):
            for path in paths:
                if not path or not self._safe(path):
                    continue
                connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
                try:
                    connection.setblocking(False)
                    connection.connect(path)
                except OSError as error:
                    self.problem = "%s: %s" % (path, error.strerror)
                    connection.close()
                    continue
                self.socket = connection
                self._greet()
                return True
            if attempt == 0:
                # Another launcher of this user may have another runtime directory.
                record = DaemonPaths(self.config_file, self.env)
                paths = [record.recorded_socket()] if os.path.exists(record.record) else []
        return False

    def _safe(self, path):
        """Never talk to a socket in a directory that somebody else owns."""
        try:
            info = os.lstat(os.path.dirname(path))
        except OSError:
            return False
        return info.st_uid == os.getuid() and not info.st_mode & 0o022

    def _greet(self):
        self.state, self.deadline = "hello", time.monotonic() + HELLO_WAIT_S
        hello = [("mcpx", LINK_VERSION), ("role", "serve"), ("version", __version__), ("names", self.names)]
        hello += [("file", os.path.realpath(__file__)), ("token", self.token),
                  ("incarnation", self.incarnation)]
        hello += caller_facts(self.env).items()
        hello.append(("resent", [entry[1] for entry in self.kept.values()]))
        text = ",".join("%s:%s" % (to_json(name), to_json(value)) for name, value in hello)
        if self.session_state is not None:
            text += ',"state":' + self.session_state.strip()
        self.hello = ("{%s}\n" % text).encode("utf-8", "surrogatepass")
        self._send_hello()

    def _send_hello(self):
        """Only the hello before the welcome: an unknown listener must not see requests."""
        try:
            self.hello = self.hello[self.socket.send(self.hello):]
        except BlockingIOError:
            return                       # the rest when the socket polls writable
        except OSError:
            self.hello = b""             # noticed by reading

    def _start(self):
        """Start a daemon, unless another process is at it; returns whether we are."""
        import fcntl
        paths = DaemonPaths(self.config_file, self.env)
        try:
            os.makedirs(paths.state, 0o700, exist_ok=True)
            fd = os.open(paths.starter, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self.problem = "the state directory %s cannot be used: %s" % (paths.state, error.strerror)
            self.down_since = min(self.down_since, time.monotonic() - START_WAIT_S - 1)
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self.starter_lock = fd
        if self._connect():
            return True
        read_fd, write_fd = os.pipe()
        try:
            start_detached_daemon(self.config_file, write_fd, self.env)
        except OSError as error:
            self.problem = "a daemon cannot be started: %s" % error.strerror
            os.close(read_fd)
            self._release_starter()
            return True
        finally:
            os.close(write_fd)
        self.ready_fd, self.ready_text = read_fd, b""
        self.state, self.deadline = "starting", time.monotonic() + START_WAIT_S
        return True

    def _read_ready(self):
        data = os.read(self.ready_fd, 4096)
        self.ready_text += data
        if data and b"\n" not in self.ready_text:
            return
        os.close(self.ready_fd)
        self.ready_fd, self.deadline = None, None
        self.state, now = "down", time.monotonic()
        self.retry_at = now
        if not self.ready_text.startswith(b"ok"):
            text = self.ready_text.decode("utf-8", "replace").strip()
            self.problem = text[7:] if text.startswith("failed ") else (text or "the daemon ended at once")
            self.start_after = now + 2.0
            self._release_starter()
            if self.was_up:
                self.down_since = min(self.down_since, now - PATIENCE_S)
            else:
                self.down_since = now - START_WAIT_S - 1

    def _release_starter(self):
        if self.starter_lock is not None:
            os.close(self.starter_lock)
            self.starter_lock = None

    def _no_daemon(self, problem):
        """No daemon can be had: at first go on without one, later keep trying."""
        self.problem = problem
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        if self.ready_fd is not None:
            os.close(self.ready_fd)
            self.ready_fd = None
        self._release_starter()
        self.deadline = None
        if not self.was_up:
            return (None,)
        self._requeue()
        now = time.monotonic()
        self.state, self.retry_at, self.start_after = "down", now + 0.5, now + 2.0
        self._answer_with_errors()
        return None

    def _answer_with_errors(self):
        """Quick errors instead of silence; the search for a daemon goes on."""
        for seq in sorted(self.kept):
            line, losses = self.kept[seq][:2]
            for message in self._requests_in(line):
                lost = losses and message.get("method") == "tools/call"
                error = StreamLost("mcpx lost its daemon while this call was in flight") if lost else RpcError(
                    INTERNAL_ERROR, "mcpx has no daemon at the moment (%s); try again" % self.problem)
                self.writer.put(to_json(error_message(message["id"], error)).encode("ascii") + b"\n")
        self._forget_all()
        self.first_seq = self.next_seq
        self.down_since = time.monotonic()
        self.writer.flush()

    def _requests_in(self, line):
        try:
            message = parse_json(line.strip())
        except RpcError:
            host_id = guess_id(line[:OVERSIZE_HEAD_BYTES])
            return [] if host_id is None else [{"id": host_id, "method": ""}]
        members = message if isinstance(message, list) else [message]
        return [m for m in members if isinstance(m, dict) and "method" in m and is_valid_id(m.get("id"))]

    def unanswered(self):
        """Return the host's unanswered lines and its unfinished one, for who takes over."""
        return b"".join([self.kept[seq][0] for seq in sorted(self.kept)] + self.partial)


def to_json(value):
    """Return JSON text of strings, numbers, lists and objects, without the json module."""
    if isinstance(value, str):
        from _json import encode_basestring_ascii
        return encode_basestring_ascii(value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict):
        return "{%s}" % ",".join("%s:%s" % (to_json(name), to_json(inner)) for name, inner in value.items())
    return "[%s]" % ",".join(map(to_json, value))


def caller_facts(env):
    """Return what a shim or command tells the daemon about itself. Raises UsageError for a bad name."""
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = ""
    place = find_place(cwd, (env.get("HOME"), env.get("TMPDIR"))) if cwd else Place(
        reason="the working directory does not exist any more")
    facts = {"place": place.as_dict(), "env": dict(env)}
    for name, variable in (("session", "MCPX_SESSION_ID"), ("parent", "MCPX_PARENT_SESSION_ID")):
        if env.get(variable):
            try:
                facts[name] = check_session_name(env[variable], variable)
            except RpcError as error:
                raise UsageError(error.message)
    return facts


# -- a shim's part of this file ---------------------------------------------------------
#
# A shim runs once per server and host, and uses a tenth of this file. What a plain `serve`
# needs is kept beside the byte code, and the boot code at the head of this file defines that
# alone, as long as this file is what it was made from. All the rest is loaded where something
# else is asked for.

# Where the part ends: what these names stand for is used after `load_rest` only.
NOT_IN_PART = frozenset(
    "run_from_byte_code keep_part start_over parse_command_line show complain run_standalone Output "
    "__name__ __file__ __spec__ __loader__ __package__ __builtins__ __cached__ __doc__".split())


def load_rest():
    """Define everything in this file, where only a shim's part of it is there."""
    if not IS_PART:
        return
    exec(whole_code(), globals())


def whole_code():
    """Return the code of this file, from the byte code that the head keeps where there is some."""
    sys.pycache_prefix = BYTE_CODE_DIRECTORY
    try:
        return __spec__.loader.get_code(__name__)
    finally:
        sys.pycache_prefix = None


def keep_part():
    """Write the shim's part beside the byte code; returns whether there was none that is good, and now is one."""
    import _imp
    if BYTE_CODE_DIRECTORY is None or __name__ == "__main__":
        return False
    path = os.path.splitext(__spec__.cached)[0] + ".shim"
    try:
        with open(__file__, "rb") as file:
            mark = _imp.source_hash(sys.hexversion, file.read())
        try:
            with open(path, "rb") as file:
                kept = file.read()
        except FileNotFoundError:
            kept = b""
        if kept[:16] == mark + _imp.source_hash(sys.hexversion, kept[16:]):
            return False
        data = marshal.dumps((_define_part.__code__, _part_of(whole_code())))
        own = "%s.%d" % (path, os.getpid())
        with open(own, "wb") as file:
            file.write(mark + _imp.source_hash(sys.hexversion, data) + data)
        os.replace(own, path)
        return True
    except (OSError, ValueError):
        return False                     # a shim does with the whole of it, and is larger


def _part_of(code):
    """Return what a plain `serve` needs of this file's code: [(kind, name, value)] in order.

    Raises ValueError where something of it cannot be kept.
    """
    bodies = {const.co_name: const for const in code.co_consts if isinstance(const, types.CodeType)}
    known, wanted, found = globals(), set(), ["main", "load_rest", "__version__", "_Later"]
    while found:
        name = found.pop()
        if name in wanted or name in NOT_IN_PART or name not in known:
            continue
        wanted.add(name)
        value = known[name]
        if isinstance(value, type):
            found += [base.__name__ for base in value.__bases__]
            found += _names_in(bodies[name])
        elif isinstance(value, types.FunctionType):
            found += _names_in(value.__code__)
    # What asks for the source of the boot code gets that, not all that this file says of itself.
    parts = [("value", "__doc__", __doc__[:__doc__.index("Licence:")]), ("value", "IS_PART", True)]
    for name, value in known.items():
        if name not in wanted or name == "IS_PART":
            continue
        if isinstance(value, (_Later, types.ModuleType)):
            parts.append(("module", name, name))
        elif isinstance(value, type):
            parts.append(("class", name, (bodies[name], tuple(base.__name__ for base in value.__bases__))))
        elif isinstance(value, types.FunctionType):
            parts.append(("function", name, (value.__code__, value.__defaults__, value.__kwdefaults__)))
        else:
            parts.append(("value", name, value))
    return parts


def _names_in(code):
    """Return the names that a code object and those within it use."""
    names = list(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names += _names_in(const)
    return names


def _define_part(parts):
    """Define what `_part_of` has returned; called where nothing else of this file is there."""
    import builtins
    import sys
    function, names = type(lambda: None), globals()
    for kind, name, value in parts:
        if kind == "module":
            # Those that only Python itself has loaded so far are no less at hand.
            names[name] = sys.modules.get(value) or names["_Later"](value)
        elif kind == "class":
            code, bases = value
            names[name] = builtins.__build_class__(function(code, names), name, *[
                names.get(base) or getattr(builtins, base) for base in bases])
        elif kind == "function":
            code, defaults, keyword_defaults = value
            names[name] = function(code, names, name, defaults)
            names[name].__kwdefaults__ = keyword_defaults
        else:
            names[name] = value


def start_over(arguments):
    """Exec this file anew, as a shim that loads its part only. Returns where that cannot be."""
    command = own_command(*arguments)
    try:
        os.execv(command[0], command)
    except OSError:
        return                           # larger, otherwise the same


def boot_code():
    """Return the code that the head of this file gives to the interpreter with -c."""
    return __doc__.split("'", 2)[1]


def own_command(*arguments):
    """Return the command line that runs this file from cached byte code."""
    return [sys.executable, "-I", "-S", "-c", boot_code(), os.path.realpath(__file__)] + list(arguments)


def start_detached_daemon(config_file, ready_fd, env):
    """Start a daemon that no host can kill or wait for.

    Forked twice, so that it is nobody's descendant (opencode signals every descendant of
    what it launched), in its own session, without a descriptor of the caller but `ready_fd`,
    on which it says "ok" or why not. Its environment is the base environment.
    """
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
            if int(name) > 2 and int(name) != ready_fd:
                try:
                    os.close(int(name))
                except OSError:
                    continue             # the descriptor of the listing itself
        os.set_inheritable(ready_fd, True)
        command = own_command("daemon", "--config", config_file, "--ready-fd", str(ready_fd))
        os.execve(command[0], command, base_environment(env))
    finally:
        os._exit(127)


def run_shim(names, config_file, env):
    """Be the shim of a host. Returns the exit status."""
    import _signal

    def leave(_number, _frame):
        os._exit(0)
    for number in (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP):
        _signal.signal(number, leave)
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open("/dev/null", os.O_RDWR)
    caller_facts(env)                    # a bad name is a usage error now, not later
    shim = Shim(names, config_file, env)
    status = shim.run()
    if status is not None:
        return status
    if shim.state == "refused":
        raise UsageError(shim.problem)
    os.write(2, ("mcpx: %s; going on without a daemon, nothing is shared with other hosts\n"
                 % shim.problem).encode("utf-8", "replace"))
    load_rest()
    return run_standalone(names, config_file, env, shim.unanswered())


def run_standalone(names, config_file, env, first=b""):
    """Serve one host without a daemon: the same core in this process. Returns the exit status."""
    daemon = Daemon(config_file, env, Log(echo=True, level="warning"), standalone=True)
    daemon.log.level = "warning"
    unknown = [name for name in names if name not in daemon.config.servers]
    if unknown:
        raise UsageError(unknown_servers_text(unknown, daemon.config))
    daemon.start()
    link = StdioLink(daemon, HostWriter(1), 0)
    hello = dict(caller_facts(env), role="serve")
    host = daemon.make_host(link, names, hello)
    if first:
        link.feed(first)
    daemon.loop.run()
    host.close()
    link.writer.flush()
    return 0


# ---------------------------------------------------------------------------
# Demo: a small, well-behaved server
#
# A stateful MCP server over stdin and stdout, for `mcpx demo` and the tests. Uses the wire
# and nothing else of this file. Calls overlap; a `sleep` does not hold up the others.
# ---------------------------------------------------------------------------

def _schema(**properties):
    required = [name for name, kind in properties.items() if not kind.endswith("?")]
    return {"type": "object", "properties": {name: {"type": kind.rstrip("?")} for name, kind in properties.items()},
            "required": required}


DEMO_TOOLS = {
    "set": ("Set a variable of this process", _schema(value="string", name="string?"), {}),
    "get": ("Get a variable of this process", _schema(name="string?"), {"readOnlyHint": True}),
    "whoami": ("Tell which process this is", _schema(), {"readOnlyHint": True}),
    "add": ("Add to a counter in this process", _schema(n="integer?"), {}),
    "echo": ("Return the text", _schema(text="string"), {"readOnlyHint": True}),
    "sleep": ("Answer after some seconds, with progress", _schema(seconds="number", every="number?", text="string?"),
              {}),
    "fail": ("Return a tool error", _schema(message="string"), {}),
    "error": ("Return a JSON-RPC error", _schema(code="integer", message="string"), {}),
    "crash": ("End this process without an answer", _schema(status="integer?"), {}),
    "log": ("Send a log message", _schema(level="string", text="string"), {}),
    "big": ("Return that many bytes of text", _schema(bytes="integer"), {"readOnlyHint": True}),
    "ask": ("Ask the user", _schema(message="string"), {}),
    "sample": ("Ask the host's model", _schema(text="string"), {}),
    "roots": ("Ask the host for its roots", _schema(), {}),
    "add_tool": ("Add a tool to the list", _schema(name="string"), {}),
    "touch": ("Say that a resource has changed", _schema(uri="string"), {}),
}


class DemoServer:
    """One process of the demo server and the state it holds."""

    def __init__(self, name, page, era):
        self.name, self.page, self.era = name, page, era
        self.modern = {}                 # request id -> _meta of a request of 2026-07-28
        self.listening = {}              # id of a subscriptions/listen -> its filter
        self.variables, self.counter, self.calls = {}, 0, 0
        self.started = time.time()
        self.tools = {name: {"name": name, "description": text, "inputSchema": schema, "annotations": hints}
                      for name, (text, schema, hints) in DEMO_TOOLS.items()}
        self.level = "debug"
        self.subscribed = set()
        self.client = None               # capabilities of a legacy client, once it has said hello
        self.timers = []                 # heap of (due, order, callback)
        self.sleeping = {}               # request id -> True, until answered or cancelled
        self.asked = {}                  # our question's id -> request id that waits for it
        self.orders = 0

    def run(self):
        """Serve stdin until it ends."""
        lines = LineBuffer(1 << 30)
        poller = select.poll()
        poller.register(0, select.POLLIN)
        while True:
            wait = max(0, self.timers[0][0] - time.monotonic()) * 1000 if self.timers else None
            if poller.poll(wait):
                data = os.read(0, READ_BYTES)
                if not data:
                    return
                for line in lines.feed(data):
                    if line.strip():
                        self.take(parse_json(line))
            while self.timers and self.timers[0][0] <= time.monotonic():
                heapq.heappop(self.timers)[2]()

    def send(self, message):
        """Write one message."""
        _write_all(1, encode_json(dict({"jsonrpc": "2.0"}, **message)) + b"\n")

    def take(self, message):
        """Take one message from the host."""
        if "method" not in message:
            self.on_answer(message)
            return
        method, params = message["method"], message.get("params") or {}
        if "id" not in message:
            if method == "notifications/cancelled":
                self.sleeping.pop(params.get("requestId"), None)
                self.listening.pop(params.get("requestId"), None)
            return
        if is_modern(message) and self.era != "legacy":
            self.modern[message["id"]] = params["_meta"]
        elif self.era == "modern":
            self.send({"id": message["id"], "error": {"code": UNSUPPORTED_VERSION,
                                                      "message": "Unsupported protocol version",
                                                      "data": {"supported": list(MODERN_REVISIONS), "requested": ""}}})
            return
        handler = getattr(self, "on_" + method.replace("/", "_"), None)
        known = method != "server/discover"
        if message["id"] in self.modern:
            known = has_method(HOST_METHODS, method, MODERN)
        if handler is None or not known:
            self.fail(message["id"], METHOD_NOT_FOUND, "Method not found: %s" % method)
            return
        result = handler(params, message["id"])
        if result is not None:
            self.answer(message["id"], result)

    def answer(self, request_id, result):
        """Answer a request in the form of its era."""
        if self.modern.pop(request_id, None) is not None:
            result.setdefault("resultType", "complete")
            result["_meta"] = {META_SERVER_INFO: {"name": self.name, "version": __version__}}
        self.send({"id": request_id, "result": result})

    def tell(self, kind, method, params=None):
        """Tell of a change: to everybody of the legacy era, and on the streams that want it."""
        if self.client is not None:
            self.send({"method": method, "params": params} if params else {"method": method})
        for listen_id, wanted in self.listening.items():
            if wanted.get(kind) is True or (params and params.get("uri") in (wanted.get(kind) or ())):
                self.send({"method": method, "params": dict(params or {}, _meta={META_SUBSCRIPTION: listen_id})})

    def on_server_discover(self, _params, _id):
        legacy = list(LEGACY_REVISIONS) if self.era == "both" else []
        return dict(self.capabilities(), supportedVersions=list(MODERN_REVISIONS) + legacy,
                    ttlMs=0, cacheScope="private")

    def on_subscriptions_listen(self, params, request_id):
        wanted = params.get("notifications") or {}
        self.listening[request_id] = wanted
        self.send({"method": "notifications/subscriptions/acknowledged", "params": {
            "notifications": wanted, "_meta": {META_SUBSCRIPTION: request_id}}})

    def fail(self, request_id, code, text, data=None):
        """Answer with a JSON-RPC error."""
        self.modern.pop(request_id, None)
        self.send({"id": request_id, "error": RpcError(code, text, data).as_object()})

    def later(self, seconds, callback):
        """Call back after some seconds."""
        self.orders += 1
        heapq.heappush(self.timers, (time.monotonic() + seconds, self.orders, callback))

    def on_initialize(self, params, _id):
        self.client = params.get("capabilities", {})
        wanted = params.get("protocolVersion")
        return dict(self.capabilities(), protocolVersion=negotiate(wanted),
                    serverInfo={"name": self.name, "version": __version__})

    def capabilities(self):
        """What both handshakes tell."""
        return {"capabilities": {"tools": {"listChanged": True}, "prompts": {}, "completions": {}, "logging": {},
                                 "resources": {"subscribe": True}},
                "instructions": "A small stateful server: set and get variables of one process."}

    def on_ping(self, _params, _id):
        return {}

    def paged(self, kind, items, params):
        """Return one page of a list, all of it unless --page was given."""
        start = int(params.get("cursor") or 0)
        end = start + self.page if self.page else len(items)
        result = {kind: items[start:end]}
        return dict(result, nextCursor=str(end)) if end < len(items) else result

    def on_tools_list(self, params, _id):
        return self.paged("tools", list(self.tools.values()), params)

    def on_prompts_list(self, params, _id):
        return self.paged("prompts", [{"name": "greet", "description": "Greet somebody", "arguments": [
            {"name": "name", "required": True}]}], params)

    def on_prompts_get(self, params, request_id):
        if params.get("name") != "greet":
            return self.fail(request_id, INVALID_PARAMS, "unknown prompt")
        name = (params.get("arguments") or {}).get("name", "you")
        return {"messages": [{"role": "user", "content": {"type": "text", "text": "Hello, %s." % name}}]}

    def on_completion_complete(self, params, _id):
        value = params.get("argument", {}).get("value", "")
        values = [name for name in ("ada", "alan", "barbara", "grace") if name.startswith(value)]
        return {"completion": {"values": values, "total": len(values), "hasMore": False}}

    def on_resources_list(self, params, _id):
        uris = ["demo://state"] + ["demo://note/%d" % n for n in (1, 2, 3)]
        return self.paged("resources", [{"uri": uri, "name": uri[7:], "mimeType": "text/plain"} for uri in uris],
                          params)

    def on_resources_templates_list(self, params, _id):
        return self.paged("resourceTemplates", [{"uriTemplate": "demo://note/{name}", "name": "note"}], params)

    def on_resources_read(self, params, request_id):
        uri = params.get("uri", "")
        if uri == "demo://state":
            text = json.dumps({"pid": os.getpid(), "variables": self.variables, "counter": self.counter})
        elif uri.startswith("demo://note/"):
            text = "note %s" % uri[12:]
        else:
            return self.fail(request_id, INVALID_PARAMS if request_id in self.modern else RESOURCE_NOT_FOUND,
                             "Resource not found", {"uri": uri})
        return {"contents": [{"uri": uri, "mimeType": "text/plain", "text": text}]}

    def on_resources_subscribe(self, params, _id):
        self.subscribed.add(params.get("uri"))
        return {}

    def on_resources_unsubscribe(self, params, _id):
        self.subscribed.discard(params.get("uri"))
        return {}

    def on_logging_setLevel(self, params, _id):
        self.level = params.get("level", "debug")
        return {}

    def on_tools_call(self, params, request_id):
        name, arguments = params.get("name"), params.get("arguments") or {}
        method = getattr(self, "tool_%s" % name, None)
        if name not in self.tools:
            return self.fail(request_id, INVALID_PARAMS, "Unknown tool: %s" % name)
        self.calls += 1
        if "it" in (params.get("inputResponses") or {}):
            if params.get("requestState") != "state of %d" % os.getpid():
                return self.fail(request_id, INVALID_PARAMS, "not my state")
            return text_result(json.dumps(params["inputResponses"]["it"]))
        if method is None:
            return text_result("added")
        return method(arguments, request_id, (params.get("_meta") or {}).get("progressToken"))

    def tool_set(self, arguments, _id, _token):
        self.variables[arguments.get("name", "value")] = arguments.get("value", "")
        return text_result("ok")

    def tool_get(self, arguments, _id, _token):
        return text_result(self.variables.get(arguments.get("name", "value"), ""))

    def tool_whoami(self, _arguments, _id, _token):
        facts = {"pid": os.getpid(), "instance": os.environ.get(INSTANCE_VARIABLE), "cwd": os.getcwd(),
                 "calls": self.calls, "started": self.started, "argv": sys.argv[1:], "client": self.client,
                 "session": os.environ.get("MCPX_SESSION_ID")}
        return dict(text_result(json.dumps(facts)), structuredContent=facts)

    def tool_add(self, arguments, _id, _token):
        self.counter += arguments.get("n", 1)
        return text_result(str(self.counter))

    def tool_echo(self, arguments, _id, _token):
        return text_result(arguments.get("text", ""))

    def tool_sleep(self, arguments, request_id, token):
        seconds, every = float(arguments.get("seconds", 0)), float(arguments.get("every", 0) or 0)
        self.sleeping[request_id] = True

        def done():
            if self.sleeping.pop(request_id, None):
                self.answer(request_id, text_result(arguments.get("text", "slept %g" % seconds)))

        def progress(count):
            if self.sleeping.get(request_id):
                self.send({"method": "notifications/progress", "params": {
                    "progressToken": token, "progress": count, "message": "step %d" % count}})
        if every and token is not None:
            for count in range(1, int(seconds / every) + 1):
                self.later(every * count * 0.999, lambda count=count: progress(count))
        self.later(seconds, done)

    def tool_fail(self, arguments, _id, _token):
        return dict(text_result(arguments.get("message", "failed")), isError=True)

    def tool_error(self, arguments, request_id, _token):
        self.fail(request_id, arguments.get("code", INTERNAL_ERROR), arguments.get("message", "an error"))

    def tool_crash(self, arguments, _id, _token):
        os._exit(arguments.get("status", 1))

    def tool_log(self, arguments, request_id, _token):
        level, least = arguments.get("level", "info"), self.level
        if request_id in self.modern:
            least = self.modern[request_id].get(META_LOG_LEVEL)
        if least in LOG_LEVELS and level in LOG_LEVELS and LOG_LEVELS.index(level) >= LOG_LEVELS.index(least):
            self.send({"method": "notifications/message", "params": {
                "level": level, "logger": "demo", "data": arguments.get("text", "")}})
        return text_result("logged")

    def tool_big(self, arguments, _id, _token):
        size = arguments.get("bytes", 0)
        return text_result(("0123456789abcdef" * (size // 16 + 1))[:size])

    def tool_ask(self, arguments, request_id, _token):
        self.question(request_id, "elicitation/create", {
            "message": arguments.get("message", "?"), "requestedSchema": {
                "type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}})

    def tool_sample(self, arguments, request_id, _token):
        self.question(request_id, "sampling/createMessage", {"maxTokens": 100, "messages": [
            {"role": "user", "content": {"type": "text", "text": arguments.get("text", "")}}]})

    def tool_roots(self, _arguments, request_id, _token):
        self.question(request_id, "roots/list", None)

    def question(self, request_id, method, params):
        """Ask the host; its answer becomes the call's result."""
        if request_id in self.modern:
            self.modern.pop(request_id)
            entry = {"method": method, "params": dict(params, mode="form") if method.startswith("elicit") else params}
            self.send({"id": request_id, "result": {
                "resultType": "input_required", "requestState": "state of %d" % os.getpid(),
                "inputRequests": {"it": entry if params is not None else {"method": method}}}})
            return
        self.orders += 1
        question_id = "q%d" % self.orders
        self.asked[question_id] = request_id
        message = {"id": question_id, "method": method}
        self.send(dict(message, params=params) if params is not None else message)

    def on_answer(self, message):
        request_id = self.asked.pop(message.get("id"), None)
        if request_id is not None:
            body = message.get("result", {"error": message.get("error")})
            self.send({"id": request_id, "result": text_result(json.dumps(body))})

    def tool_add_tool(self, arguments, _id, _token):
        name = arguments.get("name", "extra")
        self.tools[name] = {"name": name, "description": "added later", "inputSchema": _schema()}
        self.tell("toolsListChanged", "notifications/tools/list_changed")
        return text_result("added %s" % name)

    def tool_touch(self, arguments, _id, _token):
        uri = arguments.get("uri")
        if uri in self.subscribed or self.listening:
            self.tell("resourceSubscriptions", "notifications/resources/updated", {"uri": uri})
        return text_result("touched")


def text_result(text):
    """Return a CallToolResult of one text block."""
    return {"content": [{"type": "text", "text": text}]}


# ---------------------------------------------------------------------------
# Commands: what did the person ask; how is it shown
#
# The command line. Commands return data and a way to print it; one place turns it into text
# or JSON, and one sets the exit status: 0 done, 1 failed, 2 a usage or configuration error.
# ---------------------------------------------------------------------------

# A command that has not heard from the daemon for this long says so.
COMMAND_WAIT_S = 30.0
# Longer, as children get their grace first.
STOP_WAIT_S = 60.0


class Failed(Exception):
    """A command could not do what was asked; the text says why. Exit status 1."""


# More than the largest answer that a command mostly gets, and no system call's worth of memory.
COMMAND_READ_BYTES = 65536


class LinkClient:
    """A command's connection to the daemon: blocking, for one thing at a time.

    Uses the C module of sockets alone: the standard library's layer over it takes as long to
    import as the call takes.
    """

    def __init__(self, config_file, env, start=False):
        self.config_file, self.env = config_file, env
        self.socket = self._connect() or (self._start() if start else None)
        self.buffer, self.lines = LineBuffer(SHIM_LINE_BYTES), []

    @property
    def connected(self):
        """Is there a daemon at the other end?"""
        return self.socket is not None

    def _connect(self):
        import _socket
        paths = DaemonPaths(self.config_file, self.env)
        for path in (paths.recorded_socket(), paths.socket):
            if path:
                connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
                try:
                    connection.connect(path)
                    return connection
                except OSError:
                    connection.close()
        return None

    def _start(self):
        load_config(self.config_file)    # its error is better than "did not start"
        read_fd, write_fd = os.pipe()
        os.makedirs(state_directory(self.env), 0o700, exist_ok=True)
        try:
            start_detached_daemon(self.config_file, write_fd, self.env)
        finally:
            os.close(write_fd)
        with open(read_fd, "rb") as ready:
            text = ready.readline().decode("utf-8", "replace").strip()
        if not text.startswith("ok"):
            raise Failed("the daemon did not start: %s" % (text[7:] if text.startswith("failed ") else text))
        deadline = time.monotonic() + START_WAIT_S
        while time.monotonic() < deadline:
            connection = self._connect()
            if connection is not None:
                return connection
            time.sleep(0.02)
        raise Failed("the daemon did not open its socket; see `mcpx logs`")

    def control(self, operation, args=None, wait=COMMAND_WAIT_S):
        """Ask the daemon's control API for one operation; returns its result. Raises Failed."""
        body = dict(args or {})
        if operation == "why":
            body["caller"] = caller_facts(self.env)
        data = encode_json(body) if body else b""
        method = "GET" if ("GET", "/" + operation) in API_ROUTES else "POST"
        head = "%s /v1/%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (
            method, operation, len(data))
        self._send(head.encode() + data)
        pieces = [self._receive(wait)]
        while pieces[-1]:
            pieces.append(self._receive(wait))
        _, found, answer = b"".join(pieces).partition(b"\r\n\r\n")
        if not found:
            raise Failed("the daemon has hung up; see `mcpx logs`")
        message = json.loads(answer)
        if "error" in message:
            raise Failed(message["error"]["message"])
        return message

    def open_host(self, names, session=None, parent=None):
        """Become a host of the named servers: greet, initialize."""
        hello = dict(caller_facts(self.env), mcpx=LINK_VERSION, role="command", version=__version__, names=names)
        if session:
            hello["session"] = checked_name(session, "--session")
        if parent:
            hello["parent"] = checked_name(parent, "--parent-session")
        self._send(encode_json(hello) + b"\n")
        line = self._read_line(COMMAND_WAIT_S)
        if line.startswith(b"c fail "):
            raise UsageError(line[7:].decode("utf-8", "replace").strip())
        params = {"protocolVersion": LATEST_LEGACY, "capabilities": {},
                  "clientInfo": {"name": "mcpx-command", "version": __version__}}
        result = self.request("initialize", params, COMMAND_WAIT_S)
        self._send(encode_json(notification("notifications/initialized")) + b"\n")
        return result

    def request(self, method, params=None, wait=None):
        """Send a request and return its result. Raises Failed with the server's message."""
        message = {"jsonrpc": "2.0", "id": 1, "method": method}
        self._send(encode_json(dict(message, params=params) if params is not None else message) + b"\n")
        while True:
            line = self._read_line(wait)
            if line[:1] == b"a":
                answer = json.loads(line[line.index(b" "):])
                if "error" in answer:
                    raise Failed("%s (code %s)" % (answer["error"].get("message"), answer["error"].get("code")))
                return answer["result"]

    def _send(self, data):
        self.socket.settimeout(COMMAND_WAIT_S)
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise Failed("the daemon has gone: %s" % error)

    def _receive(self, wait):
        """Return what comes next, b"" at the end; waits `wait` seconds, without end where that is None."""
        self.socket.settimeout(wait)
        try:
            return self.socket.recv(COMMAND_READ_BYTES)
        except TimeoutError:
            raise Failed("the daemon has not answered for %gs; see `mcpx logs`" % wait)
        except OSError as error:
            if str(error) == "timed out":        # Python 3.9 has a class of its own for it
                raise Failed("the daemon has not answered for %gs; see `mcpx logs`" % wait)
            raise Failed("the daemon has gone: %s" % error)

    def _read_line(self, wait):
        while not self.lines:
            data = self._receive(wait)
            if not data:
                raise Failed("the daemon has hung up; see `mcpx logs`")
            self.lines = self.buffer.feed(data)
        line = self.lines.pop(0)
        if isinstance(line, Oversize):
            raise Failed("the daemon's answer has %d bytes, more than a command takes" % line.size)
        return line


def checked_name(name, where):
    """Return a session name from the command line. Raises UsageError."""
    try:
        return check_session_name(name, where)
    except RpcError as error:
        raise UsageError(error.message)


class Output:
    """What a command gives back: `data` for --json, `text` for people, and the exit status."""

    def __init__(self, data, text, status=0):
        self.data, self.text, self.status = data, text, status


def table(rows, columns):
    """Return rows (dicts) as text in columns: [(title, key or function)]."""
    cells = [[title for title, _ in columns]]
    for row in rows:
        cells.append([printable(value(row) if callable(value) else row.get(value, "")) for _, value in columns])
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def age(seconds):
    """Return a duration for people."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return "%d%s" % (seconds // size, unit)
    return "%ds" % seconds


def mebibytes(count):
    """Return bytes for people."""
    return "%.1fM" % (count / 1048576)


def running_daemon(options, start=False):
    """Return a connected LinkClient. Raises Failed when no daemon runs."""
    client = LinkClient(options.config_file, os.environ, start)
    if not client.connected:
        raise Failed("no daemon runs for %s; the first `serve` or `call` starts one" % options.config_file)
    return client


def cmd_serve(options):
    """Be the shim of a host, until the host ends."""
    if not options.names:
        raise UsageError(unknown_servers_text([], load_config(options.config_file)))
    env = dict(os.environ)
    if options.session:
        env["MCPX_SESSION_ID"] = options.session
    if options.standalone:
        return run_standalone(options.names, options.config_file, env)
    return run_shim(options.names, options.config_file, env)


def cmd_daemon(options):
    """Be the daemon, until it is told to end."""
    if options.check_fd is not None:
        return check_snapshot(options.check_fd)
    if options.resume_fd is not None:
        return turn_until_stopped(resume_daemon(options.config_file, options.resume_fd,
                                                options.previous, options.failed))
    ready_fd = options.ready_fd
    return run_daemon(options.config_file, dict(os.environ), ready_fd is not None, ready_fd)


def cmd_status(options):
    """Show what runs, for whom and why. Status 1 when no daemon runs or it refuses the changed configuration."""
    client = LinkClient(options.config_file, os.environ)
    if not client.connected:
        return Output({"daemon": None}, "no daemon runs for %s" % options.config_file, 1)
    data = client.control("status")
    return Output(data, status_text(data), 1 if data["daemon"]["configError"] else 0)


def status_text(data):
    """Return what `mcpx status` prints."""
    daemon = data["daemon"]
    parts = ["daemon %s, pid %d, up %s, %s, %s" % (daemon["version"], daemon["pid"], age(daemon["uptime"]),
                                                   mebibytes(daemon["memory"]), daemon["config"])]
    if daemon["configError"]:
        parts.append("the changed configuration is not used: %s" % daemon["configError"])
    parts.append("\nINSTANCES\n" + (table(data["instances"], [
        ("SERVER", "server"), ("KEY", "key"), ("WHY", "why"), ("STATE", lambda r: r["state"] + (
            " (silent)" if r["unresponsive"] else "")), ("PID", "pid"), ("MEM", lambda r: mebibytes(r["memory"])),
        ("UP", lambda r: age(r["uptime"])), ("CALLS", "calls"), ("IN FLIGHT", "inFlight"), ("HOSTS", "hosts"),
        ("ID", "id")]) if data["instances"] else "none runs; the first call of a server starts one"))
    parts.append("\nHOSTS\n" + (table(data["hosts"], [
        ("HOST", lambda r: r["client"] or "?"), ("PID", "pid"), ("SESSION", "session"),
        ("CWD", lambda r: r["cwd"] or "-"),
        ("SERVERS", lambda r: ",".join(r["servers"])), ("REVISION", lambda r: r["revision"] or "-"),
        ("IN FLIGHT", "inFlight")]) if data["hosts"] else "none is connected"))
    troubled = [row for row in data["servers"] if row["lastError"] and not row["instances"]]
    if troubled:
        parts.append("\nTROUBLE\n" + table(troubled, [
            ("SERVER", "name"), ("NEXT TRY", lambda r: "in %s" % age(r["nextTry"]) if r["nextTry"] else "at next call"),
            ("LAST ERROR", "lastError")]))
    if data["degradations"]:
        parts.append("\nNARROWER THAN ASKED FOR\n" + table(data["degradations"], [
            ("SERVER", "server"), ("SCOPE", "scope"), ("TIMES", "count"), ("REASON", "reason")]))
    if data["questions"]:
        parts.append("\nOPEN QUESTIONS\n" + table(data["questions"], [
            ("SERVER", "server"), ("ASKS", "method"), ("HOST", lambda r: r["host"] or "nobody: %s" % r["why"])]))
    return "\n".join(parts)


def cmd_ls(options):
    """List the configured servers, or what one of them offers."""
    if not options.server:
        config = load_config(options.config_file)
        rows = [{"name": server.name, "scope": config.get("scope", server), "sharing": config.get("sharing", server),
                 "disabled": server.disabled, "error": server.broken,
                 "command": " ".join([server.command] + server.args)} for server in config.servers.values()]
        text = table(rows, [("SERVER", "name"), ("SCOPE", "scope"), ("SHARING", "sharing"), ("COMMAND", lambda r: (
            "disabled: " if r["disabled"] else "") + (r["error"] or masked(r["command"])))])
        return Output({"servers": rows}, text if rows else "no server is configured in %s" % options.config_file)
    client = running_daemon(options, start=True)
    capabilities = client.open_host([options.server])["capabilities"]
    data, parts = {"server": options.server}, []
    for kind in LIST_KINDS:
        if LIST_CAPABILITY[kind] not in capabilities:
            continue
        items, cursor = [], None
        while True:
            page = client.request(KIND_METHODS[kind], {"cursor": cursor} if cursor else {})
            items += page[kind]
            cursor = page.get("nextCursor")
            if not cursor:
                break
        data[kind] = items
        if items:
            parts.append("%s\n%s" % (kind.upper(), table(items, [
                ("  NAME", lambda r: "  %s" % r.get("name", "")),
                ("", lambda r: r.get("uri") or r.get("uriTemplate") or ""),
                ("", lambda r: (r.get("description") or "").split("\n")[0][:80])])))
    return Output(data, "\n".join(parts) or "the server lists nothing")


def cmd_call(options):
    """Call a tool as a host would; status 1 when it fails."""
    config = load_config(options.config_file)
    names = [name for name in config.servers if options.tool.startswith(name + ".")]
    if not names:
        name, dot, _ = options.tool.partition(".")
        raise UsageError("write SERVER.TOOL, not %s: %s"
                         % (options.tool, unknown_servers_text([name] if dot else [], config)))
    server = max(names, key=len)
    tool = options.tool[len(server) + 1:]
    client = running_daemon(options, start=True)
    client.open_host([server], options.session, options.parent_session)
    arguments = call_arguments(options, client, tool)
    result = client.request("tools/call", {"name": tool, "arguments": arguments}, options.timeout)
    parts = []
    for block in result.get("content") or ():
        if block.get("type") == "text":
            parts.append(block.get("text", ""))
        else:
            parts.append("[%s %s]" % (block.get("type"), block.get("mimeType") or block.get("uri") or ""))
    if not parts and result.get("structuredContent") is not None:
        parts.append(json.dumps(result["structuredContent"], indent=2))
    return Output(result, "\n".join(parts), 1 if result.get("isError") else 0)


def call_arguments(options, client, tool):
    """Return the arguments of a call: --json-args, then key=value read by the tool's schema."""
    arguments = {}
    if options.json_args:
        try:
            arguments = json.loads(options.json_args)
        except ValueError as error:
            raise UsageError("--json-args is not JSON: %s" % error)
        if not isinstance(arguments, dict):
            raise UsageError("--json-args takes an object")
    if not options.arguments:
        return arguments
    tools = client.request("tools/list", {})["tools"]
    found = next((item for item in tools if item.get("name") == tool), {})
    properties = (found.get("inputSchema") or {}).get("properties") or {}
    for pair in options.arguments:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError("%s: write arguments as key=value, or use --json-args" % pair)
        arguments[name] = typed_argument(value, properties.get(name))
    return arguments


def typed_argument(value, schema):
    """Return a command-line value in the type that a property's schema asks for."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return parsed if kind is not None or not isinstance(parsed, str) else value


def cmd_why(options):
    """Tell for this caller: the evidence, the scope, the key, the instance it would reach."""
    env = dict(os.environ)
    for variable, value in (("MCPX_SESSION_ID", options.session), ("MCPX_PARENT_SESSION_ID", options.parent_session)):
        if value:
            env[variable] = value
    client = running_daemon(options, start=True)
    client.env = env
    data = client.control("why", {"server": options.server})
    lines = ["scope %s of server %s" % (data["scope"], data["server"])]
    lines += ["  because %s" % line for line in data["evidence"]]
    lines.append("key %s%s" % (data["key"], " (narrower: %s)" % data["degraded"] if data["degraded"] else ""))
    instance = data["instance"]
    lines.append("instance %s, pid %d, %s" % (instance["id"], instance["pid"], instance["state"]) if instance
                 else "no instance runs for it; the next call starts one")
    lines.append("program %s" % (data["program"] or "not found in PATH"))
    if data["callersProgram"] != data["program"]:
        lines.append("  found in the PATH of who started it; here it would be %s"
                     % (data["callersProgram"] or "nothing"))
    return Output(data, "\n".join(lines))


def cmd_stop(options):
    """End an instance, the instances of a server, or the daemon and all it runs; returns when they are gone."""
    client = LinkClient(options.config_file, os.environ)
    if not client.connected:
        return Output({"stopped": None}, "no daemon runs for %s" % options.config_file, 0 if not options.name else 1)
    data = client.control("stop", {"name": options.name}, STOP_WAIT_S)
    if not options.name:
        wait_for_end(data["pid"])
        text = "stopped the daemon (pid %d) and %d children" % (data["pid"], len(data["children"]))
    else:
        text = "stopped %d instances of %s" % (len(data["stopped"]), options.name)
    if data["killed"]:
        text += "; %s had to be killed" % ", ".join("%s (pid %d)" % (one["server"], one["pid"])
                                                    for one in data["killed"])
    return Output(data, text)


def wait_for_end(pid):
    """Wait until a daemon that has answered its stop is gone as a process; bounded."""
    deadline = time.monotonic() + 5
    while process_start(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)


def cmd_restart(options):
    """End an instance or the instances of a server and start those again that hosts use."""
    data = running_daemon(options).control("restart", {"name": options.name}, STOP_WAIT_S)
    return Output(data, "restarted %d instances of %s" % (len(data["restarted"]), options.name))


def cmd_reload(options):
    """Have the daemon read its configuration again."""
    client = running_daemon(options)
    if options.upgrade:
        wait = parse_setting(SETTINGS["upgradeTimeout"], SETTINGS["upgradeTimeout"].default) * 3
        data = client.control("upgrade", {"file": os.path.realpath(__file__)}, wait)
        return Output(data, "the daemon, pid %d, goes on with mcpx %s of %s"
                      % (data["pid"], data["upgraded"], data["file"]))
    data = client.control("reload")
    return Output(data, "reloaded %s: servers %s" % (data["reloaded"], ", ".join(data["servers"]) or "none"))


def cmd_logs(options):
    """Show, and follow, the daemon's log or a server's stderr."""
    paths = DaemonPaths(options.config_file, os.environ)
    path = paths.log
    if options.server:
        path = os.path.join(paths.state, "logs", safe_file_name(options.server) + ".log")
    if not os.path.exists(path) and not options.follow:
        raise Failed("there is no log %s yet" % path)
    position = show_tail(path, options.lines)
    while options.follow:
        # A person watches: a quarter of a second is soon enough.
        time.sleep(0.25)
        position = show_more(path, position)
    return None


def show_tail(path, count):
    """Print the last lines of a log and return its inode and size."""
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
            show_lines(lines[-count - 1:-1])
            return os.fstat(file.fileno()).st_ino, file.tell()
    except FileNotFoundError:
        return None, 0


def show_more(path, position):
    """Print what a log has got since `position`; returns the new position."""
    inode, offset = position
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            if info.st_ino != inode or info.st_size < offset:
                offset = 0               # rotated: a new file
            file.seek(offset)
            data = file.read()
            whole = data.rfind(b"\n") + 1
            show_lines(data[:whole].split(b"\n")[:-1])
            return info.st_ino, offset + whole
    except FileNotFoundError:
        return position


def show_lines(lines):
    """Print log lines with whatever could steer a terminal made visible."""
    for line in lines:
        print(printable(line.decode("utf-8", "replace")))
    sys.stdout.flush()


def cmd_settings(options):
    """Show every setting with its value, its default and where the value was said."""
    try:
        config = load_config(options.config_file)
    except ConfigError:
        if os.path.exists(options.config_file):
            raise
        config = Config(options.config_file)
    rows = settings_in_force(config)
    for row in rows:
        row["shown"] = show_setting(row)
    text = table(rows, [("SETTING", "name"), ("VALUE", "shown"),
                        ("LEVEL", lambda r: "server" if r["perServer"] else "daemon"),
                        ("FROM", "from"), ("MEANING", "meaning")])
    return Output({"settings": [{k: v for k, v in row.items() if k != "shown"} for row in rows]}, text)


def show_setting(row):
    """Return a setting's value as a person would write it."""
    if row["from"] == "default":
        return row["default"] if isinstance(row["default"], str) else json.dumps(row["default"])
    return row["value"] if isinstance(row["value"], str) else json.dumps(row["value"])


def cmd_config(options):
    """Show the configuration with secrets masked, or only what is wrong with it."""
    config = load_config(options.config_file)
    problems = [server.broken for server in config.servers.values() if server.broken]
    notes = list(config.notes)
    for server in config.servers.values():
        problem = warm_problem(config, server) if config.get("warm", server) and not server.broken else None
        if problem:
            notes.append("server %s asks for warm processes, but %s" % (server.name, problem))
    if options.check:
        text = "\n".join(["error: " + text for text in problems] + ["note: " + text for text in notes])
        good = "%s is fine: %d servers" % (options.config_file, len(config.servers))
        return Output({"config": options.config_file, "errors": problems, "notes": notes},
                      text if problems else (text + "\n" + good).strip(), 2 if problems else 0)
    value = masked(parse_config_text(read_person_file(options.config_file), options.config_file))
    return Output(value, json.dumps(value, indent=2, ensure_ascii=False))


def cmd_doctor(options):
    """Look at everything that commonly goes wrong; each finding says what to do."""
    checks = []

    def check(good, what, fix=""):
        checks.append({"ok": bool(good), "what": what, "fix": "" if good else fix})
    check(sys.version_info >= (3, 9), "Python %d.%d runs mcpx" % sys.version_info[:2], "use Python 3.9 or newer")
    try:
        config = load_config(options.config_file)
        check(True, "the configuration %s can be read" % options.config_file)
    except UsageError as error:
        check(False, "the configuration cannot be used: %s" % error, "correct it, then run `mcpx doctor` again")
        config = Config(options.config_file)
    doctor_servers(config, check)
    doctor_directories(options, check)
    client = LinkClient(options.config_file, os.environ)
    if client.connected:
        daemon = client.control("status")["daemon"]
        check(True, "a daemon runs, pid %d" % daemon["pid"])
        check(daemon["version"] == __version__, "the daemon is of version %s, this file of %s"
              % (daemon["version"], __version__), "run `mcpx stop`; the next request starts the new one")
        check(not daemon["configError"], "the daemon uses the configuration as it is",
              "it keeps the last good one: %s" % daemon["configError"])
    else:
        check(True, "no daemon runs; the first `serve` starts one")
    text = "\n".join("%s %s%s" % ("ok   " if row["ok"] else "WRONG", row["what"],
                                  "\n      -> " + row["fix"] if row["fix"] else "") for row in checks)
    return Output({"checks": checks}, text, 0 if all(row["ok"] for row in checks) else 1)


def doctor_servers(config, check):
    """Is every server's command there, and its directory?"""
    path = os.environ.get("PATH") or os.defpath
    for server in config.servers.values():
        if server.disabled:
            continue
        if server.broken:
            check(False, "server %s: %s" % (server.name, server.broken), "correct its entry")
            continue
        try:
            command = expand_variables(server.command, os.environ)
            for text in server.args + list(server.env.values()):
                expand_variables(text, os.environ)
        except StartFailed as error:
            check(False, "server %s: %s" % (server.name, error.message), "set the variable where your hosts start")
            continue
        if "/" in command:
            command = os.path.normpath(os.path.join(server.directory, os.path.expanduser(command)))
        found = shutil.which(command, path=path)
        check(found, "server %s: command %s %s" % (server.name, command, "is %s" % found if found else "was not found"),
              "install it, or write its whole path; PATH here is %s" % path)
        if server.cwd and "{" not in server.cwd and "$" not in server.cwd:
            cwd = os.path.normpath(os.path.join(server.directory, os.path.expanduser(server.cwd)))
            check(os.path.isdir(cwd), "server %s: its directory %s" % (server.name, cwd), "create it or change cwd")
            readable = not os.path.isdir(cwd) or os.access(cwd, os.R_OK | os.X_OK)
            check(readable, "server %s: its directory can be read" % server.name,
                  "grant access (on macOS: Privacy & Security, Files and Folders), or start the daemon in a terminal")


def doctor_directories(options, check):
    """Can state be kept, and does the socket's path work?"""
    paths = DaemonPaths(options.config_file, os.environ)
    try:
        os.makedirs(paths.state, 0o700, exist_ok=True)
        writable = os.access(paths.state, os.W_OK)
    except OSError:
        writable = False
    check(writable, "the state directory %s can be written" % paths.state, "make it yours, or set XDG_STATE_HOME")
    size = len(os.fsencode(paths.socket))
    check(size <= MAX_SOCKET_PATH, "the socket's path %s has %d bytes" % (paths.socket, size),
          "a unix socket's path has at most %d bytes; set XDG_RUNTIME_DIR to a shorter one" % MAX_SOCKET_PATH)


def cmd_asks(options):
    """List the questions of servers that nobody has answered yet."""
    data = running_daemon(options).control("asks")
    text = table(data["questions"], [
        ("ID", "id"), ("SERVER", "server"), ("ASKS", "method"), ("OF", lambda r: r["host"] or "anybody: %s" % r["why"]),
        ("LEFT", lambda r: age(r["deadline"]) if r["deadline"] else "-"),
        ("MESSAGE", lambda r: str(r["params"].get("message", ""))[:60])])
    return Output(data, text if data["questions"] else "no question is open")


def cmd_answer(options):
    """Answer an open question: accept with key=value content, decline or cancel."""
    content = {}
    for pair in options.content:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError("%s: write the content as key=value" % pair)
        content[name] = typed_argument(value, None)
    from urllib.parse import quote
    args = {"action": options.action, "content": content}
    data = running_daemon(options).control("asks/" + quote(options.id, safe=""), args)
    return Output(data, "answered question %s" % data["answered"])


def cmd_url(options):
    """Show the URL of a server over HTTP, and the header that opens it."""
    config = load_config(options.config_file)
    address = config.get("http.listen")
    if not address:
        raise Failed('HTTP is off; set "http.listen": "127.0.0.1:7337" in the top "mcpx" object')
    client = running_daemon(options, start=True)
    data = {"url": "http://%s/mcp/%s" % (address, options.server or "<server>"), "headers": {}}
    if config.get("http.auth") != "none":
        data["headers"]["Authorization"] = "Bearer " + client.control("token")["token"]
    return Output(data, "\n".join([data["url"]] + ["%s: %s" % pair for pair in data["headers"].items()]))


def cmd_demo_server(options):
    """Be the built-in demo server on stdin and stdout."""
    if options.start_delay:
        time.sleep(options.start_delay)
    DemoServer(options.name, options.page, options.era).run()
    return 0


# -- mcpx demo -------------------------------------------------------------------

class DemoHost:
    """A tiny host for `mcpx demo`: launches `mcpx serve` as an agent would."""

    def __init__(self, directory, env, server, session=None):
        environment = dict(env, **({"MCPX_SESSION_ID": session} if session else {}))
        command = own_command("serve", "--config", env["MCPX_CONFIG"], server)
        self.process = subprocess.Popen(command, cwd=directory, env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)
        self.last_id = 0
        self.request("initialize", {"protocolVersion": LATEST_LEGACY, "capabilities": {},
                                    "clientInfo": {"name": "demo-host", "version": __version__}})
        self.send(notification("notifications/initialized"))

    def send(self, message):
        """Write one message to the shim."""
        self.process.stdin.write(encode_json(message) + b"\n")
        self.process.stdin.flush()

    def request(self, method, params):
        """Send a request and wait for its answer."""
        self.last_id += 1
        self.send({"jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params})
        for line in self.process.stdout:
            message = json.loads(line)
            if message.get("id") == self.last_id and "method" not in message:
                if "error" in message:
                    raise Failed(message["error"]["message"])
                return message["result"]
        raise Failed("the shim has ended")

    def tool(self, tool, **arguments):
        """Call a tool and return its result."""
        return self.request("tools/call", {"name": tool, "arguments": arguments})

    def close(self):
        """End as a host does: close the shim's stdin."""
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


def cmd_demo(_options):
    """Several hosts, every scope, the built-in server: who reached which process, and saw what."""
    root = tempfile.mkdtemp(prefix="mcpx-demo-")
    try:
        return run_demo(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def run_demo(root):
    """Play the demo in a directory of its own, with a daemon of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MCPX_")}
    runtime = os.path.join(root, "run")
    os.mkdir(runtime, 0o700)
    config = os.path.join(root, "config.json")
    env.update(MCPX_CONFIG=config, XDG_STATE_HOME=os.path.join(root, "state"), XDG_RUNTIME_DIR=runtime)
    entry = own_command("demo-server")
    servers = {scope: {"command": entry[0], "args": entry[1:], "mcpx": {"scope": scope}} for scope in SCOPES}
    servers["exclusive"] = {"command": entry[0], "args": entry[1:], "mcpx": {"scope": "global", "sharing": "exclusive"}}
    with open(config, "w", encoding="utf-8") as file:
        json.dump({"mcpServers": servers}, file)
    project = make_demo_project(root)
    cast = [("Editor", project, None, None), ("Agent", project, "alpha", None),
            ("Helper", os.path.join(project, "src"), "beta", "alpha"),
            ("Visitor", os.path.join(root, "feature"), "gamma", None)]
    rows, started = [], time.monotonic()
    try:
        for scope in SCOPES:
            rows.append(play_scope(scope, cast, env))
        shown = table(rows, [("SCOPE", "scope")] + [(name, name) for name, *_ in cast]
                      + [("PROCESSES", "processes")])
    finally:
        client = LinkClient(config, env)
        if client.connected:
            wait_for_end(client.control("stop", {}, STOP_WAIT_S)["pid"])
    text = ("Four hosts call the same small server through mcpx over stdio, once under each scope. Each host keeps\n"
            "its initial in the server's memory and then reads who is there: #n is the process that answered,\n"
            "behind it whose initials this host saw there.\n\n"
            "  Editor   in the repository, unnamed session\n"
            "  Agent    in the repository, session alpha\n"
            "  Helper   in its folder src, session beta, parent session alpha\n"
            "  Visitor  in a second work tree of the repository, session gamma\n\n%s\n\n"
            "%d scopes, %d calls, %.1f s, one daemon; every process is gone again."
            % (shown, len(SCOPES), len(SCOPES) * len(cast) * 2, time.monotonic() - started))
    return Output({"rows": rows}, text)


def make_demo_project(root):
    """Lay out a repository with a linked work tree, as git would, without running git."""
    project, feature = os.path.join(root, "project"), os.path.join(root, "feature")
    linked = os.path.join(project, ".git", "worktrees", "feature")
    for path in (os.path.join(project, "src"), feature, linked, os.path.join(project, ".git", "objects"),
                 os.path.join(project, ".git", "refs")):
        os.makedirs(path, exist_ok=True)
    for path, text in ((os.path.join(project, ".git", "HEAD"), "ref: refs/heads/main\n"),
                       (os.path.join(linked, "HEAD"), "ref: refs/heads/feature\n"),
                       (os.path.join(linked, "commondir"), "../..\n"),
                       (os.path.join(linked, "gitdir"), os.path.join(feature, ".git") + "\n"),
                       (os.path.join(feature, ".git"), "gitdir: %s\n" % linked)):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return project


def play_scope(scope, cast, env):
    """Let every host write its name, then let every host read: one row of the demo's table."""
    hosts, row, pids = [], {"scope": scope}, []
    try:
        for _, directory, session, parent in cast:
            extra = {"MCPX_PARENT_SESSION_ID": parent} if parent else {}
            hosts.append(DemoHost(directory, dict(env, **extra), scope, session))
        for (name, *_), host in zip(cast, hosts):
            host.tool("set", name=name[0], value=name)
        for (name, *_), host in zip(cast, hosts):
            state = json.loads(host.request("resources/read", {"uri": "demo://state"})["contents"][0]["text"])
            if state["pid"] not in pids:
                pids.append(state["pid"])
            seen = "".join(other[0] for other, *_ in cast if other[0] in state["variables"]) or "-"
            row[name] = "#%d %s" % (pids.index(state["pid"]) + 1, seen)
        row["processes"] = len(pids)
    finally:
        for host in hosts:
            host.close()
    return row


# -- the parser ---------------------------------------------------------------------

class Options:
    """The options of a command line."""

    def __init__(self, **values):
        self.__dict__.update(values)


class Command:
    """One row: a command's function, its line of help, and its arguments for argparse."""

    def __init__(self, function, text, *arguments, json_output=True, hidden=False):
        self.function, self.text, self.arguments = function, text, arguments
        self.json_output, self.hidden = json_output, hidden

    def plain_options(self, words):
        """Return the Options of words without an option among them; None where argparse has to say what they are.

        Importing argparse takes as long as a call of a tool does. Any dash goes to argparse but
        that of --json, which programs give with every command.
        """
        values, many = {}, None
        if self.json_output:
            values["json"] = "--json" in words
            words = [word for word in words if word != "--json"]
        if any(word.startswith("-") for word in words):
            return None
        words = list(words)
        for names, options in self.arguments:
            name, count = names[0], options.get("nargs")
            if name.startswith("-"):
                name = next(name for name in names if name.startswith("--"))[2:].replace("-", "_")
                values[name] = options.get("default", False if options.get("action") == "store_true" else None)
            elif count == "*":
                many = name
            elif words:
                values[name] = words.pop(0)
                if values[name] not in options.get("choices", (values[name],)):
                    return None
            elif count == "?":
                values[name] = None
            else:
                return None              # it is missing
        if many is not None:
            values[many] = words
        elif words:
            return None
        return Options(**values)

    def parser(self, name):
        """Return the argparse parser of the command, called `name`."""
        parser = argparse.ArgumentParser(prog="mcpx.py " + name, description=self.text)
        for names, options in self.arguments:
            parser.add_argument(*names, **options)
        if self.json_output:
            parser.add_argument("--json", action="store_true", help="print data for programs")
        return parser


def argument(*names, **options):
    """Return the parameters of one add_argument call."""
    return names, options


_SESSION = argument("--session", metavar="NAME", help="call as this session")
_PARENT = argument("--parent-session", metavar="NAME", help="the session that this one belongs to")

COMMANDS = {
    "serve": Command(cmd_serve, "be the MCP server that a host launches",
                     argument("names", nargs="*", metavar="SERVER"),
                     argument("--standalone", action="store_true", help="without a daemon"),
                     _SESSION, json_output=False),
    "daemon": Command(cmd_daemon, "be the daemon, in the foreground (for systemd, launchd)",
                      argument("--ready-fd", type=int, help="say there whether the start worked"),
                      argument("--check-fd", type=int, help="look at a snapshot: can this code take over?"),
                      argument("--resume-fd", type=int, help="take over, with the snapshot there"),
                      argument("--previous", help="the code to go back to"),
                      argument("--failed", help="why the code after this one did not take over"), json_output=False),
    "status": Command(cmd_status, "what runs, for whom, and why"),
    "ls": Command(cmd_ls, "list the servers, or what one offers", argument("server", nargs="?")),
    "call": Command(cmd_call, "call a tool", argument("tool", metavar="SERVER.TOOL"),
                    argument("arguments", nargs="*", metavar="key=value"), argument("--json-args", metavar="JSON"),
                    argument("--timeout", type=float, metavar="SECONDS"), _SESSION, _PARENT),
    "why": Command(cmd_why, "which instance this caller would reach, and why", argument("server"), _SESSION, _PARENT),
    "stop": Command(cmd_stop, "end an instance, a server, or the daemon and all it runs",
                    argument("name", nargs="?", metavar="SERVER|INSTANCE")),
    "restart": Command(cmd_restart, "end and start anew", argument("name", metavar="SERVER|INSTANCE")),
    "reload": Command(cmd_reload, "read the configuration again, or go on with this file's code",
                      argument("--upgrade", action="store_true",
                               help="have the daemon go on with the code of this file; "
                               "hosts, servers and calls stay")),
    "logs": Command(cmd_logs, "show the daemon's log, or a server's stderr", argument("server", nargs="?"),
                    argument("-f", "--follow", action="store_true"),
                    argument("-n", "--lines", type=int, default=50), json_output=False),
    "settings": Command(cmd_settings, "every setting, its value and meaning"),
    "config": Command(cmd_config, "show the configuration, secrets masked",
                      argument("--check", action="store_true", help="only say what is wrong with it")),
    "asks": Command(cmd_asks, "questions of servers that wait for an answer"),
    "answer": Command(cmd_answer, "answer one", argument("id"),
                      argument("action", choices=("accept", "decline", "cancel")),
                      argument("content", nargs="*", metavar="key=value")),
    "url": Command(cmd_url, "where a server is over HTTP", argument("server", nargs="?")),
    "doctor": Command(cmd_doctor, "look for what commonly goes wrong"),
    "demo": Command(cmd_demo, "show the scopes with a built-in server"),
    "demo-server": Command(cmd_demo_server, "be the built-in server", argument("--name", default="demo"),
                           argument("--start-delay", type=float, default=0.0),
                           argument("--page", type=int, default=0),
                           argument("--era", choices=("legacy", "modern", "both"), default="both"),
                           json_output=False, hidden=True),
}


def usage_text():
    """Return the overview of all commands."""
    lines = ["mcpx %s: one pool of MCP servers for every coding agent on this machine" % __version__, "",
             "usage: mcpx.py COMMAND [--config FILE] …", ""]
    lines += ["  %-10s %s" % (name, command.text) for name, command in COMMANDS.items() if not command.hidden]
    return "\n".join(lines + ["", "mcpx.py COMMAND --help tells more of one."])


def parse_command_line(arguments):
    """Return (command, options). Builds the parser of the asked command only. Raises UsageError."""
    config, rest = split_config_option(arguments)
    if not rest or rest[0] in ("-h", "--help", "help"):
        print(usage_text())
        raise SystemExit(0 if rest else 2)
    if rest[0] in ("-V", "--version"):
        print("mcpx %s" % __version__)
        raise SystemExit(0)
    command = COMMANDS.get(rest[0])
    if command is None:
        raise UsageError("there is no command %s; mcpx.py --help lists them" % rest[0])
    options = command.plain_options(rest[1:]) or command.parser(rest[0]).parse_args(rest[1:])
    options.config_file = config_path(config, os.environ)
    return command, options


def split_config_option(arguments):
    """Return the value of --config and the other arguments; it may stand anywhere before `--`."""
    config, rest, position = None, [], 0
    while position < len(arguments):
        part = arguments[position]
        if part == "--":
            rest += arguments[position:]
            break
        if part == "--config":
            if position + 1 >= len(arguments):
                raise UsageError("--config takes a file")
            config, position = arguments[position + 1], position + 1
        elif part.startswith("--config="):
            config = part[len("--config="):]
        else:
            rest.append(part)
        position += 1
    return config, rest


# Roles that live long: they run from cached byte code, however they were launched.
LONG_LIVED = ("serve", "daemon", "demo-server")


def run_from_byte_code(arguments):
    """Exec into the cached form where this process compiled the file itself (`python3 mcpx.py`).

    Compiling costs memory for as long as the process lives; a long-lived one gives it back.
    """
    role = next((part for part in arguments if not part.startswith("-")), None)
    if "--config" in arguments and arguments.index("--config") == 0:
        role = arguments[2] if len(arguments) > 2 else None
    if __name__ == "__main__" and role in LONG_LIVED and sys.executable:
        command = own_command(*arguments)
        try:
            os.execv(command[0], command)
        except OSError:
            return                       # slower to start and larger, otherwise the same


def plain_serve(arguments):
    """Return (names, configuration file) of a `serve NAME …` without another option, as hosts launch it; else None."""
    try:
        config, rest = split_config_option(arguments)
    except UsageError:
        return None                      # the parser says so
    if len(rest) < 2 or rest[0] != "serve" or any(part.startswith("-") for part in rest):
        return None
    return rest[1:], config_path(config, os.environ)


def main():
    """Run the command line, and end."""
    arguments, options = sys.argv[1:], None
    if not IS_PART:
        run_from_byte_code(arguments)
    plain = plain_serve(arguments)
    if plain is not None and not IS_PART and keep_part():
        start_over(arguments)
    try:
        if plain is not None:
            status = run_shim(plain[0], plain[1], dict(os.environ))
        else:
            load_rest()
            command, options = parse_command_line(arguments)
            output = command.function(options)
            status = show(output, options) if isinstance(output, Output) else output or 0
    except UsageError as error:
        load_rest()
        status = complain(error, 2, options)
    except Failed as error:
        status = complain(error, 1, options)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    end_process(status)


def end_process(status):
    """End without taking everything apart first: that takes as long as some commands."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError, OSError):
            continue                     # closed, full or gone: `show` has told it, or nobody is left to be told
    os._exit(status)


def show(output, options):
    """Print what a command gave back, and return the exit status. Raises Failed where it cannot be written."""
    text = json.dumps(output.data, indent=2) if getattr(options, "json", False) else output.text
    if sys.stdout is None:
        raise Failed("the output cannot be written: it is closed")
    try:
        print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise Failed("the output cannot be written: %s" % error)
    return output.status


def complain(error, status, options):
    """Say on stderr what went wrong, and return the exit status."""
    if getattr(options, "json", False):
        print(json.dumps({"error": {"message": str(error)}}))
    sys.stderr.write("mcpx: %s\n" % error)
    return status


if __name__ == "__main__":
    main()
