"""Hosts of both eras over both transports, whose bytes come to harm on the way, for `faults.py`.

A host hands every message that it hears to `hear(host, message)` of the driver and keeps no opinion of its own. What
happens to the next line that it writes is in `harms`: a queue of orders, taken one per line.
"""

import asyncio
import json
import os
import signal

from place import MCPX

META = "io.modelcontextprotocol/"
REVISIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN = "2026-07-28"
LINE_LIMIT = 1 << 26

# A connection that says nothing for this long is given up; calls end earlier than that.
HTTP_LIMIT_S = 40


class Gone(Exception):
    """The other side is not there (any more)."""


def damaged(data, order):
    """The bytes that arrive of a line, for the harms that change it."""
    at = max(1, int(order["at"] * (len(data) - 1)))
    if order["fault"] == "twice":
        return data * 2
    if order["fault"] == "glue":
        return data[:at] + data  # its end is lost, and another line follows at once
    byte = {"ff": b"\xff", "nul": b"\0", "newline": b"\n"}[order["fault"]]
    return data[:at] + byte + data[at + 1 :]


async def write_harmed(write, drain, data, order):
    """Write one line through `write`, with what `order` says done to it. Returns whether it arrived whole, once."""
    fault = order["fault"] if order else None
    if fault == "drop":
        return False
    if fault == "delay":
        await asyncio.sleep(order["seconds"])
    elif fault == "split":
        step = max(1, len(data) // order["pieces"])
        for start in range(0, len(data), step):
            write(data[start : start + step])
            await drain()
            await asyncio.sleep(0.002)
        return True
    elif fault is not None:
        data = damaged(data, order)
    write(data)
    await drain()
    return fault in (None, "delay")


class Host:
    """What all kinds have in common. `token` is the name that only this incarnation of it has."""

    relayed = False

    def __init__(self, driver, token, servers, revision, cwd, session):
        self.driver, self.token, self.servers, self.revision = driver, token, servers, revision
        self.cwd, self.session = cwd, session
        self.harms = []
        self.dead = False
        self.born = {}  # (server, owner) -> the process that answered last
        self.numbers = 0

    @property
    def modern(self):
        return self.revision == MODERN

    def request_id(self):
        self.numbers += 1
        return "%s.%d" % (self.token, self.numbers)

    def meta(self, **more):
        meta = dict(more)
        if self.modern:
            capabilities = {"elicitation": {"form": {}}}
            meta.update(
                {
                    META + "protocolVersion": MODERN,
                    META + "clientCapabilities": capabilities,
                    META + "clientInfo": {"name": "faults", "version": "1"},
                }
            )
        return meta

    def tool_name(self, server, tool):
        return tool if len(self.servers) == 1 else "%s_%s" % (server, tool)

    def hello(self):
        capabilities = {"elicitation": {}} if self.revision >= "2025-06-18" else {}
        return {
            "jsonrpc": "2.0",
            "id": "hello." + self.token,
            "method": "initialize",
            "params": {
                "protocolVersion": self.revision,
                "capabilities": capabilities,
                "clientInfo": {"name": "faults", "version": "1"},
            },
        }


class StdioHost(Host):
    """A host behind `mcpx.py serve`."""

    kind = "stdio"

    async def start(self, place, **more):
        env = place.env(MCPX_PYTHON=place.python, **more)
        if self.session:
            env["MCPX_SESSION_ID"] = self.session
        self.stderr_path = place.root / ("%s.err" % self.token.partition("~")[0])
        with open(self.stderr_path, "wb") as errors:
            self.process = await asyncio.create_subprocess_exec(
                str(MCPX),
                "serve",
                *self.servers,
                env=env,
                cwd=str(self.cwd),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=LINE_LIMIT
            )
        self.pid = self.process.pid
        self.queue = asyncio.Queue()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]
        if not self.modern:
            self.welcome = asyncio.get_running_loop().create_future()
            self.post(self.hello())
            await asyncio.wait_for(self.welcome, 60)
            self.post({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def post(self, message, on_written=None, harm=False):
        """Queue a message; `on_written(order)` is told what happened to it on the way."""
        self.queue.put_nowait((json.dumps(message).encode() + b"\n", on_written, harm))

    async def _write(self):
        writer = self.process.stdin
        while True:
            data, on_written, harm = await self.queue.get()
            order = self.harms.pop(0) if harm and self.harms else None
            if on_written is not None:
                on_written(order)
            try:
                await write_harmed(writer.write, writer.drain, data, order)
            except (OSError, RuntimeError):
                return  # the shim has ended; whoever ended it knows

    async def _read(self):
        while True:
            await self.may_read.wait()
            try:
                line = await self.process.stdout.readline()
            except (OSError, ValueError):
                break
            if not line:
                break
            try:
                messages = json.loads(line)
            except ValueError:
                self.driver.problem("host %s was sent what is not JSON: %r" % (self.token, line[:200]))
                continue
            for message in messages if isinstance(messages, list) else [messages]:
                if message.get("id") == "hello." + self.token and not self.welcome.done():
                    self.welcome.set_result(message)
                else:
                    self.driver.hear(self, message)
        if not self.dead:
            self.dead = True
            self.driver.problem("the shim of host %s ended by itself: %s" % (self.token, self.complaint()))

    def complaint(self):
        return self.stderr_path.read_text(errors="replace")[-600:]

    def signal(self, number):
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # it was faster

    async def end(self, how):
        """How a host goes: "orderly", "kill" (its shim), or "vanish" (both pipes closed in mid-line)."""
        self.dead = True
        for task in self.tasks:
            task.cancel()
        if how == "kill":
            self.signal(signal.SIGKILL)
        else:
            if how == "vanish":
                self.process.stdin.write(b'{"jsonrpc":"2.0","id":"half')
            self.process.stdin.close()
        self.signal(signal.SIGCONT)
        try:
            await asyncio.wait_for(self.process.wait(), 20)
        except asyncio.TimeoutError:
            self.driver.problem("the shim of host %s did not end within 20 s of its host" % self.token)
            self.process.kill()
            await self.process.wait()
        if how == "orderly" and self.process.returncode != 0:
            self.driver.problem("a shim ended with status %s: %s" % (self.process.returncode, self.complaint()))
        self.process._transport.close()


class RelayedHost(StdioHost):
    """A host whose shim reaches the daemon through a relay of ours: that wire can be delayed, split and cut.

    The daemon sees the driver's process at the other end of every relay, so these hosts name their sessions and have
    one process in common.
    """

    kind = "stdio"
    relayed = True

    async def start(self, place):
        self.session = self.session or "relayed-" + self.token
        self.link_harms, self.links = [], set()
        runtime = place.root / ("q" + self.token.partition("~")[0])
        (runtime / "mcpx").mkdir(parents=True, mode=0o700)
        os.chmod(runtime, 0o700)
        path = runtime / "mcpx" / os.path.basename(self.driver.watch.socket_path())
        self.server = await asyncio.start_unix_server(self._on_shim, path=str(path), limit=LINE_LIMIT)
        await super().start(place, XDG_RUNTIME_DIR=str(runtime))

    async def _on_shim(self, reader, writer):
        self.links.add(writer)
        try:
            upstream = await self._reach_daemon()
            if upstream is not None:
                self.links.add(upstream[1])
                both = [self._pump(reader, upstream[1]), self._pump(upstream[0], writer)]
                await asyncio.wait([asyncio.ensure_future(one) for one in both], return_when=asyncio.FIRST_COMPLETED)
                upstream[1].close()
                self.links.discard(upstream[1])
        except asyncio.CancelledError:
            return  # the run is over
        finally:
            writer.close()
            self.links.discard(writer)

    async def _reach_daemon(self):
        """A connection to the daemon. A shim that is refused would start one, in the relay's place: let it wait."""
        for _ in range(80):
            path = self.driver.watch.socket_path()
            try:
                if path is not None:
                    return await asyncio.open_unix_connection(path, limit=LINE_LIMIT)
            except OSError:
                pass  # it has just died, or is not there yet
            await asyncio.sleep(0.05)
        return None

    async def _pump(self, reader, writer):
        try:
            while True:
                data = await reader.read(1 << 16)
                if not data:
                    break
                order = self.link_harms.pop(0) if self.link_harms else {"fault": None}
                if order["fault"] == "cut":
                    writer.write(data[: int(order["at"] * len(data))])
                    await writer.drain()
                    break
                await write_harmed(writer.write, writer.drain, data, order if order["fault"] else None)
        except OSError:
            return  # the other side has gone

    async def end(self, how):
        await super().end(how)
        self.server.close()
        for link in list(self.links):
            link.close()


class HttpHost(Host):
    """A host that speaks HTTP: a connection per request, which may be cut at any time."""

    kind = "http"

    async def start(self, _place):
        self.pid = None
        self.session_id = None
        self.sessions = set()  # all that it has heard of, to end them
        self.tasks = set()
        if not self.modern:
            await self._initialize()

    async def _initialize(self):
        for _ in range(40):
            try:
                _status, headers, messages = await self._exchange(self.hello(), None)
            except Gone:
                await asyncio.sleep(0.25)  # there is no daemon at the moment
                continue
            self.session_id = headers.get("mcp-session-id")
            if self.session_id:
                await self._exchange({"jsonrpc": "2.0", "method": "notifications/initialized"}, None)
                return
            await asyncio.sleep(0.25)
        self.driver.problem("an HTTP host could not initialize: %s" % messages)

    def _head(self, message, length):
        lines = [
            "POST /mcp/%s HTTP/1.1" % ",".join(self.servers),
            "Host: localhost",
            "Content-Type: application/json",
            "Accept: application/json, text/event-stream",
            "Content-Length: %d" % length,
            "Connection: close",
            "Mcpx-Cwd: %s" % self.cwd,
        ]
        if self.session:
            lines.append("Mcpx-Session: %s" % self.session)
        if self.modern:
            lines += [
                "MCP-Protocol-Version: %s" % MODERN,
                "Mcp-Method: %s" % message["method"],
                "Mcp-Name: %s" % message["params"]["name"],
            ]
        elif self.session_id:
            lines += ["Mcp-Session-Id: %s" % self.session_id, "MCP-Protocol-Version: %s" % self.revision]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def _exchange(self, message, order):
        """One POST; returns (status, headers, messages). Messages of a stream are handed on as they come."""
        body = json.dumps(message).encode()
        fault = order["fault"] if order else None
        if fault in ("ff", "nul"):
            # Only bytes of the body: a damaged head is refused as a whole, which fuzz.py looks at.
            body = damaged(body, order)
        data = self._head(message, len(body)) + body
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.driver.port, limit=LINE_LIMIT)
        except OSError as error:
            raise Gone("no connection: %s" % error) from None
        try:
            if fault == "cut":
                writer.write(data[: int(order["at"] * len(data))])
                await writer.drain()
                raise Gone("cut off in the request")
            if fault in ("split", "delay"):
                await write_harmed(writer.write, writer.drain, data, order)
            else:
                writer.write(data)
                await writer.drain()
            if fault == "hangup":
                await asyncio.sleep(order["seconds"])
                raise Gone("hung up before the answer")
            return await asyncio.wait_for(self._answer(reader), HTTP_LIMIT_S)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            raise Gone("the connection ended: %r" % error) from None
        finally:
            writer.transport.abort()

    async def _answer(self, reader):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        if headers.get("mcp-session-id"):
            self.sessions.add(headers["mcp-session-id"])
        if headers.get("transfer-encoding") != "chunked":
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            return status, headers, [json.loads(body)] if body else []
        events, last = b"", []
        while True:
            size = int((await reader.readuntil(b"\r\n")).strip(), 16)
            events += (await reader.readexactly(size + 2))[:-2]
            while b"\n\n" in events:
                event, _, events = events.partition(b"\n\n")
                for line in event.split(b"\n"):
                    if line.startswith(b"data: ") and line[6:].strip():
                        message = json.loads(line[6:])
                        if "method" in message:
                            self.driver.hear(self, message)
                        else:
                            last.append(message)
            if not size:
                return status, headers, last

    def post(self, message, on_written=None, harm=False):
        task = asyncio.ensure_future(self._post(message, on_written, harm))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _post(self, message, on_written, harm):
        order = self.harms.pop(0) if harm and self.harms else None
        if on_written is not None:
            on_written(order)
        try:
            status, _headers, messages = await self._exchange(message, order)
        except Gone as error:
            self.driver.unanswered(self, message, str(error))
            return
        if status in (400, 404) and not self.modern and not any("id" in answer for answer in messages):
            # The session went with its daemon, or the body cannot be read: a host may ask again, if it likes.
            self.driver.unanswered(self, message, "status %d: %s" % (status, messages))
            return
        if not messages and "id" in message and "method" in message:
            self.driver.unanswered(self, message, "status %d without an answer" % status)
        for answer in messages:
            self.driver.hear(self, answer)

    async def again(self):
        """Start over after the daemon has gone: its sessions are gone too."""
        for attempts_left in (2, 1, 0) if not self.modern else ():
            self.session_id = None
            try:
                await self._initialize()
                return
            except Gone:
                # The next fault may have hit the new daemon already.
                if not attempts_left:
                    raise
                await asyncio.sleep(0.5)

    def signal(self, _number):
        """There is no process."""

    async def end(self, _how):
        self.dead = True
        for task in list(self.tasks):
            task.cancel()
        for session_id in self.sessions:
            try:
                _reader, writer = await asyncio.open_connection("127.0.0.1", self.driver.port)
            except OSError:
                return
            writer.write(
                (
                    "DELETE /mcp/%s HTTP/1.1\r\nHost: localhost\r\nMcp-Session-Id: %s\r\nConnection: close\r\n\r\n"
                    % (",".join(self.servers), session_id)
                ).encode()
            )
            await asyncio.wait_for(_reader.read(), 10)
            writer.close()
